"""prefillctl: simulate, plan, compare, replay and draw prefill pipelines, without any engine.

Impossible input ends with exit code 2 and one line that names the field, the value and what is allowed.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Optional

import typer
from prefill_runtime.cli import record, report
from prefill_runtime.cli.replay import Replayed, picture, replay, stretch_to
from prefill_runtime.cli.run import POLICIES, Setup, default_chunk, layout_named, run
from prefill_runtime.cli.trace import read_trace
from prefill_runtime.scheduler.actions import from_timeline, to_text
from prefill_runtime.scheduler.costfile import parse_cost
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.grid import RATIO
from prefill_runtime.scheduler.simulate import Request, Rules
from rich.console import Console

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help=__doc__)
console = Console()

Ranks = Annotated[int, typer.Option(help="pipeline ranks P")]
Cost = Annotated[Path, typer.Option(help="cost file (JSON)")]
LayoutName = Annotated[str, typer.Option(help="linear or foldback")]
PolicyName = Annotated[str, typer.Option(help=" | ".join(POLICIES))]
Chunk = Annotated[Optional[int], typer.Option(help="Fixed's size, Dynamic's base, the largest chunk of all others")]  # noqa: UP045
MinChunk = Annotated[int, typer.Option(help="no chunk but the last is smaller")]
Smooth = Annotated[float, typer.Option(help="Dynamic's smoothing factor, 0 < x <= 1")]
Budget = Annotated[Optional[int], typer.Option(help="tokens of one engine step, if it is more than --chunk")]  # noqa: UP045
Quantum = Annotated[int, typer.Option(help="chunk sizes are multiples of it: lcm(page, TP), at least 64")]
Prompt = Annotated[str, typer.Option(help="prompt tokens, N[,N...]")]
History = Annotated[str, typer.Option(help="cached tokens of each prompt, N[,N...]")]
Arrival = Annotated[str, typer.Option(help="arrival of each prompt in seconds, S[,S...]")]
Transfer = Annotated[str, typer.Option(help="async or blocking")]
Packing = Annotated[str, typer.Option(help="on or off: may the next prompt enter before the last one has left")]
OrderName = Annotated[Optional[str], typer.Option(help="oldest or feed-first; a single plan keeps its own unless set")]  # noqa: UP045
Inflight = Annotated[Optional[int], typer.Option(help="chunks in flight; default P on linear, 2P - 1 on foldback")]  # noqa: UP045
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Limit = Annotated[Optional[int], typer.Option(help="only the first rows of the trace")]  # noqa: UP045
Load = Annotated[Optional[float], typer.Option(help="stretch arrivals to this share of the ranks' capacity")]  # noqa: UP045
Cached = Annotated[bool, typer.Option("--cached", help="with each session's prefix cache")]
Out = Annotated[Optional[Path], typer.Option(help="picture to write")]  # noqa: UP045


@app.command()
def simulate(
    ranks: Ranks,
    prompt: Prompt,
    cost: Cost,
    layout: LayoutName = "linear",
    policy: PolicyName = "fixed",
    chunk: Chunk = None,
    min_chunk: MinChunk = 64,
    smooth: Smooth = 1.0,
    budget: Budget = None,
    quantum: Quantum = 64,
    history: History = "0",
    arrival: Arrival = "0",
    transfer: Transfer = "async",
    packing: Packing = "on",
    order: OrderName = None,
    inflight: Inflight = None,
    kv_tokens: Annotated[Optional[int], typer.Option(help="KV cache in tokens")] = None,  # noqa: UP045
    decodes: Annotated[int, typer.Option(help="decode tokens that ride along with every pass")] = 0,
    decode_history: Annotated[int, typer.Option(help="their history")] = 0,
    as_json: AsJson = False,
    record_to: Annotated[Optional[Path], typer.Option("--record", help="timeline document to write")] = None,  # noqa: UP045
    schedule: Annotated[bool, typer.Option(help="print every rank's actions")] = False,
) -> None:
    """One or several prompts through one pipeline."""
    rules = _rules(transfer, packing, order, inflight)
    rules = replace(rules, kv_tokens=kv_tokens, decodes=(decodes, decode_history))
    setup = _setup(ranks, cost, layout, policy, chunk, min_chunk, smooth, budget, quantum, rules, order is None)
    requests = _requests(prompt, history, arrival)
    outcome = run(setup, requests)
    if record_to:
        try:
            record_to.write_text(json.dumps(record.document(outcome.timeline, setup.policy)))
        except OSError as error:
            raise ParameterError("record", str(record_to), f"a file that can be written ({error.strerror})") from None
    if as_json:
        print(json.dumps(outcome.as_json()))
    else:
        report.simulated(console, setup, requests, outcome)
    if schedule and not as_json:
        print(to_text(from_timeline(outcome.timeline)))


@app.command()
def plan(
    ranks: Ranks,
    prompt: Prompt,
    cost: Cost,
    layout: LayoutName = "foldback",
    chunk: Chunk = None,
    min_chunk: MinChunk = 64,
    quantum: Quantum = 64,
    history: History = "0",
    weight: Annotated[float, typer.Option(help="prompts that wait and are delayed by this one; 0: none are")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """The best cut of a prompt, why, and how far it is from the bound."""
    setup = _setup(ranks, cost, layout, "planned", chunk, min_chunk, 1.0, None, quantum, Rules(), True)
    planner = setup.planner(static=True)
    plans = [planner.plan(r.tokens, r.history, weight) for r in _requests(prompt, history, "0")]
    if as_json:
        print(json.dumps([report.plan_json(p) for p in plans]))
    else:
        for made in plans:
            report.planned(console, made)


@app.command("replay")
def replay_command(
    trace: Path,
    ranks: Ranks,
    cost: Cost,
    layout: LayoutName = "foldback",
    policy: PolicyName = "auto",
    chunk: Chunk = None,
    min_chunk: MinChunk = 64,
    smooth: Smooth = 1.0,
    quantum: Quantum = 64,
    cached: Cached = False,
    limit: Limit = None,
    load: Load = None,
    as_json: AsJson = False,
) -> None:
    """A trace (CSV: arrival_s, input_length, output_length[, session]) under one policy."""
    rows = read_trace(trace, _positive("limit", limit))
    setup = _setup(ranks, cost, layout, policy, chunk, min_chunk, smooth, None, quantum, Rules(), False)
    setup = replace(setup, ratio=RATIO, tasks=_TASKS)
    stretch = stretch_to(setup, rows, load, cached=cached) if load is not None else 1.0
    result = replay(f"{setup.policy} {layout.lower()}", setup, rows, cached=cached, stretch=stretch)
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        report.replayed(console, [result], f"{trace.name}, {'prefix cache' if cached else 'cold'}")


_TASKS = 1_000  # a trace has a thousand prompts to plan; more search changed no mean TTFT by 1%
_ARMS = (
    ("linear", "fixed"),
    ("linear", "dynamic"),
    ("linear", "seq1f1b"),
    ("linear", "terapipe"),
    ("linear", "tokenthrottle"),
    ("linear", "planned"),
    ("foldback", "fixed"),
    ("foldback", "dynamic"),
    ("foldback", "planned"),
    ("foldback", "auto"),
)


@app.command()
def compare(
    traces: list[Path],
    ranks: Ranks,
    cost: Cost,
    chunk: Chunk = None,
    min_chunk: MinChunk = 64,
    quantum: Quantum = 64,
    limit: Limit = None,
    load: Load = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """TTFT by prompt class for all policies on traces, cold and (where the trace has sessions) with prefix cache.

    Fixed is tuned: the best of several sizes for each trace. Several traces give several pictures.
    """
    if out:
        from prefill_runtime.cli.charts import drawable

        drawable(out)
    results: dict[str, list[Replayed]] = {}
    for trace in traces:
        rows = read_trace(trace, _positive("limit", limit))
        for cached in (False, True) if rows[0].session is not None else (False,):
            name = f"{trace.stem}, {'prefix cache' if cached else 'cold'}"
            results[name] = _compare(rows, ranks, cost, chunk, min_chunk, quantum, load, cached)
            if not as_json:
                report.replayed(console, results[name], name)
    if as_json:
        print(json.dumps({name: [r.as_json() for r in rs] for name, rs in results.items()}))
    for i, (name, arms) in enumerate(results.items()):
        if out:
            picture(arms, name, out if len(results) == 1 else out.with_stem(f"{out.stem}-{i + 1}"))


def _compare(
    rows: list[report.Row],
    ranks: int,
    cost: Path,
    chunk: int | None,
    min_chunk: int,
    quantum: int,
    load: float | None,
    cached: bool,
) -> list[Replayed]:
    done: list[Replayed] = []
    first = _setup(ranks, cost, "linear", "fixed", chunk, min_chunk, 1.0, None, quantum, Rules(), False)
    stretch = stretch_to(first, rows, load, cached=cached) if load is not None else 1.0
    for layout, policy in _ARMS:
        setup = replace(first, layout=layout_named(layout, ranks), policy=policy, ratio=RATIO, tasks=_TASKS)
        arms = [setup]
        if policy == "fixed":
            arms = [replace(setup, chunk=size, budget=first.chunk) for size in _sizes(first)]
        label = f"{policy} {layout}"
        tried = [replay(label, arm, rows, cached=cached, stretch=stretch) for arm in arms]
        best = min(range(len(tried)), key=lambda i: sum(tried[i].ttft))
        name = f"{label} ({arms[best].chunk})" if policy == "fixed" else label
        done.append(replace(tried[best], label=name))
    return done


def _sizes(setup: Setup) -> list[int]:
    parts = (1.0, 0.75, 0.5, 0.25, 0.125)
    sizes = {int(setup.chunk * part) // setup.quantum * setup.quantum for part in parts}
    return sorted(size for size in sizes if size >= max(setup.quantum, setup.min_chunk))


@app.command()
def paper(as_json: AsJson = False) -> None:
    """The published tables beside the simulator's, with the cost model of each row and what stays unexplained."""
    from prefill_runtime.cli.paper import tables

    made = tables()
    if as_json:
        print(json.dumps([table.as_json() for table in made]))
    else:
        report.papers(console, made)


