"""Processes that a killed run left behind: vLLM's engine processes outlive whoever started them.

A run marks its environment, which all its processes inherit; the next run ends those whose owner is gone.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

MARK = "PREFILL_RUN_OWNER"


def mark() -> None:
    """From here on this process owns what it starts, unless it is itself part of a run."""
    os.environ.setdefault(MARK, f"{os.getpid()}-{started(os.getpid())}")


def started(pid: int) -> str | None:
    """When the process began, in ticks since boot, so that a pid that was given again is told apart; None if gone."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else rest[18]


def end_leftovers() -> list[int]:
    """Ends marked processes without a living owner; their pids."""
    ended = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environment.parent.name)
        try:
            variables = environment.read_bytes().split(b"\0")
        except OSError:
            continue
        owner = next((v.partition(b"=")[2].decode() for v in variables if v.startswith(MARK.encode() + b"=")), "")
        number, _, began = owner.partition("-")
        if not number.isdecimal() or started(int(number)) == began or pid == os.getpid():
            continue
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        ended.append(pid)
    return ended
