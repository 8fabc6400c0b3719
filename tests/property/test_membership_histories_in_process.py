"""Random histories of a job whose workers keep their processes, decided by ``decide``.

A model of the environment: nodes whose workers warm up, enter worlds, step, fail and
report; planned worlds that are switched to at a step, immediate ones that are built at once. A
world that was entered had all its members in it, so that invariants between worlds can be checked
in the model at every moment.
"""

from __future__ import annotations

import math
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
    FailureReport,
    Member,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    group_of,
)
from elastic.membership.replicas import take_slot
from elastic.membership.view import End, Liveness, Policy, Proposal, View
from elastic.tuning.intervals import permission_s
from elastic.wire.messages import Cause, NodeReplica, ReplicaSlot, WorldState

POLICY = Policy(min_nodes=2, max_nodes=4, join_timeout_s=1e9)
NUMBER = st.integers(0, 8)


@dataclass
class Machine:
    """The actual state of a node, and its published record."""

    record: Node
    alive: bool = True  # its agent; a dead one's port refuses at once
    has_key: bool = True
    since_s: float = 0.0
    report: FailureReport | None = None
    told: int = 0  # the newest generation that its workers are in or build
    silent_since_s: float | None = None  # does not answer the leader
    is_isolated: bool = False  # neither renews its lease nor learns of new worlds
    is_frozen: bool = False  # only the thread that renews its lease runs
    is_host_gone: bool = False  # no port refuses, and nothing proves that it is dead
    permitted_until_s: float = math.inf  # to train
    leaves_by_s: float = math.inf  # otherwise its agent kills the workers

    @property
    def steps(self) -> bool:
        """Whether its workers are in a group."""
        return self.alive and self.record.running is not None

    @property
    def is_permanent(self) -> bool:
        """Whether its key has no lease."""
        has_left = self.record.state is NodeState.LEAVING and self.record.running is None
        return (has_left and not self.alive) or self.record.outlives_lease

    def lose_lease(self) -> None:
        self.has_key = self.has_key and self.is_permanent

    @property
    def acts(self) -> bool:
        return self.alive and not (self.is_isolated or self.is_frozen)


