"""The manifests' command lines, run by real etcd members with the manifests' certificates.

Three members in a network namespace form a cluster, are queried, saved, checked, defragmented, lose
a disk and are restored: the runbook's commands. The binaries are those of the embedded etcd
(3.5.1), not the image's 3.6: the test covers flags and certificates; /livez does not exist yet.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cert_manager import write_secrets
from container import why_not
from manifests import DEPLOY, Object, Pod, Rendered
from runbook_shell import RUNBOOK

from elastic.store.embedded import find_binary

REFUSED = why_not()
pytestmark = [
    pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED)),
]


@pytest.fixture
def prod(render: Callable[[str], Rendered]) -> Rendered:
    return render("prod")


def test_the_members_form_a_cluster_and_the_runbook_works(
    prod: Rendered, render: Callable[[str], Rendered], tmp_path: Path
) -> None:
    job = render("several prod")
    both = Rendered("shared", (*prod.objects, *job.of("Certificate")))
    write_secrets(both, tmp_path / "secrets")
    (tmp_path / "snapshots").mkdir()
    plan = {
        "folder": str(tmp_path),
        "binaries": str(find_binary().path.parent),
        "members": [member(prod, index, tmp_path) for index in range(3)],
        "upkeep": upkeep(prod, tmp_path),
        "roles": roles(),
        "job": agents_settings(job, tmp_path),
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).with_name("etcd_members_script.py")
    namespaces = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")
    done = subprocess.run(
        [*namespaces, sys.executable, str(script), str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr + logs(tmp_path)


def member(prod: Rendered, index: int, folder: Path) -> list[str]:
    """The command line of one pod, on addresses of the loopback."""
    (pod,) = prod.pods("etcd")
    (container,) = pod.spec["containers"]
    own = f"127.0.0.{index + 2}"
    words = [*container["command"], *container["args"]]
    placed = [
        word.replace("$(POD_NAME)", f"etcd-{index}")
        .replace("/var/lib/etcd/data", str(folder / f"data-{index}"))
        .replace("0.0.0.0", own)
        for word in words
    ]
    if index == 0:  # `kubectl exec etcd-0 -- etcdctl` asks at 127.0.0.1
        listen = "--listen-client-urls="
        placed = [f"{w},https://127.0.0.1:2379" if w.startswith(listen) else w for w in placed]
    return [at_home(pod, word, folder) for word in placed]


def upkeep(prod: Rendered, folder: Path) -> dict[str, list[str]]:
    """The command lines of the CronJobs, and of operators."""
    commands = {}
    for pod in prod.pods("etcd-upkeep"):
        for container in pod.containers:
            words = [*container["command"], *container["args"]]
            words = [w.replace("$(POD_NAME)", "etcd-snapshot-1") for w in words]
            commands[container["name"]] = [at_home(pod, word, folder) for word in words]
    (pod,) = prod.pods("etcd")
    variables: list[Object] = pod.spec["containers"][0]["env"]
    environ = [f"{v['name']}={v['value']}" for v in variables if v["name"].startswith("ETCDCTL_")]
    commands["environ"] = [at_home(pod, pair, folder) for pair in environ]
    restore = yaml.safe_load((DEPLOY / "etcd" / "restore.patch.yaml").read_text())
    (container,) = restore["spec"]["template"]["spec"]["initContainers"]
    commands["restore"] = [
        word.replace("$(POD_NAME)", "etcd-$(INDEX)")
        .replace("$(SNAPSHOT)", "etcd-snapshot-1.db")
        .replace("/snapshots/", f"{folder}/snapshots/")
        .replace("/var/lib/etcd/data", f"{folder}/data-$(INDEX)")
        for word in (*container["command"], *container["args"])
    ]
    return commands


def roles() -> list[list[str]]:
    """The runbook's commands for a role of each job, as arguments of etcdctl."""
    section = RUNBOOK.partition("## Several jobs in a namespace")[2].partition("\n## ")[0]
    commands = re.findall(r"kubectl -n \$N exec etcd-0 -- etcdctl ([^\n`]+)", section)
    return [command.split() for command in commands]


def agents_settings(job: Rendered, folder: Path) -> dict[str, str]:
    """The settings of an agent of the named job, with the paths of this test."""
    return {name: at_home(job.workers, text, folder) for name, text in job.settings.items()}


def at_home(pod: Pod, word: str, folder: Path) -> str:
    """The same path, below the folder in which this test lays out a pod's mounts."""
    volumes = {v["name"]: v for v in pod.spec["volumes"]}
    for container in pod.containers:
        for mount in container["volumeMounts"]:
            secret = volumes.get(mount["name"], {}).get("secret")
            if secret:
                place = folder / "secrets" / secret["secretName"]
                word = word.replace(f"{mount['mountPath']}/", f"{place}/")
    return word.replace("/snapshots/", f"{folder}/snapshots/")


def logs(folder: Path) -> str:
    return "".join(f"\n{p.name}:\n{p.read_text()[-1500:]}" for p in folder.glob("*.log"))
