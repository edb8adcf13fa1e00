"""vLLM's scheduler with the policy's chunk sizes.

``schedule()`` of the engine is not copied. It already honours two numbers, the token budget of a step and the limit
per request, so a chunk is expressed by setting both for one call. vLLM keeps at most one local prefill unfinished
(a later one starts only in what the older left over), so the chunk of the prefill that is served first bounds
all prefill tokens of the step, and running decodes get their tokens on top.
"""

from __future__ import annotations

import logging
from typing import Any

import vllm
from prefill_runtime.engine import chunk_list, policy
from prefill_runtime.engine.cached_prefix import cached_tokens
from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.journal import Journal
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.engine.versions import base_version, check_engine
from prefill_runtime.scheduler.errors import ParameterError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

logger = logging.getLogger(__name__)


def is_prefill(request: Request) -> bool:
    """Also true for a preempted request that computes its prompt and its own output again."""
    missing: int = request.num_tokens - request.num_computed_tokens
    return missing > 1 or (missing == 1 and request.num_computed_tokens < request.num_prompt_tokens)


class PrefillScheduler(Scheduler):
    """Use with --scheduler-cls; configured by additional_config.prefill."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = PrefillSettings.of(self.vllm_config)
        check_engine(vllm.__version__, settings.allow_untested_engine)
        if self.scheduler_config.async_scheduling:
            raise SettingsError("this scheduler needs --no-async-scheduling: it decides on the true state of each step")
        limits = policy.EngineLimits(
            step_tokens=self.max_num_scheduled_tokens,
            max_model_len=self.max_model_len,
            block_tokens=self.block_size,
            tensor=self.parallel_config.tensor_parallel_size,
            pipeline=self.parallel_config.pipeline_parallel_size,
        )
        self.prefill_settings = settings
        self.prefill_journal = Journal(settings.telemetry_socket, base_version(vllm.__version__))
        self._use(policy.choose(settings, limits))

    def _use(self, choice: policy.Choice) -> None:
        self.prefill_choice = choice
        if choice.fallback is not None:
            logger.warning("chunks are Fixed, not %s: %s", self.prefill_settings.policy, choice.message)
            self.prefill_journal.fell_back(choice.fallback)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        stock = self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold
        self.prefill_journal.asked()
        try:
            limits = self._step_limits()
            if limits is not None:
                self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold = limits
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold = stock
        self.prefill_journal.issued(output, self.requests, self.prefill_choice.policy)
        self.prefill_journal.queued((self.skipped_waiting, self.waiting))
        return output

    def _step_limits(self) -> tuple[int, int] | None:
        """Token budget of the step and limit per request; None when no prompt is to be computed."""
        first = self._first_prefill()
        if first is None:
            return None
        decodes = sum(max(r.num_tokens_with_spec - r.num_computed_tokens, 0) for r in self.running if not is_prefill(r))
        room = self.max_num_scheduled_tokens - decodes
        threshold = self.scheduler_config.long_prefill_token_threshold
        if threshold > 0:
            room = min(room, threshold)
        if room < 1:
            return None
        share = min(self._share(*first), room)
        return share + decodes, share

    def _first_prefill(self) -> tuple[Request, int] | None:
        """The request whose prompt is served first, and its history. A blocked one at the head of the queue may be
        skipped by the engine: then the step has another request's chunk size, which is harmless.
        """
        for request in self.running:
            if is_prefill(request):
                return request, request.num_computed_tokens
        queue = self._select_waiting_queue_for_scheduling()
        if not queue:
            return None
        request = queue.peek_request()
        return request, request.num_computed_tokens or cached_tokens(self, request)

    def _share(self, request: Request, history: int) -> int:
        """Prefill tokens of the step. A chunk that ends its prompt leaves the rest of a full one to the next."""
        remaining = max(request.num_tokens - history, 1)
        if self.prefill_settings.profiling and (sizes := self._own_list(request)):
            return chunk_list.next_size(sizes, history, remaining)
        try:
            chunk = self.prefill_choice.chunker.next_chunk(history, remaining)
            if chunk < remaining:
                return chunk
            return max(chunk, self.prefill_choice.chunker.next_chunk(history, self.max_model_len - history))
        except ParameterError as error:
            self._use(policy.fixed(self.prefill_choice.chunker.bounds, policy.Reason.POLICY_FAILED, str(error)))
            return self.prefill_choice.chunker.bounds.highest

    def _own_list(self, request: Request) -> list[int] | None:
        try:
            return chunk_list.of_request(request)
        except ValueError as error:
            logger.warning("request %s: %s; the policy's chunks are used", request.request_id, error)
            return None

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.prefill_journal.arrived(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.prefill_journal.returned(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.prefill_journal.answered(outputs)
        self.prefill_journal.queued((self.skipped_waiting, self.waiting))
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        self.prefill_journal.ended(finished, str(RequestStatus.get_finished_reason(finished_status)))
        return finished

    def shutdown(self) -> None:
        super().shutdown()
        self.prefill_journal.close()
