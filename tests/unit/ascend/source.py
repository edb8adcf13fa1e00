"""The source of vllm-ascend, as pip downloads it: its hash is checked, and it is read as text, never run."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from localcluster import envs
from localcluster.locks import exclusive
from localcluster.settings import cache_root

LOCK = envs.LOCKS / "vllm-ascend-0.23.0.post1.txt"
# pip asks every source distribution for its metadata by running its build; this back end hands over what lies in it.
BACK_END = """
import pathlib, re
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    about = pathlib.Path("PKG-INFO").read_text()
    name, version = (re.search(f"(?m)^{key}: (.+)$", about)[1] for key in ("Name", "Version"))
    info = pathlib.Path(folder, f"{name}-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(about)
    return info.name
"""


def folder() -> Path:
    """Where ``vllm_ascend`` and ``setup.py`` lie; downloaded once for each lock file."""
    content = hashlib.sha256(re.sub(rb"(?m)^ *#.*\n", b"", LOCK.read_bytes())).hexdigest()[:12]
    path = cache_root() / "sources" / f"vllm-ascend-{content}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.parent / "vllm-ascend.lock", "source of vllm-ascend"):
            if not path.exists():
                _make(path)
    return path


def _make(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".vllm-ascend-", dir=path.parent) as scratch:
        archive = _download(Path(scratch), path)
        out = Path(scratch) / "out"
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(*Path(member.name).parts[1:])
                wanted = name.parts[:1] == ("vllm_ascend",) and name.suffix == ".py"
                if member.isfile() and ".." not in name.parts and (wanted or str(name) in ("setup.py", "PKG-INFO")):
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    (out / name).write_bytes(tar.extractfile(member).read())
        out.rename(path)


def _download(scratch: Path, path: Path) -> Path:
    back_end = scratch / "stub" / "setuptools"
    back_end.mkdir(parents=True)
    (back_end / "__init__.py").touch()
    (back_end / "build_meta.py").write_text(BACK_END)
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-cache-dir",
               "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes",
               "-r", str(LOCK), "-d", str(scratch)]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(back_end.parent), "TMPDIR": str(scratch)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise envs.SetupError(
            f"the source of vllm-ascend is not in {path} and could not be downloaded. Run these tests once where pip "
            f"reaches a package index, or copy that folder from such a machine. pip said:\n{result.stderr[-2000:]}"
        )
    shutil.rmtree(back_end.parent)
    (archive,) = scratch.glob("*.tar.gz")
    return archive


@dataclass(frozen=True)
class Module:
    path: str
    tree: ast.Module

    def find(self, name: str) -> ast.AST | None:
        """A class, function or method by its dotted name; the module itself for an empty one."""
        node: ast.AST | None = self.tree
        for part in name.split(".") if name else []:
            body = [n for n in ast.walk(node) if hasattr(n, "name")] if node else []
            node = next((n for n in body if n.name == part), None)
        return node


class Source:
    """Modules of a folder, parsed when asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = cache(self._module)

    def _module(self, path: str) -> Module:
        return Module(path, ast.parse((self.root / path).read_text()))

    def texts(self) -> dict[str, str]:
        files = sorted((self.root / "vllm_ascend").rglob("*.py"))
        return {str(file.relative_to(self.root)): file.read_text() for file in files}
