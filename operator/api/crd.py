"""Generates the CustomResourceDefinition from the types and rules.

``python -m prefill_operator.api.crd`` rewrites every copy; a test fails when one is stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .messages import cel_message
from .rules import NAME_CEL, NAME_MESSAGE, RULES, TRANSITION_RULES
from .types import GROUP, KIND, PLURAL, VERSION, PrefillPipeline

ROOT = Path(__file__).resolve().parents[2]
FILE_NAME = f"{PLURAL}.{GROUP}.yaml"
# kubectl -k and helm each read only below their own folder.
COPIES = (
    ROOT / "operator" / "crds" / FILE_NAME,
    ROOT / "manifests" / "crd" / FILE_NAME,
    ROOT / "charts" / "prefill-operator" / "crds" / FILE_NAME,
)
# What a structural schema has no place for.
_DROPPED = {
    "title",
    "$defs",
    "propertyNames",
    "const",
    "additionalProperties",
    "default",
    "anyOf",
    "$ref",
    "properties",
}


def structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A pydantic JSON schema as a structural OpenAPI v3 schema: no references, no nulls, no closed objects."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return structural({**target, **{k: v for k, v in schema.items() if k != "$ref"}}, definitions)
    if "anyOf" in schema and not schema.get("x-kubernetes-int-or-string"):
        (only,) = [option for option in schema["anyOf"] if option.get("type") != "null"]
        return structural({**only, **{k: v for k, v in schema.items() if k != "anyOf"}}, definitions)
    out = {key: value for key, value in schema.items() if key not in _DROPPED}
    if "const" in schema:
        out["enum"] = [schema["const"]]
    if "anyOf" in schema:
        out["anyOf"] = schema["anyOf"]
    if "properties" in schema:
        out["properties"] = {name: structural(s, definitions) for name, s in schema["properties"].items()}
    elif isinstance(schema.get("additionalProperties"), dict):
        out["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    if "items" in schema:
        out["items"] = structural(schema["items"], definitions)
    return _with_default(out, schema.get("default"))


def _with_default(out: dict[str, Any], default: Any) -> dict[str, Any]:
    """Defaults reach nested fields only below an object that is there, hence ``{}`` for such objects.

    Empty lists and maps get none: they would fill every stored object with noise.
    """
    if "properties" in out:
        if default is not None and any("default" in p for p in out["properties"].values()):
            out["default"] = {}
    elif default not in (None, [], {}):
        out["default"] = default
    return out


def _validations() -> list[dict[str, str]]:
    rules = [
        {
            "rule": rule.cel,
            "fieldPath": f".{rule.path}",
            "messageExpression": cel_message(rule.message, {key: value.cel for key, value in rule.values.items()}),
        }
        for rule in RULES
    ]
    transitions = [
        {"rule": rule.cel, "fieldPath": f".{rule.path}", "messageExpression": cel_message(rule.message, {})}
        for rule in TRANSITION_RULES
    ]
    return rules + transitions


def _condition_column(name: str, condition: str, key: str, priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {
        "name": name,
        "type": "string",
        "jsonPath": f'.status.conditions[?(@.type=="{condition}")].{key}',
    }
    return column | ({"priority": priority} if priority else {})


def _columns() -> list[dict[str, Any]]:
    return [
        _condition_column("Ready", "Ready", "status"),
        _condition_column("Reason", "Ready", "reason"),
        {"name": "Policy", "type": "string", "jsonPath": ".status.policy", "description": "Chunking policy in force"},
        {"name": "PP", "type": "integer", "jsonPath": ".spec.parallelism.pipeline", "description": "Pipeline stages"},
        {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
        _condition_column("Calibrated", "Calibrated", "status"),
        _condition_column("Message", "Ready", "message", priority=1),
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]


def _schema() -> dict[str, Any]:
    model = PrefillPipeline.model_json_schema(by_alias=True)
    root = structural(model, model["$defs"])
    properties = root["properties"]
    properties["spec"]["x-kubernetes-validations"] = _validations()
    properties["status"].pop("default", None)
    return {
        "description": root["description"],
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": properties["spec"],
            "status": properties["status"],
        },
        "x-kubernetes-validations": [
            {
                "rule": NAME_CEL,
                "messageExpression": cel_message(NAME_MESSAGE, {"length": "self.metadata.name.size()"}),
            }
        ],
    }


def custom_resource_definition() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "prefill-operator"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["pfp"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _columns(),
                }
            ],
        },
    }


def unknown_fields(served: dict[str, Any]) -> list[str]:
    """Fields of these types that ``served``, the schema in use in a cluster, lacks: their values are dropped there."""
    own = _schema()["properties"]
    theirs = served.get("properties", {})
    return [path for part in ("spec", "status") for path in _unknown(own[part], theirs.get(part, {}), part)]


def _unknown(own: dict[str, Any], served: dict[str, Any], path: str) -> Iterator[str]:
    if "items" in own:
        yield from _unknown(own["items"], served.get("items", {}), f"{path}[]")
    if isinstance(own.get("additionalProperties"), dict):
        yield from _unknown(own["additionalProperties"], served.get("additionalProperties", {}), f"{path}.*")
    for name, schema in own.get("properties", {}).items():
        found = served.get("properties", {}).get(name)
        if found is None:
            yield f"{path}.{name}"
        else:
            yield from _unknown(schema, found, f"{path}.{name}")


class _Dumper(yaml.SafeDumper):
    """Without anchors: the same part may appear twice, and references are harder to read than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> str:
    text: str = yaml.dump(custom_resource_definition(), Dumper=_Dumper, sort_keys=False, width=120)
    return "# Generated by python -m prefill_operator.api.crd; edit operator/api instead.\n" + text


def main() -> None:
    text = render()
    for copy in COPIES:
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)


if __name__ == "__main__":
    main()
