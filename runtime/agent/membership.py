"""Who belongs to a rank group and who is still there: the rules of contract 5 without any input or output.

Time comes in as an argument, so each rule can be tested without waiting for it.

Life of a member as its leader sees it: join -> (all joined) launch -> beats -> bye. Before the launch a
member may come and go, since no engine runs yet; after it every loss breaks the group, because a
pipeline with a stage missing can only hang.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from prefill_runtime.agent.config import EndReason

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0

Message = dict[str, Any]
Step = Literal["profile", "serve"]


class Refusal(StrEnum):
    """Why a leader does not let a rank join."""

    INCARNATION = "incarnation"
    RANK = "rank"
    TAKEN = "taken"
    LAUNCHED = "launched"
    STEP = "step"
    MALFORMED = "malformed"


class RefusedError(Exception):
    def __init__(self, refusal: Refusal, message: str, step: str = "") -> None:
        super().__init__(message)
        self.refusal, self.step = refusal, step

    def to_message(self) -> Message:
        return {"type": "refuse", "reason": self.refusal.value, "message": str(self), "step": self.step}


@dataclass(frozen=True)
class GroupEnd:
    """Why this rank's membership ended. ``bye`` is what the other side said last, if it said anything."""

    reason: EndReason
    message: str
    bye: Message | None = None


class Silence:
    """Tells which peers have not been heard for too long.

    A check that itself comes late says nothing about the peers: this process was starved or stopped and
    their messages are still in the socket. The delay is credited to everybody.
    """

    def __init__(self, now: float, limit: float = SILENCE_SECONDS) -> None:
        self._limit = limit
        self._heard: dict[int, float] = {}
        self._checked = now

    def heard(self, peer: int, now: float) -> None:
        self._heard[peer] = now

    def forget(self, peer: int) -> None:
        self._heard.pop(peer, None)

    def age(self, peer: int, now: float) -> float:
        return now - self._heard[peer]

    def overdue(self, now: float) -> list[int]:
        gap, self._checked = now - self._checked, now
        if gap > 2 * BEAT_SECONDS:
            for peer in self._heard:
                self._heard[peer] = min(now, self._heard[peer] + gap - BEAT_SECONDS)
        return sorted(peer for peer, at in self._heard.items() if now - at > self._limit)


@dataclass
class ClockOffset:
    """How far a peer's monotonic clock is ahead of ours, from the quickest exchange of the last minute."""

    seconds: float | None = None
    round_trip: float = float("inf")
    _at: float = float("-inf")

    def observe(self, sent: float, peer_received: float, peer_sent: float, received: float) -> None:
        """Four clock readings of one exchange: ours, theirs, theirs, ours."""
        round_trip = (received - sent) - (peer_sent - peer_received)
        if round_trip < 0 or (round_trip > self.round_trip and received - self._at < 60):
            return
        self.seconds = ((peer_received - sent) + (peer_sent - received)) / 2
        self.round_trip, self._at = round_trip, received


@dataclass
class Peer:
    """The last that one side knows of the other."""

    rank: int
    last_sent: float | None = None  # the peer's clock when it sent its newest beat
    last_received: float = 0.0  # ours when it came
    clock: ClockOffset = field(default_factory=ClockOffset)

    def beat(self, message: Message, now: float) -> None:
        sent, echo = message.get("sent"), message.get("echo")
        if not isinstance(sent, int | float):
            return
        self.last_sent, self.last_received = float(sent), now
        if isinstance(echo, list) and len(echo) == 2:
            self.clock.observe(float(echo[0]), float(echo[1]), float(sent), now)

    def echo(self) -> list[float] | None:
        return None if self.last_sent is None else [self.last_sent, self.last_received]


class Members:
    """The leader's list of followers."""

    def __init__(self, incarnation: str, pods: int, step: Step, now: float) -> None:
        self.incarnation, self.pods, self.step = incarnation, pods, step
        self.launched = False
        self.peers: dict[int, Peer] = {}
        self.silence = Silence(now)

    @property
    def complete(self) -> bool:
        return len(self.peers) == self.pods - 1

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.pods) if rank not in self.peers]

    def admit(self, message: Message, now: float) -> int:
        """The rank that joined. Raises RefusedError."""
        rank, incarnation = message.get("rank"), message.get("incarnation")
        if message.get("type") != "join" or not isinstance(rank, int) or not isinstance(incarnation, str):
            raise RefusedError(Refusal.MALFORMED, "the first message must be a join with rank and incarnation")
        if message.get("step") != self.step:
            raise RefusedError(
                Refusal.STEP, f"rank 0 is at step {self.step}, rank {rank} at {message.get('step')}", self.step
            )
        if incarnation != self.incarnation:
            raise RefusedError(
                Refusal.INCARNATION, f"rank 0 is of incarnation {self.incarnation}, rank {rank} of {incarnation}"
            )
        if not 0 < rank < self.pods:
            raise RefusedError(Refusal.RANK, f"rank {rank} is outside this group of {self.pods} pods")
        if self.launched:
            raise RefusedError(Refusal.LAUNCHED, f"the group has been launched; rank {rank} came too late to join it")
        if rank in self.peers:
            raise RefusedError(Refusal.TAKEN, f"another agent has already joined as rank {rank}")
        self.peers[rank] = Peer(rank)
        self.silence.heard(rank, now)
        return rank

    def launch(self) -> None:
        self.launched = True

    def heard(self, rank: int, message: Message, now: float) -> None:
        self.silence.heard(rank, now)
        if message.get("type") == "beat":
            self.peers[rank].beat(message, now)

    def forget(self, rank: int) -> None:
        self.peers.pop(rank, None)
        self.silence.forget(rank)


def lost(who: int, how: str) -> GroupEnd:
    return GroupEnd(EndReason.PEER_LOST, f"rank {who} was lost: {how}")


def said_bye(who: int, message: Message) -> GroupEnd:
    """The other side ended on purpose and told why; for this rank that is a lost peer all the same."""
    reason, text = message.get("reason", "?"), message.get("message", "")
    return GroupEnd(EndReason.PEER_LOST, f"rank {who} ended: {reason}{': ' + text if text else ''}", message)


def refused(message: Message) -> GroupEnd | None:
    """What a refused rank does: end with a reason, or (None) try again."""
    refusal, text = message.get("reason"), str(message.get("message", ""))
    if refusal == Refusal.INCARNATION:
        return GroupEnd(EndReason.INCARNATION_CHANGED, text, message)
    if refusal == Refusal.TAKEN:
        return None  # most likely by an earlier connection of ours, whose loss rank 0 has not noticed yet
    if refusal == Refusal.STEP:
        # A leader that still profiles will come to serve. One that already serves will not profile again.
        return None if message.get("step") == "profile" else GroupEnd(EndReason.PEER_LOST, text, message)
    return GroupEnd(EndReason.PEER_LOST, text, message)
