"""Options of vllm-ascend that replace the engine parts our policies work with, in Python and in CEL."""

from __future__ import annotations

import json

from .types import PrefillPipelineSpec

# Keys of additional_config that choose another scheduler or worker, each with the value that does not (None: it does by
# being there). scheduler_config and short_request_first_config are of releases after 0.23.
CONFIG: dict[str, bool | int | None] = {
    "SLO_limits_for_dynamic_batch": -1,
    "enable_balance_scheduling": False,
    "recompute_scheduler_enable": False,
    "scheduler_config": None,
    "short_request_first_config": None,
    "xlite_graph_config": None,
}
# The same by environment: another scheduler, and patches for another version than the one that is installed.
ENVIRONMENT: dict[str, str | None] = {"VLLM_ASCEND_BALANCE_SCHEDULING": "0", "VLLM_VERSION": None}
# Choose an executor whose ranks meet at the loopback address.
ONE_POD_ENVIRONMENT = {"DYNAMIC_EPLB": "false", "EXPERT_MAP_RECORD": "false"}


def switches(spec: PrefillPipelineSpec) -> list[str]:
    config = spec.engine.additional_config
    return [name for name, off in CONFIG.items() if name in config and config[name] != off] + _set(spec, ENVIRONMENT)


def one_pod_switches(spec: PrefillPipelineSpec) -> list[str]:
    return _set(spec, ONE_POD_ENVIRONMENT) if spec.pods_per_replica > 1 else []


def _set(spec: PrefillPipelineSpec, offs: dict[str, str | None] | dict[str, str]) -> list[str]:
    return [e.name for e in spec.engine.env if e.name in offs and (e.value is None or e.value != offs[e.name])]


def _cel_key(name: str, off: bool | int | None) -> str:
    field = f"self.engine.additionalConfig.{name}"
    on = f"has({field})" + ("" if off is None else f" && {field} != {json.dumps(off)}")
    return f"{on} ? '{name}' : ''"


def _cel_set(offs: dict[str, str | None] | dict[str, str]) -> str:
    found = " || ".join(
        f"e.name == '{name}'" + ("" if off is None else f" && !(has(e.value) && e.value == '{off}')")
        for name, off in offs.items()
    )
    return f"(has(self.engine.env) ? self.engine.env : []).filter(e, {found}).map(e, e.name)"


CEL_SWITCHES = (
    "((has(self.engine.additionalConfig) ? ["
    + ", ".join(_cel_key(name, off) for name, off in CONFIG.items())
    + f"] : []).filter(k, k != '') + {_cel_set(ENVIRONMENT)})"
)
CEL_ONE_POD_SWITCHES = (
    f"(self.parallelism.pipeline > self.parallelism.stagesPerPod ? {_cel_set(ONE_POD_ENVIRONMENT)} : [])"
)
