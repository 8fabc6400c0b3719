"""The template that pods get after any history: the rendered StatefulSet, on the controller's own
algorithm (statefulset_controller.py).
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable

import pytest
from kube_control_plane import ControlPlane, key_of
from manifests import NAMESPACES, Object, Rendered
from statefulset_controller import StatefulSetController

N = NAMESPACES["prod"]
KEY = (N, "StatefulSet", "workers")
FINISHER = (N, "Job", "workers-finisher")
REPLICAS = 4


class Job:
    """A control plane with the relevant objects of a run."""

    def __init__(self, objects: Iterable[Object], **strategy: object) -> None:
        self.objects = [copy.deepcopy(o) for o in objects]
        (workers,) = [o for o in self.objects if key_of(o) == KEY]
        workers["spec"]["replicas"] = REPLICAS
        workers["spec"]["updateStrategy"].update(strategy)
        if strategy.get("type") == "OnDelete":
            del workers["spec"]["updateStrategy"]["rollingUpdate"]
        self.cluster = ControlPlane()
        assert self.apply() == []
        self.cluster.settle()

    @property
    def controller(self) -> StatefulSetController:
        return self.cluster.sets[KEY]

    def variant(self, run: str | None = None, image: str | None = None) -> list[Object]:
        text = json.dumps(self.objects)
        if run:  # the hash in the settings' name follows their content
            text = text.replace("job-1", run).replace('"settings-', f'"settings-{run}-')
        if image:
            text = text.replace("torch-elastic-harness:0.1.0-cuda", image)
        return list(json.loads(text))

    def apply(self, run: str | None = None, image: str | None = None) -> list[str]:
        return self.cluster.apply(self.variant(run, image))

    def scale(self, replicas: int) -> None:
        self.cluster.change(KEY, lambda o: o["spec"].update(replicas=replicas))

    def replace(self, run: str | None = None, image: str | None = None) -> list[str]:
        """The runbook's procedure (test_deploy_commands.py runs its text)."""
        self.cluster.delete(KEY, foreground=True)
        self.cluster.delete(FINISHER)
        errors = self.apply(run, image)
        self.cluster.settle()
        return errors

    def restart(self) -> None:
        def edit(one: Object) -> None:
            notes = one["spec"]["template"]["metadata"].setdefault("annotations", {})
            notes["kubectl.kubernetes.io/restartedAt"] = str(len(self.controller.revisions))

        assert self.cluster.change(KEY, edit) == []

    def partition(self, number: int) -> None:
        def edit(one: Object) -> None:
            one["spec"]["updateStrategy"]["rollingUpdate"]["partition"] = number

        assert self.cluster.change(KEY, edit) == []

    def images(self) -> list[str]:
        pods = self.controller.pods.values()
        return [pod.template["spec"]["containers"][0]["image"] for pod in pods]

    def runs(self) -> set[str]:
        return {self.cluster.run_of(N, pod.template) for pod in self.controller.pods.values()}


@pytest.fixture
def objects(render: Callable[[str], Rendered]) -> list[Object]:
    kinds = {"StatefulSet": "workers", "Job": "workers-finisher"}
    return [
        o
        for o in render("prod").objects
        if kinds.get(o["kind"]) == o["metadata"]["name"] or o["kind"] == "ConfigMap"
    ]


@pytest.fixture
def job(objects: list[Object]) -> Job:
    return Job(objects)


def lose_all(job: Job) -> None:
    for ordinal in list(job.controller.pods):
        job.controller.lose_pod(ordinal)


def lose_one(job: Job) -> None:
    if job.controller.pods:
        job.controller.lose_pod(max(job.controller.pods))


def drain_one(job: Job) -> None:
    if job.controller.pods:
        job.controller.delete_pod(min(job.controller.pods))


# Possible changes of a StatefulSet. Errors are those of the API server.
CHANGES: dict[str, Callable[[Job], object]] = {
    "apply another image": lambda job: job.apply(image="b"),
    "apply the same": lambda job: job.apply(),
    "rollout restart": lambda job: job.restart(),
    "scale to 0": lambda job: job.scale(0),
    "scale to 2": lambda job: job.scale(2),
    "scale to 6": lambda job: job.scale(6),
    "a pod is lost": lose_one,
    "a pod is drained": drain_one,
    "all are lost": lose_all,
    "the controller acts": lambda job: job.controller.sync(),
    "all comes to rest": lambda job: job.cluster.settle(),
}
ROLL: dict[str, Callable[[Job], object]] = {"partition 0": lambda job: job.partition(0)}
# All of two changes, and of three where the first is a template that is held back.
HISTORIES = [
    *itertools.product(CHANGES, CHANGES),
    *itertools.product(["apply another image"], CHANGES, CHANGES),
]


