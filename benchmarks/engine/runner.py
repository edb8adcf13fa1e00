"""Runs a suite: as many engines at once as memory holds, arms in alternating order within a round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from benchmarks.engine import calibrate, machine
from benchmarks.engine.engines import AgentRun, Answer, Engine, prompt
from benchmarks.engine.sites import Arm
from benchmarks.engine.store import Measurement, Store, best_stock
from benchmarks.engine.suites import STEP, Suite

RESERVE_GIGABYTES = 2.0
SETTLE_SECONDS = 120.0
QUIET_LOAD, QUIET_RANK_LOAD = 0.03, 0.015
"""Cores that an idle engine uses: its own processes, and each of its ranks."""
CHECK = 1024, 16
"""The warm-up of each engine: prompt tokens and the tokens of its answer, which are compared between arms."""


class Progress:
    """Prints a line with the time since the start, and knows when time is over."""

    def __init__(self, minutes: float | None) -> None:
        self._began = time.monotonic()
        self._deadline = None if minutes is None else self._began + minutes * 60

    def say(self, text: str) -> None:
        print(f"[{(time.monotonic() - self._began) / 60:6.1f} min] {text}", flush=True)

    def room_for(self, seconds: float) -> bool:
        return self._deadline is None or time.monotonic() + seconds < self._deadline


class Run:
    def __init__(self, suite: Suite, store: Store, progress: Progress) -> None:
        self.suite, self.store, self.progress = suite, store, progress
        self.site = suite.site

    def missing(self, arms: tuple[Arm, ...], upto: int) -> Iterator[tuple[int, int]]:
        """(length, round), so that every length has a first round before any has a second."""
        for number in range(upto):
            for length, rounds in sorted(self.suite.rounds.items()):
                if number < rounds and any(self.wanted(arm, length, number) for arm in arms):
                    yield length, number

    def wanted(self, arm: Arm, length: int, number: int) -> bool:
        return not self.store.has(self.suite.name, arm.name, length, number) and self._swept(arm, length)

    def _swept(self, arm: Arm, length: int) -> bool:
        """Very long prompts are for few arms, the sizes near what was best at the length before among them."""
        shorter = [other for other in self.suite.rounds if other < length]
        if length < self.suite.sweep_below or not shorter:
            return True
        if not arm.stock:
            return arm in [other for other in self.suite.arms if not other.stock][: self.suite.deep_policies]
        best = best_stock(self.store.of(self.suite.name, max(shorter)))
        if best is None:
            return True
        sizes = [other.name for other in self.suite.arms if other.stock]
        return abs(sizes.index(arm.name) - sizes.index(best)) <= self.suite.neighbours

    def lives(self) -> list[int]:
        """Up to which round each life of the engines goes."""
        most = max(self.suite.rounds.values(), default=0)
        return [-(-most * life // self.suite.lives) for life in range(1, self.suite.lives + 1)]

    def waves(self, upto: int) -> list[tuple[Arm, ...]]:
        room = machine.available_gigabytes() - RESERVE_GIGABYTES
        size = max(1, int(room / self.site.engine_gigabytes))
        arms = [arm for arm in self.suite.arms if any(True for _ in self.missing((arm,), upto))]
        count = -(-len(arms) // size)
        # Stock arms and ours in each wave, so that both meet the same machine.
        return [tuple(arms[n::count]) for n in range(count)]

    def run(self, calibrations: dict[int, str]) -> None:
        for upto in self.lives():
            for wave in self.waves(upto):
                if not self.progress.room_for(self.site.start_seconds * len(wave)):
                    self.progress.say(f"{self.suite.name}: no time left for {', '.join(arm.name for arm in wave)}")
                    return
                with ExitStack() as stack:
                    engines = self.start(wave, calibrations, stack)
                    for length, number in list(self.missing(wave, upto)):
                        if not self._round(engines, length, number):
                            return

    def start(self, wave: tuple[Arm, ...], calibrations: dict[int, str], stack: ExitStack) -> dict[Arm, Engine]:
        """Two at a time: most of a start is one process that imports."""
        engines = {}
        for first in range(0, len(wave), 2):
            began = time.monotonic()
            pair = wave[first : first + 2]
            for arm in pair:
                folder = self.store.folder / "engines" / self.suite.name / arm.name.replace(" ", "-")
                engines[arm] = Engine(self.site, arm, folder, calibrations[arm.virtual] if arm.calibrated else "")
                stack.callback(engines[arm].close)
            for arm in pair:
                engines[arm].wait_ready()
            for arm in pair:
                answer = engines[arm].ask(prompt(CHECK[0], "check"), CHECK[1])
                if not self.store.has(self.suite.name, arm.name, *CHECK_KEY):
                    self._keep(engines[arm], arm, *CHECK_KEY, answer)
            names = " and ".join(arm.name for arm in pair)
            self.progress.say(f"{self.suite.name}: up after {time.monotonic() - began:.0f} s: {names}")
        self._settle(list(engines.values()))
        for engine in engines.values():
            engine.pause()
        return engines

    def _settle(self, engines: list[Engine]) -> None:
        """Plans are made ahead while a pipeline is idle: nobody else is measured beside that."""
        began = time.monotonic()
        while time.monotonic() < began + SETTLE_SECONDS:
            before = sum(engine.processor_seconds() for engine in engines)
            time.sleep(2 * STEP)
            load = (sum(engine.processor_seconds() for engine in engines) - before) / (2 * STEP)
            if load < (QUIET_LOAD + QUIET_RANK_LOAD * self.site.ranks) * len(engines):
                break
        self.progress.say(
            f"{self.suite.name}: idle engines use {load:.2f} cores, {time.monotonic() - began:.0f} s later"
        )

    def _round(self, engines: dict[Arm, Engine], length: int, number: int) -> bool:
        """False when time is over."""
        arms = [arm for arm in engines if self.wanted(arm, length, number)]
        turn = arms[::-1] if number % 2 else arms
        together = len(turn) if self.suite.together else 1
        prompts = [prompt(length, number if self.suite.queued == 1 else (number, k)) for k in range(self.suite.queued)]
        for first in range(0, len(turn), together):
            if not self.progress.room_for(self.suite.guess(length)):
                self.progress.say(f"{self.suite.name}: time is over")
                return False
            some = turn[first : first + together]
            with awake([engines[arm] for arm in some]), ThreadPoolExecutor(together) as pool:
                before = {arm: engines[arm].states() for arm in some}
                answers = dict(zip(some, pool.map(lambda arm: engines[arm].ask_all(prompts), some), strict=True))
                time.sleep(STEP)
                for arm in some:
                    self._keep(engines[arm], arm, length, number, answers[arm], before[arm])
        return True

    def _keep(
        self, engine: Engine, arm: Arm, length: int, number: int, answer: Answer, before: dict[str, float] | None = None
    ) -> None:
        after = engine.states() if before is not None else None
        states = None
        if before is not None and after is not None:
            states = {state: round(after[state] - before.get(state, 0.0), 4) for state in after if state != "idle"}
        made = Measurement(
            self.suite.name,
            arm.name,
            length,
            number,
            round(answer.seconds, 4),
            answer.tokens,
            states,
            engine.fallback(),
        )
        self.store.add(made)
        if length:
            self.progress.say(
                f"{made.suite} {length:>6} tokens, round {number + 1}: {arm.name:<12} {made.seconds:8.3f} s"
            )


@contextmanager
def awake(engines: Sequence[Engine]) -> Iterator[None]:
    """These run, all others stand still: idle ones of vLLM take a tenth of a core each, which is nobody's TTFT."""
    for engine in engines:
        engine.resume()
    time.sleep(STEP)
    try:
        yield
    finally:
        for engine in engines:
            engine.pause()


