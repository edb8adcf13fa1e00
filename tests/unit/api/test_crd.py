"""The generated CustomResourceDefinition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prefill_operator.api import reference
from prefill_operator.api.crd import COPIES, custom_resource_definition, render

SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from fields(child, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            yield f"{path}[]", schema[inner]
            yield from fields(schema[inner], f"{path}[]")


ALL = [pair for part in ("spec", "status") for pair in fields(SCHEMA["properties"][part], part)]


@pytest.mark.parametrize("copy", COPIES, ids=lambda path: path.parent.parent.name)
def test_copies_are_current(copy: Any) -> None:
    assert copy.read_text() == render(), "run: python -m prefill_operator.api.crd"


def test_reference_is_current() -> None:
    assert reference.FILE.read_text() == reference.render(), "run: python -m prefill_operator.api.reference"


def test_rendered_text_is_the_definition() -> None:
    assert yaml.safe_load(render()) == custom_resource_definition()


def test_every_field_is_described() -> None:
    silent = [path for path, schema in ALL if not path.endswith("[]") and not schema.get("description")]
    assert silent == []


def test_everything_is_bounded() -> None:
    """The API server estimates the cost of rules from the bounds."""
    unbounded = []
    for path, schema in ALL:
        kind = schema.get("type")
        if kind == "string" and not ({"maxLength", "enum"} & schema.keys()):
            unbounded.append(path)
        if kind == "array" and "maxItems" not in schema:
            unbounded.append(path)
        if kind == "object" and "additionalProperties" in schema and "maxProperties" not in schema:
            unbounded.append(path)
        if kind == "integer" and path.startswith("spec") and not {"minimum", "maximum"} <= schema.keys():
            unbounded.append(path)
    assert unbounded == []


def test_no_floats_nulls_or_references() -> None:
    assert [path for path, schema in ALL if schema.get("type") in ("number", "null") or "$ref" in schema] == []
    assert [path for path, schema in ALL if "default" in schema and schema["default"] is None] == []
    untyped = [path for path, s in ALL if "type" not in s and not s.get("x-kubernetes-int-or-string")]
    assert untyped == []


def test_lists_say_how_they_merge() -> None:
    lists = {path: schema.get("x-kubernetes-list-type") for path, schema in ALL if schema.get("type") == "array"}
    assert [path for path, kind in lists.items() if kind is None] == []
    assert lists["spec.engine.env"] == lists["status.conditions"] == "map"


def test_defaults_are_reached_from_an_absent_parent() -> None:
    """An object with defaults inside and none of its own would leave them unset when it is absent."""
    missing = [
        path
        for path, schema in ALL
        if any("default" in child for child in schema.get("properties", {}).values())
        and "default" not in schema
        and path.rpartition(".")[2] not in ("model", "parallelism", "engine")
        and "[]" not in path
        and path.startswith("spec")
    ]
    assert missing == []
