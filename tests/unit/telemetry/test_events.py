from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_runtime.telemetry.events import (
    Call,
    Chunk,
    Decoder,
    Event,
    Fallback,
    Finish,
    Hello,
    Idle,
    Issue,
    Pass,
    Queue,
    Request,
    Served,
    Settle,
    Stamp,
    Start,
    encode,
    to_wire,
)
from prefill_runtime.telemetry.sender import Sender
from prefill_runtime.telemetry.socket import serve

STAMP = Stamp(batch=3, period=2, first=True, idle_before=0.5, host_seconds=0.01, chunks=(Chunk("r1", 512, 256, 4096),))
EVENTS: list[Event] = [
    Hello(role="worker", rank=2, engine_version="0.28.0"),
    Issue(stamp=STAMP, at=1.5, policy="Dynamic"),
    Settle(batch=3, at=2.0),
    Idle(period=2, at=2.0),
    Call(stamp=Stamp(batch=3, period=2, first=True, idle_before=0.5, host_seconds=0.01), at=1.5, rank=1),
    Start(batch=3, at=1.6),
    Pass(stamp=STAMP, stage=5, kind="tail", call=1.0, start=2.0, end=3.0, sent=3.5, rank=0, dropped=4),
    Request(request="r1", prompt_tokens=4096, ttft=1.2, queue=0.1, at=9.0, arrival=1.7e9),
    Served(arrival=1.7e9, ttft=1.25),
    Finish(request="r1", outcome="length"),
    Queue(waiting=1, waiting_tokens=100, inflight=2, at=3.0),
    Fallback(reason="NoCalibration"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.name)
def test_every_event_survives_the_wire(event: Event) -> None:
    decoder = Decoder()
    assert decoder.line(encode(event)) == event
    assert encode(event).count(b"\n") == 1
    assert (decoder.malformed, decoder.unknown) == (0, 0)


def test_wire_form_is_the_contract() -> None:
    assert to_wire(EVENTS[6]) == {
        "event": "pass", "stage": 5, "kind": "tail", "call": 1.0, "start": 2.0, "end": 3.0, "sent": 3.5, "rank": 0,
        "dropped": 4, "batch": 3, "period": 2, "first": True, "idleBefore": 0.5, "hostSeconds": 0.01,
        "chunks": (("r1", 512, 256, 4096),),
    }  # fmt: skip
    assert "chunks" not in to_wire(Call(stamp=STAMP, at=1.0))


def test_a_client_cannot_blow_up_events_with_its_request_id() -> None:
    """vLLM takes an X-Request-Id of megabytes and appends what makes it unique."""
    names = [f"cmpl-{'x' * 1_000_000}-{end}" for end in ("aaaa", "bbbb")]
    stamp = Stamp(batch=1, period=1, chunks=tuple(Chunk(name, 0, 1, 1) for name in names))
    line = encode(Issue(stamp=stamp, at=1.0))
    assert len(line) < 500
    issue = Decoder().line(line)
    assert isinstance(issue, Issue)
    first, second = (chunk.request for chunk in issue.stamp.chunks)
    assert first != second
    assert (len(first), first[:5], first[-4:]) == (128, "cmpl-", "aaaa")
    request = Decoder().line(encode(Request(request=names[0], prompt_tokens=1, ttft=1, queue=0, at=1)))
    assert isinstance(request, Request)
    assert request.request == first


def test_stamp_travels_with_the_scheduler_output() -> None:
    assert pickle.loads(pickle.dumps(STAMP)) == STAMP


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"7", b'{"event":1}', b'{"event":"idle","period":1}', b'{"event":"idle","period":"1","at":2}',
     b'{"event":"idle","period":true,"at":2}', b'{"event":"idle","period":1,"at":NaN}', b"\xff\xfe",
     b'{"event":"pass","batch":1,"stage":0,"call":1,"start":1,"end":1,"sent":1,"chunks":[["r",1]]}',
     b'{"event":"pass","batch":1,"stage":0,"call":1,"start":1,"end":1,"sent":1,"chunks":[["r",1,2,"x"]]}',
     b"[" * 100_000],
)  # fmt: skip
def test_malformed_lines_are_counted(line: bytes) -> None:
    decoder = Decoder()
    assert decoder.line(line) is None
    assert (decoder.malformed, decoder.unknown) == (1, 0)


def test_unknown_events_are_counted_and_unknown_fields_ignored() -> None:
    decoder = Decoder()
    assert decoder.line('{"event":"teleport"}') is None
    assert decoder.line('{"event":"idle","period":1,"at":2,"mood":"good"}') == Idle(period=1, at=2.0)
    assert (decoder.malformed, decoder.unknown) == (0, 1)


KEYS = st.sampled_from(["event", "batch", "at", "chunks", "period"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["idle", "pass", "settle", "x"])


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)))
def test_no_object_breaks_the_decoder(wire: Any) -> None:
    decoder = Decoder()
    event = decoder.wire(wire)
    assert (event is None) == bool(decoder.malformed + decoder.unknown)


