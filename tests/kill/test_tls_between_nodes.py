"""Nodes with TLS between them: they train, die, rejoin and read each other's memory tier."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from etcd_certificates import Authority
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.membership.records import Node, decode
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S
from elastic.tuning.options import NODE_TLS
from elastic.wire.handshake import ClientHandshake, SecretKey, frame

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = SCRIPTS / "session.py"
WORKLOAD = Workload(samples=500, epochs=6, step_s=0.5, extra=("--memory-every=5",))
ALERT = 0x15  # the first byte of a TLS server's reply to plaintext


def test_a_tls_job_recovers_and_admits_only_nodes_with_valid_certificates(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    undisturbed = train_undisturbed(tmp_path / "alone", WORKLOAD, SCRIPT)
    authority = Authority(tmp_path, "nodes")
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=SCRIPT,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        env=environment(authority.node_settings("node")),
    ) as job:
        job.bring_to(3)
        ports = ports_of(job)
        assert set(ports) == {"liveness", "memory", "store"}
        for kind, numbers in ports.items():
            for number in numbers:
                assert answer_to_a_plain_peer(number) == ALERT, kind

        generation = job.generation()
        job.node_of_rank(1).kill()
        job.wait_training(nodes=2, after_generation=generation)

        refusals: dict[str, tuple[Mapping[str, object], str]] = {
            "without": (dict.fromkeys(NODE_TLS, ""), "has no TLS between"),
            "expired": (expired(authority), "certificate has expired"),
        }
        for name, (settings, said) in refusals.items():
            refused = job.start_node(name, env=environment(settings))
            refused.wait(PATIENCE_S)
            assert refused.exit_code == 2, refused.log_text()
            assert said in refused.log_text() and "node_cert" in refused.log_text()

        job.bring_to(3)
        copied = {node.name for node in job.running}
        job.wait_for(lambda: copied <= copying(job) or None, PATIENCE_S, "copies in other memories")
        log = "\n".join(node.log_text() for node in job.running)
        assert "does not speak" not in log.replace(WHAT_WE_DID, "")
        job.assert_finishes_whole(undisturbed)


WHAT_WE_DID = "127.0.0.1 is disconnected: it does not speak TLS 1.3"


def copying(job: TrainingJob) -> set[str]:
    """The names of nodes whose memory holds copies of another node's parts."""
    found = set()
    for entry in job.store.list(job.keys.nodes).entries:
        node = decode(Node, entry.key, entry.value)
        for folder in Path("/dev/shm").glob(f"elastic-memory-*-{node.node_id}"):
            with contextlib.suppress(FileNotFoundError):  # an old copy was removed in the meantime
                if any(folder.glob("copies/*/*")):
                    found.add(node.name)
    return found


def ports_of(job: TrainingJob) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"liveness": [], "memory": [], "store": []}
    for entry in job.store.list(job.keys.nodes).entries:
        node = decode(Node, entry.key, entry.value)
        assert node.tls
        found["liveness"].append(node.liveness_port)
        found["memory"].append(node.memory_port)
    world = job.world()
    assert world is not None and world.tls
    found["store"].append(world.store_port)
    return found


def answer_to_a_plain_peer(port: int) -> int:
    """The first byte of the reply; 0: none."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.sendall(frame(ClientHandshake(SecretKey.generate(), "n1").hello))
        with contextlib.suppress(ConnectionResetError):
            return (sock.recv(1) or b"\0")[0]
    return 0


def environment(settings: Mapping[str, object]) -> dict[str, str]:
    return {f"ELASTIC_{name.upper()}": str(value) for name, value in settings.items()}


def expired(authority: Authority) -> dict[str, object]:
    pair = authority.issue("late", hours=(-2, -1))
    return {"node_cacert": authority.cacert, "node_cert": pair.cert, "node_key": pair.key}
