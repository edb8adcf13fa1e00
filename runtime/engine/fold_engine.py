"""The engine's side of a folded pipeline: heads go out while there is work, answers are asked for when they are due.

A batch stays in the engine's own ``batch_queue``, newest left, until its answer is back, so vLLM's notion of work in
flight holds. Its head is an instruction that nobody answers; ``fold_tail`` is one that rank 0 answers, where the last
stage is. Rank 0 runs tails as they are asked for, which is the static order's doing here; the other ranks go by the
same order themselves. Where no head is left to put in between, the oldest answer is asked for and waited for, and no
other: a request that comes meanwhile finds rank 0 with one tail before it and its heads fill the drain.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.scheduler.order import RankOrder
from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore

NOBODY = -1
"""The rank that replies to a head: workers compare it with their own."""
POLL_SECONDS = 0.005


def folded(vllm_config: VllmConfig) -> PrefillSettings | None:
    """The settings of an engine with virtual stages, None for any other."""
    config = vllm_config.additional_config
    if not isinstance(config, dict) or "prefill" not in config:
        return None
    settings = PrefillSettings.of(vllm_config)
    return settings if settings.virtual_stages == 2 else None


def window(settings: PrefillSettings, ranks: int) -> int:
    """Batches in flight: those between head and tail on rank 0, the one whose tail it runs and one that is ready."""
    return ranks + settings.lag(ranks) + 1


class Flight:
    """A batch that is in the pipeline."""

    __slots__ = ("answer", "number", "output")

    def __init__(self, number: int, output: Any) -> None:
        self.number, self.output, self.answer = number, output, None


class FoldedCore:
    """What an EngineCore does in a step."""

    def __init__(self, core: EngineCore, settings: PrefillSettings) -> None:
        from vllm.platforms import current_platform

        self._core, self._packing = core, settings.fold_packing
        ranks = core.vllm_config.parallel_config.pipeline_parallel_size
        self._order = RankOrder(ranks, 0, settings.lag(ranks))
        self._number = 0
        self._replies = core.model_executor.response_mqs[core.model_executor.output_rank]
        if current_platform.is_cpu():
            # vLLM spins for a second after each answer: on a core that a rank could compute on.
            self._replies._spin_condition.busy_loop_s = 0.0

    def step(self) -> tuple[dict[int, Any] | None, bool]:
        """What ``EngineCore.step_with_batch_queue`` returns: outputs, and whether a batch with tokens was issued."""
        core, queue = self._core, self._core.batch_queue
        issued = len(queue) < core.batch_queue_size and self._may_feed() and self._feed()
        if (issued and len(queue) < core.batch_queue_size) or not queue:
            return None, issued
        flight = queue[-1]
        if flight.answer is None:
            for number in self._order.flush(flight.number):
                self._ask(number, queue[0].number)
        if not self._answered():
            return None, issued  # somebody came; it may fill the pipeline
        queue.pop()
        with core.log_error_detail(flight.output):
            result = flight.answer.result()
        core._process_aborts_queue()
        return core.scheduler.update_from_output(flight.output, result), issued

    def _may_feed(self) -> bool:
        if not self._core.scheduler.has_requests():
            return False
        return self._packing or not self._core.batch_queue or self._core.scheduler.prefill_in_progress()

    def _feed(self) -> bool:
        core = self._core
        output = schedule(core)
        if not output.total_num_scheduled_tokens and not brings_news(output):
            return False
        self._number += 1
        core.model_executor.rpc_broadcast_mq.enqueue(("fold_head", (self._number, output), {}, NOBODY))
        core.batch_queue.appendleft(Flight(self._number, output))
        for due in self._order.head(self._number):
            self._ask(due, due)
        return bool(output.total_num_scheduled_tokens)

    def _ask(self, number: int, upto: int) -> None:
        core = self._core
        flight = next(each for each in reversed(core.batch_queue) if each.number == number)
        # Tokens that its grammar waits for are back: a request has one decode step in flight.
        grammar = core.scheduler.get_grammar_bitmask(flight.output) if flight.output.num_scheduled_tokens else None
        executor = core.model_executor
        flight.answer = executor.collective_rpc(
            "fold_tail", args=(number, upto, grammar), unique_reply_rank=executor.output_rank, non_block=True,
            kv_output_aggregator=executor.kv_output_aggregator, timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
        )  # fmt: skip

    def _answered(self) -> bool:
        """Wait for the oldest answer; False when a request or an abort came first and there is room for it."""
        core = self._core
        arrivals = getattr(core, "input_queue", None)  # an engine within the caller's process has none
        if arrivals is None or len(core.batch_queue) == core.batch_queue_size:
            return True
        while not is_written(self._replies):
            if not arrivals.empty():
                return False
            if core.model_executor.is_failed:
                return True  # asking for the answer says what happened
            self._replies._spin_condition.wait(timeout_ms=POLL_SECONDS * 1000)
        return True


def schedule(core: EngineCore) -> Any:
    throttled = getattr(core, "_should_throttle_prefills", None)
    return core.scheduler.schedule() if throttled is None else core.scheduler.schedule(throttled())


def brings_news(output: Any) -> bool:
    """Whether ranks must hear of a batch without tokens."""
    return bool(output.finished_req_ids or output.free_encoder_mm_hashes or output.kv_connector_metadata is not None)


def is_written(queue: Any) -> bool:
    """Whether a local reader's next message is there, without taking it."""
    with queue.buffer.get_metadata(queue.current_idx) as flags:
        return bool(flags[0] and not flags[queue.local_reader_rank + 1])


def install() -> None:
    """Patch what vLLM's processes use; whoever has no virtual stages works as before."""
    from vllm.config import VllmConfig

    stock = VllmConfig.max_concurrent_batches.fget
    if not getattr(stock, "folds", False):

        def max_concurrent_batches(self: Any) -> int:
            settings = folded(self)
            return (
                int(stock(self)) if settings is None else window(settings, self.parallel_config.pipeline_parallel_size)
            )

        max_concurrent_batches.folds = True  # type: ignore[attr-defined]
        VllmConfig.max_concurrent_batches = property(max_concurrent_batches)
    if "vllm.v1.engine.core" in sys.modules:
        _install_step()


def _install_step() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    stock_rank, stock_step = MultiprocExecutor._get_output_rank, EngineCore.step_with_batch_queue
    if getattr(stock_step, "folds", False):
        return

    def _get_output_rank(self: Any) -> int:
        return int(stock_rank(self)) if folded(self.vllm_config) is None else 0

    def step_with_batch_queue(self: Any) -> Any:
        fold = getattr(self, "prefill_fold", None)
        if fold is None:
            settings = folded(self.vllm_config)
            if settings is None:
                return stock_step(self)
            fold = self.prefill_fold = FoldedCore(self, settings)
        return fold.step()

    step_with_batch_queue.folds = True  # type: ignore[attr-defined]
    MultiprocExecutor._get_output_rank = _get_output_rank
    EngineCore.step_with_batch_queue = step_with_batch_queue
