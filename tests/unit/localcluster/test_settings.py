"""Two clusters on one machine share nothing; names that could break a limit are refused."""

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localcluster import pki, programs, settings
from localcluster.console import ClusterError
from localcluster.settings import SLOTS, Settings, check_name, choose_slot, overlapping_slots, slot_network

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)


@given(st.lists(NAMES, min_size=2, max_size=20, unique=True))
def test_clusters_started_one_after_the_other_do_not_collide(names: list[str]) -> None:
    running: list[Settings] = []
    for name in names:
        running.append(Settings(name, choose_slot(name, {other.slot for other in running})))
    for value in ("work", "cgroup", "link", "network", "node_address", "host_address", "pods", "services", "node"):
        assert len({getattr(cluster, value) for cluster in running}) == len(names), value


@given(st.integers(0, SLOTS - 1))
def test_the_parts_of_a_range_do_not_overlap(slot: int) -> None:
    cluster = Settings("a", slot)
    link = ipaddress.ip_network(f"{cluster.host_address}/30", strict=False)
    pods, services = ipaddress.ip_network(cluster.pods), ipaddress.ip_network(cluster.services)
    assert ipaddress.ip_address(cluster.node_address) in link
    assert ipaddress.ip_address(cluster.kubernetes_service) in services
    assert not link.overlaps(pods)
    assert not pods.overlaps(services)
    assert all(part.subnet_of(cluster.network) for part in (link, pods, services))  # type: ignore[arg-type]


def test_the_same_name_gets_the_same_range_and_a_taken_one_moves_on() -> None:
    first = choose_slot("demo", set())
    assert choose_slot("demo", set()) == first
    assert choose_slot("demo", {first}) == (first + 1) % SLOTS
    assert choose_slot("demo", set(range(SLOTS)) - {7}) == 7


def test_no_free_range_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ClusterError, match=r"10\.96\.0\.0/16 to 10\.245\.0\.0/16 are taken.*stop a cluster"):
        choose_slot("demo", set(range(SLOTS)))


def test_routes_of_the_machine_take_ranges_away() -> None:
    assert overlapping_slots(["default", "192.0.2.0/24"]) == set()
    assert overlapping_slots(["10.100.7.0/24", "10.245.0.9"]) == {4, 149}
    assert overlapping_slots(["10.0.0.0/8"]) == set(range(SLOTS))
    assert slot_network(4) == ipaddress.ip_network("10.100.0.0/16")


@pytest.mark.parametrize("name", ["", "Demo", "-a", "a-", "a_b", "1a", "a" * 13, "a/b", "../x"])
def test_names_that_would_break_paths_or_limits_are_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="1 to 12 lower-case"):
        check_name(name)


@given(NAMES)
def test_names_fit_the_limits_of_the_kernel(name: str) -> None:
    cluster = Settings(check_name(name), 0)
    assert len(cluster.link) <= 15
    assert len(str(cluster.work / "kubelet/device-plugins/kubelet.sock")) < 108
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", cluster.node)


def test_certificates_name_every_address_a_client_uses() -> None:
    cluster = Settings("a", 3)
    assert cluster.server == "https://10.99.0.2:6443"
    assert cluster.kubernetes_service == "10.99.128.1"
    assert "kubernetes.default.svc" in pki.SERVICE_NAMES


def test_one_kubernetes_version_is_named_everywhere() -> None:
    text = (programs.SOURCES / "kube" / "go.mod").read_text()
    assert f"k8s.io/kubernetes v{settings.KUBERNETES}\n" in text
