"""Asks the leaders of serving groups for their calibration, beside the reconciliations: none waits for a pod."""

from __future__ import annotations

import asyncio
import logging
from asyncio import IncompleteReadError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import aiohttp
from prefill_operator.reconcile.group import Group
from prefill_operator.reconcile.queue import Key
from prefill_runtime.agent.config import CONTROL_PORT
from prefill_runtime.profiling.document import MAX_BYTES

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
# A document that is too large is to be told as such, with its size.
ANSWER_BYTES = MAX_BYTES + 1024
AT_ONCE = 16


@dataclass(frozen=True)
class Leader:
    replica: int
    uid: str
    address: str


def leaders(groups: Iterable[Group]) -> list[Leader]:
    """Rank 0 of each group that serves."""
    found = []
    for group in groups:
        pod = next((rank.pod for rank in group.ranks if rank.index == 0), None)
        if group.ready and pod is not None and (address := pod.get("status", {}).get("podIP")):
            found.append(Leader(group.replica, pod["metadata"]["uid"], address))
    return found


@dataclass
class _Asked:
    leader: Leader
    at: float = -inf
    busy: bool = False
    text: str | None = None
    trouble: str = ""


class Offers:
    """Remembers what each leader offered last. ``on_news`` is told of pipelines that something new is offered to."""

    def __init__(self, interval: float, on_news: Callable[[Key], None], clock: Callable[[], float] = monotonic) -> None:
        self._interval, self._on_news, self._clock = interval, on_news, clock
        self._asked: dict[Key, dict[int, _Asked]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def latest(self, key: Key, found: Sequence[Leader]) -> dict[int, str]:
        """Texts by replica, of those who answered. Starts to ask whose turn it is, and does not wait for them."""
        before = self._asked.pop(key, {})
        now, texts = self._clock(), {}
        for leader in found:
            asked = before.get(leader.replica)
            if asked is None or asked.leader != leader:
                asked = _Asked(leader)
            self._asked.setdefault(key, {})[leader.replica] = asked
            if not asked.busy and now - asked.at >= self._interval:
                asked.at, asked.busy = now, True
                task = asyncio.create_task(self._ask(key, asked), name=f"calibration of {leader.address}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if asked.text is not None:
                texts[leader.replica] = asked.text
        return texts

    def forget(self, key: Key) -> None:
        self._asked.pop(key, None)

    async def _ask(self, key: Key, asked: _Asked) -> None:
        try:
            async with self._slots:
                text, trouble = await self._fetch(asked.leader.address), ""
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # What was offered before stays: a pod that is slow to answer has not taken it back.
            text, trouble = asked.text, str(error) or type(error).__name__
        finally:
            asked.busy = False
        if trouble and trouble != asked.trouble:
            log.warning("%s/%s: replica %d gives no calibration: %s", *key, asked.leader.replica, trouble)
        asked.trouble = trouble
        if text != asked.text:
            asked.text = text
            if text is not None:
                self._on_news(key)

    async def _fetch(self, address: str) -> str | None:
        """None: the leader has no calibration. Raises an error of aiohttp, OSError or ValueError."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
            # Nothing is unpacked, so the bound on what is read is one on memory.
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{CONTROL_PORT}/calibration"
        async with self._session.get(url, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as answer:
            if answer.status == 404:
                return None
            if answer.status != 200:
                raise ValueError(f"{url} answers with status {answer.status}")
            try:
                await answer.content.readexactly(ANSWER_BYTES + 1)
            except IncompleteReadError as whole:
                return whole.partial.decode(errors="replace")
        raise ValueError(f"{url} answers with more than {ANSWER_BYTES} bytes")
