"""What the engine tests drive: an engine process, the agent's end of its telemetry, prompts and calibrations."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from prefill_runtime.telemetry.events import Decoder, Event, Finish, Hello, Issue, WorkerEvent
from prefill_runtime.telemetry.hub import Hub

from tests import documents
from tests.engine.shm import unlink_of_group

STATE = re.compile(r'prefill_rank_state_seconds_total{rank="(?P<rank>\d+)",state="(?P<state>\w+)"} (?P<value>\S+)')
SCHEDULER = "prefill_runtime.engine.scheduler.PrefillScheduler"
WORKER = "prefill_runtime.engine.worker.PrefillCPUWorker"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{tokens} {seed}")
    return [source.randrange(4, 1024) for _ in range(tokens)]


def calibration(a: float, b: float, *, stages: int = 2, base: int = 1024, c: float = 0.01) -> dict[str, Any]:
    """A calibration of equal stages that take a l^2 + b l + c, as JSON."""
    document = documents.calibration(c, b, 2 * a, stages=stages, base_tokens=base)
    made: dict[str, Any] = document.model_dump(mode="json", by_alias=True, exclude_none=True)
    return made


def finished(count: int) -> Callable[[list[Event]], list[str]]:
    """The outcomes, once ``count`` requests have ended."""

    def outcomes(events: list[Event]) -> list[str]:
        ends = [x.outcome for x in events if isinstance(x, Finish)]
        return ends if len(ends) >= count else []

    return outcomes


def names_ended(events: list[Event], names: list[str]) -> bool:
    """vLLM adds random digits to a request's name."""
    return {x.request.rpartition("-")[0] for x in events if isinstance(x, Finish)} >= set(names)


def issued(events: list[Event], request: str = "") -> list[tuple[int, int]]:
    """(history, tokens) of each prefill chunk, of one request or of all."""
    return [
        (chunk.history, chunk.tokens)
        for event in events
        if isinstance(event, Issue)
        for chunk in event.stamp.chunks
        if chunk.prefill and chunk.request.startswith(request)
    ]


class Agent:
    """Listens where the engine processes send their events, and keeps all of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.decoder = path, Decoder()
        self.events: list[Event] = []
        self.hub = Hub(0, 2, leader=True, least_chunk=128)
        self._lock = threading.RLock()
        self._asks: list[Callable[[], bool]] = []
        self._scheduler: socket.socket | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        rank = -1
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                with self._lock:
                    event = self.decoder.line(line)
                    if isinstance(event, Hello):
                        rank = event.rank
                        if event.role == "scheduler":
                            self._scheduler = connection
                    if isinstance(event, WorkerEvent):
                        event.rank = rank
                    if event is not None:
                        self.events.append(event)
                        self.hub.feed(event)
                    self._asks = [ask for ask in self._asks if not ask()]

    def tell(self, line: dict[str, Any]) -> None:
        """Says something to the scheduler, which hears it before its next step."""
        assert self._scheduler is not None, "no scheduler has said hello"
        self._scheduler.sendall(json.dumps(line).encode() + b"\n")

    def mark(self) -> int:
        """Where later events start."""
        with self._lock:
            return len(self.events)

    def wait(self, found: Callable[[list[Event]], Any], since: int = 0, timeout: float = 60) -> Any:
        """The first true result of ``found`` for the events after ``since``; asked at each event, so that no state
        between two of them is missed."""
        answer: Future[Any] = Future()

        def ask() -> bool:
            try:
                if result := found(self.events[since:]):
                    answer.set_result(result)
            except Exception as error:
                answer.set_exception(error)
            return answer.done()

        with self._lock:
            if not ask():
                self._asks.append(ask)
        try:
            return answer.result(timeout)
        except TimeoutError:
            with self._lock:
                if not answer.done():
                    self._asks.remove(ask)
                last = self.events[since:][-5:]
            raise TimeoutError(f"not seen in {timeout} s; the last events: {last}") from None

    def states(self) -> tuple[float, dict[int, dict[str, float]]]:
        """The time, and each rank's seconds by state until then, as scraped from /metrics."""
        ranks: dict[int, dict[str, float]] = {}
        with self._lock:
            now, text = time.monotonic(), self.hub.metrics_text().decode()
        for line in text.splitlines():
            if found := STATE.fullmatch(line):
                ranks.setdefault(int(found["rank"]), {})[found["state"]] = float(found["value"])
        return now, ranks

    def close(self) -> None:
        self._server.close()


