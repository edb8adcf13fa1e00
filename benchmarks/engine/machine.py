"""The machine a result belongs to, and whether it is quiet enough to measure on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

QUIET_LOAD = 1.0
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """Nothing in it names a host, a user or a path."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "processor": _first("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 2**20),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "vllm": metadata.version("vllm"),
        "torch": metadata.version("torch"),
        "commit": commit.stdout.strip(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def refusal() -> str | None:
    """Why measuring now would be worthless."""
    load = os.getloadavg()[0]
    if load <= QUIET_LOAD:
        return None
    return f"the load average is {load:.2f}, above {QUIET_LOAD:g}: wait until the machine is quiet, or pass --force"


def available_gigabytes() -> float:
    return int(_first("/proc/meminfo", "MemAvailable").split()[0]) * 1024 / 1e9


def _first(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0"
