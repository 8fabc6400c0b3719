"""``torchrun`` itself ends with codes that a launcher can act upon (docs/exit-codes.md)."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.membership.records import Done, Keys, Outcome, encode
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

RUNS_ALONE = {"PET_NNODES": "1"}


def environment(endpoint: str, run_id: str, settings: dict[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PET_NNODES": "2",
        "PET_RDZV_BACKEND": "etcd-v3",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ID": run_id,
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_MAX_RESTARTS": "1000000",
        "ELASTIC_LAST_CALL_S": "0.1",
        **settings,
    }


def torchrun(
    folder: Path, endpoint: str, run_id: str, script: str, settings: dict[str, str]
) -> tuple[int, str]:
    """Run to completion: the exit code and the complete output."""
    file = folder / "train.py"
    file.write_text(script)
    node = LocalNode(
        "node",
        [sys.executable, "-m", "torch.distributed.run", str(file)],
        environment(endpoint, run_id, settings),
        run_id,
        folder / f"{uuid.uuid4().hex}.log",
        fork_server=shared_fork_server(),
    )
    try:
        return node.wait(PATIENCE_S), node.log_text()
    finally:
        node.kill()


@pytest.fixture
def run_id(root: str) -> str:
    return root.strip("/").replace("/", "-")


def test_an_invalid_option_exits_with_2(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, run_id: str
) -> None:
    settings = {"ELASTIC_TERMINATION_GRACE_S": "5"}
    code, output = torchrun(tmp_path, shared_etcd.endpoint, run_id, "", settings)
    assert code == 2
    assert "termination_grace_s=5" in output
    assert "Traceback" not in output


def test_an_unreachable_etcd_exits_with_69(tmp_path: Path, run_id: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and stays reserved
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        code, output = torchrun(tmp_path, endpoint, run_id, "", {"ELASTIC_CONNECT_TIMEOUT_S": "1"})
    assert code == 69
    assert endpoint in output
    assert "Traceback" not in output


def test_a_finished_job_exits_with_0(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, run_id: str
) -> None:
    code, output = torchrun(tmp_path, shared_etcd.endpoint, run_id, "", RUNS_ALONE)
    assert code == 0, output


def test_a_missing_run_id_exits_with_2_unless_the_job_has_one_node(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str
) -> None:
    settings = {"ELASTIC_PREFIX": root.rstrip("/")}
    code, output = torchrun(tmp_path, shared_etcd.endpoint, "none", "", settings)
    assert code == 2
    assert "--rdzv-id=NAME" in output
    assert "Traceback" not in output
    script = "print('trained', flush=True)"
    for _ in range(2):
        code, output = torchrun(
            tmp_path, shared_etcd.endpoint, "none", script, {**RUNS_ALONE, **settings}
        )
        assert code == 0
        assert "trained" in output


@pytest.mark.parametrize(("worker", "job"), [pytest.param(1, 1, marks=pytest.mark.slow), (65, 1)])
def test_a_script_that_always_fails_ends_the_job(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, run_id: str, worker: int, job: int
) -> None:
    """Without a checkpoint where one is required, this library ends it with 65, a script never."""
    script = f"raise SystemExit({worker})"
    code, output = torchrun(tmp_path, shared_etcd.endpoint, run_id, script, RUNS_ALONE)
    assert code == job, output


FILLS_ETCD_AND_EXITS = """
import os
from elastic.store.client import load_grpc, load_rpc

rpc = load_rpc()
with load_grpc().insecure_channel(os.environ["PET_RDZV_ENDPOINT"]) as channel:
    etcd = rpc.MaintenanceStub(channel)
    member = etcd.Status(rpc.StatusRequest()).header.member_id
    action = rpc.AlarmRequest.ACTIVATE
    etcd.Alarm(rpc.AlarmRequest(action=action, memberID=member, alarm=rpc.NOSPACE))
raise SystemExit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize(
    ("worker", "job", "said"),
    [
        pytest.param(3, 1, "(exit code 3)", marks=pytest.mark.slow),
        (0, 0, "the workers of this node succe"),
    ],
)
def test_a_full_etcd_does_not_replace_the_scripts_own_result(
    tmp_path: Path, own_etcd: EmbeddedEtcd, run_id: str, worker: int, job: int, said: str
) -> None:
    settings = {**RUNS_ALONE, "CODE": str(worker)}
    code, output = torchrun(tmp_path, own_etcd.endpoint, run_id, FILLS_ETCD_AND_EXITS, settings)
    assert code == job, output
    assert said in output
    assert "NOSPACE" in output and "etcdctl alarm disarm" in output
    assert "is unreachable" not in output


@pytest.mark.parametrize("code", [65, pytest.param(70, marks=pytest.mark.slow)])
def test_a_node_joining_a_failed_job_exits_with_its_code(
    tmp_path: Path,
    shared_etcd: EmbeddedEtcd,
    connect: Callable[..., EtcdStore],
    run_id: str,
    code: int,
) -> None:
    done = Done(
        outcome=Outcome.FAILURE,
        reason="it was hopeless",
        exit_code=code,
        generation=9,
        final_step=1,
        time_s=time.time(),
    )
    connect(shared_etcd.endpoint).put(Keys.of("/elastic", run_id).done, encode(done))
    ended, output = torchrun(tmp_path, shared_etcd.endpoint, run_id, "", {})
    assert ended == code
    assert "it was hopeless" in output


def test_sigterm_while_connecting_to_etcd_exits_with_75(tmp_path: Path, run_id: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(PATIENCE_S)
        node = LocalNode(
            "early",
            [sys.executable, "-m", "torch.distributed.run", "train.py"],
            environment(
                f"127.0.0.1:{mute.getsockname()[1]}", run_id, {"ELASTIC_CONNECT_TIMEOUT_S": "3600"}
            ),
            run_id,
            tmp_path / "log",
            fork_server=shared_fork_server(),
        )
        try:
            client, _ = mute.accept()  # it now waits for an answer
            node.terminate()
            assert node.wait(PATIENCE_S) == 75, node.log_tail()
            client.close()
        finally:
            node.kill()
