"""Message templates of the rules, for the API server (CEL) and for the operator (Python)."""

from __future__ import annotations

import re
from typing import Any

_PLACEHOLDER = re.compile(r"\{([A-Za-z.]+)\}")


def cel_message(template: str, values: dict[str, str]) -> str:
    """The CEL expression that gives the message; ``values`` holds CEL expressions of type string."""

    def expression(name: str) -> str:
        if name in values:
            return values[name]
        return f"string(oldSelf.{name[4:]})" if name.startswith("old.") else f"string(self.{name})"

    pieces = _PLACEHOLDER.split(template)
    terms = [expression(piece) if odd % 2 else f"'{piece}'" for odd, piece in enumerate(pieces) if odd % 2 or piece]
    return " + ".join(terms)


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
