"""The agent's end of the telemetry socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefill_runtime.telemetry.events import Decoder, Event, Hello, WorkerEvent

log = logging.getLogger(__name__)

_MAX_LINE = 1 << 20
_MAX_UNREAD = 1 << 18
"""A process that does not read what it is told must not fill the agent's memory."""


class Server:
    """A listening telemetry socket."""

    def __init__(self, path: Path, callback: Callable[[Event], None], decoder: Decoder) -> None:
        self._path = path
        self._callback = callback
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, str] = {}  # and the role of each
        self._told: dict[str, bytes] = {}
        self._decoder = decoder

    async def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A container restart leaves the last life's socket in the pod's emptyDir.
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=_MAX_LINE)

    def tell(self, role: str, wire: dict[str, Any]) -> None:
        """Say ``wire`` to the processes of that role, those of now and those that come later. Only the last word to a
        role is kept for the latter.
        """
        self._told[role] = json.dumps(wire, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        for writer, theirs in self._connections.items():
            if theirs == role:
                self._say(writer, role)

    def _say(self, writer: asyncio.StreamWriter, role: str) -> None:
        if role in self._told and not writer.is_closing():
            if writer.transport.get_write_buffer_size() + len(self._told[role]) <= _MAX_UNREAD:
                writer.write(self._told[role])
            else:
                log.warning("a %s process does not read what the agent tells it", role)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._connections):
            writer.close()
        await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = ""
        rank = -1
        try:
            while line := await self._line(reader):
                event = self._decoder.line(line)
                if event is None:
                    continue
                if isinstance(event, Hello):
                    rank, self._connections[writer] = event.rank, event.role
                    self._say(writer, event.role)
                elif isinstance(event, WorkerEvent):
                    event.rank = rank
                self._callback(event)
        except ConnectionError:
            log.info("telemetry connection of rank %d was reset", rank)
        finally:
            self._connections.pop(writer, None)
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
