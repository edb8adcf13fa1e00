"""A schedule as data: what every rank does, in order, printable and parseable.

One line per rank, one word per action: stage, letter, request, dot, chunk. ``2R0.5`` runs stage 2 of chunk 5 of
request 0; ``2S0.5`` sends its result on; ``3V0.5`` receives the input of stage 3. A hop within a rank has no transfer.

Sends are rendezvous: a send completes only when the peer is at the matching receive. Orders taken from a timeline are
safe, because it orders all events such that each can happen when its turn comes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import Layout
from prefill_runtime.scheduler.timeline import Timeline

Kind = Literal["R", "S", "V"]
_WORD = re.compile(r"(\d+)([RSV])(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank. kind: R run, S send the stage's result, V receive the stage's input."""

    rank: int
    stage: int
    request: int
    chunk: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.request}.{self.chunk}"


Schedule = list[list[Action]]


class ScheduleError(ValueError):
    """A schedule that cannot run; the message shows the grid with the broken step marked."""


def to_text(schedule: Schedule) -> str:
    return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(schedule))


def parse(text: str) -> Schedule:
    """The inverse of ``to_text``."""
    schedule: Schedule = []
    for rank, line in enumerate(text.strip().splitlines()):
        head, _, words = line.partition(":")
        if head.strip() != f"rank {rank}":
            raise ParameterError("line", repr(line[:40]), f"'rank {rank}: <actions>'")
        actions = []
        for word in words.split():
            match = _WORD.fullmatch(word)
            if not match:
                raise ParameterError("action", repr(word), "<stage>R|S|V<request>.<chunk>")
            stage, kind, request, chunk = match.groups()
            actions.append(Action(rank, int(stage), int(request), int(chunk), kind))  # type: ignore[arg-type]
        schedule.append(actions)
    return schedule


def from_timeline(timeline: Timeline) -> Schedule:
    """The order in which a simulated run did things, with its transfers right behind the runs that make them.

    The run's log is one sequence of all ranks' events, each of which can happen when its turn comes; every rank's list
    is its part of that sequence.
    """
    layout = timeline.layout
    schedule: Schedule = [[] for _ in range(layout.ranks)]
    for what, request, chunk, stage in timeline.log:
        rank = layout.rank_of(stage)
        schedule[rank].append(Action(rank, stage, request, chunk, what))
        if what == "S":
            there = layout.rank_of(stage + 1)
            schedule[there].append(Action(there, stage + 1, request, chunk, "V"))
    return schedule


def validate(layout: Layout, schedule: Schedule, chunks: Sequence[int], inflight: int | None = None) -> None:
    """Run the schedule without time, with rendezvous transfers; raise ScheduleError where it breaks.

    chunks: number of chunks of each request. inflight: most chunks between first and last stage, where one rank runs
    both (FoldBack) and its order alone decides; on Linear the driver holds the next chunk back, not the order.
    Checked: every stage of every chunk runs exactly once, on the right rank, after its inputs; transfers match and are
    in the same order on both sides of each directed pair; no deadlock; the in-flight bound.
    """
    _Check(layout, schedule, chunks, inflight).run()


class _Check:
    def __init__(self, layout: Layout, schedule: Schedule, chunks: Sequence[int], inflight: int | None) -> None:
        self.layout, self.schedule, self.chunks, self.inflight = layout, schedule, chunks, inflight
        self.at = [0] * len(schedule)
        self.ran: set[tuple[int, int, int]] = set()
        self.here: set[tuple[int, int, int]] = set()  # inputs received
        self.flying = 0

    def run(self) -> None:
        if len(self.schedule) != self.layout.ranks:
            raise ParameterError("ranks in schedule", len(self.schedule), f"{self.layout.ranks}")
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.schedule)):
                while self.step(rank):
                    moved = True
        for rank, actions in enumerate(self.schedule):
            if self.at[rank] < len(actions):
                self.fail(rank, "deadlock: its partner never comes to this transfer")
        expected = sum(self.chunks) * self.layout.stages
        if len(self.ran) != expected:
            raise ScheduleError(f"{len(self.ran)} runs, expected {expected} = chunks x stages")

    def current(self, rank: int) -> Action | None:
        return self.schedule[rank][self.at[rank]] if self.at[rank] < len(self.schedule[rank]) else None

    def step(self, rank: int) -> bool:
        action = self.current(rank)
        if action is None:
            return False
        if not (action.request < len(self.chunks) and action.chunk < self.chunks[action.request]):
            self.fail(rank, "no such chunk")
        if action.kind == "R":
            self.compute(rank, action)
        elif not self.meet(rank, action):
            return False
        self.at[rank] += 1
        return True

    def compute(self, rank: int, action: Action) -> None:
        stage, request, chunk = action.stage, action.request, action.chunk
        if stage >= self.layout.stages or self.layout.rank_of(stage) != rank:
            self.fail(rank, f"stage {stage} is not on rank {rank}")
        if (stage, request, chunk) in self.ran:
            self.fail(rank, "runs twice")
        if chunk and (stage, request, chunk - 1) not in self.ran:
            self.fail(rank, "the chunk before has not run on this stage")
        if stage:
            local = self.layout.rank_of(stage - 1) == rank
            known = self.ran if local else self.here
            if (stage - 1 if local else stage, request, chunk) not in known:
                self.fail(rank, "its input is not there")
        self.ran.add((stage, request, chunk))
        last = self.layout.stages - 1
        self.flying += (stage == 0) - (stage == last)
        if self.inflight is not None and self.layout.rank_of(last) == 0 and self.flying > self.inflight:
            self.fail(rank, f"{self.flying} chunks in flight, allowed {self.inflight}")

    def meet(self, rank: int, action: Action) -> bool:
        """Whether a transfer is done: both sides must be at it at the same time; the sender moves both on."""
        if action.kind == "V":
            return False
        key = (action.stage, action.request, action.chunk)
        if key not in self.ran:
            self.fail(rank, "sends what it has not computed")
        there = self.layout.rank_of(action.stage + 1)
        other = self.current(there)
        if other is None or other.kind != "V":
            return False
        if other != Action(there, action.stage + 1, action.request, action.chunk, "V"):
            if self.layout.rank_of(other.stage - 1) == rank:
                self.fail(there, f"receives {other} where rank {rank} sends {action}: orders differ")
            return False
        self.here.add((other.stage, other.request, other.chunk))
        self.at[there] += 1
        return True

    def fail(self, rank: int, why: str) -> None:
        grid = []
        for r, actions in enumerate(self.schedule):
            words = [f">>{a}<<" if i == self.at[r] else str(a) for i, a in enumerate(actions)]
            low = max(0, self.at[r] - 6)
            grid.append(f"rank {r}: {'.. ' if low else ''}{' '.join(words[low : self.at[r] + 6])}")
        action = self.current(rank)
        raise ScheduleError(f"rank {rank} at {action}: {why}\n" + "\n".join(grid))
