"""One direction of a folded pipeline's activations, on a process group of its own.

Nothing can block the other direction. What is sent needs no description: both sides know the shapes, so a message is
one tensor, whose receive is posted before it is needed and whose buffer is kept until the receiver has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from vllm.sequence import IntermediateTensors


class Receipt(NamedTuple):
    """A posted receive."""

    work: Any
    buffer: torch.Tensor


class Channel:
    """keys: names of the tensors of one hand-over, each of [tokens, width]. depth: messages that may be on their way
    before the oldest is waited for. blocking: the sender waits until its receiver has everything (vanilla VPP).
    """

    def __init__(
        self, group: Any, keys: Sequence[str], width: int, dtype: torch.dtype, device: Any, depth: int, blocking: bool
    ) -> None:
        self._group, self._keys, self._width, self._dtype, self._device = group, list(keys), width, dtype, device
        self._depth = 0 if blocking else depth
        self._sent: deque[Receipt] = deque()

    def send(self, tensors: Mapping[str, torch.Tensor], to: int) -> None:
        """To a global rank."""
        buffer = torch.stack([tensors[key] for key in self._keys])
        work = dist.isend(buffer, dst=to, group=self._group)
        self._sent.append(Receipt(work, buffer))
        while self._sent and (len(self._sent) > self._depth or self._sent[0].work.is_completed()):
            self._sent.popleft().work.wait()

    def post(self, tokens: int, source: int) -> Receipt:
        """Ask for the next message of a global rank, which has that many tokens."""
        buffer = torch.empty((len(self._keys), tokens, self._width), dtype=self._dtype, device=self._device)
        return Receipt(dist.irecv(buffer, src=source, group=self._group), buffer)

    def take(self, receipt: Receipt) -> IntermediateTensors:
        """Wait for a posted message."""
        receipt.work.wait()
        return IntermediateTensors(dict(zip(self._keys, receipt.buffer.unbind(0), strict=True)))