@app.command()
def timeline(
    recorded: Annotated[Path, typer.Argument(help="document of an engine's /timeline or of simulate --record")],
    out: Annotated[Path, typer.Option(help="file to write: .svg or .png picture, .json trace for Perfetto")],
    period: Annotated[Optional[int], typer.Option(help="busy period; default the last complete one")] = None,  # noqa: UP045
) -> None:
    """A run as a lane chart per rank, or as a trace for Perfetto."""
    record.draw(record.load(recorded), out, period)
    console.print(f"wrote {out}")


def _setup(
    ranks: int,
    cost: Path,
    layout: str,
    policy: str,
    chunk: int | None,
    min_chunk: int,
    smooth: float,
    budget: int | None,
    quantum: int,
    rules: Rules,
    own_order: bool,
) -> Setup:
    try:
        text = cost.read_text()
    except OSError as error:
        raise ParameterError("cost", str(cost), f"a readable file ({error.strerror})") from None
    size = default_chunk(policy.lower()) if chunk is None else chunk
    return Setup(
        layout=layout_named(layout, ranks),
        cost=parse_cost(text),
        policy=policy.lower(),
        chunk=size,
        min_chunk=min_chunk,
        smooth=smooth,
        quantum=quantum,
        budget=budget,
        rules=rules,
        own_order=own_order,
    )


