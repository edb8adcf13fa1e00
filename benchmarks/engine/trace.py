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
    compressed so that the ranks would be busy for ``load`` of the time if nothing ever waited.
    """
    with path.open(newline="") as file:
        lines = [(float(r["arrival_s"]), int(r["input_length"])) for r in itertools.islice(csv.DictReader(file), rows)]
    if len(lines) < 2 or lines[-1][0] <= lines[0][0]:
        raise SystemExit(f"{path.name}: {len(lines)} rows that take no time: nothing to replay")
    lengths = [min(max(int(length * length_scale), SHORTEST), site.longest) for _, length in lines]
    busy = sum(site.guess(length) for length in lengths)
    stretch = busy / load / (lines[-1][0] - lines[0][0])
    arrivals = tuple(((at - lines[0][0]) * stretch, length) for (at, _), length in zip(lines, lengths, strict=True))
    name = f"trace {path.stem}, {len(lines)} prompts, lengths x {length_scale:g}, load {load:g}"
    return Replay(name, arrivals)


def play(engine: Engine, replay: Replay, number: int) -> list[Answer]:
    """Every prompt at its time, whatever has become of those before it."""
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
    found = [answer for answer in answers if answer is not None]
    if len(found) < len(answers):
        raise SystemExit(
            f"{engine.arm.name}: {len(answers) - len(found)} requests of the trace failed; see {engine.log}"
        )
    return found


def keep(store: Store, replay: Replay, engine: Engine, number: int) -> list[Answer]:
    """One measurement for each prompt; ``length`` counts within the trace so that all are kept apart."""
    answers = play(engine, replay, number)
    for index, ((_, length), answer) in enumerate(zip(replay.arrivals, answers, strict=True)):
        store.add(Measurement(replay.name, engine.arm.name, index + 1, number, answer.seconds, [length]))
    return answers


def table_of(store: Store, suite: str, table: Callable[[Iterable[str], Iterable[Iterable[str]]], str]) -> str:
    """TTFT over all prompts and rounds by arm."""
    arms: dict[str, list[Measurement]] = {}
    for made in store.all:
        if made.suite == suite:
            arms.setdefault(made.arm, []).append(made)
    rows = []
    for arm, found in arms.items():
        took = sorted(made.seconds for made in found)
        rows.append([
            arm, str(len(took)), f"{statistics.mean(took):.2f}", f"{statistics.median(took):.2f}",
            f"{took[int(0.9 * (len(took) - 1))]:.2f}",
        ])  # fmt: skip
    return table(["arm", "requests", "mean TTFT, s", "median", "p90"], rows)