CHECK_KEY = 0, 0
"""Length and round under which the warm-up's answer is kept."""


def estimate(suite: Suite, store: Store) -> float:
    """Seconds this will take, from what is missing and rough guesses."""
    run = Run(suite, store, Progress(None))
    waves = run.waves(run.lives()[-1])
    total = suite.lives * sum(suite.site.start_seconds * len(wave) for wave in waves)
    for length, rounds in suite.rounds.items():
        for number in range(rounds):
            arms = [arm for arm in suite.arms if run.wanted(arm, length, number)]
            swept, count = sum(arm.stock for arm in arms), len(arms)
            if length >= suite.sweep_below:  # which sizes is not known yet
                count += min(swept, 1 + 2 * suite.neighbours) - swept
            total += min(count, len(waves)) * suite.guess(length) if suite.together else 0.0
            total += 0.0 if suite.together else count * (suite.guess(length) + 2 * STEP)
    return total


def profile_estimate(suites: list[Suite], store: Store) -> float:
    """Seconds of the profile steps that are missing."""
    missing = [
        suite
        for suite in suites
        for virtual in suite.calibrated
        if calibrate.kept(suite.site, virtual, store.folder) is None
    ]
    together = max((suite.profile_seconds for suite in missing if suite.together), default=0)
    return 2 * together + sum(suite.profile_seconds for suite in missing if not suite.together)


Calibrations = dict[str, dict[int, str]]
"""By suite and stages per rank."""


def calibrations(suites: list[Suite], store: Store, progress: Progress) -> Calibrations:
    """Emulated sites are profiled side by side, others alone."""
    found: Calibrations = {suite.name: {} for suite in suites}
    for virtual in (1, 2):
        need = [suite for suite in suites if virtual in suite.calibrated]
        together = [suite for suite in need if suite.together]
        for group in [together, *([suite] for suite in need if not suite.together)]:
            with ExitStack() as stack:
                runs = [_profile(suite, virtual, store, progress, stack) for suite in group]
                for suite, run in zip(group, runs, strict=True):
                    text = calibrate.finish(run, suite.site, virtual, store.folder, progress.say)
                    found[suite.name][virtual] = text
    return found


def _profile(suite: Suite, virtual: int, store: Store, progress: Progress, stack: ExitStack) -> AgentRun | None:
    folder = store.folder / "engines" / suite.name / f"profile-{virtual}"
    run = calibrate.start(
        suite.site, virtual, suite.base, store.folder, folder,
        seconds=suite.profile_seconds, samples=suite.samples, depths=suite.depths,
    )  # fmt: skip
    if run is not None:
        stages = suite.site.ranks * virtual
        progress.say(f"{suite.name}, {stages} stages: the profile step measures, for at most {suite.profile_seconds} s")
        stack.callback(run.close)
    return run
