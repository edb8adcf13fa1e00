"""The client that sends events from inside an engine process.

The engine must never notice that it is being watched: a send neither blocks nor raises; what cannot be
buffered is dropped and counted.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque

from prefill_runtime.telemetry.events import Event, Hello, encode

_RETRY_SECONDS = 1.0


class Sender:
    """Sends events over a Unix stream socket from inside an engine process; without a path it does nothing.

    Connects when there is something to send, at most once a second while nobody listens. Lines that the socket
    does not take are kept, ``limit`` at most; later ones are dropped and counted, and the next line that gets
    through says how many.
    """

    def __init__(self, path: str | None, hello: Hello, *, limit: int = 4096) -> None:
        self._path = path
        self._hello = encode(hello)
        self._limit = limit
        self._socket: socket.socket | None = None
        self._pending: deque[bytes] = deque()
        self._retry_at = -math.inf
        self._cut = False
        """Part of the first pending line is gone; on another connection its rest would be garbage."""
        self.dropped = 0

    def send(self, event: Event) -> None:
        if self._path is None:
            return
        if len(self._pending) >= self._limit:
            self._flush()
        if len(self._pending) >= self._limit:
            self.dropped += 1
            return
        try:
            if self.dropped:
                event.dropped = self.dropped
            self._pending.append(encode(event))
            self.dropped = 0
        except (TypeError, ValueError):
            self.dropped += 1
            return
        self._flush()

    def flush(self, timeout: float = 0.0) -> bool:
        """Try to deliver what is pending (at process end, with a time-out); True when nothing is left."""
        deadline = time.monotonic() + timeout
        while True:
            self._flush()
            remaining = deadline - time.monotonic()
            if not self._pending or remaining <= 0:
                return not self._pending
            time.sleep(min(0.01, remaining))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _flush(self) -> None:
        if self._socket is None and not self._connect():
            return
        assert self._socket is not None
        try:
            while self._pending:
                line = self._pending[0]
                sent = self._socket.send(line)
                if sent < len(line):
                    self._pending[0] = line[sent:]
                    self._cut = True
                    return
                self._pending.popleft()
                self._cut = False
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lost()

    def _connect(self) -> bool:
        now = time.monotonic()
        if self._path is None or now < self._retry_at:
            return False
        self._retry_at = now + _RETRY_SECONDS
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(self._path)
        except (OSError, ValueError):
            connection.close()
            return False
        self._socket = connection
        self._pending.appendleft(self._hello)
        return True

    def _lost(self) -> None:
        """The agent closed the connection."""
        self.close()
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if self._cut or (self._pending and self._pending[0] == self._hello):
            self.dropped += self._pending.popleft() != self._hello
        self._cut = False
