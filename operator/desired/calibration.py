"""The calibration ConfigMap: the exact document for the operator, and the same in words for people."""

from __future__ import annotations

from collections.abc import Iterable

from prefill_operator.api.types import API_VERSION, KIND, Retention
from prefill_operator.desired import names
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_runtime.profiling.document import CalibrationDocument

DOCUMENT = "calibration.json"
# Names of the pipelines that want it to stay. It has owners only while there are none.
RETAINED_BY = "prefill.dev/retained-by"

README = """\
Measured cost of prefill chunks, written by prefill-operator. Pipelines of this namespace with the same key start
from it instead of profiling. Do not edit. To measure again, set spec.suspend of the pipelines that use it to true,
delete this ConfigMap and set suspend to false; while a pipeline runs, a deleted one comes back.

form          how seconds depend on tokens. Quadratic: a prompt of l tokens takes a*l^2 + b*l + c seconds in a stage
coefficients  a, b and c of every pipeline stage, first stage first
r2            R^2, the share of the variance of the samples that the fit explains, of the worst stage; 1 is perfect
sampleCount   measured points (chunk size and history) behind the fit, over all stages
key           hash of everything that would make the measurement worthless when it changes: model and its source, types,
              engine image and arguments, accelerator, parallelism, chunk and context limits, runtime version
schemaVersion version of the format of calibration.json
model         model it was measured with
source        Profile: measured before the first start. Online: refined from real traffic
createdAt     when it was measured
calibration.json  the document itself, with quantiles of the relative error and versions
"""


def newest(documents: Iterable[CalibrationDocument]) -> CalibrationDocument | None:
    """The one to keep where replicas measured at the same time; the same one in every reconciliation."""
    return max(documents, key=lambda document: (document.created_at, document.to_json()), default=None)


def calibration_map(pipeline: Pipeline, document: CalibrationDocument, observed: Manifest | None) -> Manifest:
    metadata = observed["metadata"] if observed else {}
    retained = set(filter(None, metadata.get("annotations", {}).get(RETAINED_BY, "").split(",")))
    if pipeline.spec.profiling.retention == Retention.RETAIN:
        retained.add(pipeline.name)
    else:
        retained.discard(pipeline.name)
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
            "annotations": {
                "prefill.dev/description": "Measured cost of prefill chunks; the key README explains each field.",
                # Empty, not absent: an apply would leave what it does not name and somebody else has set.
                RETAINED_BY: ",".join(sorted(retained)),
            },
        },
        "data": _data(document),
    }
    if not retained:
        owners = [owner for owner in metadata.get("ownerReferences", []) if owner["uid"] != pipeline.uid]
        mine = {"apiVersion": API_VERSION, "kind": KIND, "name": pipeline.name, "uid": pipeline.uid}
        result["metadata"]["ownerReferences"] = [*owners, mine]
    return result


def _data(document: CalibrationDocument) -> dict[str, str]:
    lines = []
    for stage in document.stages:
        c = stage.coefficients
        lines.append(f"stage {stage.stage}: a={c.a:.6g} s/token^2, b={c.b:.6g} s/token, c={c.c:.6g} s")
    return {
        "README": README,
        "form": document.stages[0].form,
        "coefficients": "\n".join(lines),
        "r2": f"{document.r2:.4f}",
        "sampleCount": str(document.sample_count),
        "key": document.key,
        "schemaVersion": str(document.schema_version),
        "model": document.model,
        "source": document.source,
        "createdAt": document.created_at,
        DOCUMENT: document.to_json(),
    }
