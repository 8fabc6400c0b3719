"""How long a rank may show no sign of progress before it counts as hung. Pure.

A budget is the longer one of a lower limit and a multiple of the recent durations of the same phase
on this rank. No fixed limit is suitable: half a minute is short for a step of a large model, and
very long for one of 20 ms. The lower limits differ by phase: the script's own code outside the
forward and backward pass (evaluation on rank 0, an upload) may take minutes without any sign of
progress, while the time between two batches has been measured hundreds of times.

Waiting ranks have thresholds, too. They are never the culprits while another rank is not in the
collective; their thresholds determine when their state is published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.hangs.facts import Flag, Phase, RankFacts
from elastic.tuning.agent_intervals import HANG_FIRST_STEPS_S, HANG_SUSPICION_S
from elastic.tuning.timeouts import Timeouts

# Multiples of a phase's typical and of its longest recent duration. (The longest decays by half in
# about 35 steps: elastic/hangs/phase_sums.py.)
_TIMES_TYPICAL = 20.0
_TIMES_LONGEST = 4.0
_TIMES_COLLECTIVE = 10.0
# The first steps of a world allocate, tune and compile: they do not predict later ones.
FIRST_STEPS = 3
# A loader's first batches, and those of each epoch, fill buffers and start workers.
_DATA_FLOORS = 10.0
# A collective in which all ranks wait can be a large one on a slow network.
_LOST_MESSAGE_FLOORS = 4.0
# The part of a budget after which facts are published, so that the leader has them in time.
_SUSPICION = 0.4


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy:
    """Lower limits of budgets, in seconds. ``hang_timeout_s`` is for phases of every step."""

    hang_timeout_s: float = Timeouts.hang_timeout_s
    # For the script's own code, evaluation, checkpoints and compilation.
    outside_step_s: float = Timeouts.hang_script_timeout_s
    first_steps_s: float = HANG_FIRST_STEPS_S


def budget_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long this rank may remain in its state while others wait for it."""
    floor_s = policy.hang_timeout_s
    if facts.flags & (Flag.GARBAGE | Flag.COMPILING):
        return max(policy.outside_step_s, floor_s)
    match facts.phase:
        case Phase.COMPUTE | Phase.OPTIMIZER:
            measured_s = max(floor_s, _own_s(facts), _step_s(facts))
        case Phase.DATA:
            measured_s = max(_DATA_FLOORS * floor_s, _own_s(facts))
        case Phase.NO_WORLD:
            return math.inf  # no rank waits for it
        case Phase.COLLECTIVE:
            return lost_message_s(facts, policy)
        case _:
            return max(policy.outside_step_s, floor_s)
    if facts.steps_in_world < FIRST_STEPS:
        return max(policy.first_steps_s, measured_s)
    return measured_s


def mismatch_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long all ranks may wait, each in another collective."""
    return max(
        policy.hang_timeout_s, _TIMES_COLLECTIVE * facts.collective_s, _wait_s(facts, policy)
    )


def lost_message_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long all ranks may wait in one collective."""
    first_s = policy.first_steps_s if facts.steps_in_world < FIRST_STEPS else 0.0
    floor_s = _LOST_MESSAGE_FLOORS * policy.hang_timeout_s
    measured_s = _TIMES_COLLECTIVE * facts.collective_s
    return max(first_s / 10, floor_s, measured_s, _wait_s(facts, policy))


def suspicion_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long this rank may remain in its state before its node publishes it.

    For a waiting rank it depends on the duration of its own steps, which equals the others'.
    """
    if facts.flags & Flag.DEBUGGER:
        return HANG_SUSPICION_S  # a waiting rank is reported at once
    if facts.phase in (Phase.COLLECTIVE, Phase.FORMING) or _may_wait_for_device(facts):
        return _wait_s(facts, policy)
    return max(HANG_SUSPICION_S, _SUSPICION * budget_s(facts, policy))


def _wait_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long a rank normally waits for the others' steps."""
    return max(HANG_SUSPICION_S, _SUSPICION * max(policy.hang_timeout_s, _step_s(facts)))


def _own_s(facts: RankFacts) -> float:
    return max(_TIMES_TYPICAL * facts.typical_s, _TIMES_LONGEST * facts.longest_s)


def _step_s(facts: RankFacts) -> float:
    return max(_TIMES_TYPICAL * facts.typical_step_s, _TIMES_LONGEST * facts.longest_step_s)


def thresholds_s(facts: RankFacts, policy: BudgetPolicy) -> tuple[float, ...]:
    """When to publish, in ascending order: at each of them a verdict may change."""
    at = {suspicion_s(facts, policy), budget_s(facts, policy)}
    if facts.phase is Phase.COLLECTIVE:
        at.add(mismatch_s(facts, policy))
    elif _may_wait_for_device(facts):
        at.add(lost_message_s(facts, policy))
    return tuple(sorted(at))


def _may_wait_for_device(facts: RankFacts) -> bool:
    """Whether the rank may wait in a call that its page does not show, as in ``loss.item()`` or a
    barrier on a device: only the facts of all ranks tell (:mod:`elastic.hangs.verdict`)."""
    return bool(facts.flags & Flag.ON_STREAM) and facts.phase in (
        Phase.COMPUTE,
        Phase.OPTIMIZER,
        Phase.SCRIPT,
        Phase.EVALUATION,
    )
