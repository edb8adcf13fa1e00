"""Plans made beside the scheduling path: those that prompts ask for first, then, while the pipeline is idle, those of
all lengths that prompts may have.

A daemon thread hands one question after the other to a low-priority process (``scheduler.search_process``) and waits
for the answer, which takes no interpreter time from the scheduler.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque

from prefill_runtime.scheduler.grid import Wanted
from prefill_runtime.scheduler.planner import Planned
from prefill_runtime.scheduler.search_process import MODULE, setup_line

_WAITING = 64  # questions; a prompt whose question is dropped keeps its seed, and a later one asks again

logger = logging.getLogger(__name__)


class Searches:
    """``problem`` says why there will be no more answers; empty while all is well."""

    def __init__(self, planned: Planned) -> None:
        self.problem = ""
        self._planned = planned
        self._asked: deque[Wanted] = deque()
        self._ahead = deque(planned.grid.ahead())
        self._idle, self._closed = True, False
        self._news = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        planned.later = self.ask
        self._thread = threading.Thread(target=self._run, name="prefill-searches", daemon=True)
        self._thread.start()

    def ask(self, wanted: Wanted) -> None:
        with self._news:
            if len(self._asked) >= _WAITING:
                self._planned.forget(self._asked.popleft())
            self._asked.append(wanted)
            self._news.notify()

    def pipeline_is(self, *, idle: bool) -> None:
        """Plans are made ahead only while it is: a pod's processor time may have a limit."""
        if idle != self._idle:
            with self._news:
                self._idle = idle
                self._news.notify()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
            if self._process is not None:
                self._process.kill()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        try:
            with subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            ) as process:
                try:
                    self._serve(process)
                finally:
                    process.kill()
        except (OSError, ValueError) as error:
            if not self._closed:
                self.problem = f"no plans can be searched: {error}"
                logger.error(self.problem)

    def _serve(self, process: subprocess.Popen[str]) -> None:
        with self._news:
            self._process = process  # from here on ``close`` ends it
        self._tell(process, setup_line(self._planned.planner))
        while (wanted := self._next()) is not None:
            self._planned.learn(wanted, self._answer(process, wanted))

    def _next(self) -> Wanted | None:
        with self._news:
            while not self._closed:
                if self._asked:
                    return self._asked.popleft()
                if self._idle and self._ahead:
                    return self._ahead.popleft()
                self._news.wait()
        return None

    def _answer(self, process: subprocess.Popen[str], wanted: Wanted) -> list[int]:
        self._tell(process, json.dumps(wanted))
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise OSError(f"the search process ended with {process.wait()}")
        answer = json.loads(line)
        if "chunks" not in answer:
            raise ValueError(f"{wanted}: {answer.get('error')}")
        chunks: list[int] = answer["chunks"]
        return chunks

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
