"""The command line of each control-plane program, shared by the full node and the API-server-only mode."""

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class ControlPlane:
    """Addresses and folders of one etcd, API server and controller manager."""

    folder: Path
    bind: str
    advertise: str
    port: int
    etcd: str
    etcd_peer: str
    services: str
    with_node: bool

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    def etcd_command(self) -> list[str]:
        # No fsync: the data does not outlive the cluster, and on a busy disk each write would take its time.
        return [
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={self.etcd}",
            f"--advertise-client-urls={self.etcd}",
            f"--listen-peer-urls={self.etcd_peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def etcd_listens(self) -> bool:
        """An API server that comes first waits a second before it tries again."""
        where = urlsplit(self.etcd)
        with socket.socket() as probe:
            return probe.connect_ex((where.hostname, where.port)) == 0

    def apiserver_command(self) -> list[str]:
        pki = self.pki
        command = [
            "kube-apiserver",
            f"--etcd-servers={self.etcd}",
            f"--bind-address={self.bind}",
            f"--secure-port={self.port}",
            f"--advertise-address={self.advertise}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--service-account-key-file={pki}/sa.pub",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={self.services}",
            "--allow-privileged=true",
            f"--cert-dir={self.folder}/apiserver-certs",
        ]
        if self.with_node:
            command += [
                f"--kubelet-certificate-authority={pki}/ca.crt",
                f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
                f"--kubelet-client-key={pki}/apiserver-kubelet.key",
                "--kubelet-preferred-address-types=InternalIP",
            ]
        return command

    def controller_manager_command(self) -> list[str]:
        return [
            "kube-controller-manager",
            f"--kubeconfig={self.folder}/controller-manager.kubeconfig",
            f"--service-account-private-key-file={self.pki}/sa.key",
            f"--root-ca-file={self.pki}/ca.crt",
            "--leader-elect=false",
            # One identity with all rights instead of a service account per controller, and no client-side throttling:
            # both cost seconds at each start.
            "--use-service-account-credentials=false",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--secure-port=0",
        ]
