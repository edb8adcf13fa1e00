"""Board "Prefill pipeline": is the time to first token good, and where does it go."""

from __future__ import annotations

import itertools

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync
from prefill_runtime.telemetry.account import BUBBLES, State

from observability import panels
from observability.panels import Panel, Query, Style, heat, lines, names, quantile, rate, series, share

UID = "prefill-pipeline"
STATE = "prefill_rank_state_seconds_total"
NAMESPACE, PIPELINE = 'namespace="$namespace"', 'pipeline="$pipeline"'
SELECT = f'{NAMESPACE}, {PIPELINE}, replica=~"$replica"'
BUSY = f'state!="{State.IDLE}"'
IN_BUBBLE = f'state=~"{"|".join(BUBBLES)}"'
FLOOR = Query(f"avg (prefill_bubble_ratio_floor{{{SELECT}}})", "theoretical floor")
COLORS = {
    State.FILL: "#F6D27A",
    State.IMBALANCE: "#EE9350",
    State.DRAIN: "#DD7F86",
    State.TRANSFER: "#8D63B8",
    State.HOST: "#9097A1",
    State.COMPUTE: "#3572C6",
}
FLOOR_LINE = Style(FLOOR.legend, "dark-red", dashed=True)


def build() -> Dashboard:
    board = (
        Dashboard("Prefill pipeline")
        .uid(UID)
        .description("One PrefillPipeline: time to first token, pipeline bubble by cause, chunks, calibration.")
        .tags(["prefill-operator", "vllm"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(panels.datasource())
        .with_variable(panels.choice("namespace", "Namespace", STATE))
        .with_variable(panels.choice("pipeline", "Pipeline", series(STATE, NAMESPACE)))
        .with_variable(panels.choice("replica", "Replica", series(STATE, NAMESPACE, PIPELINE), many=True))
        .with_variable(panels.choice("rank", "Rank", series(STATE, SELECT), many=True))
        .annotation(panels.built_in_annotations())
        .annotation(
            panels.marks(
                "New calibration",
                f"resets({series('prefill_calibration_age_seconds', SELECT)}[{panels.WINDOW}]) > 0",
                "purple",
            )
        )
    )
    numbers = itertools.count(1)
    for title, row in (
        ("Time to first token", first_token()),
        ("Bubble", bubble()),
        ("Chunks", chunks()),
        ("Queue", queue()),
        ("Calibration", calibration()),
    ):
        board.with_row(Row(title).id(next(numbers)))
        for panel in row:
            board.with_panel(panel.id(next(numbers)))
    return board


def first_token() -> list[Panel]:
    def by_class(title: str, description: str, metric: str, *, q: float) -> Panel:
        query = Query(quantile(q, metric, SELECT, "prompt_class"), "{{prompt_class}}")
        return lines(title, f"{description}, by length of the prompt.", "s", query)

    wait = "Time from a request's arrival to"
    return [
        by_class("TTFT, median", f"{wait} its first token; half took less", "prefill_ttft_seconds", q=0.5),
        by_class("TTFT, p95", f"{wait} its first token; 1 in 20 took longer", "prefill_ttft_seconds", q=0.95),
        lines(
            "Prompt tokens",
            "Prompt tokens per second of the requests that reached their first token.",
            "suffix: tok/s",
            Query(f"sum by (replica) ({rate('prefill_prompt_tokens_total', SELECT)})", "replica {{replica}}"),
        ),
        by_class("Queue, p95", f"{wait} its first chunk; 1 in 20 waited longer", "prefill_queue_seconds", q=0.95),
        by_class(
            "Compute, p95",
            "Time from a request's first chunk to its first token; 1 in 20 took longer",
            "prefill_compute_seconds",
            q=0.95,
        ),
        lines(
            "Requests",
            "Requests that ended per second, by outcome.",
            "reqps",
            Query(f"sum by (outcome) ({rate('prefill_requests_total', SELECT)})", "{{outcome}}"),
        ),
    ]


def bubble() -> list[Panel]:
    busy, lost = rate(STATE, SELECT, BUSY), rate(STATE, SELECT, IN_BUBBLE)
    idle = rate(STATE, SELECT, f'state="{State.IDLE}"')
    rank = 'rank=~"$rank"'
    per_rank = "rank {{rank}} of replica {{replica}}"
    return [
        lines(
            "Bubble ratio and its floor",
            "Share of the time with prefill work that ranks spent waiting for each other. No legal chunks for "
            "the same prompts have a bubble below the floor.",
            "percentunit",
            Query(share(lost, busy, "replica, rank"), per_rank),
            Query(share(lost, busy, ""), "all ranks"),
            FLOOR,
            styles=[FLOOR_LINE],
            top=1,
        ),
        lines(
            "Bubble ratio of the last busy period",
            "As each rank tells it of the last busy period, or the last minute or two of a long one; stays until the "
            "next. The mean is what to compare with the floor.",
            "percentunit",
            Query(f"max by (replica, rank) ({series('prefill_bubble_ratio', SELECT)})", per_rank),
            Query(f"avg ({series('prefill_bubble_ratio', SELECT)})", "all ranks"),
            FLOOR,
            styles=[FLOOR_LINE],
            top=1,
        ),
        lines(
            "Idle",
            "Share of all time without prefill work anywhere in the pipeline: no bubble, more load would fill it.",
            "percentunit",
            Query(share(idle, rate(STATE, SELECT), "replica, rank"), per_rank),
            top=1,
        ),
        lines(
            "Rank $rank: time by cause",
            "Where this rank's time goes while there is prefill work, 100% in all. The three kinds of bubble are at "
            "the bottom, so their height can be compared with the floor. Fill: waiting for the first chunk; imbalance: "
            "for a slower peer; drain: for the others to finish.",
            "percentunit",
            Query(share(rate(STATE, SELECT, rank, BUSY), rate(STATE, SELECT, rank, BUSY), "", "state"), "{{state}}"),
            FLOOR,
            styles=[FLOOR_LINE, *(Style(state, color) for state, color in COLORS.items())],
            stacked=True,
            top=1,
        )
        .repeat("rank")
        .repeat_direction("h")
        .max_per_row(4)
        .span(24),
    ]


def chunks() -> list[Panel]:
    error, seconds = "prefill_chunk_prediction_error_ratio", "prefill_chunk_seconds"
    return [
        heat(
            "Chunk sizes", "Tokens per prefill chunk: how many chunks had which size.", "short",
            "prefill_chunk_tokens", SELECT,
        ),
        heat(
            "Prediction error", "How far a stage's time for a chunk was from what the calibration predicts, as a share "
            "of the prediction: how many chunks were how far off.", "percentunit", error, SELECT,
        ),
        lines(
            "Prediction error by stage",
            "Half of the chunks, and 19 of 20, were nearer to the prediction than this.",
            "percentunit",
            *(Query(quantile(q, error, SELECT, "stage"), f"p{q * 100:.0f} stage {{{{stage}}}}") for q in (0.5, 0.95)),
        ),
        lines(
            "Chunk time by stage",
            "Seconds of one model pass that holds prefill work: median and p95.",
            "s",
            *(Query(quantile(q, seconds, SELECT, "stage"), f"p{q * 100:.0f} stage {{{{stage}}}}") for q in (0.5, 0.95)),
        ),
        lines(
            "Chunks by policy",
            "Chunks per second, by the policy that chose their size. Fixed beside another one means a fallback.",
            "suffix: /s",
            Query(f"sum by (policy) ({rate('prefill_chunk_tokens_count', SELECT)})", "{{policy}}"),
        ),
        lines(
            "Policy fallbacks",
            "Times per second that the chosen policy could not be used and Fixed was, by reason. Zero is good.",
            "suffix: /s",
            Query(f"sum by (reason) ({rate('prefill_policy_fallback_total', SELECT)})", "{{reason}}"),
        ),
    ]  # fmt: skip


def queue() -> list[Panel]:
    def gauge(title: str, description: str, metric: str) -> Panel:
        query = Query(f"max by (replica) ({series(metric, SELECT)})", "replica {{replica}}")
        return lines(title, description, "short", query)

    return [
        gauge("Waiting requests", "Requests that wait for their first chunk.", "prefill_waiting_requests"),
        gauge("Waiting tokens", "Prompt tokens of the waiting requests.", "prefill_waiting_tokens"),
        gauge("Batches in flight", "Batches issued whose result is not back yet.", "prefill_inflight_batches"),
    ]


def calibration() -> list[Panel]:
    def gauge(title: str, description: str, unit: str, metric: str, top: float | None = None) -> Panel:
        query = Query(f"max by (replica) ({series(metric, SELECT)})", "replica {{replica}}")
        return lines(title, description, unit, query, top=top)

    return [
        names(
            "Calibration in use",
            "Where the cost model of chunks comes from, and its key: the model, machine and layout it is for.",
            Query(f"max by (replica, source, key) ({series('prefill_calibration_info', SELECT)})",
                  "replica {{replica}}: {{source}} {{key}}"),
        ),
        gauge("Fit", "R squared of the worst stage's fit; below 0.9 the plan rests on sand.", "percentunit",
              "prefill_calibration_r2_ratio", 1),
        gauge("Age", "Time since the calibration was measured.", "s", "prefill_calibration_age_seconds"),
        gauge("Drift", "Median error of the calibration over recent passes; lastingly above 10%, the machine is not "
              "what was measured.", "percentunit", "prefill_calibration_drift_ratio"),
        lines(
            "Telemetry lost",
            "Events per second from the engine that were lost or not understood. Above zero, all above is incomplete.",
            "suffix: /s",
            Query(f"sum by (replica) ({rate('prefill_telemetry_dropped_total', SELECT)})", "replica {{replica}}"),
        ),
    ]  # fmt: skip
