"""One PrefillPipeline as the pure code sees it, and what its ranks are told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prefill_operator.api.types import API_VERSION, KIND, PrefillPipelineSpec, Vendor
from prefill_operator.desired import names
from prefill_runtime.agent import config as rank
from prefill_runtime.agent.config import Policy
from prefill_runtime.profiling.document import KeyInputs

Manifest = dict[str, Any]

# The agent must be done draining before the kubelet's patience ends.
GRACE_MARGIN_SECONDS = 5


@dataclass(frozen=True)
class Pipeline:
    """A PrefillPipeline with a valid spec, and the release of the operator that looks at it."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: PrefillPipelineSpec
    operator_image: str
    runtime_version: str

    @property
    def owner_reference(self) -> Manifest:
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }

    @property
    def labels(self) -> dict[str, str]:
        return names.pipeline_labels(self.name, self.uid)

    @property
    def policy(self) -> Policy:
        """The policy the ranks are told: a single stage leaves Auto nothing to choose."""
        policy = self.spec.chunking.policy
        return Policy.FIXED if policy is Policy.AUTO and self.spec.parallelism.pipeline == 1 else policy

    @property
    def needs_calibration(self) -> bool:
        return self.policy.calibrated and self.spec.parallelism.pipeline >= 2

    @property
    def profiles(self) -> bool:
        return self.needs_calibration and self.spec.profiling.enabled

    @property
    def learns(self) -> bool:
        return self.needs_calibration and self.spec.profiling.online_calibration.enabled

    @property
    def calibration_key(self) -> str:
        return key_inputs(self).key()

    @property
    def calibration_name(self) -> str:
        return names.calibration_name(self.calibration_key)


def model_source(pipeline: Pipeline) -> str:
    """Where the weights come from, as one word of the calibration key."""
    source = pipeline.spec.model.source
    if source.host_path:
        return f"hostPath:{source.host_path.path}"
    if source.persistent_volume_claim:
        claim = source.persistent_volume_claim
        return f"claim:{pipeline.namespace}/{claim.claim_name}/{claim.sub_path or ''}"
    if source.image:
        return f"image:{source.image.reference}"
    assert source.hugging_face is not None, "validation lets exactly one model source pass"
    return f"huggingFace:{source.hugging_face.repo}@{source.hugging_face.revision or ''}"


def key_inputs(pipeline: Pipeline) -> KeyInputs:
    spec = pipeline.spec
    accelerator = spec.accelerator
    args = spec.engine.args
    if spec.engine.additional_config:
        args = (*args, json.dumps(spec.engine.additional_config, sort_keys=True))
    return KeyInputs(
        model_name=spec.model.name,
        model_source=model_source(pipeline),
        dtype=spec.model.dtype or "",
        quantization=spec.model.quantization or "",
        engine_image=spec.engine.image,
        accelerator="CPU" if accelerator.vendor == Vendor.CPU else f"{accelerator.vendor}/{accelerator.resource_name}",
        pipeline=spec.parallelism.pipeline,
        virtual_stages=spec.parallelism.virtual_stages,
        tensor=spec.parallelism.tensor,
        expert_parallel=spec.parallelism.expert_parallel,
        layer_partition=spec.parallelism.layer_partition,
        max_tokens=spec.chunking.max_tokens,
        max_model_len=spec.model.max_model_len,
        engine_args=args,
        runtime_version=pipeline.runtime_version,
    )


def rank_config(pipeline: Pipeline, replica: int) -> rank.RankConfig:
    """What every rank of a replica is told (annotation ``prefill.dev/config``)."""
    spec = pipeline.spec
    return rank.RankConfig(
        identity=rank.Identity(namespace=pipeline.namespace, pipeline=pipeline.name, replica=replica),
        group=rank.Group(
            leader=names.leader_address(pipeline.name, replica, pipeline.namespace),
            pods=spec.pods_per_replica,
            engine_port=spec.engine.port,
        ),
        engine=_engine(pipeline),
        chunking=rank.Chunking(
            policy=pipeline.policy,
            max_tokens=spec.chunking.max_tokens,
            min_tokens=spec.chunking.min_tokens,
            smoothing_factor=float(spec.chunking.smoothing_factor),
        ),
        profiling=_profiling(pipeline),
        online_window=spec.profiling.online_calibration.window_points if pipeline.learns else None,
        calibration_key=pipeline.calibration_key,
        startup_seconds=spec.startup.budget_seconds,
        grace_seconds=max(1, spec.scheduling.pod_template.termination_grace_period_seconds - GRACE_MARGIN_SECONDS),
    )


def _engine(pipeline: Pipeline) -> rank.Engine:
    spec = pipeline.spec
    args, path = spec.engine.args, str(rank.MODEL_DIR)
    if hub := spec.model.source.hugging_face:
        path = hub.repo
        if hub.revision:
            args = ("--revision", hub.revision, *args)
    return rank.Engine(
        device=spec.accelerator.vendor.value,
        served_model_name=spec.served_name,
        model_path=path,
        pipeline=spec.parallelism.pipeline,
        virtual=spec.parallelism.virtual_stages,
        layer_partition=spec.parallelism.layer_partition,
        tensor=spec.parallelism.tensor,
        expert_parallel=spec.parallelism.expert_parallel,
        max_model_len=spec.model.max_model_len,
        dtype=spec.model.dtype,
        quantization=spec.model.quantization,
        trust_remote_code=spec.model.trust_remote_code,
        args=args,
        additional_config=spec.engine.additional_config,
    )


def _profiling(pipeline: Pipeline) -> rank.Profiling | None:
    if not pipeline.profiles:
        return None
    wanted = pipeline.spec.profiling
    return rank.Profiling(
        samples=wanted.samples,
        history_depths=wanted.history_depths,
        timeout_seconds=wanted.timeout_seconds,
        weights=wanted.weights.value,
        reuse=wanted.reuse.value,
    )
