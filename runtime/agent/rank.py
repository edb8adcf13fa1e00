"""What the profile step and the serve step of a rank have in common: the group, the engine and its telemetry.

The first cause that ends a rank wins; everything after it is a consequence.
"""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path

from prefill_runtime.agent.command import engine_command, engine_environment
from prefill_runtime.agent.config import EndReason
from prefill_runtime.agent.group import Follower, GroupEndedError, Leader, make_group
from prefill_runtime.agent.membership import GroupEnd, Message, Step
from prefill_runtime.agent.settings import BadConfigurationError, Settings
from prefill_runtime.agent.supervisor import Engine, adopt_orphans, describe_exit
from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.telemetry import socket as telemetry_socket
from prefill_runtime.telemetry.events import Pass
from prefill_runtime.telemetry.hub import Hub

STOP_SECONDS = 2.0


@dataclass(frozen=True)
class End:
    reason: EndReason
    message: str
    output: str = ""
    """The end of the engine's output, where it explains something."""
    group: GroupEnd | None = None

    @property
    def words(self) -> str:
        return f"{self.message}; the engine's last output:\n{self.output}" if self.output else self.message


def from_group(end: GroupEnd) -> End:
    return End(end.reason, end.message, group=end)


class EndedError(Exception):
    def __init__(self, end: End) -> None:
        super().__init__(end.message)
        self.end = end


class Rank:
    def __init__(self, settings: Settings, step: Step) -> None:
        self.settings = settings
        self.ending: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.terminated = asyncio.Event()
        stages = settings.config.engine.pipeline
        first = settings.rank * stages // settings.config.group.pods
        least = settings.config.chunking.min_tokens
        self.hub = Hub(first, stages, settings.leads, least_chunk=least, on_pass=self.passed)
        self.engine = Engine()
        self.group: Leader | Follower = make_group(settings, step, self)
        self.group.ended.add_done_callback(self._group_ended)
        self._telemetry: telemetry_socket.Server | None = None

    # --- beats ---

    def outgoing(self) -> Message:
        if self.settings.leads:
            return {"ready": self.ready_reason() is None, "idle": self.hub.pipeline_idle()}
        return {"engine": self.engine.running, "telemetry": self.hub.drain_for_leader()}

    def incoming(self, rank: int, message: Message) -> None:
        if self.settings.leads:
            ahead = self.group.peers()[rank].clock.seconds
            self.hub.feed_remote(rank, message.get("telemetry") or [], -(ahead or 0.0))
        elif message.get("idle"):
            self.hub.set_pipeline_idle(*message["idle"])

    def passed(self, record: Pass, ahead: float) -> None:
        """A pass of any rank that this agent knows of; ``ahead``: how far its clock is ahead of this one."""

    def ready_reason(self) -> str | None:
        """None when this rank is ready, else why it is not."""
        return "not serving"

    # --- life ---

    def end(self, end: End) -> None:
        if not self.ending.done():
            self.ending.set_result(end)

    def blame_engine(self, reason: EndReason, message: str) -> End:
        error, output = self.engine.testimony()
        if "UnsupportedEngineError" in error + output:
            reason = EndReason.UNSUPPORTED_ENGINE
        return End(reason, f"{message}: {error}" if error else message, output)

    def _group_ended(self, ended: asyncio.Future[GroupEnd]) -> None:
        if not ended.cancelled():
            self.end(from_group(ended.result()))

    async def until_ended(self, *work: asyncio.Task[None]) -> End:
        """Wait for the first cause to end; ``work`` that fails is one, work that returns is not."""
        waiting: set[asyncio.Future[End] | asyncio.Task[None]] = {self.ending, *work}
        try:
            while not self.ending.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task is not self.ending:
                        self._judge(task.exception())
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        return self.ending.result()

    def _judge(self, error: BaseException | None) -> None:
        match error:
            case None:
                pass
            case EndedError():
                self.end(error.end)
            case GroupEndedError():
                self.end(from_group(error.end))
            case BadConfigurationError():
                self.end(End(EndReason.BAD_CONFIGURATION, str(error)))
            case _:
                traceback.print_exception(error)
                self.end(End(EndReason.AGENT_FAILED, f"the agent failed: {error!r}"))

    def listen_for_signals(self) -> None:
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.terminated.set)

    async def form_group(self, seconds: float) -> None:
        """Wait for the others, at most ``seconds``."""
        try:
            await asyncio.wait_for(self.group.form(), seconds)
        except TimeoutError:
            if isinstance(self.group, Leader):
                missing = ", ".join(map(str, self.group.members.missing))
                message = f"rank {missing} did not join within {seconds:.0f} s; are all pods of the group scheduled?"
            else:
                message = f"rank 0's agent did not let this rank join within {seconds:.0f} s"
            raise EndedError(End(EndReason.PEER_LOST, message)) from None

    def check_model(self) -> None:
        path = Path(self.settings.config.engine.model_path)
        if path.is_absolute() and not (path / "config.json").is_file():
            what = "has no config.json" if path.is_dir() else "does not exist"
            message = f"model folder {path} {what}; check spec.model.source"
            raise EndedError(End(EndReason.MODEL_NOT_FOUND, message))

    async def start_engine(self, *, profiling: bool = False, calibration: CalibrationDocument | None = None) -> None:
        settings = self.settings
        socket = settings.places.telemetry_socket
        socket.parent.mkdir(parents=True, exist_ok=True)
        self._telemetry = await telemetry_socket.serve(socket, self.hub.feed, self.hub.decoder)
        command = engine_command(
            settings.config,
            settings.rank,
            telemetry_socket=str(socket),
            profiling=profiling,
            calibration=calibration,
        )
        environment = os.environ | engine_environment(settings.config, os.environ, self.group.address)
        print("prefill-agent: starting", " ".join(command), flush=True)
        try:
            self.engine.start(command, environment)
        except OSError as error:
            message = f"{command[0]} cannot be started: {error.strerror}; does the image hold vLLM?"
            raise EndedError(End(EndReason.ENGINE_EXITED, message)) from None
        self.engine.exited.add_done_callback(self._engine_exited)

    def tell_engine(self, wire: Message) -> None:
        """The scheduler process, also one that comes up later."""
        if self._telemetry is not None:
            self._telemetry.tell("scheduler", wire)

    def _engine_exited(self, exited: asyncio.Future[int]) -> None:
        if not exited.cancelled() and not self.ending.done():
            how = describe_exit(exited.result())
            self.end(self.blame_engine(EndReason.ENGINE_EXITED, f"the engine ended by itself ({how})"))

    async def wind_up(self, bye: Message) -> None:
        """Tell the others first, so that they learn the cause before they feel the consequence."""
        await self.group.close(bye)
        await self.engine.stop(STOP_SECONDS)
        if self._telemetry is not None:
            await self._telemetry.close()
