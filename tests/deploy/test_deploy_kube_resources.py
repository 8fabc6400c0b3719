"""Sizes, placement and access flags of `elastic kube render`, on every kind of workload."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from manifests import IMAGE, PARTS, Object, Rendered, kustomize
from network_rules import End, allowed
from test_deploy_kube_render import Render, render
from test_deploy_network import ETCD, STRANGER, WORKER
from test_deploy_workloads import size_bytes, test_shared_memory_is_less_than_memory

__all__ = ["render"]
OVERLAYS = ("prod", "dev", "job", "jobset", "trainer")
EKS_AGENT = End(outside=True, address="169.254.170.23")
NODE_METADATA = End(outside=True, address="169.254.169.254")
SOMEWHERE = End(outside=True, address="203.0.113.7")


@pytest.fixture(scope="session", params=OVERLAYS)
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """An overlay with every flag."""
    from manifests import rendered

    return rendered(f"every flag {request.param}", tmp_path_factory.mktemp("full"))


def container(manifests: Rendered) -> Object:
    (found,) = manifests.workers.spec["containers"]
    return dict(found)


@pytest.mark.parametrize("overlay", ["prod", "job", "jobset", "trainer"])
@pytest.mark.parametrize("gpus", [1, 8])
def test_resource_requests_are_derived_from_the_gpus(
    render: Render, overlay: str, gpus: int
) -> None:
    got = render(f"--overlay={overlay}", f"--gpus-per-node={gpus}")
    resources = container(got)["resources"]
    assert resources["requests"]["cpu"] == str(4 * gpus)
    memory = 32 * gpus * 2**30
    assert size_bytes(resources["requests"]["memory"]) == memory
    assert size_bytes(resources["limits"]["memory"]) == memory
    assert resources["limits"]["nvidia.com/gpu"] == gpus
    assert shared_memory(got) == memory // 4


def test_explicit_resources_override_the_derived_ones(render: Render) -> None:
    resources = container(render("--gpus-per-node=2", "--cpu=3", "--memory=20Gi"))["resources"]
    assert resources["requests"]["cpu"] == "3"
    assert resources["limits"]["memory"] == "20Gi"


def shared_memory(manifests: Rendered) -> int:
    (size,) = [
        v["emptyDir"]["sizeLimit"] for v in manifests.workers.spec["volumes"] if v["name"] == "shm"
    ]
    return size_bytes(size)


def test_resources_and_placement_are_rendered(full: Rendered) -> None:
    pod, resources = full.workers.spec, container(full)["resources"]
    assert resources["requests"]["cpu"] == "6"
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "48Gi"
    test_shared_memory_is_less_than_memory(full)
    assert pod["nodeSelector"] == {
        "example.com/pool": "h100",
        "topology.kubernetes.io/zone": "a",
    }
    assert pod["tolerations"][-2:] == [
        {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"},
        {"key": "example.com/maintenance", "operator": "Exists"},
    ]
    assert pod["tolerations"][0]["key"] == "node.kubernetes.io/not-ready", "those of the overlay"
    assert pod["priorityClassName"] == "training"


def test_labels_are_on_all_objects_and_pods_and_on_no_selector(full: Rendered) -> None:
    key = "example.com/team"
    for one in full.objects:
        assert one["metadata"]["labels"][key] == "ml", one["kind"]
        selector = one.get("spec", {}).get("selector", {})
        assert key not in selector and key not in selector.get("matchLabels", {})
        for claim in one.get("spec", {}).get("volumeClaimTemplates", []):
            assert key not in claim["metadata"].get("labels", {}), "cannot be changed later"
    for pod in full.pods():
        assert pod.labels[key] == "ml", pod


def test_registries_and_identities_are_set_on_the_service_accounts(full: Rendered) -> None:
    accounts = {a["metadata"]["name"]: a for a in full.of("ServiceAccount")}
    for name in {p.spec["serviceAccountName"] for p in full.pods()} - {"etcd"}:
        assert accounts[name]["imagePullSecrets"] == [{"name": "registry"}]
    workers = accounts["workers"]["metadata"]
    assert workers["annotations"] == {"example.com/role": "train"}
    for name in accounts.keys() - {"workers"}:
        assert "annotations" not in accounts[name]["metadata"], "checkpoints are the workers' own"


def test_credentials_are_given_to_workers_only(full: Rendered) -> None:
    worker = container(full)
    assert {"secretRef": {"name": "s3-credentials"}} in worker["envFrom"]
    assert {"name": "AWS_REGION", "value": "eu-west-1"} in worker["env"]
    for pod in full.pods():
        for one in pod.containers:
            assert pod.component == "worker" or "s3-credentials" not in str(one), pod


def test_the_network_policy_allows_the_port_of_a_custom_endpoint(full: Rendered) -> None:
    policies = full.of("NetworkPolicy")
    assert allowed(policies, WORKER, SOMEWHERE, 443)
    assert allowed(policies, WORKER, SOMEWHERE, 9000)
    assert allowed(policies, WORKER, End({"app": "minio"}, {"name": "storage"}), 9000)
    assert not allowed(policies, WORKER, SOMEWHERE, 9001)
    assert not allowed(policies, ETCD, SOMEWHERE, 9000)


def test_the_eks_identity_agent_is_reachable_but_node_metadata_is_not(render: Render) -> None:
    policies = render("--checkpoints=s3://bucket/runs").of("NetworkPolicy")
    assert allowed(policies, WORKER, EKS_AGENT, 80)
    assert not allowed(policies, WORKER, NODE_METADATA, 80)
    assert not allowed(policies, WORKER, SOMEWHERE, 80)
    assert not allowed(policies, WORKER, STRANGER, 80)


def test_google_cloud_workers_reach_the_metadata_server(render: Render) -> None:
    policies = render("--checkpoints=gs://bucket/runs").of("NetworkPolicy")
    assert allowed(policies, WORKER, NODE_METADATA, 80)
    assert not allowed(policies, ETCD, NODE_METADATA, 80)
    secret = render("--checkpoints=gs://bucket/runs", "--env-from-secret=gcs")
    assert not allowed(secret.of("NetworkPolicy"), WORKER, NODE_METADATA, 80)


def test_an_object_store_without_credentials_causes_a_warning(
    render: Render, capsys: pytest.CaptureFixture[str]
) -> None:
    store = "--checkpoints=s3://bucket/runs"
    render(store)
    assert "--env-from-secret" in capsys.readouterr().err
    render(store, "--name=llama")
    assert "`llama-workers`" in capsys.readouterr().err
    for given in ("--env-from-secret=s3", "--service-account-annotation=a/b=c"):
        render(store, given)
        assert "warning" not in capsys.readouterr().err


def test_the_size_of_the_volume_claim_is_configurable(render: Render) -> None:
    got = render("--storage-size=5Ti", "--checkpoints=class:lustre")
    spec = got.one("PersistentVolumeClaim", "checkpoints")["spec"]
    assert spec["resources"]["requests"]["storage"] == "5Ti"
    assert spec["storageClassName"] == "lustre"


def test_environment_values_are_escaped_for_the_kubelet(render: Render) -> None:
    worker = container(render("--env=PROMPT=$(HOSTNAME)"))
    assert {"name": "PROMPT", "value": "$$(HOSTNAME)"} in worker["env"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_setting_changes_the_health_port_everywhere(
    overlay: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from manifests import compose

    folder = compose(tmp_path_factory.mktemp(overlay), overlay, ())
    with (folder / "kustomization.yaml").open("a") as file:
        file.write(
            "configMapGenerator:\n- name: settings\n  behavior: merge\n"
            "  literals: [ELASTIC_HEALTH_PORT=9000]\n"
        )
    got = Rendered(overlay, kustomize(folder))
    assert got.settings["ELASTIC_HEALTH_PORT"] == "9000"
    assert container(got)["ports"] == [{"name": "health", "containerPort": 9000}]
    (port,) = got.one("Service", "workers")["spec"]["ports"]
    assert port == {"name": "health", "port": 9000, "targetPort": "health"}
    monitoring = End({"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
    policies = got.of("NetworkPolicy")
    assert allowed(policies, monitoring, WORKER, 9000)
    assert not allowed(policies, monitoring, WORKER, 8471)


def check_spot(got: Rendered) -> None:
    pod = got.workers.spec
    assert pod["terminationGracePeriodSeconds"] == 25
    assert got.settings["ELASTIC_TERMINATION_GRACE_S"] == "25"
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert len(terms["nodeSelectorTerms"]) == 4
    assert {"cloud.google.com/gke-spot", "nvidia.com/gpu"} <= {t["key"] for t in pod["tolerations"]}


def check_rdma(got: Rendered) -> None:
    pod, worker = got.workers.spec, container(got)
    assert worker["resources"]["limits"]["rdma/hca"] == 1
    assert worker["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)


def check_volcano(got: Rendered) -> None:
    assert got.workers.spec["schedulerName"] == "volcano"
    group = got.workers.template["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
    assert got.of("PodGroup", group)


def check_node_tls(got: Rendered) -> None:
    assert got.settings["ELASTIC_NODE_KEY"] == "/etc/elastic/node/tls.key"
    mounts = {m["name"]: m["mountPath"] for m in container(got)["volumeMounts"]}
    assert mounts["node-tls"] == "/etc/elastic/node"


BY_HAND: dict[str, Callable[[Rendered], None]] = {
    "spot": check_spot,
    "rdma": check_rdma,
    "volcano": check_volcano,
    "node-tls": check_node_tls,
}
ALONE = [(name,) for name in BY_HAND]


@pytest.mark.parametrize("components", [*ALONE, tuple(BY_HAND)], ids="+".join)
@pytest.mark.parametrize("overlay", ["prod", "job", "jobset", "trainer"])
def test_manually_added_components_work_on_every_workload(
    overlay: str, components: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also alone: a component must not depend on another one. Without `derived`, which is easily
    forgotten.
    """
    from manifests import compose

    folder = compose(tmp_path_factory.mktemp(overlay), overlay, components)
    file = folder / "kustomization.yaml"
    kept = [line for line in file.read_text().splitlines() if "components/derived" not in line]
    file.write_text("\n".join(kept) + "\n")
    got = Rendered(overlay, kustomize(folder))
    for name in components:
        BY_HAND[name](got)
    # The output has one workload, with the restart policy of its kind.
    kinds = {"prod": "StatefulSet", "job": "Job", "jobset": "JobSet", "trainer": "TrainingRuntime"}
    assert got.workers.owner["kind"] == kinds[overlay]
    assert got.workers.spec.get("restartPolicy") == (None if overlay == "prod" else "Never")


def test_every_flag_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from elastic.cli import kube

    with pytest.raises(SystemExit):
        kube.main(["render", "-h"])
    told = capsys.readouterr().out
    assert IMAGE.partition("=")[0] in told
    for flags in PARTS.values():
        for flag in flags:
            assert flag.partition("=")[0] in told
