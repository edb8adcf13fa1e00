"""What the operator tells a rank, and what a rank says last: the contract between operator and agent.

The operator writes three pod annotations, which a downward-API volume shows to the agent as the files
below ``CONFIG_DIR``. They are part of the pod, so a running rank never sees a newer configuration
than its peers, and a new incarnation of a group gets all three at once.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

CONFIG_DIR = Path("/etc/prefill")
CONFIG_FILE, INCARNATION_FILE, CALIBRATION_FILE = "config.json", "incarnation", "calibration.json"
ANNOTATION_CONFIG = "prefill.dev/config"
ANNOTATION_INCARNATION = "prefill.dev/incarnation"
ANNOTATION_CALIBRATION = "prefill.dev/calibration"

# Shared emptyDir of a pod: the runtime package (PYTHONPATH) and what the profile step leaves for the engine.
RUNTIME_DIR = Path("/opt/prefill")
STATE_DIR = Path("/run/prefill")
MODEL_DIR = Path("/models")

RANK_ENV = "PREFILL_RANK"
ENGINE_PORT, CONTROL_PORT, GROUP_PORT, STORE_PORT = 8000, 9400, 9401, 29500


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class Policy(StrEnum):
    """How prompts are cut into chunks; docs/scheduling.md compares them."""

    AUTO = "Auto"
    PLANNED = "Planned"
    DYNAMIC = "Dynamic"
    FIXED = "Fixed"
    TOKEN_THROTTLE = "TokenThrottle"
    TERA_PIPE = "TeraPipe"
    SEQ_1F1B = "Seq1F1B"
    ENGINE_NATIVE = "EngineNative"

    @property
    def calibrated(self) -> bool:
        """Whether it decides by the measured cost of chunks, which only a pipeline of two stages and more can use."""
        return self not in (Policy.FIXED, Policy.TOKEN_THROTTLE, Policy.ENGINE_NATIVE)


class Identity(_Model):
    namespace: str
    pipeline: str
    replica: int = Field(ge=0)


class Group(_Model):
    """How the ranks of one replica find each other."""

    leader: str = Field(description="DNS name of rank 0's pod")
    pods: int = Field(ge=1, description="rank pods in the group; pod index 0 leads")
    engine_port: int = ENGINE_PORT
    control_port: int = CONTROL_PORT
    group_port: int = GROUP_PORT
    store_port: int = STORE_PORT


class Engine(_Model):
    """What to serve; the agent alone turns this into a command line."""

    device: Literal["CPU", "Ascend"]
    served_model_name: str
    model_path: str
    pipeline: int = Field(ge=1)
    virtual: int = Field(default=1, ge=1, le=2, description="stages per rank: 2 folds the pipeline back")
    layer_partition: tuple[int, ...] = Field(default=(), description="layers by stage; empty: divided evenly")
    tensor: int = Field(ge=1)
    expert_parallel: bool = False
    max_model_len: int = Field(gt=0)
    dtype: str | None = None
    quantization: str | None = None
    trust_remote_code: bool = False
    args: tuple[str, ...] = ()
    additional_config: dict[str, Any] = {}

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual


class Chunking(_Model):
    policy: Policy
    max_tokens: int = Field(gt=0)
    min_tokens: int = Field(gt=0)
    smoothing_factor: float = Field(gt=0, le=1)


class Profiling(_Model):
    samples: int = Field(ge=8, le=256)
    history_depths: int = Field(ge=0, le=16)
    timeout_seconds: int = Field(gt=0)
    weights: Literal["Real", "Dummy"]
    reuse: Literal["IfValid", "Always", "Never"]


class RankConfig(_Model):
    """One replica's configuration, the same for each of its ranks (the rank itself is in ``RANK_ENV``)."""

    schema_version: Literal[1] = 1
    identity: Identity
    group: Group
    engine: Engine
    chunking: Chunking
    profiling: Profiling | None = None
    """None: nothing is measured before serving."""
    online_window: int | None = Field(default=None, ge=16, le=4096)
    """Passes that the calibration is refined from while serving; None: it stays as it was at the start."""
    calibration_key: str = Field(pattern=r"^[0-9a-f]{16}$")
    startup_seconds: int = Field(gt=0)
    grace_seconds: int = Field(gt=0)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)


class EndReason(StrEnum):
    """Why a rank ended; the operator shows it in the Ready condition."""

    ENGINE_EXITED = "EngineExited"
    ENGINE_NEVER_READY = "EngineNeverReady"
    MODEL_NOT_FOUND = "ModelNotFound"
    UNSUPPORTED_ENGINE = "UnsupportedEngine"
    BAD_CONFIGURATION = "BadConfiguration"
    AGENT_FAILED = "AgentFailed"
    PEER_LOST = "PeerLost"
    INCARNATION_CHANGED = "IncarnationChanged"
    DRAINED = "Drained"


class LastWords(_Model):
    """The termination message of an ``engine`` container."""

    reason: EndReason
    message: str = Field(max_length=3000)
    rank: int = Field(ge=0)
