"""What engine processes tell their agent: typed events and their wire form.

One event is one line of JSON: ``{"event": "pass", "batch": 7, ...}`` with camelCase field names. Times are
CLOCK_MONOTONIC seconds of the sender's host. A line that is no event is counted by the receiver, never raised.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, get_type_hints

from pydantic.alias_generators import to_camel

MAX_NAME = 128


class FallbackReason(StrEnum):
    """Why chunks are Fixed although another policy was asked for: few words, because they label a metric, which shows
    each at 0 before it ever happens. The details are in the engine's log.
    """

    NO_CALIBRATION = "NoCalibration"
    INVALID_CALIBRATION = "InvalidCalibration"
    WRONG_STAGES = "WrongStages"
    POLICY_FAILED = "PolicyFailed"


class Chunk(NamedTuple):
    """Part of a batch: ``tokens`` of ``request`` computed after ``history`` tokens of it."""

    request: str
    history: int
    tokens: int
    prompt_tokens: int

    @property
    def prefill(self) -> bool:
        """False for a decode step, which only continues a prompt that is complete."""
        return self.history < self.prompt_tokens


@dataclass(slots=True, kw_only=True)
class Stamp:
    """What the scheduler knows about a batch when it issues it; rides on SchedulerOutput as ``prefill_stamp``.

    Each rank needs it to say why it waited (``account.py``).
    """

    batch: int
    period: int = 0
    """Busy period, counted from 1; 0 for a decode-only batch while no prefill is in the pipeline."""
    first: bool = False
    """The period's first batch: waiting for its input is fill."""
    idle_before: float = 0.0
    """Seconds without prefill work in the pipeline just before this batch."""
    host_seconds: float = 0.0
    """Seconds that work was ready but not yet issued."""
    chunks: tuple[Chunk, ...] = ()

    def folded(self) -> Stamp:
        """The same with all decode steps as one chunk without a name, for keeping and sending on: a long prompt may
        share each of its batches with hundreds of them."""
        decodes = sum(chunk.tokens for chunk in self.chunks if not chunk.prefill)
        chunks = tuple(chunk for chunk in self.chunks if chunk.prefill)
        return dataclasses.replace(self, chunks=(*chunks, Chunk("", 0, decodes, 0)) if decodes else chunks)


@dataclass(slots=True, kw_only=True)
class Event:
    """Base of all events. ``dropped`` counts the sender's events lost since its last delivered one."""

    name: ClassVar[str] = ""
    dropped: int = 0


@dataclass(slots=True, kw_only=True)
class WorkerEvent(Event):
    """From the worker of a rank. Workers leave ``rank`` out: the receiver knows it from their ``hello``."""

    rank: int = -1


@dataclass(slots=True, kw_only=True)
class Hello(Event):
    """First line of every connection."""

    name: ClassVar[str] = "hello"
    role: str
    rank: int
    engine_version: str = ""


@dataclass(slots=True, kw_only=True)
class Issue(Event):
    """The scheduler hands a batch to the ranks."""

    name: ClassVar[str] = "issue"
    stamp: Stamp
    at: float
    policy: str = ""


@dataclass(slots=True, kw_only=True)
class Settle(Event):
    """A batch's result came back to the scheduler."""

    name: ClassVar[str] = "settle"
    batch: int
    at: float


@dataclass(slots=True, kw_only=True)
class Idle(Event):
    """The last prefill batch of ``period`` settled at ``at`` and no other is in flight."""

    name: ClassVar[str] = "idle"
    period: int
    at: float


@dataclass(slots=True, kw_only=True)
class Call(WorkerEvent):
    """A rank got a batch and starts to wait for its input. The stamp's chunks stay at home: ``pass`` brings them."""

    name: ClassVar[str] = "call"
    stamp: Stamp
    at: float


@dataclass(slots=True, kw_only=True)
class Start(WorkerEvent):
    """A rank's input is there and its model pass starts."""

    name: ClassVar[str] = "start"
    batch: int
    at: float


@dataclass(slots=True, kw_only=True)
class Pass(WorkerEvent):
    """A finished model pass; complete in itself, so a lost ``call`` or ``start`` costs nothing but liveness."""

    name: ClassVar[str] = "pass"
    stamp: Stamp
    stage: int
    kind: str = "stage"
    call: float
    start: float
    end: float
    sent: float


@dataclass(slots=True, kw_only=True)
class Request(Event):
    """A request's first token left the engine."""

    name: ClassVar[str] = "request"
    request: str
    prompt_tokens: int
    ttft: float
    queue: float
    at: float
    arrival: float = 0.0
    """Unix time at which the API server got it; what ``Served`` is recognised by."""


@dataclass(slots=True, kw_only=True)
class Served(Event):
    """A request's first token reached the API server. vLLM tells its stat loggers no more than when."""

    name: ClassVar[str] = "served"
    arrival: float
    ttft: float


@dataclass(slots=True, kw_only=True)
class Finish(Event):
    name: ClassVar[str] = "finish"
    request: str
    outcome: str


