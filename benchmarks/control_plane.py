"""What a change costs in a job of many nodes: bytes in etcd, the leader's CPU, and time.

One process has a real etcd, the production leader and store, and the records of all nodes, which it
writes as their agents would. Only the probes of nodes are simulated: a node that was removed is
dead, and every other one answers.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

from measurement import Report, Row

from elastic.agent import leader as prober
from elastic.agent.leader import Leadership, Probed
from elastic.agent.liveness import Connections, Verdict
from elastic.agent.node import NodeContext, RunSecret, WorldEntry
from elastic.agent.roster import NodesEvent
from elastic.membership.decision import decide, waiting_nodes
from elastic.membership.records import (
    Keys,
    Leader,
    Node,
    NodeState,
    ProcessIdentity,
    WorldRecord,
    encode,
)
from elastic.membership.view import Liveness, Policy, View
from elastic.store.client import EtcdConfig, parse_endpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.store.keyvalue import Lease, Put, Reset, Snapshot, Watch, WatchEvent
from elastic.telemetry.events import Event
from elastic.testing.reaper import reap_descendants
from elastic.tuning.options import AgentOptions

KEYS = Keys.of("/elastic", "benchmark")
WITHIN_S = 300.0


class CountingStore(EtcdStore):
    """Counts the bytes of values that this client writes and receives."""

    def __init__(self, endpoint: str) -> None:
        self.bytes: Counter[str] = Counter()
        super().__init__(EtcdConfig(endpoints=parse_endpoints(endpoint), request_timeout_s=60.0))

    def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> int:
        self.bytes["written"] += len(value)
        return super().put(key, value, lease=lease)

    def compare_and_swap(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease: Lease | None = None,
        basis: Sequence[tuple[str, int]] = (),
    ) -> int | None:
        self.bytes["written"] += len(value)
        return super().compare_and_swap(
            key, value, expected_revision=expected_revision, lease=lease, basis=basis
        )

    def list(self, prefix: str) -> Snapshot:
        snapshot = super().list(prefix)
        self.bytes["listed"] += sum(len(entry.value) for entry in snapshot.entries)
        return snapshot

    def watch(
        self, prefixes: Sequence[str], callback: Callable[[WatchEvent], None], *, name: str
    ) -> Watch:
        def counted(event: WatchEvent) -> None:
            match event:
                case Reset(snapshot):
                    self.bytes["listed"] += sum(len(entry.value) for entry in snapshot.entries)
                case Put(entry):
                    self.bytes["watched"] += len(entry.value)
            callback(event)

        return super().watch(prefixes, counted, name=name)


class Silent:
    def emit(self, event: Event, *, level: int = 0) -> None:
        """Nothing is logged."""


def nodes_of(count: int) -> list[Node]:
    """Records as agents on separate machines write them."""
    random = Random(7)

    def identifier(digits: int) -> str:
        return f"{random.getrandbits(4 * digits):0{digits}x}"

    return [
        Node(
            node_id=identifier(16),
            name=f"gpu-cluster-a-worker-{number:05d}",
            nproc=8,
            role="default",
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            ports=(40001, 40002, 40003),
            liveness_port=random.randrange(32768, 61000),
            process=ProcessIdentity(
                host=f"gpu-cluster-a-worker-{number:05d}",
                machine_id=identifier(32),
                boot_id=identifier(36),
                pod_uid=identifier(36),
                pid_namespace=4026531836,
                pid=random.randrange(1 << 22),
                start_ticks=random.randrange(1 << 30),
            ),
            state=NodeState.ARRIVED,
            in_process=False,
            min_nodes=2,
            max_nodes=count,
            library="0.1.0",
            torch="2.13.0",
            running=None,
            arrived_for=0,
            failure=None,
            failure_exit_code=None,
            joined_at_s=float(number),
            memory_port=random.randrange(32768, 61000),
            replica_port=random.randrange(32768, 61000),
        )
        for number in range(count)
    ]


class Job:
    """The nodes' records, and the node that leads."""

    def __init__(self, endpoint: str, count: int) -> None:
        self.nodes = {node.node_id: node for node in nodes_of(count)}
        self.store = CountingStore(endpoint)  # the leader's
        self.agents = CountingStore(endpoint)  # those of all nodes
        self.lease = self.agents.lease(60.0)
        leader = next(iter(self.nodes.values()))
        self.context = NodeContext.of(
            leader,
            store=self.store,
            keys=KEYS,
            secret=RunSecret.obtain(self.store, KEYS),
            options=AgentOptions(last_call_s=500.0),
            journal=Silent(),
        )
        self.term = self._new_term()
        self.cpu_s = 0.0  # of the leader's thread

    def _new_term(self) -> Leadership:
        leader = Leader(node_id=self.context.status.node.node_id, address="", liveness_port=0)
        revision = self.agents.put(KEYS.leader, encode(leader))
        return Leadership(
            self.context, lambda record: None, Connections(), lambda: (KEYS.leader, revision)
        )

    def close(self) -> None:
        self.term.close()
        self.store.close()
        self.agents.close()

    def probe(self, host: str, port: int, node_id: str, **more: Any) -> Verdict:
        alive = node_id in self.nodes
        return Verdict(Liveness.ALIVE if alive else Liveness.DEAD, "simulated")

    def write(self, change: Callable[[Node], Node] = lambda node: node) -> None:
        """Every agent writes its record."""
        for node_id, node in self.nodes.items():
            self.nodes[node_id] = node = change(node)
            self.agents.put(KEYS.node(node_id), encode(node), lease=self.lease)

    def lead(self, until: Callable[[], bool]) -> None:
        """The turns of the leader's thread (elastic/agent/service.py)."""
        ends_s, again_s = time.monotonic() + WITHIN_S, 0.0
        while not until():
            if time.monotonic() > ends_s:
                raise SystemExit(f"{len(self.nodes)} nodes: nothing happened for {WITHIN_S:g} s")
            messages = self.context.inbox.take(max(0.0, min(again_s - time.monotonic(), 0.5)))
            begun_s, status = time.thread_time(), self.context.status
            for message in messages:
                if isinstance(message, NodesEvent):
                    self.term.on_nodes(message, status.world)
                elif isinstance(message, Probed):
                    self.term.on_probed(message)
            written, again_s = self.term.lead(status.world_entry, None)
            if isinstance(written, WorldEntry):
                status.set_world(written)
            self.cpu_s += time.thread_time() - begun_s

    @property
    def world(self) -> WorldRecord:
        world = self.context.status.world
        assert world is not None
        return world

    def has_world(self, generation: int) -> bool:
        world = self.context.status.world
        return world is not None and world.generation == generation

    def view(self) -> View:
        return self.term.roster.view(self.world, 0.0, done=None, quarantined={})

    def knows(self, generation: int) -> bool:
        """Whether the leader has received that all nodes run this world."""
        running = [n.node.running for n in self.view().nodes]
        return len(running) == len(self.nodes) and all(
            r is not None and r.generation == generation for r in running
        )

    def lose_one(self) -> None:
        lost = list(self.nodes)[-1]
        del self.nodes[lost]
        self.agents.delete(KEYS.node(lost))

    def enter(self) -> None:
        world = self.world
        self.write(
            lambda node: replace(node, state=NodeState.READY, in_process=True, running=world)
        )

    def elect(self) -> None:
        """The next leader's term begins."""
        self.term.close()
        self.term = self._new_term()


