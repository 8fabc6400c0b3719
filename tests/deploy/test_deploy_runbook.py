"""The commands of the runbook match the manifests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from manifests import DEPLOY, OWN_CERTIFICATES, RESTORE, Rendered
from runbook_shell import RUNBOOK

from elastic import errors
from elastic.cli import arguments
from elastic.tuning.intervals import checkpoint_budget_s


@pytest.fixture
def prod(render: Callable[[str], Rendered]) -> Rendered:
    return render("prod")


def test_every_path_in_the_runbook_exists() -> None:
    for path in re.findall(r"(?<!tests/)\bdeploy/[\w./-]+", RUNBOOK):
        assert (DEPLOY.parent / path).exists(), path
    for target in re.findall(r"\]\(([^)#]+)\)", RUNBOOK):
        if not target.startswith("http"):
            assert (DEPLOY / target).exists(), target


def test_every_object_in_the_runbook_exists(prod: Rendered) -> None:
    claim = prod.one("StatefulSet", "etcd")["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    assert set(re.findall(r"[a-z]+-etcd-\d", RUNBOOK)) == {f"{claim}-etcd-{i}" for i in range(3)}
    verbs = "scale|patch|delete|rollout status"
    named = rf"kubectl -n \$N (?:{verbs}) (statefulset|configmap|job) ([\w-]+)"
    for kind, name in re.findall(named, RUNBOOK):
        real = {"statefulset": "StatefulSet", "configmap": "ConfigMap", "job": "Job"}[kind]
        assert name == "etcd-restore" or prod.of(real, name), f"{kind} {name}"


def test_patches_match_the_manifests(prod: Rendered, render: Callable[[str], Rendered]) -> None:
    patches = [json.loads(text) for text in re.findall(r"-p '([\[{].*?[\]}])'", RUNBOOK, re.DOTALL)]
    states = {p["data"]["INITIAL_CLUSTER_STATE"] for p in patches if "data" in p}
    assert states == {"new", "existing"}
    assert prod.one("ConfigMap", "etcd")["data"].keys() == {"INITIAL_CLUSTER_STATE"}
    (after_restore,) = [p for p in patches if isinstance(p, list)]
    (pod,), (restored,) = prod.pods("etcd"), render(RESTORE).pods("etcd")
    removal, volumes = after_restore
    assert removal == {"op": "remove", "path": "/spec/template/spec/initContainers"}
    assert "initContainers" in restored.spec and "initContainers" not in pod.spec
    assert volumes["path"] == "/spec/template/spec/volumes"
    assert volumes["value"] == pod.spec["volumes"], "the restored members would always differ"


def test_exit_codes_match_the_code() -> None:
    table = dict(re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", RUNBOOK, re.MULTILINE))
    codes = {int(code) for row in table for code in row.split(",")}
    assert codes == {
        arguments.DONE,
        arguments.FAILED,
        errors.ConfigError.exit_code,
        errors.CheckpointRequired.exit_code,
        errors.CoordinationError.exit_code,
        errors.BudgetSpent.exit_code,
        errors.NodeUnfit.exit_code,
        errors.Preempted.exit_code,
    }


def test_the_time_for_a_last_checkpoint_matches_the_code(prod: Rendered) -> None:
    (said,) = re.findall(r"`grace − (\d+) s`", RUNBOOK)
    grace_s = prod.workers.spec["terminationGracePeriodSeconds"]
    assert checkpoint_budget_s(grace_s) == grace_s - int(said)


# Defaults of Kubernetes, with where they are set: kube-controller-manager's flags (40 s before
# 1.32), pkg/controller/podgc/gc_controller.go.
NODE_MONITOR_GRACE_S = 50
GC_CHECK_PERIOD_S = 20
QUARANTINE_S = 40


def test_the_times_of_a_dead_node_match_the_control_plane(prod: Rendered) -> None:
    _, _, section = RUNBOOK.partition("## A dead node")
    section = " ".join(section.partition("\n## ")[0].split())
    tolerated = {
        t["tolerationSeconds"]
        for t in prod.workers.spec["tolerations"]
        if t["key"] in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    }
    (tolerated_s,) = tolerated
    assert f"After {NODE_MONITOR_GRACE_S + tolerated_s} s the pod is `Terminating`" in section
    assert f"| node is NotReady | {NODE_MONITOR_GRACE_S} s; 40 s before" in section
    assert f"| pod is `Terminating` | {tolerated_s} s more |" in section
    assert f"| replaced after the taint | up to {GC_CHECK_PERIOD_S} s |" in section
    # Found at one check, quarantined, deleted at a later one.
    latest_s = QUARANTINE_S + 2 * GC_CHECK_PERIOD_S
    assert f"| {QUARANTINE_S} to {latest_s} s | pkg/controller/podgc: `quarantineTime`" in section


def test_custom_certificates_match_those_of_cert_manager(
    render: Callable[[str], Rendered],
) -> None:
    prod = render("prod+node-tls")
    row = r"^\| `((?:etcd|node)-[\w-]+)` \| (\w+)' authority \|\s*(.*?)\s*\|\s+([^|]+) \|$"
    table = {secret: rest for secret, *rest in re.findall(row, RUNBOOK, re.MULTILINE)}
    assert set(table) == OWN_CERTIFICATES
    made = {c["spec"]["secretName"]: c["spec"] for c in prod.of("Certificate")}
    issuers: dict[str, set[str]] = {}
    for secret, (authority, names, usages) in table.items():
        spec = made[secret]
        assert re.findall(r"`([^`]+)`", names) == [
            *spec.get("dnsNames", []),
            *spec.get("ipAddresses", []),
        ]
        assert usages.split(", ") == [u for u in spec["usages"] if u.endswith("auth")]
        issuers.setdefault(authority, set()).add(spec["issuerRef"]["name"])
    assert sorted(map(sorted, issuers.values())) == [["etcd-ca"], ["etcd-peer-ca"], ["node-ca"]]


def test_inline_commands_are_known() -> None:
    """Instructions are in blocks, which test_deploy_commands.py runs."""
    text = re.sub(r"^```.*?^```", "", RUNBOOK, flags=re.MULTILINE | re.DOTALL)
    found = {" ".join(m.split()) for m in re.findall(r"`(kubectl [^`]+)`", text)}
    assert found <= {
        "kubectl -n elastic-dev delete pod workers-1",
        "kubectl -n $N delete statefulset workers",
        "kubectl -n $N exec etcd-0 -- etcdctl auth enable",
        "kubectl apply",
        "kubectl delete -k overlays/llama",
        "kubectl delete pod",
        "kubectl rollout restart statefulset workers",
        "kubectl taint",
    }
