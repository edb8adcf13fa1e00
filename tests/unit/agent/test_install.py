"""Init step ``runtime``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.agent.harness import ROOT


def run(code: str, path: Path) -> str:
    """In an interpreter that knows nothing of this checkout."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd="/", env={"PYTHONPATH": str(path), "PATH": os.environ["PATH"]},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def install(destination: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "prefill_runtime.agent", "install", str(destination)],
        env=os.environ | {"PYTHONPATH": str(ROOT / ".links")}, check=True, capture_output=True,
    )  # fmt: skip


def test_the_installed_copy_works_alone_and_brings_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("left alone")
    install(tmp_path)
    (tmp_path / "prefill_runtime" / "stale.py").write_text("")
    install(tmp_path)  # a container restart installs again
    assert not (tmp_path / "prefill_runtime" / "stale.py").exists()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["other", "prefill_operator-0.1.0.dist-info", "prefill_runtime"]
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in tmp_path.rglob("*"))

    where = run("import prefill_runtime.agent.settings as s; print(s.__file__)", tmp_path).strip()
    assert where == str(tmp_path / "prefill_runtime" / "agent" / "settings.py")
    found = run(
        "import json\nfrom importlib.metadata import entry_points\n"
        "print(json.dumps([p.value for p in entry_points(group='vllm.general_plugins') if p.name == 'prefill']))",
        tmp_path,
    )
    assert "prefill_runtime.engine.plugin:register" in json.loads(found)