def measure(count: int, rows: dict[tuple[str, str, str], list[float]]) -> None:
    subject = f"{count} nodes"

    def note(case: str, unit: str, value: float) -> None:
        rows[case, subject, unit].append(value)

    with EmbeddedEtcd() as etcd:
        job = Job(str(etcd.endpoint), count)
        follower = CountingStore(str(etcd.endpoint))
        follower.watch([KEYS.leader, KEYS.world, KEYS.done], lambda event: None, name="follower")
        with (
            mock.patch.object(prober, "probe", job.probe),
            mock.patch.object(prober, "proved_gone", lambda process, me: False),
        ):
            try:
                run(job, follower, note)
            finally:
                job.close()
                follower.close()


def run(job: Job, follower: CountingStore, note: Callable[[str, str, float], None]) -> None:
    def step(case: str, act: Callable[[], None], until: Callable[[], bool]) -> None:
        clients = (job.store, job.agents, follower)
        for client in clients:
            client.bytes.clear()
        act()
        cpu_s, begun_s = job.cpu_s, time.monotonic()
        job.lead(until)
        note(f"{case}: time", "ms", 1e3 * (time.monotonic() - begun_s))
        note(f"{case}: leader's CPU", "ms", 1e3 * (job.cpu_s - cpu_s))
        written = job.store.bytes["written"] + job.agents.bytes["written"]
        note(f"{case}: written by all", "KiB", written / 1024)
        received = job.store.bytes["listed"] + job.store.bytes["watched"]
        note(f"{case}: received by the leader", "KiB", received / 1024)
        watched = sum(follower.bytes.values())
        note(f"{case}: received by each follower", "KiB", watched / 1024)

    step("first world", job.write, lambda: job.has_world(1))
    step("all enter it", job.enter, lambda: job.knows(1))
    step("one is lost", job.lose_one, lambda: job.has_world(2))
    step("all enter the next", job.enter, lambda: job.knows(2))
    # (The cheap condition first: each is evaluated in every turn.)
    step("a new leader", job.elect, lambda: not job.term.roster.unresolved() and job.knows(2))
    note("record of a node", "KiB", len(encode(next(iter(job.nodes.values())))) / 1024)
    note("record of the world", "KiB", len(encode(job.world)) / 1024)
    policy = Policy(min_nodes=2, max_nodes=len(job.nodes) + 1)
    for case, view, function in (
        ("decide, steady", job.view(), decide),
        ("decide, one lost", lost_view(job), decide),
        ("why spares wait, as many as members", view_with_spares(job), waiting_nodes),
    ):
        begun_s = time.thread_time()
        function(view, time.monotonic(), policy)
        note(case, "ms", 1e3 * (time.thread_time() - begun_s))


def lost_view(job: Job) -> View:
    view = job.view()
    dead = replace(view.nodes[-1], liveness=Liveness.DEAD)
    return replace(view, nodes=(*view.nodes[:-1], dead))


def view_with_spares(job: Job) -> View:
    """The world is full, and as many nodes wait."""
    view = job.view()
    assert view.world is not None
    spares = tuple(
        replace(n, node=replace(n.node, node_id=f"spare-{n.node.node_id}", running=None))
        for n in view.nodes
    )
    full = replace(view.world, max_nodes=len(view.world.members))
    fits = lambda n: replace(n, node=replace(n.node, max_nodes=full.max_nodes))  # noqa: E731
    return replace(view, world=full, nodes=tuple(map(fits, (*view.nodes, *spares))))


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, nargs="*", default=[100, 300, 1000, 3000])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    rows: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for count in args.nodes:
        for _ in range(args.runs):
            measure(count, rows)
    report = tuple(Row(*names, tuple(samples)) for names, samples in rows.items())
    Report("control_plane", 7, report).show(as_json=args.json)


if __name__ == "__main__":
    main()
