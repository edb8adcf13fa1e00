"""Real agent processes on loopback, around an engine command that only behaves like one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
KEY = "00112233445566ff"
AGENT = (sys.executable, "-m", "prefill_runtime.agent")
LIMIT = 30.0  # generous: these tests say what happens, not how quickly


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(what: str, check: Callable[[], Any], limit: float = LIMIT) -> Any:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if value := check():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {limit} s")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Rank:
    """One agent process and what it leaves behind."""

    def __init__(self, folder: Path, rank: int, config: dict[str, Any], incarnation: str, calibration: str) -> None:
        self.rank, self.config = rank, config
        self.state, self.termination = folder / "run", folder / "termination"
        self._files, self._log = folder / "etc", folder / "log"
        self._files.mkdir(parents=True)
        (self._files / "config.json").write_text(json.dumps(config))
        (self._files / "incarnation").write_text(incarnation)
        (self._files / "calibration.json").write_text(calibration)
        self._path = f"{folder.parent / 'bin'}:{os.environ['PATH']}"
        self.process: subprocess.Popen[bytes]

    def start(self, step: str = "serve", program: Sequence[str] = AGENT, **environment: str) -> Rank:
        command = [*program, step, "--config", str(self._files)]
        command += ["--state", str(self.state), "--termination", str(self.termination)]
        ours = {"PATH": self._path, "PYTHONPATH": str(ROOT / ".links"), "PREFILL_RANK": str(self.rank)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | ours | environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.config['group']['controlPort']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> dict[str, Any]:
        code, text = self.get("/status")
        return json.loads(text) if code == 200 else {}

    def until_phase(self, phase: str, limit: float = LIMIT) -> Rank:
        def there() -> bool:
            assert self.process.poll() is None, self.log()
            return self.status().get("phase") == phase

        until(f"rank {self.rank} in phase {phase}", there, limit)
        return self

    def engine_pids(self) -> tuple[int, int]:
        """The engine and its worker."""
        found = re.findall(r"fake engine (\d+) with worker (\d+)", self.log())
        return int(found[-1][0]), int(found[-1][1])

    def exit_code(self) -> int:
        return self.process.wait(LIMIT)

    def last_words(self) -> dict[str, Any]:
        return json.loads(self.termination.read_text())

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        for engine, worker in re.findall(r"fake engine (\d+) with worker (\d+)", self.log()):
            for pid in (int(engine), int(worker)):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


class Site:
    """Where the ranks of one group come from; ports are given per rank, since all share one host here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[Rank] = []
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"vocab_size": 100}))
        program = folder / "bin" / "vllm"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_vllm.py")} "$@"\n')
        program.chmod(0o755)
        self._shared = dict(zip(("groupPort", "storePort", "enginePort"), free_ports(3), strict=True))

    def config(self, pods: int, **changes: Any) -> dict[str, Any]:
        document: dict[str, Any] = {
            "identity": {"namespace": "n", "pipeline": "p", "replica": 0},
            "group": {"leader": "127.0.0.1", "pods": pods, "controlPort": free_ports(1)[0], **self._shared},
            "engine": {
                "device": "CPU",
                "servedModelName": "m",
                "modelPath": str(self.model),
                "pipeline": max(2, pods),
                "tensor": 1,
                "maxModelLen": 8192,
            },
            "chunking": {"policy": "Fixed", "maxTokens": 1024, "minTokens": 64, "smoothingFactor": 1.0},
            "profiling": {
                "samples": 16, "historyDepths": 2, "timeoutSeconds": 30, "weights": "Real", "reuse": "IfValid",
            },
            "calibrationKey": KEY,
            "startupSeconds": 25,
            "graceSeconds": 20,
        }  # fmt: skip
        for path, value in changes.items():
            section, _, name = path.partition("__")
            if name:
                document[section][name] = value
            else:
                document[section] = value
        return document

    def rank(
        self, rank: int, pods: int = 2, incarnation: str = "life-1", calibration: str = "", **changes: Any
    ) -> Rank:
        folder = self.folder / f"{len(self.ranks)}"
        made = Rank(folder, rank, self.config(pods, **changes), incarnation, calibration)
        self.ranks.append(made)
        return made

    def ready_pair(self, **changes: Any) -> tuple[Rank, Rank]:
        leader, follower = self.rank(0, **changes).start(), self.rank(1, **changes).start()
        return leader.until_phase("Ready"), follower.until_phase("Ready")
