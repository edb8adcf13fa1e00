"""Everything that must be green: ``make test``. Stdlib only, so that it runs before any environment exists.

Set-up (programs, virtual environments, models) runs beside the cheap suites; each suite is one pytest
process whose JUnit file gives the counts. The last line is the sum: ``N passed, N failed, N skipped``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

from localcluster import envs, leftovers

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "test"
START = time.monotonic()
HEARTBEAT_SECONDS = 30
PR_SET_PDEATHSIG = 1


def say(text: str) -> None:
    elapsed = int(time.monotonic() - START)
    print(f"[{elapsed // 60:3d}:{elapsed % 60:02d}] {text}", flush=True)


def die_with_parent() -> None:
    """A kill -9 of this runner must not leave suites behind that hold the cluster or the cores."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True)
class Step:
    """One command with its log; ``name`` is also the log's file name."""

    name: str
    command: list[str]
    timeout: int
    env: dict[str, str] = field(default_factory=dict)
    report: Path | None = None
    """A JUnit file."""

    @property
    def log(self) -> Path:
        return OUT / f"{self.name}.log"

    def run(self) -> int:
        started = time.monotonic()
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | self.env, preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip
            code = self._wait(process, started)
        if code:
            say(f"{self.name}: FAILED (exit {code}); the end of {self.log.relative_to(ROOT)}:")
            print("\n".join(self.log.read_text(errors="replace").splitlines()[-60:]), flush=True)
        else:
            say(f"{self.name}: done in {time.monotonic() - started:.0f} s")
        return code

    def _wait(self, process: subprocess.Popen[bytes], started: float) -> int:
        while True:
            try:
                return process.wait(HEARTBEAT_SECONDS)
            except subprocess.TimeoutExpired:
                waited = time.monotonic() - started
                say(f"{self.name}: running for {waited:.0f} s (limit {self.timeout} s)")
                if waited > self.timeout:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(30)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                    return 124


class Background(threading.Thread):
    """Steps in order, beside others; ``result`` waits and gives the first bad exit code."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__(daemon=True)
        self._steps, self._code = steps, 0
        self.start()

    def run(self) -> None:
        for step in self._steps:
            self._code = self._code or step.run()

    def result(self) -> int:
        self.join()
        return self._code


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def run(self, setup: list[Background], steps: list[Step]) -> None:
        """Suites side by side, once all of ``setup`` is there."""
        code = next((code for background in setup if (code := background.result())), 0)
        if code:
            say(f"{', '.join(step.name for step in steps)}: not run, the set-up failed")
        running = [] if code else [Background([step]) for step in steps]
        for number, step in enumerate(steps):
            self.add(step, code or running[number].result())

    def add(self, step: Step, code: int) -> None:
        """Counts of one suite; a suite that ended badly without a failed test counts as one failure."""
        failed = 0
        if step.report is not None and step.report.exists():
            for suite in ET.parse(step.report).getroot().iter("testsuite"):
                total = int(suite.get("tests", 0))
                failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
                skipped = int(suite.get("skipped", 0))
                self.passed += total - failed - skipped
                self.skipped += skipped
                say(f"{step.name}: {total - failed - skipped} passed, {failed} failed, {skipped} skipped")
        elif code == 0:
            self.passed += 1
        self.failed += failed or (1 if code else 0)


def pytest_step(name: str, python: str, timeout: int, *extra: str) -> Step:
    """A suite's folder has the first word of its name: engine suites are several."""
    report = OUT / f"{name}.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT / ".links"), str(ROOT)])
    folders = [f"tests/{name.partition('-')[0]}", *(["tests/cases"] if name == "unit" else [])]
    command = [python, "-m", "pytest", *folders, f"--junitxml={report}", *extra]
    return Step(name, command, timeout, {"PYTHONPATH": path}, report)


def python_of(environment: str) -> str:
    """The interpreter of a virtual environment, made if it is missing."""
    result = subprocess.run(
        [sys.executable, "-m", "localcluster.envs", environment], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if result.returncode:
        say(f"environment {environment} could not be made; see the messages above")
        print("0 passed, 1 failed", flush=True)
        sys.exit(1)
    return str(Path(result.stdout.strip().splitlines()[-1]) / "bin" / "python")


ENGINES = envs.engine_names()
TIMED = "-timed"
SUITES = ("check", "unit", "operator", *ENGINES, "cluster", "e2e")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; default: all")
    chosen = parser.parse_args().suites or SUITES
    if unknown := set(chosen) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    OUT.mkdir(parents=True, exist_ok=True)
    leftovers.mark()
    if ended := leftovers.end_leftovers():
        say(f"ended {len(ended)} processes of a run that was killed")
    counts, me = Counts(), sys.executable
    if {"operator", *ENGINES, "cluster", "e2e"} & set(chosen):
        preflight = Step("preflight", [me, "-m", "localcluster", "preflight"], 900)
        if code := preflight.run():
            counts.add(preflight, code)
            print(f"{counts.passed} passed, {counts.failed} failed", flush=True)
            return 1
    dev = python_of("dev")
    programs = Background([Step("build", [me, "-m", "localcluster", "build"], 2700)])
    environments = Background([
        Step("engine-env", [me, "-m", "localcluster.envs", "engine"], 2700),
        Step("models", [me, "-m", "localcluster.models", "tiny", "toy"], 900),
    ])  # fmt: skip
    others = [
        Background([Step(f"{name}-env", [me, "-m", "localcluster.envs", name], 2700)])
        for name in ENGINES
        if name in chosen and name != "engine"
    ]
    engines = {name: str(envs.engine(version).python) for name, version in ENGINES.items()}
    for_engines = [environments, *others]
    suites: list[tuple[list[Background], list[Step]]] = [
        ([], [Step("check", ["make", "lint"], 600)]),
        ([], [pytest_step("unit", dev, 900, "-n", "2")]),
        ([programs], [pytest_step("operator", dev, 1800)]),
        # Side by side, for most of its start an engine keeps one core busy; then, alone, what compares times.
        (for_engines, [pytest_step(name, at, 3600, "-m", "not timed") for name, at in engines.items()]),
        *((for_engines, [pytest_step(f"{name}{TIMED}", at, 1800, "-m", "timed")]) for name, at in engines.items()),
        ([programs], [pytest_step("cluster", dev, 1200)]),
        ([programs, environments], [pytest_step("e2e", dev, 2400, "-s")]),
    ]
    for setup, steps in suites:
        if wanted := [step for step in steps if step.name.removesuffix(TIMED) in chosen]:
            counts.run(setup, wanted)
    print(f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped", flush=True)
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
