"""Every command of the runbook works as documented, on a model of a control plane.

Each section starts from a running job (`elastic kube render` with the flags of *First run*), unless
it is named in ``FROM_NOTHING``. Its commands run in their order; each must succeed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kube_control_plane import ControlPlane
from manifests import COMPONENT, DEPLOY, NAMESPACES, Object
from runbook_shell import (
    NEEDS_A_CLUSTER,
    RUNBOOK,
    Command,
    Failed,
    Shell,
    commands,
    needs_a_cluster,
    objects_of,
)
from statefulset_controller import Pod

COMMANDS = tuple(commands(RUNBOOK))
FROM_NOTHING = {"Running on Kubernetes", "First run", "Without cert-manager", "Images"}
# Sections whose blocks are alternatives, not steps.
ALTERNATIVES = {"Upgrade", "Restart"}
N = NAMESPACES["prod"]
WORKERS = (N, "StatefulSet", "workers")
MINE = "overlays/llama-7"
Scenario = tuple[str, int]  # section, and which block (0: all of them)


def scenario_of(command: Command) -> Scenario:
    apart = command.section in ALTERNATIVES
    return command.section, command.block if apart else 0


SCENARIOS = tuple(dict.fromkeys(map(scenario_of, COMMANDS)))


@dataclass
class Place:
    """A cluster, and a directory with the user's overlays."""

    cluster: ControlPlane
    shell: Shell
    first: dict[str, Pod]  # the workers before the first command

    def run(self, scenario: Scenario) -> None:
        for command in COMMANDS:
            if scenario_of(command) == scenario:
                try:
                    self.shell.run(command)
                except Failed as error:
                    raise AssertionError(f"{scenario}: {command}: {error}") from None

    @property
    def workers(self) -> dict[str, Pod]:
        return self.cluster.pods(N, {COMPONENT: "worker"})


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What *First run* and *Finish* render."""
    folder = tmp_path_factory.mktemp("runbook")
    shell = Shell(ControlPlane(), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in COMMANDS:
            if command.section in ("First run", "Finish") and command.words[0] == "elastic":
                shell.run(command)
    return folder


@pytest.fixture
def place(rendered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A directory of the user. The job runs; the next overlay has another image."""
    shutil.copytree(rendered, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    cluster = ControlPlane()
    place = Place(cluster, Shell(cluster, tmp_path), {})
    assert cluster.apply(older(objects_of(tmp_path / MINE))) == []
    assert cluster.apply(objects_of(DEPLOY / "overlays" / "job")) == []
    cluster.settle()
    place.first = place.workers
    return place


def older(objects: tuple[Object, ...]) -> list[Object]:
    """The same overlay before its image was changed."""
    return list(json.loads(json.dumps(objects).replace("train:1.4.2", "train:1.4.1")))


def images(pods: dict[str, Pod]) -> set[str]:
    return {pod.template["spec"]["containers"][0]["image"] for pod in pods.values()}


# Every command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: f"{s[0]} {s[1]}")
def test_the_commands_succeed(scenario: Scenario, place: Place) -> None:
    section, _ = scenario
    if section in FROM_NOTHING:
        place.cluster = ControlPlane()
        place.shell.cluster = place.cluster
    if section in PREPARE:
        PREPARE[section](place)
    place.run(scenario)
    if scenario in AFTERWARDS:
        AFTERWARDS[scenario](place)


def without_cert_manager(place: Place) -> None:
    """Apply the flag that the section names to the overlay."""
    place.cluster.unknown = {"cert-manager.io"}
    (first_run,) = [c for c in COMMANDS if c.section == "First run" and c.words[0] == "elastic"]
    _, _, section = RUNBOOK.partition("## Without cert-manager")
    (flag,) = re.findall(r"`(--with [\w-]+)`", section.partition("\n## ")[0])
    words = (*first_run.words[:3], *flag.split(), *first_run.words[3:])
    place.shell.run(replace(first_run, words=words))


def room_for_6(place: Place) -> None:
    place.cluster.room = 6
    place.cluster.settle()


PREPARE: dict[str, Callable[[Place], None]] = {
    "Without cert-manager": without_cert_manager,
    "Drain": room_for_6,
}


def check_first_run(place: Place) -> None:
    assert len(place.workers) == 16
    assert all(pod.ready for pod in place.workers.values())
    assert not place.cluster.pods("elastic-dev", {COMPONENT: "worker"}), "the job is done"


def check_given_secrets(place: Place) -> None:
    for pod in place.cluster.pods(N).values():
        for volume in pod.template["spec"]["volumes"]:
            if "secret" in volume:
                secret = place.cluster.objects[N, "Secret", volume["secret"]["secretName"]]
                assert set(secret["data"]) == {"tls.crt", "tls.key", "ca.crt"}
    assert len(place.workers) == 16


def check_scaled(place: Place) -> None:
    assert len(place.workers) == 6
    job = place.cluster.objects["elastic-job", "Job", "workers"]["spec"]
    assert (job["parallelism"], job["completions"]) == (3, 3)


def check_drained(place: Place) -> None:
    """The second and third drains are granted, too, with one of 16 workers not Ready."""
    (drain,) = [c for c in COMMANDS if c.words[:2] == ("kubectl", "drain")]
    place.cluster.room = 5  # the drained machine stays away
    place.cluster.settle()
    place.shell.run(drain)
    place.cluster.room = 4
    place.cluster.settle()
    with pytest.raises(Failed, match="disruption budget"):
        place.shell.run(drain)


def check_upgraded(place: Place) -> None:
    assert images(place.workers) == {"registry.example/train:1.4.2"}
    assert len(place.workers) == 16 and all(p.ready for p in place.workers.values())
    finisher = place.cluster.objects[N, "Job", "workers-finisher"]["spec"]["template"]
    assert finisher["spec"]["containers"][0]["image"] == "registry.example/train:1.4.2"
    check_held_back_again(place)


def check_held_back_again(place: Place) -> None:
    strategy = place.cluster.objects[WORKERS]["spec"]["updateStrategy"]
    assert strategy["rollingUpdate"]["partition"] > 100_000
    before = place.workers["workers-3"]
    place.cluster.sets[WORKERS].lose_pod(3)
    place.cluster.settle()
    after = place.workers["workers-3"]
    assert after is not before and after.template == before.template


def check_restarted(place: Place) -> None:
    assert len(place.workers) == 16
    for name, pod in place.workers.items():
        assert pod is not place.first[name], f"{name} has not been restarted"
    check_held_back_again(place)


def check_next_run(place: Place) -> None:
    assert len(place.workers) == 16
    runs = {place.cluster.run_of(N, pod.template) for pod in place.workers.values()}
    assert runs == {"llama-8"}
    assert images(place.workers) == {"registry.example/train:1.5.0"}
    finisher = place.cluster.objects[N, "Job", "workers-finisher"]["spec"]["template"]
    assert place.cluster.run_of(N, finisher) == "llama-8"
    assert place.cluster.train_to_the_end(N)


def check_etcd(place: Place) -> None:
    members = place.cluster.pods(N, {COMPONENT: "etcd"})
    assert sorted(members) == ["etcd-0", "etcd-1", "etcd-2"]
    for pod in members.values():
        assert pod.ready and not pod.template["spec"].get("initContainers")
    assert (N, "ConfigMap", "etcd-restore") not in place.cluster.objects


def check_monitored(place: Place) -> None:
    """Without a restart of a worker."""
    for kind, name in (
        ("PodMonitor", "workers"),
        ("PodMonitor", "etcd"),
        ("PrometheusRule", "elastic"),
    ):
        assert place.cluster.objects[N, kind, name]["metadata"]["labels"]["release"] == "prometheus"
    place.cluster.settle()
    assert place.workers == place.first


def check_deleted(place: Place) -> None:
    # The claims of etcd are deleted with the namespace.
    left = {key for key in place.cluster.objects if key[0] == N and "data-etcd-" not in key[2]}
    assert left == set()
    assert not place.cluster.pods(N)


AFTERWARDS: dict[Scenario, Callable[[Place], None]] = {
    ("First run", 0): check_first_run,
    ("Without cert-manager", 0): check_given_secrets,
    ("Scale", 0): check_scaled,
    ("Drain", 0): check_drained,
    ("etcd", 0): check_etcd,
    ("Monitoring", 0): check_monitored,
    ("Upgrade", 1): check_upgraded,
    ("Upgrade", 2): check_upgraded,
    ("Restart", 1): check_restarted,
    ("Restart", 2): check_restarted,
    ("Finish", 0): check_next_run,
    ("Delete", 0): check_deleted,
}


def test_every_check_belongs_to_a_scenario() -> None:
    assert {*AFTERWARDS} <= {*SCENARIOS}
    assert {*PREPARE} <= {section for section, _ in SCENARIOS}


def test_every_cluster_only_command_is_in_the_runbook() -> None:
    used = {needs_a_cluster(command) for command in COMMANDS}
    assert used - {None} == {*NEEDS_A_CLUSTER}, "an entry that excuses nothing"
    excused = [c for c in COMMANDS if needs_a_cluster(c)]
    assert len(excused) < len(COMMANDS) / 2


def test_a_block_with_untested_commands_is_an_error() -> None:
    for language in ("sh", "bash", "console", "shell"):
        with pytest.raises(AssertionError, match=language):
            list(commands(f"# Scale\n```{language}\nkubectl scale\n```"))


def test_an_unknown_command_is_an_error(place: Place) -> None:
    for text in ("helm upgrade x", "kubectl cordon NODE", "kubectl scale --replica=3 job x"):
        (command,) = commands(f"```\n{text}\n```")
        with pytest.raises(AssertionError):
            place.shell.run(command)


# Other statements of the runbook ----------------------------------------------------------


def run(place: Place, text: str) -> None:
    for command in commands(f"```\n{text}\n```"):
        place.shell.run(command)


def test_applying_another_run_over_a_run_is_refused_and_changes_no_pod(place: Place) -> None:
    with pytest.raises(Failed) as refused:
        run(place, "kubectl apply -k overlays/llama-8")
    assert 'StatefulSet "workers" is invalid: spec: Forbidden' in str(refused.value)
    assert 'Job "workers-finisher" is invalid' in str(refused.value)
    place.cluster.settle()
    assert place.workers == place.first
    assert place.cluster.train_to_the_end(N), "the first run goes on"


def test_applying_another_image_to_a_run_is_refused_before_the_upgrade(place: Place) -> None:
    with pytest.raises(Failed, match="field is immutable"):
        run(place, "kubectl apply -k overlays/llama-7")
    assert images(place.workers) == {"registry.example/train:1.4.1"}
    place.run(("Upgrade", 1))
    check_upgraded(place)


def test_rollout_restart_alone_restarts_no_pod_and_is_annotated(place: Place) -> None:
    run(place, "kubectl -n $N rollout restart statefulset workers")
    assert place.workers == place.first
    text = place.cluster.objects[WORKERS]["metadata"]["annotations"]["kubernetes.io/description"]
    assert "rollout restart" in text and "delete" in text


def test_objects_of_unknown_kinds_can_be_applied_later(rendered: Path) -> None:
    objects = objects_of(rendered / MINE)
    cluster = ControlPlane(unknown={"cert-manager.io"})
    errors = cluster.apply(objects)
    custom = [one for one in objects if one["apiVersion"].startswith("cert-manager.io")]
    assert len(errors) == len(custom) > 0
    assert len(cluster.objects) == len(objects) - len(custom)
    (shown,) = [e for e in errors if '"etcd-ca"' in e and "Certificate" in e]
    in_one_line = " ".join(RUNBOOK.split())
    for part in shown.split(" no matches"):
        assert " ".join(part.split()).removeprefix("for kind") in in_one_line
    cluster.unknown = set()
    assert cluster.apply(objects) == []
    assert len(cluster.objects) == len(objects)
