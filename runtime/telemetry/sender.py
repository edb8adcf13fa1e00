"""The client that sends events from inside an engine process.

The engine must never notice that it is being watched: a send neither blocks nor raises; what cannot be
buffered is dropped and counted.
"""

from __future__ import annotations

import json
import math
import select
import socket
import threading
import time
from collections import deque
from typing import Any

from prefill_runtime.telemetry.events import Event, Hello, encode

_RETRY_SECONDS = 1.0
_LOOK_AGAIN_MS = 1000
_MAX_LINE = 1 << 16
"""Of the agent; about as much is read at a time, so that an agent gone mad cannot stop the engine."""


class Sender:
    """Sends events over a Unix stream socket from inside an engine process; without a path it does nothing.

    Connects when there is something to send, at most once a second while nobody listens. Lines that the socket
    does not take are kept, ``limit`` at most; later ones are dropped and counted, and the next line that gets
    through says how many. What is kept goes out as soon as the agent reads on, also if the engine has nothing more
    to say: the last lines before an idle time are the ones that tell of it.
    """

    def __init__(self, path: str | None, hello: Hello, *, limit: int = 4096) -> None:
        self._path = path
        self._hello = encode(hello)
        self._limit = limit
        self._socket: socket.socket | None = None
        self._pending: deque[bytes] = deque()
        self._retry_at = -math.inf
        self._lock = threading.RLock()
        self._drains = False
        """A thread waits for room in the socket."""
        self._cut = False
        """Part of the first pending line is gone; on another connection its rest would be garbage."""
        self.dropped = 0
        self._heard = b""

    def send(self, event: Event) -> None:
        if self._path is None:
            return
        with self._lock:
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
            with self._lock:
                self._flush()
            remaining = deadline - time.monotonic()
            if not self._pending or remaining <= 0:
                return not self._pending
            time.sleep(min(0.01, remaining))

    def received(self) -> list[dict[str, Any]]:
        """What the agent has said on this connection since the last call: JSON objects, most often none. Lines that are
        something else, or too long, are left out.
        """
        with self._lock:
            heard = self._read()
        if not heard:
            return []
        *lines, rest = (self._heard + heard).split(b"\n")
        # A line that begins with a zero byte is no JSON, however it goes on.
        self._heard = b"" if self._socket is None else rest if len(rest) <= _MAX_LINE else b"\0"
        return [wire for line in lines if (wire := _object(line)) is not None]

    def _read(self) -> bytes:
        heard = b""
        try:
            while self._socket is not None and len(heard) <= _MAX_LINE:
                piece = self._socket.recv(_MAX_LINE)
                if not piece:
                    self._lost()
                heard += piece
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._lost()
        return heard

    def close(self) -> None:
        with self._lock:
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
                    continue
                self._pending.popleft()
                self._cut = False
        except BlockingIOError:
            self._drain_later()
        except OSError:
            self._lost()

    def _drain_later(self) -> None:
        if not self._drains:
            self._drains = True
            threading.Thread(target=self._drain, name="prefill-telemetry", daemon=True).start()

    def _drain(self) -> None:
        """Ends when all is sent or the connection lost."""
        while True:
            with self._lock:
                self._flush()
                if self._socket is None or not self._pending:
                    self._drains = False
                    return
                room = select.poll()
                room.register(self._socket, select.POLLOUT)
            room.poll(_LOOK_AGAIN_MS)

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
        self._socket, self._heard = connection, b""
        self._pending.appendleft(self._hello)
        return True

    def _lost(self) -> None:
        """The agent closed the connection."""
        self.close()
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if self._cut or (self._pending and self._pending[0] == self._hello):
            self.dropped += self._pending.popleft() != self._hello
        self._cut = False


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        wire = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return wire if isinstance(wire, dict) else None
