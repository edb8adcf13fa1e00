"""What the user sees: steps with elapsed time, and errors that say what to do."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

OWN_CLUSTER = "or use a cluster of your own: KUBECONFIG=/path/to/config make demo"


class ClusterError(Exception):
    """Something the user can act on; printed without a traceback."""


class Progress:
    """Prints one line per step with the time since the program began.

    On a terminal the running step is redrawn each second; elsewhere it is repeated every 30 s, so that a log of a long
    build shows life without growing.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.began = time.monotonic()
        self.live = self.out.isatty()
        self._lock = threading.Lock()

    def say(self, text: str, end: str = "\n") -> None:
        with self._lock:
            start = "\r\033[K" if self.live else ""
            self.out.write(f"{start}[{time.monotonic() - self.began:6.1f} s] {text}{end}")
            self.out.flush()

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        began, done = time.monotonic(), threading.Event()

        def tick() -> None:
            while not done.wait(1 if self.live else 30):
                self.say(f"{text} ... {time.monotonic() - began:.0f} s", end="" if self.live else "\n")

        self.say(text + " ...", end="" if self.live else "\n")
        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        except BaseException:
            self._finish(done, ticker, f"{text}: failed after {time.monotonic() - began:.1f} s")
            raise
        self._finish(done, ticker, f"{text}: {time.monotonic() - began:.1f} s")

    def _finish(self, done: threading.Event, ticker: threading.Thread, text: str) -> None:
        done.set()
        ticker.join()
        self.say(text)


progress = Progress()


def wait_until(what: str, ready: Callable[[], bool], timeout: float, every: float = 0.1, hint: str = "") -> None:
    """Polls `ready()` until it is true; the error names what did not happen and where to look."""
    end = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > end:
            raise ClusterError(f"{what} did not happen within {timeout:.0f} s. {hint}".rstrip())
        time.sleep(every)
