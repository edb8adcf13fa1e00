"""Environments are whole or absent, and found by name mapping through ``.links``."""

import json
import os
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from prefill_runtime.engine import versions

from localcluster import envs
from localcluster.envs import Environment, SetupError
from localcluster.settings import REPOSITORY


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def empty_lock(folder: Path) -> Path:
    lock = folder / "empty.txt"
    lock.write_text("# nothing\n")
    return lock


def test_an_environment_is_made_once_and_an_interrupted_one_again(home: Path) -> None:
    environment = Environment("probe", empty_lock(home), "import pip", 0.1)
    interrupted = environment.path / "half"
    interrupted.mkdir(parents=True)
    assert environment.ensure() == environment.path
    assert not interrupted.exists()
    assert json.loads((environment.path / "complete").read_text()).keys() == {"seconds", "megabytes"}
    assert not (environment.path / "scratch").exists()
    made = environment.python.lstat().st_ctime_ns
    environment.ensure()
    assert environment.python.lstat().st_ctime_ns == made


def test_an_environment_that_fails_its_check_never_counts_as_complete(home: Path) -> None:
    environment = Environment("probe", empty_lock(home), "import a_module_that_is_not_there", 0.1)
    with pytest.raises(SetupError, match=r"probe is made but does not work:(.|\n)*a_module_that_is_not_there"):
        environment.ensure()
    assert not environment.complete


def test_a_check_that_a_signal_ends_says_which(home: Path) -> None:
    environment = Environment("probe", empty_lock(home), "import os; os.kill(os.getpid(), 4)", 0.1)
    with pytest.raises(SetupError, match=r"probe is made but does not work:(.|\n)*\(ended by SIGILL\)"):
        environment.ensure()


def test_another_lock_is_another_environment_but_a_comment_is_not(home: Path) -> None:
    lock = empty_lock(home)
    before = Environment("probe", lock, "", 0.1).path
    lock.write_text("# something else\n    # via nothing\n")
    assert Environment("probe", lock, "", 0.1).path == before
    lock.write_text("a==1\n")
    assert Environment("probe", lock, "", 0.1).path != before


def test_too_little_space_is_said_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"needs 1e\+06 GB free below .*, there are \d+\.\d GB"):
        envs.require_space(tmp_path, 1e6, "it")


def test_without_root_a_missing_system_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match=r"needs libnuma: install it with `apt-get install .* libnuma1`"):
        envs.debian_package("libnuma1", "it needs libnuma")


def test_an_unknown_engine_version_names_the_known_ones() -> None:
    with pytest.raises(SetupError, match=r"no lock file for vLLM 9\.9; there are: .*0\.28\.0"):
        envs.engine("9.9")


def test_every_engine_with_a_lock_is_tested_and_has_a_name() -> None:
    assert tuple(envs.engine_versions()) == versions.TESTED
    assert envs.engine_names() == {"engine": "0.28.0", "engine-0.23.0": "0.23.0"}
    assert envs.engine("0.23.0").path.name.startswith("engine-0.23.0-")
    assert envs.engine().lock == envs.LOCKS / "engine-cpu-0.28.0.txt"


def test_links_give_our_names_and_the_plugin_to_any_python(tmp_path: Path) -> None:
    envs.make_links()
    code = (
        "import importlib.metadata as m, prefill_runtime.profiling.document as d, operator;"
        "print(operator.__file__); print(d.__file__);"
        "print(*[e.value for e in m.entry_points(group='vllm.general_plugins') if e.name == 'prefill'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(envs.LINKS)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    standard_library, ours, plugin = result.stdout.splitlines()
    assert Path(standard_library) == Path(os.__file__).parent / "operator.py"
    assert Path(ours).resolve() == REPOSITORY / "runtime" / "profiling" / "document.py"
    assert plugin == "prefill_runtime.engine.plugin:register"


def test_links_name_one_version_of_the_package() -> None:
    envs.make_links()
    (info,) = envs.LINKS.glob("*.dist-info")
    assert PathDistribution(info).metadata["Name"] == "prefill_operator"
