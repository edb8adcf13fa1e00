"""The last few busy periods of the whole pipeline, kept by the leader.

The document (``Timeline.document``), all times in seconds:

    {"schemaVersion": 1, "ranks": 2, "periods": [            oldest first, at most ``KEEP``
      {"period": 7, "complete": true,                        false: still running, or a rank's passes are missing
       "start": 12.5, "end": 14.0,                           leader clock; first issue and last settle (null: running)
       "ranks": [{"rank": 0, "clockOffset": 0.0,             leader time = time in ``segments`` + clockOffset
                  "bubbleRatio": 0.2, "truncated": false,    truncated: the oldest segments are not kept
                  "segments": [                              batch 0, stage -1: the rank had none
                    {"state": "compute", "start": 12.5, "end": 13.0, "batch": 3, "stage": 0, "kind": "stage"}, ...]}],
       "batches": [{"batch": 3, "at": 12.5, "policy": "Dynamic",
                    "chunks": [{"request": "r", "history": 0, "tokens": 2048, "promptTokens": 8192}]}],
                                                             promptTokens 0: all decode steps of the batch
       "requests": [{"request": "r", "promptTokens": 8192, "ttft": 1.4, "queue": 0.01, "at": 13.9}]}]}

A rank's segments follow each other without holes and cover the period as that rank accounts for it: from the host
time before its first batch to the end of its drain. ``bubble_ratio`` of the document is thus the accounts' own.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prefill_runtime.telemetry import account
from prefill_runtime.telemetry.account import State, Window
from prefill_runtime.telemetry.events import Idle, Issue, Request

KEEP = 8
_MAX_BATCHES = 4096
_MAX_CHUNKS = 16384


@dataclass(slots=True)
class Period:
    number: int
    start: float
    end: float | None = None
    ended_heard: float | None = None
    last_batch: int = 0
    batches: deque[Issue] = field(default_factory=deque)
    chunks: int = 0
    """In ``batches``."""
    requests: deque[Request] = field(default_factory=lambda: deque(maxlen=_MAX_BATCHES))
    windows: dict[int, tuple[Window, float]] = field(default_factory=dict)
    """By rank: the completed window and its clock offset."""
    closed: bool = False

    def add(self, event: Issue) -> None:
        self.last_batch = max(self.last_batch, event.stamp.batch)
        self.batches.append(event)
        self.chunks += len(event.stamp.chunks)
        while len(self.batches) > _MAX_BATCHES or self.chunks > _MAX_CHUNKS:
            self.chunks -= len(self.batches.popleft().stamp.chunks)

    def snapshot(self, running: Mapping[int, tuple[Window, float]]) -> Period:
        """A copy that stays as it is, with those of the ``running`` windows that belong to this period."""
        windows = {r: w for r, w in running.items() if w[0].period == self.number} | self.windows
        return replace(
            self,
            batches=self.batches.copy(),
            requests=self.requests.copy(),
            windows={r: (replace(w, segments=w.segments.copy()), offset) for r, (w, offset) in windows.items()},
        )


class Timeline:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._periods: OrderedDict[int, Period] = OrderedDict()

    def issue(self, event: Issue) -> None:
        number = event.stamp.period
        if not number:
            return
        period = self._periods.get(number)
        if period is None:
            period = self._periods[number] = Period(number, event.at)
            while len(self._periods) > KEEP:
                self._periods.popitem(last=False)
        period.add(replace(event, stamp=event.stamp.folded()))

    def request(self, event: Request) -> None:
        """Belongs to the latest period that worked on it."""
        for period in reversed(self._periods.values()):
            newest_first = reversed(period.batches)  # a first token follows soon on its prompt's last chunk
            if any(chunk.request == event.request for issue in newest_first for chunk in issue.stamp.chunks):
                period.requests.append(event)
                return

    def idle(self, event: Idle, now: float) -> None:
        period = self._periods.get(event.period)
        if period is not None:
            period.end, period.ended_heard = event.at, now

    def window(self, rank: int, window: Window, offset: float) -> None:
        period = self._periods.get(window.period)
        if period is not None:
            period.windows[rank] = (window, offset)

    def unfinished(self) -> list[Period]:
        """Ended periods of which some rank's window is still missing."""
        return [
            p for p in self._periods.values() if p.end is not None and not p.closed and len(p.windows) < self._ranks
        ]

    def snapshot(self, running: Mapping[int, tuple[Window, float]]) -> Callable[[], dict[str, Any]]:
        """Makes the document, in any thread. ``running``: windows that are not completed, by rank."""
        complete = [p.end is not None and len(p.windows) == self._ranks for p in self._periods.values()]
        periods = [p.snapshot(running) for p in self._periods.values()]

        def document() -> dict[str, Any]:
            documents = [_period_document(p, c) for p, c in zip(periods, complete, strict=True)]
            return {"schemaVersion": 1, "ranks": self._ranks, "periods": documents}

        return document


