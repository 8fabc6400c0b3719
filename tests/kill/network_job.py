"""A job whose nodes are machines of an emulated network, controlled by the test."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from etcd_proxy import CuttingProxy
from kit.network.emulated import EmulatedMachine, EmulatedNetwork
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.membership.records import Node, NodeState, decode
from elastic.testing.ledger import LedgerStep
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S
from elastic.tuning.intervals import peer_silence_s

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=500, epochs=6, step_s=0.3)
NODES = 3
LEASE_S = 3.0
SILENCE_S = peer_silence_s(LEASE_S)


class NetworkJob(TrainingJob):
    """Three nodes, of which two suffice. etcd is at the host's address of the network.

    ``members``: a world has as many nodes, no fewer and no more; the others are spares.
    """

    def __init__(
        self,
        etcd: str,
        folder: Path,
        *,
        takeover_s: float = 300.0,
        members: int | None = None,
        workload: Workload = WORKLOAD,
        conf: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(
            [etcd],
            folder,
            script=SCRIPT,
            workload=workload,
            min_nodes=members or NODES - 1,
            max_nodes=members or NODES,
            conf={"lease_s": LEASE_S, "takeover_s": takeover_s, **(conf or {})},
        )
        self.network = EmulatedNetwork(NODES)
        self._etcd = etcd
        self._exits = ExitStack()
        self._machines: dict[str, EmulatedMachine] = {}

    def __enter__(self) -> NetworkJob:
        with ExitStack() as made:
            made.enter_context(self.network)
            door = made.enter_context(CuttingProxy(self._etcd, self.network.host))
            self._door = door.endpoint
            self._exits = made.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._exits:  # (Its namespaces outlive the processes in them.)
            super().__exit__(kind, error, traceback)

    def start_node(self, name: str | None = None, **settings: Any) -> LocalNode:
        """On the first machine without a running node."""
        used = {self._machines[node.name] for node in self.running}
        machine = next(m for m in self.network.machines if m not in used)
        node = super().start_node(
            name,
            endpoints=[self._door],
            launcher=machine.launcher,
            address=machine.address,
            **settings,
        )
        self._machines[node.name] = machine
        return node

    # Who -------------------------------------------------------------------------------------

    @property
    def door_port(self) -> int:
        """The port at which machines reach etcd, at the host's address."""
        return int(self._door.rsplit(":", 1)[1])

    def address(self, node: LocalNode) -> str:
        return self._machines[node.name].address

    def peers(self, node: LocalNode) -> tuple[str, ...]:
        """The addresses of the other machines, without etcd's."""
        return self.network.others(self._machines[node.name])

    def everybody_else(self, node: LocalNode) -> tuple[str, ...]:
        """The addresses of the other machines, and etcd's."""
        return (*self.peers(node), self.network.host)

    def bystanders(self) -> list[LocalNode]:
        """Nodes that neither lead nor run rank 0, if any."""
        important = (self.leader(), self.node_of_rank(0))
        return [node for node in self.running if node not in important]

    def ready(self) -> set[str]:
        """The names of the nodes whose workers are ready for a world, or in one."""
        entries = self.store.list(self.keys.nodes).entries
        nodes = (decode(Node, entry.key, entry.value) for entry in entries)
        return {node.name for node in nodes if node.state is NodeState.READY}

    # What must hold ----------------------------------------------------------------------------

    @contextmanager
    def healed_after(self, seconds: float) -> Iterator[float]:
        """The body injects a fault, which is healed ``seconds`` later; then all nodes train
        together, in steps that began after that. Yields the start time of the fault.
        """
        began_s = time.time()
        yield began_s
        while time.time() < began_s + seconds:
            time.sleep(0.05)
        self.network.heal()
        self.wait_all_train(since_s=time.time())

    def wait_all_train(self, *, since_s: float) -> None:
        """Until all nodes have completed a step together later than that."""

        def together() -> bool:
            recent = [s for s in self.ledger().steps if s.time_s > since_s]
            newest = max((s.generation for s in recent), default=0)
            by_step: dict[int, set[str]] = {}
            for s in recent:
                if s.generation == newest:
                    by_step.setdefault(s.step, set()).add(s.node)
            return any(len(nodes) == NODES for nodes in by_step.values())

        self.wait_for(together, PATIENCE_S, "all nodes in the job again")
        self.ledger().assert_one_world_at_a_time()

    def wait_trains_without(self, node: LocalNode, *, since_s: float) -> None:
        """Until the others complete steps in a world without this node."""

        def goes_on() -> bool:
            ledger = self.ledger()
            later = (s.generation for s in ledger.steps if s.time_s > since_s)
            newest = max(later, default=0)
            names = {s.node for s in ledger.starts if s.generation == newest}
            return len(names) == NODES - 1 and node.name not in names

        self.wait_for(goes_on, PATIENCE_S, f"the others training without {node}")

    def longest_pause_s(self, *, since_s: float) -> float:
        """The longest time between two completed steps of the job, from shortly before the given
        time.
        """
        steps: list[LedgerStep] = sorted(self.ledger().steps, key=lambda s: s.time_s)
        before = [s.time_s for s in steps if s.time_s <= since_s][-1:]
        times = before + [s.time_s for s in steps if s.time_s > since_s]
        return max((b - a for a, b in pairwise(times)), default=0.0)
