"""What the runbook tells people to type fits the manifests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from manifests import DEPLOY, RESTORE, Rendered

from elastic import errors
from elastic.cli import exit_codes
from elastic.tuning.timeouts import for_pod

RUNBOOK = (DEPLOY / "README.md").read_text()


@pytest.fixture
def prod(render: Callable[[str], Rendered]) -> Rendered:
    return render("prod")


def test_every_path_exists() -> None:
    for path in re.findall(r"deploy/[\w./-]+", RUNBOOK):
        assert (DEPLOY.parent / path).exists(), path
    for target in re.findall(r"\]\(([^)#]+)\)", RUNBOOK):
        if not target.startswith("http"):
            assert (DEPLOY / target).exists(), target


def test_every_object_exists(prod: Rendered) -> None:
    claim = prod.one("StatefulSet", "etcd")["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    assert set(re.findall(r"[a-z]+-etcd-\d", RUNBOOK)) == {f"{claim}-etcd-{i}" for i in range(3)}
    verbs = "scale|patch|delete|rollout status"
    named = rf"kubectl -n \$N (?:{verbs}) (statefulset|configmap|job) ([\w-]+)"
    for kind, name in re.findall(named, RUNBOOK):
        real = {"statefulset": "StatefulSet", "configmap": "ConfigMap", "job": "Job"}[kind]
        assert name == "etcd-restore" or prod.of(real, name), f"{kind} {name}"


def test_patches_are_what_the_manifests_understand(
    prod: Rendered, render: Callable[[str], Rendered]
) -> None:
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
    assert volumes["value"] == pod.spec["volumes"], "the restored members would differ for ever"


def test_exit_codes_are_those_of_the_code() -> None:
    table = dict(re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", RUNBOOK, re.MULTILINE))
    codes = {int(code) for row in table for code in row.split(",")}
    assert codes == {
        exit_codes.DONE,
        exit_codes.FAILED,
        errors.ConfigError.exit_code,
        errors.CheckpointRequired.exit_code,
        errors.CoordinationError.exit_code,
        errors.BudgetSpent.exit_code,
        errors.Preempted.exit_code,
    }


def test_the_time_for_a_last_checkpoint_is_the_computed_one(prod: Rendered) -> None:
    (said,) = re.findall(r"`grace − (\d+) s`", RUNBOOK)
    grace_s = prod.workers.spec["terminationGracePeriodSeconds"]
    assert for_pod(grace_s).checkpoint_budget_s == grace_s - int(said)
