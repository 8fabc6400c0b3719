"""The next world after one that has survivors: rules 2 to 7 of PROTOCOL section 4."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.failures.verdict import is_consequence
from elastic.membership.joining_nodes import JoiningNodes, find_joining_nodes, quarantined_until
from elastic.membership.member_status import MemberStatus
from elastic.membership.proposal import also, count, names, propose, verb
from elastic.membership.records import Cause, Node, NodeState, Outcome, WorldRecord, WorldState
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


@dataclass(frozen=True)
class SurvivingWorld:
    """One decision about ``standing``, whose survivors are not empty."""

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
        if (until_s := self._settling_until_s()) is not None:
            return Wait(reason="; ".join(self.status.sentences), until_s=until_s)
        survivors = self._reachable()
        if isinstance(survivors, Wait):
            return survivors
        if self.status.changed:
            return self._after_change(survivors, candidates)
        return self._join(survivors, candidates)

    # ── who ──────────────────────────────────────────────────────────────────────────────

    def _candidates(self) -> JoiningNodes:
        if self.status.finished:  # the job is ending
            return JoiningNodes(eligible=(), quarantine_ends_s=None, passed_over=())
        in_process = self.status.in_process
        return find_joining_nodes(self.view, self.world, self.now, in_process=in_process)

    def _joining(self, survivors: Nodes, candidates: JoiningNodes) -> Nodes:
        """The oldest ones that there is room for; one that was left out as a straggler comes
        last."""
        slow = self.view.stragglers
        candidates_by_rate = sorted(candidates.eligible, key=lambda n: n.node.node_id in slow)
        return tuple(candidates_by_rate[: max(0, self.world.max_nodes - len(survivors))])

    def _enough(self, *groups: Nodes) -> bool:
        # Finished nodes count: the job is ending, nobody would come in their place.
        nodes = sum(len(g) for g in groups) + len(self.status.finished)
        return nodes >= self.world.min_nodes

    def _reachable(self) -> Nodes | Wait:
        """The survivors, unless one is suspect: then its lease decides, within seconds.

        Building a world with a node that is probably dead costs more than that wait, and
        nobody is thrown out for being slow to answer. But a suspect that keeps renewing its
        lease while the leader cannot reach it would block a broken job for ever: after
        ``suspect_s`` it is left out, if the others suffice. a joining node alone is no reason to.
        """
        survivors = self.status.survivors
        suspects = tuple(n for n in survivors if n.liveness is Liveness.SUSPECT)
        if not suspects:
            return survivors
        others = tuple(n for n in survivors if n not in suspects)
        reason = f"{names(suspects)} may be dead: the lease decides"
        since = [n.suspect_since_s for n in suspects if n.suspect_since_s is not None]
        evictable = self.status.changed and bool(others) and self._enough(others)
        if len(since) < len(suspects) or not evictable:
            return Wait(reason=reason)
        is_cut_off = {n.node.node_id for n in suspects} <= self._accused
        # Neither its agent nor its workers are heard: two independent signs of a cut.
        until = max(since) + (self.policy.cut_off_s if is_cut_off else self.policy.suspect_s)
        return others if self.now >= until else Wait(reason=reason, until_s=until)

    def _may_step_alone(self) -> Wait | None:
        """Members that fell silent in a group without any survivor: nobody's leaving stops them.

        So it is where survivors were about to join them: a plan that was not carried out, or a
        restart that they had not begun. The others wait, as after the loss of everybody.
        """
        survivors = {n.node.node_id for n in self.status.survivors}
        alone = [
            g
            for g in self.status.gone
            if not g.proved and g.running is not None and survivors.isdisjoint(g.running.node_ids)
        ]
        until_s = max((g.last_sign_s for g in alone), default=-math.inf) + self.policy.takeover_s
        if self.now >= until_s:
            return None
        said = "; ".join(g.sentence for g in alone)
        reason = (
            f"workers that nobody has joined may still run: {said}; "
            f"it is taken over {self.policy.takeover_s:g} s after the last sign"
        )
        return Wait(reason=reason, until_s=until_s)

    def _settling_until_s(self) -> float | None:
        """A failure report with all members alive is held for a moment: news of a death may explain
        it, and a world of the same members would have to be torn down at once. The same goes for
        workers that ended because of a peer, while that peer has not said what its error was."""
        if (until_s := self._origin_known_until_s()) is not None:
            return until_s
        status, since_s = self.status, self.view.failing_since_s
        if since_s is None or status.gone or status.out or not status.failure_reports:
            return None
        settle_s = self.policy.trouble_settle_s
        if self._accused - {report.node_id for report in status.failure_reports}:
            # Two ends of a broken connection find it within moments of each other. Without the
            # accused one's word it is not known which of the two to leave out.
            settle_s = max(settle_s, self.policy.origin_settle_s)
        until_s = since_s + settle_s
        return until_s if self.now < until_s else None

    @property
    def _accused(self) -> frozenset[str]:
        """Members that others report to be out of reach."""
        reports = self.status.failure_reports
        ids = {n.node.node_id for n in self.status.running}
        return frozenset(ids & {i for r in reports for i in r.accused if i != r.node_id})

    def _origin_known_until_s(self) -> float | None:
        """Restart mode: all that is known are consequences of another member's failure."""
        status = self.status
        if status.in_process or status.gone or not status.out or not status.running:
            return None
        if not all(is_consequence(n.node.failure) for n in status.out):
            return None
        until_s = min(n.state_since_s for n in status.out) + self.policy.origin_settle_s
        return until_s if self.now < until_s else None

    def _without_quarantined(self, survivors: Nodes, candidates: JoiningNodes) -> Nodes:
        """Rule 5: a member accused repeatedly pauses, provided that the rest can go on."""
        rest = tuple(n for n in survivors if not self._cools(n.node))
        enough = bool(rest) and self._enough(rest, self._joining(rest, candidates))
        return rest if enough else survivors

    def _cools(self, node: Node) -> bool:
        until = quarantined_until(node, self.view.quarantined)
        return until is not None and self.now < until

    # ── what ─────────────────────────────────────────────────────────────────────────────

    def _steady(self, candidates: JoiningNodes) -> Wait:
        running = self.status.running
        reason = f"generation {self.world.generation} runs on {names(running)}"
        if suspects := [n for n in running if n.liveness is Liveness.SUSPECT]:
            reason += f"; {names(suspects)} may be dead: the lease decides"
        return Wait(reason=also(reason, candidates), until_s=candidates.quarantine_ends_s)

    def _after_change(self, survivors: Nodes, candidates: JoiningNodes) -> Proposal:
        left_out = survivors
        survivors = self._without_quarantined(survivors, candidates)
        left_out = tuple(n for n in left_out if n not in survivors)
        joining = self._joining(survivors, candidates)
        if not self._enough(survivors, joining):
            return self._next(survivors, Cause.PAUSED, self._too_few(survivors))
        reason = self._why(joining)
        if left_out:
            reason += f"; {names(left_out)} quarantined"
        causes = {g.cause for g in self.status.gone}
        cause = next((c for c in (Cause.LOST, Cause.LEFT) if c in causes), Cause.FAILURE)
        planned = self.status.unbroken and len(survivors) == len(self.status.survivors)
        return self._next(survivors + joining, cause, reason, planned=planned)

    def _join(self, survivors: Nodes, candidates: JoiningNodes) -> Decision:
        """Only joining nodes, nothing is wrong: there is time to gather several."""
        joining = self._joining(survivors, candidates)
        if not joining:
            return self._replace_stragglers(survivors, candidates)
        if (late := self._until_all_run(survivors, joining)) is not None:
            return late
        until = min(n.state_since_s for n in joining) + self.policy.join_window_s
        if len(survivors) + len(joining) < self.world.max_nodes and self.now < until:
            reason = f"{self._why(joining)}; gathering others for {self.policy.join_window_s:g} s"
            return Wait(reason=reason, until_s=until)
        return self._next(survivors + joining, Cause.JOINED, self._why(joining), planned=True)

    def _replace_stragglers(self, survivors: Nodes, candidates: JoiningNodes) -> Proposal | Wait:
        """Nodes wait for a place in a full world, and may have that of a straggler. The world
        keeps its size; a node that was left out for this is nobody's replacement."""
        stragglers = self.view.stragglers
        spares = tuple(n for n in candidates.eligible if n.node.node_id not in stragglers)
        slow = tuple(n for n in survivors if n.node.node_id in stragglers)[: len(spares)]
        rest = tuple(n for n in survivors if n not in slow)
        if not slow or not rest:
            return Wait(reason=f"{self._waiting(candidates.eligible)}: the world is full")
        joining = spares[: len(slow)]
        if (late := self._until_all_run(survivors, joining)) is not None:
            return late
        why = "; ".join(stragglers[n.node.node_id] for n in slow)
        reason = f"{names(joining)} {verb(joining, 'replace')} {names(slow)}: {why}"
        return self._next(rest + joining, Cause.LEFT, reason, planned=True)

    def _until_all_run(self, survivors: Nodes, joining: Nodes) -> Wait | None:
        late = [n for n in survivors if not self._took_up(n.node)]
        if not late:
            return None
        plan = f"{names(late)} {verb(late, 'run')} generation {self.world.generation}"
        return Wait(reason=f"{self._waiting(joining)} until {plan}")

    def _took_up(self, node: Node) -> bool:
        """One plan at a time: joining nodes wait until the last one has been carried out."""
        if not self.status.in_process:
            return node.state is not NodeState.ARRIVED
        return node.running is not None and node.running.generation >= self.world.generation

    def _after_pause(self, candidates: JoiningNodes) -> Decision:
        """Rule 4: enough nodes again, fewer still, or nothing to do but wait for them."""
        joining = self._joining(self.status.survivors, candidates)
        resumes = self._enough(self.status.survivors, joining)
        if not resumes and not self.status.changed:
            return self._paused_wait(candidates)
        survivors = self._reachable()
        if isinstance(survivors, Wait):
            return survivors
        if resumes:
            return self._next(survivors + joining, Cause.RESUMED, self._why(joining))
        return self._next(survivors, Cause.PAUSED, self._too_few(survivors))

    def _paused_wait(self, candidates: JoiningNodes) -> Wait | End:
        until = self.view.world_since_s + self.policy.join_timeout_s
        survivors = count(self.status.survivors)
        needed = f"paused with {survivors} of at least {self.world.min_nodes} nodes"
        if self.now >= until:
            reason = f"{needed}, and not enough came in {self.policy.join_timeout_s:g} s"
            return End(outcome=Outcome.FAILURE, reason=also(reason, candidates), exit_code=1)
        wake = until if candidates.quarantine_ends_s is None else candidates.quarantine_ends_s
        return Wait(reason=also(needed, candidates), until_s=min(until, wake))

    def _next(self, nodes: Nodes, cause: Cause, reason: str, *, planned: bool = False) -> Proposal:
        return propose(self.view, self.world, nodes, cause, reason, planned=planned)

    # ── why ──────────────────────────────────────────────────────────────────────────────

    def _why(self, joining: Nodes) -> str:
        said = list(self.status.sentences)
        if joining:
            said.append(f"{names(joining)} {verb(joining, 'join')}")
        return "; ".join(said) or "enough nodes again"

    def _too_few(self, survivors: Nodes) -> str:
        why = "; ".join(self.status.sentences)
        return f"{why}; {count(survivors)} of at least {self.world.min_nodes} nodes left"

    @staticmethod
    def _waiting(nodes: Nodes) -> str:
        return f"{names(nodes)} {verb(nodes, 'wait')}"
