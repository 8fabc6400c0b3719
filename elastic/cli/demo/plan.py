"""The demo's schedule: kill a node in the middle of an epoch, later add one. Pure.

The job must not end before a slowly starting node joins (a cold installation, a busy machine), so
steps slow down while the plan waits for a node, and last at least as long as the timeout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from elastic.testing.ledger import RunLedger
from elastic.tuning.agent_intervals import DEMO_PATIENCE_S, DEMO_STEP_S

NODES = ("node-0", "node-1", "node-2")
VICTIM = "node-1"
ADDED = "node-3"
MIN_NODES, MAX_NODES = 2, 3

STEPS_BEFORE_KILL = 20  # in the first world: past warm-up, so that the pause measures the kill
STEPS_BEFORE_JOIN = 10  # in the world without the victim

STEPS = 300  # 20 epochs of 1,437 samples in batches of 96
STEPS_AFTER_JOIN = 60  # reserved for the world with the joining node
STEPS_AFTER_START = 180  # reserved after the first world: kill, recovery, joining node


class Act(Enum):
    """The next action on the job."""

    KILL = "kill"
    JOIN = "join"


@dataclass(frozen=True)
class JobPosition:
    """The job's position: its newest generation that completed a step."""

    generation: int
    nodes: frozenset[str]
    step: int  # the last one completed
    epoch: int
    steps_done: int  # in this generation
    in_mid_epoch: bool


@dataclass(frozen=True)
class DemoPlan:
    """The completed acts, and the job's position at each."""

    killed_at: JobPosition | None = None
    joined_at: JobPosition | None = None

    def next_act(self, position: JobPosition | None) -> Act | None:
        """The next act, once it is due."""
        if position is None:
            return None
        if self.killed_at is None:
            ready = len(position.nodes) == MAX_NODES and position.in_mid_epoch
            return Act.KILL if ready and position.steps_done >= STEPS_BEFORE_KILL else None
        if self.joined_at is None:
            recovered = position.generation > self.killed_at.generation
            return Act.JOIN if recovered and position.steps_done >= STEPS_BEFORE_JOIN else None
        return None

    def waits_for_node(self, position: JobPosition | None) -> bool:
        """Whether the plan waits for a started node to take part."""
        if position is None or self.killed_at is None:
            return position is None or len(position.nodes) < MAX_NODES
        return self.joined_at is not None and ADDED not in position.nodes

    def step_delay_s(self, position: JobPosition | None, waited_s: float) -> float:
        """The delay per step, ``waited_s`` seconds after the wait for a node began.

        While waiting, the steps that are not reserved last as long as the timeout.
        """
        left_s = DEMO_PATIENCE_S - waited_s
        if position is None or left_s <= 0 or not self.waits_for_node(position):
            return DEMO_STEP_S
        kept = STEPS_AFTER_START if self.killed_at is None else STEPS_AFTER_JOIN
        spare = max(1, STEPS - 1 - position.step - kept)
        return max(DEMO_STEP_S, left_s / spare)

    def after(self, act: Act, position: JobPosition) -> DemoPlan:
        """The plan after ``act`` was done at ``position``."""
        if act is Act.KILL:
            return replace(self, killed_at=position)
        return replace(self, joined_at=position)


def position_of(ledger: RunLedger) -> JobPosition | None:
    """The job's position, or None before its first step."""
    if not ledger.steps:
        return None
    generation = max(s.generation for s in ledger.steps)
    steps = [s for s in ledger.steps if s.generation == generation]
    last = max(steps, key=lambda s: s.step)
    return JobPosition(
        generation=generation,
        nodes=frozenset(s.node for s in ledger.starts if s.generation == generation),
        step=last.step,
        epoch=last.epoch,
        steps_done=len({s.step for s in steps}),
        in_mid_epoch=_in_mid_epoch(ledger, last.step, last.epoch),
    )


def _in_mid_epoch(ledger: RunLedger, step: int, epoch: int) -> bool:
    """Whether ``step`` is in the middle half of its epoch; all epochs are as long as epoch 0."""
    if epoch == 0:
        return False
    length = len({s.step for s in ledger.steps if s.epoch == 0})
    begin = min(s.step for s in ledger.steps if s.epoch == epoch)
    return length // 4 <= step - begin < length - length // 4
