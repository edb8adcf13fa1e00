"""``prefill-agent install|profile|serve``: what the containers of a rank run.

Imports are made where they are needed: the profile step of a calibrated pipeline has to be over in an instant.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from prefill_runtime.agent.config import CONFIG_DIR, RUNTIME_DIR, STATE_DIR, EndReason
from prefill_runtime.agent.settings import (
    TERMINATION_LOG,
    BadConfigurationError,
    Places,
    leave_last_words,
    read_settings,
)


def main(arguments: Sequence[str] | None = None) -> int:
    # PID 1 has no default handlers: without this a pod deleted right now would sit out its grace period.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parsed = _parser().parse_args(arguments)
    if parsed.step == "install":
        from prefill_runtime.agent.install import install

        for path in install(parsed.destination):
            print(f"prefill-agent: installed {path}", flush=True)
        return 0
    places = Places(config=parsed.config, state=parsed.state, termination=parsed.termination)
    try:
        settings = read_settings(places)
    except BadConfigurationError as error:
        return _refuse(parsed.step, places, str(error))
    if parsed.step == "profile":
        from prefill_runtime.agent.profile import profile

        return profile(settings)
    import asyncio

    from prefill_runtime.agent.serve import serve

    return asyncio.run(serve(settings))


def _refuse(step: str, places: Places, message: str) -> int:
    print(f"prefill-agent: {message}", flush=True)
    if step == "profile":
        return 0  # serving will say the same, with last words that the operator reads
    leave_last_words(places, EndReason.BAD_CONFIGURATION, message, 0)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefill-agent", description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    install = steps.add_parser("install", help="copy the runtime package for a stock engine image")
    install.add_argument("destination", nargs="?", type=Path, default=RUNTIME_DIR)
    for name, text in (("profile", "reuse or measure the calibration"), ("serve", "run the engine of this rank")):
        step = steps.add_parser(name, help=text)
        step.add_argument("--config", type=Path, default=CONFIG_DIR, help="folder with the pod's annotations")
        step.add_argument("--state", type=Path, default=STATE_DIR, help="folder shared by the pod's containers")
        step.add_argument("--termination", type=Path, default=TERMINATION_LOG, help="termination message file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
