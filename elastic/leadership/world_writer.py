"""The leader's writes: the next world, one that the store has lost, and the job's end.

Each write names the revision that it replaces, so of two concurrent leaders only one succeeds.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from elastic.events import StoreProblem, WorldFormed
from elastic.leadership.failure_accounting import FailureAccounting
from elastic.leadership.roster import Roster
from elastic.membership.decision import Proposal, world_of
from elastic.membership.records import (
    BreakageRecord,
    Cause,
    Done,
    Outcome,
    WorldRecord,
    WorldReference,
    encode,
)
from elastic.membership.step_rate import StepRate, switch_step
from elastic.node.context import NodeContext
from elastic.node.status import WorldEntry
from elastic.tuning.agent_intervals import (
    ADOPTION_WAIT_S,
    RECHECK_S,
    STEP_RATE_AGAIN_S,
    STEP_RATE_JOINING_S,
    STEP_RATE_LEAVING_S,
)

# How long a planned world waits for the first report of a step before it interrupts one: a leaving
# node has little time, a joining node is not urgent.
STEP_RATE_PATIENCE_S = {
    Cause.LEFT: STEP_RATE_LEAVING_S,
    Cause.JOINED: STEP_RATE_JOINING_S,
    Cause.PAUSED: STEP_RATE_LEAVING_S,  # all leave
}


class WorldWriter:
    """Writes worlds during one term. ``announce`` sends one to the followers, ahead of the store's
    watch."""

    def __init__(
        self,
        context: NodeContext,
        roster: Roster,
        accounting: FailureAccounting,
        announce: Callable[[bytes], None],
    ) -> None:
        self._at = context
        self._roster = roster
        self._accounting = accounting
        self._announce = announce
        self.planned_since_s: float | None = None  # a plan waits for a step rate
        # To be written back into the store, and this node has never seen its record.
        self.unknown_world: WorldReference | None = None

    def adopt(self, entry: WorldEntry, now: float, *, since_s: float) -> WorldEntry | float:
        """After a wipe of the store, write back the highest world that any node runs.

        ``since_s`` is when the nodes began to register. Returns the current world, or the time of
        the next call.
        """
        self.unknown_world = None
        highest = self._roster.highest_running()
        generation = entry.world.generation if entry.world is not None else 0
        if highest is not None and entry.world is not None and highest.generation < generation:
            highest = entry.world  # a planned world: no node runs it yet, but others have it
        if highest is None or (entry.mod_revision and highest.generation <= generation):
            return entry
        if now < since_s + ADOPTION_WAIT_S:
            return since_s + ADOPTION_WAIT_S
        if not isinstance(highest, WorldRecord):
            # A node that runs it has its record, and is to lead (leadership/succession.py), unless
            # this node's watch is only late.
            stored = self._at.store.get(self._at.keys.world)
            if (stored.mod_revision if stored is not None else 0) == entry.mod_revision:
                self.unknown_world = highest
            return now + RECHECK_S
        revision = self._at.store.compare_and_swap(
            self._at.keys.world, encode(highest), expected_revision=entry.mod_revision
        )
        if revision is None:
            return now + RECHECK_S  # another node wrote one: the watch will deliver it
        self._at.journal.emit(
            StoreProblem(
                error="the store had lost the world",
                consequence=f"generation {highest.generation}, which is running, was restored",
            ),
            level=logging.WARNING,
        )
        return WorldEntry(highest, revision, now)

    def propose(
        self, proposal: Proposal, entry: WorldEntry, now: float
    ) -> tuple[WorldEntry | None, float]:
        """Write this world, unless it waits for a step rate or another leader was faster.

        Returns the written world, and the time of the next call.
        """
        step, wait = self._switch_step(proposal, entry.world, now)
        if wait:
            return None, now + STEP_RATE_AGAIN_S
        step_rate = self._at.status.step_rate
        world = world_of(
            proposal,
            entry.world,
            nonce=secrets.token_hex(4),
            time_s=self._at.clock.wall(),
            switch_at_step=step,
            committed_step=step_rate.step if step_rate is not None else None,
            breakages=self._breakages(),
        )
        revision = self._at.store.compare_and_swap(
            self._at.keys.world, encode(world), expected_revision=entry.mod_revision
        )
        if revision is None:
            return None, now + RECHECK_S  # another node was faster: the watch will deliver it
        self._announce(encode(world))
        self._accounting.formed(entry.world, world, now)
        self.planned_since_s = None
        self._at.journal.emit(
            WorldFormed(
                generation=world.generation,
                nodes=tuple(m.name for m in world.members),
                size=world.size,
                state=world.state.value,
                mode=world.mode,
                cause=world.cause.value,
                reason=world.reason,
            )
        )
        return WorldEntry(world, revision, now), now

    def _switch_step(
        self, proposal: Proposal, before: WorldRecord | None, now: float
    ) -> tuple[int | None, bool]:
        """The step at which a planned world begins (None: at once), and whether to wait for a step
        rate."""
        if not proposal.planned or before is None:
            return None, False
        if before.switch_at_step is not None and not self._switched(before):
            # A plan may replace another one that no node has executed. A node that receives it too
            # late waits at the same step boundary, while it builds the world of the first plan.
            return before.switch_at_step, False
        step_rate = self._step_rate()
        if step_rate is not None:
            return switch_step(step_rate, now), False
        if self.planned_since_s is None:
            self.planned_since_s = now
        patience_s = STEP_RATE_PATIENCE_S.get(proposal.cause, 0.0)
        return None, now < self.planned_since_s + patience_s

    def _switched(self, world: WorldRecord) -> bool:
        """Whether a member runs this world. Then all have entered it: members agree before they
        report it."""
        return any(
            known.node.running is not None and known.node.running.generation >= world.generation
            for node_id in world.node_ids
            if (known := self._roster.find(node_id)) is not None
        )

    def _step_rate(self) -> StepRate | None:
        """The step rate of this node's workers, if they are in the group that trains now."""
        running, step_rate = self._at.status.node.running, self._at.status.step_rate
        if running is None or step_rate is None or step_rate.generation != running.generation:
            return None
        return step_rate

    def end(self, outcome: Outcome, reason: str, exit_code: int, entry: WorldEntry) -> Done | None:
        """Write the job's outcome; None if it is already written, or if another leader has written
        a world since: the job goes on in that."""
        step_rate = self._at.status.step_rate
        done = Done(
            outcome=outcome,
            reason=reason,
            exit_code=exit_code,
            generation=entry.world.generation if entry.world is not None else 0,
            final_step=step_rate.step if step_rate is not None else None,
            time_s=self._at.clock.wall(),
            breakages=self._breakages() if outcome is Outcome.FAILURE else (),
        )
        revision = self._at.store.compare_and_swap(
            self._at.keys.done,
            encode(done),
            expected_revision=0,
            basis=(self._at.keys.world, entry.mod_revision),
        )
        return done if revision is not None else None

    def _breakages(self) -> tuple[BreakageRecord, ...]:
        clock = self._at.clock
        return self._accounting.records(clock.monotonic(), clock.wall())
