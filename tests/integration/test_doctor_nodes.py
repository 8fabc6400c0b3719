"""``elastic doctor`` on several nodes: they meet through etcd, and a faulty node is named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networks
import psutil
import pytest
from etcd_fixtures import PATIENCE_S
from etcd_proxy import CuttingProxy

from elastic.doctor.collectives import OPERATIONS
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.forks.program import start_python
from elastic.testing.waiting import eventually

COMMAND = (sys.executable, "-m", "elastic.cli.main", "doctor", "-o", "json")


@dataclass
class Node:
    """A doctor that runs as a command."""

    process: subprocess.Popen[str]

    def report(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=5 * PATIENCE_S)
        assert out, err
        report: dict[str, Any] = json.loads(out)
        assert self.process.returncode == (0 if report["healthy"] else 1)
        return report


@contextlib.contextmanager
def node(
    name: str,
    *flags: str,
    launcher: Sequence[str] = (),
    start: Callable[..., subprocess.Popen[Any]] = start_python,
    **environ: str,
) -> Iterator[Node]:
    process = start(
        [*launcher, *COMMAND, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ELASTIC_NODE_NAME": name, **environ},
    )
    try:
        yield Node(process)
    finally:
        for one in tree(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def tree(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def flags_of(etcd: EmbeddedEtcd, root: str, join_timeout_s: float = 2 * PATIENCE_S) -> list[str]:
    return [
        *(f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", "--nnodes=2"),
        f"--rdzv-conf=prefix={root.rstrip('/')}",
        f"--deadline={PATIENCE_S}",
        f"--join-timeout={join_timeout_s}",
    ]


@pytest.mark.slow
def test_two_nodes_check_each_other_and_report_the_same_results(
    shared_etcd: EmbeddedEtcd, root: str, tmp_path: Path, connect: Callable[..., EtcdStore]
) -> None:
    """All processes are started as in production."""
    flags = (*flags_of(shared_etcd, root), f"--checkpoints={tmp_path}")
    start = subprocess.Popen
    with node("a", *flags, start=start) as a, node("b", *flags, start=start) as b:
        reports = [a.report(), b.report()]
    assert reports[0]["nodes"] == reports[1]["nodes"] and sorted(reports[0]["nodes"]) == ["a", "b"]
    assert reports[0]["findings"] == reports[1]["findings"]
    found = {(f["name"], f["node"]): f for f in reports[0]["findings"]}
    assert reports[0]["healthy"], [f for f in found.values() if f["status"] == "failed"]
    first, second = reports[0]["nodes"]
    for operation in (*OPERATIONS, "init env://", "init tcp://", "init file://"):
        assert found[f"gloo {operation}", ""]["status"] == "ok"
    for name in (f"TCP {first} → {second}", f"TCP {second} → {first}", "equal torch"):
        assert found[name, ""]["status"] == "ok"
    assert "±" in found[f"clock of {second}", ""]["measured"]
    assert found[f"checkpoint folder {tmp_path}", "a"] and found["own address", "b"]
    assert reports[0]["speeds"]
    assert list(tmp_path.iterdir()) == []
    assert connect(shared_etcd.endpoint, connect_timeout_s=PATIENCE_S).list(root).entries == ()


STOPS_ONCE = """
import os, signal
from pathlib import Path
if os.environ.get("RANK") == "1":
    import torch.distributed as dist
    original = dist.gather
    def gather(*args, **options):
        try:
            Path({marker!r}).touch(exist_ok=False)
        except FileExistsError:
            return original(*args, **options)
        os.kill(os.getpid(), signal.SIG{how})
    dist.gather = gather
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("KILL", "SIGKILL"), ("STOP", "is stopped")],
)
@pytest.mark.slow
def test_a_rank_lost_in_an_operation_is_named_and_the_others_continue(
    how: str, said: str, shared_etcd: EmbeddedEtcd, root: str, tmp_path: Path
) -> None:
    script = STOPS_ONCE.format(marker=str(tmp_path / "marker"), how=how)
    (tmp_path / "sitecustomize.py").write_text(script)
    flags = flags_of(shared_etcd, root)
    start = subprocess.Popen
    with (
        node("a", *flags, start=start, PYTHONPATH=str(tmp_path)) as a,
        node("b", *flags, start=start, PYTHONPATH=str(tmp_path)) as b,
    ):
        reports = [a.report(), b.report()]
    assert reports[0]["findings"] == reports[1]["findings"] and not reports[0]["healthy"]
    (failed,) = [f for f in reports[0]["findings"] if f["status"] == "failed"]
    assert failed["name"] == "gloo gather"
    assert f"{reports[0]['nodes'][1]} failed" in failed["measured"] and said in failed["measured"]
    assert failed["remedy"]
    named = {f["name"]: f["status"] for f in reports[0]["findings"]}
    assert named["gloo new_group"] == named["gloo speed 0-1"] == "ok", "in the next world"


