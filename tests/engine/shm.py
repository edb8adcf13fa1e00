"""Killed engines leave shared memory behind; what a process group maps can be unlinked before it is killed."""

from __future__ import annotations

import os
from pathlib import Path

SHM = "/dev/shm/"


def unlink_of_group(group: int) -> list[str]:
    """Remove the names in /dev/shm that processes of ``group`` map; their mappings live on."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        names.update(line.split(SHM)[1] for line in lines if SHM in line and not line.endswith("(deleted)"))
    for name in names:
        Path(SHM, name).unlink(missing_ok=True)
    return sorted(names)
