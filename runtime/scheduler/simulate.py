"""Discrete-event simulation of prefill on a pipeline: what a cut, a layout and an order cost, before anyone runs it.

Chunk k of a request at stage s needs (k, s - 1) done and delivered, and (k - 1, s) done. A rank does one thing at a
time. What it does next is either given (``order``) or decided when it is free:

oldest      oldest request, oldest chunk, latest stage first: drains before it feeds
feed-first  earliest stage first: starves the drain, kept to show by how much

Transfers: ``async`` delays only the chunk (links are FIFO, one message at a time); ``blocking`` holds sender and
receiver, and a sender waits until its receiver is not computing. Two ranks that want to send to each other exchange.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefill_runtime.scheduler.chunkers import Chunker, Queue
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.errors import ParameterError, at_least
from prefill_runtime.scheduler.layout import Layout
from prefill_runtime.scheduler.timeline import Segment, Timeline

Order = Literal["oldest", "feed-first"]
Task = tuple[int, int, int]  # request, chunk, stage
EPSILON = 1e-9  # relative: events this close are simultaneous, whatever rounding says about their order


@dataclass(frozen=True)
class Request:
    """A prompt to prefill. ``chunks``: its cut if it is known beforehand; else the chunker decides as it is issued.

    tokens: whole prompt. history: leading tokens found in the prefix cache.
    """

    tokens: int
    arrival: float = 0.0
    history: int = 0
    chunks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        at_least("arrival", self.arrival, 0)
        at_least("history", self.history, 0)
        at_least("prompt tokens", self.tokens, self.history + 1)
        if self.chunks is not None and sum(self.chunks) != self.tokens - self.history:
            raise ParameterError("sum of chunks", sum(self.chunks), f"{self.tokens - self.history}, the prompt's rest")


@dataclass(frozen=True)
class Rules:
    """How the pipeline runs.

    inflight: chunks issued and not out of the last stage; None takes the layout's default. packing: the next
    request's chunks may enter before the last one has left. kv_tokens: KV cache size; a request enters when all of
    it fits. decodes: (tokens, history of each) that ride along with every pass.
    """

    transfer: Literal["async", "blocking"] = "async"
    packing: bool = True
    order: Order = "oldest"
    inflight: int | None = None
    kv_tokens: int | None = None
    decodes: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.inflight is not None:
            at_least("inflight", self.inflight, 1)
        if self.kv_tokens is not None:
            at_least("kv_tokens", self.kv_tokens, 1)
        at_least("decodes", min(self.decodes), 0)


def simulate(
    layout: Layout,
    cost: PipelineCost,
    requests: Sequence[Request],
    chunker: Chunker | None = None,
    rules: Rules | None = None,
    order: Sequence[Sequence[Task]] | None = None,
) -> Timeline:
    """Run all requests, first come first served.

    ``chunker`` cuts requests that bring no chunks of their own. ``order`` fixes each rank's sequence of tasks.
    """
    if not requests:
        raise ParameterError("number of requests", 0, ">= 1")
    return _Simulation(layout, cost, requests, chunker, rules or Rules(), order).run()


class _Running:
    """A request's progress."""

    def __init__(self, index: int, request: Request, stages: int) -> None:
        self.index, self.request = index, request
        self.cut: list[int] = []
        self.seconds: list[list[float]] = []  # of each chunk on each stage
        self.position = request.history
        self.done = [0] * stages  # chunks finished at each stage
        self.arrived = [0] * stages  # chunks delivered to each stage
        self.finish = 0.0

    @property
    def issued_all(self) -> bool:
        return self.position == self.request.tokens


class _Rank:
    def __init__(self) -> None:
        self.free = True
        self.ready: list[tuple[int, int, int]] = []  # heap of tasks in the order's own key
        self.sends: deque[Task] = deque()  # blocking: finished, not yet taken by the receiver
        self.order: deque[Task] | None = None


