"""One arm's engine under the product's agent: start, ask, state seconds, stop."""

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
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine.machine import ROOT
from benchmarks.engine.sites import Arm, Site

STATE = re.compile(r'^prefill_rank_state_seconds_total{rank="(\d+)",state="(\w+)"} (\S+)$', re.MULTILINE)
FALLBACK = re.compile(r'^prefill_policy_fallback_total{reason="(\w+)"} (\S+)$', re.MULTILINE)
STARTING_SECONDS, STOPPING_SECONDS = 600.0, 60.0
QUIET_ENTRY = "[vllm.general_plugins]\nquiet = prefill_runtime.engine.emulation:sleep_at_once\n"


class EngineDiedError(RuntimeError):
    pass


@dataclass(frozen=True)
class Answer:
    seconds: float
    tokens: list[int]


def prompt(tokens: int, seed: object) -> list[int]:
    """New content each time, so that no cache helps."""
    source = random.Random(f"{tokens} {seed}")
    return [source.randrange(4, 1024) for _ in range(tokens)]


def free_ports(*names: str) -> dict[str, int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {name: made.getsockname()[1] for name, made in zip(names, sockets, strict=True)}


class AgentRun:
    """``prefill-agent STEP`` as in a pod of its own, below ``folder``."""

    def __init__(
        self, step: str, site: Site, arm: Arm, folder: Path, *, calibration: str = "", **profiling: Any
    ) -> None:
        from localcluster import models

        self.site, self.arm, self.folder = site, arm, folder
        self.ports = free_ports("enginePort", "controlPort", "groupPort", "storePort")
        config = arm.rank_config(site, str(models.ensure(site.model)), self.ports, profiling or None)
        files = folder / "etc"
        files.mkdir(parents=True, exist_ok=True)
        (files / "config.json").write_text(json.dumps(config))
        (files / "incarnation").write_text("bench")
        (files / "calibration.json").write_text(calibration)
        self.termination = folder / "termination"
        self.termination.unlink(missing_ok=True)
        self.log = folder / f"{step}.log"
        command = [sys.executable, "-m", "prefill_runtime.agent", step, "--config", str(files)]
        command += ["--state", str(folder / "run"), "--termination", str(self.termination)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _environment(self) -> dict[str, str]:
        """Emulated ranks share this host only because they are emulated."""
        paths = [str(ROOT / ".links"), str(ROOT)]
        if self.site.emulate is not None:
            info = self.folder / "quiet-0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet\nVersion: 0\n")
            (info / "entry_points.txt").write_text(QUIET_ENTRY)
            paths.append(str(self.folder))
        return os.environ | self.site.environment() | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ":".join(paths),
            "PREFILL_RANK": "0", "VLLM_LOGGING_LEVEL": "WARNING", "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
        }  # fmt: skip

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.process.pid)
            return [agent, *agent.children(recursive=True)]
        return []

    def pause(self) -> None:
        """Stop all its processes, until ``resume``."""
        self._each(psutil.Process.suspend)

    def resume(self) -> None:
        self._each(psutil.Process.resume)

    def _each(self, do: Callable[[psutil.Process], None]) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                do(process)

    def close(self) -> None:
        """The agent ends its engine and whatever that leaves behind."""
        self.resume()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOPPING_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()  # what vLLM leaves then is ended by the next run
                self.process.wait()


class Engine(AgentRun):
    """A serving arm. The constructor returns while it still starts."""

    def __init__(self, site: Site, arm: Arm, folder: Path, calibration: str = "") -> None:
        super().__init__("serve", site, arm, folder, calibration=calibration)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + STARTING_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                self._control("/readyz")
                return
            time.sleep(0.5)
        raise EngineDiedError(f"{self.site.name}, {self.arm.name}: the engine is not ready:\n{self.tail()}")

    def _control(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['controlPort']}{path}", timeout=10) as response:
            text: str = response.read().decode()
            return text

    def ask(self, tokens: list[int], answer: int = 1) -> Answer:
        """With one token to answer, the time of the whole answer is the TTFT."""
        body = json.dumps({
            "model": "bench", "prompt": tokens, "max_tokens": answer, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        })  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["enginePort"], timeout=3600)
        with contextlib.closing(connection):
            began = time.monotonic()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            took = time.monotonic() - began
        if response.status != 200:
            raise EngineDiedError(f"{self.arm.name}: HTTP {response.status}: {text[:500]!r}")
        return Answer(took, json.loads(text)["choices"][0]["token_ids"])

    def ask_all(self, prompts: list[list[int]]) -> Answer:
        """At once; the seconds until the last is answered, and the answers in the order of the prompts."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(self.ask, prompts))
        return Answer(max(one.seconds for one in answers), [token for one in answers for token in one.tokens])

    def states(self) -> dict[str, float] | None:
        """Seconds by state, summed over the ranks; None for stock vLLM, which tells nothing."""
        if self.arm.stock:
            return None
        found: dict[str, float] = {}
        for _, state, value in STATE.findall(self._control("/metrics")):
            found[state] = found.get(state, 0.0) + float(value)
        return found

    def processor_seconds(self) -> float:
        """Of all its processes, those of before included."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total

    def fallback(self) -> str:
        """Why chunks are Fixed although another policy was asked for; empty when they are not."""
        if self.arm.stock:
            return ""
        return ", ".join(reason for reason, count in FALLBACK.findall(self._control("/metrics")) if float(count))