class InProcessHistories(RuleBasedStateMachine):
    """The possible events of a job in in-process mode."""

    per_replica = 1  # nodes with one worker each
    policy = POLICY

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.machines: dict[str, Machine] = {}
        self.world: WorldRecord | None = None
        self.written = 0  # worlds
        self.ended: End | None = None
        self.stale: tuple[View, int] | None = None  # another leader's view, and its revision
        self.slots: tuple[NodeReplica, ...] = ()  # the nodes of each replica
        self.count_of_starts = 0
        self.slow: set[str] = set()  # node ids of stragglers, which may be left out
        self.worlds: list[WorldRecord] = []
        self.leader = ModelLeader()

    # ── the leader's view ────────────────────────────────────────────────────────────────

    def view(self) -> View:
        present = [m for m in self.machines.values() if m.has_key]
        view = self.leader.view(
            self.world,
            [(m.record, not m.is_permanent) for m in present],
            {i: Verdict(self.liveness(m), "simulated") for i, m in self.machines.items()},
            [m.report for m in present if m.report],
            self.now,
        )
        return replace(view, stragglers=dict.fromkeys(self.slow, "slow"))

    def advance(self, seconds: float) -> None:
        """Time passes; the leader has received what was written before."""
        self.view()
        self.now += seconds

    def liveness(self, machine: Machine) -> Liveness:
        if not machine.alive and not machine.is_host_gone:
            return Liveness.DEAD
        return Liveness.ALIVE if machine.silent_since_s is None else Liveness.SUSPECT

    @property
    def members(self) -> list[Machine]:
        return [self.machines[i] for i in self.world.node_ids] if self.world else []

    @property
    def tracked(self) -> list[Machine]:
        """And the nodes that may still step before a world without members begins."""
        return [self.machines[m.node_id] for m in self.world.tracked] if self.world else []

    # ── the leader's actions ─────────────────────────────────────────────────────────────

    def lead(self, view: View | None = None, revision: int | None = None) -> None:
        """Decide on the current or an earlier view, and write if the key is unchanged."""
        is_fresh = view is None
        view = view or self.view()
        if is_fresh:
            for node_id in self.leader.unneeded(self.world):
                self.machines[node_id].has_key = False
        decision = decide(view, self.now, self.policy)
        assert decision.reason
        assert decision == decide(view, self.now, self.policy), "not deterministic"
        is_current = revision in (None, self.written)
        if isinstance(decision, Proposal):
            self.check(decision, view, is_fresh)
            if is_current:
                self.write(decision)
        elif isinstance(decision, End) and is_current:
            assert decision.outcome is Outcome.SUCCESS
            assert not is_fresh or self.may_end(), "ends although the job goes on"
            self.ended = decision

    def may_end(self) -> bool:
        """The workers that still run have finished, or were in a group of which others have: they
        leave, or are as good as dead to a leader that sees no key of them, or no answer."""
        finished, limit_s = NodeState.FINISHED, self.policy.takeover_s
        groups = [m.record.running for m in self.machines.values() if m.record.state is finished]
        last = max(group.generation for group in groups if group is not None)
        return all(
            m.record.state in (finished, NodeState.LEAVING)
            or not m.has_key
            or self.now >= (m.silent_since_s or math.inf) + limit_s
            for m in self.members
            if m.steps
        ) and all((m.record.last_run or 0) <= last for m in self.members)

    def check(self, proposal: Proposal, view: View, is_fresh: bool) -> None:
        present = {n.node.node_id: n for n in view.nodes}
        chosen = [n.node_id for n in proposal.nodes]
        liveness = {i: present[i].liveness for i in chosen}
        assert Liveness.DEAD not in liveness.values(), "a dead node is chosen"
        before = view.world
        if silent := {i for i in chosen if liveness[i] is Liveness.SUSPECT}:
            # Its workers train, and its lease is renewed: it learns of the plan through the store.
            assert proposal.planned, "a world is built with a silent node"
            assert before is not None and silent <= before.id_set, "a silent node joins"
        assert proposal.generation > (before.generation if before else 0)
        self.check_replicas(proposal, view)
        if proposal.mode != "in-process":
            assert not (proposal.planned and chosen)
            if proposal.planned and is_fresh:  # all leave at the same step, or no step is announced
                self.check_plan(proposal)
            return
        for chosen_node in proposal.nodes:
            assert chosen_node.in_process and chosen_node.state is NodeState.READY, (
                "a world that changes without a restart waits for workers that are not there"
            )
        if not is_fresh or before is None:
            return
        assert proposal.cause is not Cause.JOINED or proposal.planned, "a join interrupts a step"
        if "slow" in proposal.reason:
            assert proposal.planned, "to replace a straggler interrupts a step"
            assert len(chosen) == len(before.members), "nobody takes the place of a straggler"
            left_out = set(before.node_ids) - set(chosen)
            with_a_slow_one = (r for r in self.replicas_of(before.node_ids) if self.slow & set(r))
            assert left_out <= {i for replica in with_a_slow_one for i in replica}
            assert not self.slow & set(chosen) - set(before.node_ids)
        if proposal.planned:
            self.check_plan(proposal)

    def check_replicas(self, proposal: Proposal, view: View) -> None:
        chosen = [n.node_id for n in proposal.nodes]
        if proposal.state is WorldState.ACTIVE or proposal.mode == "in-process":
            assert len(chosen) % self.per_replica == 0, "a partial replica in a world"
        if proposal.mode != "in-process" or view.world is None:
            return
        replicas = self.replicas_of(chosen)
        met = {n.node_id: n.replica for n in proposal.nodes}
        for ids in replicas:
            assert self.per_replica == 1 or {met[i] for i in ids} == {ids}, "they have not met"
        for old in self.replicas_of(view.world.node_ids):
            going_on = [n for n in proposal.nodes if n.node_id in old and n.running is not None]
            # (Members of a plan that was not carried out are not connected yet.)
            if going_on and all(n.running == view.world for n in going_on):
                assert old in replicas, f"{going_on[0].name} goes on, and its replica is harmed"

    def replicas_of(self, node_ids: Sequence[str]) -> list[tuple[str, ...]]:
        size = self.per_replica
        return [tuple(node_ids[i : i + size]) for i in range(0, len(node_ids), size)]

    def check_plan(self, proposal: Proposal) -> None:
        """A switch at a step boundary is reached only if no member of the group is missing."""
        groups = {m.record.running.generation: m for m in self.members if m.record.running}
        assert groups, "nobody steps towards the boundary"
        for machine in self.machines.values():
            running = machine.record.running
            if running is None or running.generation not in groups:
                continue
            assert machine.alive, "the boundary needs a dead node"
        for generation, machine in groups.items():
            for node_id in group_of(machine.record.running) or ():
                other = self.machines[node_id]
                in_it = other.record.running is not None or (
                    other.record.state is NodeState.FINISHED
                )
                assert in_it, f"the boundary in {generation} needs {other.record.name}, whose " + (
                    "workers are gone"
                )

    def groups(self) -> list[WorldRecord]:
        """The worlds that make progress."""
        groups = {
            m.record.running.nonce: m.record.running
            for m in self.machines.values()
            if isinstance(m.record.running, WorldRecord)
        }
        return [
            group
            for group in groups.values()
            if all(
                m.steps and m.record.running == group and self.now < self.steps_until_s(m)
                for m in (self.machines[i] for i in group.node_ids)
            )
        ]

    def steps_until_s(self, machine: Machine) -> float:
        by_s = math.inf if machine.is_frozen else machine.leaves_by_s
        return min(machine.permitted_until_s, by_s)

    def write(self, proposal: Proposal) -> None:
        chosen = {n.node_id for n in proposal.nodes}
        for group in self.groups():
            assert not chosen or chosen & set(group.node_ids), (
                f"generation {group.generation} may make progress besides"
            )
        step = self.world.switch_at_step if self.world else None
        world = world_of(
            proposal,
            self.world,
            nonce=f"{self.written}",
            time_s=0.0,
            switch_at_step=(step or 50) if proposal.planned else None,
        )
        self.world = world
        self.worlds.append(world)
        self.written += 1

    def put(self, machine: Machine, **fields: object) -> None:
        before = machine.record
        machine.record = replace(before, **fields)  # type: ignore[arg-type]
        if (ran := machine.record.running or before.running) is not None:  # as in agent/node.py
            machine.record = replace(machine.record, ran_generation=ran.generation)
        if machine.record.state is not before.state:
            machine.since_s = self.now

    def pick(self, number: int, *, steps: bool) -> Machine | None:
        found = [m for m in self.machines.values() if m.acts and (m.steps or not steps)]
        found = [m for m in found if m.record.state not in (NodeState.FINISHED, NodeState.LEAVING)]
        return found[number % len(found)] if found else None

    # ── events ───────────────────────────────────────────────────────────────────────────

    @initialize(members=st.integers(2, 4), candidates=st.integers(0, 2))
    def a_job_runs(self, members: int, candidates: int) -> None:
        """test_membership_histories.py covers histories that begin without a job."""
        for _ in range(members):
            self.a_node_arrives(warm=False)
        self.advance(10.0)
        self.lead()
        for _ in range(candidates):
            self.a_node_arrives(warm=True)
        for _ in range(2):
            self.all_nodes_get_ready()

    @rule()
    def all_nodes_get_ready(self) -> None:
        for machine in self.machines.values():
            if machine.acts:
                self.warm_up(machine)

    @rule(seconds=st.sampled_from([0.0, 2.0]), enters=st.booleans())
    def the_job_proceeds(self, seconds: float, enters: bool) -> None:
        self.advance(seconds)
        if self.ended is None:
            self.lead()
        if enters:
            self.adopt_world()

    @precondition(lambda self: len(self.machines) < 10)
    @rule(warm=st.booleans())
    def a_node_arrives(self, warm: bool) -> None:
        name = f"n{len(self.machines) + 1}"
        record = node(
            name,
            joined_at_s=self.now,
            limits=(self.policy.min_nodes, self.policy.max_nodes),
            replica_size=self.per_replica,
        )
        self.machines[record.node_id] = Machine(record, since_s=self.now)
        if warm:
            self.warm_up(self.machines[record.node_id])

    @rule()
    def the_leader_decides(self) -> None:
        if self.ended is None:
            self.lead()

    @rule(worlds=st.integers(0, 3))
    def a_new_leader_is_elected(self, worlds: int = 3) -> None:
        """It knows the keys that exist, and the last worlds that its node has seen, if any."""
        self.leader = ModelLeader(self.worlds[-worlds:] if worlds else ())

    @rule(number=NUMBER, freezes=st.booleans())
    def a_node_falls_silent_with_its_lease(self, number: int, freezes: bool) -> None:
        """The leader cannot reach it, or its agent is frozen except for one thread."""
        machine = self.pick(number, steps=False)
        if machine is not None:
            machine.silent_since_s = self.now
            if freezes:
                self.freeze(machine)

    def freeze(self, machine: Machine) -> None:
        machine.silent_since_s, machine.is_frozen = self.now, True
        machine.permitted_until_s = self.now + permission_s(self.policy.takeover_s)

    @rule(number=NUMBER, elects=st.booleans())
    def a_node_is_isolated(self, number: int, elects: bool) -> None:
        """Its lease ends; its workers may train for a while."""
        machine = self.pick(number, steps=True)
        if machine is not None:
            self.isolate(machine)
            if elects:
                self.a_new_leader_is_elected()

    def isolate(self, machine: Machine) -> None:
        machine.silent_since_s, machine.is_isolated = self.now, True
        machine.lose_lease()
        machine.permitted_until_s = self.now + permission_s(self.policy.takeover_s)

    @precondition(lambda self: self.ended is None and len(self.machines) < 10)
    @rule(elects=st.booleans())
    def a_node_joins_and_the_others_are_isolated(self, elects: bool) -> None:
        """They may still run the previous world, which does not contain the joining node."""
        self.the_job_proceeds(seconds=2.0, enters=True)
        self.a_node_arrives(warm=True)
        self.all_nodes_get_ready()
        self.the_job_proceeds(seconds=2.0, enters=False)
        for machine in self.machines.values():
            if machine.acts and machine.steps:
                self.isolate(machine)
        if elects:
            self.a_new_leader_is_elected()
        self.the_leader_decides()

    @rule(number=NUMBER, seconds=st.sampled_from([5.0, 20.0, 400.0]))
    def one_finishes_one_dies_and_the_leader_cannot_reach_the_others(
        self, number: int, seconds: float
    ) -> None:
        """They renew their leases, and may train on."""
        self.workers_finish(number, only=True)
        self.a_node_dies(number + 1, key_too=False)
        for machine in self.machines.values():
            if machine.acts and machine.steps and machine.record.state is NodeState.READY:
                machine.silent_since_s = machine.silent_since_s or self.now
        for _ in range(3):
            self.the_leader_decides()
            self.advance(seconds)

    @rule()
    def silent_nodes_die(self) -> None:
        for machine in self.machines.values():
            if machine.silent_since_s is not None:
                machine.alive = False
                machine.lose_lease()

    @rule()
    def another_leader_reads_a_view(self) -> None:
        self.stale = (self.view(), self.written)

    @rule()
    def another_leader_decides_on_its_view(self) -> None:
        if self.stale is not None and self.ended is None:
            self.lead(*self.stale)

    @rule(number=NUMBER)
    def workers_get_ready(self, number: int) -> None:
        machine = self.pick(number, steps=False)
        if machine is not None:
            self.warm_up(machine)

    def warm_up(self, machine: Machine) -> None:
        """Start workers: for a world of restart mode with this node, or to join a running job."""
        record, world = machine.record, self.world
        if record.state is NodeState.ARRIVED:
            self.put(machine, state=NodeState.STARTING)
            if self.is_for_a_restart(machine) and world is not None:
                machine.told = world.generation
                ids = next(r for r in self.replicas_of(world.node_ids) if record.node_id in r)
                self.put(machine, running=world, replica=ids if self.per_replica > 1 else ())
        elif self.per_replica > 1 and record.running is None and not self.joins_replica(machine):
            return
        elif record.state is NodeState.STARTING:
            self.put(machine, state=NodeState.READY, in_process=True)

    def joins_replica(self, machine: Machine) -> bool:
        """The agent's actions while its workers are in no world: take a slot and start them, or
        restart them when another node of the replica is gone."""
        record = machine.record
        if not record.replica_start:
            self.count_of_starts += 1
            self.put(machine, replica_start=f"start{self.count_of_starts}")
            record = machine.record
        mine = ReplicaSlot(node_id=record.node_id, start=record.replica_start)
        starts = {i: m.record.replica_start for i, m in self.machines.items() if m.has_key}
        nonce = f"replica{self.count_of_starts}"
        slots = take_slot(self.slots, mine, starts, per_replica=self.per_replica, nonce=nonce)
        ids = next(tuple(s.node_id for s in r.slots) for r in slots if mine in r.slots)
        if record.replica:
            if ids != record.replica:
                self.end_workers(machine, arrived_for=record.arrived_for)
                return False
            return True
        self.slots = slots
        if len(ids) == self.per_replica:
            self.put(machine, replica=ids)
        return len(ids) == self.per_replica

    def is_for_a_restart(self, machine: Machine) -> bool:
        world = self.world
        return (
            world is not None
            and world.mode == "restart"
            and world.state is WorldState.ACTIVE
            and machine.record.node_id in world.node_ids
            and machine.record.arrived_for < world.generation
        )

    @rule()
    def members_adopt_the_world(self) -> None:
        self.adopt_world()

    def adopt_world(self) -> None:
        """Each agent adopts the newest world; a group is entered by all members or by none."""
        world = self.world
        if world is None:
            return
        for machine in self.machines.values():
            self.leave_or_restart(machine, world)
        if world.mode != "in-process":
            return
        waiting = [m for m in self.members if m.record.running != world]
        ready = all(m.acts and m.record.state is NodeState.READY for m in waiting)
        # (A finished or leaving member of a pending plan never reaches the boundary.)
        if ready and all(m.record.arrived_for < world.generation for m in waiting):
            for machine in waiting:
                machine.told = world.generation
                self.put(machine, running=world)

    def leave_or_restart(self, machine: Machine, world: WorldRecord) -> None:
        record = machine.record
        if not machine.acts or record.state not in (NodeState.STARTING, NodeState.READY):
            return
        newest = record.running.generation if record.running else record.arrived_for
        excluded = record.running is not None and record.node_id not in world.node_ids
        restarts = record.node_id in world.node_ids and world.mode == "restart"
        switched = not (world.switch_at_step and world.members) or any(
            m.record.running == world for m in self.members
        )
        if newest < world.generation and (excluded or restarts) and switched:
            self.end_workers(machine, arrived_for=newest)

    def end_workers(self, machine: Machine, *, arrived_for: int, **fields: object) -> None:
        arrived = {"state": NodeState.ARRIVED, "in_process": False, "running": None}
        arrived |= {"replica_start": "", "replica": ()}
        self.put(machine, **arrived, arrived_for=arrived_for, **fields)

    @rule(number=NUMBER, warm=st.integers(0, 2), builds=st.booleans())
    def workers_die(self, number: int, warm: int, builds: bool) -> None:
        """The leader may read its view only when the next workers have already started."""
        machine = self.pick(number, steps=True)
        if machine is None or self.world is None or machine.record.running is None:
            return
        last = machine.record.running.generation
        if builds and machine.record.node_id in self.world.node_ids:
            last = max(last, self.world.generation)
        self.end_workers(machine, arrived_for=last, failure="boom", failure_exit_code=1)
        for _ in range(warm):
            self.warm_up(machine)

    @rule(number=NUMBER)
    def a_joining_nodes_workers_die(self, number: int) -> None:
        """The node may be named by a pending plan, or be part of a build."""
        found = [
            m
            for m in self.machines.values()
            if m.alive and m.record.running is None and m.record.state is NodeState.READY
        ]
        if found:
            machine = found[number % len(found)]
            last = machine.record.arrived_for
            if self.world is not None and machine.record.node_id in self.world.node_ids:
                last = self.world.generation
            self.end_workers(machine, arrived_for=last, failure="boom", failure_exit_code=1)

    @precondition(lambda self: self.per_replica == 1)  # otherwise its siblings' collectives fail
    @rule(number=NUMBER, warm=st.booleans(), builds=st.booleans())
    def one_worker_dies_and_is_replaced(self, number: int, warm: bool, builds: bool) -> None:
        machine = self.pick(number, steps=True)
        if machine is None or self.world is None or machine.record.running is None:
            return
        last = machine.record.running.generation
        if builds and machine.record.node_id in self.world.node_ids:
            last = max(last, self.world.generation)
        self.end_workers(machine, arrived_for=last, failure="boom", failure_exit_code=1)
        self.put(machine, state=NodeState.STARTING)
        if warm:
            self.warm_up(machine)

    @rule(number=NUMBER, builds=st.booleans())
    def a_collective_fails(self, number: int, builds: bool) -> None:
        machine = self.pick(number, steps=True)
        if machine is None or machine.record.running is None or self.world is None:
            return
        generation = machine.record.running.generation
        if builds and machine.record.node_id in self.world.node_ids:
            generation = self.world.generation
        machine.report = FailureReport(
            node_id=machine.record.node_id, generation=generation, error="reset"
        )

    @rule(number=NUMBER, key_too=st.booleans())
    def a_node_dies(self, number: int, key_too: bool) -> None:
        machine = self.pick(number, steps=False)
        if machine is not None:
            machine.alive = False
            if key_too:
                machine.lose_lease()

    @rule()
    def all_workers_die(self) -> None:
        for machine in self.members:
            if machine.steps and machine.record.running is not None:
                last = machine.record.running.generation
                self.end_workers(machine, arrived_for=last, failure="boom", failure_exit_code=1)

    @rule(number=NUMBER)
    def a_node_receives_sigterm(self, number: int) -> None:
        machine = self.pick(number, steps=True)
        if machine is not None:
            self.ask_to_leave(machine)

    def ask_to_leave(self, machine: Machine) -> None:
        if machine.record.state not in (NodeState.FINISHED, NodeState.LEAVING):
            self.put(machine, state=NodeState.LEAVING)
            machine.leaves_by_s = self.now + self.policy.leave_grace_s

    @rule(number=NUMBER)
    def a_node_is_slow(self, number: int) -> None:
        machine = self.pick(number, steps=True)
        if machine is not None:
            self.slow.add(machine.record.node_id)

    @rule()
    def no_node_is_slow(self) -> None:
        self.slow.clear()

    @rule(with_hosts=st.booleans())
    def leaving_nodes_have_left(self, with_hosts: bool = False) -> None:
        """Their last steps are saved. One that cannot reach the store just ends; another one leaves
        a record if the world still depends on it."""
        for machine in self.machines.values():
            if machine.record.state is not NodeState.LEAVING or not machine.alive:
                continue
            machine.has_key = machine.acts and machine in self.tracked
            machine.alive, machine.is_host_gone = False, with_hosts
            if with_hosts:
                machine.silent_since_s = machine.silent_since_s or self.now
            if machine.has_key:
                self.put(machine, running=None, in_process=False, replica_start="", replica=())

    def awaited(self) -> tuple[Member, ...]:
        """The nodes that a starting node lets lead first."""
        entries = (
            entry_of(m.record, has_lease=not m.is_permanent)
            for m in self.machines.values()
            if m.has_key
        )
        return without_departed(self.world.tracked if self.world else (), entries)

    @precondition(lambda self: self.ended is None and len(self.machines) < 12)
    @rule(with_hosts=st.booleans())
    def all_nodes_leave_and_others_start(self, with_hosts: bool) -> None:
        """If all have recorded their departure, one of the others leads at once, and need not wait
        for anyone."""
        for machine in self.machines.values():
            if machine.acts:
                self.ask_to_leave(machine)
        self.lead()
        self.nobody_is_left_where_any_node_may_lead_at_once()
        self.leaving_nodes_have_left(with_hosts)
        self.a_new_leader_is_elected()
        for _ in range(self.policy.max_nodes):
            self.a_node_arrives(warm=False)
        may_lead = not self.awaited()
        if self.ended is None:
            self.lead()
        if may_lead and self.ended is None:
            assert self.world is not None and self.world.members

    @precondition(lambda self: self.ended is None and len(self.machines) < 12)
    @rule(number=NUMBER)
    def all_nodes_leave_and_one_agent_hangs(self, number: int) -> None:
        """It renews its lease, and its workers are not ended."""
        leaving = [machine for machine in self.machines.values() if machine.acts]
        for machine in leaving:
            self.ask_to_leave(machine)
        self.the_leader_decides()
        if leaving:
            self.freeze(leaving[number % len(leaving)])
        for _ in range(self.policy.max_nodes):
            self.a_node_arrives(warm=False)
        self.the_leader_decides()

    def dead_leases_expire(self) -> None:
        for machine in self.machines.values():
            if not machine.alive:
                machine.lose_lease()

    @rule(number=NUMBER, only=st.booleans())
    def workers_finish(self, number: int, only: bool) -> None:
        machine = self.pick(number, steps=True)
        if machine is None or machine.record.running is None:
            return
        group = machine.record.running
        others = [self.machines[i] for i in group_of(group) or ()]
        for m in [machine] if only else [m for m in others if m.steps]:
            self.put(m, state=NodeState.FINISHED)

    @precondition(lambda self: len(self.machines) < 10)
    @rule(number=NUMBER, exits=st.booleans(), elects=st.booleans())
    def a_node_finishes_early_and_another_arrives(
        self, number: int, exits: bool, elects: bool
    ) -> None:
        """The others may train on for long."""
        machine = self.pick(number, steps=True)
        self.workers_finish(number, only=True)
        if exits and machine is not None and machine.record.state is NodeState.FINISHED:
            machine.alive = False
        if elects:
            self.a_new_leader_is_elected()
        self.the_job_proceeds(seconds=2.0, enters=True)
        self.a_node_arrives(warm=True)

    @precondition(lambda self: len(self.machines) < 10)
    @rule(number=NUMBER)
    def a_member_of_a_paused_world_falls_silent(self, number: int) -> None:
        """Others arrive, with which the job could go on."""
        self.a_node_dies(number, key_too=True)
        self.the_job_proceeds(seconds=2.0, enters=True)
        self.a_node_falls_silent_with_its_lease(number, freezes=False)
        for _ in range(self.policy.min_nodes):
            self.a_node_arrives(warm=True)
        self.all_nodes_get_ready()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)

    # ── invariants ───────────────────────────────────────────────────────────────────────

    @invariant()
    def at_most_one_world_makes_progress(self) -> None:
        """A group steps only while all its members are in it. Two such groups share no node, so
        that there must be at most one."""
        whole = {(group.generation, group.nonce) for group in self.groups()}
        assert len(whole) <= 1, f"two worlds make progress: {whole}"

    @invariant()
    def nobody_is_left_where_any_node_may_lead_at_once(self) -> None:
        if self.world is not None and not self.awaited():
            assert not any(machine.alive for machine in self.tracked)
            assert not self.groups()

    @invariant()
    def no_wait_is_without_a_limit(self) -> None:
        if self.ended is None:
            assert_waits_are_bounded(self.view(), self.now, self.policy)

    def teardown(self) -> None:
        """Finally every live node is in the world, or too few are alive, or the job has ended."""
        self.leaving_nodes_have_left()
        self.silent_nodes_die()
        for turn in range(30):
            if self.ended is not None:
                return
            if turn == 10 and self.per_replica > 1:
                self.dead_leases_expire()  # until then, nodes connected to them keep their slots
            for machine in self.machines.values():
                if machine.record.state in (NodeState.LEAVING, NodeState.FINISHED):
                    continue
                if machine.alive:
                    self.warm_up(machine)
            self.lead()
            self.adopt_world()
            self.advance(20.0)  # in all: longer than takeover_s and leave_grace_s
        going = (NodeState.ARRIVED, NodeState.STARTING, NodeState.READY)
        live = [m for m in self.machines.values() if m.alive and m.record.state in going]
        finished = any(m.record.state is NodeState.FINISHED for m in self.machines.values())
        whole = len(live) - len(live) % self.per_replica
        if finished or whole < self.policy.min_nodes:
            return
        assert self.world is not None and self.world.state is WorldState.ACTIVE
        inside = [m for m in live if m.record.node_id in self.world.node_ids]
        assert len(inside) == min(whole, self.policy.max_nodes)
        assert all(m.record.running == self.world for m in inside)


