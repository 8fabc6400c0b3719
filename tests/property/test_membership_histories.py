"""Random histories of a job, decided by ``decide``, with the invariants of the protocol.

A model of the environment: nodes with keys on leases, one world key written by
compare-and-swap, leaders that may use an outdated view, and time that advances only by rules.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from kit.membership_leader import ModelLeader, entry_of
from kit.membership_nodes import assert_waits_are_bounded, node

from elastic.agent.liveness import Verdict
from elastic.agent.succession import without_departed
from elastic.membership.decision import decide, world_of
from elastic.membership.records import (
    Member,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    group_of,
)
from elastic.membership.view import (
    Decision,
    End,
    Liveness,
    Policy,
    Proposal,
    View,
)
from elastic.tuning.intervals import permission_s
from elastic.wire.messages import Cause, WorldState

POLICY = Policy(min_nodes=2, max_nodes=4, join_timeout_s=1e9)
LEASE_S = 4.0
ROUNDING_S = 1e-6  # of sums of times


@dataclass
class Machine:
    """The actual state of a node, and its record in the store."""

    record: Node
    key: Node  # as last written
    process_lives: bool = True
    reachable: bool = True  # renews its lease, and learns of new worlds
    answers: bool = True  # probes by the leader
    is_frozen: bool = False  # only the thread that renews its lease runs
    writes_late: bool = False
    proved_dead: bool = False  # its port refuses connections
    is_refused: bool = False  # a firewall refuses the leader's connections to it
    key_until_s: float = 0.0  # the end of its lease, once it is not renewed
    has_left_record: bool = False  # its key says that it has left, and has no lease
    is_key_deleted: bool = False  # by a leader
    is_key_lost: bool = False  # in a wiped store
    since_s: float = 0.0
    silent_since_s: float | None = None
    permitted_until_s: float = math.inf  # to train
    leaves_by_s: float = math.inf  # otherwise its agent kills the workers

    @property
    def renews(self) -> bool:
        return self.process_lives and self.reachable

    @property
    def acts(self) -> bool:
        return self.renews and not self.is_frozen


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
        self.leader = ModelLeader()
        self.count = 0

    @property
    def limits(self) -> tuple[int, int]:
        return self.policy.min_nodes, self.policy.max_nodes

    # ── the leader's view ────────────────────────────────────────────────────────────────

    def has_key(self, machine: Machine) -> bool:
        if machine.is_key_deleted or machine.is_key_lost:
            return False
        return self.is_permanent(machine) or machine.renews or self.now < machine.key_until_s

    def is_permanent(self, machine: Machine) -> bool:
        """Whether its key has no lease."""
        return machine.key.outlives_lease or machine.has_left_record

    def view(self) -> View:
        return self.leader.view(
            self.world,
            [(m.key, not self.is_permanent(m)) for m in self.machines.values() if self.has_key(m)],
            {node_id: self.verdict(m) for node_id, m in self.machines.items()},
            (),
            self.now,
        )

    def is_unknown(self, machine: Machine) -> bool:
        """Whether no record tells the leader of this node's end."""
        return machine.is_key_lost and not self.leader.knows(machine.key)

    def advance(self, seconds: float) -> None:
        """Time passes; the leader has received what was written before."""
        self.view()
        self.now += seconds

    def verdict(self, machine: Machine) -> Verdict:
        """Of a probe by the leader."""
        if machine.proved_dead:
            return Verdict(Liveness.DEAD, "its process has ended")
        if machine.silent_since_s is None:
            return Verdict(Liveness.ALIVE, "answers")
        return Verdict(Liveness.SUSPECT, "silent", refused=machine.is_refused)

    def trains(self, machine: Machine) -> bool:
        """Whether its workers may be in a group, and step."""
        return (
            machine.process_lives
            and machine.record.running is not None
            and machine.record.state in (NodeState.STARTING, NodeState.LEAVING)
            and self.now < machine.permitted_until_s
            and (machine.is_frozen or self.now < machine.leaves_by_s)
        )

    def groups(self) -> list[WorldRecord]:
        """The worlds that make progress: all their members are in them."""
        worlds = {
            m.record.running.generation: m.record.running
            for m in self.machines.values()
            if isinstance(m.record.running, WorldRecord)
        }
        return [
            w
            for w in worlds.values()
            if all(
                self.trains(self.machines[i]) and self.machines[i].record.running == w
                for i in w.node_ids
            )
        ]

    # ── the leader's actions ─────────────────────────────────────────────────────────────

    def decide(self, view: View, revision: int) -> Decision:
        decision = decide(view, self.now, self.policy)
        assert decision == decide(view, self.now, self.policy), "not deterministic"
        assert decision.reason
        if isinstance(decision, Proposal):
            if revision == len(self.worlds):
                self.check_reason(decision)
            self.check(decision, view)
            if revision == len(self.worlds):  # compare-and-swap
                self.write(decision)
        elif isinstance(decision, End):
            self.check_end(decision, view)
            assert decision.outcome is Outcome.FAILURE or not self.has_gone_on(), decision.reason
            if revision == len(self.worlds):
                self.ended = decision
        return decision

    def check_reason(self, proposal: Proposal) -> None:
        """A world whose members train, or have finished and may be gone, is only extended."""
        if self.world is None or self.world.state is WorldState.PAUSED:
            return
        members = [self.machines[node_id] for node_id in self.world.node_ids]
        is_fine = all(m.record.running == self.world == m.key.running for m in members) and all(
            (m.record.state is NodeState.FINISHED is m.key.state and not self.is_unknown(m))
            or (m.acts and m.record.state is NodeState.STARTING and m.silent_since_s is None)
            for m in members
        )
        assert not is_fine or proposal.cause is Cause.JOINED, proposal.reason

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
            assert proposal.cause in (Cause.TAKEOVER, Cause.UNFINISHED)
            for m in view.missing:
                silent_s = self.now - m.last_sign_s + ROUNDING_S
                assert m.proved_dead or m.finished or silent_s >= self.policy.takeover_s
        if proposal.state is WorldState.ACTIVE:
            # Those that have finished count while the job may be ending.
            since_s = self.now - self.policy.join_timeout_s
            finished = {
                n.node.node_id
                for n in view.nodes
                if n.node.state is NodeState.FINISHED and n.state_since_s > since_s
            }
            finished |= {
                m.member.node_id for m in view.missing if m.finished and m.last_sign_s > since_s
            }
            is_end = proposal.cause is Cause.UNFINISHED
            assert chosen and (is_end or len(chosen) + len(finished) >= self.policy.min_nodes)

    def has_gone_on(self) -> bool:
        """Whether a member has run a later world than any node that has finished."""
        assert self.world is not None
        finished = [m for m in self.machines.values() if m.record.state is NodeState.FINISHED]
        last = max((m.record.last_run or 0 for m in finished), default=0)
        members = [self.machines[node_id].record for node_id in self.world.node_ids]
        # Nobody steps in a world that waits for a member which finished before it.
        is_waiting = any(
            record.state is NodeState.FINISHED and (record.last_run or 0) < self.world.generation
            for record in members
        )
        return not is_waiting and any((record.last_run or 0) > last for record in members)

    def check_end(self, end: End, view: View) -> None:
        assert view.world is not None
        if end.outcome is Outcome.FAILURE:  # paused for join_timeout_s
            assert view.world.state is WorldState.PAUSED
            assert self.now - self.world_since_s >= self.policy.join_timeout_s
            return
        present = {n.node.node_id: n for n in view.nodes}
        ended = [n.node.running for n in view.nodes if n.node.state is NodeState.FINISHED]
        peers = {i for group in ended if group is not None for i in group_of(group) or ()}
        for node_id in view.world.node_ids:
            seen = present.get(node_id)
            if seen is not None and seen.node.running is None and node_id not in peers:
                continue  # it returned while the others did the last steps
            since_s = seen.suspect_since_s if seen is not None else None
            is_silent = since_s is not None and self.now - since_s >= self.policy.takeover_s
            if seen is not None and seen.liveness is not Liveness.DEAD and not is_silent:
                assert seen.node.state in (
                    NodeState.FINISHED,
                    NodeState.LEAVING,
                    NodeState.FAILED,
                ), f"ended while {node_id} is {seen.node.state}"

    def write(self, proposal: Proposal) -> None:
        chosen = {n.node_id for n in proposal.nodes}
        for group in self.groups():
            assert not chosen or chosen & set(group.node_ids), (
                f"generation {group.generation} may make progress besides"
            )
        self.world = world_of(proposal, self.world, nonce="ab", time_s=0.0)
        self.worlds.append(self.world)
        self.world_since_s = self.now

    def set(self, machine: Machine, record: Node) -> None:
        if (ran := record.running or machine.record.running) is not None:  # as in agent/node.py
            record = replace(record, ran_generation=ran.generation)
        machine.record = record
        if not machine.writes_late:
            self.write_key(machine)

    def write_key(self, machine: Machine) -> None:
        if machine.key.state is not machine.record.state:
            machine.since_s = self.now
        machine.key = machine.record

    def pick(self, number: int, *, running: bool | None = None) -> Machine | None:
        found = [
            m
            for m in self.machines.values()
            if m.acts and (running is None or (m.record.running is not None) == running)
        ]
        return found[number % len(found)] if found else None

    # ── events ───────────────────────────────────────────────────────────────────────────

    @initialize(members=st.integers(0, 4), steps=st.integers(0, 2))
    def a_job_begins(self, members: int, steps: int) -> None:
        """Most histories begin with a job: few random ones form a world."""
        for _ in range(members):
            self.a_node_arrives()
        for _ in range(steps):
            self.the_job_proceeds(seconds=self.policy.last_call_s, adopts=True)

    @rule(seconds=st.sampled_from([0.0, 3.0, 20.0]), adopts=st.booleans())
    def the_job_proceeds(self, seconds: float, adopts: bool) -> None:
        self.advance(seconds)
        self.the_leader_decides()
        for machine in self.machines.values():
            if machine.acts and adopts:
                self.adopt_world(machine)

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
        self.machines[record.node_id] = Machine(record, record, since_s=self.now)

    @rule()
    def the_leader_decides(self) -> None:
        if self.ended is None:
            view = self.view()
            for node_id in self.leader.unneeded(self.world):
                self.machines[node_id].is_key_deleted = True
            self.decide(view, len(self.worlds))

    @rule(worlds=st.integers(0, 3))
    def a_new_leader_is_elected(self, worlds: int = 3) -> None:
        """It knows the keys that exist, and the last worlds that its node has seen, if any."""
        self.leader = ModelLeader(self.worlds[-worlds:] if worlds else ())

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
        if current is None:
            return
        is_called = current.cause is Cause.UNFINISHED and record.node_id in current.id_set
        if record.state is NodeState.FINISHED and is_called:
            assert record.running is not None
        elif record.state not in (NodeState.ARRIVED, NodeState.STARTING):
            return
        if record.running is not None and record.running.generation < current.generation:
            after = record.running.generation
            record = replace(record, state=NodeState.ARRIVED, running=None, arrived_for=after)
        takes = current.state is WorldState.ACTIVE and record.node_id in current.node_ids
        if takes and record.running is None and record.arrived_for < current.generation:
            record = replace(record, state=NodeState.STARTING, running=current, failure=None)
            machine.permitted_until_s = math.inf
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

    @rule(number=st.integers(0, 8), refuses=st.booleans())
    def the_leader_cannot_reach_a_node(self, number: int, refuses: bool = False) -> None:
        """It still renews its lease, and learns of new worlds."""
        machine = self.pick(number)
        if machine is not None:
            self.cut_off(machine)
            machine.is_refused = refuses

    def cut_off(self, machine: Machine) -> None:
        machine.answers = False
        machine.silent_since_s = machine.silent_since_s or self.now

    @rule(number=st.integers(0, 8), seconds=st.sampled_from([5.0, 20.0, 400.0]))
    def one_finishes_one_dies_and_the_leader_cannot_reach_the_others(
        self, number: int, seconds: float
    ) -> None:
        """They renew their leases, and train on where the world is not broken."""
        self.workers_finish(number)
        self.a_node_dies(number + 1, noticed=True)
        for machine in self.machines.values():
            if machine.acts and machine.record.state is NodeState.STARTING:
                self.cut_off(machine)
        for _ in range(2):
            self.the_leader_decides()
            self.advance(seconds)
        self.the_leader_decides()

    @rule(number=st.integers(0, 8))
    def an_agent_freezes(self, number: int) -> None:
        """Except for the thread that renews its lease."""
        machine = self.pick(number)
        if machine is not None:
            machine.is_frozen = True
            machine.silent_since_s = self.now
            machine.permitted_until_s = self.now + permission_s(self.policy.takeover_s)

    @rule(number=st.integers(0, 8))
    def a_node_writes_its_key_late(self, number: int) -> None:
        machine = self.pick(number)
        if machine is not None:
            machine.writes_late = True

    @rule()
    def keys_are_written(self) -> None:
        for machine in self.machines.values():
            if machine.renews:
                machine.writes_late = False
                self.write_key(machine)

    def silence(self, machine: Machine) -> None:
        machine.is_refused = False
        machine.key_until_s = self.now + LEASE_S
        machine.silent_since_s = self.now
        machine.permitted_until_s = self.now + permission_s(self.policy.takeover_s)

    @precondition(lambda self: self.world is not None and self.world.members)
    @rule(die=st.booleans(), candidates=st.integers(0, 3))
    def all_members_fall_silent(self, die: bool, candidates: int) -> None:
        assert self.world is not None
        for node_id in self.world.node_ids:
            machine = self.machines[node_id]
            if machine.renews:
                self.silence(machine)
                machine.process_lives, machine.reachable = not die, die
        self.advance(LEASE_S + 1)
        for _ in range(candidates):
            self.a_node_arrives()

    @precondition(lambda self: self.world is not None and self.ended is None)
    @precondition(lambda self: len(self.machines) < 12)
    @rule(die=st.booleans(), elects=st.booleans())
    def a_node_joins_and_the_others_fall_silent(self, die: bool, elects: bool) -> None:
        """They may still run the previous world, which does not contain the joining node."""
        for machine in self.machines.values():
            if machine.acts:
                self.adopt_world(machine)
        self.a_node_arrives()
        self.advance(self.policy.last_call_s)
        self.the_leader_decides()
        for machine in self.machines.values():
            if machine.renews and machine.record.running is not None:
                self.silence(machine)
                machine.process_lives, machine.reachable = not die, die
        self.advance(LEASE_S + 1)
        if elects:
            self.a_new_leader_is_elected()
        self.the_leader_decides()

    @precondition(lambda self: self.ended is None)
    @rule()
    def the_store_is_wiped(self) -> None:
        """Nodes register again, and restore the world that they run. If none runs one, the world is
        lost, and so are the records of nodes that have ended."""
        self.view()
        runs = [m for m in self.machines.values() if m.process_lives and m.record.running]
        if runs and not any(m.acts for m in runs):
            return
        if not runs:
            self.world, self.worlds, self.stale = None, [], None
        for machine in self.machines.values():
            if not machine.renews:
                machine.is_key_lost = self.is_permanent(machine)
                machine.key_until_s = min(machine.key_until_s, self.now)

    @rule()
    def isolated_nodes_reconnect(self) -> None:
        for machine in self.machines.values():
            if machine.process_lives:
                machine.reachable = machine.answers = True
                machine.is_frozen = machine.writes_late = machine.is_refused = False
                machine.silent_since_s = None
                # The workers of an excluded node get no permission: it reads the world first.
                if self.world is None or machine.record.node_id in self.world.node_ids:
                    machine.permitted_until_s = math.inf
                self.write_key(machine)

    @rule(number=st.integers(0, 8))
    def a_node_receives_sigterm(self, number: int) -> None:
        machine = self.pick(number)
        if machine is not None:
            self.ask_to_leave(machine)

    def ask_to_leave(self, machine: Machine) -> None:
        if machine.record.state is not NodeState.FINISHED:
            self.set(machine, replace(machine.record, state=NodeState.LEAVING))
            machine.leaves_by_s = min(machine.leaves_by_s, self.now + self.policy.leave_grace_s)

    @rule(noticed=st.booleans())
    def leaving_nodes_have_left(self, noticed: bool = True) -> None:
        """Their workers have ended. One that cannot reach the store just ends; another one leaves a
        record if the world still depends on it."""
        tracked = {m.node_id for m in self.world.tracked} if self.world else set()
        for machine in self.machines.values():
            if machine.record.state is not NodeState.LEAVING or not machine.process_lives:
                continue
            machine.has_left_record = machine.acts and machine.record.node_id in tracked
            if machine.has_left_record:
                machine.record = replace(machine.record, running=None)
                self.write_key(machine)
            elif machine.acts:
                machine.key_until_s = self.now  # deleted
            else:
                machine.key_until_s = max(machine.key_until_s, self.now)
            machine.process_lives, machine.proved_dead = False, noticed
            machine.silent_since_s = machine.silent_since_s or self.now

    def awaited(self) -> tuple[Member, ...]:
        """The nodes that a starting node lets lead first."""
        entries = (
            entry_of(m.key, has_lease=not self.is_permanent(m))
            for m in self.machines.values()
            if self.has_key(m)
        )
        return without_departed(self.world.tracked if self.world else (), entries)

    @precondition(lambda self: self.world is not None and self.world.members)
    @precondition(lambda self: self.ended is None and len(self.machines) < 12)
    @rule(noticed=st.booleans())
    def all_nodes_leave_and_others_start(self, noticed: bool) -> None:
        """If all have recorded their departure, one of the others leads at once, and need not wait
        for anyone."""
        for machine in self.machines.values():
            if machine.acts:
                self.ask_to_leave(machine)
        self.the_leader_decides()
        self.nobody_is_left_where_any_node_may_lead_at_once()
        self.leaving_nodes_have_left(noticed)
        self.a_new_leader_is_elected()
        for _ in range(self.policy.max_nodes):
            self.a_node_arrives()
        may_lead = not self.awaited()
        self.the_leader_decides()
        if may_lead and self.ended is None:
            assert self.world is not None and self.world.members

    @precondition(lambda self: self.ended is None and len(self.machines) < 12)
    @rule(worlds=st.integers(0, 2))
    def all_nodes_leave_and_lose_the_store_and_others_start(self, worlds: int) -> None:
        """Their workers save the step at which they leave."""
        leaving = [machine for machine in self.machines.values() if machine.acts]
        for machine in leaving:
            self.ask_to_leave(machine)
        self.the_leader_decides()
        for machine in leaving:
            self.silence(machine)
            machine.reachable = False
        self.advance(LEASE_S + 1)
        self.a_new_leader_is_elected(worlds)
        for _ in range(self.policy.max_nodes):
            self.a_node_arrives()
        self.the_job_proceeds(seconds=0.0, adopts=True)

    @precondition(lambda self: self.ended is None and len(self.machines) < 12)
    @rule()
    def nodes_join_and_the_others_leave(self) -> None:
        """They still run the previous world, which does not contain the joining nodes."""
        for machine in self.machines.values():
            if machine.acts:
                self.adopt_world(machine)
        leaving = [m for m in self.machines.values() if m.acts and m.record.running is not None]
        for _ in range(self.per_replica):
            self.a_node_arrives()
        self.advance(self.policy.last_call_s)
        self.the_leader_decides()
        for machine in leaving:
            self.ask_to_leave(machine)
        self.the_leader_decides()

    @precondition(lambda self: self.ended is None and len(self.machines) < 12)
    @rule(number=st.integers(0, 8))
    def all_nodes_leave_and_one_agent_hangs(self, number: int) -> None:
        """It renews its lease, and its workers are not ended."""
        for machine in self.machines.values():
            if machine.acts:
                self.ask_to_leave(machine)
        self.the_leader_decides()
        self.an_agent_freezes(number)
        for _ in range(self.policy.max_nodes):
            self.a_node_arrives()
        self.the_leader_decides()

    @rule(number=st.integers(0, 8))
    def workers_finish(self, number: int) -> None:
        machine = self.pick(number, running=True)
        if machine is not None and machine.record.state is NodeState.STARTING:
            self.set(machine, replace(machine.record, state=NodeState.FINISHED))

    @precondition(lambda self: len(self.machines) < 12)
    @rule(number=st.integers(0, 8), exits=st.booleans(), elects=st.booleans(), wipes=st.booleans())
    def a_node_finishes_early_and_another_arrives(
        self, number: int, exits: bool, elects: bool, wipes: bool = False
    ) -> None:
        """The others may train on for long."""
        machine = self.pick(number, running=True)
        self.workers_finish(number)
        if exits and machine is not None and machine.record.state is NodeState.FINISHED:
            self.silence(machine)
            machine.process_lives, machine.proved_dead = False, True
            self.advance(LEASE_S + 1)
        for _ in range(1 + elects):  # what a leader deletes, its successor does not know
            if elects:
                self.a_new_leader_is_elected()
            self.the_leader_decides()
        if wipes and self.ended is None:
            self.the_store_is_wiped()
            self.the_leader_decides()
        self.a_node_arrives()

    @precondition(lambda self: self.ended is None)
    @rule()
    def all_workers_fail_as_the_store_is_wiped(self) -> None:
        """Only the nodes know how many worlds there have been."""
        for number in range(len(self.machines)):
            self.workers_fail(number)
            self.workers_fail(0)
        self.the_store_is_wiped()
        self.the_leader_decides()

    @precondition(lambda self: self.ended is None)
    @rule(number=st.integers(0, 8), elects=st.booleans())
    def a_node_finishes_early_and_the_others_end_in_a_later_world(
        self, number: int, elects: bool
    ) -> None:
        """That is no success of the job: what they have trained since is lost."""
        self.workers_finish(number)
        self.workers_fail(number + 1)
        for _ in range(2):
            self.the_job_proceeds(seconds=self.policy.join_window_s, adopts=True)
        for machine in self.machines.values():
            if machine.acts and machine.record.state is not NodeState.FINISHED:
                self.silence(machine)
                machine.process_lives, machine.proved_dead = False, True
        self.advance(LEASE_S + 1)
        if elects:
            self.a_new_leader_is_elected()
        self.the_leader_decides()

    @precondition(lambda self: len(self.machines) < 12)
    @rule(number=st.integers(0, 8))
    def a_member_of_a_paused_world_falls_silent(self, number: int) -> None:
        """Others arrive, with which the job could go on."""
        self.a_node_dies(number, noticed=True)
        self.the_leader_decides()
        self.the_leader_cannot_reach_a_node(number)
        for _ in range(self.policy.min_nodes):
            self.a_node_arrives()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)

    # ── invariants ───────────────────────────────────────────────────────────────────────

    @invariant()
    def at_most_one_world_makes_progress(self) -> None:
        assert len(self.groups()) <= 1, [w.generation for w in self.groups()]

    @invariant()
    def nobody_is_left_where_any_node_may_lead_at_once(self) -> None:
        if self.world is not None and not self.awaited():
            assert not any(self.machines[m.node_id].process_lives for m in self.world.tracked)
            assert not self.groups()

    @invariant()
    def no_wait_is_without_a_limit(self) -> None:
        if self.ended is None:
            assert_waits_are_bounded(self.view(), self.now, self.policy)

    @invariant()
    def no_process_that_lives_is_proved_dead(self) -> None:
        view = self.view()
        dead = {n.node.node_id for n in view.nodes if n.liveness is Liveness.DEAD}
        dead |= {m.member.node_id for m in view.missing if m.proved_dead}
        assert not any(self.machines[node_id].process_lives for node_id in dead)

    @invariant()
    def generations_only_grow(self) -> None:
        generations = [w.generation for w in self.worlds]
        assert generations == sorted(set(generations))

    def teardown(self) -> None:
        """Finally every live node is in the world, or too few are alive, or the job has ended."""
        self.isolated_nodes_reconnect()
        self.leaving_nodes_have_left()
        for _ in range(12):
            if self.ended is not None:
                return
            self.decide(self.view(), len(self.worlds))
            for machine in self.machines.values():
                if machine.acts:
                    self.adopt_world(machine)
            self.advance(self.policy.takeover_s)
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
            and m.record.node_id in self.world.node_ids
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


