"""The way down: what the agent says to an engine process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.telemetry.events import Event, Hello, Queue
from prefill_runtime.telemetry.sender import Sender
from prefill_runtime.telemetry.socket import Server, serve

SAID = {"calibration": {"key": "k"}}


def sender(path: Path, role: str = "scheduler") -> Sender:
    made = Sender(str(path), Hello(role=role, rank=0))
    assert made.flush(5)
    return made


def until_told(each: Sender) -> list[dict[str, Any]]:
    """Waits for the socket, as the engine never does."""
    assert each._socket is not None
    each._socket.setblocking(True)
    each._socket.settimeout(5)
    first = each._socket.recv(1, socket.MSG_PEEK)
    each._socket.setblocking(False)
    assert first
    return each.received()


class Agent:
    def __init__(self, server: Server, events: asyncio.Queue[Event]) -> None:
        self.server, self.events = server, events

    async def hellos(self, count: int) -> None:
        for _ in range(count):
            assert isinstance(await asyncio.wait_for(self.events.get(), 5), Hello)


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    events: asyncio.Queue[Event] = asyncio.Queue()
    server = await serve(tmp_path / "t.sock", events.put_nowait)
    yield Agent(server, events)
    await server.close()


async def test_only_processes_of_the_role_hear_it(agent: Agent, tmp_path: Path) -> None:
    schedulers = [sender(tmp_path / "t.sock") for _ in range(2)]
    worker = sender(tmp_path / "t.sock", "worker")
    await agent.hellos(3)
    agent.server.tell("scheduler", SAID)
    assert [await asyncio.to_thread(until_told, each) for each in schedulers] == [[SAID], [SAID]]
    assert worker.received() == []
    assert schedulers[0].received() == []
    for each in (*schedulers, worker):
        each.close()


async def test_who_comes_later_hears_the_last_word(agent: Agent, tmp_path: Path) -> None:
    agent.server.tell("scheduler", {"calibration": "old"})
    agent.server.tell("scheduler", SAID)
    late = sender(tmp_path / "t.sock")
    assert await asyncio.to_thread(until_told, late) == [SAID]
    late.close()


async def test_a_process_that_never_reads_does_not_fill_the_agent(agent: Agent, tmp_path: Path) -> None:
    deaf = sender(tmp_path / "t.sock")
    await agent.hellos(1)
    (writer,) = agent.server._connections
    for _ in range(100):
        agent.server.tell("scheduler", {"text": "x" * 20_000})
    assert 0 < writer.transport.get_write_buffer_size() <= 1 << 18
    assert len(await asyncio.to_thread(until_told, deaf)) > 1
    deaf.close()


async def test_sending_goes_on_beside_receiving(agent: Agent, tmp_path: Path) -> None:
    one = sender(tmp_path / "t.sock")
    await agent.hellos(1)
    agent.server.tell("scheduler", SAID)
    one.send(Queue(waiting=1, waiting_tokens=2, inflight=3, at=4.0))
    assert await asyncio.wait_for(agent.events.get(), 5) == Queue(waiting=1, waiting_tokens=2, inflight=3, at=4.0)
    assert await asyncio.to_thread(until_told, one) == [SAID]
    one.close()


class Mouth:
    """An agent that says whatever a test wants."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self.sender = sender(path)
        self.voice, _ = self._listener.accept()

    def close(self) -> None:
        for each in (self.voice, self._listener, self.sender):
            each.close()


@pytest.fixture
def mouth(tmp_path: Path) -> Any:
    made = Mouth(tmp_path / "m.sock")
    yield made
    made.close()


def test_pieces_of_a_line_wait_for_its_end(mouth: Mouth) -> None:
    mouth.voice.sendall(b'{"a": 1}\n{"b"')
    assert mouth.sender.received() == [{"a": 1}]
    assert mouth.sender.received() == []
    mouth.voice.sendall(b": 2}\n")
    assert mouth.sender.received() == [{"b": 2}]


@pytest.mark.parametrize("line", [b"[1]", b"7", b"{", b"\xff\xfe", b"", b"[" * 50_000, b'{"a":' + b"9" * 5000 + b"}"])
def test_what_is_no_object_is_left_out(mouth: Mouth, line: bytes) -> None:
    mouth.voice.sendall(line + b'\n{"a": 1}\n')
    assert mouth.sender.received()[-1] == {"a": 1}


def test_an_endless_line_is_left_out_and_takes_no_memory(mouth: Mouth) -> None:
    for _ in range(20):
        mouth.voice.sendall(b'"x"' * 30_000)
        while mouth.sender.received() or len(mouth.sender._heard) not in (0, 1):
            pass
        assert len(mouth.sender._heard) <= 1 << 16
    mouth.voice.sendall(b'\n{"a": 1}\n')
    assert mouth.sender.received() == [{"a": 1}]


def test_the_agents_end_is_noticed_and_its_last_words_heard(mouth: Mouth) -> None:
    mouth.voice.sendall(b'{"a": 1}\n{"cut')
    mouth.voice.close()
    assert mouth.sender.received() == [{"a": 1}]
    assert mouth.sender.received() == []
    assert mouth.sender._socket is None


def test_without_an_agent_nothing_is_received() -> None:
    assert Sender(None, Hello(role="scheduler", rank=0)).received() == []
