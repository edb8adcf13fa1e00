"""The operator's settings, and why they are what they are."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass

IMAGE_VARIABLE = "OPERATOR_IMAGE"


@dataclass(frozen=True)
class Settings:
    operator_image: str
    """The operator's own image: ranks take the runtime package from it, so both always fit together."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty: all of them, which needs a ClusterRole."""

    workers: int = 8
    """Pipelines looked at at the same time. A look is a handful of requests, so more would only queue elsewhere."""

    resync_seconds: float = 60.0
    """How often every pipeline is looked at without a cause: the answer to events that were lost."""

    stale_factor: float = 5.0
    """Unhealthy after so many resync periods without a complete one. An API server that restarts takes less."""

    health_port: int = 8080
    metrics_port: int = 9090
    log_level: str = "INFO"


def parse(arguments: Sequence[str]) -> Settings:
    parser = ArgumentParser(prog="prefill-operator", description="Serves PrefillPipelines.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--namespace", action="append", default=[], help="serve this namespace; may be repeated")
    where.add_argument("--all-namespaces", action="store_true", help="serve all namespaces; needs a ClusterRole")
    parser.add_argument("--workers", type=int, default=Settings.workers)
    parser.add_argument("--resync-seconds", type=float, default=Settings.resync_seconds)
    parser.add_argument("--health-port", type=int, default=Settings.health_port)
    parser.add_argument("--metrics-port", type=int, default=Settings.metrics_port)
    parser.add_argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default=Settings.log_level)
    given = parser.parse_args(arguments)
    image = os.environ.get(IMAGE_VARIABLE, "")
    if not image:
        parser.error(f"environment variable {IMAGE_VARIABLE} must name the operator's own image")
    return Settings(
        operator_image=image,
        namespaces=tuple(given.namespace),
        workers=given.workers,
        resync_seconds=given.resync_seconds,
        health_port=given.health_port,
        metrics_port=given.metrics_port,
        log_level=given.log_level,
    )
