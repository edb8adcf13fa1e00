"""Results as they come: one JSON line per measurement, so a crash loses nothing and a later run goes on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """states: seconds of all ranks by state, where the arm tells them. fallback: why its chunks were Fixed, if so."""

    suite: str
    arm: str
    length: int
    round: int
    seconds: float
    tokens: list[int]
    states: dict[str, float] | None = None
    fallback: str = ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.suite, self.arm, self.length, self.round


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file, self._machine = folder / "measurements.jsonl", folder / "machine.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        whole, _, torn = self._file.read_text().rpartition("\n")
        if torn:  # the end of a run that was killed while it wrote
            self._file.write_text(f"{whole}\n" if whole else "")
        self.all = [Measurement(**json.loads(line)) for line in whole.splitlines()]
        self._done = {found.key for found in self.all}

    def add(self, made: Measurement) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(made)) + "\n")
        self.all.append(made)
        self._done.add(made.key)

    def has(self, suite: str, arm: str, length: int, number: int) -> bool:
        return (suite, arm, length, number) in self._done

    def of(self, suite: str, length: int) -> dict[str, dict[int, Measurement]]:
        """Arm to round to measurement."""
        found: dict[str, dict[int, Measurement]] = {}
        for made in self.all:
            if (made.suite, made.length) == (suite, length):
                found.setdefault(made.arm, {})[made.round] = made
        return found

    def lengths(self, suite: str) -> list[int]:
        return sorted({made.length for made in self.all if made.suite == suite})

    def suites(self) -> list[str]:
        return list(dict.fromkeys(made.suite for made in self.all))

    def set_machine(self, machine: dict[str, Any]) -> None:
        """That of the first run counts; a result of several machines would be none."""
        if not self._machine.exists():
            self._machine.write_text(json.dumps(machine, indent=1) + "\n")
            return
        before = json.loads(self._machine.read_text())
        for name in ("processor", "cores", "vllm", "torch"):
            if before[name] != machine[name]:
                raise SystemExit(
                    f"{self.folder} holds results of another {name} ({before[name]}, here {machine[name]}): "
                    "use another --results folder"
                )

    def machine(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._machine.read_text()) if self._machine.exists() else {}
        return found


def median(measurements: Iterable[Measurement]) -> float:
    return statistics.median(made.seconds for made in measurements)


def shares(measurements: Iterable[Measurement]) -> dict[str, float]:
    """State to its share of all ranks' time, in which idle time does not count; empty where no arm told."""
    told = [made.states for made in measurements if made.states]
    total = {state: sum(states.get(state, 0.0) for states in told) for state in {s for states in told for s in states}}
    busy = sum(total.values())
    return {state: found / busy for state, found in total.items()} if busy else {}


def best_stock(found: dict[str, dict[int, Measurement]]) -> str | None:
    """The fixed size with the least median, in hindsight."""
    names = [name for name in found if name.startswith("stock ")]
    return min(names, key=lambda name: median(found[name].values()), default=None)
