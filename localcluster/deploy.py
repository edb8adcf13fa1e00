"""What the demo and the end-to-end tests put on a local cluster: images, the operator, samples that fit here."""

import json
from typing import Any

from localcluster import cluster, envs, images, models
from localcluster.console import progress
from localcluster.kube import Kube, condition
from localcluster.settings import REPOSITORY, Settings

OPERATOR_IMAGE = "localhost/prefill-operator"
OPERATOR_TAG = "dev"
OPERATOR_NAMESPACE = "prefill-system"
SAMPLES = REPOSITORY / "manifests" / "samples"
CHART = REPOSITORY / "charts" / "prefill-operator"


def build_images() -> tuple[images.Archive, images.Archive]:
    """The operator's and the engine's image, built where they are missing; neither needs the environment to exist."""
    dockerfile = REPOSITORY / "images" / "operator" / "Dockerfile"
    operator = images.build(f"{OPERATOR_IMAGE}:{OPERATOR_TAG}", REPOSITORY, dockerfile, {})
    return operator, images.engine(envs.ENGINE_VERSION, envs.engine().path)


def load_images(settings: Settings, archives: tuple[images.Archive, ...]) -> None:
    with progress.step(f"loading images into cluster {settings.name}"):
        for archive in archives:
            images.load_archive(settings, cluster.require_node(settings), archive)


def install_operator(kube: Kube, repository: str = OPERATOR_IMAGE, tag: str = OPERATOR_TAG) -> None:
    with progress.step("helm install prefill-operator"):
        kube.run(
            *("helm", "upgrade", "--install", "prefill-operator", str(CHART), "--namespace", OPERATOR_NAMESPACE),
            *("--create-namespace", "--set", f"image.repository={repository}", "--set", f"image.tag={tag}"),
            *("--wait", "--timeout", "180s"),
        )


def sample(kube: Kube, name: str, change: dict[str, Any]) -> dict[str, Any]:
    """A sample of manifests/samples with a JSON merge patch on top."""
    file = SAMPLES / f"{name}.yaml"
    text = kube("patch", "--local", "-f", str(file), "--type=merge", "-p", json.dumps(change), "-o", "json")
    return dict(json.loads(text))


def fit_local(engine_image: str, model: str) -> dict[str, Any]:
    """Merge patch that lets a sample run here: vLLM's environment and the model are folders of this machine."""
    folders = {"venv": envs.engine().path}
    if (base := envs.engine_base_prefix()) is not None:
        folders["python"] = base
    return {
        "spec": {
            "model": {"source": {"huggingFace": None, "hostPath": {"path": str(models.ensure(model))}}},
            "engine": {
                "image": engine_image,
                "volumeMounts": [{"name": n, "mountPath": str(f), "readOnly": True} for n, f in folders.items()],
            },
            "scheduling": {
                "podTemplate": {
                    "volumes": [{"name": n, "hostPath": {"path": str(f)}} for n, f in folders.items()],
                }
            },
        }
    }


def merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396, for putting several changes into one patch (nulls are kept: they delete when applied)."""
    result = dict(base)
    for name, value in patch.items():
        old = result.get(name)
        result[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def wait_ready(kube: Kube, name: str, timeout: float = 600) -> float:
    """Seconds until the pipeline's newest generation is Ready; shows what it is waiting for."""
    state: dict[str, Any] = {}

    def ready() -> bool:
        state.update(kube.get("prefillpipeline", name))
        entry = condition(state, "Ready")
        current = entry.get("observedGeneration") == state["metadata"]["generation"]
        return bool(current and entry["status"] == "True")

    def detail() -> str:
        entry = condition(state, "Ready")
        return f"{entry['reason']} {entry['message']}".strip()

    return kube.wait(f"pipeline {name} Ready", ready, timeout, detail)
