"""The CRD's rules in a real API server: the same cases, and the same messages, as tests/unit/api/test_rules.py."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster.apiserver import ApiServer

TABLE = yaml.safe_load((Path(__file__).parents[1] / "unit" / "api" / "rules.yaml").read_text())
serial = itertools.count()


def patched(patch: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """``base`` with a JSON merge patch."""
    out = dict(base)
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = patched(value, out.get(key, {})) if isinstance(value, dict) else value
    return out


def pipeline(patch: dict[str, Any], name: str = "") -> dict[str, Any]:
    return {
        "apiVersion": "prefill.dev/v1alpha1",
        "kind": "PrefillPipeline",
        "metadata": {"name": name or f"rules-{next(serial)}", "namespace": "default"},
        "spec": patched(patch, TABLE["base"]),
    }


def kubectl(server: ApiServer, *arguments: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        ["kubectl", *arguments, *(["-f", "-"] if body else [])],
        env=server.environment,
        input=json.dumps(body) if body else None,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def refusals(text: str) -> list[str]:
    """The messages in kubectl's error, without paths and values."""
    lines = [line.removeprefix("* ") for line in text.splitlines() if "Invalid value" in line]
    return [line.split('Invalid value: "object": ', 1)[-1] for line in lines]


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda case: case["message"][:60])
def test_refuses_with_the_numbers_and_accepts_the_nearest_good_spec(crd: ApiServer, case: dict[str, Any]) -> None:
    code, text = kubectl(crd, "create", "--dry-run=server", body=pipeline(case["refused"]))
    assert code == 1
    assert refusals(text) == [case["message"]], text
    code, text = kubectl(crd, "create", "--dry-run=server", body=pipeline(case["accepted"]))
    assert code == 0, text


@pytest.mark.parametrize("case", TABLE["transitions"], ids=lambda case: case["message"][:40])
def test_immutable_unless_suspended(crd: ApiServer, case: dict[str, Any]) -> None:
    before = pipeline(case["from"])
    name = before["metadata"]["name"]
    assert kubectl(crd, "create", body=before)[0] == 0

    def change(spec: dict[str, Any]) -> tuple[int, str]:
        return kubectl(crd, "patch", "pfp", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    code, text = change(case["refused"])
    assert code == 1
    assert refusals(text) == [case["message"]], text
    for step in ({"suspend": True}, case["refused"], {"suspend": False}):
        code, text = change(step)
        assert code == 0, text
    assert kubectl(crd, "delete", "pfp", name)[0] == 0


@pytest.mark.parametrize("case", TABLE["names"], ids=lambda case: case["name"])
def test_names(crd: ApiServer, case: dict[str, Any]) -> None:
    code, text = kubectl(crd, "create", "--dry-run=server", body=pipeline({}, case["name"]))
    assert code == 1
    assert refusals(text) == [case["message"]], text


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"parallelism": {"pipeline": 0}}, "spec.parallelism.pipeline in body should be greater than or equal to 1"),
        ({"parallelism": {"layerPartition": [30, 0]}}, "should be greater than or equal to 1"),
        ({"chunking": {"policy": "dynamic"}}, '"Auto", "Planned", "Dynamic", "Fixed"'),
        ({"profiling": {"onlineCalibration": {"windowPoints": 15}}}, "should be greater than or equal to 16"),
        ({"profiling": {"onlineCalibration": {"windowPoints": 4097}}}, "should be less than or equal to 4096"),
        ({"engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "Duplicate value"),
        ({"engine": {"resources": {"limits": {"memory": "64 GB"}}}}, "spec.engine.resources.limits.memory"),
        ({"model": {"maxModelLen": None}}, "spec.model.maxModelLen: Required value"),
        ({"chunking": {"smoothingFactor": 0.8}}, "must be of type string"),
    ],
)
def test_single_fields(crd: ApiServer, patch: dict[str, Any], message: str) -> None:
    code, text = kubectl(crd, "create", "--dry-run=server", body=pipeline(patch))
    assert code == 1
    assert message in text
