"""Does an observed object still say what we want? The API server adds defaults and rewrites quantities."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from prefill_operator.api.types import KIND
from prefill_operator.desired.pipeline import Manifest

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:[eE]([0-9]+)|([num])|([kKMGTPE]i?))?")
_KEYS = ("name", "mountPath", "path")


def differs(desired: Manifest, observed: Manifest) -> bool:
    """Whether ``desired`` has to be applied. Fields it does not name belong to others."""
    return not _covered(_content(desired), observed) or _owners(observed["metadata"]) != _owners(desired["metadata"])


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
    key = next((key for key in _KEYS if desired and _tells_apart(key, desired)), None)
    if key is None:
        return len(desired) == len(observed) and all(map(_covered, desired, observed))
    found = {item.get(key): item for item in observed}
    return all(item[key] in found and _covered(item, found[item[key]]) for item in desired)


def _tells_apart(key: str, items: list[Any]) -> bool:
    values = [item.get(key) for item in items if isinstance(item, dict)]
    return len(values) == len(items) and None not in values and len(set(values)) == len(items)


def _amount(value: Any) -> Decimal | None:
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, int | str) else None
    if match is None:
        return None
    number, exponent, fraction, unit = match.groups()
    if exponent:
        return Decimal(number).scaleb(int(exponent))
    if fraction:
        return Decimal(number).scaleb(-3 * " mun".index(fraction))
    base = 1024 if unit and unit.endswith("i") else 1000
    power = " kMGTPE".index(unit[0].replace("K", "k")) if unit else 0
    return Decimal(number) * Decimal(base) ** power
