"""Timing of model passes around a stock vLLM worker; ``pass_clock`` says when and by which clock.

Where vLLM receives lazily (between hosts, and on devices), it prepares the batch first and waits for the input later:
a host that blocks there counts the blocked time as waiting and the preparation as work.
"""

from __future__ import annotations

import time
from typing import Any

import vllm
from prefill_runtime.engine.pass_clock import HostTimer, PassTimer
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.engine.versions import base_version, check_engine
from prefill_runtime.telemetry.events import Hello
from prefill_runtime.telemetry.sender import Sender


def time_input(tensors: Any, timer: PassTimer) -> bool:
    """Have a lazily received input tell when it came; False when it is here already."""
    if not getattr(tensors, "_comm_handles", None):
        return False
    stock_wait = tensors.wait_for_comm

    def wait_for_comm() -> None:
        began = time.monotonic()
        stock_wait()
        timer.input_ready(time.monotonic() - began)
        tensors.wait_for_comm = stock_wait

    tensors.wait_for_comm = wait_for_comm
    return True


class TimedPasses:
    """Mixin: put it before a vLLM worker class."""

    prefill_timer: PassTimer | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_engine(vllm.__version__, PrefillSettings.of(vllm_config).allow_untested_engine)
        super().__init__(vllm_config, *args, **kwargs)

    def new_timer(self, sender: Sender, rank: int) -> PassTimer:
        """Called once the device is there."""
        return HostTimer(sender, rank)

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if get_tp_group().rank_in_group != 0:
            return
        rank = get_pp_group().rank_in_group
        settings = PrefillSettings.of(self.vllm_config)  # type: ignore[attr-defined]
        socket = settings.telemetry_socket
        sender = Sender(socket, Hello(role="worker", rank=rank, engine_version=base_version(vllm.__version__)))
        if socket is not None:
            sender.flush()  # says hello: from here on the rank's time is accounted for
        self.prefill_timer = timer = self.new_timer(sender, rank)
        if settings.virtual_stages == 2:
            return  # each pass of a folded pipeline is timed where it is run
        runner = self.model_runner  # type: ignore[attr-defined]
        stock = runner.execute_model

        def execute_model(scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            timer.entered()
            if not time_input(intermediate_tensors, timer):
                timer.input_ready()
            output = stock(scheduler_output, intermediate_tensors, *args, **kwargs)
            timer.ended()
            return output

        runner.execute_model = execute_model

    def execute_model(self, scheduler_output: Any) -> Any:
        timer = self.prefill_timer
        if timer is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        from vllm.distributed.parallel_state import get_pp_group

        timer.called(getattr(scheduler_output, "prefill_stamp", None))
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        # The last rank's pass ends with its sampling, which vLLM asks for in a second call.
        if output is not None or not get_pp_group().is_last_rank:
            timer.sent()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.prefill_timer is not None:
            self.prefill_timer.ended()
            self.prefill_timer.sent()
        return output
