import json
from typing import Any

import pytest
from prefill_runtime.profiling.document import StageCoefficients
from prefill_runtime.scheduler.baselines import Interconnect, context_parallel, data_parallel, tensor_parallel
from prefill_runtime.scheduler.chunkers import Bounds, Fixed
from prefill_runtime.scheduler.cost import (
    Attention,
    HistoryModel,
    PipelineCost,
    QuadraticModel,
    StagedModel,
    StageModel,
    TransferModel,
)
from prefill_runtime.scheduler.costfile import dump_cost, from_calibration, parse_cost
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.simulate import Request

from tests.documents import calibration

WINDOWED = StageModel(1, 2, 3, attention=Attention(4096, 0.5))
GOOD: dict[str, Any] = {"form": "stage", "model": {"k0": 0.7, "k1": 1e-4, "k2": 1e-9}}


def test_a_cost_file_has_defaults_for_all_but_form_and_model() -> None:
    assert parse_cost(json.dumps(GOOD)) == PipelineCost(StageModel(0.7, 1e-4, 1e-9))


@pytest.mark.parametrize("model", [StageModel(1, 2, 3, 4), WINDOWED, QuadraticModel(1, 2, 3), HistoryModel(1, 2, 3)])
def test_every_form_comes_back(model: StageModel | QuadraticModel | HistoryModel) -> None:
    cost = PipelineCost(model, 0.1, (0.25, 0.75), TransferModel(0.01, 1e-6))
    assert parse_cost(dump_cost(cost)) == cost


def test_a_model_for_each_stage_comes_back() -> None:
    cost = PipelineCost(StagedModel((StageModel(1, 2, 3), StageModel(4, 5, 6, 7))), 0.1)
    assert parse_cost(dump_cost(cost)) == cost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "cubic"}, "form is 'cubic', allowed: stage | quadratic | history | stages"),
        ({"model": {"k0": -1, "k1": 1, "k2": 1}}, "k0 is -1.0, allowed: >= 0"),
        ({"model": {"k0": 1, "k1": float("nan"), "k2": 1}}, "k1 is nan, allowed: >= 0"),
        ({"model": {"k0": 1, "k1": "x", "k2": 1}}, "model.k1 is 'x', allowed: a number >= 0"),
        ({"model": {"k0": 1, "k1": 1}}, "model.k2 is missing"),
        ({"model": {"k0": 1, "k1": 1, "k2": 1, "k9": 1}}, "model.k9 is unknown"),
        ({"model": GOOD["model"] | {"attention": {"full": 1}}}, "model.attention.window is missing"),
        ({"model": GOOD["model"] | {"attention": {"window": 9, "full": 2}}}, "full is 2.0, allowed: 0 to 1"),
        ({"model": 3}, "model is 3, allowed: a JSON object"),
        ({"pass_overhead_s": -1}, "pass_overhead_s is -1.0"),
        ({"shares": [0.5, 0.2]}, "sum of shares is 0.7, allowed: 1"),
        ({"shares": [1.5, -0.5]}, r"shares\[1\] is -0.5, allowed: >= 0"),
        ({"shares": 2}, "shares is 2, allowed: a list"),
        ({"form": "stages"}, "model is .*allowed: a list with k0, k1, k2 of each stage"),
        ({"form": "stages", "model": []}, "number of stages is 0, allowed: >= 1"),
        ({"form": "stages", "model": [GOOD["model"], {"k0": 1}]}, r"model\[1\].k1 is missing"),
        ({"form": "stages", "model": [GOOD["model"]] * 2, "shares": [0.5, 0.5]}, "allowed: none, for the model"),
        ({"transfer": {"latency_s": -1}}, "transfer.latency_s is -1.0"),
        ({"overhead": 1}, "cost file.overhead is unknown"),
    ],
)
def test_a_wrong_cost_file_names_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message.replace("|", r"\|")):
        parse_cost(json.dumps(GOOD | change))


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="cost file is"):
        parse_cost(text)


def test_a_calibration_becomes_a_cost() -> None:
    document = calibration(0.01, 1e-4, 2e-9, pass_overhead_seconds=0.002)
    stages = list(document.stages)
    stages[1] = stages[1].model_copy(update={"coefficients": StageCoefficients(k0=0.03, k1=2e-4, k2=4e-9, k3=1e-6)})
    cost = from_calibration(document.model_copy(update={"stages": stages}))
    assert cost == PipelineCost(StagedModel((StageModel(0.01, 1e-4, 2e-9), StageModel(0.03, 2e-4, 4e-9, 1e-6))), 0.002)
    assert cost.stage_seconds(2, 1000.0, 1000.0) == pytest.approx([0.115, 0.239])


def test_tp_dp_and_pcp_are_the_same_work_differently_shared() -> None:
    cost = PipelineCost(StageModel(0.1, 1e-3, 0))
    requests = [Request(1000)] * 4
    chunker = Fixed(Bounds(1024))
    net = Interconnect(collective_per_pass=0.01, collective_per_token=1e-5, exchange_per_token=1e-4)
    assert data_parallel(cost, 2, requests, chunker).ttft == pytest.approx([1.1, 1.1, 2.2, 2.2])
    assert tensor_parallel(cost, 2, requests, chunker, net).ttft[0] == pytest.approx(0.55 + 0.01 + 0.01)
    pcp = context_parallel(cost, 2, requests, chunker, net)
    assert pcp.ttft[3] == pytest.approx(4 * (0.1 + 0.5 + 0.05))
    assert pcp.tokens_per_rank_second == pytest.approx(4000 / pcp.seconds / 2)