class SingleNodeHistories(InProcessHistories):
    """Histories in which one node may train alone: others join it and continue without it."""

    policy = replace(POLICY, min_nodes=1)


class ReplicaHistories(InProcessHistories):
    """Histories with replicas of two nodes."""

    per_replica = 2
    policy = replace(POLICY, max_nodes=6)


TestInProcessHistories = InProcessHistories.TestCase
TestSingleNodeHistories = SingleNodeHistories.TestCase
TestReplicaHistories = ReplicaHistories.TestCase


def test_a_plan_whose_leaving_node_is_lost_is_replaced_at_once() -> None:
    """Found by the histories: the old group cannot reach another boundary without it."""
    state = InProcessHistories()
    state.a_job_runs(members=2, candidates=2)
    state.a_node_receives_sigterm(number=0)
    state.the_leader_decides()
    state.a_joining_nodes_workers_die(number=0)
    state.at_most_one_world_makes_progress()
    state.teardown()


def test_a_joining_node_of_a_broken_replica_joins_another_one() -> None:
    """Found by the histories: the dead node keeps its slot until its lease expires."""
    state = ReplicaHistories()
    state.a_job_runs(members=2, candidates=2)
    state.a_node_dies(number=2, key_too=False)
    state.a_node_arrives(warm=False)
    state.teardown()


