"""The Ascend worker that tells its agent what it does. Use with --worker-cls; the only module that imports vllm_ascend.

``NPUWorker`` receives, runs ``model_runner.execute_model`` and sends within ``execute_model``, all on one stream. The
runner waits for its input when it first needs it, behind its own preparation, and that wait holds up the stream only.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
import vllm
from prefill_runtime.engine.ascend import check_ascend
from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.fold_stages import FoldedStages
from prefill_runtime.engine.pass_clock import DeviceTimer, PassTimer
from prefill_runtime.engine.passes import TimedPasses
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.telemetry.sender import Sender
from vllm_ascend.worker.worker import NPUWorker


class PrefillNPUWorker(TimedPasses, FoldedStages, NPUWorker):
    """A stock NPU worker with timed passes, and with two stages where the settings ask for them."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = PrefillSettings.of(vllm_config)
        check_ascend(vllm.__version__, version("vllm-ascend"), settings.allow_untested_engine)
        if settings.emulate is not None:
            raise SettingsError("additional_config.prefill.emulate is for CPU engines; this one has NPUs: leave it out")
        super().__init__(vllm_config, *args, **kwargs)

    def new_timer(self, sender: Sender, rank: int) -> PassTimer:
        return DeviceTimer(sender, rank, lambda: torch.npu.Event(enable_timing=True))