class EngineProcess:
    """A process group with an agent to talk to; ``close`` leaves nothing of it behind."""

    def __init__(self, command: list[str], agent: Agent, folder: Path, **environment: str) -> None:
        self.agent = agent
        self.log = folder / "engine.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env=os.environ | ENVIRONMENT | environment,
            )  # fmt: skip

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def others_end(self, seconds: float) -> bool:
        """Whether all other processes of the group end by themselves."""
        self.process.wait()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.2)
        return False

    def hang_up(self) -> None:
        """What a kill -9 of the tests does, too."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        unlink_of_group(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.agent.close()


class Engine(EngineProcess):
    """An offline engine. Without ``prefill`` it is stock vLLM."""

    def __init__(self, model: Path, folder: Path, prefill: dict[str, Any] | None, **options: Any) -> None:
        agent = Agent(Path(tempfile.mkdtemp(dir=folder)) / "telemetry.sock")
        config = {
            "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 16_384, "max_num_seqs": 16,
            "max_num_batched_tokens": 1024 + 16, "enable_chunked_prefill": True,
        } | options  # fmt: skip
        self.telling = prefill is not None
        if prefill is not None:
            section = prefill | {"telemetrySocket": str(agent.path)}
            config |= {"scheduler_cls": SCHEDULER, "worker_cls": WORKER, "additional_config": {"prefill": section}}
        ranks = int(config.get("pipeline_parallel_size", 1))  # type: ignore[call-overload]
        cores = "|".join(str(rank % 2) for rank in range(max(ranks, 2)))
        command = [sys.executable, str(Path(__file__).with_name("host.py")), json.dumps(config)]
        super().__init__(command, agent, folder, VLLM_CPU_OMP_THREADS_BIND=cores)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine died:\n{self.log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _do(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def generate(self, prompts: list[list[int]], **more: Any) -> dict[str, Any]:
        """Returns when the events of these requests are here too, so none of them looks like a later test's."""
        answer = self._do(do="generate", prompts=prompts, **more)
        if self.telling:
            self.agent.wait(lambda events: names_ended(events, answer["names"]))
        return answer

    def tokens(self, prompts: list[list[int]], **more: Any) -> list[list[int]]:
        answer: list[list[int]] = self.generate(prompts, **more)["tokens"]
        return answer

    def submit(self, request: str, one: list[int], **more: Any) -> None:
        self._do(do="submit", request=request, prompts=[one], **more)

    def abort(self, request: str) -> None:
        self._do(do="abort", request=request)


class Server(EngineProcess):
    """``vllm serve`` with two stages."""

    def __init__(self, model: Path, folder: Path, prefill: dict[str, Any], *options: str) -> None:
        agent = Agent(Path(tempfile.mkdtemp(dir=folder)) / "telemetry.sock")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        section = {"prefill": prefill | {"telemetrySocket": str(agent.path)}}
        command = [
            sys.executable, str(Path(__file__).with_name("guard.py")),
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "8448", "--max-num-seqs", "16", "--max-num-batched-tokens", str(1024 + 16),
            "--pipeline-parallel-size", "2", "--no-async-scheduling", "--no-enable-prefix-caching",
            "--scheduler-cls", SCHEDULER, "--worker-cls", WORKER, "--additional-config", json.dumps(section), *options,
        ]  # fmt: skip
        super().__init__(command, agent, folder)

    def wait_ready(self, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), contextlib.closing(self._connection()) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"the server is not ready:\n{self.log_tail()}")

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def request(self, tokens: list[int], **more: Any) -> http.client.HTTPConnection:
        """Sends a completion request and leaves its answer to be read."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True} | more  # fmt: skip
        connection = self._connection()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def metrics(self) -> str:
        """vLLM's own."""
        with contextlib.closing(self._connection()) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    def complete(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        with contextlib.closing(self.request(tokens, **more)) as connection:
            response = connection.getresponse()
            text = response.read()
        assert response.status == 200, text
        choice: dict[str, Any] = json.loads(text)["choices"][0]
        return choice
