"""A model of the StatefulSet controller's revisions: which pod gets which template, and when.

After kubernetes/kubernetes, pkg/controller/statefulset/stateful_set_control.go and
stateful_set_utils.go; the function of each step is named beside it. The version is that of 1.29 and
newer in ``completeRollingUpdate`` (pull request 120731: an update is complete when the counts equal
``spec.replicas``, not each other). Sets here are ``Parallel``: the ordered mode is not modelled. A
pass of the controller (``sync``) and one of all kubelets (``run_kubelets``) are separate, so that
tests can put anything in between.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from manifests import Object

PENDING, RUNNING = "Pending", "Running"


@dataclass
class Pod:
    """A pod of a set, and its template."""

    ordinal: int
    revision: str
    template: Object
    phase: str = ""  # not yet in the API server's answer
    ready: bool = False
    terminating: bool = False

    @property
    def available(self) -> bool:
        """``isUnavailable`` negated; minReadySeconds is 0 in our sets."""
        return self.phase == RUNNING and self.ready and not self.terminating


@dataclass
class Revision:
    """A ControllerRevision: history keeps the templates only (``getPatch``)."""

    name: str
    template: Object


@dataclass
class Status:
    """``computeReplicaStatus``."""

    replicas: int = 0
    ready: int = 0
    current: int = 0
    updated: int = 0
    current_revision: str = ""
    update_revision: str = ""


@dataclass
class StatefulSetController:
    """One set. ``spec`` is that of the object: the next ``sync`` sees changes of the user."""

    spec: Object
    pods: dict[int, Pod] = field(default_factory=dict)
    revisions: list[Revision] = field(default_factory=list)  # oldest first
    status: Status = field(default_factory=Status)
    room: int | None = None  # machines that fit a pod; the others stay Pending
    names: int = 0

    def sync(self) -> None:
        """``UpdateStatefulSet``: one pass."""
        parallel = self.spec.get("podManagementPolicy") == "Parallel"
        assert parallel or self.spec["replicas"] <= 1, "the ordered mode is not modelled"
        current, update = self._revisions()
        before = dict(self.pods)
        created = self._create_missing(current, update)
        status = self._count([*before.values(), *created], current, update)
        self._delete_condemned()
        self._update_one(update, status)
        self._complete(status)
        self.status = status
        for pod in created:
            pod.phase = PENDING
            self.pods[pod.ordinal] = pod
        self._truncate_history()

    def run_kubelets(self) -> None:
        """Terminating pods end; others run and become ready while there is capacity."""
        self.pods = {o: p for o, p in self.pods.items() if not p.terminating}
        room = len(self.pods) if self.room is None else self.room
        for place, ordinal in enumerate(sorted(self.pods, key=lambda o: not self.pods[o].ready)):
            pod = self.pods[ordinal]
            pod.phase, pod.ready = (RUNNING, True) if place < room else (PENDING, False)

    def settle(self) -> None:
        """Run until nothing changes any more."""
        for _ in range(1000):
            before = self._picture()
            self.sync()
            self.run_kubelets()
            if before == self._picture():
                return
        raise AssertionError("the controller does not come to rest")

    def _picture(self) -> object:
        pods = {o: (p.revision, p.phase, p.ready, p.terminating) for o, p in self.pods.items()}
        return pods, self.status

    # Actions of users and machines -------------------------------------------------------------

    def delete_pod(self, ordinal: int) -> None:
        """``kubectl delete pod``, an eviction, a drain."""
        self.pods[ordinal].terminating = True

    def lose_pod(self, ordinal: int) -> None:
        """The pod disappears immediately."""
        del self.pods[ordinal]

    # The steps ---------------------------------------------------------------------------------

    def _revisions(self) -> tuple[Revision, Revision]:
        """``getStatefulSetRevisions``: the newest one has the current template; an equal older one
        is renumbered instead of being recreated.
        """
        template = self.spec["template"]
        equal = [r for r in self.revisions if r.template == template]
        if equal:
            update = equal[-1]
            self.revisions.remove(update)
        else:
            self.names += 1
            update = Revision(f"revision-{self.names}", copy.deepcopy(template))
        self.revisions.append(update)
        known = [r for r in self.revisions if r.name == self.status.current_revision]
        return (known[0] if known else update), update

    def _create_missing(self, current: Revision, update: Revision) -> list[Pod]:
        """``newVersionedStatefulSetPod``, for each ordinal without a pod."""
        created = []
        for ordinal in range(self.spec["replicas"]):
            if ordinal not in self.pods:
                chosen = current if self._is_held_back(ordinal) else update
                created.append(Pod(ordinal, chosen.name, chosen.template))
        return created

    def _is_held_back(self, ordinal: int) -> bool:
        return self._rolling and ordinal < self._partition

    @property
    def _rolling(self) -> bool:
        return bool(self._strategy.get("type", "RollingUpdate") == "RollingUpdate")

    @property
    def _strategy(self) -> Object:
        # The API server's defaults: pkg/apis/apps/v1/defaults.go.
        strategy: Object = self.spec.get("updateStrategy", {})
        return strategy

    @property
    def _partition(self) -> int:
        rolling = self._strategy.get("rollingUpdate") or {}
        return int(rolling.get("partition", 0))

    def _count(self, pods: list[Pod], current: Revision, update: Revision) -> Status:
        status = Status(current_revision=current.name, update_revision=update.name)
        for pod in pods:
            if not pod.phase:
                continue
            status.replicas += 1
            status.ready += pod.phase == RUNNING and pod.ready
            if not pod.terminating:
                status.current += pod.revision == current.name
                status.updated += pod.revision == update.name
        return status

    def _delete_condemned(self) -> None:
        """``processCondemned``."""
        for ordinal, pod in self.pods.items():
            if ordinal >= self.spec["replicas"]:
                pod.terminating = True

    def _update_one(self, update: Revision, status: Status) -> None:
        """The end of ``updateStatefulSet``: highest ordinal first, one at a time, none below the
        partition; a pod that is not available holds up the rest."""
        if not self._rolling:
            return
        for ordinal in range(self.spec["replicas"] - 1, self._partition - 1, -1):
            pod = self.pods.get(ordinal)
            if pod is not None and pod.revision != update.name and not pod.terminating:
                pod.terminating = True
                status.current -= 1
                return
            if pod is None or not pod.available:
                return

    def _complete(self, status: Status) -> None:
        """``completeRollingUpdate``."""
        wanted = self.spec["replicas"]
        if self._rolling and {status.updated, status.ready, status.replicas} == {wanted}:
            status.current, status.current_revision = status.updated, status.update_revision

    def _truncate_history(self) -> None:
        """``truncateHistory``: revisions in use are kept."""
        live = {self.status.current_revision, self.status.update_revision}
        live |= {pod.revision for pod in self.pods.values()}
        old = [r for r in self.revisions if r.name not in live]
        limit = self.spec.get("revisionHistoryLimit", 10)
        for revision in old[: max(0, len(old) - limit)]:
            self.revisions.remove(revision)