class _Simulation:
    def __init__(
        self,
        layout: Layout,
        cost: PipelineCost,
        requests: Sequence[Request],
        chunker: Chunker | None,
        rules: Rules,
        order: Sequence[Sequence[Task]] | None,
    ) -> None:
        self.layout, self.cost, self.rules, self.chunker = layout, cost, rules, chunker
        self.stages, self.place = layout.stages, layout.placement
        arrivals = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
        self.all = [_Running(i, r, self.stages) for i, r in enumerate(requests)]
        self.queue = deque(self.all[i] for i in arrivals)
        self.age = {i: n for n, i in enumerate(arrivals)}
        self.by_age = arrivals
        self.ranks = [_Rank() for _ in range(layout.ranks)]
        if order is not None:
            for rank, tasks in zip(self.ranks, order, strict=True):
                rank.order = deque(tasks)
        self.limit = rules.inflight or layout.inflight
        self.inflight = self.active = self.kv_used = 0
        self.waiting_tokens = self.arrived_waiting = 0
        self.busy_before = 0.0
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.sequence = 0
        self.links: dict[tuple[int, int], float] = {}
        self.timeline = Timeline(layout, [r.arrival for r in requests], [r.history for r in requests])
        count, history = rules.decodes
        alone = cost.batch_seconds(self.stages, [])
        self.riders = [
            a - b for a, b in zip(cost.batch_seconds(self.stages, [(1, history)] * count), alone, strict=True)
        ]

    # events -------------------------------------------------------------------------------------------------

    def at(self, time: float, kind: str, data: tuple[int, ...]) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, kind, data))

    def run(self) -> Timeline:
        for running in self.all:
            if self.rules.kv_tokens is not None and running.request.tokens > self.rules.kv_tokens:
                raise ParameterError("prompt tokens", running.request.tokens, f"<= kv_tokens = {self.rules.kv_tokens}")
            self.at(running.request.arrival, "arrive", (running.index,))
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] <= now + EPSILON * max(1.0, now):
                _, _, kind, data = heapq.heappop(self.events)
                self.handle(kind, data, now)
            self.dispatch(now)
        if self.queue or self.inflight:
            raise ParameterError("order", "a deadlock", "one in which every task's inputs come before it")
        self.timeline.finish = [r.finish for r in self.all]
        self.timeline.chunks = [r.cut for r in self.all]
        return self.timeline

    def handle(self, kind: str, data: tuple[int, ...], now: float) -> None:
        if kind == "computed":
            self.computed((data[0], data[1], data[2]), now)
        elif kind == "delivered":
            self.deliver((data[0], data[1], data[2]))
        elif kind == "freed":
            for rank in data:
                self.ranks[rank].free = True
        else:
            self.arrived_waiting += 1
            self.waiting_tokens += self.all[data[0]].request.tokens - self.all[data[0]].request.history

    def computed(self, task: Task, now: float) -> None:
        request, chunk, stage = task
        running, rank = self.all[request], self.place[stage]
        self.ranks[rank].free = True
        running.done[stage] += 1
        if running.arrived[stage] > running.done[stage]:
            self.push(request, chunk + 1, stage)
        if stage == self.stages - 1:
            self.inflight -= 1
            if self.inflight == 0:
                self.timeline.periods[-1][1] = now
            if running.issued_all and running.done[stage] == len(running.cut):
                self.complete(running, now)
            return
        following = self.place[stage + 1]
        if following == rank:
            self.deliver((request, chunk, stage + 1))
            return
        self.timeline.log.append(("S", *task))
        if self.rules.transfer == "blocking":
            self.ranks[rank].sends.append(task)
        else:
            took = self.cost.transfer.seconds(float(running.cut[chunk]))
            arrives = max(now, self.links.get((rank, following), 0.0)) + took
            self.links[rank, following] = arrives
            self.at(arrives, "delivered", (request, chunk, stage + 1))

    def complete(self, running: _Running, now: float) -> None:
        running.finish = now
        self.active -= 1
        self.kv_used -= running.request.tokens

    def deliver(self, task: Task) -> None:
        request, chunk, stage = task
        running = self.all[request]
        running.arrived[stage] += 1
        if running.done[stage] == chunk:
            self.push(request, chunk, stage)

    def push(self, request: int, chunk: int, stage: int) -> None:
        age = self.age[request]
        key = (age, chunk, -stage) if self.rules.order == "oldest" else (stage, age, chunk)
        heapq.heappush(self.ranks[self.place[stage]].ready, key)

    # decisions ----------------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> None:
        if self.rules.transfer == "blocking":
            self.exchange(now)
        for index, rank in enumerate(self.ranks):
            if rank.free and not rank.sends:
                task = self.choose(index, rank, now)
                if task is not None:
                    self.start(task, index, now)

    def choose(self, index: int, rank: _Rank, now: float) -> Task | None:
        head = self.head(now) if index == 0 else None
        if rank.order is not None:
            return self.ordered(rank, head, now)
        if rank.ready and (head is None or self.rules.order == "oldest"):
            key = heapq.heappop(rank.ready)
            if self.rules.order == "oldest":
                return self.by_age[key[0]], key[1], -key[2]
            return self.by_age[key[1]], key[2], key[0]
        return self.issue(head, now) if head else None

    def ordered(self, rank: _Rank, head: _Running | None, now: float) -> Task | None:
        """The next task of a given order, once it is ready."""
        if not rank.order:
            return None
        request, chunk, stage = rank.order[0]
        if stage == 0:
            if head is None or (head.index, len(head.cut)) != (request, chunk):
                return None
            rank.order.popleft()
            return self.issue(head, now)
        key = (self.age[request], chunk, -stage) if self.rules.order == "oldest" else (stage, self.age[request], chunk)
        if key not in rank.ready:
            return None
        rank.ready.remove(key)
        heapq.heapify(rank.ready)
        return rank.order.popleft()

    def head(self, now: float) -> _Running | None:
        """The request whose next chunk may enter the pipeline now."""
        if not self.queue or self.inflight >= self.limit:
            return None
        first = self.queue[0]
        if first.request.arrival > now + EPSILON * max(1.0, now):
            return None
        if not first.cut:
            full = self.rules.kv_tokens is not None and self.kv_used + first.request.tokens > self.rules.kv_tokens
            if full or (self.active and not self.rules.packing):
                return None
        return first

    def issue(self, running: _Running, now: float) -> Task:
        request = running.request
        if not running.cut:
            self.active += 1
            self.kv_used += request.tokens
        chunk = len(running.cut)
        size = request.chunks[chunk] if request.chunks is not None else self.ask(running, now)
        seconds = self.cost.stage_seconds(self.stages, float(size), float(running.position))
        running.seconds.append([s + rider for s, rider in zip(seconds, self.riders, strict=True)])
        running.cut.append(size)
        running.position += size
        running.arrived[0] += 1
        self.inflight += 1
        self.waiting_tokens -= size
        if running.issued_all:
            self.queue.popleft()
            self.arrived_waiting -= 1
        return running.index, chunk, 0

    def ask(self, running: _Running, now: float) -> int:
        if self.chunker is None:
            raise ParameterError("chunks", None, "a list per request, or a chunker for all")
        kv = self.rules.kv_tokens
        free = 1 - self.kv_used / kv if kv else 1.0
        self.chunker.observe(Queue(self.waiting_tokens, self.arrived_waiting - 1, free, self.load(now)))
        rest = running.request.tokens - running.position
        return self.chunker.next_chunk(running.position, rest, running.index)

    def start(self, task: Task, rank: int, now: float) -> None:
        request, chunk, stage = task
        if stage == 0 and self.inflight == 1:
            self.open_period(now)
        end = now + self.all[request].seconds[chunk][stage]
        self.ranks[rank].free = False
        self.timeline.log.append(("R", *task))
        self.timeline.segments.append(Segment(rank, now, end, "compute", request, chunk, stage))
        self.at(end, "computed", task)

    def open_period(self, now: float) -> None:
        """A chunk enters an empty pipeline. If it became empty only just now, the busy period goes on."""
        periods = self.timeline.periods
        if periods and now - periods[-1][1] <= EPSILON * max(1.0, now):
            return
        self.busy_before += periods[-1][1] - periods[-1][0] if periods else 0.0
        periods.append([now, now])

    def load(self, now: float) -> float:
        """Share of the time so far in which the pipeline was not empty."""
        elapsed = now - self.timeline.start
        if elapsed <= 0 or not self.timeline.periods:
            return 0.0
        start, end = self.timeline.periods[-1]
        return (self.busy_before + (now if self.inflight else end) - start) / elapsed

    def exchange(self, now: float) -> None:
        """Blocking transfers: start those whose receiver does not compute."""
        for index, rank in enumerate(self.ranks):
            if not rank.sends or not rank.free:
                continue
            task = rank.sends[0]
            other = self.place[task[2] + 1]
            peer = self.ranks[other]
            if not peer.free:
                continue
            back = peer.sends[0] if peer.sends and self.place[peer.sends[0][2] + 1] == index else None
            both = [(rank, task)] + ([(peer, back)] if back else [])
            end = now + max(self.cost.transfer.seconds(float(self.all[t[0]].cut[t[1]])) for _, t in both)
            for sender, (request, chunk, stage) in both:
                sender.sends.popleft()
                self.at(end, "delivered", (request, chunk, stage + 1))
            for busy in (index, other):
                self.ranks[busy].free = False
                self.timeline.segments.append(Segment(busy, now, end, "transfer", *task))
            self.at(end, "freed", (index, other))
