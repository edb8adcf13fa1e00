"""Cost files: a ``PipelineCost`` as JSON.

    {"form": "stage", "model": {"k0": s, "k1": s/token, "k2": s/token^2, "k3": s/token}, "pass_overhead_s": s,
     "shares": [..] or null, "transfer": {"latency_s": s, "seconds_per_token": s}}

A model of form stage may have sliding windows: "attention": {"window": tokens, "full": share of layers without one}.
Forms: stage (k0..k3), quadratic and history (a, b, c); stages, whose model is a list with k0..k3 of each stage, not of
all layers. Everything but form and model may be left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TypeVar

from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.scheduler.cost import (
    Attention,
    CostModel,
    HistoryModel,
    PipelineCost,
    QuadraticModel,
    StagedModel,
    StageModel,
    TransferModel,
)
from prefill_runtime.scheduler.errors import ParameterError

_FORMS: dict[str, type[StageModel] | type[QuadraticModel] | type[HistoryModel]] = {
    "stage": StageModel,
    "quadratic": QuadraticModel,
    "history": HistoryModel,
}
Plain = TypeVar("Plain", bound=StageModel | QuadraticModel | HistoryModel)
_OPTIONAL = {"k3", "c", "attention"}


def parse_cost(text: str) -> PipelineCost:
    """Read a cost file; ParameterError names the field that is wrong."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ParameterError("cost file", f"not JSON ({error})", "a JSON object") from None
    data = _object("cost file", data, {"form", "model"}, {"pass_overhead_s", "shares", "transfer"})
    model = _model(data["form"], data["model"])
    transfer = _object("transfer", data.get("transfer") or {}, set(), {"latency_s", "seconds_per_token"})
    shares = data.get("shares")
    if shares is not None and not isinstance(shares, list):
        raise ParameterError("shares", repr(shares), "a list of numbers, one per stage, or null")
    return PipelineCost(
        model,
        _number("pass_overhead_s", data.get("pass_overhead_s", 0.0)),
        None if shares is None else tuple(_number(f"shares[{i}]", s) for i, s in enumerate(shares)),
        TransferModel(**{name: _number(f"transfer.{name}", value) for name, value in transfer.items()}),
    )


def _model(form: object, data: object) -> CostModel:
    if form == "stages":
        if not isinstance(data, list):
            raise ParameterError("model", repr(data)[:60], "a list with k0, k1, k2 of each stage")
        return StagedModel(tuple(_terms(StageModel, f"model[{i}]", stage) for i, stage in enumerate(data)))
    if not isinstance(form, str) or form not in _FORMS:
        raise ParameterError("form", repr(form), " | ".join([*_FORMS, "stages"]))
    return _terms(_FORMS[form], "model", data)


def _terms(kind: type[Plain], name: str, data: object) -> Plain:
    fields = set(kind.__dataclass_fields__)
    terms = _object(name, data, fields - _OPTIONAL, fields & _OPTIONAL)
    made: dict[str, Any] = {t: _number(f"{name}.{t}", value) for t, value in terms.items() if t != "attention"}
    if "attention" in terms:
        made["attention"] = _attention(f"{name}.attention", terms["attention"])
    return kind(**made)


def _attention(name: str, data: object) -> Attention:
    terms = {t: _number(f"{name}.{t}", x) for t, x in _object(name, data, {"window"}, {"full"}).items()}
    return Attention(round(terms["window"]), terms.get("full", 0.0))


def dump_cost(cost: PipelineCost) -> str:
    """The cost file of ``cost``."""
    model: Any = cost.model
    terms: Any
    if isinstance(model, StagedModel):
        form, terms = "stages", [_plain(stage) for stage in model.stages]
    else:
        form, terms = next(name for name, kind in _FORMS.items() if isinstance(model, kind)), _plain(model)
    data = {
        "form": form,
        "model": terms,
        "pass_overhead_s": cost.pass_overhead_s,
        "shares": list(cost.shares) if cost.shares is not None else None,
        "transfer": asdict(cost.transfer),
    }
    return json.dumps(data, indent=2)


def _plain(model: Any) -> dict[str, Any]:
    terms = asdict(model)
    if "attention" in terms and not model.attention.window:
        del terms["attention"]
    return terms


def from_calibration(document: CalibrationDocument) -> PipelineCost:
    """A whole pipeline's cost from its stages' measured coefficients."""
    return PipelineCost(StagedModel(tuple(map(StageModel.of, document.stages))), document.pass_overhead_seconds)


def _object(name: str, value: object, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ParameterError(name, repr(value)[:60], "a JSON object")
    for field in sorted(required - value.keys()):
        raise ParameterError(f"{name}.{field}", "missing", f"one of {', '.join(sorted(required | optional))}")
    for field in sorted(value.keys() - required - optional):
        raise ParameterError(f"{name}.{field}", "unknown", f"one of {', '.join(sorted(required | optional))}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(name, repr(value), "a number >= 0")
    return float(value)
