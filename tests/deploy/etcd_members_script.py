"""Runs three etcd members like their pods: in a separate network and mount namespace.

Reads a JSON object from the file named by its argument: folders, the members' and the upkeep's
command lines. A failure ends it with a traceback.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from elastic.errors import StoreRefused
from elastic.membership.records import Keys
from elastic.store.client import etcd_config
from elastic.store.etcd import EtcdStore
from elastic.tuning.options import read_options

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
PATIENCE_S = 60.0


def main(plan: dict[str, Any]) -> None:
    folder = Path(plan["folder"])
    loopback_up()
    name_members(folder / "hosts")
    cluster = Cluster(folder, Path(plan["binaries"]), plan["members"], plan["upkeep"])
    try:
        rehearse(cluster)
        confine(cluster, plan["roles"], plan["job"])
    finally:
        cluster.stop()


class Cluster:
    def __init__(
        self, folder: Path, binaries: Path, members: list[list[str]], upkeep: dict[str, list[str]]
    ) -> None:
        self.folder, self.binaries, self.upkeep, self.members = folder, binaries, upkeep, members
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int, state: str) -> None:
        command = [word.replace("$(INITIAL_CLUSTER_STATE)", state) for word in self.members[index]]
        with (self.folder / f"etcd-{index}.log").open("ab") as log:
            self.processes[index] = subprocess.Popen(
                [self.binaries / command[0], *command[1:]], stdout=log, stderr=log
            )

    def wipe(self, index: int) -> None:
        """The machine and its disk are lost."""
        process = self.processes.pop(index)
        process.kill()
        process.wait()
        data = self.folder / f"data-{index}"
        data.rename(self.folder / f"lost-{index}-{time.monotonic_ns()}")

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def run(self, *command: str, environ: dict[str, str] | None = None) -> str:
        """A command of the image; its output. Raises RuntimeError."""
        done = subprocess.run(
            [self.binaries / command[0], *command[1:]],
            capture_output=True,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        if done.returncode:
            raise RuntimeError(f"{command} -> {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def ctl(self, *command: str) -> str:
        """As `kubectl exec etcd-0 -- etcdctl ...`: with the pod's own ETCDCTL_* variables."""
        environ = dict(pair.split("=", 1) for pair in self.upkeep["environ"])
        return self.run("etcdctl", *command, environ=environ)

    def wait_until_healthy(self) -> None:
        """Every member has a leader, by its own plain HTTP; then the upkeep's own check passes."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (self.all_have_a_leader() and self.ctl("member", "list").count(" started,") == 3):
            for index, process in self.processes.items():
                if process.poll() is not None:
                    log = (self.folder / f"etcd-{index}.log").read_text()
                    raise RuntimeError(f"etcd-{index} has ended:\n{log[-4000:]}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no healthy cluster after {PATIENCE_S} s")
            time.sleep(0.1)
        self.run(*self.upkeep["health"])

    def all_have_a_leader(self) -> bool:
        return all(healthy(f"http://127.0.0.{index + 2}:2381/health") for index in range(3))


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["health"] == "true"  # type: ignore[no-any-return]
    except OSError:
        return False


def rehearse(cluster: Cluster) -> None:
    for index in range(3):
        cluster.start(index, "new")
    cluster.wait_until_healthy()
    cluster.ctl("put", "/elastic/job-1/world", "generation 7")
    # No access without a certificate.
    try:
        cluster.run(
            "etcdctl", "--endpoints=https://etcd:2379", "--insecure-skip-tls-verify", "get", "x"
        )
    except RuntimeError as error:
        assert "certificate" in str(error) or "context deadline" in str(error), error
    else:
        raise AssertionError("etcd answers clients without a certificate")
    # The upkeep's pods.
    cluster.run(*cluster.upkeep["save"])
    assert "hash" in cluster.run(*cluster.upkeep["check"]).lower()
    assert cluster.run(*cluster.upkeep["defragment"]).count("Finished defragmenting") == 3
    replace_a_member(cluster)
    restore_from_the_snapshot(cluster)


def replace_a_member(cluster: Cluster) -> None:
    """The runbook: a member's disk is lost."""
    cluster.wipe(2)
    lost = next(
        line.split(",")[0]
        for line in cluster.ctl("member", "list").splitlines()
        if "etcd-2" in line
    )
    cluster.ctl("member", "remove", lost)
    cluster.ctl("member", "add", "etcd-2", "--peer-urls=https://etcd-2.etcd-members:2380")
    cluster.start(2, "existing")
    cluster.wait_until_healthy()
    assert "generation 7" in cluster.ctl("get", "/elastic/job-1/world")


