"""The engine as a child process: started in a session of its own, listened to, ended as a whole tree.

vLLM starts workers of its own and its exit codes tell nothing (0 when a worker was killed), so any exit
that nobody asked for counts as a failure, and the last lines of its output are the explanation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

KEPT_LINES, KEPT_CHARACTERS = 40, 1800
LONGEST_LINE = 1 << 16
SHARED_MEMORY = Path("/dev/shm")
LEAKED = ("vllm_*", "*-cpushm_*", "psm_*", "sem.mp-*")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

# The last line of a traceback, as Python or vLLM's logger prints it; a warning may quote an error, too.
_ERROR = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:ERROR \S+ \S+ \[[^]]*\] )?[\w.]*(?:Error|Exception): \S")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_libc = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Descendants that lose their parent come to us even when we are not PID 1, so that none is left behind."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def plain_text(line: bytes) -> str:
    """What a terminal would show of a line: no colours, the last state of a progress bar, no binary."""
    text = _ESCAPE.sub("", line.decode(errors="replace")).rstrip().rpartition("\r")[2]
    return "".join(character if character.isprintable() or character == "\t" else "\ufffd" for character in text)


class Output:
    """Passes the engine's output through and remembers its end, in a thread: a stalled log reader must not
    stop the heartbeat."""

    def __init__(self, pipe: int) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.first_error = ""
        """Worth more than the last one, which often only points back."""
        self._thread = threading.Thread(target=self._pump, args=(pipe,), name="engine-output", daemon=True)
        self._thread.start()

    def _pump(self, pipe: int) -> None:
        with os.fdopen(pipe, "rb") as source:
            while line := source.readline(LONGEST_LINE):
                text = plain_text(line)
                self._lines.append(text[:400])
                if not self.first_error and _ERROR.search(text):
                    self.first_error = text[:400]
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()

    def settle(self) -> None:
        """Take in what an engine that has ended still left in the pipe."""
        self._thread.join(0.5)

    def tail(self) -> str:
        return "\n".join(list(self._lines))[-KEPT_CHARACTERS:]


class Engine:
    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Output | None = None
        self._started = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and not self.exited.done()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises OSError when the program cannot be started."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)
        readable, writable = os.pipe()
        self._started = time.time()
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writable,
                stderr=writable,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        self._output = Output(readable)
        self.reap()  # the exit of a child that ended at once may have been signalled before anybody listened

    def reap(self) -> None:
        """Collect every ended child: the engine, and orphans of it that came to us."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if self._process is not None and ended.si_pid == self._process.pid:
                code = self._process.wait()
                if not self.exited.done():
                    self.exited.set_result(code)
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(ended.si_pid, os.WNOHANG)

    def testimony(self) -> tuple[str, str]:
        """The first error line of the output, if any, and the output's end."""
        if self._output is None:
            return "", ""
        if not self.running:
            self._output.settle()
        return self._output.first_error, self._output.tail()

    async def stop(self, patience: float) -> None:
        """SIGTERM to the engine, after ``patience`` seconds SIGKILL to all that is left of its session."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.exited), patience)
        await self._kill_session()
        remove_leaked_memory(self._started)

    async def _kill_session(self) -> None:
        assert self._process is not None
        for _ in range(40):
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.05)
            self.reap()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def remove_leaked_memory(since: float) -> None:
    """Delete the shared-memory files of an engine that was killed: newer than ``since``, ours, and mapped by nobody."""
    candidates = []
    for pattern in LEAKED:
        for path in SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.geteuid() and status.st_ctime >= since - 1:
                    candidates.append(path)
    if not candidates:
        return
    mapped = _mapped_inodes()
    for path in candidates:
        with contextlib.suppress(OSError):
            if path.stat().st_ino not in mapped:
                path.unlink()


def _mapped_inodes() -> set[int]:
    """By inode, as a semaphore is mapped under the temporary name that it was made with."""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:
                    inodes.add(int(line.split()[4]))
    return inodes
