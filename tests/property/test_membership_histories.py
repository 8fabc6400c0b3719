"""Random histories of a job, decided by ``decide``, with the invariants of the protocol.

A model of the environment: nodes with keys on leases, one world key written by
compare-and-swap, leaders that may use an outdated view, and time that advances only by rules.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from membership_nodes import node, world

from elastic.membership.decision import (
    Decision,
    End,
    Liveness,
    MissingMember,
    NodeView,
    Policy,
    Proposal,
    View,
    decide,
)
from elastic.membership.records import (
    Cause,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    WorldState,
    group_of,
)

POLICY = Policy(min_nodes=2, max_nodes=4, join_timeout_s=1e9)
LEASE_S = 4.0


@dataclass
class Machine:
    """The actual state of a node, and its record in the store."""

    record: Node
    process_lives: bool = True
    reachable: bool = True  # answers probes and renews its lease
    proved_dead: bool = False  # its port refuses connections
    key_until_s: float = 0.0  # the end of its lease, once it is not renewed
    since_s: float = 0.0

    @property
    def renews(self) -> bool:
        return self.process_lives and self.reachable


class Histories(RuleBasedStateMachine):
    """The possible events of a job in restart mode."""

    per_replica = 1  # nodes with one worker each
    policy = POLICY

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.machines: dict[str, Machine] = {}
        self.world: WorldRecord | None = None
        self.world_since_s = self.now
        self.worlds: list[WorldRecord] = []
        self.ended: End | None = None
        self.stale: tuple[View, int] | None = None  # another leader's view, and its revision
        self.last_sign_s: dict[str, float] = {}
        self.count = 0

    @property
    def limits(self) -> tuple[int, int]:
        return self.policy.min_nodes, self.policy.max_nodes

    # ── the leader's view ────────────────────────────────────────────────────────────────

    def has_key(self, machine: Machine) -> bool:
        return machine.renews or self.now < machine.key_until_s

    def view(self) -> View:
        nodes = [
            NodeView(node=m.record, liveness=self.liveness(m), state_since_s=m.since_s)
            for m in self.machines.values()
            if self.has_key(m)
        ]
        missing = []
        for member in self.world.members if self.world else ():
            machine = self.machines[member.node_id]
            if not self.has_key(machine):
                missing.append(
                    MissingMember(
                        member=member,
                        proved_dead=machine.proved_dead,
                        last_sign_s=self.last_sign_s.get(member.node_id, self.world_since_s),
                        finished=machine.record.state is NodeState.FINISHED,
                        running=machine.record.running,
                    )
                )
        return View(
            world=self.world,
            world_since_s=self.world_since_s,
            nodes=tuple(nodes),
            missing=tuple(missing),
        )

    def liveness(self, machine: Machine) -> Liveness:
        if machine.proved_dead:
            return Liveness.DEAD
        return Liveness.ALIVE if machine.renews else Liveness.SUSPECT

    # ── the leader's actions ─────────────────────────────────────────────────────────────

    def decide(self, view: View, revision: int) -> Decision:
        decision = decide(view, self.now, self.policy)
        assert decision == decide(view, self.now, self.policy), "not deterministic"
        assert decision.reason
        if isinstance(decision, Proposal):
            self.check(decision, view)
            if revision == len(self.worlds):  # compare-and-swap
                self.write(decision)
        elif isinstance(decision, End):
            self.check_end(decision, view)
            if revision == len(self.worlds):
                self.ended = decision
        return decision

    def check(self, proposal: Proposal, view: View) -> None:
        dead = {n.node.node_id for n in view.nodes if n.liveness is Liveness.DEAD}
        dead |= {m.member.node_id for m in view.missing if m.proved_dead}
        chosen = [n.node_id for n in proposal.nodes]
        assert not dead & set(chosen), "a dead node in a new world"
        assert len(chosen) == len(set(chosen)) <= self.policy.max_nodes
        before = list(view.world.node_ids) if view.world else []
        survivors = [n for n in before if n in chosen]
        if self.per_replica == 1:
            assert chosen[: len(survivors)] == survivors, "survivors keep their order"
        elif proposal.state is WorldState.ACTIVE:
            check_replicas(proposal, view, self.per_replica, self.policy.max_nodes)
        if before and not survivors and chosen:
            # docs/explanation/protocol.md, section 3: proof, leave, or takeover_s without contact.
            assert proposal.cause is Cause.TAKEOVER
            for m in view.missing:
                silent_s = self.now - m.last_sign_s
                assert m.proved_dead or m.finished or silent_s >= self.policy.takeover_s
        for m in view.missing:
            # Members whose workers may still train, in a group without a survivor.
            alone = m.running is not None and not {*(group_of(m.running) or ())} & {*chosen}
            if chosen and alone and not (m.proved_dead or m.finished):
                assert self.now - m.last_sign_s >= self.policy.takeover_s, "two worlds in progress"
        if proposal.state is WorldState.ACTIVE:
            finished = {n.node.node_id for n in view.nodes if n.node.state is NodeState.FINISHED}
            finished |= {m.member.node_id for m in view.missing if m.finished}
            ready = len(chosen) + len(finished & set(before))
            assert chosen and ready >= self.policy.min_nodes

    def check_end(self, end: End, view: View) -> None:
        assert view.world is not None
        if end.outcome is Outcome.FAILURE:  # paused for join_timeout_s
            assert view.world.state is WorldState.PAUSED
            assert self.now - self.world_since_s >= self.policy.join_timeout_s
            return
        present = {n.node.node_id: n for n in view.nodes}
        for node_id in view.world.node_ids:
            seen = present.get(node_id)
            if seen is not None and seen.liveness is not Liveness.DEAD:
                assert seen.node.state in (
                    NodeState.FINISHED,
                    NodeState.LEAVING,
                    NodeState.FAILED,
                ), f"ended while {node_id} is {seen.node.state}"

    def write(self, proposal: Proposal) -> None:
        names = [n.name for n in proposal.nodes]
        generation = self.world.generation + 1 if self.world else 1
        self.world = replace(
            world(
                *names,
                generation=generation,
                state=proposal.state,
                limits=self.limits,
                replica_size=proposal.replica_size,
            ),
            cause=proposal.cause,
        )
        self.worlds.append(self.world)
        self.world_since_s = self.now

    def set(self, machine: Machine, record: Node) -> None:
        if record.state is not machine.record.state:
            machine.since_s = self.now
        machine.record = record

    def pick(self, number: int, *, running: bool | None = None) -> Machine | None:
        found = [
            m
            for m in self.machines.values()
            if m.renews and (running is None or (m.record.running is not None) == running)
        ]
        return found[number % len(found)] if found else None

    # ── events ───────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.machines) < 12)
    @rule()
    def a_node_arrives(self) -> None:
        self.count += 1
        record = node(
            f"n{self.count}",
            joined_at_s=self.now,
            limits=self.limits,
            replica_size=self.per_replica,
        )
        self.machines[record.node_id] = Machine(record, since_s=self.now)

    @rule()
    def the_leader_decides(self) -> None:
        if self.ended is None:
            self.decide(self.view(), len(self.worlds))

    @rule()
    def another_leader_reads_a_view(self) -> None:
        self.stale = (self.view(), len(self.worlds))

    @rule()
    def another_leader_decides_on_its_view(self) -> None:
        if self.stale is not None and self.ended is None:
            view, revision = self.stale
            self.decide(view, revision)

    @rule(number=st.integers(0, 8))
    def a_node_adopts_the_world(self, number: int) -> None:
        machine = self.pick(number)
        if machine is not None:
            self.adopt_world(machine)

    def adopt_world(self, machine: Machine) -> None:
        record, current = machine.record, self.world
        if current is None or record.state not in (NodeState.ARRIVED, NodeState.STARTING):
            return
        if record.running is not None and record.running.generation < current.generation:
            after = record.running.generation
            record = replace(record, state=NodeState.ARRIVED, running=None, arrived_for=after)
        takes = current.state is WorldState.ACTIVE and record.node_id in current.node_ids
        if takes and record.running is None and record.arrived_for < current.generation:
            record = replace(record, state=NodeState.STARTING, running=current, failure=None)
        self.set(machine, record)

    @rule(number=st.integers(0, 8))
    def workers_fail(self, number: int) -> None:
        machine = self.pick(number, running=True)
        if machine is not None and machine.record.state is NodeState.STARTING:
            running = machine.record.running
            assert running is not None
            failed = replace(
                machine.record,
                state=NodeState.ARRIVED,
                running=None,
                arrived_for=running.generation,
                failure="RuntimeError: boom",
                failure_exit_code=1,
            )
            self.set(machine, failed)

    @rule(number=st.integers(0, 8), noticed=st.booleans())
    def a_node_dies(self, number: int, noticed: bool) -> None:
        machine = self.pick(number)
        if machine is not None:
            self.silence(machine)
            machine.process_lives = False
            machine.proved_dead = noticed

    @rule(number=st.integers(0, 8))
    def a_node_is_isolated(self, number: int) -> None:
        machine = self.pick(number)
        if machine is not None:
            self.silence(machine)
            machine.reachable = False

    def silence(self, machine: Machine) -> None:
        machine.key_until_s = self.now + LEASE_S
        self.last_sign_s[machine.record.node_id] = self.now

    @precondition(lambda self: self.world is not None and self.world.members)
    @rule(die=st.booleans(), candidates=st.integers(0, 3))
    def all_members_fall_silent(self, die: bool, candidates: int) -> None:
        assert self.world is not None
        for node_id in self.world.node_ids:
            machine = self.machines[node_id]
            if machine.renews:
                self.silence(machine)
                machine.process_lives, machine.reachable = not die, die
        self.now += LEASE_S + 1
        for _ in range(candidates):
            self.a_node_arrives()

    @precondition(lambda self: self.world is not None and self.ended is None)
    @precondition(lambda self: len(self.machines) < 12)
    @rule(die=st.booleans())
    def a_node_joins_and_the_others_fall_silent(self, die: bool) -> None:
        """They may still run the previous world, which does not contain the joining node."""
        for machine in self.machines.values():
            if machine.renews:
                self.adopt_world(machine)
        self.a_node_arrives()
        self.now += self.policy.last_call_s
        self.the_leader_decides()
        for machine in self.machines.values():
            if machine.renews and machine.record.running is not None:
                self.silence(machine)
                machine.process_lives, machine.reachable = not die, die
        self.now += LEASE_S + 1
        self.the_leader_decides()

    @rule()
    def isolated_nodes_reconnect(self) -> None:
        for machine in self.machines.values():
            machine.reachable = True

    @rule(number=st.integers(0, 8))
    def a_node_receives_sigterm(self, number: int) -> None:
        machine = self.pick(number)
        if machine is not None and machine.record.state is not NodeState.FINISHED:
            self.set(machine, replace(machine.record, state=NodeState.LEAVING))

    @rule(number=st.integers(0, 8))
    def workers_finish(self, number: int) -> None:
        machine = self.pick(number, running=True)
        if machine is not None and machine.record.state is NodeState.STARTING:
            self.set(machine, replace(machine.record, state=NodeState.FINISHED))

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # ── invariants ───────────────────────────────────────────────────────────────────────

    @invariant()
    def generations_only_grow(self) -> None:
        assert [w.generation for w in self.worlds] == list(range(1, len(self.worlds) + 1))

    def teardown(self) -> None:
        """Finally every live node is in the world, or too few are alive, or the job has ended."""
        self.isolated_nodes_reconnect()
        for _ in range(12):
            if self.ended is not None:
                return
            self.decide(self.view(), len(self.worlds))
            for machine in self.machines.values():
                if machine.renews:
                    self.adopt_world(machine)
            self.now += self.policy.takeover_s
        live = [
            m.record
            for m in self.machines.values()
            if m.renews and m.record.state in (NodeState.ARRIVED, NodeState.STARTING)
        ]
        finished = [
            m
            for m in self.machines.values()
            if self.world
            and m.record.state is NodeState.FINISHED
            # Also one that finished in an earlier world, while its record exists.
            and (self.has_key(m) or m.record.node_id in self.world.node_ids)
        ]
        whole = len(live) - len(live) % self.per_replica
        if finished or whole < self.policy.min_nodes:
            return
        assert self.world is not None and self.world.state is WorldState.ACTIVE
        members = [r for r in live if r.node_id in self.world.node_ids]
        room = self.policy.max_nodes - self.policy.max_nodes % self.per_replica
        assert len(members) == min(whole, room)
        assert all(r.running == self.world for r in members)


def check_replicas(proposal: Proposal, view: View, per_replica: int, max_nodes: int) -> None:
    """The invariants of worlds of replicas over several nodes."""
    chosen = [n.node_id for n in proposal.nodes]
    assert len(chosen) % per_replica == 0, "a partial replica in a world"
    replicas = replicas_of(chosen, per_replica)
    going = {
        n.node.node_id
        for n in view.nodes
        if n.liveness is Liveness.ALIVE
        and n.node.state in (NodeState.ARRIVED, NodeState.STARTING, NodeState.READY)
    }
    before = replicas_of(view.world.node_ids, per_replica) if view.world else []
    intact = [r for r in before if len(r) == per_replica and set(r) <= going]
    # Unless the others may still step with a lost node: then one of them has to be in the world.
    groups = [group_of(m.running) or () for m in view.missing if m.running and not m.proved_dead]
    kept = {i for replica in intact for i in replica}
    if not any(kept.isdisjoint(group) for group in groups):
        assert replicas[: len(intact)] == intact, "an intact replica is broken up, or moved"
    left = {i for r in before for i in r if i in going} - set(chosen)
    formed = [r for r in replicas if not set(r) & {i for old in before for i in old}]
    assert not left or not formed, f"{left} are left over, and {formed} were formed without them"
    arrived = {n.node.node_id: n.node.name for n in view.nodes if n.node.node_id in going}
    arrived = {i: name for i, name in arrived.items() if i not in chosen}
    waits = [n.node for n in view.nodes if n.node.node_id in arrived]
    waits = [n for n in waits if n.node_id in left or n.state is NodeState.ARRIVED]
    finished = any(n.node.state is NodeState.FINISHED for n in view.nodes)
    is_ending = finished or any(m.finished for m in view.missing)  # no further node joins
    if len(chosen) + per_replica <= max_nodes and not is_ending:
        assert len(waits) < per_replica, f"{[n.name for n in waits]} could be another replica"
        for waiting in waits:
            said = rf"\b{waiting.name}\b.* waits?: {len(waits)} of {per_replica} nodes"
            assert re.search(said, proposal.reason), proposal.reason


def replicas_of(node_ids: Sequence[str], per_replica: int) -> list[tuple[str, ...]]:
    return [tuple(node_ids[i : i + per_replica]) for i in range(0, len(node_ids), per_replica)]


class ReplicaHistories(Histories):
    """Histories with replicas of two nodes."""

    per_replica = 2
    policy = replace(POLICY, max_nodes=6)


class LargeReplicaHistories(Histories):
    """Replicas of three nodes, which may lack more than one; the limits are no multiples of a
    replica."""

    per_replica = 3
    policy = replace(POLICY, max_nodes=7)


TestHistories = Histories.TestCase
TestReplicaHistories = ReplicaHistories.TestCase
TestLargeReplicaHistories = LargeReplicaHistories.TestCase
