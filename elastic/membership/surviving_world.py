"""The next world if members survive: docs/explanation/protocol.md, section 2, rules 2 to 8."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elastic.membership.joining_nodes import JoiningNodes, find_joining_nodes, quarantined_until
from elastic.membership.member_status import MemberStatus, settling_until_s, silent_until_s
from elastic.membership.proposal import also, count, names, propose, verb
from elastic.membership.records import (
    Cause,
    Node,
    NodeState,
    Outcome,
    WorldRecord,
    WorldState,
)
from elastic.membership.replicas import (
    Arrangement,
    arrange,
    incomplete,
    waiting_for_others,
    whole_replicas,
    why_waiting,
)
from elastic.membership.view import (
    Decision,
    End,
    Liveness,
    NodeView,
    Policy,
    Proposal,
    View,
    Wait,
)

Nodes = tuple[NodeView, ...]
NO_CANDIDATES = JoiningNodes(eligible=(), admissible_from_s=None, skipped={})


@dataclass(frozen=True)
class SurvivingWorld:
    """One decision about a world with survivors (``status``)."""

    view: View
    status: MemberStatus
    now: float
    policy: Policy

    @property
    def world(self) -> WorldRecord:
        return self.status.world

    def decide(self) -> Decision:
        """Everything that happened at once makes one world: lost, left, failed and joining."""
        candidates = self._candidates()
        if (stepping := self._may_step_alone()) is not None:
            return stepping
        if self.world.state is WorldState.PAUSED:
            return self._after_pause(candidates)
        if not self.status.changed and not candidates.eligible:
            return self._steady(candidates)
        if (until_s := settling_until_s(self.view, self.status, self.now, self.policy)) is not None:
            return Wait(reason="; ".join(self.status.sentences), until_s=until_s)
        if (pause := self._until_next_attempt(candidates)) is not None:
            return pause
        survivors = self._reachable()
        if isinstance(survivors, Wait):
            return survivors
        if self.status.changed:
            return self._after_change(survivors, candidates)
        return self._join(survivors, candidates)

    def _until_next_attempt(self, candidates: JoiningNodes) -> Wait | None:
        """Wait if the same members could not connect to each other several times."""
        status, until_s = self.status, self.view.retry_at_s
        is_same = not (status.gone or status.out or status.absent or candidates.eligible)
        if until_s is None or self.now >= until_s or not is_same:
            return None
        why = "; ".join(status.sentences)
        return Wait(reason=f"{why}; the next attempt begins after a pause", until_s=until_s)

    def waiting(self) -> dict[str, str]:
        """The ids of the nodes that wait outside the world -> why, in words."""
        candidates = self._joining_nodes()
        waiting = dict(candidates.skipped)
        if self._may_be_ending:
            why = "the job is ending"
        elif self._is_full(self.status.survivors):
            why = self.full_reason
        else:
            return waiting
        # A node whose replica is incomplete would wait in a world with room, too.
        nodes = [n.node for n in candidates.eligible]
        return waiting | {n.node_id: why_waiting(n, self.world, nodes) or why for n in nodes}

    # ── nodes ────────────────────────────────────────────────────────────────────────────

    def _candidates(self) -> JoiningNodes:
        found = self._joining_nodes()
        if not self._may_be_ending:
            return found
        from_s = self.now if found.eligible else found.admissible_from_s
        if from_s is not None:
            from_s = max(from_s, self._ending_until_s)
        return replace(NO_CANDIDATES, admissible_from_s=from_s)

    def _joining_nodes(self) -> JoiningNodes:
        in_process = self.status.in_process
        return find_joining_nodes(self.view, self.world, self.now, in_process=in_process)

    @property
    def _ending_until_s(self) -> float:
        """Members that have finished are about to end the job: no node joins it, so that the others
        are not restarted in its last steps. If those train on for this long, they finished early.
        """
        return max(self.status.ended_since_s, default=-math.inf) + self.policy.join_timeout_s

    @property
    def _may_be_ending(self) -> bool:
        return self.now < self._ending_until_s

    def _arranged(self, survivors: Nodes, candidates: JoiningNodes) -> Arrangement:
        """The survivors' replicas and the oldest joining nodes that fit, excluded stragglers last.

        In-process workers of a broken replica restart before they rejoin, because its collectives
        are dead: no other node waits for them. If no complete replica has the state, all restart.
        """
        slow = self.view.stragglers
        waiting = tuple(sorted(candidates.eligible, key=lambda n: n.node.node_id in slow))
        found = self._arrange(survivors, waiting)
        if self.world.nodes_per_replica == 1:
            return found
        if self.status.in_process and _hold_the_state(found):
            found = self._arrange(survivors, waiting, repairs=False)
            first = self._left_behind(found, survivors)
        elif self.status.in_process:
            first = tuple(n for n in survivors if n.node.running is not None)
        else:
            first = self._left_behind(found, survivors)
        others = without(survivors, first)
        return self._arrange(first, others + waiting) if first else found

    def _left_behind(self, arrangement: Arrangement, survivors: Nodes) -> Nodes:
        """Survivors of a group that may still step with a lost member, none of them in the next
        world: one must leave that group for it (docs/explanation/protocol.md, section 3)."""
        chosen = {n.node.node_id for n in arrangement.nodes}
        groups = {group for g in self.status.gone for group in g.groups}
        bound = {i for group in groups if chosen.isdisjoint(group) for i in group}
        return tuple(n for n in survivors if n.node.node_id in bound)

    def _arrange(self, survivors: Nodes, waiting: Nodes, *, repairs: bool = True) -> Arrangement:
        world = self.world
        return arrange(
            world,
            survivors,
            waiting,
            per_replica=world.nodes_per_replica,
            max_nodes=self._max_nodes,
            repairs=repairs,
        )

    @property
    def _max_nodes(self) -> int:
        """The limit of the job, or of its script: batches cannot be split among any number of
        ranks."""
        limit = self._max_ranks
        if not limit:
            return self.world.max_nodes
        nproc = max(m.nproc for m in self.world.members)
        return max(min(self.world.max_nodes, limit // nproc), len(self.status.survivors))

    @property
    def _max_ranks(self) -> int:
        """As the workers report it: the smallest limit; 0: none is known."""
        return min((n.node.max_ranks for n in self.view.nodes if n.node.max_ranks), default=0)

    @property
    def full_reason(self) -> str:
        """Why the world has no room for further nodes."""
        if self._max_nodes == self.world.max_nodes:
            return "the world is full"
        return (
            f"the global batch can be split among at most {self._max_ranks} ranks: it has no room "
            "for more nodes"
        )

    def _restarts(self, arrangement: Arrangement) -> bool:
        """Whether workers that can change worlds without a restart cannot do so now."""
        is_split = self.world.nodes_per_replica > 1 and self.status.in_process
        return is_split and not _hold_the_state(arrangement)

    def _enough(self, nodes: Nodes) -> bool:
        # Finished nodes count while the job may be ending: none would replace them. If it has gone
        # on for longer, they had ended early.
        status, since_s = self.status, self.now - self.policy.join_timeout_s
        counted = len(status.ended) * self._may_be_ending
        counted += sum(ended_s > since_s for ended_s in status.ended_before_s)
        return len(nodes) + counted >= self.world.min_nodes

    def _reachable(self) -> Nodes | Wait:
        """The survivors, unless one is suspect: then its lease decides, within seconds.

        Building a world with a node that is probably dead costs more than that wait. A suspect that
        keeps renewing its lease is missing after a while (``overdue_as_missing``). It does not
        delay joining nodes for longer either if its world is intact: then it stays a member.
        """
        survivors = self.status.survivors
        suspects = tuple(n for n in survivors if n.liveness is Liveness.SUSPECT)
        limits = (silent_until_s(n, self.view, self.status, self.policy) for n in suspects)
        until_s = max(limits, default=-math.inf)
        if self.now >= until_s:
            return survivors
        return Wait(reason=f"{names(suspects)} may be dead: the lease decides", until_s=until_s)

    def _may_step_alone(self) -> Wait | None:
        """Wait for members that fell silent in a group without a survivor, which nothing stops.

        This happens when survivors were about to join them: by a plan that was not executed, or a
        restart that they had not started. The others wait, as after the loss of all.
        """
        survivors = {n.node.node_id for n in self.status.survivors}
        alone = [
            g for g in self.status.gone if any(survivors.isdisjoint(group) for group in g.groups)
        ]
        until_s = max((g.last_sign_s for g in alone), default=-math.inf) + self.policy.takeover_s
        if self.now >= until_s:
            return None
        who = "; ".join(g.sentence for g in alone)
        reason = (
            f"workers that nobody has joined may still run: {who}; "
            f"it is taken over {self.policy.takeover_s:g} s after the last sign"
        )
        return Wait(reason=reason, until_s=until_s)

    def _without_quarantined(self, survivors: Nodes, candidates: JoiningNodes) -> Nodes:
        """Rule 5: a member that is reported repeatedly is quarantined, provided that the rest can
        continue."""
        rest = tuple(n for n in survivors if not self._is_quarantined(n.node))
        enough = bool(rest) and self._enough(self._arranged(rest, candidates).nodes)
        return rest if enough else survivors

    def _is_quarantined(self, node: Node) -> bool:
        until = quarantined_until(node, self.view)
        return until is not None and self.now < until

    # ── decisions ────────────────────────────────────────────────────────────────────────

    def _steady(self, candidates: JoiningNodes) -> Wait:
        reason = self._runs()
        if suspects := [n for n in self.status.running if n.liveness is Liveness.SUSPECT]:
            reason += f"; {names(suspects)} may be dead: the lease decides"
        return Wait(reason=also(reason, candidates), until_s=candidates.admissible_from_s)

    def _after_change(self, survivors: Nodes, candidates: JoiningNodes) -> Proposal:
        rest = self._without_quarantined(survivors, candidates)
        left_out = without(survivors, rest)
        if self._is_last_replica_leaving(rest):
            reason = f"{self._why(())}; no complete replica remains"
            return self._next((), Cause.PAUSED, reason, planned=True)
        arrangement = self._arranged(rest, candidates)
        if not self._enough(arrangement.nodes):
            return self._pause(rest, arrangement)
        reason = self._why_arranged(arrangement, candidates)
        if left_out:
            reason += f"; {names(left_out)} quarantined"
        causes = {g.cause for g in self.status.gone}
        causes |= {Cause.LEFT} if self.status.absent else set()
        cause = next((c for c in (Cause.LOST, Cause.LEFT) if c in causes), Cause.FAILURE)
        planned = self._can_reach_boundary(rest)
        restarts = self._restarts(arrangement)
        return self._next(arrangement.nodes, cause, reason, planned=planned, restarts=restarts)

    def _can_reach_boundary(self, survivors: Nodes) -> bool:
        """Whether all ranks can complete their step and leave the world before the next one."""
        is_stepping = self.world.state is not WorldState.PAUSED or self.status.pending
        is_everyone = len(survivors) == len(self.status.survivors)
        return is_stepping and self.status.unbroken and is_everyone

    def _is_last_replica_leaving(self, survivors: Nodes) -> bool:
        """Whether no complete replica would remain. Then all nodes leave at a step boundary, and
        save, like the last ones of a job."""
        if not self.status.in_process or not self.status.unbroken or not survivors:
            return False
        return self._restarts(self._arranged(survivors, NO_CANDIDATES))

    def _pause(self, survivors: Nodes, arrangement: Arrangement) -> Proposal:
        """In process, complete replicas agree and save; if nodes only leave, at a step boundary.
        Nodes that restart all stay members: the world records whose workers may still run."""
        if self.status.in_process and not self._restarts(arrangement):
            nodes = tuple(n for replica in arrangement.intact for n in replica)
            planned = self._can_reach_boundary(survivors)
            return self._next(nodes, Cause.PAUSED, self._too_few(survivors), planned=planned)
        restarts = self.world.nodes_per_replica > 1
        return self._next(survivors, Cause.PAUSED, self._too_few(survivors), restarts=restarts)

    def _join(self, survivors: Nodes, candidates: JoiningNodes) -> Decision:
        """Only joining nodes, and no failure: there is time to admit several together."""
        arrangement = self._arranged(survivors, candidates)
        nodes = arrangement.nodes
        joining = without(nodes, survivors)
        if not joining and self._is_full(survivors):
            return self._replace_stragglers(survivors, candidates)
        if not joining:
            # (If enough nodes for a replica wait, they wait for each other's workers.)
            few = self._incomplete(candidates.eligible) or self._waiting(candidates.eligible)
            reason = f"{self._runs()}; {few}"
            return Wait(reason=also(reason, candidates), until_s=candidates.admissible_from_s)
        if (late := self._until_all_run(survivors, joining)) is not None:
            return late
        until = min(n.state_since_s for n in joining) + self.policy.join_window_s
        if not self._is_full(nodes) and self.now < until:
            reason = f"{self._why(joining)}; waiting {self.policy.join_window_s:g} s for more nodes"
            return Wait(reason=reason, until_s=until)
        reason = self._why_arranged(arrangement, candidates)
        return self._next(nodes, Cause.JOINED, reason, planned=True)

    def _is_full(self, nodes: Nodes) -> bool:
        return len(nodes) + self.world.nodes_per_replica > self._max_nodes

    def _replace_stragglers(self, survivors: Nodes, candidates: JoiningNodes) -> Proposal | Wait:
        """In a full world, let waiting nodes replace a straggler and the nodes of its replica. The
        world keeps its size; a node that was excluded for this replaces no other."""
        stragglers, per_replica = self.view.stragglers, self.world.nodes_per_replica
        spares = tuple(n for n in candidates.eligible if n.node.node_id not in stragglers)
        others = whole_replicas(spares, per_replica, have_met=self.status.in_process)
        replicas = self._arranged(survivors, NO_CANDIDATES).intact
        slow_replicas = [
            replica for replica in replicas if any(n.node.node_id in stragglers for n in replica)
        ][: len(others)]
        slow = tuple(n for replica in slow_replicas for n in replica)
        rest = without(survivors, slow)
        if not slow or not rest:
            return Wait(reason=f"{self._waiting(candidates.eligible)}: {self.full_reason}")
        joining = tuple(n for replica in others[: len(slow_replicas)] for n in replica)
        if (late := self._until_all_run(survivors, joining)) is not None:
            return late
        why = "; ".join(stragglers[n.node.node_id] for n in slow if n.node.node_id in stragglers)
        reason = f"{names(joining)} {verb(joining, 'replace')} {names(slow)}: {why}"
        return self._next(rest + joining, Cause.LEFT, reason, planned=True)

    def _until_all_run(self, survivors: Nodes, joining: Nodes) -> Wait | None:
        late = [n for n in survivors if not self._has_entered(n.node)]
        if not late:
            return None
        plan = f"{names(late)} {verb(late, 'run')} generation {self.world.generation}"
        return Wait(reason=f"{self._waiting(joining)} until {plan}")

    def _has_entered(self, node: Node) -> bool:
        """Whether a node has entered this world: joining nodes wait until the last plan has been
        executed."""
        if not self.status.in_process:
            return node.state is not NodeState.ARRIVED
        return node.running is not None and node.running.generation >= self.world.generation

    def _after_pause(self, candidates: JoiningNodes) -> Decision:
        """Rule 4: enough nodes again, fewer still, or nothing to do but wait for them."""
        resumes = self._enough(self._arranged(self.status.survivors, candidates).nodes)
        if not resumes and not self.status.changed:
            return self._paused_wait(candidates)
        survivors = self._reachable()
        if isinstance(survivors, Wait):
            return survivors
        arrangement = self._arranged(survivors, candidates)
        if not resumes:
            return self._pause(survivors, arrangement)
        reason = self._why_arranged(arrangement, candidates)
        return self._next(
            arrangement.nodes,
            Cause.RESUMED,
            reason,
            planned=self._can_reach_boundary(survivors),
            restarts=self._restarts(arrangement),
        )

    def _paused_wait(self, candidates: JoiningNodes) -> Wait | End:
        until = self.view.world_since_s + self.policy.join_timeout_s
        survivors = count(self.status.survivors)
        needed = f"paused with {survivors} of at least {self.world.min_nodes} nodes"
        if self.now >= until:
            reason = f"{needed}, and too few arrived within {self.policy.join_timeout_s:g} s"
            return End(outcome=Outcome.FAILURE, reason=also(reason, candidates), exit_code=1)
        wake = until if candidates.admissible_from_s is None else candidates.admissible_from_s
        if waiting := self._incomplete(candidates.eligible):
            needed += f"; {waiting}"
        return Wait(reason=also(needed, candidates), until_s=min(until, wake))

    def _next(
        self,
        nodes: Nodes,
        cause: Cause,
        reason: str,
        *,
        planned: bool = False,
        restarts: bool = False,
    ) -> Proposal:
        return propose(
            self.view, self.world, nodes, cause, reason, planned=planned, restarts=restarts
        )

    # ── reasons ──────────────────────────────────────────────────────────────────────────

    def _why(self, joining: Nodes) -> str:
        reasons = list(self.status.sentences)
        if joining:
            reasons.append(f"{names(joining)} {verb(joining, 'join')}")
        return "; ".join(reasons) or "enough nodes again"

    def _why_arranged(self, arrangement: Arrangement, candidates: JoiningNodes) -> str:
        """The reason, including the changes to replicas over several nodes."""
        survivors, nodes = self.status.survivors, arrangement.nodes
        reason = self._why(without(nodes, survivors))
        if self.world.nodes_per_replica == 1:
            return reason
        waiting = without(candidates.eligible, nodes)
        left = tuple(n for n in without(survivors, nodes) if not self._is_quarantined(n.node))
        if not self.status.in_process or self._restarts(arrangement):
            waiting += left
        elif left:
            reason += f"; {names(left)} {verb(left, 'restart')}: a replica has lost nodes"
        incomplete_replica = self._incomplete(waiting)
        return f"{reason}; {incomplete_replica}" if incomplete_replica else reason

    def _incomplete(self, waiting: Nodes) -> str:
        """The nodes that wait although there may be room; empty if there are none."""
        few = incomplete(waiting, self.world.nodes_per_replica)
        return waiting_for_others([n.node.name for n in few], self.world.nodes_per_replica) * (
            len(few) > 0
        )

    def _runs(self) -> str:
        return f"generation {self.world.generation} runs on {names(self.status.running)}"

    def _too_few(self, survivors: Nodes) -> str:
        why = "; ".join(self.status.sentences)
        return f"{why}; {count(survivors)} of at least {self.world.min_nodes} nodes remain"

    @staticmethod
    def _waiting(nodes: Nodes) -> str:
        return f"{names(nodes)} {verb(nodes, 'wait')}"


def without(nodes: Nodes, others: Nodes) -> Nodes:
    """Those that are not among the others, in their order."""
    ids = {n.node.node_id for n in others}
    return tuple(n for n in nodes if n.node.node_id not in ids)


def _hold_the_state(arrangement: Arrangement) -> bool:
    """Whether an intact replica has been in a group. (Members of a plan that was not executed have
    not.)"""
    return any(all(n.node.running for n in replica) for replica in arrangement.intact)
