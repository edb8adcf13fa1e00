"""``additional_config.prefill``: all that the agent tells the plugin (contract 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.scheduler.order import usual_lag
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "prefill"


class PrefillSettings(BaseModel):
    """One engine's settings, the same in each of its processes."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    policy: Literal["Auto", "Planned", "Dynamic", "Fixed", "TokenThrottle", "TeraPipe", "Seq1F1B"]
    max_tokens: int = Field(gt=0, description="largest chunk, and the size Dynamic takes its target time from")
    min_tokens: int = Field(gt=0)
    smoothing_factor: float = Field(gt=0, le=1)
    # Unchecked here: a calibration that cannot be used means Fixed chunks, not an engine that does not start.
    calibration: Any = None
    telemetry_socket: str | None = None
    profiling: bool = Field(default=False, description="requests may carry their own chunk list")
    virtual_stages: Literal[1, 2] = 1
    layer_partition: tuple[int, ...] = Field(default=(), description="layers by virtual stage; empty: divided evenly")
    fold_lag: int | None = Field(default=None, ge=0, le=1, description="heads that a tail runs later than need be")
    fold_blocking: bool = Field(default=False, description="senders wait for their receivers, as in vanilla VPP")
    fold_packing: bool = Field(default=True, description="a prompt's heads may run while the one before drains")
    allow_untested_engine: bool = False
    emulate: dict[str, Any] | None = Field(default=None, description="a cost file: passes take its time (emulation.py)")

    def lag(self, ranks: int) -> int:
        """Of the ranks' order, where they are folded."""
        return usual_lag(ranks) if self.fold_lag is None else self.fold_lag

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> PrefillSettings:
        """The settings of a running engine; SettingsError when they are missing or wrong."""
        config = vllm_config.additional_config
        section = config.get(KEY) if isinstance(config, dict) else None
        if section is None:
            raise SettingsError(
                "additional_config has no 'prefill' section, which this scheduler and worker class need: pass "
                '--additional-config \'{"prefill": {"policy": "Fixed", "maxTokens": 2048, "minTokens": 256, '
                '"smoothingFactor": 1.0}}\', or start vLLM without --scheduler-cls and --worker-cls'
            )
        try:
            return cls.model_validate(section)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in e['loc']) or 'section'}: {e['msg']}, got {e['input']!r:.80}"
                for e in error.errors(include_url=False)
            )
            raise SettingsError(f"additional_config.prefill cannot be used: {problems}") from None
