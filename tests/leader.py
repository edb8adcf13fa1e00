"""Stands in for the control port of a serving group's rank 0: a real HTTP server on a loopback address of its own."""

from __future__ import annotations

import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Event, Thread

from prefill_runtime.agent.config import CONTROL_PORT


class Leader:
    """``offer`` is the body of /calibration, None a 404; ``status`` replaces 200; ``held`` lets requests wait."""

    def __init__(self) -> None:
        self.address = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}"
        self.offer: str | None = None
        self.status = 200
        self.headers: dict[str, str] = {}
        self.released = Event()
        self.released.set()
        self._asked = Condition()
        self._count = 0
        self._server = ThreadingHTTPServer((self.address, CONTROL_PORT), self._handler())
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Leader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def count(self) -> int:
        return self._count

    def wait_asked(self, times: int = 1, seconds: float = 30) -> None:
        """Until it was asked ``times`` more."""
        with self._asked:
            goal = self._count + times
            assert self._asked.wait_for(lambda: self._count >= goal, seconds), f"asked {self._count} times"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self._asked:
            self._count += 1
            self._asked.notify_all()
        self.released.wait(60)
        status = self.status if self.offer is not None and handler.path == "/calibration" else 404
        body = (self.offer or "").encode()
        handler.send_response(status)
        for name, value in self.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        return Handler
