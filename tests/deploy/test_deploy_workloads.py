"""Objects are consistent: selectors, names, ports, volumes, sizes, budgets, lifecycles."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
from manifests import DEPLOY, OWN_CERTIFICATES, Object, Pod, Rendered, kustomize

from elastic.cli.run import node_range

UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti|)", text)
    assert match, text
    return int(match[1]) * UNITS[match[2]]


def selects(selector: Mapping[str, str], pod: Pod) -> bool:
    return bool(selector) and selector.items() <= pod.labels.items()


def selected(selector: Mapping[str, str], manifests: Rendered) -> list[Pod]:
    return [pod for pod in manifests.pods() if selects(selector, pod)]


def test_workloads_select_their_own_pods_only(manifests: Rendered) -> None:
    for workload in manifests.of("StatefulSet"):
        selector = workload["spec"]["selector"]["matchLabels"]
        assert [p.owner["metadata"]["name"] for p in selected(selector, manifests)] == [
            workload["metadata"]["name"]
        ]


def test_services_select_pods_with_matching_ports(manifests: Rendered) -> None:
    for service in manifests.of("Service"):
        (pod,) = selected(service["spec"]["selector"], manifests)
        ports = {p["name"]: p["containerPort"] for c in pod.containers for p in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], service["metadata"]["name"]


def test_statefulsets_refer_to_an_existing_service(manifests: Rendered) -> None:
    for workload in manifests.of("StatefulSet"):
        service = manifests.one("Service", workload["spec"]["serviceName"])
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_workers_are_resolvable_before_they_are_ready(manifests: Rendered) -> None:
    service = manifests.one("Service", "workers")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert selects(service["selector"], manifests.workers)


def test_every_disruption_budget_matches_its_workload(manifests: Rendered) -> None:
    covered = []
    for budget in manifests.of("PodDisruptionBudget"):
        spec = budget["spec"]
        (pod,) = selected(spec["selector"]["matchLabels"], manifests)
        covered.append(pod.component)
        if pod.component == "worker":
            # Integers: maxUnavailable and percentages count from the desired replicas
            # (test_deploy_disruption.py).
            assert "maxUnavailable" not in spec
            low, high = node_range(manifests.settings["PET_NNODES"])
            assert type(spec["minAvailable"]) is int
            assert low <= spec["minAvailable"] < high, "no node could ever be drained"
        else:
            assert "minAvailable" not in spec
            assert type(spec["maxUnavailable"]) is int and spec["maxUnavailable"] == 1
    assert len(covered) == len(set(covered)), "a pod with two budgets cannot be evicted at all"
    assert "worker" in covered


def test_budgets_do_not_protect_workers_outside_the_world(manifests: Rendered) -> None:
    for budget in manifests.of("PodDisruptionBudget"):
        if selects(budget["spec"]["selector"]["matchLabels"], manifests.workers):
            assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_shared_memory_is_less_than_memory(manifests: Rendered) -> None:
    for pod in manifests.pods():
        limit = sum(size_bytes(c["resources"]["limits"]["memory"]) for c in pod.spec["containers"])
        shared = [
            size_bytes(v["emptyDir"]["sizeLimit"])
            for v in pod.spec.get("volumes", [])
            if v.get("emptyDir", {}).get("medium") == "Memory"
        ]
        assert sum(shared) < limit, pod
        assert len(shared) == (pod.component == "worker")


def test_shared_memory_is_less_than_memory_in_the_base() -> None:
    """Every overlay of ours sets its own sizes; those of others may not."""
    test_shared_memory_is_less_than_memory(Rendered("base", kustomize(DEPLOY / "base")))


def test_all_referenced_objects_exist(manifests: Rendered) -> None:
    secrets = {c["spec"]["secretName"] for c in manifests.of("Certificate")}
    if "own-certificates" in manifests.name:
        assert not [o for o in manifests.objects if "cert-manager" in o["apiVersion"]]
        secrets = {*OWN_CERTIFICATES}
    claims = {c["metadata"]["name"] for c in manifests.of("PersistentVolumeClaim")}
    configs = {c["metadata"]["name"] for c in manifests.of("ConfigMap")}
    for pod in manifests.pods():
        volumes = {v["name"]: v for v in pod.spec.get("volumes", [])}
        templates = pod.owner["spec"].get("volumeClaimTemplates", [])
        mounted = {m["name"] for c in pod.containers for m in c.get("volumeMounts", [])}
        assert mounted == {*volumes, *(t["metadata"]["name"] for t in templates)}, pod
        for volume in volumes.values():
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
        for container in pod.containers:
            for source in container.get("envFrom", []):
                assert source["configMapRef"]["name"] in configs
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("configMapKeyRef")
                if reference:
                    data = manifests.one("ConfigMap", reference["name"])["data"]
                    assert reference["key"] in data


def test_all_sizes_follow_the_settings(manifests: Rendered) -> None:
    low, high = node_range(manifests.settings["PET_NNODES"])
    assert pod_counts(manifests.workers.owner) == {high}
    for job in manifests.of("TrainJob"):
        assert job["spec"]["trainer"]["numNodes"] == high
    assert manifests.one("PodDisruptionBudget", "workers")["spec"]["minAvailable"] == low
    for group in manifests.of("PodGroup"):
        assert group["spec"]["minMember"] == low
    for job in manifests.of("Job", "workers"):
        annotations = job["metadata"].get("annotations", {})
        assert annotations.get("kueue.x-k8s.io/job-min-parallelism", str(low)) == str(low)


def pod_counts(owner: Object) -> set[int]:
    spec = owner["spec"]
    if owner["kind"] == "StatefulSet":
        return {spec["replicas"]}
    if owner["kind"] == "TrainingRuntime":
        return {spec["mlPolicy"]["numNodes"]}
    spec = training_job(owner)
    return {spec["parallelism"], spec["completions"]}


def test_gpus_and_processes_of_a_node_are_equal(manifests: Rendered) -> None:
    gpus = manifests.workers.spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
    processes = manifests.settings["PET_NPROC_PER_NODE"]
    assert processes == ("1" if gpus is None else str(gpus))


def test_restart_policies_match_the_workload_kind(manifests: Rendered) -> None:
    pod = manifests.workers
    parks = manifests.settings["ELASTIC_PARK"]
    if pod.owner["kind"] == "StatefulSet":
        # A StatefulSet rejects `Never`, and restarts any container that exits.
        assert pod.spec.get("restartPolicy", "Always") == "Always"
        assert parks == "1"
        return
    assert pod.spec["restartPolicy"] == "Never"  # backoffLimitPerIndex allows no other
    assert parks == "0"
    assert not manifests.of("StatefulSet", "workers")


def test_replacement_pods_start_in_parallel_with_the_current_template(manifests: Rendered) -> None:
    for workload in manifests.of("StatefulSet", "workers"):
        spec = workload["spec"]
        assert spec["podManagementPolicy"] == "Parallel"
        strategy = spec["updateStrategy"]
        assert strategy["type"] == "RollingUpdate"
        assert strategy["rollingUpdate"]["partition"] > 100_000, "below it, pods get new templates"


def training_job(owner: Object) -> Object:
    """The spec of the Job, for any kind of workload."""
    spec: Object = owner["spec"]
    if owner["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    if owner["kind"] != "Job":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec


def test_jobs_tolerate_the_loss_of_nodes(manifests: Rendered) -> None:
    if manifests.workers.owner["kind"] == "StatefulSet":
        return
    job = training_job(manifests.workers.owner)
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimitPerIndex"] >= 10
    assert "backoffLimit" not in job, "one count and one delay for all nodes"
    # With it, a pod of a machine that died silently is never replaced.
    assert "podFailurePolicy" not in job
    assert job.get("podReplacementPolicy", "TerminatingOrFailed") == "TerminatingOrFailed"
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def test_the_finisher_exits_with_the_outcome_of_the_job(manifests: Rendered) -> None:
    for pod in manifests.pods("finisher"):
        fail, ignore = pod.owner["spec"]["podFailurePolicy"]["rules"]
        assert fail["action"] == "FailJob"
        assert fail["onExitCodes"]["containerName"] == pod.spec["containers"][0]["name"]
        assert {2, 65, 70} <= set(fail["onExitCodes"]["values"])
        assert not {0, 75, 143, 137} & set(fail["onExitCodes"]["values"]), "drains are no failures"
        assert ignore["action"] == "Ignore"
        args = pod.spec["containers"][0]["args"]
        assert args[0] == "finish"
        target = next(a.partition("=")[2] for a in args if a.startswith("--statefulset="))
        assert manifests.of("StatefulSet", target)


def test_probes_use_the_health_port_of_the_agent(manifests: Rendered) -> None:
    (container,) = manifests.workers.spec["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert str(ports["health"]) == manifests.settings["ELASTIC_HEALTH_PORT"]
    for probe, path in (
        ("startupProbe", "/livez"),
        ("livenessProbe", "/livez"),
        ("readinessProbe", "/readyz"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}
    assert "lifecycle" not in container, "a preStop sleep would eat the grace period"


@pytest.mark.parametrize("overlay", ["prod", "job", "jobset", "trainer"])
def test_checkpoints_are_shared_by_all_machines(
    overlay: str, render: Callable[[str], Rendered]
) -> None:
    claim = render(overlay).one("PersistentVolumeClaim", "checkpoints")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
