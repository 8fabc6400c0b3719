"""/livez and /readyz of real agents, as a kubelet sees them: healthy and unhealthy."""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kit.journal import MemoryJournal
from kit.memory_store import MemoryStore

from elastic.agent import health
from elastic.agent.health import HealthServer
from elastic.agent.identity import current_process
from elastic.agent.node import NodeContext, RunSecret
from elastic.agent.service import NodeService
from elastic.membership.records import Keys, Node, NodeState
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.keyvalue import Lease
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.journal import read_journal
from elastic.testing.node import LocalNode
from elastic.testing.waiting import eventually
from elastic.tuning.options import AgentOptions

DEADLINE_S = 180.0  # for agents, which import torch
HUNG_AFTER_S = 10.0  # an idle node's thread turns once a second
T = TypeVar("T")

SLEEPER = "import time\ntime.sleep(600)\n"
TORCHRUN = f"""\
import elastic.agent.health
from torch.distributed.run import main
elastic.agent.health.HUNG_AFTER_S = {HUNG_AFTER_S}
main()
"""


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


# A real agent ---------------------------------------------------------------------------------


class Agent:
    """``torchrun train.py`` with everything in its environment, as in a pod."""

    def __init__(self, folder: Path, etcd: EmbeddedEtcd, run_id: str, **settings: str) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(SLEEPER)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PET_NNODES": "2:3",
            "PET_NPROC_PER_NODE": "1",
            "PET_MAX_RESTARTS": "1000000",
            "PET_RDZV_BACKEND": "etcd-v3",
            "PET_RDZV_ENDPOINT": etcd.endpoint,
            "PET_RDZV_ID": run_id,
            "ELASTIC_NODE_NAME": "workers-0",
            "PET_LOCAL_ADDR": "127.0.0.1",
            "ELASTIC_HEALTH_PORT": "0",
            "ELASTIC_LAST_CALL_S": "0.1",
            "ELASTIC_JOURNAL": str(folder / "journal"),
            **settings,
        }
        command = [sys.executable, "-c", TORCHRUN, str(script)]
        self.node = LocalNode(
            "workers-0",
            command,
            environment,
            f"health-{run_id}",
            folder / "log",
            folder=folder,
            fork_server=shared_fork_server(),
        )
        self.port = int(self.event("health-served")["port"])

    def event(self, name: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            assert self.node.running, self.node.log_tail()
            events = read_journal(self.folder / "journal")
            return next((e for e in events if e["event"] == name), None)

        return eventually(found, f"no {name}")


@pytest.fixture
def start(tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str) -> Iterator[Callable[..., Agent]]:
    started: list[Agent] = []

    def start(**settings: str) -> Agent:
        agent = Agent(tmp_path, shared_etcd, root.strip("/").replace("/", "-"), **settings)
        started.append(agent)
        return agent

    yield start
    for agent in started:
        agent.node.kill()


def test_a_waiting_agent_is_live_but_not_ready_and_exits_on_sigterm(
    start: Callable[..., Agent],
) -> None:
    agent = start()
    agent.event("node-arrived")
    assert ask(agent.port, "/livez")[0] == 200
    status, body = ask(agent.port, "/readyz")
    assert (status, body["node"]) == (503, "workers-0")
    assert "waiting for a world" in body["reason"]
    agent.node.terminate()
    assert agent.node.wait(DEADLINE_S) == 75
    assert agent.node.processes() == []


def test_an_agent_whose_main_thread_hangs_is_not_live(start: Callable[..., Agent]) -> None:
    """torchrun polls its workers once an hour, so it would not notice their exit."""
    agent = start(PET_NNODES="1", PET_MONITOR_INTERVAL="3600")
    eventually(lambda: ask(agent.port, "/readyz")[0] == 200, "it is never ready")

    def hung() -> str | None:
        status, body = ask(agent.port, "/livez")
        return str(body["reason"]) if status == 503 else None

    assert "MainThread has made no progress" in eventually(hung, "nobody notices")


# The node's thread ----------------------------------------------------------------------------


class StuckStore(MemoryStore):
    """A store whose writes block once ``stuck`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = threading.Event()
        self.released = threading.Event()

    def compare_and_swap(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease: Lease | None = None,
        basis: Sequence[tuple[str, int]] = (),
    ) -> int | None:
        if self.stuck.is_set():
            self.released.wait()
        return super().compare_and_swap(
            key, value, expected_revision=expected_revision, lease=lease, basis=basis
        )


def test_an_agent_whose_node_thread_hangs_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HUNG_AFTER_S", 3.0)
    store = StuckStore()
    service = NodeService(
        NodeContext.of(
            waiting_node(),
            store=store,
            keys=Keys.of("/elastic", "health"),
            secret=RunSecret.obtain(store, Keys.of("/elastic", "health")),
            options=AgentOptions(),
            journal=MemoryJournal(),
        )
    )
    server = HealthServer(0, service.probes, on_error=service.status.fail)
    service.start()
    server.start()
    try:
        service.arrive(nproc=1, role="", ports=(5001,), failure=None, failure_exit_code=None)
        eventually(lambda: store.list("/elastic/health/nodes").entries, "it never registers")
        assert ask(server.port, "/livez")[0] == 200
        store.stuck.set()
        service.warm_up()  # to be written
        eventually(lambda: ask(server.port, "/livez")[0] == 503, "nobody notices")
        assert "elastic-node has made no progress" in ask(server.port, "/livez")[1]["reason"]
        store.released.set()
        eventually(lambda: ask(server.port, "/livez")[0] == 200, "it stays hung")
    finally:
        store.released.set()
        service.close()
        server.close()


def waiting_node() -> Node:
    return Node(
        node_id="id",
        name="workers-0",
        nproc=0,
        role="",
        address="127.0.0.1",
        ports=(),
        liveness_port=0,
        process=current_process(),
        state=NodeState.ARRIVED,
        in_process=False,
        min_nodes=2,
        max_nodes=3,
        library="0.1.0",
        torch="2.13.0",
        running=None,
        arrived_for=0,
        failure=None,
        failure_exit_code=None,
        joined_at_s=0.0,
    )