def test_waiting_nodes_start_once_all_members_have_left() -> None:
    """Found by the histories: all members of a restart get SIGTERM while their workers start."""
    state = ReplicaHistories()
    state.a_job_runs(members=2, candidates=2)
    state.a_node_receives_sigterm(number=0)
    state.a_node_arrives(warm=False)
    state.all_nodes_get_ready()
    state.leaving_nodes_have_left()
    state.a_node_arrives(warm=True)
    state.the_job_proceeds(enters=True, seconds=0.0)
    state.all_nodes_get_ready()
    for _ in range(2):
        state.a_node_receives_sigterm(number=0)
    state.all_nodes_get_ready()
    for _ in range(2):
        state.the_job_proceeds(enters=True, seconds=2.0)
        state.at_most_one_world_makes_progress()
    assert state.world is not None and not state.world.members
    state.leaving_nodes_have_left()
    state.the_job_proceeds(enters=True, seconds=2.0)
    state.at_most_one_world_makes_progress()
    assert state.world.members
    state.teardown()


def test_waiting_nodes_do_not_start_beside_leaving_ones_that_lose_the_store() -> None:
    """Found by the histories: all members get SIGTERM, and lose the store before they have left."""
    state = ReplicaHistories()
    state.a_job_runs(members=2, candidates=1)
    for _ in range(2):
        state.a_node_receives_sigterm(number=0)
    for _ in range(2):
        state.a_node_joins_and_the_others_are_isolated(elects=False)
        state.at_most_one_world_makes_progress()
    state.teardown()


