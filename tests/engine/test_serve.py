"""The HTTP server: profiling requests bring their own chunks, a calibration that cannot be used means Fixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from prefill_runtime.engine.versions import base_version
from prefill_runtime.telemetry.events import Fallback, Hello, Issue

from tests.engine.answers import SIZES
from tests.engine.harness import Server, calibration, finished, issued, prompt

BROKEN = calibration(1e-7, 1e-4) | {"schemaVersion": 99}
PREFILL: dict[str, Any] = {"policy": "Dynamic", "maxTokens": 512, "minTokens": 128, "smoothingFactor": 1.0,
                           "calibration": BROKEN, "profiling": True}  # fmt: skip


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(model, tmp_path_factory.mktemp("server"), PREFILL)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def test_every_process_says_hello_and_the_broken_calibration_is_reported(server: Server) -> None:
    hellos = server.agent.wait(lambda events: len(h := [x for x in events if isinstance(x, Hello)]) >= 4 and h)
    assert {(x.role, x.rank) for x in hellos} == {("scheduler", 0), ("worker", 0), ("worker", 1), ("frontend", 0)}
    assert {x.engine_version for x in hellos} == {base_version(vllm.__version__)}
    assert [x.reason for x in server.agent.events if isinstance(x, Fallback)] == ["InvalidCalibration"]
    assert "schemaVersion: Input should be 2" in server.log.read_text()


def test_the_fallback_cuts_fixed_chunks_and_answers_right(server: Server, truth: list[list[int]]) -> None:
    since = server.agent.mark()
    assert server.complete(prompt(1500))["token_ids"] == truth[SIZES.index(1500)]
    server.agent.wait(finished(1), since)
    assert [tokens for _, tokens in issued(server.agent.events[since:])] == [512, 512, 476]
    assert {x.policy for x in server.agent.events[since:] if isinstance(x, Issue)} == {"Fixed"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("512,256,64", [512, 256, 64]),
        ("1,700,131", [1, 700, 131]),
        ("300,200", [300, 200, 332]),
        ("500,5000", [500, 332]),
        ("512,-1", [512, 320]),
        ("many", [512, 320]),
    ],
)
def test_a_request_brings_its_own_chunks(server: Server, given: str, expected: list[int]) -> None:
    since = server.agent.mark()
    server.complete(prompt(832, seed=len(given)), vllm_xargs={"prefill_chunks": given})
    server.agent.wait(finished(1), since)
    assert [tokens for _, tokens in issued(server.agent.events[since:])] == expected


def test_a_client_that_hangs_up_ends_its_request(server: Server, truth: list[list[int]]) -> None:
    since = server.agent.mark()
    connection = server.request(prompt(8000, seed=8))
    server.agent.wait(lambda events: len(issued(events)) >= 2, since)
    connection.close()
    assert server.agent.wait(finished(1), since) == ["abort"]
    assert server.complete(prompt(513))["token_ids"] == truth[SIZES.index(513)]


def test_nothing_was_lost_or_malformed_on_the_way(server: Server) -> None:
    assert (server.agent.decoder.malformed, server.agent.decoder.unknown) == (0, 0)
    assert sum(x.dropped for x in server.agent.events) == 0


def test_server_and_engine_processes_end_when_the_tests_are_killed(server: Server) -> None:
    """Last: it ends the server."""
    server.hang_up()
    assert server.others_end(30)
