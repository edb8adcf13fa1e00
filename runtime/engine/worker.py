"""The CPU worker that tells its agent what it does. Use with --worker-cls."""

from __future__ import annotations

from prefill_runtime.engine.emulation import EmulatedPasses
from prefill_runtime.engine.fold_stages import FoldedStages
from prefill_runtime.engine.passes import TimedPasses
from vllm.v1.worker.cpu_worker import CPUWorker


class PrefillCPUWorker(TimedPasses, EmulatedPasses, FoldedStages, CPUWorker):
    """A stock CPU worker with timed passes; with ``emulate`` in the settings, one whose passes only take time."""
