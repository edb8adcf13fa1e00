"""Profiling: a request's own chunk list, so that samples are taken through the real scheduler.

The list comes with the request: ``vllm_xargs: {"prefill_chunks": "512,256"}`` over HTTP, ``extra_args`` offline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

ARGUMENT = "prefill_chunks"


def parse(text: object) -> list[int]:
    """Sizes of "512,256,..."; ValueError says what is wrong."""
    if not isinstance(text, str):
        raise ValueError(f"{ARGUMENT} is {text!r}, expected text like '512,256'")
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"{ARGUMENT} is {text!r}, expected positive whole numbers like '512,256'")
    return sizes


def of_request(request: Request) -> list[int] | None:
    """The list this request carries, if any."""
    params = request.sampling_params
    text = (params.extra_args or {}).get(ARGUMENT) if params is not None else None
    return None if text is None else parse(text)


def next_size(sizes: list[int], history: int, remaining: int) -> int:
    """Tokens up to the next boundary of the list; after its end all that remains."""
    boundary = 0
    for size in sizes:
        boundary += size
        if boundary > history:
            return min(boundary - history, remaining)
    return remaining
