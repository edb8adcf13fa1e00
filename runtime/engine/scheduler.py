"""vLLM's scheduler with the policy's chunk sizes.

``schedule()`` of the engine is not copied. It already honours two numbers, the token budget of a step and the limit
per request, so what a step shall hold is expressed by setting both for one call. That is exact because vLLM serves
requests in a known order and gives each what it needs up to the two numbers: running ones first, then the queue.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import vllm
from prefill_runtime.engine import chunk_list, policy
from prefill_runtime.engine.cached_prefix import cached_tokens
from prefill_runtime.engine.journal import Journal
from prefill_runtime.engine.options import check_options
from prefill_runtime.engine.resumption import ResumesInOrder
from prefill_runtime.engine.searches import Searches
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.engine.versions import base_version, check_engine
from prefill_runtime.scheduler.budget import Rest
from prefill_runtime.scheduler.chunkers import Queue, TokenThrottle
from prefill_runtime.scheduler.cutters import Cutter
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.planner import Planned
from prefill_runtime.telemetry.events import FallbackReason
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

_COUNTED = 64  # requests of a long queue whose tokens are counted; the others are taken to be like them

logger = logging.getLogger(__name__)


def is_prefill(request: Request) -> bool:
    """Also true for a preempted request that computes its prompt and its own output again."""
    missing: int = request.num_tokens - request.num_computed_tokens
    return missing > 1 or (missing == 1 and request.num_computed_tokens < request.num_prompt_tokens)


class PrefillScheduler(ResumesInOrder, Scheduler):
    """Use with --scheduler-cls; configured by additional_config.prefill."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = PrefillSettings.of(self.vllm_config)
        check_engine(vllm.__version__, settings.allow_untested_engine)
        check_options(self.vllm_config)
        self.prefill_settings = settings
        self.prefill_limits = policy.EngineLimits(
            step_tokens=self.max_num_scheduled_tokens,
            sequences=self.max_num_running_reqs,
            max_model_len=self.max_model_len,
            block_tokens=self.block_size,
            tensor=self.parallel_config.tensor_parallel_size,
            pipeline=self.parallel_config.pipeline_parallel_size,
            virtual=settings.virtual_stages,
            lag=settings.lag(self.parallel_config.pipeline_parallel_size),
        )
        choice = policy.choose(settings, self.prefill_limits)
        self.prefill_journal = Journal(settings.telemetry_socket, base_version(vllm.__version__))
        self.prefill_searches: Searches | None = None
        self.prefill_warned = False
        self._use(choice)

    def _use(self, choice: policy.Choice) -> None:
        if self.prefill_searches is not None:
            self.prefill_searches.close()
            self.prefill_searches = None
        self.prefill_choice = choice
        if isinstance(choice.chunker, Planned):
            self.prefill_searches = Searches(choice.chunker)
        if choice.fallback is not None:
            logger.warning("chunks are Fixed, not %s: %s", self.prefill_settings.policy, choice.message)
            self.prefill_journal.fell_back(choice.fallback)

    def _recalibrate(self, calibration: object) -> None:
        """Takes a calibration that came while serving if it is as good as one at the start would have to be."""
        old = self.prefill_choice
        choice = policy.recalibrated(self.prefill_settings, self.prefill_limits, calibration, old.key)
        if choice is None:
            return
        if choice.fallback is not None:
            logger.warning("a new calibration is not used, chunks stay %s: %s", old.policy, choice.message)
            self.prefill_journal.fell_back(choice.fallback)
            return
        if isinstance(choice.chunker, Cutter):
            choice.chunker.adopt(old.chunker)
        logger.info("chunks are %s from now on, by a new calibration", choice.policy)
        self._use(choice)

    def _listen(self) -> None:
        for line in self.prefill_journal.heard():
            if "calibration" in line:
                self._recalibrate(line["calibration"])
        searches = self.prefill_searches
        if searches is not None and searches.problem:
            self._give_up(searches.problem)

    def _give_up(self, why: str) -> None:
        self._use(policy.fixed(self.prefill_choice.chunker.bounds, FallbackReason.POLICY_FAILED, why))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Invariant: the prefill tokens of a step are the chunk of the prompt that is served first and, if that chunk
        ends its prompt, chunks of those behind it in the engine's own order, as many as time and token budget hold.
        Nobody overtakes. Every running decode has its tokens on top of the two, and the first prompt has at least one
        quantum however many decodes run (``policy.bounds_of`` refuses an engine without that room), so neither can
        starve the other. What the engine decides itself - admission, priorities, preemption - is never second-guessed:
        if it serves less or others than foreseen, the step only gets smaller, and the next one starts from the truth.
        """
        stock = self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold
        self.prefill_journal.asked()
        self._listen()
        try:
            limits = self._step_limits()
            if limits is not None:
                self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold = limits
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold = stock
        self.prefill_journal.issued(output, self.requests, self.prefill_choice.policy)
        self._told()
        return output

    def _step_limits(self) -> tuple[int, int] | None:
        """Token budget of the step and limit per request; None when no prompt is to be computed."""
        prefills = self._prefills()
        first = next(prefills, None)
        if first is None:
            return None
        request, rest = first
        decodes = sum(max(r.num_tokens_with_spec - r.num_computed_tokens, 0) for r in self.running if not is_prefill(r))
        room = self.max_num_scheduled_tokens - decodes
        threshold = self.scheduler_config.long_prefill_token_threshold
        if threshold > 0:
            room = min(room, threshold)
        if room < 1:
            return None
        bounds = self.prefill_choice.chunker.bounds
        sizes = self._own_list(request) if self.prefill_settings.profiling else None
        chunk = chunk_list.next_size(sizes, rest.history, rest.remaining) if sizes else self._chunk(request, rest)
        if chunk > room:
            chunk = room // bounds.quantum * bounds.quantum or room
        if chunk < rest.remaining or sizes:
            return chunk + decodes, chunk
        room = min(room, self._full_chunk(rest))
        shares = self.prefill_choice.budget.shares(rest, (other for _, other in prefills), room - chunk)
        return chunk + sum(shares) + decodes, max([chunk, *shares])

    def prefill_in_progress(self) -> bool:
        """Whether a prompt has been begun and is not all issued."""
        return any(is_prefill(request) for request in self.running)

    def _prefills(self) -> Iterator[tuple[Request, Rest]]:
        """Requests with prompt left and what is left of it, in the order in which the engine serves them. Those that
        the engine will probably skip (their grammar is not ready, their KV cache not here) come last.
        """
        for request in self.running:
            if is_prefill(request):
                yield request, Rest(request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)
        blocked = []
        free = self.max_num_running_reqs - len(self.running)
        for request in itertools.islice(self._queued(), max(free, 0)):
            if self._is_blocked_waiting_status(request.status):
                blocked.append(request)
            else:
                yield request, self._rest(request)
        for request in blocked:
            yield request, self._rest(request)

    def _queued(self) -> Iterable[Request]:
        if self.policy == SchedulingPolicy.PRIORITY:
            return heapq.merge(self.waiting, self.skipped_waiting)
        return itertools.chain(self.skipped_waiting, self.waiting)

    def _rest(self, request: Request) -> Rest:
        history = request.num_computed_tokens or cached_tokens(self, request)
        return Rest(history, max(request.num_tokens - history, 1))

    def _chunk(self, request: Request, rest: Rest) -> int:
        """The policy's size for the next chunk."""
        try:
            self.prefill_choice.chunker.observe(self._surroundings(request, rest))
            return self.prefill_choice.chunker.next_chunk(rest.history, rest.remaining, request.request_id)
        except ParameterError as error:
            self._give_up(str(error))
            return min(self.prefill_choice.chunker.bounds.highest, rest.remaining)

    def _full_chunk(self, rest: Rest) -> int:
        """Prefill tokens that a step may hold; TokenThrottle finds them from the whole queue."""
        chunker = self.prefill_choice.chunker
        if isinstance(chunker, TokenThrottle):
            return chunker.next_chunk(rest.history, self.max_model_len - rest.history)
        return chunker.bounds.max_tokens

    def _surroundings(self, request: Request, rest: Rest) -> Queue:
        waiting = len(self.waiting) + len(self.skipped_waiting)
        counted = [
            max(other.num_tokens - other.num_computed_tokens, 0)
            for other in itertools.islice(itertools.chain(self.skipped_waiting, self.waiting), _COUNTED)
            if other is not request
        ]
        behind = waiting - (request.status != RequestStatus.RUNNING)
        tokens = sum(counted) * behind // len(counted) if counted else 0
        running = [r for r in self.running if r is not request and is_prefill(r)]
        tokens += sum(other.num_tokens - other.num_computed_tokens for other in running)
        free = 1.0 - self.kv_cache_manager.usage
        load = self.prefill_journal.load.share(time.monotonic())
        return Queue(rest.remaining + tokens, behind + len(running), free, load)

    def _own_list(self, request: Request) -> list[int] | None:
        try:
            return chunk_list.of_request(request)
        except ValueError as error:
            logger.warning("request %s: %s; the policy's chunks are used", request.request_id, error)
            return None

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.prefill_journal.arrived(request)
        if self.prefill_limits.virtual > 1 and request.max_tokens > 1 and not self.prefill_warned:
            self.prefill_warned = True
            ranks = self.prefill_limits.pipeline
            logger.warning(
                "request %s asks for %d tokens of a folded pipeline, which is meant for prefill: each token after the "
                "first takes %d passes one after the other, one stage per rank would take %d. If answers are long, "
                "decode elsewhere (--kv-transfer-config) or set virtualStages to 1. Said once",
                request.request_id, request.max_tokens, 2 * ranks - 1, ranks,
            )  # fmt: skip

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.prefill_journal.returned(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.prefill_journal.answered(outputs)
        self._told()
        return outputs

    def _told(self) -> None:
        self.prefill_journal.queued((self.skipped_waiting, self.waiting))
        if self.prefill_searches is not None:
            self.prefill_searches.pipeline_is(idle=not self.prefill_journal.load.busy)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        self.prefill_journal.ended(finished, str(RequestStatus.get_finished_reason(finished_status)))
        return finished

    def shutdown(self) -> None:
        super().shutdown()
        if self.prefill_searches is not None:
            self.prefill_searches.close()
        self.prefill_journal.close()
