"""A simulated run in the form of a recorded one (the engine's /timeline document), and pictures of either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.timeline import Segment, Timeline
from prefill_runtime.telemetry.svg import render
from prefill_runtime.telemetry.timeline import chrome_trace

_COLOURS = {
    "compute": "#3572c6",
    "transfer": "#8d63b8",
    "bubble_fill": "#f6d27a",
    "bubble_imbalance": "#ee9350",
    "bubble_drain": "#dd7f86",
}


def document(timeline: Timeline, policy: str) -> dict[str, Any]:
    """One period per busy period of the run; batches are numbered as they were issued."""
    lanes = timeline.lanes()
    heads = sorted((s for s in timeline.segments if s.stage == 0 and s.kind == "compute"), key=lambda s: s.start)
    numbers = {(s.request, s.chunk): n for n, s in enumerate(heads, 1)}
    starts = {(s.request, s.chunk): s.start for s in heads}
    periods = []
    for number, (start, end) in enumerate(timeline.periods, 1):
        inside = [[s for s in lane if start <= s.start < end] for lane in lanes]
        batches = sorted({(s.request, s.chunk) for lane in inside for s in lane}, key=lambda key: numbers[key])
        periods.append(
            {
                "period": number,
                "complete": True,
                "start": start,
                "end": end,
                "ranks": [_rank(rank, lane, start, end, timeline, numbers) for rank, lane in enumerate(inside)],
                "batches": [_batch(key, numbers, starts, timeline, policy) for key in batches],
                "requests": _requests(timeline, starts, start, end),
            }
        )
    return {"schemaVersion": 1, "ranks": timeline.layout.ranks, "periods": periods}


def _rank(
    rank: int,
    lane: list[Segment],
    start: float,
    end: float,
    timeline: Timeline,
    numbers: Mapping[tuple[int, int], int],
) -> dict[str, Any]:
    segments: list[dict[str, Any]] = []
    clock, waiting, stages = start, "bubble_fill", timeline.layout.stages_of(rank)

    def add(state: str, until: float, batch: int, stage: int) -> None:
        kind = "stage" if len(stages) == 1 else ("head" if stage == stages[0] else "tail")
        if until > clock:
            segments.append(
                {"state": state, "start": clock, "end": until, "batch": batch, "stage": stage, "kind": kind}
            )

    for s in lane:
        batch = numbers[s.request, s.chunk]
        add(waiting, s.start, batch, -1)
        clock = max(clock, s.start)
        add(s.kind, s.end, batch, s.stage)
        clock, waiting = s.end, "bubble_imbalance"
    add("bubble_drain", end, 0, -1)
    lost = sum(x["end"] - x["start"] for x in segments if x["state"].startswith("bubble"))
    return {
        "rank": rank,
        "clockOffset": 0.0,
        "bubbleRatio": lost / (end - start) if end > start else 0.0,
        "truncated": False,
        "segments": segments,
    }


def _batch(
    key: tuple[int, int],
    numbers: Mapping[tuple[int, int], int],
    starts: Mapping[tuple[int, int], float],
    timeline: Timeline,
    policy: str,
) -> dict[str, Any]:
    request, chunk = key
    cut = timeline.chunks[request]
    history = timeline.histories[request] + sum(cut[:chunk])
    total = timeline.histories[request] + sum(cut)
    piece = {"request": f"r{request}", "history": history, "tokens": cut[chunk], "promptTokens": total}
    return {"batch": numbers[key], "at": starts[key], "policy": policy, "chunks": [piece]}


def _requests(
    timeline: Timeline, starts: Mapping[tuple[int, int], float], start: float, end: float
) -> list[dict[str, Any]]:
    found = []
    for i, finish in enumerate(timeline.finish):
        if start < finish <= end:
            queue = starts[i, 0] - timeline.arrivals[i]
            total = timeline.histories[i] + sum(timeline.chunks[i])
            about = {"request": f"r{i}", "promptTokens": total, "ttft": timeline.ttft[i], "queue": queue, "at": finish}
            found.append(about)
    return found


def load(path: Path) -> dict[str, Any]:
    """A document as /timeline or ``simulate --record`` give it."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ParameterError("record", str(path), f"a readable timeline document ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("periods"), list) or not data["periods"]:
        raise ParameterError("record", str(path), "a timeline document with at least one busy period")
    return data


def draw(record: Mapping[str, Any], path: Path, period: int | None = None) -> None:
    """Write a picture (.svg, .png) or a trace for Perfetto (.json), by the file's ending."""
    known = [p["period"] for p in record["periods"]]
    if period is not None and period not in known:
        raise ParameterError("period", period, f"one of {', '.join(map(str, known))}")
    if path.suffix == ".svg":
        path.write_text(render(record, period))
    elif path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(record)))
    elif path.suffix == ".png":
        _png(record, path, period)
    else:
        raise ParameterError("out", str(path), "a name ending in .svg, .png or .json (Perfetto)")


def _png(record: Mapping[str, Any], path: Path, period: int | None) -> None:
    from prefill_runtime.cli.charts import figure, save  # matplotlib takes half a second to load

    chosen = next((p for p in record["periods"] if p["period"] == period), record["periods"][-1])
    chart, axes = figure(12, 1.6 + 0.6 * len(chosen["ranks"]))
    for row, rank in enumerate(chosen["ranks"]):
        for s in rank["segments"]:
            at = s["start"] + rank["clockOffset"] - chosen["start"]
            colour = (
                "#1f8a8a" if s["state"] == "compute" and s["kind"] == "tail" else _COLOURS.get(s["state"], "#9097a1")
            )
            axes.barh(row, s["end"] - s["start"], left=at, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks(
        range(len(chosen["ranks"])), [f"rank {r['rank']} ({r['bubbleRatio']:.1%})" for r in chosen["ranks"]]
    )
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    names = [("compute", "compute"), ("tail pass", "tail"), *((n.replace("_", " "), n) for n in list(_COLOURS)[1:])]
    from matplotlib.patches import Patch

    patches = [Patch(color=_COLOURS.get(key, "#1f8a8a"), label=name) for name, key in names]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=len(patches), frameon=False)
    save(chart, path)
