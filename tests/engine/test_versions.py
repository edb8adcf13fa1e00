"""What must hold for each vLLM version: the suite runs on all of them, each in its own environment."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from prefill_runtime.agent.command import engine_command
from prefill_runtime.engine.finished import names_of
from prefill_runtime.engine.versions import TESTED, base_version

from tests.documents import calibration
from tests.unit.agent.test_command import config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it is imported


def test_this_engine_is_one_of_the_tested() -> None:
    assert base_version(vllm.__version__) in TESTED


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Of ``vllm serve``."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


EVERY_OPTION = {
    "expertParallel": True, "trustRemoteCode": True, "quantization": "ascend",
    "args": ["--max-num-seqs", "32", "--gpu-memory-utilization", "0.9", "--block-size", "16"],
}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("profiling", [False, True])
@pytest.mark.parametrize("device", ["CPU", "Ascend"])
@pytest.mark.parametrize("policy", ["Auto", "EngineNative"])
def test_the_engine_has_every_flag_that_the_agent_gives(
    parser: argparse.ArgumentParser, policy: str, device: str, profiling: bool, rank: int
) -> None:
    chunking = {"policy": policy, "maxTokens": 2048}
    rendered = engine_command(
        config(engine=EVERY_OPTION | {"device": device}, chunking=chunking),
        rank, telemetry_socket="/run/t.sock", profiling=profiling, calibration=calibration(),
    )  # fmt: skip
    given = vars(parser.parse_args(rendered[2:]))
    wanted: dict[str, Any] = {
        "model_tag": "/models/m", "headless": rank == 1, "nnodes": 2, "node_rank": rank, "master_port": 29500,
        "pipeline_parallel_size": 2, "max_num_seqs": 32, "enable_expert_parallel": True, "quantization": "ascend",
        "distributed_executor_backend": "mp", "load_format": "dummy" if profiling else "auto",
        "max_num_batched_tokens": 2048 if policy == "EngineNative" else 2048 + 32,
        "async_scheduling": None if policy == "EngineNative" else False,
    }  # fmt: skip
    assert {name: given[name] for name in wanted} == wanted
    assert given["additional_config"] == json.loads(rendered[rendered.index("--additional-config") + 1])


def test_requests_ended_from_outside_have_the_same_names_in_each_version() -> None:
    assert names_of(None) == []
    assert names_of([("a", 0), ("b", 1)]) == ["a", "b"]
    assert names_of([SimpleNamespace(request_id="a"), SimpleNamespace(request_id="b")]) == ["a", "b"]
