"""Which world comes next: PROTOCOL section 4 as a pure function.

``decide(view, now, policy)`` looks at everything the leader knows and returns the next world
with its cause in words, what it waits for and until when, or that the job is over. No clock,
no I/O, no randomness: equal arguments give equal answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.coordination.newcomers import (
    Newcomers,
    cooling_until,
    find_newcomers,
    first_node,
    refusal,
)
from elastic.coordination.records import Cause, Node, NodeState, Outcome, World, WorldState
from elastic.coordination.standing import Standing, stand
from elastic.coordination.view import (
    Decision,
    End,
    Liveness,
    MissingMember,
    NodeView,
    Policy,
    Proposal,
    View,
    Wait,
)

__all__ = [
    "Decision",
    "End",
    "Liveness",
    "MissingMember",
    "NodeView",
    "Policy",
    "Proposal",
    "View",
    "Wait",
    "adoptable",
    "decide",
    "refusal",
    "world_of",
]

LINEAGE_LENGTH = 32


def decide(view: View, now: float, policy: Policy) -> Decision:
    """The next world, or what is waited for, or that the job is over."""
    if view.done is not None:
        return Wait(reason=f"the job is over: {view.done.reason}")
    if (running := adoptable(view)) is not None:
        return Wait(reason=f"the store lost generation {running.generation}, which still runs")
    if view.world is None:
        return _first_world(view, now, policy)
    standing = stand(view, view.world)
    if standing.finished and not standing.running and not standing.out:
        return _success(standing)
    if not standing.survivors:
        return _after_everybody(view, standing, now, policy)
    return _Succession(view, standing, now, policy).decide()


def adoptable(view: View) -> World | None:
    """The world to put back into a store that was wiped or restored: the newest one that a node
    still runs, if the store knows none that is as new."""
    running = (n.node.running for n in view.nodes if n.liveness is not Liveness.DEAD)
    newest = max((w for w in running if w), key=lambda w: w.generation, default=None)
    if newest is None or (view.world and view.world.generation >= newest.generation):
        return None
    return newest


def world_of(
    proposal: Proposal,
    last: World | None,
    *,
    nonce: str,
    time_s: float,
    switch_at_step: int | None = None,
) -> World:
    """The record to swap in for ``last``. The first node hosts the group's store."""
    host = proposal.nodes[0] if proposal.nodes else None
    lineage = (*last.lineage, last.generation) if last else ()
    return World(
        generation=proposal.generation,
        members=tuple(n.as_member() for n in proposal.nodes),
        store_host=host.address if host else "",
        store_port=host.ports[proposal.generation % len(host.ports)] if host else 0,
        nonce=nonce,
        mode=proposal.mode,
        switch_at_step=switch_at_step,
        state=proposal.state,
        min_nodes=proposal.min_nodes,
        max_nodes=proposal.max_nodes,
        library=proposal.library,
        lineage=lineage[-LINEAGE_LENGTH:],
        cause=proposal.cause,
        reason=proposal.reason,
        time_s=time_s,
        committed_step=last.committed_step if last else None,
    )


def _propose(
    view: View,
    reference: World | Node,
    nodes: tuple[NodeView, ...],
    cause: Cause,
    reason: str,
    *,
    planned: bool = False,
) -> Proposal:
    in_process = bool(nodes) and all(n.node.in_process for n in nodes)
    return Proposal(
        generation=_newest_generation(view) + 1,
        nodes=tuple(n.node for n in nodes),
        state=WorldState.PAUSED if cause is Cause.PAUSED else WorldState.ACTIVE,
        mode="in-process" if in_process else "restart",
        cause=cause,
        reason=reason,
        min_nodes=reference.min_nodes,
        max_nodes=reference.max_nodes,
        library=reference.library,
        planned=planned and in_process,
    )


def _newest_generation(view: View) -> int:
    # After a wipe the nodes are the only memory of how far generations had come.
    seen = [n.node.arrived_for for n in view.nodes]
    seen += [n.node.running.generation for n in view.nodes if n.node.running]
    return max([view.world.generation if view.world else 0, *seen])


# ---- no world yet, or nobody left of it ------------------------------------------------------


def _first_world(view: View, now: float, policy: Policy) -> Decision:
    reference = first_node(view)
    if reference is None:
        return Wait(reason="no node has arrived")
    return _gather(view, reference, now, policy, Cause.FIRST, "")


def _success(standing: Standing) -> End:
    said = [f"{', '.join(standing.finished)} finished", *standing.sentences]
    return End(outcome=Outcome.SUCCESS, reason="; ".join(said), exit_code=0)


