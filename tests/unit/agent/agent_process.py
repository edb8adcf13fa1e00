"""An agent in a process forked from a server that has all modules loaded: starting Python again for each takes longer
than what most tests look at.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from prefill_runtime.agent import measure, serve
from prefill_runtime.agent.__main__ import main

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([__name__])
LOADED = (measure, serve)


def run(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as sink:
        for output in (1, 2):
            os.dup2(sink.fileno(), output)
    sys.exit(main(arguments))


class AgentProcess:
    """As much of ``subprocess.Popen`` as the tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._process: ForkServerProcess = _SERVER.Process(target=run, args=(arguments, environment, log))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still runs after {timeout} s"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