async def test_events_arrive_with_the_rank_of_their_hello(tmp_path: Path) -> None:
    got: asyncio.Queue[Event] = asyncio.Queue()
    decoder = Decoder()
    server = await serve(tmp_path / "run" / "t.sock", got.put_nowait, decoder)
    senders = [Sender(str(tmp_path / "run" / "t.sock"), Hello(role="worker", rank=r)) for r in (1, 2)]
    for sender in senders:
        sender.send(Start(batch=7, at=1.0))
        assert sender.flush(5.0)
    events = [await asyncio.wait_for(got.get(), 10) for _ in range(4)]
    assert sorted(e.rank for e in events if isinstance(e, Start)) == [1, 2]
    for sender in senders:
        sender.close()
    await server.close()
    assert not (tmp_path / "run" / "t.sock").exists()
    assert decoder.malformed == 0


async def test_server_survives_garbage_overlong_lines_and_half_a_line(tmp_path: Path) -> None:
    got: asyncio.Queue[Event] = asyncio.Queue()
    decoder = Decoder()
    path = tmp_path / "t.sock"
    server = await serve(path, got.put_nowait, decoder)
    _, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"garbage\n" + b"x" * (3 << 20) + b"\n" + encode(Settle(batch=1, at=1.0)) + b'{"event":"id')
    writer.close()
    assert await asyncio.wait_for(got.get(), 20) == Settle(batch=1, at=1.0)
    await writer.wait_closed()
    _, second = await asyncio.open_unix_connection(str(path))
    second.write(encode(Settle(batch=2, at=1.0)))
    assert await asyncio.wait_for(got.get(), 20) == Settle(batch=2, at=1.0)
    second.close()
    await server.close()
    assert decoder.malformed >= 2


def test_without_a_path_a_sender_does_nothing() -> None:
    sender = Sender(None, Hello(role="worker", rank=0))
    sender.send(Start(batch=1, at=1.0))
    assert sender.flush()
    assert sender.dropped == 0


def test_nobody_listening_costs_a_bounded_buffer(tmp_path: Path) -> None:
    sender = Sender(str(tmp_path / "none.sock"), Hello(role="worker", rank=0), limit=10)
    for n in range(25):
        sender.send(Start(batch=n, at=1.0))
    assert sender.dropped == 15
    assert not sender.flush()


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(10)
    return listener


def test_a_full_socket_never_blocks_and_the_loss_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    with listen(path) as listener:
        sender = Sender(str(path), Hello(role="worker", rank=0), limit=50)
        sender.send(Start(batch=0, at=1.0))
        peer, _ = listener.accept()
        sent = 0
        while sender.dropped < 7:  # nobody reads: the kernel's buffer fills, then ours
            sent += 1
            sender.send(Start(batch=sent, at=1.0))
        with peer, peer.makefile("rb") as lines:
            decoder, batches, dropped = Decoder(), [], 0
            assert decoder.line(lines.readline()) == Hello(role="worker", rank=0)
            while not dropped:
                sender.send(Start(batch=10**9, at=1.0))
                event = decoder.line(lines.readline())
                assert isinstance(event, Start)
                batches.append(event.batch)
                dropped = event.dropped
            kept = [b for b in batches if b < 10**9]
            assert kept == list(range(sent - 7 + 1))
            assert dropped == 7
            assert decoder.malformed == 0
        sender.close()


def draining() -> int:
    return sum(thread.name == "prefill-telemetry" for thread in threading.enumerate())


def test_what_a_full_socket_did_not_take_arrives_without_another_send(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    with listen(path) as listener:
        sender = Sender(str(path), Hello(role="worker", rank=0))
        sender.send(Start(batch=0, at=1.0))
        peer, _ = listener.accept()
        sent = 0
        while len(sender._pending) < 20:  # the agent is late, then the engine falls idle
            sent += 1
            sender.send(Start(batch=sent, at=1.0))
        drains = draining()
        with peer, peer.makefile("rb") as lines:
            peer.settimeout(10)
            decoder, events = Decoder(), []
            for _ in range(sent + 2):
                events.append(decoder.line(lines.readline()))
                drains = max(drains, draining())
        assert drains == 1
        assert events[0] == Hello(role="worker", rank=0)
        assert [e.batch for e in events[1:] if isinstance(e, Start)] == list(range(sent + 1))
        sender.close()


def test_a_lost_agent_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    sender = Sender(str(path), Hello(role="scheduler", rank=0))
    with listen(path) as listener:
        sender.send(Settle(batch=1, at=1.0))
        listener.accept()[0].close()
        while sender._socket is not None:
            sender.send(Settle(batch=2, at=1.0))
    path.unlink()
    with listen(path) as listener:
        assert sender.flush(10.0)
        peer, _ = listener.accept()
        sender.close()
        with peer, peer.makefile("rb") as lines:
            decoder = Decoder()
            events = [decoder.line(line) for line in lines]
    assert events[0] == Hello(role="scheduler", rank=0)
    assert all(isinstance(e, Settle) and e.batch == 2 for e in events[1:])
    assert len(events) > 1
