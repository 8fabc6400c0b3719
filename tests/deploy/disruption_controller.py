"""The disruption controller's arithmetic, and the decisions of the eviction API.

After kubernetes/kubernetes: pkg/controller/disruption/disruption.go (getExpectedPodCount,
getExpectedScale, countHealthyPods, updatePdbStatus, failSafe) and
pkg/registry/core/pod/storage/eviction.go (Create, canIgnorePDB).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manifests import Object

# The replicas in a controller's scale subresource. Jobs have none.
NO_SCALE = None


@dataclass
class GuardedPod:
    """The relevant state of a pod that a budget selects."""

    name: str
    controller: str
    ready: bool = True
    pending: bool = False
    terminating: bool = False


@dataclass(frozen=True)
class BudgetStatus:
    """``PodDisruptionBudgetStatus``."""

    expected_pods: int
    current_healthy: int
    desired_healthy: int
    disruptions_allowed: int


def budget_status(
    spec: Object, pods: Sequence[GuardedPod], scales: Mapping[str, int | None]
) -> BudgetStatus:
    """``trySync``. ``scales``: the replicas that each controller is asked for."""
    healthy = sum(pod.ready and not pod.terminating for pod in pods)
    counted = _expected_and_desired(spec, pods, scales)
    if counted is None:  # failSafe
        return BudgetStatus(0, healthy, 0, 0)
    expected, desired = counted
    allowed = healthy - desired
    if expected <= 0 or allowed <= 0:
        allowed = 0
    return BudgetStatus(expected, healthy, desired, allowed)


def _expected_and_desired(
    spec: Object, pods: Sequence[GuardedPod], scales: Mapping[str, int | None]
) -> tuple[int, int] | None:
    """``getExpectedPodCount``; None where a controller's scale cannot be found."""
    least = spec.get("minAvailable")
    if type(least) is int:
        return len(pods), least
    controllers = {pod.controller for pod in pods}
    if any(scales[c] is NO_SCALE for c in controllers):
        return None
    expected = sum(scales[c] or 0 for c in controllers)
    if least is not None:
        return expected, _scaled(least, expected)
    return expected, max(0, expected - _scaled(spec["maxUnavailable"], expected))


def _scaled(value: int | str, total: int) -> int:
    """``GetScaledValueFromIntOrPercent``, rounded up."""
    if isinstance(value, int):
        return value
    return math.ceil(int(value.removesuffix("%")) * total / 100)


def evict(
    pod: GuardedPod, spec: Object, pods: Sequence[GuardedPod], scales: Mapping[str, int | None]
) -> bool:
    """Whether the eviction is granted (201) or not (429). A granted one marks the pod."""
    if not (pod.pending or pod.terminating):  # canIgnorePDB
        status = budget_status(spec, pods, scales)
        if not pod.ready:
            always = spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
            enough = status.current_healthy >= status.desired_healthy > 0
            if not always and not enough:
                return False
        elif status.disruptions_allowed == 0:
            return False
    pod.terminating = True
    return True
