"""Cost files: a ``PipelineCost`` as JSON.

    {"form": "stage", "model": {"k0": s, "k1": s/token, "k2": s/token^2, "k3": s/token}, "pass_overhead_s": s,
     "shares": [..] or null, "transfer": {"latency_s": s, "seconds_per_token": s}}

Forms: stage (k0..k3), quadratic and history (a, b, c). Everything but form and model may be left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.scheduler.cost import (
    CostModel,
    HistoryModel,
    PipelineCost,
    QuadraticModel,
    StageModel,
    TransferModel,
)
from prefill_runtime.scheduler.errors import ParameterError

_FORMS: dict[str, type[StageModel] | type[QuadraticModel] | type[HistoryModel]] = {
    "stage": StageModel,
    "quadratic": QuadraticModel,
    "history": HistoryModel,
}
_OPTIONAL = {"k3", "c"}


def parse_cost(text: str) -> PipelineCost:
    """Read a cost file; ParameterError names the field that is wrong."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ParameterError("cost file", f"not JSON ({error})", "a JSON object") from None
    data = _object("cost file", data, {"form", "model"}, {"pass_overhead_s", "shares", "transfer"})
    form = data["form"]
    if form not in _FORMS:
        raise ParameterError("form", repr(form), " | ".join(_FORMS))
    kind = _FORMS[form]
    fields = set(kind.__dataclass_fields__)
    terms = _object("model", data["model"], fields - _OPTIONAL, fields & _OPTIONAL)
    model = kind(**{name: _number(f"model.{name}", value) for name, value in terms.items()})
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


def dump_cost(cost: PipelineCost) -> str:
    """The cost file of ``cost``."""
    form = next(name for name, kind in _FORMS.items() if isinstance(cost.model, kind))
    model: Any = cost.model
    data = {
        "form": form,
        "model": asdict(model),
        "pass_overhead_s": cost.pass_overhead_s,
        "shares": list(cost.shares) if cost.shares is not None else None,
        "transfer": asdict(cost.transfer),
    }
    return json.dumps(data, indent=2)


def from_calibration(document: CalibrationDocument) -> PipelineCost:
    """A whole pipeline's cost from its stages' measured coefficients.

    The model is the stages' sum and shares are their parts of the target; exact when stages differ by a factor only.
    """
    stages = [QuadraticModel(s.coefficients.a, s.coefficients.b, s.coefficients.c) for s in document.stages]
    whole = QuadraticModel(*(sum(getattr(s, name) for s in stages) for name in ("a", "b", "c")))
    base = float(document.base_tokens)
    total = whole.pass_seconds(base, 0.0)
    model: CostModel = StageModel.from_quadratic(whole)
    return PipelineCost(model, shares=tuple(s.pass_seconds(base, 0.0) / total for s in stages))


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
