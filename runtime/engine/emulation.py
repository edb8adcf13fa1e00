"""Device emulation: a stage's forward is replaced by waiting until its modelled time has passed.

All else of the engine stays real: scheduler, IPC, input preparation, activations sent from rank to rank, sampling,
HTTP. Times come from a cost file (``scheduler/costfile.py``). Nothing is computed: every answer is meaningless.

A device waits for its input without taking a host core, while vLLM's CPU ranks spin in shared memory for it; with
more ranks than cores they would then measure each other. So here a rank that sends tells its receiver by a datagram
when the input is there, and readers of vLLM's message queues sleep at once where they spin for a second otherwise.
Where vLLM receives lazily (between hosts, and on CPUs without AVX-512) its receive sleeps by itself, and its sender is
held until the receiver asks: there the receiver asks first and then waits until the modelled transfer has ended.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.scheduler.cost import Piece, PipelineCost
from prefill_runtime.scheduler.costfile import parse_cost
from prefill_runtime.scheduler.errors import ParameterError
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.parallel_state import get_pp_group
from vllm.sequence import IntermediateTensors

logger = logging.getLogger(__name__)

TIME = struct.Struct("d")
SPIN_SECONDS = 1.0  # how long vLLM's readers spin
LOOK_MILLISECONDS = 2


def emulated_cost(settings: PrefillSettings, stages: int) -> PipelineCost | None:
    """The cost of the emulated device, None for a real one; SettingsError names the field that is wrong."""
    if settings.emulate is None:
        return None
    try:
        cost = parse_cost(json.dumps(settings.emulate))
        cost.parts(stages)  # whether it is for as many
    except ParameterError as error:
        raise SettingsError(f"additional_config.prefill.emulate: {error}") from None
    return cost


def pieces(output: Any) -> list[Piece]:
    """Chunk and history of every request in a SchedulerOutput."""
    history = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    history.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(tokens, history[name]) for name, tokens in output.num_scheduled_tokens.items()]


def sleep_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)


class Link:
    """One direction between neighbours of one host: tells the receiver when its input is there."""

    def __init__(self, cost: PipelineCost, engine: str, direction: str, rank: int, step: int) -> None:
        self._cost, self._free = cost, 0.0
        self._next = self._name(engine, direction, rank + step)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._name(engine, direction, rank))

    @staticmethod
    def _name(engine: str, direction: str, rank: int) -> str:
        return f"\0prefill-emulation-{os.getuid()}-{engine}-{direction}-{rank}"

    def send(self, tokens: int) -> None:
        """Rings before the send itself: a large one needs its receiver."""
        self._free = max(time.monotonic(), self._free) + self._cost.transfer.seconds(float(tokens))
        self._socket.sendto(TIME.pack(self._free), self._next)

    def drain(self) -> None:
        """Wait until what was sent is on the other side."""
        sleep_until(self._free)

    def wait(self) -> None:
        sleep_until(TIME.unpack(self._socket.recv(TIME.size))[0])


class EmulatedStage:
    """One stage of the modelled pipeline, in place of what a model runner computes."""

    def __init__(
        self,
        cost: PipelineCost,
        stages: int,
        stage: int,
        runner: Any,
        received: Callable[[], None],
        ended: Callable[[int], None],
    ) -> None:
        self._cost, self._stages, self._stage, self._received, self._ended = cost, stages, stage, received, ended
        self._deadline = 0.0
        self._stock, self._runner = runner.execute_model, runner
        runner.execute_model, runner._model_forward = self.execute_model, self.forward

    def execute_model(self, output: Any, tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if getattr(tensors, "_comm_handles", None):
            tensors._comm_postprocess.append(self._received)
            tensors.wait_for_comm()  # the device has its input before it starts
        batch = pieces(output)
        self._deadline = time.monotonic() + self._cost.batch_seconds(self._stages, batch)[self._stage]
        result = self._stock(output, tensors, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._ended(output.total_num_scheduled_tokens)
        return result

    def forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        shape = positions.shape[-1], self._runner.model_config.get_hidden_size()
        hidden = torch.zeros(shape, dtype=self._runner.model_config.dtype)
        sleep_until(self._deadline)
        if get_pp_group().is_last_rank:
            return hidden
        return IntermediateTensors({"hidden_states": hidden, "residual": hidden})


class EmulatedPasses:
    """Mixin: put it before ``FoldedStages`` and a vLLM CPU worker class. Without ``emulate`` in the settings it does
    nothing.
    """

    emulates = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = PrefillSettings.of(vllm_config)
        self._stages = vllm_config.parallel_config.pipeline_parallel_size * settings.virtual_stages
        self._emulated_cost = emulated_cost(settings, self._stages)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        cost = self._emulated_cost
        if cost is None:
            return
        logger.warning("EMULATED DEVICE: nothing is computed, passes only take the time of a cost file")
        self.emulates = True
        group = get_pp_group()
        rank, engine = group.rank_in_group, os.environ["VLLM_DIST_IDENT"]
        one_host = self.vllm_config.parallel_config.nnodes == 1  # type: ignore[attr-defined]
        self._links = {
            step: Link(cost, engine, direction, rank, step) for direction, step in (("down", 1), ("up", -1)) if one_host
        }
        folded = self._stages > group.world_size
        for stage, runner in self.stage_runners():  # type: ignore[attr-defined]
            last = stage == self._stages - 1
            ended = self._unheard if folded or last else self._ring
            EmulatedStage(cost, self._stages, stage, runner, self._hear, ended)
        sleep_at_once()

    def _ring(self, tokens: int) -> None:
        if 1 in self._links:
            self._links[1].send(tokens)

    def _hear(self) -> None:
        if 1 in self._links:
            self._links[1].wait()

    @staticmethod
    def _unheard(tokens: int) -> None:
        """Rung with the send, if there is one."""

    def execute_model(self, output: Any) -> Any:
        if self.emulates and output.total_num_scheduled_tokens:
            group = get_pp_group()
            # vLLM's shared memory channel receives, and spins, before the runner is called.
            if getattr(group, "use_cpu_custom_send_recv", False) and not group.is_first_rank:
                self._hear()
        return super().execute_model(output)  # type: ignore[misc]

    def fold_send(self, tokens: int, step: int, *args: Any) -> None:
        if self.emulates and step in self._links:
            self._links[step].send(tokens)
            if self.fold_settings.fold_blocking:  # type: ignore[attr-defined]
                self._links[step].drain()
        super().fold_send(tokens, step, *args)  # type: ignore[misc]

    def fold_receive(self, step: int, *args: Any) -> Any:
        if self.emulates and step in self._links:
            self._links[step].wait()
        return super().fold_receive(step, *args)  # type: ignore[misc]


def sleep_at_once() -> None:
    """Readers of message queues in this process sleep instead of spinning for a second after each message; for the
    other processes of an emulated engine a ``vllm.general_plugins`` entry point.

    Not until the queue's notification: a second one within about a millisecond is dropped by ZeroMQ (its send limit is
    one, and it looks for room no more often), which would cost the five seconds after which vLLM looks by itself.
    """
    stock_init, stock_wait = shm_broadcast.SpinCondition.__init__, shm_broadcast.SpinCondition.wait
    if getattr(stock_wait, "sleeps", False):
        return

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        self.busy_loop_s = 0.0

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        recent = time.monotonic() < self.last_read + SPIN_SECONDS
        stock_wait(self, LOOK_MILLISECONDS if recent else timeout_ms)

    wait.sleeps = True  # type: ignore[attr-defined]
    shm_broadcast.SpinCondition.__init__, shm_broadcast.SpinCondition.wait = __init__, wait
