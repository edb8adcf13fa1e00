"""Measuring a calibration: the ranks bring the real engine up, rank 0 samples it over HTTP and fits.

Every rank times its own passes; the followers' records come with their beats. Whatever breaks, rank 0 has a
typed refusal and all ranks end within seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import prefill_runtime
from prefill_runtime.agent.config import EndReason
from prefill_runtime.agent.engine_api import EngineAnswerError, EngineApi
from prefill_runtime.agent.membership import BEAT_SECONDS
from prefill_runtime.agent.rank import End, EndedError, Rank
from prefill_runtime.agent.settings import BadConfigurationError, Settings, shorten
from prefill_runtime.profiling.document import CalibrationDocument, Refusal, RefusalReason
from prefill_runtime.profiling.fitting import Sample, fit_document
from prefill_runtime.profiling.sampling import SamplingPlan, plan

PAGE_TOKENS = 16
SAMPLE, WARM_UP = "prefill-sample", "prefill-warm-up"
MEASURED = "Measured"
SEED = 20240229

Outcome = tuple[CalibrationDocument | None, Refusal | None]

_REFUSALS = {
    EndReason.PEER_LOST: RefusalReason.RANK_LOST,
    EndReason.INCARNATION_CHANGED: RefusalReason.RANK_LOST,
    EndReason.DRAINED: RefusalReason.RANK_LOST,
}


def measure(settings: Settings) -> Outcome | None:
    """None when this step was asked to end."""
    return asyncio.run(_measure(settings))


async def _measure(settings: Settings) -> Outcome | None:
    return await ProfilingRank(settings).live()


class ProfilingRank(Rank):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, "profile")
        assert settings.config.profiling is not None
        self.profiling = settings.config.profiling
        self.progress = "the ranks were coming together"
        self._outcome: Outcome | None = None
        self._samples: dict[tuple[int, int], Sample] = {}
        self._stages = settings.config.engine.pipeline
        self._api = EngineApi(settings.config.group.engine_port, settings.config.engine.served_model_name)

    async def live(self) -> Outcome | None:
        self.listen_for_signals()
        work = asyncio.create_task(self._rise())
        stop = asyncio.create_task(self._obey())
        try:
            end = await self.until_ended(work, stop)
        finally:
            await self._api.close()
        outcome = self._outcome or self._explain(end)
        await self.wind_up(self._farewell(outcome))
        return None if self.terminated.is_set() else outcome

    def _explain(self, end: End) -> Outcome:
        """What the end of this rank means for the calibration."""
        bye = end.group.bye if end.group else None
        if bye is not None and bye.get("reason") == MEASURED:
            return CalibrationDocument.model_validate_json(bye["calibration"]), None
        reason = _REFUSALS.get(end.reason, RefusalReason.ENGINE_FAILED)
        if bye is not None and bye.get("reason") in set(RefusalReason):
            reason = RefusalReason(bye["reason"])
        return None, Refusal(reason=reason, message=shorten(f"while {self.progress}: {end.message}", 1024))

    def _farewell(self, outcome: Outcome) -> dict[str, object]:
        document, refusal = outcome
        if document is not None:
            return {"reason": MEASURED, "calibration": document.to_json()}
        assert refusal is not None
        return {"reason": refusal.reason.value, "message": refusal.message}

    async def _obey(self) -> None:
        await self.terminated.wait()
        raise EndedError(End(EndReason.DRAINED, "asked to end"))

    async def _rise(self) -> None:
        self.check_model()
        await self.form_group(self.settings.config.startup_seconds)
        deadline = time.monotonic() + self.profiling.timeout_seconds
        self.progress = "the engine was starting"
        await self.start_engine(profiling=True)
        if self.settings.leads:
            self._outcome = await self._sample_and_fit(deadline)
            raise EndedError(End(EndReason.DRAINED, MEASURED))

    async def _sample_and_fit(self, deadline: float) -> Outcome:
        engine, tokens = self.settings.config.engine, self.settings.config.chunking.max_tokens
        plans = plan(
            tokens,
            self.profiling.samples,
            self.profiling.history_depths,
            engine.max_model_len,
            math.lcm(PAGE_TOKENS, engine.tensor),
        )
        try:
            await asyncio.wait_for(self._api.wait_until_up(), deadline - time.monotonic())
            done = await self._run(plans, deadline)
        except TimeoutError:
            return self._timed_out()
        if done < len(plans.prompts) // plans.repeats:
            return self._timed_out()
        await self._gather(sum(len(chunks) for chunks in plans.prompts[:done]))
        return self._fit()

    def _timed_out(self) -> Outcome:
        message = f"{self.profiling.timeout_seconds} s were over while {self.progress}; raise profiling.timeoutSeconds"
        return None, Refusal(reason=RefusalReason.TIMED_OUT, message=message)

    async def _run(self, plans: SamplingPlan, deadline: float) -> int:
        """Run warm-ups and prompts until ``deadline``; the number of prompts that were finished."""
        ids = random.Random(SEED)
        vocabulary = vocabulary_size(Path(self.settings.config.engine.model_path))
        named = [(f"{WARM_UP}-{i}", chunks) for i, chunks in enumerate(plans.warmups)]
        named += [(f"{SAMPLE}-{i}", chunks) for i, chunks in enumerate(plans.prompts)]
        done, told = 0, time.monotonic()
        for name, chunks in named:
            self.progress = f"prompt {done + 1} of {len(plans.prompts)} was running"
            prompt = [ids.randrange(vocabulary) for _ in range(sum(chunks))]
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._api.complete(prompt, name, chunks)
            except TimeoutError:
                return done
            except EngineAnswerError as error:
                raise EndedError(End(EndReason.ENGINE_EXITED, f"{error}\n{self.engine.tail()}")) from None
            done += name.startswith(SAMPLE)
            self._collect()
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"prefill-agent: profiling, {done} of {len(plans.prompts)} prompts done", flush=True)
        return done

    def _collect(self) -> None:
        for record in self.hub.passes():
            chunks = record.stamp.chunks
            if len(chunks) == 1 and SAMPLE in chunks[0].request:
                seconds = record.end - record.start
                self._samples[record.stage, record.stamp.batch] = (chunks[0].tokens, chunks[0].history, seconds)

    async def _gather(self, passes: int) -> None:
        """Wait for what is still on its way from the followers."""
        for _ in range(12):
            self._collect()
            if all(len(self._of_stage(stage)) >= passes for stage in range(self._stages)):
                return
            await asyncio.sleep(BEAT_SECONDS / 4)

    def _of_stage(self, stage: int) -> list[Sample]:
        return [sample for (of, _), sample in self._samples.items() if of == stage]

    def _fit(self) -> Outcome:
        config = self.settings.config
        fitted = fit_document(
            {stage: self._of_stage(stage) for stage in range(self._stages)},
            key=config.calibration_key,
            model=config.engine.served_model_name,
            base_tokens=config.chunking.max_tokens,
            engine_version=engine_version(),
            runtime_version=prefill_runtime.__version__,
            now=datetime.now(UTC),
        )
        return (None, fitted) if isinstance(fitted, Refusal) else (fitted, None)


def vocabulary_size(model: Path) -> int:
    """Raises BadConfigurationError."""
    try:
        config = json.loads((model / "config.json").read_text())
        return int(config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadConfigurationError(f"{model / 'config.json'} gives no vocabulary size: {error!r}") from None


def engine_version() -> str:
    try:
        return metadata.version("vllm")[:64]
    except metadata.PackageNotFoundError:
        return "unknown"
