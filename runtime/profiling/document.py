"""The calibration document: what profiling measured, and the contract between runtime and operator.

The document travels as compact JSON of at most 4096 bytes (a container's termination message), so
every field earns its place. Seconds and tokens throughout; field names are camelCase in JSON.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

SCHEMA_VERSION = 2
MAX_BYTES = 4096
MAX_STAGES = 18
"""What fits into MAX_BYTES, as part of a ProfileResult and with the longest names."""

GOOD_R2 = 0.9
"""What a fit must reach to be used: when measured, when reused and when refined."""

Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)


class RefusalReason(StrEnum):
    """Why profiling ended without a calibration. Serving then starts with Fixed chunks."""

    TOO_MANY_STAGES = "TooManyStages"
    TOO_FEW_SAMPLES = "TooFewSamples"
    ILL_CONDITIONED = "IllConditioned"
    POOR_FIT = "PoorFit"
    NOT_GROWING = "NotGrowing"
    BAD_SAMPLE = "BadSample"
    TIMED_OUT = "TimedOut"
    RANK_LOST = "RankLost"
    ENGINE_FAILED = "EngineFailed"


class Refusal(_Model):
    reason: RefusalReason
    message: str = Field(max_length=1024)
    stage: int | None = None


Coefficient = Annotated[Finite, Field(ge=0)]


class StageCoefficients(_Model):
    """k0 + k1 C + k2 A(C, H) + k3 H, seconds for a chunk of C tokens after H (``scheduler.cost.StageModel``)."""

    k0: Coefficient
    k1: Coefficient
    k2: Coefficient
    k3: Coefficient = 0.0


class PublishedCoefficients(_Model):
    """a, b and c of one of the published forms of seeds/000."""

    a: Coefficient
    b: Coefficient
    c: Coefficient


class PublishedForms(_Model):
    """The published forms, fitted to the slowest stage, for the policies that are defined by them.

    quadratic: f(l) = a l^2 + b l + c, seconds for a prompt of l tokens. history: f(C, H) = a C (C + H) + b (C + H) + c;
    None where the samples contradict it.
    """

    quadratic: PublishedCoefficients
    history: PublishedCoefficients | None = None


class StageAttention(_Model):
    """Tokens within a sliding window, and the share of layers that have none."""

    window: Annotated[int, Field(ge=1)]
    full: Annotated[Finite, Field(ge=0, le=1)]


class StageCalibration(_Model):
    """One stage's fit and how good it is."""

    stage: Annotated[int, Field(ge=0)]
    coefficients: StageCoefficients
    attention: StageAttention | None = None
    r2: Annotated[Finite, Field(le=1)]
    sample_count: Annotated[int, Field(ge=1)]
    relative_error_p50: Annotated[Finite, Field(ge=0)]
    relative_error_p90: Annotated[Finite, Field(ge=0)]


class CalibrationDocument(_Model):
    """A whole pipeline's calibration; ``stages`` is ordered and has one entry per stage."""

    schema_version: Literal[2] = 2
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    model: Annotated[str, Field(max_length=253)]
    source: Literal["Profile", "Online"]
    created_at: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    runtime_version: Annotated[str, Field(max_length=32)]
    engine_version: Annotated[str, Field(max_length=64)]
    base_tokens: Annotated[int, Field(gt=0)]
    target_seconds: Annotated[Finite, Field(gt=0)]
    pass_overhead_seconds: Coefficient = 0.0
    """What the engine takes between two passes of a busy stage; no pass contains it, every chunk pays it."""
    published: PublishedForms
    stages: Annotated[list[StageCalibration], Field(min_length=1, max_length=64)]

    @property
    def r2(self) -> float:
        """The worst stage's R^2."""
        return min(s.r2 for s in self.stages)

    @property
    def sample_count(self) -> int:
        return sum(s.sample_count for s in self.stages)


class ProfileResult(_Model):
    """What the ``profile`` init step leaves in its termination message: exactly one of the three is meant."""

    outcome: Literal["Measured", "Reused", "Refused"]
    calibration: CalibrationDocument | None = None
    refusal: Refusal | None = None
    seconds: Annotated[Finite, Field(ge=0)] = 0.0


class KeyInputs(_Model):
    """Everything that, when it changes, makes an old measurement worthless."""

    model_name: str
    model_source: str
    dtype: str
    quantization: str
    engine_image: str
    accelerator: str
    pipeline: int
    virtual_stages: int
    tensor: int
    expert_parallel: bool
    layer_partition: tuple[int, ...]
    max_tokens: int
    max_model_len: int
    engine_args: tuple[str, ...]
    runtime_version: str

    def key(self) -> str:
        """16 hexadecimal digits; equal inputs give equal keys, on any machine."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class CalibrationError(ValueError):
    """A calibration text that cannot be used; the message says why."""


class WrongStagesError(CalibrationError):
    """One of a pipeline with another number of stages."""


def load_calibration(text: str, key: str, stages: int) -> CalibrationDocument:
    """Parse ``text`` and check that it belongs to ``key`` and to a pipeline of so many stages.

    Raises CalibrationError for malformed, oversized, unknown-version or foreign documents.
    """
    if len(text.encode()) > MAX_BYTES:
        raise CalibrationError(f"document has {len(text.encode())} bytes, more than the {MAX_BYTES} allowed")
    try:
        document = CalibrationDocument.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise CalibrationError(f"{where}: {first['msg']}") from None
    if document.key != key:
        raise CalibrationError(f"document has key {document.key}, this pipeline needs {key}")
    found = [s.stage for s in document.stages]
    if found != list(range(len(found))):
        raise CalibrationError(f"stages are {found}, expected 0..{len(found) - 1} in order")
    if len(found) != stages:
        raise WrongStagesError(f"document has {len(found)} stages, this pipeline has {stages}")
    return document
