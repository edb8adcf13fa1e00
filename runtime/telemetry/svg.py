"""One busy period as a picture: a lane per rank, coloured by state, standalone and readable on light and dark.

Plain string building: an engine image has no drawing library, and the agent serves the result as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from prefill_runtime.telemetry.account import State
from prefill_runtime.telemetry.timeline import bubble_ratio

_WIDTH, _LEFT, _RIGHT = 1240, 78, 92
_TOP, _LANE, _GAP = 88, 36, 10
_PLOT = _WIDTH - _LEFT - _RIGHT
_NARROWEST = 0.15
_CHARACTER = 6.7
"""Pixels per character of an 11 px label, a little generous."""

_NAMES = {
    State.COMPUTE: "compute",
    State.TRANSFER: "transfer",
    State.FILL: "fill bubble",
    State.IMBALANCE: "imbalance bubble",
    State.DRAIN: "drain bubble",
    State.HOST: "host",
}
_COLOURS = {
    State.COMPUTE: "#3572c6",
    State.TRANSFER: "#8d63b8",
    State.FILL: "#f6d27a",
    State.IMBALANCE: "#ee9350",
    State.DRAIN: "#dd7f86",
    State.HOST: "#9097a1",
}
_STYLE = """
text{font:11px ui-sans-serif,system-ui,"Segoe UI","DejaVu Sans",sans-serif;fill:#1f2530}
.paper{fill:#fff}.lane{fill:#eef0f3}.grid{stroke:#d5d9df}.axis{stroke:#8a919c}
.title{font-size:15px;font-weight:600}.soft{fill:#5c6470}.rank{font-size:12px;font-weight:600}
.ratio{font-size:13px;font-weight:600}.token{stroke:#1f2530;stroke-width:1.5;stroke-dasharray:4 3}
.in{fill:#fff;text-anchor:middle;pointer-events:none}.middle{text-anchor:middle}.end{text-anchor:end}
.compute.odd{fill:#5590dd}.compute.tail{fill:#1f8a8a}.compute.tail.odd{fill:#3aa5a3}
@media (prefers-color-scheme:dark){text{fill:#e6e9ee}.paper{fill:#14171c}.lane{fill:#232830}.grid{stroke:#343b46}
.axis{stroke:#7c8594}.soft{fill:#a0a8b5}.token{stroke:#e6e9ee}.in{fill:#fff}}
"""


def render(document: Mapping[str, Any], period: int | None = None) -> str:
    """SVG of ``period``; by default the last complete one, else the one that is running."""
    chosen = _choose(document, period)
    if chosen is None or not any(rank["segments"] for rank in chosen["ranks"]):
        return _page(_WIDTH, 80, [f'<text x="{_LEFT}" y="46" class="title">No busy period recorded yet</text>'])
    ratios = bubble_ratio(document, chosen["period"])
    return _Chart(chosen, ratios).draw()


def _choose(document: Mapping[str, Any], period: int | None) -> Mapping[str, Any] | None:
    periods = [p for p in document["periods"] if period is None or p["period"] == period]
    complete = [p for p in periods if p["complete"]]
    candidates: list[Mapping[str, Any]] = complete or periods
    return candidates[-1] if candidates else None


def _page(width: float, height: float, body: list[str]) -> str:
    colours = "".join(f".{state}{{fill:{colour}}}" for state, colour in _COLOURS.items())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img"><style>{colours}{_STYLE}</style>'
    )
    return "\n".join([head, f'<rect class="paper" width="{width:g}" height="{height:g}"/>', *body, "</svg>\n"])


class _Chart:
    def __init__(self, period: Mapping[str, Any], ratios: Mapping[int, float]) -> None:
        self._period = period
        self._ratios = ratios
        self._ranks = period["ranks"]
        self._chunks = {batch["batch"]: batch["chunks"] for batch in period["batches"]}
        self._zero: float = period["start"]
        spans = [
            (s["start"] + r["clockOffset"] - self._zero, s["end"] + r["clockOffset"] - self._zero)
            for r in self._ranks
            for s in r["segments"]
        ]
        self._from: float = min(a for a, _ in spans)
        self._to: float = max(b for _, b in spans)
        self._bottom = _TOP + len(self._ranks) * (_LANE + _GAP)

    def draw(self) -> str:
        body = [*self._heading(), *self._axis()]
        for row, rank in enumerate(self._ranks):
            body += self._lane(rank, _TOP + row * (_LANE + _GAP))
        body += self._first_tokens()
        body += self._legend()
        return _page(_WIDTH, self._bottom + 78, body)

    def _x(self, seconds: float) -> float:
        return _LEFT + (seconds - self._from) / max(self._to - self._from, 1e-12) * _PLOT

    def _heading(self) -> Iterator[str]:
        period = self._period
        chunks = [c for batch in period["batches"] for c in batch["chunks"] if c["history"] < c["promptTokens"]]
        requests = {c["request"] for c in chunks}
        policies = sorted({batch["policy"] for batch in period["batches"] if batch["policy"]})
        facts = [
            f"{sum(c['tokens'] for c in chunks):,} prompt tokens in {_count(len(chunks), 'chunk')}",
            _count(len(requests), "request"),
            f"policy {', '.join(policies)}" if policies else "",
            _seconds(self._to - max(0.0, self._from)),
            "" if period["complete"] else "not complete",
            "oldest part cut off" if any(rank["truncated"] for rank in self._ranks) else "",
        ]
        yield f'<text x="{_LEFT}" y="28" class="title">Busy period {period["period"]}</text>'
        yield f'<text x="{_LEFT}" y="47" class="soft">{escape(" · ".join(fact for fact in facts if fact))}</text>'
        yield f'<text x="{_WIDTH - 16}" y="{_TOP - 10}" class="soft end">bubble</text>'

    def _axis(self) -> Iterator[str]:
        step = _nice((self._to - self._from) / 9)
        foot = self._bottom - _GAP + 6
        tick = math.ceil(self._from / step - 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        while tick * step <= self._to + 1e-9 * step:
            x = self._x(tick * step)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{foot}" class="grid"/>'
            yield f'<text x="{x:.1f}" y="{foot + 15}" class="middle soft">{abs(tick * step):.{digits}f} s</text>'
            tick += 1
        yield f'<line x1="{_LEFT}" x2="{_LEFT + _PLOT}" y1="{foot}" y2="{foot}" class="axis"/>'

    def _lane(self, rank: Mapping[str, Any], y: float) -> Iterator[str]:
        number = rank["rank"]
        yield f'<text x="{_LEFT - 12}" y="{y + _LANE / 2 + 4}" class="rank end">rank {number}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_LANE}" rx="3" class="lane"/>'
        for segment in rank["segments"]:
            yield from self._segment(segment, rank["clockOffset"] - self._zero, y)
        if number in self._ratios:
            share = f"{self._ratios[number]:.1%}"
            yield f'<text x="{_WIDTH - 16}" y="{y + _LANE / 2 + 5}" class="ratio end">{share}</text>'

    def _segment(self, segment: Mapping[str, Any], shift: float, y: float) -> Iterator[str]:
        left, right = self._x(segment["start"] + shift), self._x(segment["end"] + shift)
        if right - left < _NARROWEST:
            return
        state = State(segment["state"])
        # A hair of paper between neighbours shows where one chunk ends, as long as there is room for it.
        width = right - left - (0.8 if right - left > 4 else 0.0)
        chunks = self._chunks.get(segment["batch"], [])
        classes = str(state)
        if state is State.COMPUTE:
            classes += (" tail" if segment["kind"] == "tail" else "") + (" odd" if segment["batch"] % 2 else "")
        yield (
            f'<rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" class="{classes}">'
            f"<title>{escape(self._tooltip(segment, shift, chunks))}</title></rect>"
        )
        label = " + ".join(f"{chunk['tokens']:,}" for chunk in chunks)
        if state is State.COMPUTE and label and width > len(label) * _CHARACTER + 6:
            yield f'<text x="{left + width / 2:.2f}" y="{y + _LANE / 2 + 4}" class="in">{label}</text>'

    def _tooltip(self, segment: Mapping[str, Any], shift: float, chunks: list[Mapping[str, Any]]) -> str:
        state, length = State(segment["state"]), _seconds(segment["end"] - segment["start"])
        lines = [f"{_NAMES.get(state, state)} {length}, from {segment['start'] + shift:.4f} s"]
        if segment["stage"] >= 0:
            kind = "" if segment["kind"] == "stage" else f" ({segment['kind']})"
            lines.append(f"batch {segment['batch']}, stage {segment['stage']}{kind}")
        lines += [
            f"{c['request']}: {c['tokens']:,} tokens after {c['history']:,} of {c['promptTokens']:,}"
            for c in chunks[:12]
        ]
        if len(chunks) > 12:
            lines.append(f"and {len(chunks) - 12} more")
        return "\n".join(lines)

    def _first_tokens(self) -> Iterator[str]:
        free = -math.inf
        for request in sorted(self._period["requests"], key=lambda r: float(r["at"])):
            at = request["at"] - self._zero
            x = min(max(self._x(at), _LEFT), _LEFT + _PLOT)
            label = f"TTFT {_seconds(request['ttft'])}"
            queued = f"of that {_seconds(request['queue'])} queued"
            about = f"{request['request']}: first token at {at:.4f} s\n{label}, {queued}"
            yield (
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 10}" y2="{self._bottom - _GAP + 6}" class="token">'
                f"<title>{escape(about)}</title></line>"
            )
            width = len(label) * _CHARACTER
            if x - width >= free:
                yield f'<text x="{x + 2:.1f}" y="{_TOP - 15}" class="end">{label}</text>'
                free = x + 10

    def _legend(self) -> Iterator[str]:
        seconds = dict.fromkeys(State, 0.0)
        for rank in self._ranks:
            for s in rank["segments"]:
                seconds[State(s["state"])] += s["end"] - s["start"]
        total = sum(seconds.values()) or 1.0
        x, y = float(_LEFT), self._bottom + 42
        for state, name in _NAMES.items():
            label = f"{name} {seconds[state] / total:.1%}"
            yield f'<rect x="{x:.1f}" y="{y}" width="14" height="14" rx="2" class="{state}"/>'
            yield f'<text x="{x + 20:.1f}" y="{y + 11}">{label}</text>'
            x += 20 + len(label) * 6.2 + 18


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _nice(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= rough * (1 - 1e-9))
