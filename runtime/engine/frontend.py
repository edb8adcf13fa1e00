"""When first tokens reach the API server: vLLM's own figure, told to the agent.

Entry point ``vllm.stat_logger_plugins``: vLLM loads it in the API server process alone. It is told of each step's first
tokens how long they took, not whose they are; the arrival time that follows from it is what the agent knows them by.
"""

from __future__ import annotations

from typing import Any

import vllm
from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.guard import harmless
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.engine.versions import base_version
from prefill_runtime.telemetry.events import Hello, Served
from prefill_runtime.telemetry.sender import Sender
from vllm.v1.metrics.loggers import AggregateStatLoggerBase


class FirstTokenLogger(AggregateStatLoggerBase):
    """Silent where the engine has no telemetry socket; nothing it does can fail a request."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._sender: Sender | None = None
        self._connect(vllm_config)

    @harmless
    def _connect(self, vllm_config: Any) -> None:
        try:
            socket = PrefillSettings.of(vllm_config).telemetry_socket
        except SettingsError:  # an engine without our scheduler, or one that refuses to start anyway
            return
        if socket is not None:
            self._sender = Sender(socket, Hello(role="frontend", rank=0, engine_version=base_version(vllm.__version__)))
            self._sender.flush()  # says hello

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if iteration_stats is not None and self._sender is not None and iteration_stats.time_to_first_tokens_iter:
            self._tell(self._sender, iteration_stats)

    @harmless
    def _tell(self, sender: Sender, iteration_stats: Any) -> None:
        for ttft in iteration_stats.time_to_first_tokens_iter:
            sender.send(Served(arrival=iteration_stats.iteration_timestamp - ttft, ttft=max(0.0, ttft)))

    def log_engine_initialized(self) -> None:
        pass