def _rules(transfer: str, packing: str, order: str | None, inflight: int | None) -> Rules:
    picked = _one_of("transfer", transfer, ("async", "blocking"))
    chosen = _one_of("order", order or "oldest", ("oldest", "feed-first"))
    packed = _one_of("packing", packing, ("on", "off")) == "on"
    return Rules(transfer=picked, packing=packed, order=chosen, inflight=inflight)  # type: ignore[arg-type]


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.lower() not in allowed:
        raise ParameterError(field, value, " | ".join(allowed))
    return value.lower()


def _positive(field: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ParameterError(field, value, ">= 1")
    return value


def _requests(prompt: str, history: str, arrival: str) -> list[Request]:
    prompts = _numbers("prompt", prompt)
    histories = _spread("history", _numbers("history", history), len(prompts))
    arrivals = _spread("arrival", _numbers("arrival", arrival), len(prompts))
    for field, values in (("prompt", prompts), ("history", histories)):
        for value in values:
            if value != int(value):
                raise ParameterError(field, value, "whole tokens")
    return [Request(int(p), a, int(h)) for p, h, a in zip(prompts, histories, arrivals, strict=True)]


def _spread(field: str, values: list[float], count: int) -> list[float]:
    if len(values) not in (1, count):
        raise ParameterError(f"number of {field} values", len(values), f"1 or {count}, as many as prompts")
    return values * count if len(values) == 1 else values


def _numbers(field: str, text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise ParameterError(field, repr(text), "numbers with commas between them") from None
    for value in values:
        if not abs(value) < 1e12:
            raise ParameterError(field, value, "finite and below 1e12")
    return values


# Typer has brought its own copy of click since 0.2x; this finds the base of usage errors in either.
_USAGE: type[Exception] = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")


_RANGES = {
    "ranks": "a whole number, 1 to 256",
    "smooth": "a number, 0 < smooth <= 1",
    "load": "a number, 0 < load < 1",
    "weight": "a number >= 0",
    "decodes": "a whole number >= 0",
    "decode-history": "a whole number >= 0",
    "period": "a whole number",
}


def _usage(message: str, words: list[str]) -> str:
    """Typer's complaint about an option that is no number in the form of all others; else its own, in one line."""
    found = re.match(r"Invalid value for '--([\w-]+)'.*(integer|number|float)", message, re.S)
    field = found[1] if found else ""
    pairs = itertools.pairwise([part for word in words for part in word.split("=", 1)])
    given = [value for word, value in pairs if word == f"--{field}"]
    if not given:
        return " ".join(message.split())
    return str(ParameterError(field, given[-1], _RANGES.get(field, "a whole number >= 1")))


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(words, standalone_mode=False)
    except ParameterError as error:
        print(f"prefillctl: {error}", file=sys.stderr)
        return 2
    except _USAGE as error:
        message: str = error.format_message()  # type: ignore[attr-defined]  # of click's base class
        helped = type(error).__name__ == "NoArgsIsHelpError"
        print(message if helped else f"prefillctl: {_usage(message, words)}", file=sys.stderr)
        return 2
    except typer.Abort:
        return 1
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
