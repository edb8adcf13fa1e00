"""The configuration files of the node's programs. Comments say what breaks without a setting."""

from pathlib import Path

from localcluster.settings import Settings


def write_all(settings: Settings) -> None:
    files = {
        "kubelet.yaml": kubelet(settings),
        "containerd.toml": containerd(settings),
        "kube-proxy.yaml": kube_proxy(settings),
        "Corefile": coredns(settings),
        "cni-config/10-prefill.conflist": cni(settings),
    }
    for name, text in files.items():
        file: Path = settings.work / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def kubelet(s: Settings) -> str:
    # failCgroupV1, cgroupDriver: machines without systemd or with the old cgroup layout work too.
    # evictionHard, imageGC: a developer's disk is often fuller than the defaults allow.
    # crashLoopBackOff: a rank that ended must be back in seconds, not after the default 5 minutes.
    return f"""apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {s.node_address}
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /{s.cgroup}
enforceNodeAllocatable: []
failSwapOn: false
oomScoreAdj: 0
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: true}}
  x509: {{clientCAFile: {s.pki}/ca.crt}}
authorization: {{mode: Webhook}}
tlsCertFile: {s.pki}/kubelet-server.crt
tlsPrivateKeyFile: {s.pki}/kubelet-server.key
clusterDNS: [{s.node_address}]
clusterDomain: cluster.local
resolvConf: ""
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
makeIPTablesUtilChains: false
evictionHard:
  memory.available: 100Mi
  nodefs.available: 1%
  imagefs.available: 1%
  nodefs.inodesFree: 1%
  imagefs.inodesFree: 1%
imageGCHighThresholdPercent: 100
serializeImagePulls: false
registryPullQPS: 0
syncFrequency: 10s
nodeStatusUpdateFrequency: 5s
crashLoopBackOff: {{maxContainerRestartPeriod: 10s}}
featureGates: {{KubeletCrashLoopBackOffMax: true}}
"""


def containerd(s: Settings) -> str:
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE no container could lower its score, and none would start.
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "localhost/pause:1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{s.work}/cni-config"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


def cni(s: Settings) -> str:
    # ptp, not bridge: plain routing, independent of the kernel's bridge filter.
    return f"""{{"cniVersion": "0.4.0", "name": "prefill", "plugins": [{{
  "type": "ptp", "ipMasq": false, "ipam": {{
    "type": "host-local", "dataDir": "/run/cni-ipam",
    "ranges": [[{{"subnet": "{s.pods}"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]}}}}]}}
"""


def kube_proxy(s: Settings) -> str:
    # conntrack: its sizes are read-only inside a network namespace, and kube-proxy ends when it cannot set them.
    return f"""apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {{kubeconfig: {s.work}/proxy.kubeconfig}}
hostnameOverride: {s.node}
clusterCIDR: {s.pods}
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
nftables: {{syncPeriod: 10s, minSyncPeriod: 100ms}}
healthzBindAddress: 127.0.0.1:10256
"""


def coredns(s: Settings) -> str:
    # Short lifetimes: a restarted rank has a new address, and its peers must see it within seconds.
    return f""".:53 {{
    bind {s.node_address}
    errors
    health 127.0.0.1:8080
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {s.work}/dns.kubeconfig
        pods insecure
        ttl 2
    }}
    cache 2 {{
        denial 9984 1
    }}
}}
"""
