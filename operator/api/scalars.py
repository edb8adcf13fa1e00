"""Scalars and conventions shared by the API types."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

OPEN: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
QUANTITY: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
    "maxLength": 32,
    "pattern": r"^[0-9]+(\.[0-9]+)?([eE][0-9]+|m|k|Ki|[MGTPE]i?)?$",
}

# A Kubernetes object whose schema the API server checks when the pod is created.
OpenObject = Annotated[dict[str, Any], WithJsonSchema(OPEN)]
Quantity = Annotated[int | str, WithJsonSchema(QUANTITY)]
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
LabelKey = Annotated[str, Field(max_length=317)]
AbsolutePath = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^/")]
Seconds = Annotated[int, Field(ge=1, le=86400)]
Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


def map_of(*keys: str) -> dict[str, Any]:
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}


class ApiModel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class StatusModel(ApiModel):
    """Status may have been written by another version of the operator; what is unknown is no reason to stop."""

    model_config = ConfigDict(extra="ignore")
