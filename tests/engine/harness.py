"""What the engine tests drive: an engine process, the agent's end of its telemetry, prompts and calibrations."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefill_runtime.telemetry.events import Decoder, Event, Hello, WorkerEvent

SHM = Path("/dev/shm")
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


def calibration(a: float, b: float, *, stages: int = 2, base: int = 1024) -> dict[str, Any]:
    """A calibration as the profile step would leave it, made by hand."""
    stage = {"form": "Quadratic", "coefficients": {"a": a, "b": b, "c": 0.01}, "r2": 0.999, "sampleCount": 64,
             "relativeErrorP50": 0.01, "relativeErrorP90": 0.03}  # fmt: skip
    return {
        "schemaVersion": 1, "key": "0123456789abcdef", "model": "tiny", "source": "Profile",
        "createdAt": "2026-01-01T00:00:00Z", "runtimeVersion": "0.1.0", "engineVersion": "0.28.0",
        "baseTokens": base, "targetSeconds": a * base * base + b * base,
        "stages": [{"stage": number} | stage for number in range(stages)],
    }  # fmt: skip


class Agent:
    """Listens where the engine processes send their events, and keeps all of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.decoder = path, Decoder()
        self.events: list[Event] = []
        self._news = threading.Condition()
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
                with self._news:
                    event = self.decoder.line(line)
                    if isinstance(event, Hello):
                        rank = event.rank
                    if isinstance(event, WorkerEvent):
                        event.rank = rank
                    if event is not None:
                        self.events.append(event)
                    self._news.notify_all()

    def mark(self) -> int:
        """Where later events start."""
        with self._news:
            return len(self.events)

    def wait(self, found: Callable[[list[Event]], Any], since: int = 0, timeout: float = 60) -> Any:
        """The first true result of ``found`` for the events after ``since``."""
        deadline = time.monotonic() + timeout
        with self._news:
            while not (result := found(self.events[since:])):
                if not self._news.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"not seen in {timeout} s; the last events: {self.events[since:][-5:]}")
            return result

    def close(self) -> None:
        self._server.close()


def mapped_shm() -> set[str]:
    """Names in /dev/shm that a living process still uses."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        names.update(line.split("/dev/shm/")[1].split()[0] for line in lines if "/dev/shm/" in line)
    return names


class EngineProcess:
    """A process group with an agent to talk to; ``close`` leaves nothing of it behind."""

    def __init__(self, command: list[str], agent: Agent, folder: Path, **environment: str) -> None:
        self.agent = agent
        self.log = folder / "engine.log"
        self._shm = set(os.listdir(SHM))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env=os.environ | ENVIRONMENT | environment,
            )  # fmt: skip

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.agent.close()
        for name in set(os.listdir(SHM)) - self._shm - mapped_shm():
            if name.startswith(("vllm_dist_", "psm_", "sem.mp-")):
                (SHM / name).unlink(missing_ok=True)


class Engine(EngineProcess):
    """An offline engine. Without ``prefill`` it is stock vLLM."""

    def __init__(self, model: Path, folder: Path, prefill: dict[str, Any] | None, **options: Any) -> None:
        agent = Agent(Path(tempfile.mkdtemp(dir=folder)) / "telemetry.sock")
        config = {
            "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 8448, "max_num_seqs": 16,
            "max_num_batched_tokens": 1024, "enable_chunked_prefill": True,
        } | options  # fmt: skip
        if prefill is not None:
            section = prefill | {"telemetrySocket": str(agent.path)}
            config |= {"scheduler_cls": SCHEDULER, "worker_cls": WORKER, "additional_config": {"prefill": section}}
        super().__init__([sys.executable, str(Path(__file__).with_name("host.py")), json.dumps(config)], agent, folder)
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
        return self._do(do="generate", prompts=prompts, **more)

    def tokens(self, prompts: list[list[int]], **more: Any) -> list[list[int]]:
        answer: list[list[int]] = self.generate(prompts, **more)["tokens"]
        return answer

    def submit(self, request: str, one: list[int]) -> None:
        self._do(do="submit", request=request, prompts=[one])

    def abort(self, request: str) -> None:
        self._do(do="abort", request=request)

    def stop(self) -> None:
        """The orderly end."""
        self._do(do="stop")