class SingleNodeHistories(Histories):
    """Histories in which one node may train alone: others join it and continue without it."""

    policy = replace(POLICY, min_nodes=1)


class FullHistories(Histories):
    """Histories of a job of a fixed size, with spares."""

    policy = replace(POLICY, min_nodes=2, max_nodes=2)


class HastyHistories(Histories):
    """Histories in which a job goes on for longer than join_timeout_s after a node has finished."""

    policy = replace(POLICY, join_timeout_s=30.0)


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
TestSingleNodeHistories = SingleNodeHistories.TestCase
TestFullHistories = FullHistories.TestCase
TestHastyHistories = HastyHistories.TestCase
TestReplicaHistories = ReplicaHistories.TestCase
TestLargeReplicaHistories = LargeReplicaHistories.TestCase


def test_finished_nodes_are_no_world_if_no_complete_replica_remains() -> None:
    """Found by the histories: of two replicas one node is lost, and one of each finishes early."""
    state = ReplicaHistories()
    state.a_job_begins(members=4, steps=1)
    state.a_node_dies(noticed=False, number=0)
    for number in (0, 1):
        state.workers_finish(number=number)
    state.teardown()


def test_a_node_that_has_joined_does_not_start_beside_leaving_ones() -> None:
    """Found by the histories: it takes the place of one of them, and the other leaves, too."""
    state = ReplicaHistories()
    state.a_job_begins(members=3, steps=1)
    state.a_node_receives_sigterm(number=1)
    state.the_leader_decides()
    state.a_node_receives_sigterm(number=0)
    state.a_node_joins_and_the_others_fall_silent(die=False, elects=False)
    state.at_most_one_world_makes_progress()
    state.teardown()


def test_a_start_does_not_wait_for_a_node_that_an_earlier_world_has_excluded() -> None:
    """Found by the histories: its hung agent renews its lease, and its record names the world
    before the one that has excluded it."""
    state = LargeReplicaHistories()
    state.a_job_begins(members=3, steps=1)
    state.a_node_dies(noticed=False, number=8)
    state.an_agent_freezes(number=0)
    state.all_nodes_leave_and_others_start(noticed=False)
    state.leaving_nodes_have_left(noticed=True)
    state.one_finishes_one_dies_and_the_leader_cannot_reach_the_others(number=0, seconds=400.0)
    state.all_nodes_leave_and_others_start(noticed=False)
    state.teardown()
