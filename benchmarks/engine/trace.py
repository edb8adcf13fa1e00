"""Replay of a request trace (arrival_s, input_length): lengths and arrivals scaled to what a small machine can do."""

from __future__ import annotations

import csv
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.engines import Answer, Engine, prompt
from benchmarks.engine.sites import Site
from benchmarks.engine.store import Measurement, Store

SHORTEST = 16
CLASSES = (1024, 4096)
"""Prompts as long as each of these and longer are a class of their own."""
GAP = 0.05
"""Seconds between prompts that a trace gives one time, so that every arm gets them in the trace's order."""
WHOLE = 0
"""The ``length`` under which a round as a whole is kept: seconds until its last answer, and the tokens it had."""


@dataclass(frozen=True)
class Replay:
    """seconds and lengths of the arrivals, as they are asked."""

    name: str
    arrivals: tuple[tuple[float, int], ...]

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.arrivals)


def read(path: Path, site: Site, rows: int, length_scale: float, load: float) -> Replay:
    """The first ``rows`` prompts, ``length_scale`` as long, cut to what the model holds; arrivals are stretched or
    compressed so that the ranks would be busy for ``load`` of the time if nothing ever waited. No two come at once.
    """
    with path.open(newline="") as file:
        lines = [(float(r["arrival_s"]), int(r["input_length"])) for r in itertools.islice(csv.DictReader(file), rows)]
    if len(lines) < 2 or lines[-1][0] <= lines[0][0]:
        raise SystemExit(f"{path.name}: {len(lines)} rows that take no time: nothing to replay")
    lengths = [min(max(int(length * length_scale), SHORTEST), site.longest) for _, length in lines]
    busy = sum(site.guess(length) for length in lengths)
    stretch = busy / load / (lines[-1][0] - lines[0][0])
    arrivals: list[tuple[float, int]] = []
    for (at, _), length in zip(lines, lengths, strict=True):
        earliest = arrivals[-1][0] + GAP if arrivals else 0.0
        arrivals.append((max((at - lines[0][0]) * stretch, earliest), length))
    name = f"trace {path.stem}, {len(lines)} prompts, lengths x {length_scale:g}, load {load:g}"
    return Replay(name, tuple(arrivals))


def play(engine: Engine, replay: Replay, number: int) -> tuple[list[Answer], float]:
    """Every prompt at its time, whatever has become of those before it, and the seconds until the last answer."""
    answers: list[Answer | None] = [None] * len(replay.arrivals)
    prompts = [prompt(length, f"{number} {index}") for index, (_, length) in enumerate(replay.arrivals)]
    began = time.monotonic()

    def ask(index: int, at: float) -> None:
        time.sleep(max(0.0, began + at - time.monotonic()))
        answers[index] = engine.ask(prompts[index])

    threads = [threading.Thread(target=ask, args=(n, at), daemon=True) for n, (at, _) in enumerate(replay.arrivals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    found = [answer for answer in answers if answer is not None]
    if len(found) < len(answers):
        raise SystemExit(
            f"{engine.arm.name}: {len(answers) - len(found)} requests of the trace failed; see {engine.log}"
        )
    return found, took


def keep(store: Store, replay: Replay, engine: Engine, number: int) -> list[Answer]:
    """One measurement for each prompt; ``length`` counts within the trace so that all are kept apart."""
    answers, took = play(engine, replay, number)
    for index, ((_, length), answer) in enumerate(zip(replay.arrivals, answers, strict=True)):
        store.add(Measurement(replay.name, engine.arm.name, index + 1, number, answer.seconds, [length]))
    store.add(Measurement(replay.name, engine.arm.name, WHOLE, number, took, [replay.tokens]))
    return answers


def table_of(store: Store, suite: str, table: Callable[[Iterable[str], Iterable[Iterable[str]]], str]) -> str:
    """TTFT over all prompts and rounds, and by their length, and tokens per second, by arm."""
    arms: dict[str, list[Measurement]] = {}
    for made in store.all:
        if made.suite == suite:
            arms.setdefault(made.arm, []).append(made)
    rows = []
    for arm, found in arms.items():
        asked, rounds = ([x for x in found if (x.length == WHOLE) is whole] for whole in (False, True))
        took = sorted(made.seconds for made in asked)
        speed = sum(made.tokens[0] for made in rounds) / sum(made.seconds for made in rounds) if rounds else 0.0
        rows.append([
            arm, str(len(took)), f"{speed:,.0f}", f"{statistics.mean(took):.2f}", f"{statistics.median(took):.2f}",
            f"{took[int(0.9 * (len(took) - 1))]:.2f}", *(mean_of(asked, *bounds) for bounds in _bounds()),
        ])  # fmt: skip
    classes = [f"{low}-{high - 1} tokens" if high < 1 << 62 else f"{low} and more" for low, high in _bounds()]
    head = ["arm", "requests", "tokens/s", "mean TTFT, s", "median", "p90", *(f"mean, {name}" for name in classes)]
    return table(head, rows)


def _bounds() -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *CLASSES, 1 << 62)))


def mean_of(asked: list[Measurement], low: int, high: int) -> str:
    """Of the prompts of ``low`` to below ``high`` tokens, which are what ``tokens`` holds here."""
    took = [made.seconds for made in asked if low <= made.tokens[0] < high]
    return f"{statistics.mean(took):.2f} ({len(took)})" if took else ""
