"""Everything that makes one cluster different from another on the same machine, derived from its name.

Each cluster owns one /16 of 10/8, cut in three: the link to this machine, the pods, the Services. The second octet
is the cluster's slot: first choice by a checksum of the name, next free one when another cluster or a route has it.
"""

import ipaddress
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from localcluster.console import ClusterError

KUBERNETES = "1.34.3"
REPOSITORY = Path(__file__).resolve().parent.parent
WORK_ROOT = Path("/var/lib/prefill-operator")
"""A short path on a local disk: Unix sockets below it stay under 108 bytes, and overlayfs works there."""
FIRST_OCTET, SLOTS = 96, 150


def cache_root() -> Path:
    """Programs, images and other things that survive a cluster."""
    return Path.home() / ".cache" / "prefill-operator"


@dataclass(frozen=True)
class Settings:
    name: str
    slot: int

    @property
    def work(self) -> Path:
        return WORK_ROOT / self.name

    @property
    def pki(self) -> Path:
        return self.work / "pki"

    @property
    def logs(self) -> Path:
        return self.work / "log"

    @property
    def kubeconfig(self) -> Path:
        return self.work / "admin.kubeconfig"

    @property
    def ready_mark(self) -> Path:
        """Written last by `up`: without it a running node is the rest of an interrupted start."""
        return self.work / "ready"

    @property
    def node(self) -> str:
        return f"{self.name}-node"

    @property
    def cgroup(self) -> str:
        return f"prefill-{self.name}"

    @property
    def link(self) -> str:
        """This machine's end of the virtual cable; at most 15 characters."""
        return f"pf-{self.name}"

    @property
    def network(self) -> ipaddress.IPv4Network:
        return slot_network(self.slot)

    @property
    def host_address(self) -> str:
        return str(self.network[1])

    @property
    def node_address(self) -> str:
        return str(self.network[2])

    @property
    def pods(self) -> str:
        return f"{self.network[256]}/24"

    @property
    def services(self) -> str:
        return f"{self.network[32768]}/17"

    @property
    def kubernetes_service(self) -> str:
        """The API server's own Service: always the first address of the range."""
        return str(self.network[32769])

    @property
    def server(self) -> str:
        return f"https://{self.node_address}:6443"


def slot_network(slot: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(f"10.{FIRST_OCTET + slot}.0.0/16")


def check_name(name: str) -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", name):
        raise ClusterError(
            f"cluster name {name!r}: use 1 to 12 lower-case letters, digits and inner dashes, a letter first"
        )
    return name


def choose_slot(name: str, taken: Collection[int]) -> int:
    first = zlib.crc32(name.encode()) % SLOTS
    for offset in range(SLOTS):
        slot = (first + offset) % SLOTS
        if slot not in taken:
            return slot
    raise ClusterError(
        f"all {SLOTS} address ranges {slot_network(0)} to {slot_network(SLOTS - 1)} are taken by other clusters or "
        "routes of this machine; stop a cluster (python3 -m localcluster down --name NAME) or remove a route"
    )


def overlapping_slots(destinations: Collection[str]) -> set[int]:
    """The slots whose range touches one of these routes; default routes do not count."""
    networks = [
        ipaddress.ip_network(text, strict=False) for text in destinations if text not in ("default", "0.0.0.0/0")
    ]
    return {
        slot
        for slot in range(SLOTS)
        for network in networks
        if isinstance(network, ipaddress.IPv4Network) and network.overlaps(slot_network(slot))
    }


def recorded_slots() -> dict[str, int]:
    """Clusters that have a work folder, with the slot each one took."""
    slots = {}
    for file in WORK_ROOT.glob("*/slot"):
        text = file.read_text().strip()
        if text.isdigit():
            slots[file.parent.name] = int(text)
    return slots


def find(name: str) -> Settings | None:
    slot = recorded_slots().get(check_name(name))
    return None if slot is None else Settings(name, slot)
