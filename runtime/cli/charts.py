"""The little that all matplotlib pictures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first
from prefill_runtime.scheduler.errors import ParameterError


def figure(width: float, height: float) -> tuple[Any, Any]:
    chart, axes = pyplot.subplots(figsize=(width, height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return chart, axes


def panels(count: int, width: float, height: float) -> tuple[Any, Any]:
    """Charts side by side that share their rows."""
    chart, axes = pyplot.subplots(1, count, figsize=(width * count + 1.5, height), sharey=True, layout="constrained")
    for axis in axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return chart, axes


def drawable(path: Path) -> Path:
    """``path`` if a picture can be written to it; complains before the work, not after it."""
    if path.suffix not in (".png", ".svg"):
        raise ParameterError("out", str(path), "a name ending in .png or .svg")
    if not path.parent.is_dir():
        raise ParameterError("out", str(path), "a name in a folder that exists")
    return path


def save(chart: Any, path: Path) -> None:
    drawable(path)
    chart.savefig(path, dpi=150, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(chart)
