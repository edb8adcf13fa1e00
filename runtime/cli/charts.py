"""The little that all matplotlib pictures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first


def figure(width: float, height: float) -> tuple[Any, Any]:
    chart, axes = pyplot.subplots(figsize=(width, height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return chart, axes


def save(chart: Any, path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        pyplot.close(chart)
        from prefill_runtime.scheduler.errors import ParameterError

        raise ParameterError("out", str(path), "a name ending in .png or .svg")
    chart.savefig(path, dpi=150, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(chart)