def restore_from_the_snapshot(cluster: Cluster) -> None:
    """The runbook: a majority is lost, and a snapshot exists."""
    for index in range(3):
        cluster.wipe(index)
        cluster.run(*(word.replace("$(INDEX)", str(index)) for word in cluster.upkeep["restore"]))
    for index in range(3):
        cluster.start(index, "existing")
    cluster.wait_until_healthy()
    assert "generation 7" in cluster.ctl("get", "/elastic/job-1/world")


def confine(cluster: Cluster, commands: list[list[str]], settings: dict[str, str]) -> None:
    """The runbook: a role for each job. Its agent has its own prefix, and the upkeep everything."""
    assert commands[-1] == ["auth", "enable"], commands
    foreign = "/elastic/bert/r1/done"
    cluster.ctl("put", foreign, "of another job")
    for command in commands:
        cluster.ctl(*command)
    options = read_options({}, {k: v for k, v in settings.items() if k.startswith("ELASTIC_")})
    keys = Keys.of(options.prefix, settings["PET_RDZV_ID"])
    store = EtcdStore(etcd_config(settings["PET_RDZV_ENDPOINT"], options))
    try:
        seen: queue.SimpleQueue[object] = queue.SimpleQueue()
        store.watch([keys.root], seen.put, name="watch-own")
        seen.get(timeout=PATIENCE_S)
        store.put(keys.node("0"), b"here", lease=store.lease(5))
        assert [e.value for e in store.list(keys.root).entries] == [b"here"]
        for attempt in (
            lambda: store.get(foreign),
            lambda: store.put(foreign, b"stolen"),
            lambda: store.list("/elastic/"),
        ):
            try:
                attempt()
            except StoreRefused as error:
                assert "permission denied" in str(error), error
            else:
                raise AssertionError("a job reaches another job's keys")
    finally:
        store.close()
    assert "of another job" in cluster.ctl("get", foreign)
    # A job without a role.
    cluster.ctl("user", "delete", settings["ELASTIC_PREFIX"].rpartition("/")[2])
    store = EtcdStore(etcd_config(settings["PET_RDZV_ENDPOINT"], options))
    try:
        store.list(keys.root)
    except StoreRefused as error:
        assert "permission denied" in str(error) and error.exit_code == 69, error
    else:
        raise AssertionError("a job without a role reads etcd")
    finally:
        store.close()
    cluster.run(*cluster.upkeep["health"])
    (cluster.folder / "snapshots" / "etcd-snapshot-1.db").unlink()
    cluster.run(*cluster.upkeep["save"])
    assert cluster.run(*cluster.upkeep["defragment"]).count("Finished defragmenting") == 3


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def name_members(hosts: Path) -> None:
    """Including 127.0.0.1: clients on a loopback have this address, and etcd resolves its name."""
    names = [f"etcd-{i}.etcd-members" for i in range(3)]
    lines = [f"127.0.0.{i + 2} {name}" for i, name in enumerate(names)]
    lines += [f"127.0.0.1 localhost {' '.join(names)}", "127.0.0.2 etcd"]
    hosts.write_text("\n".join(lines) + "\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
