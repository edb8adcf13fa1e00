"""Model folders are whole or absent. What is in them is tested with the engine."""

import sys
from pathlib import Path

import pytest

from localcluster import envs, models

WRITES = (
    "import pathlib, sys; out = pathlib.Path(sys.argv[2]); out.mkdir(); (out / 'config.json').write_text(sys.argv[1])"
)


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in place of the one that needs the engine's environment; everything around it is real."""
    script = tmp_path / "maker.py"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(models, "MAKER", script)
    monkeypatch.setattr(envs, "engine_python", lambda: Path(sys.executable))
    return script


def test_a_model_is_made_once(maker: Path) -> None:
    maker.write_text(WRITES)
    folder = models.ensure("toy")
    assert (folder / "config.json").read_text() == "toy"
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o644
    made = folder.stat().st_ctime_ns
    assert models.ensure("toy") == folder
    assert folder.stat().st_ctime_ns == made
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_model_leaves_nothing_and_says_why(maker: Path) -> None:
    maker.write_text(WRITES + "; sys.exit('out of luck')")
    with pytest.raises(envs.SetupError, match=r"model toy could not be made:\nout of luck"):
        models.ensure("toy")
    assert not list(models.path("toy").parent.iterdir())


def test_the_rest_of_a_killed_run_is_removed(maker: Path) -> None:
    maker.write_text(WRITES)
    left = models.path("toy").parent / ".toy-killed"
    (left / "model").mkdir(parents=True)
    models.ensure("toy")
    assert not left.exists()


def test_models_have_their_own_folders_and_follow_what_makes_them(maker: Path) -> None:
    maker.write_text(WRITES)
    before = {models.path(name) for name in models.NAMES}
    maker.write_text(WRITES + "  # changed")
    after = {models.path(name) for name in models.NAMES}
    assert len(before | after) == 2 * len(models.NAMES)
