"""Several jobs in one namespace share its etcd and nothing else: names, selectors, budgets,
permissions, certificates, prefixes and policies of each apply to its own pods only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import DEPLOY, INSTANCE, NAME, Object, Rendered, kustomize
from network_rules import allowed
from pod_security import violations
from test_deploy_network import ETCD, MONITORING, OUTSIDE, ours

from elastic.store.client import parse_endpoints
from elastic.tuning.options import read_options

JOBS = ("several prod", "several job", "several jobset", "several trainer")
LLAMA, BERT = ours("worker", "llama"), ours("worker", "bert")


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, render: Callable[[str], Rendered]) -> Rendered:
    """The job `llama`."""
    return render(request.param)


@pytest.fixture
def namespace(job: Rendered, render: Callable[[str], Rendered]) -> Rendered:
    """The complete namespace: shared part, `llama`, `bert` and a job without a name."""
    unnamed = render("prod").objects  # includes the shared part
    return Rendered("all", (*unnamed, *job.objects, *render("several: another").objects))


def test_a_job_in_a_shared_namespace_renders_no_shared_objects(
    job: Rendered, render: Callable[[str], Rendered]
) -> None:
    shared = {key(o) for o in render("shared").objects}
    assert {kind for kind, _ in shared} >= {"Namespace", "StatefulSet", "Issuer", "NetworkPolicy"}
    assert not shared & {key(o) for o in job.objects}
    assert shared <= {key(o) for o in render("prod").objects}, "the first job may bring it, too"


def key(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def test_jobs_share_no_objects(namespace: Rendered) -> None:
    keys = [key(o) for o in namespace.objects]
    assert len(keys) == len(set(keys))
    for kind, name in keys:
        owner = next((o for o in namespace.objects if key(o) == (kind, name)), None)
        assert owner is not None
        label = owner["metadata"].get("labels", {}).get(INSTANCE)
        assert name.startswith("llama-") == (label == "llama")
        assert name.startswith("bert-") == (label == "bert")


def test_selectors_match_pods_of_their_own_job_only(namespace: Rendered) -> None:
    found: dict[str, list[str]] = {}
    for one in namespace.objects:
        selector = one.get("spec", {}).get("selector")
        if selector is None:
            continue
        labels = selector.get("matchLabels", selector)
        pods = [str(p) for p in namespace.pods() if labels.items() <= p.labels.items()]
        assert len(pods) == 1, f"{key(one)} selects {pods}"
        if one["kind"] == "PodDisruptionBudget":
            found.setdefault(pods[0], []).append(one["metadata"]["name"])
    assert all(len(budgets) == 1 for budgets in found.values()), "two budgets forbid all evictions"
    assert len(found) == 4, "etcd and three jobs"
    for pod in namespace.pods("worker"):
        for spread in pod.spec["topologySpreadConstraints"]:
            assert spread["labelSelector"]["matchLabels"].items() <= pod.labels.items()


def test_a_job_refers_to_its_own_objects_only(job: Rendered) -> None:
    pod = job.workers
    assert pod.spec["serviceAccountName"] == "llama-workers"
    assert job.of("ServiceAccount", "llama-workers")
    assert job.settings["ELASTIC_PREFIX"] == "/elastic/llama"
    volumes = {v["name"]: v for v in pod.spec["volumes"]}
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == "llama-checkpoints"
    assert job.of("PersistentVolumeClaim", "llama-checkpoints")
    for owner in job.of("StatefulSet"):
        assert job.of("Service", owner["spec"]["serviceName"])
    for train_job in job.of("TrainJob"):
        assert job.of("TrainingRuntime", train_job["spec"]["runtimeRef"]["name"])
    annotations = pod.template["metadata"]["annotations"]
    assert job.of("PodGroup", annotations["scheduling.k8s.io/group-name"])
    (queue,) = job.of("LocalQueue")
    queued = [
        label
        for o in job.objects
        if (label := o["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name"))
    ]
    assert queued == [queue["metadata"]["name"]]
    assert violations(pod) == set()


def test_sizes_follow_the_settings_under_any_name(job: Rendered) -> None:
    assert job.settings["PET_NNODES"] == "3:5"
    (group,) = job.of("PodGroup")
    assert group["spec"]["minMember"] == 3
    for workload in job.of("StatefulSet"):
        assert workload["spec"]["replicas"] == 5


def test_the_finisher_may_end_its_own_job_only(
    render: Callable[[str], Rendered],
) -> None:
    for job, name in ((render("several prod"), "llama"), (render("several: another"), "bert")):
        (finisher,) = job.pods("finisher")
        (container,) = finisher.spec["containers"]
        assert f"--statefulset={name}-workers" in container["args"]
        assert job.of("StatefulSet", f"{name}-workers")
        (role,), (binding,) = job.of("Role"), job.of("RoleBinding")
        assert [rule["resourceNames"] for rule in role["rules"]] == [[f"{name}-workers"]]
        assert binding["roleRef"]["name"] == role["metadata"]["name"] == f"{name}-workers-finisher"
        assert binding["subjects"] == [
            {
                "kind": "ServiceAccount",
                "name": finisher.spec["serviceAccountName"],
                "namespace": "team",
            }
        ]
        assert container["envFrom"] == job.workers.containers[0]["envFrom"][:1]
        assert job.of("Job")[0]["metadata"]["name"] == f"{name}-workers-finisher"


def test_a_job_reaches_the_shared_etcd_with_its_own_certificate(
    job: Rendered, render: Callable[[str], Rendered]
) -> None:
    shared = render("shared")
    etcd = shared.one("StatefulSet", "etcd")
    members = [f"etcd-{i}.{etcd['spec']['serviceName']}" for i in range(etcd["spec"]["replicas"])]
    assert [e.host for e in parse_endpoints(job.settings["PET_RDZV_ENDPOINT"])] == members
    (certificate,) = job.of("Certificate")
    assert certificate["spec"]["commonName"] == "llama", "etcd's name of the user"
    assert shared.of("Issuer", certificate["spec"]["issuerRef"]["name"])
    for pod in (job.workers, *job.pods("finisher")):
        (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "etcd-client"]
        assert volume["secret"]["secretName"] == certificate["spec"]["secretName"]
    secrets = [c["spec"]["secretName"] for c in shared.of("Certificate")]
    assert certificate["spec"]["secretName"] not in secrets
    options = read_options({}, {k: v for k, v in job.settings.items() if "PREFIX" in k})
    assert options.prefix == "/elastic/llama"


def test_network_policies_isolate_jobs_except_for_etcd(namespace: Rendered) -> None:
    policies = namespace.of("NetworkPolicy")
    for one, other in ((LLAMA, BERT), (BERT, LLAMA), (LLAMA, ours("worker"))):
        assert allowed(policies, one, one, 34567)
        assert not allowed(policies, one, other, 34567)
        assert allowed(policies, one, ETCD, 2379)
        assert allowed(policies, MONITORING, one, 8471)
        assert not allowed(policies, OUTSIDE, one, 8471)
    assert allowed(policies, ours("finisher", "bert"), ETCD, 2379)
    assert allowed(policies, ours("finisher", "bert"), OUTSIDE, 443)
    assert allowed(policies, BERT, OUTSIDE, 9000), "its store's port"
    assert not allowed(policies, LLAMA, OUTSIDE, 9000)


def test_pods_have_the_labels_used_by_these_tests(namespace: Rendered) -> None:
    labels = [(p.component, p.labels[INSTANCE]) for p in namespace.pods("worker")]
    assert sorted(labels) == [("worker", "bert"), ("worker", "llama"), ("worker", "workers")]
    for pod in namespace.pods():
        assert pod.labels[NAME] == "elastic"


def test_the_run_id_defaults_to_the_name_of_the_job(
    render: Callable[[str], Rendered],
) -> None:
    """Jobs may share a bucket, so they must not all use its folder `job-1`."""
    settings = render("several prod").settings
    assert settings["PET_RDZV_ID"] == "llama-1"
    assert settings["ELASTIC_CHECKPOINTS"] == "/checkpoints/llama-1"


def test_the_shared_overlay_accepts_custom_certificates(
    render: Callable[[str], Rendered], tmp_path: Path
) -> None:
    deploy = os.path.relpath(DEPLOY, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{deploy}/overlays/shared]\n"
        f"components: [{deploy}/components/own-certificates]\n"
    )
    shared = render("shared").objects
    kept = [o for o in shared if "cert-manager" not in o["apiVersion"]]
    assert 0 < len(kept) < len(shared)
    assert list(kustomize(tmp_path)) == kept
