"""What a killed run leaves is ended by the next one, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from localcluster import leftovers

RUN = (
    "import subprocess, sys; from localcluster import leftovers; leftovers.mark();"
    "print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True);"
    "sys.stdin.read()"
)


def run() -> tuple[subprocess.Popen[str], int]:
    environment = {name: value for name, value in os.environ.items() if name != leftovers.MARK}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while leftovers.started(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return leftovers.started(pid) is None


def test_only_processes_of_a_dead_run_are_ended() -> None:
    (dead, orphan), (alive, child) = run(), run()
    try:
        dead.kill()
        dead.communicate()
        ended = leftovers.end_leftovers()
        assert orphan in ended
        assert gone(orphan)
        assert child not in ended
        assert leftovers.started(child) is not None
    finally:
        alive.kill()
        alive.communicate()
        for pid in (orphan, child):
            if leftovers.started(pid) is not None:
                os.kill(pid, signal.SIGKILL)


def test_a_run_within_a_run_belongs_to_the_outer_one() -> None:
    process, child = run()
    try:
        mine = os.environ.get(leftovers.MARK, f"{os.getpid()}-{leftovers.started(os.getpid())}")
        leftovers.mark()
        assert os.environ[leftovers.MARK] == mine
        assert child not in leftovers.end_leftovers()
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()
