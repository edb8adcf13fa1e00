"""The agent's end of the telemetry socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from prefill_runtime.telemetry.events import Decoder, Event, Hello, WorkerEvent

log = logging.getLogger(__name__)

_MAX_LINE = 1 << 20


class Server:
    """A listening telemetry socket."""

    def __init__(self, path: Path, callback: Callable[[Event], None], decoder: Decoder) -> None:
        self._path = path
        self._callback = callback
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._decoder = decoder

    async def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A container restart leaves the last life's socket in the pod's emptyDir.
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=_MAX_LINE)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._connections):
            writer.close()
        await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        rank = -1
        try:
            while line := await self._line(reader):
                event = self._decoder.line(line)
                if event is None:
                    continue
                if isinstance(event, Hello):
                    rank = event.rank
                elif isinstance(event, WorkerEvent):
                    event.rank = rank
                self._callback(event)
        except ConnectionError:
            log.info("telemetry connection of rank %d was reset", rank)
        finally:
            self._connections.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        """The next complete line; empty at the end. Overlong lines are skipped and counted."""
        skipping = False
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                self._decoder.malformed += bool(end.partial)
                return b""
            except asyncio.LimitOverrunError as overrun:
                await reader.readexactly(max(1, overrun.consumed))
                skipping = True
                continue
            if not skipping:
                return line
            self._decoder.malformed += 1
            skipping = False


async def serve(path: Path | str, callback: Callable[[Event], None], decoder: Decoder | None = None) -> Server:
    """Listen on ``path`` and feed ``callback`` with events; worker events get the rank of their ``hello``.

    ``decoder`` counts what was no event (``Hub.decoder``).
    """
    server = Server(Path(path), callback, decoder or Decoder())
    await server.start()
    return server
