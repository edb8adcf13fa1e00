"""Killed engines leave shared memory behind; what a process group maps can be unlinked before it is killed."""

from __future__ import annotations

import os
from pathlib import Path

SHM = Path("/dev/shm")


def unlink_of_group(group: int) -> list[str]:
    """Remove the files in /dev/shm that processes of ``group`` map; their mappings live on.

    By inode: a semaphore is mapped under the name it had before it was linked to its own.
    """
    inodes: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        inodes.update(int(line.split()[4]) for line in lines if f"{SHM}/" in line)
    with os.scandir(SHM) as files:
        names = [file.name for file in files if file.inode() in inodes]
    for name in names:
        (SHM / name).unlink(missing_ok=True)
    return sorted(names)
