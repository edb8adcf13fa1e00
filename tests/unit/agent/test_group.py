"""Leader and followers on loopback in one event loop: what the wire does, apart from the rules."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.agent import group
from prefill_runtime.agent.config import RankConfig
from prefill_runtime.agent.group import Follower, Leader, Wire
from prefill_runtime.agent.membership import Message
from prefill_runtime.agent.settings import Places, Settings

from tests.unit.agent.harness import KEY, free_ports


class Quiet:
    def outgoing(self) -> Message:
        return {}

    def incoming(self, rank: int, message: Message) -> None:
        pass


def settings_of(rank: int, port: int, leader: str = "127.0.0.1", pods: int = 2) -> Settings:
    document: dict[str, Any] = {
        "identity": {"namespace": "n", "pipeline": "p", "replica": 0},
        "group": {"leader": leader, "pods": pods, "groupPort": port},
        "engine": {
            "device": "CPU", "servedModelName": "m", "modelPath": "m", "pipeline": pods, "tensor": 1, "maxModelLen": 64,
        },
        "chunking": {"policy": "Fixed", "maxTokens": 64, "minTokens": 64, "smoothingFactor": 1.0},
        "calibrationKey": KEY,
        "startupSeconds": 25,
        "graceSeconds": 20,
    }  # fmt: skip
    config = RankConfig.model_validate(document)
    return Settings(config=config, rank=rank, incarnation="life-1", calibration="", places=Places(state=Path("x")))


async def port_open(leader: Leader) -> None:
    while leader._server is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    made = Leader(settings_of(0, free_ports(1)[0]), "serve", Quiet())
    forming = asyncio.create_task(made.form())
    await port_open(made)
    yield made
    forming.cancel()
    await made.close({})


def follower_of(leader: Leader, host: str = "127.0.0.1") -> Follower:
    return Follower(settings_of(1, leader.settings.config.group.group_port, host), "serve", Quiet())


async def connect(leader: Leader) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", leader.settings.config.group.group_port)


@pytest.mark.parametrize("noise", [b"[" * 200_000 + b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"12\n", b""])
async def test_strangers_on_the_port_do_no_harm(leader: Leader, noise: bytes) -> None:
    _, writer = await connect(leader)
    writer.write(noise)
    writer.write_eof()
    follower = follower_of(leader)
    await asyncio.wait_for(follower.form(), 20)
    assert not leader.ended.done()
    writer.close()
    await follower.close({})


async def test_a_rank_whose_old_connection_is_not_missed_yet_joins_in_the_end() -> None:
    leader = Leader(settings_of(0, free_ports(1)[0], pods=3), "serve", Quiet())
    forming = asyncio.create_task(leader.form())
    await port_open(leader)
    reader, writer = await connect(leader)
    writer.write(json.dumps({"type": "join", "rank": 1, "incarnation": "life-1", "step": "serve"}).encode() + b"\n")
    assert json.loads(await reader.readline())["type"] == "welcome"
    again = follower_of(leader)
    joining = asyncio.create_task(again.form())
    old = leader._wires[1]
    await asyncio.wait({joining}, timeout=1)  # refused at least once
    assert not joining.done()
    writer.close()
    while leader._wires.get(1) in (None, old):
        assert not joining.done()
        await asyncio.sleep(0.02)
    forming.cancel()
    joining.cancel()
    await asyncio.gather(forming, joining, return_exceptions=True)
    await again.close({})
    await leader.close({})


async def test_a_slow_name_server_costs_time_but_not_the_group(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up takes longer than a silent peer is waited for, as with a dead first name server."""
    monkeypatch.setattr(group, "SILENCE_SECONDS", 2.0)
    loop, stock = asyncio.get_running_loop(), asyncio.get_running_loop().getaddrinfo

    async def slow(host: Any, port: Any, **options: Any) -> Any:
        if host == "leader.example":
            await asyncio.sleep(2.5)
            host = "127.0.0.1"
        return await stock(host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    follower = follower_of(leader, "leader.example")
    await asyncio.wait_for(follower.form(), 20)
    await follower.close({})


@pytest.mark.parametrize("error", [OSError(113, "No route to host"), TimeoutError(110, "timed out"), ConnectionError()])
async def test_a_host_that_is_gone_is_a_closed_connection(error: OSError) -> None:
    reader = asyncio.StreamReader()
    reader.set_exception(error)
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    assert await Wire(reader, writer).receive() is None
    writer.close()
    theirs.close()
