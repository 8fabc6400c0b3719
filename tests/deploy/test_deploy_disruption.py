"""Drains: the evictions granted by the rendered budgets, as the disruption controller computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from disruption_controller import NO_SCALE, GuardedPod, budget_status, evict
from manifests import Object, Rendered

from elastic.cli.run import node_range

# `--nodes 4:16`, as in the runbook's example.
LOW, HIGH = 4, 16
ASKED_FOR = {"workers": HIGH}
WAS: Object = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}


@pytest.fixture
def budget(render: Callable[[str], Rendered]) -> Object:
    """The budget of prod, for 4:16 nodes (test_deploy_workloads.py: the number follows the
    settings).
    """
    spec: Object = render("prod").one("PodDisruptionBudget", "workers")["spec"]
    return {**spec, "minAvailable": LOW}


def pods(ready: int, not_ready: int = 0, pending: int = 0) -> list[GuardedPod]:
    found = [GuardedPod(f"workers-{i}", "workers") for i in range(ready)]
    found += [GuardedPod(f"spare-{i}", "workers", ready=False) for i in range(not_ready)]
    return found + [
        GuardedPod(f"pending-{i}", "workers", ready=False, pending=True) for i in range(pending)
    ]


@pytest.mark.parametrize(
    ("some", "allowed"),
    [
        (pods(ready=6, pending=10), 2),  # room for 6 of 16
        (pods(ready=15, not_ready=1), 11),  # one spare that is not in the world
        (pods(ready=15, pending=1), 11),  # after the first drain of a full cluster
        (pods(ready=16), 12),
        (pods(ready=4, pending=12), 0),
        (pods(ready=3, pending=13), 0),
    ],
)
def test_the_budget_allows_disruptions_down_to_the_minimum(
    budget: Object, some: list[GuardedPod], allowed: int
) -> None:
    assert budget_status(budget, some, ASKED_FOR).disruptions_allowed == allowed


def test_max_unavailable_would_block_drains() -> None:
    """The reason against it: these drains hung on a real control plane (issue 15)."""
    full = budget_status(WAS, pods(ready=16), ASKED_FOR)
    assert (full.desired_healthy, full.disruptions_allowed) == (15, 1)
    for some in (pods(ready=6, pending=10), pods(ready=15, not_ready=1), pods(15, pending=1)):
        status = budget_status(WAS, some, ASKED_FOR)
        assert (status.desired_healthy, status.disruptions_allowed) == (15, 0)
    assert budget_status(WAS, pods(4), {"workers": NO_SCALE}).disruptions_allowed == 0  # a Job


def test_drains_are_granted_down_to_the_minimum(budget: Object) -> None:
    some = pods(ready=6, pending=10)
    granted = [evict(pod, budget, some, ASKED_FOR) for pod in some if pod.ready]
    assert granted == [True, True, False, False, False, False]


@pytest.mark.parametrize("ready", [LOW, LOW - 1])
def test_pods_outside_the_world_can_always_be_evicted(budget: Object, ready: int) -> None:
    """Even below the minimum, where the default policy would protect it."""
    some = pods(ready=ready, not_ready=1, pending=1)
    assert [evict(pod, budget, some, ASKED_FOR) for pod in some] == [False] * ready + [True] * 2
    by_default = {k: v for k, v in budget.items() if k != "unhealthyPodEvictionPolicy"}
    again = pods(ready=ready, not_ready=1)
    assert evict(again[-1], by_default, again, ASKED_FOR) == (ready >= LOW)


def test_no_overlay_requires_all_replicas_ready_for_a_drain(manifests: Rendered) -> None:
    """With one Ready node more than the minimum, one may be evicted, whatever the replicas."""
    low, high = node_range(manifests.settings["PET_NNODES"])
    spec = manifests.one("PodDisruptionBudget", "workers")["spec"]
    jobs_too = {"workers": high if manifests.of("StatefulSet", "workers") else NO_SCALE}
    some = pods(ready=low + 1, pending=high - low - 1)
    status = budget_status(spec, some, jobs_too)
    assert (status.desired_healthy, status.disruptions_allowed) == (low, 1)


def test_only_one_etcd_member_at_a_time_can_be_evicted(render: Callable[[str], Rendered]) -> None:
    spec = render("prod").one("PodDisruptionBudget", "etcd")["spec"]
    some = [GuardedPod(f"etcd-{i}", "etcd") for i in range(3)]
    assert [evict(member, spec, some, {"etcd": 3}) for member in some] == [True, False, False]
