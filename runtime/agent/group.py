"""The rank group on the wire: newline-delimited JSON over TCP between each agent and rank 0's agent.

Both ends offer the same: ``form`` waits until everybody is there, ``ended`` resolves once when the group
is broken or over, ``close`` says good-bye. The rules are in membership.py, this file only moves bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from prefill_runtime.agent.config import EndReason
from prefill_runtime.agent.membership import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    GroupEnd,
    Members,
    Message,
    Peer,
    RefusedError,
    Silence,
    Step,
    lost,
    refused,
    said_bye,
)
from prefill_runtime.agent.settings import BadConfigurationError, Settings

LINE_LIMIT = 16 * 2**20
JOIN_RETRY_SECONDS = 0.5
CONNECT_SECONDS = 30.0  # a first name server that is down costs each look-up five

now = time.monotonic


class GroupEndedError(Exception):
    def __init__(self, end: GroupEnd) -> None:
        super().__init__(end.message)
        self.end = end


class Member(Protocol):
    """What the agent puts on its beats and does with those of others."""

    def outgoing(self) -> Message: ...
    def incoming(self, rank: int, message: Message) -> None: ...


class Wire:
    """One connection; a peer that stops reading costs memory only until its silence ends the group."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def own_address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def receive(self) -> Message | None:
        """None when the other side is gone. Raises ValueError for something that is no message."""
        try:
            line = await self._reader.readline()
        except OSError:  # also a host that is gone: no route, timed out
            return None
        if not line.endswith(b"\n"):
            return None
        try:
            message = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        return message

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), 1)


