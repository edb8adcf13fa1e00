"""What is compared: sites (a model on a device, cut into ranks) and arms (who cuts the prompts into chunks)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from prefill_runtime.cli.paper import deepseek
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.costfile import dump_cost

K = 1024
SEQUENCES = 8
BLOCK = 128
EMULATED = deepseek()
"""A large model's accelerators at long contexts: whole-model seconds."""


@dataclass(frozen=True)
class Site:
    """Everything that the arms of one comparison have in common.

    cached_tokens: what the KV cache holds. seconds: (per token squared, per token) of all ranks together, a rough guess
    that only time estimates use.
    """

    name: str
    model: str
    ranks: int
    longest: int
    cached_tokens: int
    seconds: tuple[float, float]
    emulate: PipelineCost | None = None

    @property
    def max_model_len(self) -> int:
        return min(self.longest + 128, 8192) if self.model == "smollm2" else self.longest + 128

    def guess(self, tokens: int) -> float:
        """Seconds to the first token."""
        a, b = self.seconds
        return (a * tokens + b) * tokens / self.ranks * (1.05 + 0.05 * (self.ranks > 2)) + 0.3

    @property
    def start_seconds(self) -> float:
        """Per engine, with two starting at a time."""
        return 12.0 + 3.0 * self.ranks

    @property
    def engine_gigabytes(self) -> float:
        return 1.5 + 0.85 * self.ranks

    def engine_arguments(self, virtual: int) -> list[str]:
        arguments = ["--max-num-seqs", str(SEQUENCES), "--num-gpu-blocks-override", str(self.cached_tokens // BLOCK)]
        arguments += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        if self.emulate is not None:
            overrides = json.dumps({"num_hidden_layers": self.ranks * virtual}, separators=(",", ":"))
            arguments += ["--hf-overrides", overrides, "--load-format", "dummy"]
        return arguments

    def environment(self) -> dict[str, str]:
        """One core per rank; emulated ranks need none, so they float."""
        cores = "nobind" if self.emulate is not None else "|".join(str(rank) for rank in range(self.ranks))
        return {"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"}

    def emulation(self) -> dict[str, Any] | None:
        return None if self.emulate is None else json.loads(dump_cost(self.emulate))

    def key(self, virtual: int) -> str:
        """Where calibrations of this site with so many stages per rank belong."""
        return hashlib.sha256(json.dumps([asdict(self), virtual], sort_keys=True).encode()).hexdigest()[:16]


ORDERS: dict[str, dict[str, Any]] = {
    "vanilla": {"foldLag": 0, "foldBlocking": True, "foldPacking": False},
    "async": {"foldPacking": False},
}
"""The steps of the paper's ablation (seeds/004); without a name transfers are asynchronous and prompts are packed."""


@dataclass(frozen=True)
class Arm:
    """``policy`` None is stock vLLM: its own scheduler with chunks of ``chunk`` tokens. virtual: stages per rank, 2 for
    a folded pipeline. order: how that runs, if not in its usual way.
    """

    policy: str | None
    chunk: int
    virtual: int = 1
    order: str = ""

    @property
    def name(self) -> str:
        if self.policy is None:
            return f"stock {self.chunk}"
        size = f" {self.chunk}" if self.policy == "Fixed" and self.virtual == 2 else ""
        return " ".join(part for part in (self.policy + size, "FoldBack" * (self.virtual == 2), self.order) if part)

    @property
    def stock(self) -> bool:
        return self.policy is None

    @property
    def calibrated(self) -> bool:
        return self.policy not in (None, "Fixed", "TokenThrottle")

    def rank_config(
        self, site: Site, model_path: str, ports: dict[str, int], profiling: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The agent's configuration. Stock vLLM runs under the same agent, with nothing of ours in the engine; only
        an emulated device needs our worker class there too.
        """
        arguments = site.engine_arguments(self.virtual)
        additional: dict[str, Any] = {}
        if self.order:
            additional = {"prefill": dict(ORDERS[self.order])}
        if site.emulate is not None:
            additional.setdefault("prefill", {})["emulate"] = site.emulation()
            if self.stock:
                arguments += ["--worker-cls", "prefill_runtime.engine.worker.PrefillCPUWorker"]
                additional["prefill"] |= {
                    "policy": "Fixed", "maxTokens": self.chunk, "minTokens": 1, "smoothingFactor": 1.0
                }  # fmt: skip
        config: dict[str, Any] = {
            "identity": {"namespace": "bench", "pipeline": "bench", "replica": 0},
            "group": {"leader": "127.0.0.1", "pods": 1, **ports},
            "engine": {
                "device": "CPU", "servedModelName": "bench", "modelPath": model_path, "pipeline": site.ranks,
                "virtual": self.virtual, "tensor": 1, "maxModelLen": site.max_model_len, "dtype": "bfloat16",
                "args": arguments, "additionalConfig": additional,
            },
            "chunking": {
                "policy": self.policy or "EngineNative", "maxTokens": self.chunk,
                "minTokens": min(128, self.chunk), "smoothingFactor": 1.0,
            },
            "calibrationKey": site.key(self.virtual), "startupSeconds": 600, "graceSeconds": 10,
        }  # fmt: skip
        if profiling is not None:
            config["profiling"] = profiling
        return config
