"""``preflight=1`` and ``join(preflight=True)``: an unfit node never joins, a fit one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_fixtures import PATIENCE_S
from kit.memory_store import MemoryStore

from checkpoints import LocalStorage
from elastic.doctor.checks import Finding, Status
from elastic.doctor.network import examine, preflight, require_fit
from elastic.errors import SYSTEM_CLOCK, NodeUnfit
from elastic.membership.records import Keys, Leader, encode
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.forks.program import run_program
from elastic.train.folder import Checkpoints
from elastic.tuning.options import AgentOptions
from elastic.worker.node_first import PASSED_VARIABLE
from elastic.worker.node_first import require_fit as require_fit_of_worker

SCRIPT = "print('trained', flush=True)"
TOO_FEW = 200  # descriptors: enough to start torchrun, too few for a job
WITH_FEW_DESCRIPTORS = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""


def torchrun(
    folder: Path,
    etcd: EmbeddedEtcd,
    root: str,
    *,
    conf: str,
    descriptors: int | None = None,
    script: str = SCRIPT,
) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(script)
    program = ("-m", "torch.distributed.run")
    if descriptors is not None:
        program = ("-c", WITH_FEW_DESCRIPTORS.format(descriptors))
    command = [
        *(sys.executable, *program, "--nnodes=1", "--rdzv-id=job"),
        *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}"),
        f"--rdzv-conf=prefix={root.rstrip('/')},{conf}",
        *("--max-restarts=1", "--local-addr=127.0.0.1", str(path)),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTIC_NODE_NAME": "this-one"}
    return run_program(command, env, timeout_s=3 * PATIENCE_S)


def test_an_unfit_node_exits_with_71_before_it_registers(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str, connect: Callable[..., EtcdStore]
) -> None:
    sick = torchrun(tmp_path, shared_etcd, root, conf="preflight=1", descriptors=TOO_FEW)
    output = sick.stdout + sick.stderr
    assert sick.returncode == 71, output
    assert "node this-one does not join the job: open files limit: 200" in output
    assert "ulimit -n" in output and "elastic doctor" in output
    assert "Traceback" not in output and "trained" not in output
    assert connect(shared_etcd.endpoint, connect_timeout_s=PATIENCE_S).list(root).entries == ()

    unasked = torchrun(tmp_path, shared_etcd, root, conf="preflight=0", descriptors=TOO_FEW)
    assert unasked.returncode == 0, unasked.stderr


def test_a_fit_node_passes_and_trains(tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str) -> None:
    well = torchrun(tmp_path, shared_etcd, root, conf="preflight=1")
    assert well.returncode == 0, well.stderr
    assert "trained" in well.stdout and "preflight: passed in" in well.stderr


def of_leader(leader: Leader | None) -> Finding:
    store = MemoryStore()
    keys = Keys.of("/elastic", "job")
    if leader is not None:
        store.put(keys.leader, encode(leader))
    found = preflight(store, keys, AgentOptions(), endpoint=None, local_addr="127.0.0.1")
    assert store.list(keys.root).entries == tuple(e for e in store.list(keys.leader).entries)
    return next(finding for finding in found if finding.name == "leader")


def test_the_ports_of_the_leader_must_be_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
        leader = Leader(node_id="n", address="127.0.0.1", liveness_port=port)
        assert of_leader(leader).status is Status.OK
    with socket.socket() as bound:  # refuses connections: the leader has ended
        bound.bind(("127.0.0.1", 0))
        refusing = replace(leader, liveness_port=int(bound.getsockname()[1]))
        assert of_leader(refusing).status is Status.WARNING
    assert of_leader(None).status is Status.SKIPPED


def test_an_unreachable_leader_prevents_the_join() -> None:
    # A listener with a full queue drops further connections, like a firewall.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(address)
            leader = Leader(node_id="n", address=address[0], liveness_port=address[1])
            began = SYSTEM_CLOCK.monotonic()
            found = of_leader(leader)
            assert SYSTEM_CLOCK.monotonic() - began < PATIENCE_S
        finally:
            for one in waiting:
                one.close()
    assert found.status is Status.FAILED
    assert f"{address[0]}:{address[1]}" in found.measured
    with pytest.raises(NodeUnfit) as refused:
        require_fit([found], "n1")
    assert "node n1" in refused.value.message
    assert "open all TCP ports" in refused.value.hint
    assert refused.value.exit_code == 71


JOINING = """
import elastic
run = elastic.join(preflight=True, checkpoints={folder!r})
run.retry(lambda: print("trained", flush=True))
"""


@pytest.mark.slow
def test_a_worker_with_preflight_is_checked_before_it_joins(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str
) -> None:
    """Its agent exits as if it had run the check itself."""
    (tmp_path / "file").touch()
    script = JOINING.format(folder=str(tmp_path / "file" / "checkpoints"))
    sick = torchrun(tmp_path, shared_etcd, root, conf="mode=restart", script=script)
    output = sick.stdout + sick.stderr
    assert sick.returncode == 71, output
    assert "node this-one does not join the job: checkpoint folder" in output
    assert "Not a directory" in output
    assert "use an existing folder that this user can write to" in output
    assert "trained" not in output

    script = JOINING.format(folder=str(tmp_path / "checkpoints"))
    well = torchrun(tmp_path, shared_etcd, root, conf="preflight=1", script=script)
    assert well.returncode == 0, well.stderr
    assert "trained" in well.stdout
    assert well.stderr.count("preflight: passed in") == 2, "the agent's, and that of the folder"


def test_a_worker_checks_the_machine_unless_its_agent_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {finding.name for finding in examine(None, machine_is_checked=False)}
    assert {"/dev/shm", "open files limit"} <= names
    found = examine(str(tmp_path / "made" / "later"), machine_is_checked=True)
    assert {finding.status for finding in found} <= {Status.OK, Status.WARNING}
    assert {finding.name.split()[0] for finding in found} == {"checkpoint"}


def test_no_check_process_starts_if_nothing_needs_checking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("started"))
    require_fit_of_worker(None, {PASSED_VARIABLE: "1", "LOCAL_RANK": "0"})
    require_fit_of_worker("/nowhere/at/all", {"LOCAL_RANK": "1"})


def test_a_failed_or_hung_check_prevents_the_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.CompletedProcess([], 1, b"", b"Traceback\nImportError: no module x\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: ended)
    with pytest.raises(NodeUnfit, match="ended without a result: ImportError: no module x"):
        require_fit_of_worker(None, {})

    def hang(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("python", 1.0)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(NodeUnfit, match="no answer within"):
        require_fit_of_worker(None, {})


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("ckpt", str(Path("ckpt").absolute())),
        (Path("/shared/job"), "/shared/job"),
        ("file:///shared/job", "/shared/job"),
        ("s3://bucket/job", None),
        (LocalStorage("/shared"), "/shared"),
    ],
)
def test_only_a_local_folder_can_be_checked(given: object, folder: str | None) -> None:
    assert Checkpoints(given).local_folder == folder  # type: ignore[arg-type]
