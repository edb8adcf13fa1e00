"""The calibration ConfigMap: the exact document for the operator, and the same in words for people."""

from __future__ import annotations

from datetime import datetime

from prefill_operator.api.types import API_VERSION, KIND, Retention
from prefill_operator.desired import names
from prefill_operator.desired.life import timestamp
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_runtime.profiling.document import (
    CalibrationDocument,
    CalibrationError,
    PublishedCoefficients,
    load_calibration,
)

DOCUMENT, PREVIOUS = "calibration.json", "previous.json"
# Names of the pipelines that want it to stay. It has owners only while there are none.
RETAINED_BY = "prefill.dev/retained-by"
# How many documents this ConfigMap has held, and when the present one was written.
REVISION, WRITTEN_AT = "prefill.dev/revision", "prefill.dev/written-at"

README = """\
Measured cost of prefill chunks, written by prefill-operator. Pipelines of this namespace with the same key start
from it instead of profiling. Do not edit. To measure again, set spec.suspend of the pipelines that use it to true,
delete this ConfigMap and set suspend to false; while a pipeline runs, a deleted one comes back.

form          seconds that a stage takes for a chunk of C tokens after H tokens of the same prompt
coefficients  k0 to k3 of every pipeline stage, first stage first: k0 of any pass, k1 of a token of the chunk,
              k2 of a pair of tokens in attention, k3 of a token of history
overhead      seconds between two passes of a busy stage, which every chunk pays besides
published     the forms of the policies that are defined by them, fitted to the slowest stage, with a, b and c.
              quadratic: a prompt of l tokens takes f(l) = a l^2 + b l + c. history: a chunk takes
              f(C, H) = a C (C + H) + b (C + H) + c; missing where the samples contradict it
target        seconds that a full first chunk takes beyond its constant part, which Dynamic keeps for every chunk
r2            R^2, the share of the variance of the samples that the fit explains, of the worst stage; 1 is perfect
sampleCount   measured points (chunk size and history) behind the fit, over all stages
key           hash of everything that would make the measurement worthless when it changes: model and its source, types,
              engine image and arguments, accelerator, parallelism, chunk and context limits, runtime version
schemaVersion version of the format of calibration.json
model         model it was measured with
source        Profile: measured before the first start. Online: refined from real traffic
createdAt     when it was measured
calibration.json  the document itself, with quantiles of the relative error and versions
previous.json     the document before this one, used when calibration.json cannot be read
"""


def read(text: str, pipeline: Pipeline) -> CalibrationDocument:
    """The document if it is one of this pipeline. Raises CalibrationError."""
    return load_calibration(text, pipeline.calibration_key, pipeline.spec.parallelism.stages)


def calibration_map(
    pipeline: Pipeline, document: CalibrationDocument, observed: Manifest | None, now: datetime
) -> Manifest:
    metadata = observed["metadata"] if observed else {}
    result: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names.calibration_name(document.key),
            "namespace": pipeline.namespace,
            "labels": {
                "app.kubernetes.io/name": "prefill-calibration",
                names.LABEL_MANAGED_BY: names.MANAGER,
                names.LABEL_KEY: document.key,
            },
            "annotations": _annotations(pipeline, document, observed, now),
        },
        "data": _data(document) | _previous(pipeline, document, observed),
    }
    if observed and "resourceVersion" in metadata:
        # Pipelines with the same key share it: what another has just written is looked at first.
        result["metadata"]["resourceVersion"] = metadata["resourceVersion"]
    if not result["metadata"]["annotations"][RETAINED_BY]:
        owners = [owner for owner in metadata.get("ownerReferences", []) if owner["uid"] != pipeline.uid]
        mine = {"apiVersion": API_VERSION, "kind": KIND, "name": pipeline.name, "uid": pipeline.uid}
        result["metadata"]["ownerReferences"] = [*owners, mine]
    return result


def _annotations(
    pipeline: Pipeline, document: CalibrationDocument, observed: Manifest | None, now: datetime
) -> dict[str, str]:
    found = observed["metadata"].get("annotations", {}) if observed else {}
    retained = set(filter(None, found.get(RETAINED_BY, "").split(",")))
    if pipeline.spec.profiling.retention == Retention.RETAIN:
        retained.add(pipeline.name)
    else:
        retained.discard(pipeline.name)
    text = found.get(REVISION, "")
    revision, written = int(text) if text.isdecimal() else 0, found.get(WRITTEN_AT, "")
    if _text(observed) != document.to_json():
        revision, written = revision + 1, timestamp(now)
    return {
        "prefill.dev/description": "Measured cost of prefill chunks; the key README explains each field.",
        # Empty, not absent: an apply would leave what it does not name and somebody else has set.
        RETAINED_BY: ",".join(sorted(retained)),
        REVISION: str(max(1, revision)),
        WRITTEN_AT: written,
    }


def _text(observed: Manifest | None, name: str = DOCUMENT) -> str:
    data = (observed or {}).get("data") or {}
    return str(data.get(name, ""))


def _previous(pipeline: Pipeline, document: CalibrationDocument, observed: Manifest | None) -> dict[str, str]:
    """The last good one before ``document``, if there was any."""
    for name in (DOCUMENT, PREVIOUS):
        text = _text(observed, name)
        if name == DOCUMENT and text == document.to_json():
            continue
        try:
            read(text, pipeline)
        except CalibrationError:
            continue
        return {PREVIOUS: text}
    return {}


def _data(document: CalibrationDocument) -> dict[str, str]:
    lines = []
    for stage in document.stages:
        k = stage.coefficients
        lines.append(
            f"stage {stage.stage}: k0={k.k0:.6g} s, k1={k.k1:.6g} s/token, k2={k.k2:.6g} s/token^2, "
            f"k3={k.k3:.6g} s/token"
        )
    return {
        "README": README,
        "form": "k0 + k1 C + k2 C (H + C/2) + k3 H",
        "coefficients": "\n".join(lines),
        "overhead": f"{document.pass_overhead_seconds:.6g}",
        "published": _published(document),
        "target": f"{document.target_seconds:.6g} at {document.base_tokens} tokens",
        "r2": f"{document.r2:.4f}",
        "sampleCount": str(document.sample_count),
        "key": document.key,
        "schemaVersion": str(document.schema_version),
        "model": document.model,
        "source": document.source,
        "createdAt": document.created_at,
        DOCUMENT: document.to_json(),
    }


def _published(document: CalibrationDocument) -> str:
    def line(form: str, found: PublishedCoefficients) -> str:
        return f"{form}: a={found.a:.6g} s/token^2, b={found.b:.6g} s/token, c={found.c:.6g} s"

    forms = document.published
    lines = [line("quadratic", forms.quadratic)]
    if forms.history is not None:
        lines.append(line("history", forms.history))
    return "\n".join(lines)
