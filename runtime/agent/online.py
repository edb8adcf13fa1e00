"""Online calibration of a serving replica, in rank 0's agent: all ranks' passes come here anyway, and nothing of the
arithmetic comes near the engine.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from datetime import UTC, datetime

from prefill_runtime.agent.measure import origin_of
from prefill_runtime.agent.settings import Settings
from prefill_runtime.profiling.document import MAX_STAGES, CalibrationDocument
from prefill_runtime.profiling.online import OnlineCalibration
from prefill_runtime.scheduler.layout import layout_of
from prefill_runtime.telemetry.events import Pass

FIRST_PAUSE, PAUSE = 0.5, 10.0
"""Seconds between two looks while there is no calibration, and once there is one."""

Found = Callable[[CalibrationDocument], None]


class Refiner:
    """Feeds passes to the calibration and publishes what it finds: ``found`` gets each better document, ``drifted`` how
    far the one in force is off.
    """

    def __init__(
        self,
        calibration: OnlineCalibration,
        found: Found,
        drifted: Callable[[float | None], None],
        pause: float = PAUSE,
    ) -> None:
        self.calibration = calibration
        self._found, self._drifted, self._pause = found, drifted, pause
        self._news = asyncio.Event()

    def passed(self, record: Pass, ahead: float) -> None:
        """``ahead``: how far the clock of the pass is ahead of this agent's."""
        stamp, prompts = record.stamp, [chunk.request for chunk in record.stamp.chunks]
        self.calibration.overhead.add(
            record.stage, stamp.period, stamp.batch, prompts, record.start - ahead, record.end - ahead
        )
        pieces = [(chunk.tokens, chunk.history) for chunk in stamp.chunks if chunk.prefill]
        self.calibration.add(record.stage, pieces, record.end - record.start, len(stamp.chunks) - len(pieces))
        if self.calibration.due:
            self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                document = await asyncio.to_thread(self.calibration.refine, datetime.now(UTC))
                self._drifted(await asyncio.to_thread(lambda: self.calibration.drift))
            except Exception:
                # Serving goes on with the calibration it has.
                traceback.print_exc()
                document = None
            if document is not None:
                self._found(document)
            await asyncio.sleep(self._pause if self.calibration.document is not None else FIRST_PAUSE)


def make_refiner(
    settings: Settings,
    document: CalibrationDocument | None,
    found: Found,
    drifted: Callable[[float | None], None],
) -> Refiner | None:
    """None where nothing is to be refined."""
    config = settings.config
    layout, base = layout_of(config.engine.pipeline, config.engine.virtual), config.chunking.max_tokens
    if not settings.leads or config.online_window is None:
        return None
    if not config.chunking.policy.calibrated or not 2 <= layout.stages <= MAX_STAGES:
        return None
    reach = max(0, config.engine.max_model_len - base)
    return Refiner(OnlineCalibration(origin_of(config), layout, config.online_window, document, reach), found, drifted)