class Group:
    """What leader and follower have in common."""

    def __init__(self, settings: Settings, step: Step, member: Member) -> None:
        self.settings, self.step, self.member = settings, step, member
        self.session = ""
        self.address: str | None = None
        self.ended: asyncio.Future[GroupEnd] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def form(self) -> None:
        """Wait until every rank has joined. Raises GroupEndedError or TimeoutError."""
        raise NotImplementedError

    async def close(self, bye: Message) -> None:
        raise NotImplementedError

    def peers(self) -> dict[int, Peer]:
        raise NotImplementedError

    def silence_of(self, rank: int) -> float:
        raise NotImplementedError

    def end(self, end: GroupEnd) -> None:
        if not self.ended.done() and not self._closing:
            self.ended.set_result(end)

    def start(self, work: Callable[[], None]) -> None:
        """Call ``work`` every beat."""

        async def loop() -> None:
            while not self._closing:
                work()
                await asyncio.sleep(BEAT_SECONDS)

        self._keep(asyncio.create_task(loop()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self.end(GroupEnd(EndReason.PEER_LOST, f"the heartbeat of this rank failed: {error!r}"))

    async def _stop_tasks(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _beat(self, peer: Peer) -> Message:
        return {"type": "beat", "session": self.session, "sent": now(), "echo": peer.echo(), **self.member.outgoing()}


class Leader(Group):
    def __init__(self, settings: Settings, step: Step, member: Member) -> None:
        super().__init__(settings, step, member)
        self.session = secrets.token_hex(8)
        self.members = Members(settings.incarnation, settings.config.group.pods, step, now())
        self.leaving: asyncio.Event = asyncio.Event()
        self.who_leaves: set[int] = set()
        self._wires: dict[int, Wire] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def form(self) -> None:
        if self.settings.solitary:
            self.members.launch()
            return
        port = self.settings.config.group.group_port
        try:
            self._server = await asyncio.start_server(self._accept, "0.0.0.0", port, limit=LINE_LIMIT)
        except OSError as error:
            raise BadConfigurationError(f"group port {port} cannot be opened: {error.strerror}") from None
        self.start(self._each_beat)
        while not self.members.complete:
            self._changed.clear()
            await self._changed.wait()
        self.members.launch()
        for wire in self._wires.values():
            wire.send({"type": "launch"})

    def peers(self) -> dict[int, Peer]:
        return self.members.peers

    def silence_of(self, rank: int) -> float:
        return self.members.silence.age(rank, now())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        wire = Wire(reader, writer)
        try:
            first = await asyncio.wait_for(wire.receive(), SILENCE_SECONDS)
            if first is not None:
                await self._serve(self._admit(first, wire), wire)
        except RefusedError as refusal:
            print(f"prefill-agent: refused a rank: {refusal}", flush=True)
            wire.send(refusal.to_message())
        except (TimeoutError, ValueError) as error:
            print(f"prefill-agent: dropped a connection to the group port: {error or 'no join'}", flush=True)
        except asyncio.CancelledError:
            pass  # close() ends us; a cancelled handler would be logged as an error by the server
        finally:
            await wire.close()

    def _admit(self, first: Message, wire: Wire) -> int:
        rank = self.members.admit(first, now())
        self._wires[rank] = wire
        self.address = wire.own_address
        wire.send({"type": "welcome", "session": self.session})
        self._changed.set()
        return rank

    async def _serve(self, rank: int, wire: Wire) -> None:
        end = lost(rank, "its agent closed the connection")
        try:
            while self._wires.get(rank) is wire and (message := await wire.receive()) is not None:
                self.members.heard(rank, message, now())
                match message.get("type"):
                    case "bye":
                        end = said_bye(rank, message)
                        break
                    case "leave":
                        self.who_leaves.add(rank)
                        self.leaving.set()
                    case "beat":
                        self.member.incoming(rank, message)
        except ValueError as error:
            end = lost(rank, f"it sent something unreadable ({error})")
        if self._wires.get(rank) is wire:
            self._gone(rank, end)

    def _gone(self, rank: int, end: GroupEnd) -> None:
        wire = self._wires.pop(rank, None)
        if wire is None:
            return  # gone before
        wire.abort()
        if self.members.launched:
            self.end(end)
        else:
            self.members.forget(rank)

    def _each_beat(self) -> None:
        for rank in self.members.silence.overdue(now()):
            self._gone(rank, lost(rank, f"silent for more than {SILENCE_SECONDS:.0f} s"))
        for rank, wire in self._wires.items():
            wire.send(self._beat(self.members.peers[rank]))

    async def close(self, bye: Message) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        for wire in self._wires.values():
            wire.send({"type": "bye", **bye})
        await asyncio.gather(*(wire.close() for wire in self._wires.values()))
        await self._stop_tasks()


class Follower(Group):
    def __init__(self, settings: Settings, step: Step, member: Member) -> None:
        super().__init__(settings, step, member)
        self.leader = Peer(0)
        self._silence = Silence(now())
        self._wire: Wire | None = None

    async def form(self) -> None:
        self.start(self._each_beat)
        trouble = ""
        while True:
            try:
                if await self._join():
                    return
                news = "rank 0 does not let this rank join yet, or closed the connection before the launch"
            except (OSError, ValueError, TimeoutError) as error:
                news = f"rank 0's agent at {self.settings.config.group.leader} does not answer: {error or 'no reply'}"
            if news != trouble:
                trouble = news
                print(f"prefill-agent: {news}; trying again", flush=True)
            await asyncio.sleep(JOIN_RETRY_SECONDS)

    async def _join(self) -> bool:
        """True when the group has been launched, False to try again."""
        group = self.settings.config.group
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(group.leader, group.group_port, limit=LINE_LIMIT), CONNECT_SECONDS
        )
        wire = Wire(reader, writer)
        launched = False
        try:
            wire.send(
                {
                    "type": "join",
                    "incarnation": self.settings.incarnation,
                    "rank": self.settings.rank,
                    "step": self.step,
                }
            )
            launched = await self._await_launch(wire)
        finally:
            if not launched:
                self._wire = None
                await wire.close()
        if launched:
            self._keep(asyncio.create_task(self._listen(wire)))
        return launched

    async def _await_launch(self, wire: Wire) -> bool:
        answer = await asyncio.wait_for(wire.receive(), SILENCE_SECONDS)
        if answer is not None and answer.get("type") == "refuse":
            end = refused(answer)
            if end is not None:
                raise GroupEndedError(end)
            return False
        if answer is None or answer.get("type") != "welcome":
            return False
        self.session = str(answer.get("session"))
        self._silence.heard(0, now())
        self.address, self._wire, self.leader = wire.own_address, wire, Peer(0)
        while (message := await asyncio.wait_for(wire.receive(), SILENCE_SECONDS)) is not None:
            self._heard(message)
            if message.get("type") == "launch":
                return True
            if message.get("type") == "bye":
                raise GroupEndedError(said_bye(0, message))
        return False

    def _heard(self, message: Message) -> None:
        self._silence.heard(0, now())
        if message.get("type") == "beat":
            self.leader.beat(message, now())

    async def _listen(self, wire: Wire) -> None:
        end = lost(0, "its agent closed the connection")
        try:
            while (message := await wire.receive()) is not None:
                self._heard(message)
                if message.get("type") == "bye":
                    end = said_bye(0, message)
                    break
                if message.get("type") == "beat":
                    if message.get("session") != self.session:
                        end = GroupEnd(EndReason.INCARNATION_CHANGED, "rank 0 speaks for another session")
                        break
                    self.member.incoming(0, message)
        except ValueError as error:
            end = lost(0, f"it sent something unreadable ({error})")
        self.end(end)

    def _each_beat(self) -> None:
        if self._wire is None:
            return
        if self._silence.overdue(now()):
            self.end(lost(0, f"silent for more than {SILENCE_SECONDS:.0f} s"))
        self._wire.send(self._beat(self.leader))

    def peers(self) -> dict[int, Peer]:
        return {0: self.leader} if self._wire else {}

    def silence_of(self, rank: int) -> float:
        return self._silence.age(rank, now())

    def announce_leave(self) -> None:
        if self._wire is not None:
            self._wire.send({"type": "leave"})

    async def close(self, bye: Message) -> None:
        self._closing = True
        if self._wire is not None:
            self._wire.send({"type": "bye", **bye})
            await self._wire.close()
        await self._stop_tasks()


def make_group(settings: Settings, step: Step, member: Member) -> Leader | Follower:
    return Leader(settings, step, member) if settings.leads else Follower(settings, step, member)
