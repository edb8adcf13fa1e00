"""A rank of a folded pipeline: two unmodified vLLM stages, s and 2P - 1 - s, each with its model and model runner.

Each runner sees every batch once and in order, so it keeps its own requests, block tables and sampling state, and
nothing has to be saved between the passes of a batch but the batch itself (``fold_copy``). The KV tensors are the head
runner's: block numbers mean the same to both.

The engine calls ``fold_head`` for each batch and ``fold_tail`` for the answer of the oldest; what this rank runs when
is the static order's business (``scheduler/order.py``). Whoever fails here ends its process: nobody waits for the
answer of a head, and the other ranks would hang; vLLM's executor notices a process that ends.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from prefill_runtime.engine.fold_channel import Channel, Receipt
from prefill_runtime.engine.fold_connector import fold_connector
from prefill_runtime.engine.fold_copy import for_tail
from prefill_runtime.engine.fold_group import fold
from prefill_runtime.engine.fold_memory import check_memory
from prefill_runtime.engine.fold_options import check_virtual_stages
from prefill_runtime.engine.pass_clock import PassTimer
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.scheduler.order import RankOrder
from vllm import envs
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

logger = logging.getLogger(__name__)

HEAD, TAIL = 0, 1
DOWN, UP = 1, -1
"""The two directions, by what they add to a rank."""
SPLIT = "VLLM_PP_LAYER_PARTITION"


class StageRunner:
    """Mixin: put it before a vLLM model runner class."""

    fold_kv_of: Any = None
    """The runner whose KV tensors this one uses; None for its own."""
    fold_kv: Any = None

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> Any:
        if self.fold_kv_of is None:
            self.fold_kv = super().initialize_kv_cache_tensors(*args, **kwargs)  # type: ignore[misc]
        else:
            self.fold_kv, self.kv_caches = self.fold_kv_of.fold_kv, self.fold_kv_of.kv_caches
        return self.fold_kv


def stage_runner(runner: Any) -> Callable[..., Any]:
    """The class of ``runner``, as a stage's."""
    return type(f"Stage{type(runner).__name__}", (StageRunner, type(runner)), {})


@contextmanager
def divided(layers: Sequence[int]) -> Iterator[None]:
    """Load with so many layers in each stage. vLLM knows one way to be told, which elsewhere must count the ranks."""
    if layers:
        envs.disable_envs_cache()
        os.environ[SPLIT] = ",".join(map(str, layers))
    try:
        yield
    finally:
        if layers:
            del os.environ[SPLIT]


class _Open:
    """A batch between its head and its tail. given: the tail's input, or the receipt for it."""

    __slots__ = ("given", "number", "output")

    def __init__(self, number: int, output: Any) -> None:
        self.number, self.output, self.given = number, output, None


