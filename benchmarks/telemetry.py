"""What telemetry costs: microseconds per event in the engine process and in the agent.

    python benchmarks/telemetry.py [--events 20000] [--json]

The engine's part is a ``Sender`` on a real Unix socket with a reader in another process; the agent's part is
decoding and accounting. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prefill_runtime.telemetry.clock import SchedulerClock
from prefill_runtime.telemetry.events import Call, Chunk, Decoder, Event, Hello, Pass, Start, encode
from prefill_runtime.telemetry.hub import Hub
from prefill_runtime.telemetry.sender import Sender

ROUNDS = 9


def events(count: int) -> list[Event]:
    """One rank's busy period: call, start and pass of each batch."""
    clock = SchedulerClock(0.0)
    made: list[Event] = []
    for n in range(count // 3):
        stamp = clock.on_issue(float(n), [Chunk("cmpl-0123456789abcdef-0", n * 2048, 2048, count * 2048)])
        made.append(Call(stamp=stamp, at=n + 0.0))
        made.append(Start(batch=stamp.batch, at=n + 0.1))
        made.append(Pass(stamp=stamp, stage=0, call=n + 0.0, start=n + 0.1, end=n + 0.8, sent=n + 0.9))
    return made


def drain(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    while peer.recv(1 << 16):
        pass


def microseconds(work: Callable[[Event], object], batch: list[Event]) -> float:
    start = time.perf_counter()
    for event in batch:
        work(event)
    return (time.perf_counter() - start) / len(batch) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    batch = events(options.events // ROUNDS)
    lines = {id(event): encode(event) for event in batch}
    found: dict[str, list[float]] = {"encode": [], "send": [], "decode": [], "account": []}
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder) / "t.sock")
        listener.bind(path)
        listener.listen()
        reader = multiprocessing.get_context("fork").Process(target=drain, args=(listener,))
        reader.start()
        sender = Sender(path, Hello(role="worker", rank=0))
        decoder, hub = Decoder(), Hub(0, 1, True)
        for _ in range(ROUNDS):
            found["encode"].append(microseconds(encode, batch))
            found["send"].append(microseconds(sender.send, batch))
            sender.flush(5.0)
            found["decode"].append(microseconds(lambda event: decoder.line(lines[id(event)]), batch))
            found["account"].append(microseconds(hub.feed, batch))
        sender.close()
        reader.join(10)
    medians = {name: round(statistics.median(values), 2) for name, values in found.items()}
    if options.json:
        print(json.dumps({"events": len(batch) * ROUNDS, "dropped": sender.dropped, "microseconds": medians}))
        return
    print(f"{len(batch) * ROUNDS} events, {sender.dropped} dropped; median microseconds per event")
    for name, value in medians.items():
        print(f"  {name:<8} {value:7.2f}")


if __name__ == "__main__":
    main()
