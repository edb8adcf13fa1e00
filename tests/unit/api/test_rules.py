"""The rules as the operator applies them; tests/operator/test_crd_rules.py has the same cases for the API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefill_operator.api.reserved import RESERVED_ARGS, RESERVED_SHORT_ARGS
from prefill_operator.api.rules import RULES, TRANSITION_RULES, argument_name
from prefill_operator.api.types import PrefillPipelineSpec
from prefill_operator.api.validation import problems

TABLE = yaml.safe_load((Path(__file__).parent / "rules.yaml").read_text())
NAME = "longctx"


def patched(patch: dict[str, Any], base: dict[str, Any] = TABLE["base"]) -> dict[str, Any]:
    """``base`` with a JSON merge patch."""
    out = dict(base)
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = patched(value, out.get(key, {})) if isinstance(value, dict) else value
    return out


def spec(patch: dict[str, Any]) -> PrefillPipelineSpec:
    return PrefillPipelineSpec.model_validate(patched(patch))


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda case: case["message"][:60])
def test_refuses_with_the_numbers_and_accepts_the_nearest_good_spec(case: dict[str, Any]) -> None:
    assert problems(spec(case["refused"]), NAME) == [case["message"]]
    assert problems(spec(case["accepted"]), NAME) == []


def test_every_rule_has_a_case() -> None:
    broken = {index for case in TABLE["cases"] for index, r in enumerate(RULES) if not r.holds(spec(case["refused"]))}
    assert broken == set(range(len(RULES)))


@pytest.mark.parametrize("case", TABLE["transitions"], ids=lambda case: case["message"][:40])
def test_immutable_unless_suspended(case: dict[str, Any]) -> None:
    old, new = spec(case["from"]), spec(case["refused"])
    assert problems(new, NAME, old) == [case["message"]]
    assert problems(new, NAME) == []
    assert problems(spec(case["refused"] | {"suspend": True}), NAME, old) == []
    assert problems(new, NAME, spec(case["from"] | {"suspend": True})) == []


def test_every_transition_rule_has_a_case() -> None:
    assert len({case["message"].split()[0] for case in TABLE["transitions"]}) == len(TRANSITION_RULES)


@pytest.mark.parametrize("case", TABLE["names"], ids=lambda case: case["name"])
def test_names(case: dict[str, Any]) -> None:
    assert problems(spec({}), case["name"]) == [case["message"]]


@pytest.mark.parametrize("name", ["a", "pp-longctx-qwen3-235b-a22b-512k-prod-eu-west", "x" * 63])
def test_good_names(name: str) -> None:
    assert problems(spec({}), name) == []


def test_all_problems_are_named_at_once() -> None:
    found = problems(spec({"parallelism": {"pipeline": 3, "stagesPerPod": 2}, "chunking": {"maxTokens": 65536}}), "9")
    assert [text.split()[0] for text in found] == [
        "metadata.name",
        "parallelism.stagesPerPod",
        "chunking.maxTokens",
    ]


@pytest.mark.parametrize("argument", [*RESERVED_ARGS, *RESERVED_SHORT_ARGS])
@pytest.mark.parametrize("form", ["{}", "{}=1"])
def test_each_reserved_argument_is_refused_in_every_spelling(argument: str, form: str) -> None:
    spellings = [argument]
    if argument.startswith("--"):
        spellings += ["--" + argument[2:].replace("-", "_"), "--no-" + argument[2:]]
    for spelling in spellings:
        found = problems(spec({"engine": {"args": [form.format(spelling)]}}), NAME)
        assert [f'engine.args sets ["{argument}"]' in text for text in found] == [True], spelling


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--host=0.0.0.0", "--host"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching"),
        ("--hf_overrides.rope_scaling.factor=2", "--hf-overrides"),
        ("32", "32"),
    ],
)
def test_argument_name(argument: str, name: str) -> None:
    assert argument_name(argument) == name
