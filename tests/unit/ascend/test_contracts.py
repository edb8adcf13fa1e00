"""The contracts hold for the release of vllm-ascend that is pinned, and a broken one is seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prefill_operator.api import switches
from prefill_runtime.agent import command
from prefill_runtime.engine.ascend import VLLM, VLLM_ASCEND, check_ascend
from prefill_runtime.engine.errors import UnsupportedEngineError

from localcluster import envs
from localcluster.settings import REPOSITORY
from tests.unit.ascend import contracts
from tests.unit.ascend.contract import BrokenError, Contract, Only, Says, Signature
from tests.unit.ascend.source import LOCK, Source, folder


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(folder())


def name(contract: Contract) -> str:
    where = getattr(contract, "name", "") or getattr(contract, "path", "") or getattr(contract, "pattern", "")
    return f"{where}: {contract.why[:60]}"


@pytest.mark.parametrize("contract", contracts.ALL, ids=name)
def test_contract(contract: Contract, source: Source) -> None:
    contract.check(source)


def test_the_version_that_was_read_is_the_one_that_is_let_in(source: Source) -> None:
    about = (source.root / "PKG-INFO").read_text()
    assert re.search(r"(?m)^Version: (.+)$", about)[1] == VLLM_ASCEND == envs.pinned(LOCK)["vllm-ascend"]
    assert VLLM in VLLM_ASCEND
    check_ascend(f"{VLLM}+empty", f"{VLLM_ASCEND}+g1234567", False)
    check_ascend("0.28.0", "0.28.0rc1", True)
    for other in ((VLLM, "0.23.0"), ("0.28.0", VLLM_ASCEND), ("0.28.0", "0.28.0rc1")):
        with pytest.raises(UnsupportedEngineError, match=re.escape(f"vllm-ascend {other[1]} on vLLM {other[0]}")):
            check_ascend(*other, False)


def test_without_an_index_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.ascend.source.cache_root", lambda: tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(envs.SetupError, match="Run these tests once where pip reaches a package index") as caught:
        folder()
    assert str(tmp_path / "sources" / "vllm-ascend-") in str(caught.value)
    assert not list((tmp_path / "sources").glob("*vllm-ascend-*"))


def test_variables_of_the_samples_exist(source: Source) -> None:
    """vllm-ascend ignores a VLLM_ASCEND variable that it does not know."""
    known = set(re.findall(r'"(\w+)": lambda', (source.root / "vllm_ascend" / "envs.py").read_text()))
    assert "VLLM_ASCEND_BALANCE_SCHEDULING" in known
    used = set()
    for sample in (REPOSITORY / "manifests" / "samples").glob("*.yaml"):
        for document in yaml.safe_load_all(sample.read_text()):
            used |= {variable["name"] for variable in document.get("spec", {}).get("engine", {}).get("env", [])}
    theirs = {variable for variable in used if variable.startswith("VLLM_ASCEND_")}
    assert theirs
    assert theirs <= known, f"vllm-ascend {VLLM_ASCEND} does not know {sorted(theirs - known)}"


def test_what_admission_refuses_is_spelled_as_the_engine_spells_it(source: Source) -> None:
    of_later_releases = {"scheduler_config", "short_request_first_config"}
    text = "".join(source.texts().values())
    for key in switches.CONFIG.keys() - of_later_releases:
        assert re.search(rf'additional_config(\.get\(|,\s+)"{key}"', text), key
    for variable in switches.ENVIRONMENT.keys() | switches.ONE_POD_ENVIRONMENT.keys():
        assert re.search(rf'getenv\("{variable}"', text), variable


def test_the_worker_class_of_the_command_line_is_there() -> None:
    module, _, worker = command.WORKERS["Ascend"].rpartition(".")
    path = module.replace("prefill_runtime", "runtime").replace(".", "/") + ".py"
    Signature(path=path, name=worker, extends="TimedPasses, FoldedStages, NPUWorker", why="it is started so").check(
        Source(REPOSITORY)
    )


ENGINE = '''
class Worker(Base):
    def __init__(self, config: dict, rank: int = 0) -> None:
        self.runner = Runner(config)
    def run(self, batch):
        if batch.tokens > 0:
            receive(batch)
        output = self.runner.run(batch)
        send(output)
'''  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Source:
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "worker.py").write_text(ENGINE)
    return Source(tmp_path)


PATH = "vllm_ascend/worker.py"
HOLD = [
    Signature(path=PATH, name="Worker", extends="Base", why="w"),
    Signature(path=PATH, name="Worker.__init__", takes="self, config, rank=0", why="w"),
    Says(path=PATH, name="Worker.run", says=("if batch.tokens > 0: ...", "receive(batch)", "send(output)"), why="w"),
    Only(pattern=r"self\.runner = ", places={PATH: 1}, why="w"),
]
BROKEN = [
    (Signature(path=PATH, name="Worker", extends="Other", why="ours"), r"Other\nfound\n    Base\nneeded because ours"),
    (Signature(path=PATH, name="Worker.run", takes="self, batch, more", why="w"), r"self, batch\n"),
    (Signature(path=PATH, name="Worker.runs", takes="self", why="w"), r"has no Worker\.runs; it has run"),
    (Signature(path="vllm_ascend/none.py", name="x", takes="", why="w"), r"there is no vllm_ascend/none\.py"),
    (Says(path=PATH, name="Worker.run", says=("send(output)", "receive(batch)"), why="w"), r"not say after line 9\n"),
    (Says(path=PATH, name="Worker.run", says=("self.runner.run(batch, 1)",), why="w"), r"found:\n    .*run\(batch\)"),
    (Says(path=PATH, name="Worker.run", says=("if batch.tokens > 1: ...",), why="w"), r"if batch\.tokens > 0:"),
    (Only(pattern=r"self\.runner = ", places={}, why="w"), r"\{\}\nfound\n    \{'vllm_ascend/worker\.py': 1\}"),
    (Only(pattern=r"nowhere", places={PATH: 1}, why="w"), r"found\n    \{\}"),
]  # fmt: skip


@pytest.mark.parametrize("contract", HOLD, ids=name)
def test_a_contract_that_holds_is_seen_to_hold(contract: Contract, engine: Source) -> None:
    contract.check(engine)


@pytest.mark.parametrize(("contract", "says"), BROKEN, ids=[name(contract) for contract, _ in BROKEN])
def test_a_broken_contract_says_what_is_there_instead(contract: Contract, says: str, engine: Source) -> None:
    with pytest.raises(BrokenError, match=re.compile(says, re.DOTALL)):
        contract.check(engine)
