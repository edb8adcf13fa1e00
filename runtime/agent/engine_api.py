"""What the agent asks of the engine over HTTP: is it up, does it answer, is it busy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import aiohttp

_BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)
_SHORT = aiohttp.ClientTimeout(total=5)
_PATIENT = aiohttp.ClientTimeout(total=None, sock_connect=5)


class EngineAnswerError(Exception):
    """The engine refused a completion; the message has its status and words."""


class EngineApi:
    def __init__(self, port: int, model: str) -> None:
        self._base, self._model = f"http://127.0.0.1:{port}", model
        # vLLM closes a connection that was idle for 5 s; a request that is sent on it at that moment is lost.
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def close(self) -> None:
        await self._client.close()

    async def health(self) -> int | None:
        """The status of /health; None when nobody answers, which a busy engine may do for a while."""
        try:
            async with self._client.get(f"{self._base}/health", timeout=_SHORT) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def wait_until_up(self) -> None:
        while await self.health() != 200:  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(0.25)

    async def complete(self, prompt: Sequence[int], request: str, chunks: Sequence[int] | None = None) -> None:
        """One greedy token for ``prompt`` through the whole pipeline, however long it takes.

        Raises EngineAnswerError.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "request_id": request,
        }
        if chunks is not None:
            body["vllm_xargs"] = {"prefill_chunks": ",".join(map(str, chunks))}
        try:
            async with self._client.post(f"{self._base}/v1/completions", json=body, timeout=_PATIENT) as response:
                text = await response.text()
                if response.status != 200:
                    raise EngineAnswerError(f"completion of {len(prompt)} tokens: HTTP {response.status}: {text[:500]}")
        except aiohttp.ClientError as error:
            raise EngineAnswerError(f"completion of {len(prompt)} tokens: {error or type(error).__name__}") from None

    async def requests_in_work(self) -> int | None:
        """Running and waiting requests; None when the engine does not tell."""
        try:
            async with self._client.get(f"{self._base}/metrics", timeout=_SHORT) as response:
                return count_requests(await response.text())
        except (aiohttp.ClientError, TimeoutError):
            return None


def count_requests(metrics: str) -> int | None:
    values = [float(match) for match in _BUSY.findall(metrics)]
    return round(sum(values)) if values else None
