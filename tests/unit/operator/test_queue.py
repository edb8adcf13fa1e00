from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prefill_operator.reconcile.queue import Backoff, Key, WorkQueue

A, B = ("ns", "a"), ("ns", "b")


class Work:
    """Records what is worked on; a key stays under way until it is released."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[Key] = asyncio.Queue()
        self.active: list[Key] = []
        self.gates: dict[Key, asyncio.Event] = {}
        self.fail = 0
        self.later: float | None = None
        self.errors: list[Exception] = []

    async def __call__(self, key: Key) -> float | None:
        assert key not in self.active, "one worker per key"
        self.active.append(key)
        self.begun.put_nowait(key)
        try:
            if key in self.gates:
                await self.gates[key].wait()
            if self.fail:
                self.fail -= 1
                raise ValueError("no")
        finally:
            self.active.remove(key)
        later, self.later = self.later, None
        return later

    def on_error(self, key: Key, error: Exception) -> float | None:
        self.errors.append(error)
        return None


@asynccontextmanager
async def running(work: Work, **options: object) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(work, work.on_error, workers=2, backoff=Backoff(0.001, 0.01))
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_keys_are_worked_on_once_however_often_added() -> None:
    work = Work()
    work.gates[A] = asyncio.Event()
    async with running(work) as queue:
        queue.add(A)
        assert await work.begun.get() == A
        for _ in range(10):
            queue.add(A)
        queue.add(B)
        assert await work.begun.get() == B, "another key is not held up"
        assert len(queue) == 1
        work.gates.pop(A).set()
        assert await work.begun.get() == A
        await queue.attempted({A, B})
        assert work.begun.empty()


async def test_a_failure_is_tried_again_until_it_succeeds() -> None:
    work = Work()
    work.fail = 3
    async with running(work) as queue:
        queue.add(A)
        for _ in range(4):
            assert await asyncio.wait_for(work.begun.get(), 10) == A
        await queue.attempted({A})
    assert len(work.errors) == 3


async def test_a_key_comes_back_when_its_work_asks_for_it() -> None:
    work = Work()
    work.later = 0.001
    async with running(work) as queue:
        queue.add(A)
        for _ in range(2):
            assert await asyncio.wait_for(work.begun.get(), 10) == A


async def test_the_earliest_time_wins_and_adding_now_beats_both() -> None:
    work = Work()
    async with running(work) as queue:
        queue.add_later(A, 3600)
        queue.add_later(A, 0.001)
        assert await asyncio.wait_for(work.begun.get(), 10) == A
        queue.add_later(A, 0.001)
        queue.add_later(A, 3600)
        assert await asyncio.wait_for(work.begun.get(), 10) == A
        queue.add_later(A, 3600)
        queue.add(A)
        assert await asyncio.wait_for(work.begun.get(), 10) == A


def test_pauses_double_are_capped_and_spread() -> None:
    backoff = Backoff(1, 60)
    assert [backoff.pause(n, 1.0) for n in (1, 2, 3, 7, 1000)] == [1, 2, 4, 60, 60]
    assert backoff.pause(3, 0.0) == 2


async def test_a_key_that_is_never_quiet_does_not_hold_up_the_count_of_attempts() -> None:
    """Else a busy pipeline would make a healthy operator look dead."""
    work = Work()
    work.gates[A] = asyncio.Event()
    async with running(work) as queue:
        queue.add(A)
        await work.begun.get()
        queue.add(A)
        waiting = asyncio.create_task(queue.attempted({A, B}))
        await asyncio.sleep(0)
        work.gates[A].set()
        work.gates[A] = asyncio.Event()
        await asyncio.wait_for(waiting, 10)
        assert await work.begun.get() == A
        assert work.active == [A]