def test_missing_nodes_are_reported(shared_etcd: EmbeddedEtcd, root: str) -> None:
    with node("lonely", *flags_of(shared_etcd, root, join_timeout_s=1.0)) as lonely:
        report = lonely.report()
    (failed,) = [f for f in report["findings"] if f["status"] == "failed"]
    assert failed["name"] == "process group" and "join_timeout_s=1" in failed["measured"]
    assert "start more nodes" in failed["remedy"]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_terminated_doctor_leaves_no_process(
    how: signal.Signals, code: int, tmp_path: Path
) -> None:
    with node("here", "--deadline=90", TMPDIR=str(tmp_path)) as doctor:
        journals = tmp_path.glob

        def trains() -> bool:
            return any(
                b'"world-entered"' in path.read_bytes()
                for path in journals("elastic-doctor-*/journal/*.jsonl")
            )

        eventually(trains, "the job of the doctor")
        processes = tree(doctor.process.pid)[1:]
        doctor.process.send_signal(how)
        assert doctor.process.wait(PATIENCE_S) == code
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []


@pytest.mark.slow
@pytest.mark.skipif(not networks.available(), reason="needs root and network namespaces")
def test_a_dropped_port_and_a_wrong_interface_between_machines_are_named(root: str) -> None:
    with (
        networks.Network(2) as network,
        EmbeddedEtcd(name="doctor-net") as etcd,
        CuttingProxy(etcd.endpoint, listen=network.host) as proxy,
    ):
        one, other = network.machines
        # Replies from this port are dropped, as by a firewall.
        drop = ["ip", "-n", other.namespace, "rule", "add", "pref", "10"]
        subprocess.run([*drop, "ipproto", "tcp", "sport", "29511", "blackhole"], check=True)

        def reports(*flags: str, **environ: str) -> list[dict[str, Any]]:
            common = (
                f"--rdzv-endpoint={proxy.endpoint}",
                "--rdzv-id=job",
                f"--rdzv-conf=prefix={root.rstrip('/')}",
                "--nnodes=2",
                f"--join-timeout={2 * PATIENCE_S}",
                *flags,
            )
            with (
                node("one", *common, launcher=one.launcher, start=start_python, **environ) as a,
                node("other", *common, launcher=other.launcher, start=start_python, **environ) as b,
            ):
                return [a.report(), b.report()]

        well, same = reports(
            "--ports=29511,29512", f"--deadline={PATIENCE_S}", GLOO_SOCKET_IFNAME=networks.INTERFACE
        )
        wrong, _ = reports("--deadline=10", GLOO_SOCKET_IFNAME="lo")
    assert well["findings"] == same["findings"]
    found = {f["name"]: f for f in well["findings"]}
    assert found["TCP other → one"]["status"] == "ok"
    broken = found["TCP one → other"]
    assert broken["status"] == "failed" and not well["healthy"]
    assert broken["measured"] == f"{other.address}:29511: no answer within 3 s"
    assert "firewall" in broken["remedy"]
    assert {found[f"gloo {operation}"]["status"] for operation in OPERATIONS} == {"ok"}

    # gloo publishes 127.0.0.1: the job has no world.
    found = {f["name"]: f for f in wrong["findings"]}
    assert found["process group"]["status"] == "failed" and not wrong["healthy"]
    assert "GLOO_SOCKET_IFNAME" in found["process group"]["remedy"]


@pytest.mark.slow
@pytest.mark.skipif(
    not networks.available() or shutil.which("tc") is None,
    reason="needs root, network namespaces, and `tc` of iproute2",
)
def test_the_fast_link_is_measured_and_the_setting_to_use_it_is_named(root: str) -> None:
    """The route to etcd, from which a node derives its address, uses the slow network."""
    with (
        networks.Network(2) as network,
        EmbeddedEtcd(name="doctor-fast") as etcd,
        CuttingProxy(etcd.endpoint, listen=network.host) as proxy,
    ):
        one, other = network.machines
        networks.add_fast_link(one, other, slow_mbit=20)

        def report(setting: str = "") -> list[dict[str, Any]]:
            common = (
                f"--rdzv-endpoint={proxy.endpoint}",
                "--rdzv-id=job",
                f"--rdzv-conf=prefix={root.rstrip('/')}{setting}",
                "--nnodes=2",
                f"--join-timeout={2 * PATIENCE_S}",
                f"--deadline={PATIENCE_S}",
                "--local",
            )
            with (
                node("one", *common, launcher=one.launcher) as a,
                node("other", *common, launcher=other.launcher) as b,
            ):
                found, same = a.report(), b.report()
            assert found["findings"] == same["findings"]
            return [f for f in found["findings"] if f["name"].startswith("bandwidth")]

        (slow,) = report()
        (well,) = report(f",network={networks.FAST_NETWORK}")
    names = {slow["name"].rpartition(" → ")[0], slow["name"].rpartition(" → ")[2]}
    assert names == {"bandwidth one", "other"} or names == {"bandwidth other", "one"}
    assert slow["status"] == "warning"
    assert f"({networks.INTERFACE}, which a job uses)" in slow["measured"]
    assert f"start all nodes with --rdzv-conf network={networks.FAST_NETWORK} " in slow["remedy"]
    assert f"NCCL_SOCKET_IFNAME={networks.FAST}" in slow["remedy"]
    assert well["status"] == "ok"
    assert f"({networks.FAST}, which a job uses)" in well["measured"]