def test_waiting_nodes_start_at_once_when_the_leaving_ones_left_with_their_hosts() -> None:
    state = InProcessHistories()
    state.a_job_runs(members=2, candidates=0)
    for _ in range(2):
        state.a_node_receives_sigterm(number=0)
    state.the_leader_decides()
    state.leaving_nodes_have_left(with_hosts=True)
    state.a_new_leader_is_elected()
    for _ in range(2):
        state.a_node_arrives(warm=False)
    state.the_job_proceeds(seconds=state.policy.last_call_s, enters=False)
    assert state.world is not None and state.world.node_ids == ("id-n3", "id-n4")


def test_no_boundary_is_announced_in_a_group_that_an_excluded_nodes_workers_have_left() -> None:
    """Found by the histories: they die before the switch to the world without them."""
    state = SingleNodeHistories()
    state.a_job_runs(members=4, candidates=1)
    state.a_node_is_slow(number=2)
    state.the_leader_decides()
    state.a_node_receives_sigterm(number=3)
    state.one_worker_dies_and_is_replaced(builds=False, number=2, warm=False)
    state.the_leader_decides()
    state.teardown()


def test_no_boundary_is_announced_in_a_group_that_a_leaving_node_has_left() -> None:
    """Found by the histories: it left without a world that was announced to it."""
    state = ReplicaHistories()
    state.a_job_runs(members=2, candidates=0)
    state.a_node_receives_sigterm(number=0)
    state.leaving_nodes_have_left(with_hosts=True)
    state.the_leader_decides()
    state.teardown()