def to_json(document: Mapping[str, Any]) -> str:
    """Encoded piece by piece: a single call would keep all threads, the heartbeat too, waiting for seconds."""
    periods = []
    for period in document["periods"]:
        ranks = ",".join(json.dumps(rank) for rank in period["ranks"])
        rest = json.dumps({key: value for key, value in period.items() if key != "ranks"})
        periods.append(f'{rest[:-1]}, "ranks": [{ranks}]}}')
    head = json.dumps({key: value for key, value in document.items() if key != "periods"})
    return f'{head[:-1]}, "periods": [{",".join(periods)}]}}'


def _period_document(period: Period, complete: bool) -> dict[str, Any]:
    return {
        "period": period.number,
        "complete": complete,
        "start": period.start,
        "end": period.end,
        "ranks": [_rank_document(rank, *period.windows[rank]) for rank in sorted(period.windows)],
        "batches": [
            {
                "batch": issue.stamp.batch,
                "at": issue.at,
                "policy": issue.policy,
                "chunks": [
                    {"request": c.request, "history": c.history, "tokens": c.tokens, "promptTokens": c.prompt_tokens}
                    for c in issue.stamp.chunks
                ],
            }
            for issue in period.batches
        ],
        "requests": [
            {"request": r.request, "promptTokens": r.prompt_tokens, "ttft": r.ttft, "queue": r.queue, "at": r.at}
            for r in period.requests
        ],
    }


def _rank_document(rank: int, window: Window, offset: float) -> dict[str, Any]:
    return {
        "rank": rank,
        "clockOffset": offset,
        "bubbleRatio": account.bubble_ratio(window.seconds),
        "truncated": window.truncated,
        "segments": [
            {"state": s.state, "start": s.start, "end": s.end, "batch": s.batch, "stage": s.stage, "kind": s.kind}
            for s in window.segments
        ],
    }


def bubble_ratio(document: Mapping[str, Any], period: int | None = None) -> dict[int, float]:
    """By rank, recomputed from the segments of ``period`` (default: the last complete one); empty if there is none."""
    found = [p for p in document["periods"] if (p["complete"] if period is None else p["period"] == period)]
    ratios = {}
    for rank in found[-1]["ranks"] if found else []:
        seconds = dict.fromkeys(State, 0.0)
        for segment in rank["segments"]:
            seconds[State(segment["state"])] += segment["end"] - segment["start"]
        ratio = account.bubble_ratio(seconds)
        if ratio is not None:
            ratios[rank["rank"]] = ratio
    return ratios


def chrome_trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document for chrome://tracing or Perfetto: a thread per rank, microseconds of the leader's clock."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(document["ranks"])
    ]
    for period in document["periods"]:
        chunks = {batch["batch"]: batch["chunks"] for batch in period["batches"]}
        for rank in period["ranks"]:
            for s in rank["segments"]:
                what = {"period": period["period"], "batch": s["batch"], "chunks": chunks.get(s["batch"], [])}
                start, duration = (s["start"] + rank["clockOffset"]) * 1e6, (s["end"] - s["start"]) * 1e6
                block = {"ph": "X", "name": s["state"], "cat": s["kind"] or "wait", "ts": start, "dur": duration}
                events.append(block | {"pid": 0, "tid": rank["rank"], "args": what})
        for r in period["requests"]:
            name = f"first token of {r['request']}"
            events.append({"ph": "i", "s": "g", "name": name, "pid": 0, "tid": 0, "ts": r["at"] * 1e6, "args": dict(r)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
