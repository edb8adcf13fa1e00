"""A keyed work queue: a key is worked on by one task at a time, and however often it is added, once more at most.

A failed key comes back after an exponential pause with jitter; success forgets its failures. A key may also
be added for later; the earliest time wins.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    first_seconds: float = 0.5
    longest_seconds: float = 120.0

    def pause(self, failures: int, fraction: float) -> float:
        """``fraction`` in [0, 1) spreads keys that failed together over the second half of the pause."""
        full = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 32))
        return full * (0.5 + fraction / 2)


Key = tuple[str, str]  # namespace and name of a pipeline


class WorkQueue:
    """``work`` returns after how many seconds to come back by itself, or None; an exception means a retry."""

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        on_error: Callable[[Key, Exception], float | None],
        workers: int = 8,
        backoff: Backoff | None = None,
    ) -> None:
        self._work, self._on_error, self._workers = work, on_error, workers
        self._backoff = backoff or Backoff()
        self._ready: deque[Key] = deque()
        self._waiting: set[Key] = set()  # in _ready
        self._active: set[Key] = set()
        self._again: set[Key] = set()  # added while active
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._available = asyncio.Semaphore(0)
        self._looks: list[tuple[set[Key], asyncio.Event]] = []

    def __len__(self) -> int:
        return len(self._ready) + len(self._again)

    def add(self, key: Key) -> None:
        self._cancel_timer(key)
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._available.release()

    def add_later(self, key: Key, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= due:
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_at(due, self.add, key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def run(self) -> None:
        """Works until cancelled; work under way is given up, which a level-triggered reconciler does not mind."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._worker())
        finally:
            for key in list(self._timers):
                self._cancel_timer(key)

    async def attempted(self, keys: set[Key]) -> None:
        """Returns when work on each of ``keys`` that waits or is under way has come to an end once.

        They need not be quiet all at the same moment, which in a busy cluster may never be.
        """
        left = keys & (self._waiting | self._active)
        if not left:
            return
        look = (left, asyncio.Event())
        self._looks.append(look)
        try:
            await look[1].wait()
        finally:
            self._looks.remove(look)

    async def _worker(self) -> None:
        while True:
            await self._available.acquire()
            key = self._ready.popleft()
            self._waiting.discard(key)
            self._active.add(key)
            try:
                await self._attempt(key)
            finally:
                self._active.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)
                for left, done in self._looks:
                    left.discard(key)
                    if not left:
                        done.set()

    async def _attempt(self, key: Key) -> None:
        try:
            later = await self._work(key)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            asked = self._on_error(key, error)
            # Not a secret, only a spread.
            pause = self._backoff.pause(failures, random.random())
            self.add_later(key, max(pause, asked or 0.0))
            return
        self._failures.pop(key, None)
        if later is not None:
            self.add_later(key, later)
