"""Behaves like ``vllm serve`` towards its agent: arguments, HTTP, a worker process, signals, telemetry.

Knobs come in through FAKE_* variables: FAKE_NEVER_READY, FAKE_FAIL (exit at once, with an error line),
FAKE_BUSY_FILE (requests running while the file exists), FAKE_IGNORE_TERM, FAKE_ANSWER (status of all completions;
0: never an answer), FAKE_SILENT (stage that reports no pass), FAKE_JUMPS (its clock goes back in every fifth pass),
FAKE_CONCAVE (chunks get quicker with depth).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--pipeline-parallel-size", type=int)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--additional-config", type=json.loads, default={})
    return parser.parse_known_args()[0]


class Telemetry:
    """The passes that a real worker of each stage would report, and what its scheduler is told."""

    def __init__(self, socket: str, stages: int) -> None:
        from prefill_runtime.telemetry.events import Hello
        from prefill_runtime.telemetry.sender import Sender

        self._batch = self._period = 0
        self._one_engine = threading.Lock()
        silent = int(os.environ.get("FAKE_SILENT", "-1"))
        self._workers = {
            rank: Sender(socket, Hello(role="worker", rank=rank, engine_version="fake"))
            for rank in range(stages)
            if rank != silent
        }
        self._scheduler = Sender(socket, Hello(role="scheduler", rank=0, engine_version="fake"))
        self._scheduler.flush(1.0)

    def prompt(self, request: str, chunks: list[int]) -> None:
        with self._one_engine:
            self._prompt(request, chunks)

    def _prompt(self, request: str, chunks: list[int]) -> None:
        from prefill_runtime.telemetry.events import Chunk, Pass, Stamp

        self._period += 1
        for index, tokens in enumerate(chunks):
            self._batch += 1
            history = sum(chunks[:index])
            chunk = Chunk(request, history, tokens, sum(chunks))
            stamp = Stamp(batch=self._batch, period=self._period, chunks=(chunk,))
            for stage, sender in self._workers.items():
                seconds = (stage + 1) * (2e-8 * tokens * (tokens + 2 * history) + 1e-5 * tokens + 1e-3)
                if os.environ.get("FAKE_CONCAVE"):
                    seconds = 1e-3 * (1 + (history + tokens) ** 0.5 - history**0.5)
                if os.environ.get("FAKE_JUMPS") and self._batch % 5 == 0:
                    seconds = -3600.0
                now = time.monotonic()
                sender.send(Pass(stamp=stamp, stage=stage, call=now, start=now, end=now + seconds, sent=now + seconds))
                sender.flush(1.0)

    def hear(self) -> None:
        with self._one_engine:
            wires = self._scheduler.received()
        for wire in wires:
            print(f"fake scheduler was told {json.dumps(wire)}", flush=True)


class Handler(BaseHTTPRequestHandler):
    """One connection. It is offered for further requests, as vLLM's is, and always closed when the next one comes."""

    protocol_version = "HTTP/1.1"
    telemetry: Telemetry | None = None
    max_tokens = 0
    answered = False

    def parse_request(self) -> bool:
        if self.answered:
            self.close_connection = True
            return False
        return super().parse_request()

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(503 if os.environ.get("FAKE_NEVER_READY") else 200, "")
        elif self.path == "/metrics":
            busy = Path(os.environ.get("FAKE_BUSY_FILE", "/nonexistent")).exists()
            self._answer(200, f'vllm:num_requests_running{{engine="0"}} {float(busy)}\nvllm:num_requests_waiting 0.0\n')
        else:
            self._answer(404, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = int(os.environ.get("FAKE_ANSWER", "200"))
        if not answer:
            print("fake engine does not answer", flush=True)
            threading.Event().wait()
        sizes = body.get("vllm_xargs", {}).get("prefill_chunks")
        if self.telemetry:
            tokens, most = len(body["prompt"]), self.max_tokens
            fixed = [min(most, tokens - at) for at in range(0, tokens, most)]
            chunks = [int(size) for size in sizes.split(",")] if sizes else fixed
            self.telemetry.prompt(f"cmpl-{body.get('request_id')}-0", chunks)
            self.telemetry.hear()
        self._answer(answer, "{}")

    def _answer(self, status: int, text: str) -> None:
        self.answered = True
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    arguments = parse()
    if os.environ.get("FAKE_FAIL"):
        print("ValueError: the fake has no such head size", flush=True)
        print("\n".join(f"line {i} that only points back" for i in range(60)), flush=True)
        sys.exit(0)
    if os.environ.get("FAKE_IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    worker = subprocess.Popen(["sleep", "600"])
    print(f"fake engine {os.getpid()} with worker {worker.pid}", flush=True)
    if arguments.headless:
        threading.Event().wait()
    settings = arguments.additional_config.get("prefill", {})
    if settings:
        Handler.max_tokens = settings["maxTokens"]
        Handler.telemetry = Telemetry(settings["telemetrySocket"], arguments.pipeline_parallel_size)
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
