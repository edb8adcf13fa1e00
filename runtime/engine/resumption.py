"""When a preempted request is resumed (differs between vLLM versions).

A request may be preempted while a step of it is on its way through the stages; that step's token is delivered all the
same. vLLM 0.23 may resume the request before (with three stages or more): it computes without this token, samples it
again, and the answer holds it twice. 0.28 waits; here 0.23 does as well.
"""

from __future__ import annotations

from typing import Any

PREEMPTED = "PREEMPTED"


class ResumesInOrder:
    """Mixin: put it before vLLM's scheduler class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefill_steps: list[Any] = []  # on their way, oldest first
        self.prefill_preempted: dict[str, Any] = {}

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if not hasattr(request, "num_stale_output_tokens"):  # else the engine itself waits
            self.prefill_preempted[request.request_id] = request

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        held = self._hold_back() if self.prefill_preempted else []
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for queue, requests in held:
                for request in reversed(requests):
                    queue.prepend_request(request)
        self.prefill_steps.append(output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.prefill_steps = [step for step in self.prefill_steps if step is not scheduler_output]
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _hold_back(self) -> list[tuple[Any, list[Any]]]:
        """Takes preempted requests with a step on its way out of their queues; both are returned."""
        flying = {name for step in self.prefill_steps for name in step.num_scheduled_tokens}
        early = {
            name: request
            for name, request in self.prefill_preempted.items()
            if name in flying and request.status.name == PREEMPTED
        }
        self.prefill_preempted = early
        held = []
        for queue in (self.waiting, self.skipped_waiting):  # type: ignore[attr-defined]
            requests = [request for request in queue if request.request_id in early]
            if requests:
                queue.remove_requests(requests)
                held.append((queue, requests))
        return held
