"""A cluster of torchrun nodes on one machine for fault injection: the base of every kill test.

Each node is a real ``python -m torch.distributed.run`` in a separate session with its own log.
Ledgers, journals, checkpoints and logs lie in one folder::

    options = TorchrunOptions(min_nodes=2, max_nodes=3)
    with LocalCluster(["127.0.0.1:2379"], "train.py", tmp_path, options) as c:
        c.start_nodes(3)
        c.wait_training(nodes=3)
        c.leader().kill()
        c.wait_training(nodes=2)
        c.wait_ended()
        c.ledger().assert_exactly_once(n=1000, epochs=3)

Leaving the block ends everything that the cluster started, and nothing else. If an exception leaves
the block, the ends of all logs are printed to stderr first.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.membership.records import Keys, Leader, Node, WorldRecord, decode
from elastic.store.keyvalue import KeyValue
from elastic.testing.forks.server import ForkServer
from elastic.testing.ledger import LedgerReader, RunLedger
from elastic.testing.node import LocalNode, TorchrunOptions
from elastic.testing.processes import Process, kill_at_once, marked_with
from elastic.testing.waiting import PATIENCE_S, pause_s

T = TypeVar("T")
C = TypeVar("C", bound="LocalCluster")
_POLL_S = 0.05


class ClusterTimeout(AssertionError):
    """A condition was not met in time. Contains the ends of the logs."""


class LocalCluster:
    """The nodes of one job.

    Args:
        endpoints: etcd's, ``host:port``; with ``backend="c10d"`` the single one of the store.
        script: the training script.
        folder: for ledger, journal, checkpoints and logs; the nodes' working directory.
        options: for all nodes; :meth:`start_node` can override some.
        args: arguments of the script.
        run_id: ``--rdzv-id``; a new one by default.
        open_store: connects to the job's store for :meth:`world` and :meth:`leader`; by default
            an ``EtcdStore`` without TLS and password.
        fork_server: forks agents and workers, which then need not import torch; by default they
            start as in production.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        script: str | Path,
        folder: Path,
        options: TorchrunOptions | None = None,
        *,
        args: Sequence[str] = (),
        run_id: str | None = None,
        open_store: Callable[[], KeyValue] | None = None,
        fork_server: ForkServer | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.script = Path(script).resolve()
        self.folder = folder.resolve()
        self.args = tuple(args)
        self.run_id = run_id or f"test-{uuid.uuid4().hex[:8]}"
        self.options = options or TorchrunOptions()
        self.env = dict(self.options.env)  # of the nodes that are started from now on
        self.nodes: list[LocalNode] = []
        self._open_store = open_store or self._open_etcd
        self._store: KeyValue | None = None
        self._fork_server = fork_server
        self._clock = clock
        self._token = uuid.uuid4().hex
        for part in ("logs", "ledger", "journal", "checkpoints"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._reader = LedgerReader(folder / "ledger")

    # Nodes -----------------------------------------------------------------------------------

    def start_node(
        self,
        name: str | None = None,
        *,
        nproc: int | None = None,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        endpoints: Sequence[str] | None = None,
        conf: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> LocalNode:
        """Start one more node; the arguments override the cluster's settings.

        ``launcher``: a prefix of the agent's command that finally executes it (``env``,
        ``unshare``, ``nice``, ``ip netns exec``). ``address``: at which the other nodes reach it.
        Raises ValueError if a node of that name is running.
        """
        name = name or f"node{len(self.nodes)}"
        if any(node.name == name and node.running for node in self.nodes):
            raise ValueError(f"a node named {name!r} is running already")
        common = self.options
        options = replace(
            common,
            min_nodes=common.min_nodes if min_nodes is None else min_nodes,
            max_nodes=common.max_nodes if max_nodes is None else max_nodes,
            nproc=nproc or common.nproc,
            conf={**common.conf, **(conf or {})},
        )
        command = [
            *launcher,
            *options.command(endpoints or self.endpoints, self.run_id, address),
            str(self.script),
            *self.args,
        ]
        node = LocalNode(
            name,
            command,
            {**self._environment(name), **(env or {})},
            f"{self._token}/{len(self.nodes)}",
            self.folder / "logs" / f"{len(self.nodes)}-{name}.log",
            folder=self.folder,
            fork_server=self._fork_server,
            clock=self._clock,
        )
        self.nodes.append(node)
        return node

    def start_nodes(self, count: int) -> list[LocalNode]:
        """Start several nodes with the cluster's settings. Raises what :meth:`start_node` does:
        ValueError if a name is taken."""
        return [self.start_node() for _ in range(count)]

    @property
    def running(self) -> list[LocalNode]:
        """Nodes with a running agent, oldest first."""
        return [node for node in self.nodes if node.running]

    def node(self, name: str) -> LocalNode:
        """The newest node of that name."""
        return next(node for node in reversed(self.nodes) if node.name == name)

    # State of the job ------------------------------------------------------------------------

    def ledger(self) -> RunLedger:
        """The workers' ledgers until now."""
        return self._reader.read()

    def world(self) -> WorldRecord | None:
        """The world in the store; None before the first. Raises RecordError if it was not written
        by this version."""
        entry = self.store.get(self.keys.world)
        return decode(WorldRecord, entry.key, entry.value) if entry else None

    def generation(self) -> int:
        """The newest agreed generation, 0 before the first. Raises RecordError like
        :meth:`world`."""
        world = self.world()
        return world.generation if world else 0

    def leader(self) -> LocalNode:
        """The leader's node. Waits for a leader; raises ClusterTimeout if there is none."""
        return self.wait_for(self._leader_node, PATIENCE_S, "a leader among the running nodes")

    def node_of_rank(self, rank: int) -> LocalNode:
        """The node that runs this rank in the current world. Raises LookupError if there is no
        world, or none with this rank."""
        world = self.world()
        if world is None:
            raise LookupError("there is no world yet")
        for member in world.members:
            first = world.first_rank_of(member.node_id)
            if first <= rank < first + member.nproc:
                return self.node(member.name)
        raise LookupError(f"rank {rank} is not in generation {world.generation} of {world.size}")

    def training_nodes(self) -> tuple[int, set[str]]:
        """The newest generation with a completed step, and the nodes that completed one in it."""
        steps = self.ledger().steps
        newest = max((s.generation for s in steps), default=0)
        return newest, {s.node for s in steps if s.generation == newest}

    # Waiting ----------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """The first value of ``condition`` that is neither None nor False.

        Raises ClusterTimeout, immediately if every node has ended.
        """
        deadline = self._clock.monotonic() + timeout_s
        while True:
            all_ended, began_s = not self.running, time.thread_time()
            if value := condition():
                return value
            if all_ended or self._clock.monotonic() > deadline:
                why = "all nodes have ended" if all_ended else f"waited {timeout_s:g} s"
                raise ClusterTimeout(f"{what}: {why}\n{self.report()}")
            self._clock.sleep(pause_s(time.thread_time() - began_s, _POLL_S))

    def wait_step(self, step: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until ``step`` is completed; raises ClusterTimeout after ``timeout_s``."""
        self.wait_for(lambda: self.ledger().last_step >= step, timeout_s, f"step {step}")

    def wait_generation(self, generation: int, timeout_s: float = PATIENCE_S) -> WorldRecord:
        """Wait until that generation, or a later one, is agreed; raises ClusterTimeout after
        ``timeout_s``."""

        def reached() -> WorldRecord | None:
            world = self.world()
            return world if world and world.generation >= generation else None

        return self.wait_for(reached, timeout_s, f"generation {generation}")

    def wait_training(
        self, *, nodes: int, after_generation: int = 0, timeout_s: float = PATIENCE_S
    ) -> int:
        """Wait until exactly ``nodes`` nodes, with all their ranks, complete steps together in a
        generation later than ``after_generation``; returns the generation. Raises ClusterTimeout
        after ``timeout_s``."""

        def together() -> int | None:
            ledger = self.ledger()
            newest = max((s.generation for s in ledger.steps), default=0)
            done = {s.rank: s.node for s in ledger.steps if s.generation == newest}
            # A larger world looks the same until its last rank has written a step.
            size = max((s.size for s in ledger.starts if s.generation == newest), default=0)
            is_complete = newest > after_generation and len(done) == size
            return newest if is_complete and len(set(done.values())) == nodes else None

        what = f"{nodes} nodes training in a generation after {after_generation}"
        return self.wait_for(together, timeout_s, what)

    def wait_progress(self, steps: int = 3, timeout_s: float = PATIENCE_S) -> None:
        """Wait until ``steps`` more steps are completed; raises ClusterTimeout after
        ``timeout_s``."""
        self.wait_step(self.ledger().last_step + steps, timeout_s)

    def wait_ended(self, timeout_s: float = PATIENCE_S) -> dict[str, int]:
        """Wait until every agent has ended; returns exit codes by node name (the newest of a name).
        Raises ClusterTimeout if one still runs after ``timeout_s``."""
        deadline = self._clock.monotonic() + timeout_s
        for node in self.nodes:
            try:
                node.wait(max(0.0, deadline - self._clock.monotonic()))
            except TimeoutError:
                raise ClusterTimeout(f"{node} still runs\n{self.report()}") from None
        return {node.name: node.exit_code or 0 for node in self.nodes}

    # The end ----------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """All living processes that this cluster started, directly or indirectly."""
        return marked_with(self._token)

    def assert_nothing_left(self, within_s: float = 5.0) -> None:
        """Raise ClusterTimeout if a process of this cluster is alive after ``within_s``. Call it
        after the job has ended."""
        deadline = self._clock.monotonic() + within_s
        while left := self.processes():
            if self._clock.monotonic() > deadline:
                listed = "\n".join(map(str, left))
                raise ClusterTimeout(f"left running after {within_s:g} s:\n{listed}")
            self._clock.sleep(_POLL_S)

    def report(self) -> str:
        """The job's position and the ends of all logs, for failure messages."""
        ledger = self.ledger()
        head = (
            f"run {self.run_id} in {self.folder}: last step {ledger.last_step}, "
            f"lineage {ledger.describe_lineage()}"
        )
        return "\n".join([head, *(node.log_tail() for node in self.nodes)])

    def stop(self) -> None:
        """Kill all remaining processes and disconnect. Idempotent."""
        for node in self.nodes:
            if node.running:
                node.kill()
        kill_at_once(self._token)
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, ClusterTimeout):
            print(self.report(), file=sys.stderr)  # noqa: T201 - the log of a failed test
        self.stop()

    # Store ------------------------------------------------------------------------------------

    @property
    def keys(self) -> Keys:
        """The names of this job's keys in etcd."""
        return Keys.of(str(self.options.conf.get("prefix", "/elastic")), self.run_id)

    @property
    def store(self) -> KeyValue:
        """The job's store, connected on first use."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _open_etcd(self) -> KeyValue:
        # Imported here: a process that tests another backend and forks must not load grpc.
        from elastic.store.client import EtcdConfig, parse_endpoints
        from elastic.store.etcd import EtcdStore

        return EtcdStore(EtcdConfig(endpoints=parse_endpoints(",".join(self.endpoints))))

    def _leader_node(self) -> LocalNode | None:
        entry = self.store.get(self.keys.leader)
        if entry is None:
            return None
        key = self.keys.node(decode(Leader, entry.key, entry.value).node_id)
        record = self.store.get(key)
        if record is None:
            return None
        name = decode(Node, record.key, record.value).name
        return next((node for node in self.running if node.name == name), None)

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            # With torch's default of one thread per core, nodes on one machine compete for cores.
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "ELASTIC_NODE_NAME": name,
            "ELASTIC_LEDGER": str(self.folder / "ledger"),
            "ELASTIC_JOURNAL": str(self.folder / "journal"),
            "ELASTIC_CHECKPOINTS": str(self.folder / "checkpoints"),
            **self.env,
        }