def _after_everybody(view: View, standing: Standing, now: float, policy: Policy) -> Decision:
    """Section 2: without a survivor the old world must be proved dead, or long silent."""
    silent = [g for g in standing.gone if not g.proved]
    until = max((g.last_sign_s for g in silent), default=now) + policy.takeover_s
    if silent and now < until:
        return Wait(
            reason=f"generation {standing.world.generation} may still run: "
            f"{'; '.join(g.sentence for g in silent)}; no sign for {policy.takeover_s:g} s "
            "would end the wait",
            until_s=until,
        )
    why = "; ".join(standing.sentences) or "the last world has no members"
    decision = _gather(view, standing.world, now, policy, Cause.TAKEOVER, f"{why}; ")
    if isinstance(decision, Wait) and not silent and _witnesses(view, standing):
        return _propose(view, standing.world, (), Cause.PAUSED, f"{why}; nobody is left")
    return decision


def _witnesses(view: View, standing: Standing) -> bool:
    """Somebody who is leaving can still testify that the world is over. Written down now, it
    spares the next start the wait for nodes that nobody can ask any more."""
    members = set(standing.world.node_ids)
    return any(n.node.node_id in members and n.liveness is not Liveness.DEAD for n in view.nodes)


def _gather(
    view: View, reference: World | Node, now: float, policy: Policy, cause: Cause, why: str
) -> Proposal | Wait:
    """A world of newcomers only: at once when full, after the last call when enough."""
    newcomers = find_newcomers(view, reference, now, in_process=False)
    nodes = newcomers.eligible[: reference.max_nodes]
    if len(nodes) < reference.min_nodes:
        reason = f"{why}{_count(nodes)} of at least {reference.min_nodes} nodes arrived"
        return Wait(reason=_also(reason, newcomers), until_s=newcomers.cooling_until_s)
    until = max(n.state_since_s for n in nodes) + policy.last_call_s
    if len(nodes) < reference.max_nodes and now < until:
        reason = (
            f"{why}{_count(nodes)} of at most {reference.max_nodes} nodes arrived, "
            f"last call of {policy.last_call_s:g} s for more"
        )
        return Wait(reason=_also(reason, newcomers), until_s=until)
    return _propose(view, reference, nodes, cause, f"{why}{_names(nodes)} start")


