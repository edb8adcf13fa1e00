"""Model and plugin for the engine tests. Run them with the engine environment's Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from prefill_runtime.engine.versions import base_version

from localcluster import envs, leftovers, models

pytest.register_assert_rewrite("tests.engine.answers")
from tests.engine.answers import SIZES  # noqa: E402
from tests.engine.harness import Engine, prompt  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
if base_version(vllm.__version__) != envs.ENGINE_VERSION:
    # Model files, plan searches and how well a calibration foretells: the same with every version of vLLM.
    collect_ignore = ["test_model_folders.py", "test_searches.py", "test_calibration.py"]


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """Engine processes find the plugin as in a pod: a folder on PYTHONPATH with the package and its dist-info."""
    leftovers.mark()
    leftovers.end_leftovers()
    subprocess.run([sys.executable, "-m", "localcluster.envs", "links"], cwd=ROOT, check=True, capture_output=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / ".links"), str(ROOT)])


@pytest.fixture(scope="session")
def model() -> Path:
    """Eight random Llama layers, the same on every machine."""
    return models.ensure("tiny")


@pytest.fixture(scope="session")
def truth(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What stock vLLM answers on one rank, each prompt alone."""
    engine = Engine(model, tmp_path_factory.mktemp("stock"), None, enable_prefix_caching=False)
    try:
        return [engine.tokens([prompt(size)])[0] for size in SIZES]
    finally:
        engine.close()
