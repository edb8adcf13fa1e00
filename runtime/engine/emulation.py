"""Device emulation: a stage's forward is replaced by waiting until its modelled time has passed.

All else of the engine stays real: scheduler, IPC, input preparation, activations sent from rank to rank, sampling,
HTTP. Times come from a cost file (``scheduler/costfile.py``). Nothing is computed: every answer is meaningless.

A device waits for its input without taking a host core, while vLLM's CPU ranks spin in shared memory for it; with
more ranks than cores they would then measure each other. So here a rank that has sent rings its successor's bell, a
datagram with the time at which the input is there, and readers of vLLM's message queues sleep at once where they spin
for a second otherwise. Between hosts vLLM's receive sleeps by itself.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import time
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


class Bell:
    """Tells the next rank of this host when its input is there."""

    def __init__(self, engine: str, rank: int) -> None:
        self._next = self._name(engine, rank + 1)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._name(engine, rank))

    @staticmethod
    def _name(engine: str, rank: int) -> str:
        return f"\0prefill-emulation-{os.getuid()}-{engine}-{rank}"

    def ring(self, at: float) -> None:
        self._socket.sendto(TIME.pack(at), self._next)

    def wait(self) -> None:
        sleep_until(TIME.unpack(self._socket.recv(TIME.size))[0])


class EmulatedDevice:
    """One stage of the modelled pipeline."""

    def __init__(self, cost: PipelineCost, stages: int, rank: int, bell: Bell | None) -> None:
        self._cost, self._stages, self._rank, self._bell = cost, stages, rank, bell
        self._deadline = self._link_free = 0.0

    def wait_for_input(self) -> None:
        if self._bell is not None and not get_pp_group().is_first_rank:
            self._bell.wait()

    def began(self, batch: list[Piece]) -> None:
        self._deadline = time.monotonic() + self._cost.batch_seconds(self._stages, batch)[self._rank]

    def ended(self, tokens: int) -> None:
        """Rings before the send: a large one needs its receiver."""
        if self._bell is not None and not get_pp_group().is_last_rank:
            self._link_free = max(time.monotonic(), self._link_free) + self._cost.transfer.seconds(float(tokens))
            self._bell.ring(self._link_free)

    def attach(self, runner: Any) -> None:
        """Replace what a model runner computes by this device's waiting."""
        stock = runner.execute_model

        def execute_model(output: Any, tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if getattr(tensors, "_comm_handles", None):
                tensors.wait_for_comm()  # the device has its input before it starts
            self.began(pieces(output))
            result = stock(output, tensors, *args, **kwargs)
            if output.total_num_scheduled_tokens:
                self.ended(output.total_num_scheduled_tokens)
            return result

        def forward(input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
            shape = positions.shape[-1], runner.model_config.get_hidden_size()
            hidden = torch.zeros(shape, dtype=runner.model_config.dtype)
            sleep_until(self._deadline)
            if get_pp_group().is_last_rank:
                return hidden
            return IntermediateTensors({"hidden_states": hidden, "residual": hidden})

        runner.execute_model, runner._model_forward = execute_model, forward


class EmulatedPasses:
    """Mixin: put it before a vLLM CPU worker class. Without ``emulate`` in the settings it does nothing."""

    emulated_device: EmulatedDevice | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._emulated_cost = emulated_cost(
            PrefillSettings.of(vllm_config), vllm_config.parallel_config.pipeline_parallel_size
        )
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        if self._emulated_cost is None:
            return
        logger.warning("EMULATED DEVICE: nothing is computed, passes only take the time of a cost file")
        group = get_pp_group()
        one_host = bool(getattr(group, "use_cpu_custom_send_recv", False))
        bell = Bell(os.environ["VLLM_DIST_IDENT"], group.rank_in_group) if one_host else None
        self.emulated_device = EmulatedDevice(self._emulated_cost, group.world_size, group.rank_in_group, bell)
        self.emulated_device.attach(self.model_runner)  # type: ignore[attr-defined]
        sleep_at_once()

    def execute_model(self, output: Any) -> Any:
        if self.emulated_device is not None and output.total_num_scheduled_tokens:
            self.emulated_device.wait_for_input()
        return super().execute_model(output)  # type: ignore[misc]


def like_many_hosts() -> None:
    """For emulated ranks that share a host only because they are emulated; a ``vllm.general_plugins`` entry point.

    Besides sleeping, the ring that carries batches to the ranks of a host gets room for two messages of each batch in
    flight. vLLM's has ten slots, so that with eight ranks the last holds back the first after five batches; between
    hosts, batches go through sockets and nothing holds back.
    """
    sleep_at_once()
    stock = shm_broadcast.MessageQueue.__init__
    if getattr(stock, "roomy", False):
        return

    def __init__(self: Any, n_reader: int, n_local_reader: int, *args: Any, **kwargs: Any) -> None:
        if len(args) < 3:  # max_chunks is the third
            kwargs.setdefault("max_chunks", max(10, 2 * (n_local_reader + 2)))
        stock(self, n_reader, n_local_reader, *args, **kwargs)

    __init__.roomy = True  # type: ignore[attr-defined]
    shm_broadcast.MessageQueue.__init__ = __init__


def sleep_at_once() -> None:
    """Readers of message queues in this process sleep instead of spinning for a second after each message.

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