# ---- somebody goes on ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Succession:
    """The next world after one that has survivors."""

    view: View
    standing: Standing
    now: float
    policy: Policy

    @property
    def world(self) -> World:
        return self.standing.world

    def decide(self) -> Decision:
        newcomers = self._newcomers()
        if not self.standing.changed and not newcomers.eligible:
            return self._steady(newcomers)
        survivors = self._reachable(self.standing.survivors)
        if isinstance(survivors, Wait):
            return survivors
        if self.world.state is WorldState.PAUSED:
            return self._after_pause(survivors, newcomers)
        if self.standing.changed:
            return self._after_change(survivors, newcomers)
        return self._join(survivors, newcomers)

    def _newcomers(self) -> Newcomers:
        if self.standing.finished:  # the job is ending
            return Newcomers(eligible=(), cooling_until_s=None, passed_over=())
        # Paused in-process members need no step boundary, but still nobody waits for workers.
        in_process = self.standing.in_process
        return find_newcomers(self.view, self.world, self.now, in_process=in_process)

    def _room(self, survivors: tuple[NodeView, ...]) -> int:
        return max(0, self.world.max_nodes - len(survivors))

    def _enough(self, nodes: int) -> bool:
        # Finished nodes count: the job is ending, nobody would come in their place.
        return nodes + len(self.standing.finished) >= self.world.min_nodes

    def _reachable(self, survivors: tuple[NodeView, ...]) -> tuple[NodeView, ...] | Wait:
        """The survivors, unless one is suspect: then its lease decides, within seconds.

        Building a world with a node that is probably dead costs more than that wait. A suspect
        that renews its lease although the leader cannot reach it would block the job for ever:
        after ``suspect_s`` it is left out of a change that is needed, if the others suffice.
        """
        suspects = [n for n in survivors if n.liveness is Liveness.SUSPECT]
        if not suspects:
            return survivors
        others = tuple(n for n in survivors if n.liveness is not Liveness.SUSPECT)
        reason = f"{_names(suspects)} may be dead: the lease decides"
        known = [n.suspect_since_s for n in suspects if n.suspect_since_s is not None]
        evictable = self.standing.changed and bool(others) and self._enough(len(others))
        if len(known) < len(suspects) or not evictable:
            return Wait(reason=reason)
        until = max(known) + self.policy.suspect_s
        return others if self.now >= until else Wait(reason=reason, until_s=until)

    def _steady(self, newcomers: Newcomers) -> Decision:
        if self.world.state is WorldState.PAUSED:
            return self._paused_wait(self.standing.survivors, newcomers)
        reason = f"generation {self.world.generation} runs on {_names(self.standing.running)}"
        if suspects := [n for n in self.standing.running if n.liveness is Liveness.SUSPECT]:
            reason += f"; {_names(suspects)} may be dead: the lease decides"
        return Wait(reason=_also(reason, newcomers), until_s=newcomers.cooling_until_s)

    def _after_pause(self, survivors: tuple[NodeView, ...], newcomers: Newcomers) -> Decision:
        joining = newcomers.eligible[: self._room(survivors)]
        why = self._why(joining)
        if self._enough(len(survivors) + len(joining)):
            return self._next(survivors + joining, Cause.RESUMED, f"{why}; enough nodes again")
        if self.standing.changed:
            return self._next(survivors, Cause.PAUSED, self._too_few(survivors))
        return self._paused_wait(survivors, newcomers)

    def _paused_wait(self, survivors: tuple[NodeView, ...], newcomers: Newcomers) -> Decision:
        until = self.view.world_since_s + self.policy.join_timeout_s
        reason = (
            f"paused with {_count(survivors)} of at least {self.world.min_nodes} nodes, "
            f"for at most {self.policy.join_timeout_s:g} s"
        )
        if self.now >= until:
            return End(
                outcome=Outcome.FAILURE,
                reason=f"{reason}: not enough nodes came back in time",
                exit_code=1,
            )
        wake = [until, *([newcomers.cooling_until_s] if newcomers.cooling_until_s else [])]
        return Wait(reason=_also(reason, newcomers), until_s=min(wake))

    def _after_change(self, survivors: tuple[NodeView, ...], newcomers: Newcomers) -> Decision:
        """Lost, left, failed and joining at once make one world."""
        survivors, left_out = self._leave_out_cooling(survivors, newcomers)
        joining = newcomers.eligible[: self._room(survivors)]
        if not self._enough(len(survivors) + len(joining)):
            return self._next(survivors, Cause.PAUSED, self._too_few(survivors))
        why = self._why(joining)
        if left_out:
            why += f"; {_names(left_out)} cools down after repeated failures"
        causes = {g.cause for g in self.standing.gone}
        cause = next((c for c in (Cause.LOST, Cause.LEFT) if c in causes), Cause.TROUBLE)
        planned = all(self.standing.unbroken(n.node) for n in survivors)
        return self._next(survivors + joining, cause, why, planned=planned)

    def _leave_out_cooling(
        self, survivors: tuple[NodeView, ...], newcomers: Newcomers
    ) -> tuple[tuple[NodeView, ...], tuple[NodeView, ...]]:
        """Rule 5: a member accused repeatedly pauses, provided that the rest can go on."""
        cooling = tuple(n for n in survivors if self._cools(n.node))
        rest = tuple(n for n in survivors if n not in cooling)
        joining = newcomers.eligible[: self._room(rest)]
        if cooling and rest and self._enough(len(rest) + len(joining)):
            return rest, cooling
        return survivors, ()

    def _cools(self, node: Node) -> bool:
        until = cooling_until(node, self.view.cooling)
        return until is not None and self.now < until

    def _join(self, survivors: tuple[NodeView, ...], newcomers: Newcomers) -> Decision:
        """Rule 3: only newcomers; nothing is wrong, so there is time to gather several."""
        joining = newcomers.eligible[: self._room(survivors)]
        if not joining:
            reason = f"{_names(newcomers.eligible)} waits: the world is full"
            return Wait(reason=reason)
        if late := [n for n in survivors if not self._took_up(n.node)]:
            reason = (
                f"{_names(joining)} waits until {_names(late)} runs "
                f"generation {self.world.generation}"
            )
            return Wait(reason=reason)
        until = min(n.state_since_s for n in joining) + self.policy.join_window_s
        if len(joining) < self._room(survivors) and self.now < until:
            return Wait(reason=f"{_names(joining)} joins; gathering others", until_s=until)
        return self._next(survivors + joining, Cause.JOINED, self._why(joining), planned=True)

    def _took_up(self, node: Node) -> bool:
        """One plan at a time: the last world is running before the next newcomers come."""
        if not self.standing.in_process:
            return node.state is not NodeState.ARRIVED
        return node.running is not None and node.running.generation >= self.world.generation

    def _next(
        self, nodes: tuple[NodeView, ...], cause: Cause, reason: str, *, planned: bool = False
    ) -> Proposal:
        return _propose(self.view, self.world, nodes, cause, reason, planned=planned)

    def _why(self, joining: tuple[NodeView, ...]) -> str:
        said = list(self.standing.sentences)
        if joining:
            said.append(f"{_names(joining)} {'join' if len(joining) > 1 else 'joins'}")
        return "; ".join(said)

    def _too_few(self, survivors: tuple[NodeView, ...]) -> str:
        why = "; ".join(self.standing.sentences)
        return f"{why}; {_count(survivors)} of at least {self.world.min_nodes} nodes are left"


# ---- words -----------------------------------------------------------------------------------


def _names(nodes: tuple[NodeView, ...] | list[NodeView]) -> str:
    return ", ".join(n.node.name for n in nodes) or "nobody"


def _count(nodes: tuple[NodeView, ...]) -> str:
    return f"{len(nodes)} ({_names(nodes)})" if nodes else "0"


def _also(reason: str, newcomers: Newcomers) -> str:
    return "; ".join([reason, *newcomers.passed_over])
