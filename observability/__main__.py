"""Writes every board for the Helm chart and for kustomize: ``python -m observability`` (see COMMAND)."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from observability import pipeline

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "charts" / "prefill-operator" / "dashboards", ROOT / "manifests" / "monitoring" / "dashboards")
COMMAND = "make links; PYTHONPATH=.links:. python -m observability"


def boards() -> dict[str, Dashboard]:
    """By file name without its ending, which is also the board's uid."""
    return {board.UID: board.build() for board in (pipeline,)}


def texts() -> dict[str, str]:
    encoder = JSONEncoder(sort_keys=True, indent=1)
    return {f"{name}.json": encoder.encode(board.build()) + "\n" for name, board in boards().items()}


def main() -> None:
    for folder in FOLDERS:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts().items():
            (folder / name).write_text(text)
            print((folder / name).relative_to(ROOT))


if __name__ == "__main__":
    main()
