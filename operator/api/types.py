"""PrefillPipeline (prefill.dev/v1alpha1): the source of the CRD, of its reference page and of what the operator reads.

Field descriptions are user documentation: ``kubectl explain`` and docs/api.md show them. Every list
and string is bounded because the cost of the CRD's validation rules is estimated from the bounds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from prefill_runtime.agent.config import Policy as Policy
from pydantic import Field, WithJsonSchema

from .pods import EnvVar as EnvVar
from .pods import PodMetadata as PodMetadata
from .pods import PodTemplate as PodTemplate
from .pods import Resources as Resources
from .pods import SecretName as SecretName
from .pods import Volume as Volume
from .pods import VolumeMount as VolumeMount
from .scalars import ATOMIC, OPEN, ApiModel, LabelKey, ObjectName, Seconds, StatusModel, Time, map_of
from .sources import ModelSource as ModelSource

GROUP, VERSION, KIND, PLURAL = "prefill.dev", "v1alpha1", "PrefillPipeline", "prefillpipelines"
API_VERSION = f"{GROUP}/{VERSION}"


class Model(ApiModel):
    name: str = Field(
        min_length=1, max_length=253, description="Identity of the model; part of the calibration key and of metrics."
    )
    served_name: str | None = Field(
        None, min_length=1, max_length=253, description="Name clients put in requests; unset: the model's name."
    )
    source: ModelSource = Field(description="Where the weights come from; set exactly one of the fields.")
    max_model_len: int = Field(
        ge=1, le=16777216, description="Longest sequence in tokens, prompt plus answer (--max-model-len)."
    )
    dtype: str | None = Field(
        None, max_length=32, description="Data type as the engine names it, such as bfloat16; unset: the model's own."
    )
    quantization: str | None = Field(
        None, max_length=64, description="Quantization method as the engine names it, such as ascend; unset: none."
    )
    trust_remote_code: bool = Field(False, description="Let the engine run code that comes with the model.")


class Parallelism(ApiModel):
    pipeline: int = Field(ge=1, le=64, description="Pipeline stages (PP). Immutable unless spec.suspend is true.")
    tensor: int = Field(1, ge=1, le=64, description="Cards per stage (TP). Immutable unless spec.suspend is true.")
    stages_per_pod: int = Field(
        1,
        ge=1,
        le=64,
        description="Stages that share one pod, and with it one node; must divide pipeline. "
        "Immutable unless spec.suspend is true.",
    )
    virtual_stages: int = Field(
        1,
        ge=1,
        le=2,
        description="Stages of each rank. 2 folds the pipeline back (VPP): a chunk goes down through all ranks and up "
        "again, which halves fill and drain of a prompt; a decoded token takes 2 pipeline - 1 hops then. Needs "
        "pipeline of 2 or more. Immutable unless spec.suspend is true.",
    )
    expert_parallel: bool = Field(False, description="Spread the experts of a stage over its cards (EP).")
    layer_partition: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        (),
        max_length=128,
        description="Layers of each stage, first stage first, pipeline * virtualStages numbers; unset: the engine "
        "divides evenly.",
        json_schema_extra=ATOMIC,
    )

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual_stages


class Chunking(ApiModel):
    policy: Policy = Field(
        Policy.AUTO,
        description="How a prompt is cut into chunks. Auto: the plan with the earliest predicted finish, request by "
        "request; Fixed when there is one stage. Planned: the plan for a prompt alone. Dynamic: chunks of equal time. "
        "TeraPipe, Seq1F1B: the published cuts of these names. These five decide by the measured cost of chunks, and "
        "are Fixed until it is known. Fixed: equal chunks of maxTokens. TokenThrottle: chunks by queue and free KV "
        "cache. EngineNative: the engine's own profiling_chunk_config (vllm-ascend); nothing is loaded into the engine "
        "and its measurement does not outlive the pod.",
    )
    max_tokens: int = Field(
        8192,
        ge=16,
        le=16777216,
        description="Largest chunk; the one of Fixed, and the first one of Dynamic (--max-num-batched-tokens).",
    )
    min_tokens: int = Field(1024, ge=1, le=16777216, description="Smallest chunk but for the end of a prompt.")
    smoothing_factor: str = Field(
        "1.0",
        max_length=8,
        description="How far chunks follow the cost model: greater than 0 (hardly) to 1.0 (entirely). "
        "A number in quotes.",
    )


class ProfilingWeights(StrEnum):
    REAL = "Real"
    DUMMY = "Dummy"


class Reuse(StrEnum):
    IF_VALID = "IfValid"
    ALWAYS = "Always"
    NEVER = "Never"


class Retention(StrEnum):
    RETAIN = "Retain"
    DELETE = "Delete"


class OnlineCalibration(ApiModel):
    enabled: bool = Field(
        True,
        description="Refine the calibration from the timing of real chunks; without one, learn it from them.",
    )
    window_points: int = Field(256, ge=16, le=4096, description="How many of the last chunks it is fitted to.")


class Profiling(ApiModel):
    enabled: bool = Field(
        True,
        description="Measure before the first start. False: serve at once, from the calibration that the namespace has "
        "with this pipeline's key, else with Fixed until onlineCalibration has learnt one.",
    )
    samples: int = Field(64, ge=8, le=256, description="Chunk executions to time.")
    history_depths: int = Field(
        4, ge=0, le=16, description="How many amounts of tokens already in the KV cache to time chunks at."
    )
    timeout_seconds: Seconds = Field(
        1800, description="Time for profiling; when it is over, serving starts with Fixed and Calibrated says why."
    )
    weights: ProfilingWeights = Field(
        ProfilingWeights.REAL, description="Real: load the model's weights. Dummy: random weights, quicker to load."
    )
    reuse: Reuse = Field(
        Reuse.IF_VALID,
        description="When an earlier calibration with this pipeline's key is used instead of profiling. IfValid: when "
        "it is well-formed and good enough. Always: also when its fit is poor. Never: profile at every start.",
    )
    retention: Retention = Field(
        Retention.RETAIN,
        description="What becomes of the calibration ConfigMap when the pipeline is deleted. "
        "Retain: it stays and the next pipeline with the same key starts calibrated. Delete: it goes.",
    )
    online_calibration: OnlineCalibration = Field(
        OnlineCalibration(), description="How the calibration follows what is measured while serving."
    )


class Engine(ApiModel):
    image: str = Field(min_length=1, max_length=512, description="A stock vLLM or vllm-ascend image.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="When the node pulls the engine image."
    )
    port: int = Field(
        8000, ge=1024, le=65535, description="Port of the OpenAI-compatible API, in rank 0 and in the client Service."
    )
    args: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(
        (),
        max_length=128,
        description="Further arguments of vllm serve. Those the operator sets from other fields are refused.",
        json_schema_extra=ATOMIC,
    )
    env: tuple[EnvVar, ...] = Field(
        (), max_length=128, description="Environment of the engine.", json_schema_extra=map_of("name")
    )
    additional_config: Annotated[
        dict[str, Any],
        WithJsonSchema(
            OPEN
            | {
                "properties": {
                    # CEL sees declared properties only.
                    "SLO_limits_for_dynamic_batch": {
                        "type": "integer",
                        "minimum": -1,
                        "maximum": 86400000,
                        "description": "vllm-ascend's dynamic batch scheduler; refused here unless -1 (off).",
                    },
                    "enable_balance_scheduling": {
                        "type": "boolean",
                        "description": "vllm-ascend's balance scheduler; refused here unless false.",
                    },
                    "recompute_scheduler_enable": {
                        "type": "boolean",
                        "description": "vllm-ascend's recompute scheduler; refused here unless false.",
                    },
                    "scheduler_config": OPEN | {"description": "vllm-ascend's choice of a scheduler; refused here."},
                    "short_request_first_config": OPEN
                    | {"description": "vllm-ascend's short-request-first scheduler; refused here."},
                    "xlite_graph_config": OPEN | {"description": "vllm-ascend's Xlite worker; refused here."},
                    "prefill": OPEN | {"description": "Set by the operator; refused here."},
                    "profiling_chunk_config": OPEN | {"description": "Set by the operator; refused here."},
                }
            }
        ),
    ] = Field({}, description="Entries of vLLM's --additional-config, passed on as they are.")
    volume_mounts: tuple[VolumeMount, ...] = Field(
        (),
        max_length=64,
        description="Further mounts of the engine container.",
        json_schema_extra=map_of("mountPath"),
    )
    resources: Resources = Field(Resources(), description="Processor and memory of a pod.")


class Vendor(StrEnum):
    ASCEND = "Ascend"
    CPU = "CPU"


class Accelerator(ApiModel):
    vendor: Vendor = Field(Vendor.ASCEND, description="What the engine computes on.")
    resource_name: str = Field(
        "huawei.com/Ascend910",
        min_length=1,
        max_length=253,
        description="Extended resource that stands for one card; a pod gets tensor * stagesPerPod. Unused with CPU.",
    )
    runtime_class_name: ObjectName | None = Field(
        None, description="RuntimeClass of the pods, for clusters whose container runtime mounts the driver."
    )
    mount_driver: bool = Field(
        True,
        description="Mount the Ascend driver's files from the node; switch off when the container runtime does. "
        "Unused with CPU.",
    )


class Scheduling(ApiModel):
    topology_key: LabelKey | None = Field(
        None, description="Node label; all pods of a replica go to nodes with the same value of it."
    )
    pod_template: PodTemplate = Field(PodTemplate(), description="What to add to the pods.")


class Startup(ApiModel):
    budget_seconds: Seconds = Field(
        1800, description="Time from the engine's start to its first answer; weights must load within it."
    )


class Recovery(ApiModel):
    backoff_seconds: int = Field(
        10, ge=1, le=3600, description="Pause before a broken replica is started again; doubles each time."
    )
    max_backoff_seconds: int = Field(600, ge=1, le=86400, description="Longest such pause.")
    max_restarts: int = Field(
        0, ge=0, le=10000, description="Restarts after which a replica stays Failed until the spec changes; 0: no cap."
    )


class Rollout(ApiModel):
    max_unavailable: int = Field(1, ge=1, le=100, description="Replicas that may be down at once during a change.")


class PrefillPipelineSpec(ApiModel):
    """What to serve and how."""

    replicas: int = Field(
        1, ge=0, le=100, description="Independent pipelines, each a StatefulSet; kubectl scale sets it."
    )
    model: Model = Field(description="The model.")
    parallelism: Parallelism = Field(description="How the model is divided over cards and pods.")
    chunking: Chunking = Field(Chunking(), description="How prompts are cut into chunks.")
    profiling: Profiling = Field(Profiling(), description="How the cost of chunks is measured and kept.")
    engine: Engine = Field(description="The serving engine.")
    accelerator: Accelerator = Field(Accelerator(), description="The cards.")
    scheduling: Scheduling = Field(Scheduling(), description="Where the pods run.")
    startup: Startup = Field(Startup(), description="How long a start may take.")
    recovery: Recovery = Field(Recovery(), description="How broken replicas are started again.")
    rollout: Rollout = Field(Rollout(), description="How changes reach the replicas.")
    suspend: bool = Field(False, description="Remove all pods and keep the calibration.")
    paused: bool = Field(False, description="The operator changes nothing until this is false again.")

    @property
    def pods_per_replica(self) -> int:
        return self.parallelism.pipeline // self.parallelism.stages_per_pod

    @property
    def cards_per_pod(self) -> int:
        return self.parallelism.tensor * self.parallelism.stages_per_pod

    @property
    def served_name(self) -> str:
        return self.model.served_name or self.model.name


class ConditionType(StrEnum):
    READY = "Ready"
    CALIBRATED = "Calibrated"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    PAUSED = "Paused"


class Condition(StatusModel):
    type: str = Field(max_length=63, description="Ready, Calibrated, Progressing, Degraded or Paused.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: str = Field(max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Why, in one CamelCase word.")
    message: str = Field(max_length=4096, description="Why, in a sentence that says what to do.")
    last_transition_time: Time = Field(description="When status last changed.")
    observed_generation: int | None = Field(None, ge=0, description="Generation of the spec this is about.")


class CalibrationStatus(StatusModel):
    key: str = Field(max_length=16, description="Hash of everything that would make the measurement worthless.")
    config_map: str = Field(max_length=253, description="ConfigMap that holds the calibration document.")
    source: Literal["Profile", "Online"] = Field(description="Profile: measured before a start. Online: while serving.")
    r2: str = Field(max_length=12, description="R^2 of the worst stage.")
    samples: int = Field(ge=0, description="Samples over all stages.")
    time: Time = Field(description="When it was measured.")


class ReplicaPhase(StrEnum):
    PENDING = "Pending"
    PROFILING = "Profiling"
    STARTING = "Starting"
    READY = "Ready"
    RESTARTING = "Restarting"
    BACK_OFF = "BackOff"
    FAILED = "Failed"
    STOPPING = "Stopping"


class ReplicaStatus(StatusModel):
    index: int = Field(ge=0, description="Number of the replica.")
    phase: ReplicaPhase = Field(description="What the replica is doing.")
    incarnation: str | None = Field(None, max_length=63, description="Id of this life of the rank group.")
    restarts: int = Field(0, ge=0, description="Restarts of the group since it was last Ready for long.")
    next_retry_time: Time | None = Field(None, description="When a broken group is started again.")
    message: str | None = Field(None, max_length=4096, description="More about the phase.")


class PrefillPipelineStatus(StatusModel):
    """What the operator has seen and done."""

    observed_generation: int | None = Field(None, ge=0, description="Generation of the spec last acted upon.")
    conditions: tuple[Condition, ...] = Field(
        (), max_length=16, description="Ready, Calibrated, Progressing, Paused.", json_schema_extra=map_of("type")
    )
    replicas: int | None = Field(None, ge=0, description="Replicas that exist.")
    ready_replicas: int | None = Field(None, ge=0, description="Replicas that serve.")
    selector: str | None = Field(
        None, max_length=1024, description="Label selector of the rank-0 pods, for autoscalers."
    )
    policy: Policy | None = Field(None, description="Chunking policy in force, which is Fixed while uncalibrated.")
    calibration: CalibrationStatus | None = Field(None, description="The calibration in use.")
    replica_statuses: tuple[ReplicaStatus, ...] = Field(
        (), max_length=100, description="One entry per replica.", json_schema_extra=map_of("index")
    )


class PrefillPipeline(ApiModel):
    """A prefill pipeline: one model served by pipeline-parallel vLLM with measured chunk sizes."""

    api_version: Literal["prefill.dev/v1alpha1"] = "prefill.dev/v1alpha1"
    kind: Literal["PrefillPipeline"] = "PrefillPipeline"
    metadata: dict[str, Any]
    spec: PrefillPipelineSpec
    status: PrefillPipelineStatus = PrefillPipelineStatus()
