"""The operator's own metrics. A pipeline's name is no label: the fleet's size is bounded, its names are not."""

from __future__ import annotations

from collections.abc import Callable

from prefill_operator.reconcile.queue import Key
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "prefill_operator_reconcile_seconds", "Time of one reconciliation.", ["outcome"], registry=self.registry
        )
        self._results = Counter(
            "prefill_operator_reconcile", "Reconciliations by result: ok, or the error.", ["result"],
            registry=self.registry,
        )  # fmt: skip
        self._writes = Counter(
            "prefill_operator_api_writes", "Writes to the API server.", ["kind", "verb"], registry=self.registry
        )
        self._depth = Gauge("prefill_operator_queue_depth", "Pipelines that wait for a worker.", registry=self.registry)
        self._age = Gauge(
            "prefill_operator_oldest_resync_seconds", "Time since every pipeline was last looked at.",
            registry=self.registry,
        )  # fmt: skip
        self._pipelines = Gauge(
            "prefill_operator_pipelines", "Pipelines by condition that is True; All counts each.", ["condition"],
            registry=self.registry,
        )  # fmt: skip
        self._true: dict[Key, frozenset[str]] = {}

    def reconciled(self, seconds: float, result: str) -> None:
        self._seconds.labels("success" if result == "ok" else "error").observe(seconds)
        self._results.labels(result).inc()

    def wrote(self, kind: str, verb: str) -> None:
        self._writes.labels(kind, verb).inc()

    def watch(self, depth: Callable[[], float], age: Callable[[], float]) -> None:
        """Both are asked when somebody scrapes."""
        self._depth.set_function(depth)
        self._age.set_function(age)

    def saw(self, key: Key, true_conditions: frozenset[str] | None) -> None:
        """None: the pipeline is gone."""
        before = self._true.pop(key, frozenset())
        if true_conditions is not None:
            self._true[key] = true_conditions | {"All"}
        for condition in before | self._true.get(key, frozenset()):
            self._pipelines.labels(condition).set(sum(condition in found for found in self._true.values()))
