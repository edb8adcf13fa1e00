"""Every problem says what is missing, what to do, and that a cluster of one's own works too."""

from pathlib import Path

import pytest

from localcluster import preflight
from localcluster.console import ClusterError
from localcluster.preflight import Problem, Space, disk_needed, disk_problem, memory_problem

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_CODENAME=bookworm\nID=debian\n'


def problems() -> list[Problem | None]:
    return [
        preflight.root_problem(1000),
        preflight.release_problem(DEBIAN.replace("bookworm", "trixie").replace("12", "13")),
        preflight.packages_problem(["buildah", "nftables"]),
        disk_problem(10_400_000_000, 3_100_000_000, Path("/c")),
        memory_problem(2_000_000_000),
        preflight.kernel_problem("overlay file system", ["sh", "-c", "echo no such device >&2; exit 1"]),
        preflight.kernel_problem("nftables", ["/nowhere/nft"]),
    ]


def test_each_names_the_lack_a_remedy_and_the_other_way() -> None:
    for problem in problems():
        assert problem
        assert problem.missing
        assert problem.remedy
        assert "KUBECONFIG=/path/to/config make demo" in str(problem)


def test_the_numbers_and_commands_are_in_the_text() -> None:
    user, release, packages, disk, memory, overlay, nftables = map(str, problems())
    assert "this is user 1000" in user
    assert "Debian GNU/Linux 13 (trixie)" in release
    assert "apt-get install buildah nftables" in packages
    assert "10.4 GB are needed below /c, 3.1 GB are free" in disk
    assert "free 7.3 GB" in disk
    assert "2.0 GB are available" in memory
    assert "no such device" in overlay
    assert "/nowhere/nft" in nftables


def test_a_good_machine_has_none() -> None:
    assert preflight.root_problem(0) is None
    assert preflight.release_problem(DEBIAN) is None
    assert preflight.packages_problem([]) is None
    assert disk_problem(5, 5, Path("/c")) is None
    assert memory_problem(preflight.NEEDED_MEMORY) is None
    assert preflight.kernel_problem("nothing", ["true"]) is None


def test_disk_counts_what_is_missing_and_the_largest_passing_need_once() -> None:
    plan = [Space("a", 100, 50, False), Space("b", 10, 70, False), Space("c", 1000, 5000, True)]
    assert disk_needed(plan) == 180
    assert disk_needed([Space("c", 1000, 5000, True)]) == 0


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ClusterError) as error:
        preflight._raise([preflight.root_problem(5), None, memory_problem(1)])
    assert "root:" in str(error.value)
    assert "memory:" in str(error.value)


def test_missing_packages_are_those_whose_program_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nft").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = preflight.missing_packages()
    assert "buildah" in absent
    assert "nftables" not in absent


def test_two_disks_are_checked_each_for_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [Space("images", 100, 50, False), Space(preflight.CLUSTER, 10, 0, False)]
    monkeypatch.setattr(preflight, "_device", lambda folder: 1)
    assert list(preflight.disk_by_folder(plan).values()) == [160]
    monkeypatch.setattr(preflight, "_device", lambda folder: 1 if folder == preflight.WORK_ROOT else 2)
    assert preflight.disk_by_folder(plan)[preflight.WORK_ROOT] == 10
    assert sorted(preflight.disk_by_folder(plan).values()) == [10, 150]
