"""``--rdzv-conf preflight=1``: a node that is sick never joins, one that is well does."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_fixtures import PATIENCE_S

from elastic.clock import SYSTEM_CLOCK
from elastic.doctor.findings import Finding, Status
from elastic.doctor.preflight import preflight, require_fit
from elastic.errors import NodeUnfit
from elastic.membership.records import Keys, Leader, encode
from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.store.etcd.store import EtcdStore
from elastic.testing.doubles.memory_store import MemoryStore
from elastic.tuning.agent_options import AgentOptions

SCRIPT = "print('trained', flush=True)"
TOO_FEW = 200  # descriptors: torchrun starts, and a job would not last


def torchrun(
    folder: Path, etcd: EmbeddedEtcd, root: str, *, conf: str, descriptors: int | None = None
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    limit = (
        None
        if descriptors is None
        else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    )
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-id=job"),
            *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}"),
            f"--rdzv-conf=prefix={root.rstrip('/')},{conf}",
            *("--local-addr=127.0.0.1", str(script)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ELASTIC_NODE_NAME": "this-one"},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )


@pytest.mark.cluster
def test_a_sick_node_is_refused_with_71_before_anybody_hears_of_it(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str, connect: Callable[..., EtcdStore]
) -> None:
    sick = torchrun(tmp_path, shared_etcd, root, conf="preflight=1", descriptors=TOO_FEW)
    said = sick.stdout + sick.stderr
    assert sick.returncode == 71, said
    assert "node this-one does not join the job: open files limit: 200" in said
    assert "ulimit -n" in said and "elastic doctor" in said
    assert "Traceback" not in said and "trained" not in said
    assert connect(shared_etcd.endpoint, connect_timeout_s=PATIENCE_S).list(root).entries == ()

    unasked = torchrun(tmp_path, shared_etcd, root, conf="preflight=0", descriptors=TOO_FEW)
    assert unasked.returncode == 0, unasked.stderr


@pytest.mark.cluster
def test_a_well_node_passes_and_trains(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str
) -> None:
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


def test_the_ports_of_the_jobs_leader_have_to_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
        leader = Leader(node_id="n", address="127.0.0.1", liveness_port=port)
        assert of_leader(leader).status is Status.OK
    with socket.socket() as bound:  # refuses: the leader has ended
        bound.bind(("127.0.0.1", 0))
        refusing = replace(leader, liveness_port=int(bound.getsockname()[1]))
        assert of_leader(refusing).status is Status.WARNING
    assert of_leader(None).status is Status.SKIPPED


def test_a_leader_that_cannot_be_reached_keeps_the_node_out() -> None:
    # A listener whose queue is full drops what else comes, as a firewall does.
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
    assert "let all TCP ports pass" in refused.value.hint
    assert refused.value.exit_code == 71
