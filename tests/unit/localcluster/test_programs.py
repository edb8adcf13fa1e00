"""When a program is built anew, and what is said when it cannot be."""

import shutil
from pathlib import Path

import pytest

from localcluster import programs
from localcluster.console import ClusterError
from localcluster.programs import MODULES, Module, go_version_problem

VERSIONED = {"etcd": "go.etcd.io/etcd/server/v3", "coredns": "github.com/coredns/coredns", "helm": "helm.sh/helm/v3"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(programs, "SOURCES", Path(shutil.copytree(programs.SOURCES, tmp_path / "bins")))
    return tmp_path


def put(module: Module, program: str) -> None:
    module.target().mkdir(parents=True, exist_ok=True)
    (module.target() / program).touch()


def kube() -> Module:
    return next(module for module in MODULES if module.folder == "kube")


def test_everything_is_missing_in_an_empty_cache(home: Path) -> None:
    assert programs.missing() == [
        *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"),
        *("kubectl", "coredns", "helm"),
    ]


def test_only_what_is_missing_is_built(home: Path) -> None:
    put(kube(), "kubelet")
    assert "kubelet" not in programs.missing()
    assert programs.missing({"kubelet", "etcd"}) == ["etcd"]


def test_half_a_program_does_not_count(home: Path) -> None:
    put(kube(), ".building-kubelet")
    assert "kubelet" in programs.missing()


@pytest.mark.parametrize("file", ["go.mod", "go.sum", "tools.go"])
def test_a_changed_input_builds_that_module_anew_and_no_other(home: Path, file: str) -> None:
    for module in MODULES:
        for program in module.packages:
            put(module, program)
    assert programs.missing() == []
    with (kube().sources / file).open("a") as text:
        text.write("// changed\n")
    assert programs.missing() == list(kube().packages)


def test_a_new_file_changes_the_checksum_whatever_its_name_swallows(home: Path) -> None:
    before = kube().checksum()
    (kube().sources / "x").write_text("")
    assert kube().checksum() != before


def test_the_versions_in_folder_names_are_those_of_go_mod() -> None:
    for module in MODULES:
        package = VERSIONED.get(module.folder, "k8s.io/kubernetes")
        assert f"{package} v{module.version}\n" in (module.sources / "go.mod").read_text()


def test_go_too_old_or_absent_is_said_with_numbers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert go_version_problem("go version go1.26.8 linux/amd64", (1, 25)) == ""
    assert go_version_problem("go version go1.9 linux/amd64", (1, 25)) == "Go 1.9 is installed, 1.25 or newer is needed"
    assert "'nonsense'" in go_version_problem("nonsense", (1, 25))
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(ClusterError, match=r"no `go` on PATH.*1\.25 or newer.*KUBECONFIG="):
        programs.build({"etcd"})


def test_a_failing_build_shows_its_end_and_leaves_no_program(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = home / "go"
    go.write_text(
        '#!/bin/sh\n[ "$1" = version ] && echo go version go1.99 linux/amd64 && exit\necho no such module; exit 3\n'
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:/usr/bin:/bin")
    with pytest.raises(ClusterError, match=r"building etcd failed \(go build ended with 3\)(?s:.*)no such module"):
        programs.build({"etcd"})
    assert programs.missing({"etcd"}) == ["etcd"]
    assert not list((home / ".cache/prefill-operator/bin").glob("lock"))
