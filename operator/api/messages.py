"""Message templates of the rules, for the API server (CEL) and for the operator (Python)."""

from __future__ import annotations

import re
from typing import Any

_PLACEHOLDER = re.compile(r"\{([A-Za-z.]+)\}")


def cel_message(template: str, values: dict[str, str]) -> str:
    """The CEL expression that gives the message; ``values`` holds CEL expressions of any type.

    format() and not +, because the API server estimates the cost of a concatenation from the greatest
    possible lengths and refuses it.
    """

    def expression(name: str) -> str:
        if name in values:
            return values[name]
        return f"oldSelf.{name[4:]}" if name.startswith("old.") else f"self.{name}"

    pieces = _PLACEHOLDER.split(template)
    text = "%s".join(pieces[::2]).replace("'", "\\'")
    arguments = [f"dyn({expression(name)})" for name in pieces[1::2]]
    return f"'{text}'.format([{', '.join(arguments)}])" if arguments else f"'{text}'"


def python_message(template: str, fields: dict[str, Any], values: dict[str, str]) -> str:
    """The same message from the spec's fields (``old`` among them for a change)."""

    def text(match: re.Match[str]) -> str:
        name = match[1]
        if name in values:
            return values[name]
        found: Any = fields
        for part in name.split("."):
            found = found[part]
        return str(found)

    return _PLACEHOLDER.sub(text, template)
