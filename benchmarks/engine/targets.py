"""What the results are expected to show, and whether they do."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.engine.sites import K
from benchmarks.engine.stats import paired_ratio
from benchmarks.engine.store import Store, best_stock, median, shares

PLANNED = {
    (128, 2): 25.2, (128, 4): 15.2, (128, 8): 9.3, (512, 2): 273.1, (512, 4): 145.3, (512, 8): 78.1,
}  # fmt: skip
"""Seconds on the emulated device by (thousands of tokens, ranks): an independent search on the bare cost model."""
SLACK = {2: 1.03, 4: 1.03, 8: 1.06}


def rows(store: Store) -> list[list[str]]:
    """What, limit, measured, met."""
    return [
        *_toy(store),
        *_emulated(store),
        *_overhead(store),
        *_folded(store),
        *_windows(store),
        *_folded_emulated(store),
        *_steps(store),
    ]


def _row(what: str, limit: float, found: float) -> list[str]:
    return [what, f"<= {limit:.3f}", f"{found:.3f}", "yes" if found <= limit else "**no**"]


def _ratio(store: Store, suite: str, length: int, arm: str, reference: str | None) -> float | None:
    found = store.of(suite, length)
    if reference is None or arm not in found or reference not in found:
        return None
    pair = ({n: made.seconds for n, made in found[name].items()} for name in (arm, reference))
    ratio = paired_ratio(*pair)
    return None if ratio is None else ratio.median


def _toy(store: Store) -> list[list[str]]:
    made = []
    for length in store.lengths("toy"):
        best = best_stock(store.of("toy", length))
        ratio = _ratio(store, "toy", length, "Auto", best)
        if length and ratio is not None:
            made.append(_row(f"toy, {length // K}K: Auto / stock at its best fixed chunk", 1.02, ratio))
    ratio = _ratio(store, "toy", 16 * K, "Auto", "stock 2048")
    return made if ratio is None else [*made, _row("toy, 16K: Auto / stock at a chunk of 2048", 0.90, ratio)]


def _emulated(store: Store) -> list[list[str]]:
    made = []
    for (thousands, ranks), expected in PLANNED.items():
        suite, length = f"emulated-p{ranks}", thousands * K
        found = store.of(suite, length)
        if "Planned" in found:
            what = f"emulated, P = {ranks}, {thousands}K: Planned / {expected:g} s of a search on the bare model"
            made.append(_row(what, SLACK[ranks], median(found["Planned"].values()) / expected))
        ratio = _ratio(store, suite, length, "Planned", best_stock(found))
        if ratio is not None:
            made.append(
                _row(f"emulated, P = {ranks}, {thousands}K: Planned / stock at its best fixed chunk", 1.0, ratio)
            )
    return made


def _overhead(store: Store) -> list[list[str]]:
    ratio = _ratio(store, "overhead", 8 * K, "Fixed", "stock 2048")
    return [] if ratio is None else [_row("P = 1, 8K: Fixed with the plugin / stock, the same chunk", 1.01, ratio)]


SAME_CHUNK = {16 * K: 0.92, 32 * K: 0.95}
"""Folded over straight at one fixed size, here 8 and 16 chunks of 2048 tokens, by the model of linear growth."""


def _folded(store: Store) -> list[list[str]]:
    made = []
    for length in store.lengths("foldback"):
        best = best_stock(store.of("foldback", length))
        ratio = _ratio(store, "foldback", length, "Auto FoldBack", best)
        if ratio is not None and 0 < length <= 4 * K:
            made.append(_row(f"toy, {length // K}K: Auto FoldBack / stock at its best fixed chunk", 1.02, ratio))
        if length not in SAME_CHUNK:
            continue
        for arm, reference, limit in (
            ("Fixed 2048 FoldBack", "stock 2048", 1.02 * SAME_CHUNK[length]),
            ("Planned FoldBack", best, 0.955), ("Planned FoldBack", "stock 2048", 0.84),
        ):  # fmt: skip
            ratio = _ratio(store, "foldback", length, arm, reference)
            if ratio is not None:
                made.append(_row(f"toy, {length // K}K: {arm} / {reference}", limit, ratio))
    return made


def _windows(store: Store) -> list[list[str]]:
    made = []
    for length in store.lengths("windows"):
        found = store.of("windows", length)
        fixed = [name for name in found if name.startswith("Fixed")]
        best = min(fixed, key=lambda name: median(found[name].values()), default=None)
        ratio = _ratio(store, "windows", length, "Planned FoldBack", best)
        if length and ratio is not None:
            made.append(_row(f"toy with windows, {length // K}K: Planned FoldBack / {best}", 1.0, ratio))
    return made


FOLDED = {
    (128, 2): 23.06, (128, 4): 13.53, (128, 8): 8.08, (512, 2): 259.6, (512, 4): 136.8, (512, 8): 72.9,
}  # fmt: skip
"""As PLANNED, folded."""
FOLDED_SLACK = {2: 1.03, 4: 1.03, 8: 1.05}
FOLDED_TO_STOCK = {2: 0.88, 4: 0.85, 8: 0.77}
"""At 128K."""


def _folded_emulated(store: Store) -> list[list[str]]:
    made = []
    for (thousands, ranks), expected in FOLDED.items():
        suite, length = f"emulated-p{ranks}", thousands * K
        found = store.of(suite, length)
        what = f"emulated, P = {ranks}, {thousands}K: Planned FoldBack"
        if "Planned FoldBack" in found:
            ratio = median(found["Planned FoldBack"].values()) / expected
            made.append(_row(f"{what} / {expected:g} s of a search on the bare model", FOLDED_SLACK[ranks], ratio))
        against = _ratio(store, suite, length, "Planned FoldBack", best_stock(found))
        if against is not None and thousands == 128:
            made.append(_row(f"{what} / stock at its best fixed chunk", FOLDED_TO_STOCK[ranks], against))
    return made


STEPS = "Fixed 16384 FoldBack vanilla", "Fixed 16384 FoldBack async", "Fixed 16384 FoldBack"


def _steps(store: Store) -> list[list[str]]:
    """Each step takes less time, and less of it goes by in which ranks wait or send."""
    made = []
    for before, after in pairwise(STEPS):
        ratio = _ratio(store, "ablation", 128 * K, after, before)
        if ratio is None:
            continue
        made.append(_row(f"three prompts, P = 2, slow transfers: {after} / {before}", 1.0, ratio))
        found = store.of("ablation", 128 * K)
        least, most = (1 - shares(found[arm].values()).get("compute", 0.0) for arm in (after, before))
        made.append(_row(f"the same, share of time in which ranks do not compute: {after}", most, least))
    return made


def section(store: Store) -> str:
    lines = [["expected", "limit", "measured", "met"], ["---"] * 4, *rows(store)]
    return "### Expected and measured\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)
