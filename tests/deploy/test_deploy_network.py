"""Allowed connections: the rendered policies are evaluated for sample connections."""

from __future__ import annotations

from manifests import COMPONENT, INSTANCE, NAME, Rendered
from network_rules import End, allowed, matches

OUTSIDE = End(outside=True)
STRANGER = End({"app": "other"})
KUBE_DNS = End({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
MONITORING = End({"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
ELSEWHERE = End({NAME: "elastic", COMPONENT: "worker"}, {"kubernetes.io/metadata.name": "default"})


def ours(component: str, job: str = "workers") -> End:
    labels = {NAME: "elastic", COMPONENT: component}
    return End(labels | ({INSTANCE: job} if component in ("worker", "finisher") else {}))


WORKER, ETCD, FINISHER, UPKEEP = map(ours, ("worker", "etcd", "finisher", "etcd-upkeep"))


def test_policies_select_existing_pods(manifests: Rendered) -> None:
    pods = [pod.labels for pod in manifests.pods()]
    for policy in manifests.of("NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        assert any(matches(selector, labels) for labels in pods), policy["metadata"]["name"]
    for end in (WORKER, ETCD, FINISHER, UPKEEP):
        for pod in manifests.pods(end.labels[COMPONENT]):
            assert end.labels.items() <= pod.labels.items(), pod


def test_connections_are_denied_by_default(manifests: Rendered) -> None:
    policies = manifests.of("NetworkPolicy")
    for component in ("worker", "etcd", "finisher", "etcd-upkeep", "anything-new"):
        assert not allowed(policies, STRANGER, ours(component), 2379)
        assert not allowed(policies, OUTSIDE, ours(component), 8471)
        assert not allowed(policies, ELSEWHERE, ours(component), 2379)
        assert not allowed(policies, ours(component), STRANGER, 80)
        assert allowed(policies, ours(component), KUBE_DNS, 53, "UDP")
        assert allowed(policies, ours(component), KUBE_DNS, 53, "TCP")
        assert allowed(policies, ours(component), OUTSIDE, 443) == goes_out(manifests, component)


def goes_out(manifests: Rendered, component: str) -> bool:
    """Egress of the finisher to the API server, and of workers to an object store, if any."""
    if component == "worker":
        return "object-store" in manifests.name
    return component == "finisher" and bool(manifests.pods("finisher"))


def test_workers_reach_each_other_on_every_port(manifests: Rendered) -> None:
    policies = manifests.of("NetworkPolicy")
    for port in (29400, 8471, 34567, 65535):
        assert allowed(policies, WORKER, WORKER, port)
    assert not allowed(policies, FINISHER, WORKER, 29400)
    assert not allowed(policies, ETCD, WORKER, 29400)


def test_etcd_is_reachable_by_its_clients_on_the_client_port_only(manifests: Rendered) -> None:
    policies = manifests.of("NetworkPolicy")
    assert allowed(policies, WORKER, ETCD, 2379)
    assert not allowed(policies, WORKER, ETCD, 2380)
    assert not allowed(policies, WORKER, ETCD, 2381)
    if manifests.pods("finisher"):
        assert allowed(policies, FINISHER, ETCD, 2379)
    if manifests.pods("etcd-upkeep"):
        assert allowed(policies, UPKEEP, ETCD, 2379)
        assert not allowed(policies, UPKEEP, ETCD, 2380)
        assert allowed(policies, ETCD, ETCD, 2380), "members"
        assert allowed(policies, ETCD, ETCD, 2379), "kubectl exec etcd-0 -- etcdctl --cluster"


def test_pod_monitors_select_pods_with_a_reachable_metrics_port(manifests: Rendered) -> None:
    parts = manifests.name.replace("kube render ", "").split("+")
    wanted = {"etcd-monitoring": "etcd", "monitoring": "workers"}
    names = {monitor["metadata"]["name"] for monitor in manifests.of("PodMonitor")}
    assert names == {name for part, name in wanted.items() if part in parts}
    for monitor in manifests.of("PodMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        (pod,) = [p for p in manifests.pods() if labels.items() <= p.labels.items()]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        ports = {p["name"]: p["containerPort"] for c in pod.containers for p in c["ports"]}
        port = ports[endpoint["port"]]
        if pod.component == "etcd":
            assert f"--listen-metrics-urls=http://0.0.0.0:{port}" in pod.containers[0]["args"]
        else:
            assert str(port) == manifests.settings["ELASTIC_HEALTH_PORT"]
        assert allowed(manifests.of("NetworkPolicy"), MONITORING, ours(pod.component), port)


def test_monitoring_reaches_the_metrics_port_only(manifests: Rendered) -> None:
    policies = manifests.of("NetworkPolicy")
    assert allowed(policies, MONITORING, WORKER, 8471)
    assert not allowed(policies, MONITORING, WORKER, 29400)
    assert not allowed(policies, MONITORING, ETCD, 2379)
    if manifests.pods("etcd-upkeep"):
        assert allowed(policies, MONITORING, ETCD, 2381)
