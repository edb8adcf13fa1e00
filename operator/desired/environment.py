"""Environment and mounts of the engine: what only the pod can know.

Everything that a rank can decide by itself (threads, spawn method, offline hub ...) is set by the agent, in
``prefill_runtime.agent.command``. A variable of the user replaces one of ours with the same name.
"""

from __future__ import annotations

from prefill_operator.api.types import Vendor
from prefill_operator.desired import names
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_runtime.agent import config as rank

HCCL_CONNECT_SECONDS = range(120, 7201)  # what HCCL accepts

# Files of the Ascend driver, for clusters whose container runtime does not mount them.
DRIVER_DIRECTORIES = ("/usr/local/dcmi", "/usr/local/Ascend/driver/lib64")
DRIVER_FILES = (
    "/usr/local/Ascend/driver/tools/hccn_tool",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
)


def environment(pipeline: Pipeline) -> list[Manifest]:
    """The engine's variables; the profile step has the same, as it runs the same engine."""
    spec = pipeline.spec
    host_network = spec.scheduling.pod_template.host_network
    ours: dict[str, Manifest] = {
        rank.RANK_ENV: _field(f"metadata.labels['{names.LABEL_POD_INDEX}']"),
        "PYTHONPATH": {"value": str(rank.RUNTIME_DIR)},
        "HOME": {"value": str(rank.STATE_DIR / "home")},
        # vLLM's own guess needs a default route.
        "VLLM_HOST_IP": _field("status.podIP"),
    }
    if spec.model.source.hugging_face:
        ours["HF_HUB_OFFLINE"] = {"value": "0"}
    if spec.accelerator.vendor == Vendor.CPU and not host_network:
        ours["GLOO_SOCKET_IFNAME"] = {"value": "eth0"}
    if spec.accelerator.vendor == Vendor.ASCEND:
        seconds = min(max(spec.startup.budget_seconds, HCCL_CONNECT_SECONDS[0]), HCCL_CONNECT_SECONDS[-1])
        ours["HCCL_CONNECT_TIMEOUT"] = {"value": str(seconds)}
    theirs = {variable.name: variable.model_dump(by_alias=True, exclude_none=True) for variable in spec.engine.env}
    return [{"name": name} | value for name, value in (ours | theirs).items()]


def _field(path: str) -> Manifest:
    return {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def volumes(pipeline: Pipeline) -> list[Manifest]:
    spec = pipeline.spec
    found: list[Manifest] = [
        {"name": "prefill-config", "downwardAPI": {"items": _config_files()}},
        {"name": "prefill-runtime", "emptyDir": {}},
        {"name": "prefill-state", "emptyDir": {}},
        {"name": "prefill-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    if model := _model_volume(pipeline):
        found.append({"name": "prefill-model"} | model)
    if _mounts_driver(pipeline):
        found += [_driver_volume(path, "Directory") for path in DRIVER_DIRECTORIES]
        found += [_driver_volume(path, "File") for path in DRIVER_FILES]
    theirs = [volume.model_dump(by_alias=True) for volume in spec.scheduling.pod_template.volumes]
    return [*found, *theirs]


def _config_files() -> list[Manifest]:
    annotations = {
        rank.CONFIG_FILE: rank.ANNOTATION_CONFIG,
        rank.INCARNATION_FILE: rank.ANNOTATION_INCARNATION,
        rank.CALIBRATION_FILE: rank.ANNOTATION_CALIBRATION,
    }
    return [
        {"path": file, "fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{annotation}']"}}
        for file, annotation in annotations.items()
    ]


def _model_volume(pipeline: Pipeline) -> Manifest | None:
    source = pipeline.spec.model.source
    if source.host_path:
        # Without a type the container runtime would create a missing directory and hide the mistake.
        return {"hostPath": {"path": source.host_path.path, "type": "Directory"}}
    if source.persistent_volume_claim:
        return {"persistentVolumeClaim": {"claimName": source.persistent_volume_claim.claim_name, "readOnly": True}}
    if source.image:
        return {"image": {"reference": source.image.reference, "pullPolicy": pipeline.spec.engine.image_pull_policy}}
    return None


def _mounts_driver(pipeline: Pipeline) -> bool:
    accelerator = pipeline.spec.accelerator
    return accelerator.vendor == Vendor.ASCEND and accelerator.mount_driver


def _driver_name(path: str) -> str:
    return names.fit(f"prefill-driver-{path.rsplit('/', 1)[-1].replace('_', '-').replace('.', '-')}", 63)


def _driver_volume(path: str, kind: str) -> Manifest:
    return {"name": _driver_name(path), "hostPath": {"path": path, "type": kind}}


def mounts(pipeline: Pipeline) -> list[Manifest]:
    """Mounts of the engine and of the profile step."""
    found: list[Manifest] = [
        {"name": "prefill-config", "mountPath": str(rank.CONFIG_DIR), "readOnly": True},
        {"name": "prefill-runtime", "mountPath": str(rank.RUNTIME_DIR), "readOnly": True},
        {"name": "prefill-state", "mountPath": str(rank.STATE_DIR)},
        {"name": "prefill-shm", "mountPath": "/dev/shm"},
    ]
    if _model_volume(pipeline):
        model: Manifest = {"name": "prefill-model", "mountPath": str(rank.MODEL_DIR), "readOnly": True}
        claim = pipeline.spec.model.source.persistent_volume_claim
        if claim and claim.sub_path:
            model["subPath"] = claim.sub_path
        found.append(model)
    if _mounts_driver(pipeline):
        found += [
            {"name": _driver_name(path), "mountPath": path, "readOnly": True}
            for path in (*DRIVER_DIRECTORIES, *DRIVER_FILES)
        ]
    theirs = [mount.model_dump(by_alias=True, exclude_none=True) for mount in pipeline.spec.engine.volume_mounts]
    return [*found, *theirs]
