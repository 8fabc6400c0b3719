"""The three members are consistent: names, certificates, ports, probes, version."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from manifests import RESTORE, Object, Rendered

# The first releases of each line with /livez and /readyz.
WITH_LIVEZ = {(3, 4): 29, (3, 5): 11, (3, 6): 0}


@pytest.fixture
def prod(render: Callable[[str], Rendered]) -> Rendered:
    return render("prod")


@pytest.fixture
def flags(prod: Rendered) -> dict[str, str]:
    return flags_of(prod.one("StatefulSet", "etcd"))


def flags_of(members: Object) -> dict[str, str]:
    """The arguments; a flag without a value is ``true``, as etcd reads it."""
    (container,) = members["spec"]["template"]["spec"]["containers"]
    pairs = [argument.removeprefix("--").partition("=") for argument in container["args"]]
    return {name: value if equals else "true" for name, equals, value in pairs}


def peers(prod: Rendered) -> list[str]:
    members = prod.one("StatefulSet", "etcd")["spec"]
    return [f"etcd-{i}.{members['serviceName']}" for i in range(members["replicas"])]


def test_the_version_is_supported_and_has_probe_endpoints(manifests: Rendered) -> None:
    images = {c["image"] for p in manifests.pods("etcd") for c in p.containers}
    images |= {
        c["image"]
        for p in manifests.pods("etcd-upkeep")
        for c in p.containers
        if "etcd" in c["image"]
    }
    (image,) = images
    major, minor, patch = map(int, image.rpartition(":v")[2].split("."))
    assert patch >= WITH_LIVEZ[(major, minor)], "no /livez: a probe would kill it"
    assert (major, minor) >= (3, 5)
    assert (major, minor, patch) > (3, 5, 2), "may lose consistency when killed"


def test_every_member_is_in_the_initial_cluster(prod: Rendered, flags: dict[str, str]) -> None:
    members = prod.one("StatefulSet", "etcd")
    cluster = dict(member.split("=") for member in flags["initial-cluster"].split(","))
    assert cluster == {host.split(".")[0]: f"https://{host}:2380" for host in peers(prod)}
    assert len(cluster) == members["spec"]["replicas"] == 3
    assert flags["name"] == "$(POD_NAME)"
    assert flags["initial-advertise-peer-urls"] == "https://$(POD_NAME).etcd-members:2380"
    assert flags["advertise-client-urls"] == "https://$(POD_NAME).etcd-members:2379"
    assert members["spec"]["podManagementPolicy"] == "Parallel", "one alone has no quorum"


def test_certificates_name_every_member(prod: Rendered) -> None:
    for name in ("etcd-peer", "etcd-server"):
        names = prod.one("Certificate", name)["spec"]["dnsNames"]
        assert set(peers(prod)) <= set(names), name
    server = prod.one("Certificate", "etcd-server")["spec"]
    assert {"etcd", "localhost"} <= set(server["dnsNames"])
    assert server["ipAddresses"] == ["127.0.0.1"], "kubectl exec etcd-0 -- etcdctl"


def test_certificates_have_the_usages_that_they_need(prod: Rendered) -> None:
    def usages(name: str) -> set[str]:
        return {u for u in prod.one("Certificate", name)["spec"]["usages"] if u.endswith("auth")}

    assert usages("etcd-peer") == {"server auth", "client auth"}
    assert usages("etcd-server") == {"server auth"}
    assert usages("etcd-client") == {"client auth"}


def test_a_client_cannot_impersonate_a_member(prod: Rendered) -> None:
    issuers = {
        c: prod.one("Certificate", c)["spec"]["issuerRef"]["name"]
        for c in ("etcd-peer", "etcd-server", "etcd-client")
    }
    assert issuers["etcd-client"] == issuers["etcd-server"] != issuers["etcd-peer"]
    secrets = {i: prod.one("Issuer", i)["spec"]["ca"]["secretName"] for i in issuers.values()}
    assert len(set(secrets.values())) == 2
    for authority in secrets.values():
        (certificate,) = [c for c in prod.of("Certificate") if c["spec"]["secretName"] == authority]
        assert certificate["spec"]["isCA"] is True


def test_both_ports_require_client_certificates(prod: Rendered, flags: dict[str, str]) -> None:
    assert flags["client-cert-auth"] == flags["peer-client-cert-auth"] == "true"
    (pod,) = prod.pods("etcd")
    mounts = {m["mountPath"]: m["name"] for m in pod.spec["containers"][0]["volumeMounts"]}
    volumes = {v["name"]: v["secret"]["secretName"] for v in pod.spec["volumes"]}
    for flag, secret, key in (
        ("trusted-ca-file", "etcd-server-tls", "ca.crt"),
        ("cert-file", "etcd-server-tls", "tls.crt"),
        ("key-file", "etcd-server-tls", "tls.key"),
        ("peer-trusted-ca-file", "etcd-peer-tls", "ca.crt"),
        ("peer-cert-file", "etcd-peer-tls", "tls.crt"),
        ("peer-key-file", "etcd-peer-tls", "tls.key"),
    ):
        folder, _, name = flags[flag].rpartition("/")
        assert (volumes[mounts[folder]], name) == (secret, key), flag


def test_liveness_probes_need_neither_a_certificate_nor_a_quorum(manifests: Rendered) -> None:
    for pod in manifests.pods("etcd"):
        flags = flags_of(pod.owner)
        (container,) = pod.spec["containers"]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        metrics = urlsplit(flags["listen-metrics-urls"])
        assert metrics.scheme == "http", "the kubelet has no client certificate"
        assert metrics.hostname == "0.0.0.0", "the kubelet asks the pod's address"
        assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
        startup = container.get("startupProbe", container["livenessProbe"])
        assert startup["httpGet"]["path"] == "/livez"
        assert ports["metrics"] == metrics.port
        assert urlsplit(flags["listen-client-urls"]).port == ports["client"]


def test_members_are_disrupted_one_at_a_time_and_run_on_separate_machines(prod: Rendered) -> None:
    assert prod.one("PodDisruptionBudget", "etcd")["spec"]["maxUnavailable"] == 1
    (pod,) = prod.pods("etcd")
    (term,) = pod.spec["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= pod.labels.items()
    service = prod.one("Service", "etcd-members")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True, "no quorum without names, and back"


def test_volumes_are_retained_after_the_statefulset(prod: Rendered) -> None:
    members = prod.one("StatefulSet", "etcd")
    (claim,) = members["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    retention = members["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert set(retention.values()) == {"Retain"}
    (container,) = members["spec"]["template"]["spec"]["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == claim["metadata"]["name"]]
    assert flags_of(members)["data-dir"].startswith(f"{mount['mountPath']}/")


def test_old_revisions_are_compacted(flags: dict[str, str]) -> None:
    assert flags["auto-compaction-mode"] == "periodic"
    assert flags["auto-compaction-retention"] == "1h"
    assert int(flags["quota-backend-bytes"]) >= 2**30


def test_upkeep_uses_endpoints_covered_by_the_member_certificates(prod: Rendered) -> None:
    names = prod.one("Certificate", "etcd-server")["spec"]["dnsNames"]
    for pod in prod.pods("etcd-upkeep"):
        for container in pod.containers:
            for argument in container.get("args", []):
                if argument.startswith("--endpoints="):
                    urls = [urlsplit(u) for u in argument.partition("=")[2].split(",")]
                    assert {u.scheme for u in urls} == {"https"}
                    assert {u.hostname for u in urls} <= set(names)
                    assert {u.port for u in urls} == {2379}


def test_a_snapshot_is_verified_before_older_ones_are_removed(prod: Rendered) -> None:
    job = prod.one("CronJob", "etcd-snapshot")["spec"]
    pod = job["jobTemplate"]["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["initContainers"]] == ["save", "check"]
    assert [c["name"] for c in pod["containers"]] == ["prune"]
    assert job["concurrencyPolicy"] == "Forbid"
    defragmentation = prod.one("CronJob", "etcd-defragmentation")["spec"]
    guard = defragmentation["jobTemplate"]["spec"]["template"]["spec"]["initContainers"][0]
    assert guard["args"][-2:] == ["endpoint", "health"], "a sick cluster is left alone"


def test_the_restore_uses_the_flags_of_the_member(
    render: Callable[[str], Rendered], flags: dict[str, str]
) -> None:
    (pod,) = render(RESTORE).pods("etcd")
    restore, _ = pod.containers
    pairs = [w.removeprefix("--").split("=", 1) for w in restore["args"] if w.startswith("--")]
    given = dict(pairs)
    assert given == {name: flags[name] for name in given}
    assert set(given) == {
        *("name", "data-dir", "initial-cluster", "initial-cluster-token"),
        "initial-advertise-peer-urls",
    }
