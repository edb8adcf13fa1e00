"""A small certificate authority and one client or server certificate per component (EC keys, by openssl)."""

import base64
import subprocess
from pathlib import Path

from localcluster.console import ClusterError

DAYS = "3650"
SERVICE_NAMES = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
]


class Authority:
    """Creates a new CA in `folder`; every certificate lands beside it as NAME.crt and NAME.key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._key("ca")
        self._openssl(
            *(
                "req",
                "-x509",
                "-new",
                "-key",
                "ca.key",
                "-subj",
                "/CN=prefill-local-ca",
                "-days",
                DAYS,
                "-out",
                "ca.crt",
            ),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign", "-addext", "basicConstraints=critical,CA:true"),
        )

    def client(self, name: str, common_name: str, group: str = "") -> None:
        subject = (f"/O={group}" if group else "") + f"/CN={common_name}"
        self._certificate(name, subject, "extendedKeyUsage=clientAuth\n")

    def server(self, name: str, common_name: str, names: list[str], addresses: list[str]) -> None:
        alternatives = ",".join([f"DNS:{n}" for n in names] + [f"IP:{a}" for a in addresses])
        self._certificate(name, f"/CN={common_name}", f"extendedKeyUsage=serverAuth\nsubjectAltName={alternatives}\n")

    def service_account_keys(self) -> None:
        self._key("sa")
        self._openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    def kubeconfig(self, name: str, server: str, file: Path, cluster: str) -> None:
        def data(of: str) -> str:
            return base64.b64encode((self.folder / of).read_bytes()).decode()

        user = f"client-certificate-data: {data(name + '.crt')}, client-key-data: {data(name + '.key')}"
        file.touch(mode=0o600)
        file.write_text(
            f"""apiVersion: v1
kind: Config
clusters: [{{name: {cluster}, cluster: {{server: "{server}", certificate-authority-data: {data("ca.crt")}}}}}]
users: [{{name: {name}, user: {{{user}}}}}]
contexts: [{{name: {cluster}, context: {{cluster: {cluster}, user: {name}}}}}]
current-context: {cluster}
"""
        )

    def _certificate(self, name: str, subject: str, extensions: str) -> None:
        self._key(name)
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
        (self.folder / f"{name}.ext").write_text(extensions + "keyUsage=critical,digitalSignature\n")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", DAYS, "-extfile", f"{name}.ext", "-out", f"{name}.crt"),
        )
        for rest in ("csr", "ext"):
            (self.folder / f"{name}.{rest}").unlink()

    def _key(self, name: str) -> None:
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise ClusterError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")


def control_plane(folder: Path, addresses: list[str]) -> Authority:
    """What etcd-backed API serving needs, with or without a node."""
    authority = Authority(folder)
    authority.server("apiserver", "kube-apiserver", SERVICE_NAMES, addresses)
    authority.client("admin", "admin", "system:masters")
    authority.client("controller-manager", "system:kube-controller-manager", "system:masters")
    authority.service_account_keys()
    return authority


def node(authority: Authority, node_name: str, address: str) -> None:
    authority.server("kubelet-server", node_name, [node_name, "localhost"], ["127.0.0.1", address])
    authority.client("apiserver-kubelet", "apiserver-kubelet-client", "system:masters")
    authority.client("kubelet", f"system:node:{node_name}", "system:nodes")
    authority.client("scheduler", "system:kube-scheduler")
    authority.client("proxy", "system:kube-proxy")
    authority.client("dns", "coredns", "system:masters")
