"""Engine options that would replace this scheduler, go around it, or make its chunk sizes impossible: refused at the
start by name, since most of them would otherwise be in force without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prefill_runtime.engine.errors import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Keys of vllm-ascend, at the top of additional_config or, in later releases, below its scheduler_config.
_SWITCHES = ("enable_balance_scheduling", "recompute_scheduler_enable")
_SECTIONS = ("profiling_chunk_config", "short_request_first_config", "batch_job_sched_config", "dyntra_lb_config")
_LIMITS = "SLO_limits_for_dynamic_batch"
_BALANCE = "VLLM_ASCEND_BALANCE_SCHEDULING"


def check_options(vllm_config: VllmConfig) -> None:
    """SettingsError with the first option that cannot be used with this scheduler, and the remedy."""
    scheduler = vllm_config.scheduler_config
    if scheduler.async_scheduling:
        raise SettingsError("this scheduler needs --no-async-scheduling: it decides on the true state of each step")
    if not scheduler.enable_chunked_prefill:
        raise SettingsError("this scheduler needs --enable-chunked-prefill: without it no prompt may be cut")
    parallel = getattr(scheduler, "max_num_partial_prefills", 1)
    if parallel > 1:
        raise SettingsError(
            f"--max-num-partial-prefills is {parallel}, but this scheduler computes one prompt after the other: "
            "leave it out or set it to 1"
        )
    for option in _of_ascend(vllm_config.additional_config):
        raise SettingsError(
            f"{option} replaces the scheduler that additional_config.prefill configures: remove it, or start without "
            "--scheduler-cls and --worker-cls (chunking.policy EngineNative)"
        )


def _of_ascend(config: Any) -> Iterator[str]:
    config = config if isinstance(config, dict) else {}
    for path, section in (("additional_config", config), ("additional_config.scheduler_config", _nested(config))):
        for name in _SWITCHES:
            if section.get(name):
                yield f"{path}.{name}"
        for name in _SECTIONS:
            theirs = section.get(name)
            if isinstance(theirs, dict) and theirs.get("enabled"):
                yield f"{path}.{name}"
        if section.get(_LIMITS, -1) != -1:
            yield f"{path}.{_LIMITS}"
    # The key wins over the variable.
    if "enable_balance_scheduling" not in config and os.environ.get(_BALANCE, "0") not in ("", "0"):
        yield f"the environment variable {_BALANCE}"


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("scheduler_config")
    return nested if isinstance(nested, dict) else {}
