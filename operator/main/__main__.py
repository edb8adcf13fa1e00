"""``prefill-operator``: the process in the operator's Deployment."""

from __future__ import annotations

import asyncio
import logging
import sys

from prefill_operator.main.settings import parse


def main() -> None:
    settings = parse(sys.argv[1:])
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # kopf tells each watch stream's restarts at INFO.
    logging.getLogger("kopf").setLevel(max(logging.getLevelName(settings.log_level), logging.WARNING))
    from prefill_operator.main.process import run

    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
