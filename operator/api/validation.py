"""The rules of the CRD once more, for objects that were stored before a rule existed."""

from __future__ import annotations

import re

from .messages import python_message
from .rules import NAME_MAX, NAME_MESSAGE, NAME_PATTERN, RULES, TRANSITION_RULES
from .types import PrefillPipelineSpec


def problems(spec: PrefillPipelineSpec, name: str, old_spec: PrefillPipelineSpec | None = None) -> list[str]:
    """What is wrong with the spec of the pipeline ``name``, in the words of the API server; empty when nothing is.

    Give ``old_spec`` to check a change as well.
    """
    found = []
    if len(name) > NAME_MAX or not re.match(NAME_PATTERN, name):
        found.append(python_message(NAME_MESSAGE, {}, {"length": str(len(name))}))
    fields = spec.model_dump(by_alias=True, mode="json")
    for rule in RULES:
        if not rule.holds(spec):
            values = {key: value.python(spec) for key, value in rule.values.items()}
            found.append(python_message(rule.message, fields, values))
    if old_spec is not None:
        both = fields | {"old": old_spec.model_dump(by_alias=True, mode="json")}
        found += [python_message(r.message, both, {}) for r in TRANSITION_RULES if not r.holds(spec, old_spec)]
    return found
