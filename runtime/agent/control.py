"""The control port of a rank: probes, state, metrics, calibration, timeline."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prefill_runtime.agent.settings import BadConfigurationError
from prefill_runtime.telemetry import svg, timeline

if TYPE_CHECKING:
    from prefill_runtime.agent.serve import ServingRank

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ELSEWHERE = "the timeline of the whole pipeline is kept by rank 0; ask its control port"


class Control:
    def __init__(self, rank: ServingRank) -> None:
        self._rank = rank
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/calibration", self._calibration)
        app.router.add_get("/timeline", self._timeline)
        app.router.add_get("/timeline.svg", self._timeline_svg)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)

    async def start(self) -> None:
        await self._runner.setup()
        port = self._rank.settings.config.group.control_port
        try:
            await web.TCPSite(self._runner, "0.0.0.0", port).start()
        except OSError as error:
            raise BadConfigurationError(f"control port {port} cannot be opened: {error.strerror}") from None

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        """The agent's loop runs. Says nothing about the engine: the agent judges that and ends with a reason."""
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._rank.ready_reason()
        return web.Response(text="ready\n") if reason is None else web.Response(status=503, text=f"{reason}\n")

    async def _status(self, _: web.Request) -> web.Response:
        return _json(self._rank.status())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._rank.hub.metrics_text(), headers={"Content-Type": METRICS_TYPE})

    async def _calibration(self, _: web.Request) -> web.Response:
        calibration = self._rank.calibration
        if calibration is None:
            return web.Response(status=404, text="no calibration is in use on this rank\n")
        return web.Response(text=calibration.to_json(), content_type="application/json")

    async def _timeline(self, _: web.Request) -> web.Response:
        if not self._rank.settings.leads:
            return web.Response(status=404, text=f"{ELSEWHERE}\n")
        make = self._rank.hub.timeline_snapshot()
        text = await asyncio.to_thread(lambda: timeline.to_json(make()))
        return web.Response(text=text, content_type="application/json")

    async def _timeline_svg(self, _: web.Request) -> web.Response:
        if not self._rank.settings.leads:
            return web.Response(status=404, text=f"{ELSEWHERE}\n")
        make = self._rank.hub.timeline_snapshot()
        text = await asyncio.to_thread(lambda: svg.render(make()))
        return web.Response(text=text, content_type="image/svg+xml")


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(text=json.dumps(document), content_type="application/json")
