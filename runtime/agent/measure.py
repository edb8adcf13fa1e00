"""Measuring a calibration: the ranks bring the real engine up, rank 0 samples it over HTTP and fits.

Every rank times its own passes; the followers' records come with their beats. Whatever breaks, rank 0 has a
typed refusal and all ranks end within seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import prefill_runtime
from prefill_runtime.agent.config import EndReason, RankConfig
from prefill_runtime.agent.engine_api import EngineAnswerError, EngineApi
from prefill_runtime.agent.membership import BEAT_SECONDS
from prefill_runtime.agent.rank import End, EndedError, Rank
from prefill_runtime.agent.settings import BadConfigurationError, Settings, shorten_json
from prefill_runtime.profiling.compose import Origin, fit_document
from prefill_runtime.profiling.document import MAX_STAGES, CalibrationDocument, Refusal, RefusalReason
from prefill_runtime.profiling.fitting import Sample
from prefill_runtime.profiling.overhead import Overhead
from prefill_runtime.profiling.sampling import MIN_ROUNDS, SamplingPlan, plan, settled
from prefill_runtime.scheduler.cost import NO_WINDOW, Attention
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import layout_of
from prefill_runtime.telemetry.events import Pass

PAGE_TOKENS = 16
SAMPLE, WARM_UP, FILLER, LONE = "prefill-sample", "prefill-warm-up", "prefill-filler", "prefill-lone"
WAITING = 8  # prompts in the engine's queue: what comes next is there before a rank is free
EXTRA_ROUNDS = 3  # on a noisy machine more repeats find a quiet moment
MEASURED = "Measured"
HUB_VOCABULARY = 1000  # a model that the engine fetches itself shows no files here; any tokenizer has that many
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


class Samples:
    """The passes of the sampled prompts, of all ranks.

    One sample per point: interference only ever adds time, so the quickest repeat is nearest to the cost.
    """

    def __init__(self) -> None:
        self.absurd = 0
        self._heard: Counter[int] = Counter()
        self._quickest: dict[int, dict[tuple[int, int], float]] = {}

    def add(self, record: Pass, longest: float) -> None:
        (chunk,), seconds = record.stamp.chunks, record.end - record.start
        self._heard[record.stage] += 1
        if not 0 < seconds <= longest:  # a clock jumped
            self.absurd += 1
            return
        points, point = self._quickest.setdefault(record.stage, {}), (chunk.tokens, chunk.history)
        points[point] = min(seconds, points.get(point, math.inf))

    def heard(self, stage: int) -> int:
        return self._heard[stage]

    def quickest(self) -> dict[tuple[int, int, int], float]:
        return {(stage, *at): seconds for stage, points in self._quickest.items() for at, seconds in points.items()}

    def of_stage(self, stage: int) -> list[Sample]:
        return [(tokens, history, seconds) for (tokens, history), seconds in self._quickest.get(stage, {}).items()]


class ProfilingRank(Rank):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, "profile")
        assert settings.config.profiling is not None
        self.profiling = settings.config.profiling
        self.progress = "the ranks were coming together"
        self._outcome: Outcome | None = None
        self._asked, self._passes, self._told = 0, 0, -math.inf
        self._ids = random.Random(SEED)
        self._vocabulary = 0
        engine = settings.config.engine
        layout = layout_of(engine.pipeline, engine.virtual)
        self._stages = layout.stages
        self._samples, self._overhead = Samples(), Overhead(layout)
        self._plan: SamplingPlan
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
            if not self.settings.leads:
                return None, Refusal(reason=reason, message=str(bye.get("message", ""))[:1024])
        return None, Refusal(reason=reason, message=shorten_json(f"while {self.progress}: {end.words}", 1024))

    def _farewell(self, outcome: Outcome) -> dict[str, object]:
        document, refusal = outcome
        if document is not None:
            return {"reason": MEASURED, "calibration": document.to_json()}
        assert refusal is not None
        return {"reason": refusal.reason.value, "message": refusal.message}

    async def _obey(self) -> None:
        await self.terminated.wait()
        raise EndedError(End(EndReason.DRAINED, "asked to end"))

    def _impossible(self) -> Refusal | None:
        """Also sets the plan. What every rank knows before anything is started."""
        engine, tokens = self.settings.config.engine, self.settings.config.chunking.max_tokens
        if self._stages > MAX_STAGES:
            message = f"{self._stages} stages, but a calibration has room for {MAX_STAGES}"
            return Refusal(reason=RefusalReason.TOO_MANY_STAGES, message=message)
        align = math.lcm(PAGE_TOKENS, engine.tensor)
        try:
            self._plan = plan(
                tokens, self.profiling.samples, self.profiling.history_depths, engine.max_model_len, align
            )
        except ParameterError as error:
            message = f"nothing can be sampled in units of {align} tokens: {error}"
            return Refusal(reason=RefusalReason.TOO_FEW_SAMPLES, message=message)
        return None

    async def _rise(self) -> None:
        if refusal := self._impossible():
            self._outcome = None, refusal
            raise EndedError(End(EndReason.DRAINED, refusal.message))
        self.check_model()
        self._vocabulary = vocabulary_size(Path(self.settings.config.engine.model_path))
        await self.form_group(self.settings.config.startup_seconds)
        deadline = time.monotonic() + self.profiling.timeout_seconds
        self.progress = "the engine was starting"
        await self.start_engine(profiling=True)
        if self.settings.leads:
            self._outcome = await self._sample_and_fit(deadline)
            raise EndedError(End(EndReason.DRAINED, MEASURED))

    async def _sample_and_fit(self, deadline: float) -> Outcome:
        try:
            await asyncio.wait_for(self._api.wait_until_up(), deadline - time.monotonic())
        except TimeoutError:
            return self._timed_out()
        warm_ups = [(WARM_UP, chunks) for chunks in self._plan.warmups]
        if not await self._run(warm_ups, deadline) or not await self._round(deadline):
            return self._timed_out()
        return await self._repeat(deadline)

    async def _round(self, deadline: float) -> bool:
        """All samples once, with as much before and behind them as keeps every rank at work while any of them runs,
        and the lone prompt, twice: a period is known to be over when the next one begins.
        """
        samples, others = self._plan.prompts, self._stages - 1
        before, behind = [(FILLER, samples[0])] * others, [(FILLER, samples[-1])] * others
        if not await self._run([*before, *((SAMPLE, chunks) for chunks in samples), *behind], deadline):
            return False
        return all([await self._run([(LONE, self._plan.lone)], deadline) for _ in range(2)])

    async def _repeat(self, deadline: float) -> Outcome:
        """Rounds until the samples are settled and give a fit, or time is over."""
        rounds, poor = 1, 0
        await self._gather()
        if not all(map(self._samples.heard, range(self._stages))):
            return await self._fit()  # which says what is missing
        while True:
            before = self._samples.quickest()
            await self._round(deadline)
            rounds += 1
            await self._gather()
            over = time.monotonic() >= deadline
            if not over and (rounds < MIN_ROUNDS or not settled(before, self._samples.quickest())):
                continue
            outcome = await self._fit()
            if over or outcome[1] is None or outcome[1].reason != RefusalReason.POOR_FIT or poor == EXTRA_ROUNDS:
                return outcome
            poor += 1
            print(f"prefill-agent: another round of samples, since {outcome[1].message}", flush=True)

    def _timed_out(self) -> Outcome:
        message = f"{self.profiling.timeout_seconds} s were over while {self.progress}; raise profiling.timeoutSeconds"
        return None, Refusal(reason=RefusalReason.TIMED_OUT, message=message)

    async def _run(self, prompts: Sequence[tuple[str, Sequence[int]]], deadline: float) -> bool:
        """Run ``prompts``, in that order and without a pause between them; whether all of them ended in time.

        The ranks of a pipeline in use all work at once. Where they share a host that slows them down, so a pass is
        timed while the other ranks are at work.
        """
        self._progress(0, prompts)
        queue, ended = iter(prompts), itertools.count(1)

        async def work() -> None:
            for name, chunks in queue:
                await self._complete(name, chunks)
                self._progress(next(ended), prompts)

        tasks = [asyncio.create_task(work()) for _ in range(self._stages + WAITING)]
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.gather(*tasks)
        except TimeoutError:
            return False
        except EngineAnswerError as error:
            raise EndedError(self.blame_engine(EndReason.ENGINE_EXITED, str(error))) from None
        finally:
            for task in tasks:
                task.cancel()
        return True

    async def _complete(self, name: str, chunks: Sequence[int]) -> None:
        self._asked += 1
        tokens = [self._ids.randrange(self._vocabulary) for _ in range(sum(chunks))]
        await self._api.complete(tokens, f"{name}-{self._asked}", chunks)
        if name == SAMPLE:
            self._passes += len(chunks)

    def _progress(self, ended: int, prompts: Sequence[tuple[str, Sequence[int]]]) -> None:
        name = prompts[min(ended, len(prompts) - 1)][0]
        self.progress = f"{name} {ended + 1} of {len(prompts)} was running"
        if time.monotonic() - self._told > 10:
            self._told = time.monotonic()
            print(f"prefill-agent: profiling, {ended} of {len(prompts)} prompts done", flush=True)

    def passed(self, record: Pass, ahead: float) -> None:
        """``ahead``: how far the clock of the pass is ahead of this agent's, in seconds."""
        stamp, prompts = record.stamp, [chunk.request for chunk in record.stamp.chunks]
        if not 0 <= record.stage < self._stages:
            return
        if len(prompts) == 1 and SAMPLE in prompts[0]:
            self._samples.add(record, self.profiling.timeout_seconds)
        self._overhead.add(record.stage, stamp.period, stamp.batch, prompts, record.start - ahead, record.end - ahead)

    async def _gather(self) -> None:
        """Wait for what is still on its way from the followers."""
        for _ in range(12):
            if all(self._samples.heard(stage) >= self._passes for stage in range(self._stages)):
                return
            await asyncio.sleep(BEAT_SECONDS / 4)

    async def _fit(self) -> Outcome:
        fitted = await asyncio.to_thread(  # many stages take seconds, in which this rank must not fall silent
            fit_document,
            {stage: self._samples.of_stage(stage) for stage in range(self._stages)},
            origin_of(self.settings.config),
            datetime.now(UTC),
            pass_overhead_seconds=self._overhead.seconds() or 0.0,
        )
        if self._samples.absurd:
            print(f"prefill-agent: {self._samples.absurd} passes with impossible times were left out", flush=True)
        return (None, fitted) if isinstance(fitted, Refusal) else (fitted, None)


