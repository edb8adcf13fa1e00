"""Measurements to Markdown, and into the marked section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.layout import Linear
from prefill_runtime.scheduler.planner import Planner

from benchmarks.engine import targets, trace
from benchmarks.engine.machine import ROOT
from benchmarks.engine.runner import CHECK_KEY
from benchmarks.engine.sites import EMULATED, K
from benchmarks.engine.stats import paired_ratio
from benchmarks.engine.store import Measurement, Store, best_stock, median, shares

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
BUBBLES = ("bubble_fill", "bubble_imbalance", "bubble_drain")
Rounds = dict[int, Measurement]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tokens(length: int) -> str:
    return f"{length // K}K" if length % K == 0 else str(length)


def seconds(rounds: Rounds) -> dict[int, float]:
    return {number: made.seconds for number, made in rounds.items()}


def waiting(rounds: Rounds) -> list[str]:
    """Percent of all time that is not idle: bubble with its causes, fill + imbalance + drain; transfers."""
    found = shares(rounds.values())
    if not found:
        return ["", ""]
    parts = [100 * found.get(state, 0.0) for state in BUBBLES]
    causes = " + ".join(f"{part:.1f}" for part in parts)
    return [f"{sum(parts):.1f} ({causes})", f"{100 * found.get('transfer', 0.0):.1f}"]


def suite_table(store: Store, suite: str) -> str:
    rows = []
    for length in store.lengths(suite):
        if length == CHECK_KEY[0]:
            continue
        found = store.of(suite, length)
        best = best_stock(found)
        for arm in sorted(found, key=lambda name: (not name.startswith("stock "), len(name), name)):
            rounds = found[arm]
            ratio = paired_ratio(seconds(rounds), seconds(found[best])) if best else None
            took = sorted(seconds(rounds).values())
            spread = f"{took[0]:.2f}-{took[-1]:.2f}" if len(took) > 1 else ""
            note = ", ".join({made.fallback for made in rounds.values() if made.fallback})
            rows.append([
                tokens(length), f"**{arm}**" if arm == best else arm, f"{median(rounds.values()):.3f}", spread,
                str(len(took)), "1" if arm == best else str(ratio or ""),
                f"{length / median(rounds.values()):,.0f}", *waiting(rounds), note,
            ])  # fmt: skip
    head = ["prompt", "arm", "TTFT, s", "range", "rounds", "ratio to best stock (95%)", "tokens/s",
            "bubble, % (fill + imbalance + drain)", "transfers, %"]  # fmt: skip
    if any(row[-1] for row in rows):
        return table([*head, "fell back"], rows)
    return table(head, (row[:-1] for row in rows))


def agreement(store: Store, suite: str) -> str:
    """How many answers equal the majority's, of those that every arm gave to the same prompts."""
    same = all_answers = 0
    for length in store.lengths(suite):
        by_round: dict[int, list[list[int]]] = {}
        for rounds in store.of(suite, length).values():
            for number, made in rounds.items():
                by_round.setdefault(number, []).append(made.tokens)
        for answers in by_round.values():
            same += max(answers.count(answer) for answer in answers)
            all_answers += len(answers)
    return f"Answers to equal prompts that agree among the arms: {same} of {all_answers}."


def emulated_table(store: Store, suite: str, ranks: int) -> str:
    """Measured beside what the planner's model predicts for the same device."""
    rows = []
    for length in store.lengths(suite):
        found = store.of(suite, length)
        best = best_stock(found)
        if length == CHECK_KEY[0] or best is None or "Planned" not in found:
            continue
        plan = Planner(Linear(ranks), EMULATED, Bounds(32 * K, quantum=128)).plan(length)
        fixed, planned = median(found[best].values()), median(found["Planned"].values())
        rows.append([
            tokens(length), f"{fixed:.2f} ({best})", f"{plan.fixed[1]:.2f}", f"{fixed / plan.fixed[1]:.3f}",
            f"{planned:.2f}", f"{plan.seconds:.2f}", f"{planned / plan.seconds:.3f}", f"{planned / fixed:.3f}",
        ])  # fmt: skip
    head = ["prompt", "stock, best fixed, s", "model, s", "ratio", "Planned, s", "model, s", "ratio", "Planned / stock"]
    return table(head, rows)


def document(store: Store) -> str:
    made = store.machine()
    about = (
        f"{made['processor']}, {made['cores']} cores, {made['memory_gib']} GiB, Linux {made['kernel']}; "
        f"vLLM {made['vllm']}, torch {made['torch']}, Python {made['python']}; commit {made['commit']}; "
        f"load average before the start {made['load_before']}."
    )
    parts = [f"Machine: {about}", targets.section(store)]
    for suite in store.suites():
        if suite.startswith("emulated-p"):
            ranks = int(suite.removeprefix("emulated-p"))
            parts.append(f"### Emulated device, P = {ranks}\n\n{emulated_table(store, suite, ranks)}")
            parts.append(suite_table(store, suite))
        elif suite.startswith("trace"):
            parts.append(f"### Trace: {suite.partition(' ')[2]}\n\n{trace.table_of(store, suite, table)}")
        else:
            parts.append(f"### {TITLES[suite]}\n\n{suite_table(store, suite)}\n\n{agreement(store, suite)}")
    return "\n\n".join(parts) + "\n"


TITLES = {
    "toy": "Long-context toy on real CPU compute, P = 2",
    "smollm2": "SmolLM2-135M on real CPU compute, P = 2",
    "foldback": "Folded back: the same toy, P = 2 with two stages per rank",
    "windows": "Sliding windows: the toy with one in every other layer, P = 2, folded back",
    "ablation": "Steps of the folded order on the emulated device with slow transfers, P = 2, three prompts at once",
    "overhead": "What the plugin costs: P = 1, the same chunk",
}


def write(store: Store, page: Path = PAGE) -> None:
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page.name} has no section between {BEGIN} and {END}")
    head, _, rest = text.partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{document(store)}{END}{rest.partition(END)[2]}")
