"""One run at a time: a file lock that the kernel drops with its holder, however that ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster.console import progress

RUN_LOCKS = Path("/run/lock")


@contextmanager
def exclusive(path: Path, waiting_for: str) -> Iterator[None]:
    """Holds the lock file; removes it at the end, so nothing is left on the machine.

    A waiter may hold a file that its former owner has just removed: it then no longer is the file at this path, and the
    waiter tries again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for {waiting_for} of another run")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def cluster_lock(name: str) -> Path:
    return RUN_LOCKS / f"prefill-operator-{name}.lock"
