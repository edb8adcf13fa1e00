"""Killed tests leave nothing: the engine's processes end with the test process, and so does their shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.engine.harness import Engine
from tests.engine.shm import SHM, unlink_of_group


def test_engine_processes_end_when_the_tests_are_killed(model: Path, tmp_path: Path) -> None:
    engine = Engine(model, tmp_path, None, pipeline_parallel_size=2)
    try:
        before = set(os.listdir(SHM))
        engine.hang_up()
        assert engine.others_end(30)
        gone = before - set(os.listdir(SHM))
        kinds = ["psm_", "-cpushm_"] if torch.cpu._is_avx512_supported() else ["psm_"]  # type: ignore[no-untyped-call]
        assert all(any(kind in name for name in gone) for kind in kinds), gone
        assert unlink_of_group(engine.process.pid) == []
    finally:
        engine.close()
