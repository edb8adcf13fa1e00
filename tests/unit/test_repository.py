"""What every file of the repository keeps to."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from localcluster import envs
from localcluster.settings import REPOSITORY

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
LOCK_FILES = sorted(envs.LOCKS.glob("*.txt"))
ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.\[\],-]*)==(?P<version>[^\s;\\]+)(?: ; [^\\]+)? \\\n(?P<hashes>(?: {4}--hash=.*\n)+)"
)
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [path for name in listed.split("\0") if name and (path := REPOSITORY / name).is_file()]


def product_code() -> list[Path]:
    return tracked("operator/*.py", "runtime/*.py", "localcluster/*.py", "observability/*.py")


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("lock", LOCK_FILES, ids=lambda lock: lock.name)
def test_a_lock_file_holds_pins_and_hashes_and_nothing_else(lock: Path) -> None:
    text = re.sub(r"(?m)^ *#.*\n", "", lock.read_text())
    rest = ENTRY.sub("", text)
    assert rest == "", f"{lock.name} has lines that are no pinned and hashed requirement: {rest[:300]}"
    for entry in ENTRY.finditer(text):
        for line in entry["hashes"].splitlines():
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line), (entry["name"], line)


@pytest.mark.parametrize("path", tracked("requirements/*"), ids=lambda path: path.name)
def test_requirements_name_no_address(path: Path) -> None:
    assert not re.search(r"://|--(?:extra-)?index-url|--find-links|--trusted-host|@ *file", path.read_text())


@pytest.mark.parametrize("lock", LOCK_FILES, ids=lambda lock: lock.name)
def test_every_wish_is_locked_and_every_lock_has_its_wishes(lock: Path) -> None:
    pins = {canonical(package): version for package, version in envs.pinned(lock).items()}
    for wish in wishes(lock.with_suffix(".in")):
        package, _, version = wish.partition("==")
        assert canonical(package) in pins, f"{package} is in {lock.stem}.in but not locked: run `make locks`"
        assert version in ("", pins[canonical(package)])
    assert "make locks" in lock.read_text().splitlines()[1]


def wishes(source: Path) -> list[str]:
    lines = [line.split("#")[0].strip() for line in source.read_text().splitlines()]
    included = [source.parent / line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
    own = [line for line in lines if line and not line.startswith("-")]
    return own + [wish for other in included for wish in wishes(other)]


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_tests_run_on_the_versions_the_operator_image_carries() -> None:
    operator, dev = (envs.pinned(envs.LOCKS / f"{lock}.txt") for lock in ("operator", "dev"))
    assert operator.items() <= dev.items()


def test_locks_satisfy_what_the_package_declares() -> None:
    runtime, extras = PROJECT["project"]["dependencies"], PROJECT["project"]["optional-dependencies"]
    for lock, wanted in {
        # The operator shares only the contract modules with the runtime, and those compute nothing.
        "operator": [wish for wish in runtime if not wish.startswith("numpy")] + extras["operator"],
        "dev": runtime + extras["operator"] + extras["cli"],
        **{f"engine-cpu-{version}": runtime for version in envs.engine_versions()},
    }.items():
        pins = {canonical(package): version for package, version in envs.pinned(envs.LOCKS / f"{lock}.txt").items()}
        for requirement in map(Requirement, wanted):
            version = pins.get(canonical(requirement.name))
            assert version is not None, f"{lock}.txt does not hold {requirement}"
            assert requirement.specifier.contains(version), f"{lock}.txt: {requirement.name} {version}"


def test_packages_are_the_folders_that_hold_code() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    found = set()
    for package, folder in setuptools["package-dir"].items():
        for init in tracked(f"{folder}/*__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(REPOSITORY / folder).parts]))
    assert set(setuptools["packages"]) == found


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (REPOSITORY / "operator" / "__init__.py").exists()


@pytest.mark.parametrize("path", product_code(), ids=name)
def test_code_can_be_read_in_one_sitting(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} (line {node.lineno}) has {lines} lines"


def test_every_make_target_is_explained() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    assert targets == set(re.findall(r"(?m)^([a-z-]+):.*## \w", makefile))
    assert targets == set(re.search(r"\.PHONY: (.*)", makefile)[1].split())
