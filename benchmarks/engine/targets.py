"""What the results are expected to show, and whether they do."""

from __future__ import annotations

from benchmarks.engine.sites import K
from benchmarks.engine.stats import paired_ratio
from benchmarks.engine.store import Store, best_stock, median

PLANNED = {
    (128, 2): 25.2, (128, 4): 15.2, (128, 8): 9.3, (512, 2): 273.1, (512, 4): 145.3, (512, 8): 78.1,
}  # fmt: skip
"""Seconds on the emulated device by (thousands of tokens, ranks): an independent search on the bare cost model."""
SLACK = {2: 1.03, 4: 1.03, 8: 1.06}


def rows(store: Store) -> list[list[str]]:
    """What, limit, measured, met."""
    return [*_toy(store), *_emulated(store), *_overhead(store)]


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


def section(store: Store) -> str:
    lines = [["expected", "limit", "measured", "met"], ["---"] * 4, *rows(store)]
    return "### Expected and measured\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)
