"""The engine step: PID 1 of a serving rank.

join -> launch -> (rank 0) health, warm request -> ready -> drain. Whatever breaks on the way ends the rank
within seconds and with last words; only a drained rank exits 0.
"""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from typing import Any

from prefill_runtime.agent.config import EndReason
from prefill_runtime.agent.control import Control
from prefill_runtime.agent.engine_api import EngineAnswerError, EngineApi
from prefill_runtime.agent.group import Follower, Leader
from prefill_runtime.agent.membership import BEAT_SECONDS, Message
from prefill_runtime.agent.online import make_refiner
from prefill_runtime.agent.rank import End, EndedError, Rank
from prefill_runtime.agent.settings import Settings, leave_last_words, write_atomically
from prefill_runtime.profiling.document import CalibrationDocument, CalibrationError, load_calibration
from prefill_runtime.telemetry.events import Pass

WARM_PROMPT = [1, 2, 3, 4]
QUIET_BEATS = 3 * BEAT_SECONDS
HEALTH_SECONDS = 2.0
DRAIN_RESERVE_SECONDS = 5.0
FOLLOWER_RESERVE_SECONDS = 3.0


class Phase(StrEnum):
    JOINING = "Joining"
    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    ENDING = "Ending"


class ServingRank(Rank):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, "serve")
        self.phase = Phase.JOINING
        self.calibration = self._load_calibration()
        self.hub.set_calibration(self.calibration)
        self._refiner = make_refiner(settings, self.calibration, self._refined, self.hub.set_drift)
        self._leader_ready = False
        self._deadline = time.monotonic() + settings.config.startup_seconds
        self._api = EngineApi(settings.config.group.engine_port, settings.config.engine.served_model_name)

    def _load_calibration(self) -> CalibrationDocument | None:
        if not self.settings.config.chunking.policy.calibrated:
            return None
        try:
            config = self.settings.config
            return load_calibration(self._calibration_text(), config.calibration_key, config.engine.stages)
        except FileNotFoundError:
            print("prefill-agent: no calibration; chunks stay Fixed until there is one", flush=True)
        except (OSError, UnicodeDecodeError, CalibrationError) as error:
            print(f"prefill-agent: calibration not usable, chunks stay Fixed: {error}", flush=True)
        return None

    def _calibration_text(self) -> str:
        try:
            return self.settings.places.calibration.read_text()
        except FileNotFoundError:
            # Where nothing is profiled, no earlier step has looked at the embedded one.
            if self.settings.config.profiling is None and self.settings.calibration:
                return self.settings.calibration
            raise

    def passed(self, record: Pass, ahead: float) -> None:
        if self._refiner is not None and self.phase == Phase.READY:  # before that the engine warms up
            self._refiner.passed(record, ahead)

    def _refined(self, document: CalibrationDocument) -> None:
        print(
            f"prefill-agent: refined calibration from {document.sample_count} passes: "
            f"median error {max(stage.relative_error_p50 for stage in document.stages):.1%}",
            flush=True,
        )
        self.calibration = document
        self.hub.set_calibration(document)
        self.tell_engine({"calibration": document.model_dump(mode="json", by_alias=True)})
        try:
            write_atomically(self.settings.places.calibration, document.to_json())
        except OSError as error:
            print(f"prefill-agent: refined calibration not written: {error}", flush=True)

    # --- state ---

    def incoming(self, rank: int, message: Message) -> None:
        super().incoming(rank, message)
        if rank == 0:
            self._leader_ready = message.get("ready") is True
            if self._leader_ready and self.phase == Phase.STARTING:
                self.phase = Phase.READY

    def ready_reason(self) -> str | None:
        if self.phase != Phase.READY:
            return f"phase {self.phase.value}"
        if self.ending.done():
            return self.ending.result().message.partition("\n")[0]
        for rank in self.group.peers():
            if (silence := self.group.silence_of(rank)) > QUIET_BEATS:
                return f"rank {rank} silent for {silence:.1f} s"
        if not self.settings.leads and not self._leader_ready:
            return "rank 0 is not ready"
        return None

    def status(self) -> dict[str, Any]:
        return {
            "rank": self.settings.rank,
            "pods": self.settings.config.group.pods,
            "incarnation": self.settings.incarnation,
            "session": self.group.session,
            "phase": self.phase.value,
            "notReady": self.ready_reason(),
            "enginePid": self.engine.pid if self.engine.running else None,
            "policy": self.settings.config.chunking.policy.value,
            "calibrated": self.calibration is not None,
            "peers": {
                str(rank): {
                    "silentSeconds": round(self.group.silence_of(rank), 3),
                    "clockOffsetSeconds": peer.clock.seconds,
                }
                for rank, peer in self.group.peers().items()
            },
        }

    # --- life ---

    async def live(self) -> End:
        self.listen_for_signals()
        control = Control(self)
        tasks = [asyncio.create_task(work) for work in (control.start(), self._rise(), self._fall())]
        if self._refiner is not None:
            tasks.append(asyncio.create_task(self._refiner.run()))
        try:
            end = await self.until_ended(*tasks)
        finally:
            self.phase = Phase.ENDING
            await self._api.close()
        await self.wind_up({"reason": end.reason.value, "message": end.message})
        await control.stop()
        return end

    async def _rise(self) -> None:
        self.check_model()
        await self.form_group(self._deadline - time.monotonic())
        self.phase = Phase.STARTING
        await self.start_engine(calibration=self.calibration)
        if not self.settings.leads:
            return
        try:
            await asyncio.wait_for(self._warm_up(), self._deadline - time.monotonic())
        except TimeoutError:
            message = f"not ready after {self.settings.config.startup_seconds} s"
            raise EndedError(self.blame_engine(EndReason.ENGINE_NEVER_READY, message)) from None
        if self.phase == Phase.STARTING:
            self.phase = Phase.READY
        await self._watch_health()

    async def _warm_up(self) -> None:
        await self._api.wait_until_up()
        try:
            await self._api.complete(WARM_PROMPT, "prefill-warm-up")
        except EngineAnswerError as error:
            message = f"the engine is up but does not answer: {error}"
            raise EndedError(self.blame_engine(EndReason.ENGINE_NEVER_READY, message)) from None

    async def _watch_health(self) -> None:
        """An engine that lost a worker may stay up and answer 503 for ever."""
        sick = 0
        while sick < 3:
            await asyncio.sleep(HEALTH_SECONDS)
            sick = sick + 1 if await self._api.health() == 503 else 0
        raise EndedError(self.blame_engine(EndReason.ENGINE_EXITED, "the engine says that it is broken (HTTP 503)"))

    # --- drain ---

    async def _fall(self) -> None:
        if isinstance(self.group, Leader):
            await self._fall_as_leader(self.group)
        else:
            await self._fall_as_follower(self.group)

    async def _fall_as_leader(self, group: Leader) -> None:
        signalled, left = asyncio.create_task(self.terminated.wait()), asyncio.create_task(group.leaving.wait())
        try:
            await asyncio.wait({signalled, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
            left.cancel()
        was_ready, self.phase = self.phase == Phase.READY, Phase.DRAINING
        if was_ready:
            await self._finish_requests()
        if self.terminated.is_set():
            raise EndedError(End(EndReason.DRAINED, "asked to end; no request was left"))
        who = ", ".join(map(str, sorted(group.who_leaves)))
        raise EndedError(End(EndReason.PEER_LOST, f"rank {who} was asked to end; running requests were finished first"))

    async def _finish_requests(self) -> None:
        deadline = time.monotonic() + max(0.0, self.settings.config.grace_seconds - DRAIN_RESERVE_SECONDS)
        # Endpoints of the Service lag behind: a request may still be on its way when we look first.
        quiet = 0
        while quiet < 3 and time.monotonic() < deadline:
            requests = await self._api.requests_in_work()
            if requests is None:  # an engine without statistics
                requests = self.hub.running_requests()
            quiet = quiet + 1 if requests == 0 else 0
            await asyncio.sleep(0.3)

    async def _fall_as_follower(self, group: Follower) -> None:
        await self.terminated.wait()
        launched, self.phase = self.phase in (Phase.STARTING, Phase.READY), Phase.DRAINING
        if launched:
            # The pipeline needs this stage until rank 0 has finished what is running.
            group.announce_leave()
            await asyncio.sleep(max(0.0, self.settings.config.grace_seconds - FOLLOWER_RESERVE_SECONDS))
        raise EndedError(End(EndReason.DRAINED, "asked to end"))


async def serve(settings: Settings) -> int:
    rank = ServingRank(settings)
    end = await rank.live()
    if rank.terminated.is_set() and end.group is not None and not settings.leads:
        end = End(EndReason.DRAINED, f"asked to end, then {end.message}")
    print(f"prefill-agent: rank {settings.rank} ends: {end.reason.value}: {end.message}", flush=True)
    if end.reason == EndReason.DRAINED:
        return 0
    leave_last_words(settings.places, end.reason, end.words, settings.rank)
    return 1