class FoldedStages:
    """Mixin: put it before a vLLM worker class. Without ``virtualStages: 2`` in the settings it does nothing."""

    prefill_timer: PassTimer | None
    fold_connected = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.fold_settings = PrefillSettings.of(vllm_config)
        if self.folded:
            check_virtual_stages(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    @property
    def folded(self) -> bool:
        return self.fold_settings.virtual_stages == 2

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        if not self.folded:
            return
        group = get_pp_group()
        self.fold_ranks, self.fold_rank = group.world_size, group.rank_in_group
        self.fold_group = fold(group)
        self.fold_order = RankOrder(self.fold_ranks, self.fold_rank, self.fold_settings.lag(self.fold_ranks))
        self.fold_stages = (self.fold_rank, 2 * self.fold_ranks - 1 - self.fold_rank)
        self.fold_open: deque[_Open] = deque()
        self.fold_told: dict[int, Any] = {}
        build = stage_runner(self.model_runner)
        del self.model_runner
        self.fold_runners: list[Any] = []
        for stage in self.fold_stages:
            with self.fold_group.answering_for(stage):
                self.fold_runners.append(build(self.vllm_config, self.device))  # type: ignore[attr-defined]
        self.fold_runners[TAIL].fold_kv_of = self.fold_runners[HEAD]
        self.model_runner = self.fold_runners[HEAD]

    def stage_runners(self) -> list[tuple[int, Any]]:
        """The stages of this rank, each with its model runner."""
        if not self.folded:
            return [(get_pp_group().rank_in_group, self.model_runner)]
        return list(zip(self.fold_stages, self.fold_runners, strict=True))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if not self.folded:
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            return
        with divided(self.fold_settings.layer_partition):
            layers = self.model_config.get_total_num_hidden_layers()  # type: ignore[attr-defined]
            ranges = [get_pp_indices(layers, stage, 2 * self.fold_ranks) for stage in self.fold_stages]
            check_memory(self.vllm_config, self.fold_rank, ranges, self.device)  # type: ignore[attr-defined]
            for _ in self._each_stage(loading=True):
                super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._count_both()
        model, config = self.fold_runners[HEAD].model, self.model_config  # type: ignore[attr-defined]
        keys = list(model.make_empty_intermediate_tensors(1, config.dtype, self.device).tensors)  # type: ignore[attr-defined]
        window = self.vllm_config.max_concurrent_batches  # type: ignore[attr-defined]
        self.fold_channels = {
            step: Channel(
                self.fold_group.channel_group(f"prefill-{direction}"), keys, config.get_hidden_size(),
                config.dtype, self.device, 2 * window, self.fold_settings.fold_blocking,  # type: ignore[attr-defined]
            )
            for direction, step in (("down", DOWN), ("up", UP))
        }  # fmt: skip

    def _count_both(self) -> None:
        """What vLLM asks the one runner that it knows: the memory of its weights, and a pass to see what that takes."""
        head, tail = self.fold_runners
        if hasattr(head, "model_memory_usage"):
            head.model_memory_usage += tail.model_memory_usage
        profiles = [runner.profile_run for runner in self.fold_runners]

        def profile_run() -> None:
            for which in self._each_stage():
                profiles[which]()

        head.profile_run = profile_run

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        if not self.folded:
            super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
            return
        for _ in self._each_stage():
            super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
            self.fold_connected = fold_connector(self.fold_group)

    def _each_stage(self, *, loading: bool = False) -> Iterator[int]:
        """With the runner and the group of each stage in turn."""
        try:
            for which, stage in enumerate(self.fold_stages):
                self.model_runner = self.fold_runners[which]
                with self.fold_group.answering_for(stage, loading=loading):
                    yield which
        finally:
            self.model_runner = self.fold_runners[HEAD]

    # passes --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def fold_head(self, number: int, output: Any) -> None:
        """Run the head pass of a batch, and what is due behind it. One without tokens only brings news."""
        with self._fatal():
            self._head(number, output)
            if self.fold_rank:
                for due in self.fold_order.head(number):
                    self._tail(due)

    @torch.inference_mode()
    def fold_tail(self, number: int, upto: int, grammar: Any) -> Any:
        """Rank 0: the answer of a batch, all before which have been asked for. Others: whatever is open up to ``upto``,
        since no head comes that its tail could wait for, and what their KV connector says of the batch, if they have
        one.
        """
        with self._fatal():
            if self.fold_rank == 0:
                return self._tail(number, grammar)
            for due in self.fold_order.flush(upto):
                self._tail(due)
            return self.fold_told.pop(number) if self.fold_connected else None

    def _head(self, number: int, output: Any) -> None:
        tokens, innermost = output.total_num_scheduled_tokens, self.fold_rank == self.fold_ranks - 1
        batch = _Open(number, for_tail(output))
        given = None
        self._timed(HEAD, output)
        if tokens and self.fold_rank:
            given = self.fold_receive(DOWN, self.fold_channels[DOWN].post(tokens, self._peer(-DOWN)))
        made = self._run(HEAD, output, given)
        if tokens and innermost:
            batch.given = made
        elif tokens:
            self.fold_send(tokens, DOWN, made)
            batch.given = self.fold_channels[UP].post(tokens, self._peer(-UP))
        self._handed_on()
        self.fold_open.append(batch)

    def _tail(self, number: int, grammar: Any = None) -> Any:
        batch = self.fold_open.popleft()
        assert batch.number == number, (batch.number, number)
        given = batch.given
        self._timed(TAIL, batch.output)
        if isinstance(given, Receipt):
            given = self.fold_receive(UP, given)
        made = self._run(TAIL, batch.output, given, grammar)
        tokens = batch.output.total_num_scheduled_tokens
        if self.fold_rank and tokens:
            self.fold_send(tokens, UP, made)
        self._handed_on()
        if self.fold_rank and self.fold_connected:
            told = self.fold_runners[TAIL].sample_tokens(None) if tokens else made
            self.fold_told[number] = told or EMPTY_MODEL_RUNNER_OUTPUT
        return made

    def fold_send(self, tokens: int, step: int, made: Any) -> None:
        self.fold_channels[step].send(made.tensors, self._peer(step))

    def fold_receive(self, step: int, receipt: Receipt) -> Any:
        return self.fold_channels[step].take(receipt)

    def _peer(self, step: int) -> int:
        """The global rank of a neighbour."""
        return int(self.fold_group.ranks[self.fold_rank + step])

    def _run(self, which: int, output: Any, given: Any, grammar: Any = None) -> Any:
        runner, timer = self.fold_runners[which], self.prefill_timer
        with self.fold_group.answering_for(self.fold_stages[which]):
            if timer is not None:
                timer.entered()
                timer.input_ready()
            made = runner.execute_model(output, given)
            if made is None:  # the last stage, which has logits now
                made = runner.sample_tokens(grammar)
            if timer is not None:
                timer.ended()
            return made

    def _timed(self, which: int, output: Any) -> None:
        if self.prefill_timer is None:
            return
        stamp = getattr(output, "prefill_stamp", None)
        if stamp is not None and which == TAIL:
            # What lay between the batch before and this one was told with the head.
            stamp = dataclasses.replace(stamp, first=False, host_seconds=0.0, idle_before=0.0)
        self.prefill_timer.called(stamp, self.fold_stages[which], ("head", "tail")[which])

    def _handed_on(self) -> None:
        if self.prefill_timer is not None:
            self.prefill_timer.sent()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception(
                "a pass of a folded pipeline failed; this rank ends, so that the others do not wait for it"
            )
            raise SystemExit(1) from None
