"""Does an observed object still say what we want? The API server adds defaults and rewrites quantities."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from prefill_operator.api.types import KIND
from prefill_operator.desired.pipeline import Manifest

OURS = "prefill.dev/"
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|[KMGTPE]i?)?")
_KEYS = ("name", "mountPath", "path")


def differs(desired: Manifest, observed: Manifest) -> bool:
    """Whether ``desired`` has to be applied. Fields it does not name belong to others, but for our own annotations."""
    if not _covered(_content(desired), observed):
        return True
    metadata = observed["metadata"]
    leftovers = {name for name in metadata.get("annotations", {}) if name.startswith(OURS)}
    if leftovers - set(desired["metadata"].get("annotations", {})):
        return True
    return _owners(metadata) != _owners(desired["metadata"])


def _content(manifest: Manifest) -> Manifest:
    metadata = {name: manifest["metadata"].get(name, {}) for name in ("labels", "annotations")}
    return {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind")} | {
        "metadata": metadata
    }


def _owners(metadata: Manifest) -> set[str]:
    return {owner["uid"] for owner in metadata.get("ownerReferences", []) if owner["kind"] == KIND}


def _covered(desired: Any, observed: Any) -> bool:
    if isinstance(desired, dict):
        if not isinstance(observed, dict):
            return not desired and observed is None
        return all(_covered(value, observed.get(name)) for name, value in desired.items())
    if isinstance(desired, list):
        return _list_covered(desired, observed or [])
    if desired == observed or (observed is None and desired in ("", False)):
        return True
    amount = _amount(desired)
    return amount is not None and amount == _amount(observed)


def _list_covered(desired: list[Any], observed: list[Any]) -> bool:
    key = next((key for key in _KEYS if desired and all(isinstance(d, dict) and key in d for d in desired)), None)
    if key is None:
        return len(desired) == len(observed) and all(map(_covered, desired, observed))
    found = {item.get(key): item for item in observed}
    return all(item[key] in found and _covered(item, found[item[key]]) for item in desired)


def _amount(value: Any) -> Decimal | None:
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, int | str) else None
    if match is None:
        return None
    number, unit = match.groups()
    if unit == "m":
        return Decimal(number) / 1000
    base = 1024 if unit and unit.endswith("i") else 1000
    power = " kMGTPE".index(unit[0].replace("K", "k")) if unit else 0
    return Decimal(number) * Decimal(base) ** power