def after(objects: list[Object], history: Iterable[str]) -> Job:
    job = Job(objects)
    for change in history:
        {**CHANGES, **ROLL}[change](job)
    return job


def test_the_next_run_gets_its_own_template_after_any_history(objects: list[Object]) -> None:
    for history in [*HISTORIES, ("rollout restart", "partition 0", "the controller acts")]:
        job = after(objects, history)
        assert job.replace(run="run-b", image="b") == [], history
        assert job.images() == ["b"] * REPLICAS, history
        assert job.runs() == {"run-b"}
        labels = {
            p.template["metadata"]["labels"]["elastic-training/run"]
            for p in job.controller.pods.values()
        }
        assert labels == {"run-b"}


def test_without_the_procedure_the_next_run_is_refused_after_any_history(
    objects: list[Object],
) -> None:
    for history in HISTORIES:
        job = after(objects, history)
        errors = job.apply(run="run-b", image="b")
        assert sorted(e.partition(" is invalid")[0] for e in errors) == [
            'Job "workers-finisher"',
            'StatefulSet "workers"',
        ], history
        job.cluster.settle()
        assert job.runs() <= {"job-1"}, history


def test_an_upgrade_reaches_all_pods_after_any_history(objects: list[Object]) -> None:
    for history in HISTORIES:
        job = after(objects, history)
        assert job.replace(image="c") == []
        assert job.images() == ["c"] * REPLICAS, history


def test_pods_of_a_job_never_run_two_templates(objects: list[Object]) -> None:
    """Replacements always get the template of the other pods, whatever was applied."""
    for history in HISTORIES:
        job = Job(objects)
        for change in history:
            CHANGES[change](job)
            for _ in range(3):
                job.controller.sync()
                alive = [pod for pod in job.controller.pods.values() if not pod.terminating]
                assert len({pod.revision for pod in alive}) <= 1, history
                job.controller.run_kubelets()


def test_scaling_to_0_and_back_uses_the_newest_template(job: Job) -> None:
    job.apply(image="b")
    job.cluster.settle()
    assert set(job.images()) != {"b"}
    job.scale(0)
    job.cluster.settle()
    job.scale(REPLICAS)
    job.cluster.settle()
    assert job.images() == ["b"] * REPLICAS


def test_a_template_applied_at_0_replicas_is_not_used(job: Job) -> None:
    """The next run of the former runbook, and the reason for the procedure: template and replicas
    change in one request, and the partition holds back the new template for every new pod.
    """
    job.scale(0)
    job.cluster.settle()
    job.apply(image="b")
    job.cluster.settle()
    assert job.images() == ["torch-elastic-harness:0.1.0-cuda"] * REPLICAS


def test_the_model_reproduces_the_observed_behaviour_of_clusters(job: Job) -> None:
    """kubernetes/kubernetes issue 121534: four replicas and a partition of 2, updated, scaled to 0
    and to 2; both pods are new ones."""
    job.partition(2)
    job.controller.spec["template"]["spec"]["containers"][0]["image"] = "b"
    job.cluster.settle()
    assert sorted(job.images()) == ["b"] * 2 + ["torch-elastic-harness:0.1.0-cuda"] * 2
    job.scale(0)
    job.cluster.settle()
    job.scale(2)
    job.cluster.settle()
    assert job.images() == ["b"] * 2


def test_on_delete_would_mix_templates(objects: list[Object]) -> None:
    """The rejected alternative (decision 24)."""
    job = Job(objects, type="OnDelete")
    job.apply(image="b")
    lose_one(job)
    job.cluster.settle()
    assert sorted(set(job.images())) == ["b", "torch-elastic-harness:0.1.0-cuda"]


def test_a_restart_at_partition_0_replaces_pods_one_by_one(job: Job) -> None:
    before = dict(job.controller.pods)
    job.restart()
    job.cluster.settle()
    assert job.controller.pods == before, "kubectl says restarted"
    job.partition(0)
    order = []
    for _ in range(4 * REPLICAS):
        job.controller.sync()
        ending = [o for o, pod in job.controller.pods.items() if pod.terminating]
        assert len(ending) <= 1
        order += ending
        job.controller.run_kubelets()
    assert order == list(reversed(range(REPLICAS)))
    job.partition(10**6)
    lose_one(job)
    job.cluster.settle()
    assert len({pod.revision for pod in job.controller.pods.values()}) == 1


def test_every_statefulset_selects_the_pods_of_its_run_only(manifests: Rendered) -> None:
    run = manifests.settings["PET_RDZV_ID"]
    assert manifests.workers.labels["elastic-training/run"] == run
    for workers in manifests.of("StatefulSet", "workers"):
        assert workers["spec"]["selector"]["matchLabels"]["elastic-training/run"] == run