def vocabulary_size(model: Path) -> int:
    """Raises BadConfigurationError."""
    if not model.is_absolute():
        return HUB_VOCABULARY
    try:
        return int(text_config(model)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadConfigurationError(f"{model / 'config.json'} gives no vocabulary size: {error!r}") from None


def text_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return config | text


def attention_of(model: Path) -> Attention:
    """Full where the configuration says nothing of a window, or cannot be read. Only the windows' size must be right: a
    fit that does not agree with the samples is not taken.
    """
    try:
        config = text_config(model)
        window, kinds = config.get("sliding_window"), config.get("layer_types") or []
        if not window or config.get("use_sliding_window") is False:
            return NO_WINDOW
        full = sum(kind == "full_attention" for kind in kinds) / len(kinds) if kinds else 0.0
        return Attention(int(window), full)
    except (OSError, ValueError, TypeError, AttributeError):
        return NO_WINDOW


def origin_of(config: RankConfig) -> Origin:
    return Origin(
        key=config.calibration_key,
        model=config.engine.served_model_name,
        base_tokens=config.chunking.max_tokens,
        engine_version=engine_version(),
        runtime_version=prefill_runtime.__version__,
        attention=attention_of(Path(config.engine.model_path)),
    )


def engine_version() -> str:
    try:
        return metadata.version("vllm")[:64]
    except metadata.PackageNotFoundError:
        return "unknown"
