"""The parts of the API that go into a pod as they are."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from .scalars import ATOMIC, OPEN, AbsolutePath, ApiModel, LabelKey, Name, ObjectName, OpenObject, Quantity, map_of


class EnvVar(ApiModel):
    name: str = Field(min_length=1, max_length=253, description="Name of the variable.")
    value: str | None = Field(None, max_length=32768, description="Its value.")
    value_from: OpenObject | None = Field(
        None, description="Source of the value, as in a pod (secretKeyRef, configMapKeyRef, fieldRef ...)."
    )


class VolumeMount(ApiModel):
    name: Name = Field(description="A volume of scheduling.podTemplate.volumes.")
    mount_path: AbsolutePath = Field(description="Where the engine container sees it.")
    sub_path: str | None = Field(None, max_length=512, description="Directory of the volume to mount; unset: its root.")
    read_only: bool = Field(False, description="Mount read-only.")


class Resources(ApiModel):
    requests: dict[LabelKey, Quantity] = Field(
        {}, max_length=32, description="What a pod reserves. The accelerator's cards are added by the operator."
    )
    limits: dict[LabelKey, Quantity] = Field(
        {}, max_length=32, description="What a pod may use at most. The accelerator's cards are added by the operator."
    )


class PodMetadata(ApiModel):
    labels: dict[LabelKey, Annotated[str, Field(max_length=63)]] = Field(
        {}, max_length=64, description="Further labels of the pods."
    )
    annotations: dict[LabelKey, Annotated[str, Field(max_length=4096)]] = Field(
        {}, max_length=64, description="Further annotations of the pods."
    )


class Volume(BaseModel):
    """A volume as in a pod: its name, and the source in any form Kubernetes knows."""

    model_config = ConfigDict(extra="allow", frozen=True, json_schema_extra=OPEN)

    name: Name = Field(description="Name that engine.volumeMounts refers to.")


class SecretName(ApiModel):
    name: ObjectName = Field(description="Name of a Secret with registry credentials.")


class PodTemplate(ApiModel):
    metadata: PodMetadata = Field(PodMetadata(), description="Labels and annotations added to the operator's own.")
    node_selector: dict[LabelKey, Annotated[str, Field(max_length=63)]] = Field(
        {}, max_length=64, description="Labels a node must have."
    )
    tolerations: tuple[OpenObject, ...] = Field(
        (), max_length=64, description="Taints the pods tolerate, as in a pod.", json_schema_extra=ATOMIC
    )
    affinity: OpenObject = Field({}, description="Affinity rules, as in a pod.")
    volumes: tuple[Volume, ...] = Field(
        (), max_length=64, description="Further volumes of the pods.", json_schema_extra=map_of("name")
    )
    host_network: bool = Field(False, description="Use the node's network; one pod of a pipeline per node then.")
    security_context: OpenObject = Field({}, description="Security settings of the pods, as in a pod.")
    image_pull_secrets: tuple[SecretName, ...] = Field(
        (), max_length=16, description="Registry credentials.", json_schema_extra=map_of("name")
    )
    service_account_name: ObjectName | None = Field(
        None, description="Service account of the pods; its token is never mounted."
    )
    termination_grace_period_seconds: int = Field(
        60, ge=5, le=86400, description="Time for running requests to finish before a pod is killed."
    )
    priority_class_name: ObjectName | None = Field(None, description="PriorityClass of the pods.")
    scheduler_name: ObjectName | None = Field(None, description="Scheduler that places the pods; unset: the default.")
