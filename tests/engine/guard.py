"""Runs a command and ends its whole process group when stdin closes, that is when the tests end or are killed.

``vllm serve`` needs it: when its server process is killed, its engine processes stay.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from tests.engine.shm import unlink_of_group


def end_group() -> None:
    unlink_of_group(os.getpgrp())
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    def wait() -> None:
        sys.stdin.read()
        end_group()

    threading.Thread(target=wait, daemon=True).start()
    return subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