@dataclass(slots=True, kw_only=True)
class Queue(Event):
    name: ClassVar[str] = "queue"
    waiting: int
    waiting_tokens: int
    inflight: int
    at: float


@dataclass(slots=True, kw_only=True)
class Fallback(Event):
    """The chosen policy could not be used, Fixed is."""

    name: ClassVar[str] = "fallback"
    reason: str


# --- wire form ---------------------------------------------------------------------------------


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _exactly(kind: type) -> Callable[[object], object]:
    def check(value: object) -> object:
        if type(value) is not kind:
            raise ValueError(f"{value!r} is no {kind.__name__}")
        return value

    return check


def _chunks(value: object) -> tuple[Chunk, ...]:
    if not isinstance(value, list):
        raise ValueError("chunks is no list")
    chunks = tuple(Chunk(*entry) for entry in value)
    for chunk in chunks:
        if type(chunk.request) is not str or any(type(n) is not int for n in chunk[1:]):
            raise ValueError(f"{chunk!r} is no chunk")
    return chunks


_CHECKS: dict[Any, Callable[[object], object]] = {
    int: _exactly(int),
    str: _exactly(str),
    bool: _exactly(bool),
    float: _number,
    tuple[Chunk, ...]: _chunks,
}


_encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class _Field(NamedTuple):
    attribute: str
    key: str
    check: Callable[[object], object]
    default: Any


def _fields(kind: type, without: str = "") -> tuple[_Field, ...]:
    """How a class looks on the wire, apart from its stamp, which lies flat beside the other fields."""
    hints = get_type_hints(kind)
    return tuple(
        _Field(f.name, to_camel(f.name), _CHECKS[hints[f.name]], f.default)
        for f in dataclasses.fields(kind)
        if f.name not in ("stamp", without)
    )


_STAMP, _STAMP_OF_CALL = _fields(Stamp), _fields(Stamp, without="chunks")
_KINDS: dict[str, tuple[type[Event], tuple[_Field, ...], tuple[_Field, ...]]] = {
    kind.name: (kind, _fields(kind), stamp)
    for kind, stamp in (
        (Hello, ()),
        (Issue, _STAMP),
        (Settle, ()),
        (Idle, ()),
        (Call, _STAMP_OF_CALL),
        (Start, ()),
        (Pass, _STAMP),
        (Request, ()),
        (Served, ()),
        (Finish, ()),
        (Queue, ()),
        (Fallback, ()),
    )
}


def _collect(source: object, fields: tuple[_Field, ...], wire: dict[str, Any]) -> None:
    for attribute, key, _, default in fields:
        value = getattr(source, attribute)
        if value != default:
            wire[key] = _SHORTENED[attribute](value) if attribute in _SHORTENED else value


def short_name(request: str) -> str:
    """Clients choose request ids, and an HTTP header has room for megabytes; the end is what vLLM makes unique."""
    return request if len(request) <= MAX_NAME else f"{request[: MAX_NAME // 2]}~{request[1 - MAX_NAME // 2 :]}"


def _short_names(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    if all(len(chunk.request) <= MAX_NAME for chunk in chunks):
        return chunks
    return tuple(chunk._replace(request=short_name(chunk.request)) for chunk in chunks)


_SHORTENED: dict[str, Callable[[Any], object]] = {"request": short_name, "chunks": _short_names}


def to_wire(event: Event) -> dict[str, Any]:
    """The event as a JSON object; fields that have their default are left out."""
    wire: dict[str, Any] = {"event": event.name}
    _, fields, stamp = _KINDS[event.name]
    _collect(event, fields, wire)
    if stamp:
        _collect(event.stamp, stamp, wire)  # type: ignore[attr-defined]
    return wire


def encode(event: Event) -> bytes:
    return f"{_encode_json(to_wire(event))}\n".encode()


class Decoder:
    """Turns lines (or JSON objects, when they travelled in another message) into events and counts the rest."""

    def __init__(self) -> None:
        self.malformed = 0
        self.unknown = 0

    def line(self, line: bytes | str) -> Event | None:
        try:
            wire = json.loads(line)
        except (ValueError, RecursionError):
            self.malformed += 1
            return None
        return self.wire(wire)

    def wire(self, wire: object) -> Event | None:
        if not isinstance(wire, Mapping) or not isinstance(wire.get("event"), str):
            self.malformed += 1
            return None
        if wire["event"] not in _KINDS:
            self.unknown += 1
            return None
        kind, fields, stamp = _KINDS[wire["event"]]
        try:
            values = _parse(wire, fields)
            if stamp:
                values["stamp"] = Stamp(**_parse(wire, stamp))
            return kind(**values)
        except (ValueError, TypeError, OverflowError):
            self.malformed += 1
            return None


def _parse(wire: Mapping[str, Any], fields: tuple[_Field, ...]) -> dict[str, Any]:
    values = {}
    for attribute, key, check, default in fields:
        if key in wire:
            values[attribute] = check(wire[key])
        elif default is dataclasses.MISSING:
            raise ValueError(f"{key} is missing")
    return values
