"""Request traces: CSV files with arrival_s, input_length, output_length and perhaps session."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.simulate import Request

CLASSES = ((4, "le_4k"), (16, "le_16k"), (64, "le_64k"), (128, "le_128k"), (256, "le_256k"), (512, "le_512k"))
PAGE = 128  # tokens of a prefix-cache block


@dataclass(frozen=True)
class Row:
    """One request as recorded. session: None where the trace has none; each session has its own clock."""

    arrival: float
    tokens: int
    output: int
    session: str | None


def prompt_class(tokens: int) -> str:
    return next((name for limit, name in CLASSES if tokens <= limit * 1024), "gt_512k")


def read_trace(path: Path, limit: int | None = None) -> list[Row]:
    """Rows of a trace; ParameterError names file, line and column of what is wrong."""
    try:
        with path.open(newline="") as file:
            table = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ParameterError("trace", str(path), f"a readable CSV file ({error})") from None
    missing = {"arrival_s", "input_length", "output_length"} - set(table[0] if table else ())
    if table and missing:
        raise ParameterError(f"columns of {path.name}", ", ".join(table[0]), f"with {', '.join(sorted(missing))}")
    rows = [_row(path.name, line, record) for line, record in enumerate(table[:limit], 2)]
    if not rows:
        raise ParameterError(f"rows of {path.name}", 0, ">= 1")
    return rows


def _row(name: str, line: int, record: dict[str, str]) -> Row:
    def number(column: str, low: float) -> float:
        try:
            value = float(record[column])
        except (TypeError, ValueError):
            raise ParameterError(f"{name} line {line} {column}", repr(record[column]), "a number") from None
        if not math.isfinite(value) or value < low:
            raise ParameterError(f"{name} line {line} {column}", value, f">= {low:g}")
        return value

    session = record.get("session")
    return Row(number("arrival_s", 0), int(number("input_length", 1)), int(number("output_length", 0)), session)


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that share a clock: one group per session, or all."""
    sessions: dict[str | None, list[Row]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    return list(sessions.values())


def requests(rows: Sequence[Row], *, cached: bool, stretch: float = 1.0) -> list[Request]:
    """Rows of one clock as requests.

    cached: a session's next prompt finds its previous prompt and answer in the prefix cache, in whole pages, unless it
    has become shorter than that (its context was rewritten). stretch: factor on arrival times.
    """
    made, known = [], 0
    for row in rows:
        hit = (
            min(known, row.tokens - 1) // PAGE * PAGE
            if cached and row.session is not None and row.tokens >= known
            else 0
        )
        made.append(Request(row.tokens, row.arrival * stretch, hit))
        known = row.tokens + row.output
    return made
