"""The right culprit for every kind of hang, rank and phase, and no false verdicts.

Each seed draws a world, a place in its training, a kind of hang and a victim. The facts are those
that the agents would see each second: every rank continues until it waits for one that cannot.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from rank_facts import rank_facts

from elastic.hangs.page import (
    FIRST_STEPS,
    BudgetPolicy,
    Flag,
    KernelFacts,
    Phase,
    RankFacts,
    budget_s,
    lost_message_s,
    mismatch_s,
    suspicion_s,
    thresholds_s,
)
from elastic.hangs.verdict import HangAction, HangKind, Judgment, judge, judge_stopped
from elastic.membership import budget

POLICY = BudgetPolicy()
SEEDS = range(240)
IN_STEP = (Phase.DATA, Phase.COMPUTE, Phase.OPTIMIZER)
OUTSIDE = (Phase.SCRIPT, Phase.EVALUATION, Phase.CHECKPOINT)


def fact(rank: int, **changes: object) -> RankFacts:
    """A rank of a healthy job with two ranks on each node."""
    place = {"node": f"node{rank // 2}", "local_rank": rank % 2, "pid": 1000 + rank}
    return rank_facts(rank, generation=3, **{**place, **changes})


@dataclass
class World:
    """One injected hang, with the facts after ``t`` seconds."""

    size: int
    culprits: tuple[int, ...]
    action: HangAction
    kind: HangKind
    at: Callable[[float], list[RankFacts]]
    limit_s: float  # the deadline for the verdict


def waiting(rank: int, t: float, base: RankFacts, **changes: object) -> RankFacts:
    return replace(
        base,
        rank=rank,
        node=f"node{rank // 2}",
        phase=Phase.COLLECTIVE,
        quiet_s=t,
        kernel=KernelFacts(wait_channel="futex_wait_queue"),
        **changes,  # type: ignore[arg-type]
    )


def draw(seed: int) -> World:
    rng = random.Random(seed)
    size = rng.randint(2, 9)
    victim = rng.randrange(size)
    step_s = rng.choice([0.02, 0.02, 0.3, 2.0])
    base = fact(
        0,
        step=rng.randint(10, 5000),
        collective=rng.randint(10, 9000),
        longest_s=step_s,
        longest_step_s=step_s,
        typical_s=step_s / 2,
        typical_step_s=step_s / 2,
        collective_s=step_s / 10,
    )
    kinds = [loop, sleep, file_system, data_workers, left_behind, skipped, lost_message]
    kinds.append(no_first_batch)
    return rng.choice(kinds)(rng, size, victim, base)


def absent(
    size: int, victim: int, base: RankFacts, kernel: KernelFacts, **changes: object
) -> World:
    culprit = replace(
        base,
        rank=victim,
        node=f"node{victim // 2}",
        kernel=kernel,
        **changes,  # type: ignore[arg-type]
    )

    def at(t: float) -> list[RankFacts]:
        others = [waiting(r, t, base) for r in range(size) if r != victim]
        return [*others, replace(culprit, quiet_s=t)]

    limit_s = budget_s(culprit, POLICY)
    return World(size, (victim,), HangAction.KILL, HangKind.ABSENT, at, limit_s)


def loop(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    phase = rng.choice([*IN_STEP, *OUTSIDE])
    return absent(size, victim, base, KernelFacts(state="R", cpu_share=1.0), phase=phase)


def sleep(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    phase = rng.choice([*IN_STEP, *OUTSIDE])
    return absent(size, victim, base, KernelFacts(wait_channel="do_nanosleep"), phase=phase)


def file_system(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    phase = rng.choice([*IN_STEP, *OUTSIDE])
    kernel = KernelFacts(state="D", wait_channel="nfs_wait_bit_killable")
    return absent(size, victim, base, kernel, phase=phase)


def data_workers(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    return absent(size, victim, base, KernelFacts(data_workers="SS"), phase=Phase.DATA)


def left_behind(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    """The others form the next world, and one rank does not notice it."""
    kernel = KernelFacts(state="R", cpu_share=1.0)
    phase = rng.choice([*IN_STEP, Phase.COLLECTIVE])
    world = absent(size, victim, base, kernel, phase=phase)

    def at(t: float) -> list[RankFacts]:
        return [
            r if r.rank == victim else replace(r, phase=Phase.FORMING, generation=4)
            for r in world.at(t)
        ]

    return replace_world(world, at)


def no_first_batch(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    """A data worker that sleeps before the first batch of a world, which the others may have left
    for the next one since, because yet another node died."""
    kernel = KernelFacts(wait_channel="do_poll", data_workers="SS")
    begun = rng.randrange(FIRST_STEPS)
    culprit = replace(base, phase=Phase.DATA, longest_s=0.0, typical_s=0.0, idle_s=1e6)
    world = absent(size, victim, culprit, kernel, steps_in_world=begun)
    later = rng.choice([0, 4 + rng.randrange(3)])

    def at(t: float) -> list[RankFacts]:
        return [
            replace(r, idle_s=t)
            if r.rank == victim
            else replace(r, idle_s=0.0, phase=Phase.FORMING, generation=later)
            if later
            else replace(r, idle_s=0.0)
            for r in world.at(t)
        ]

    return replace_world(world, at)


def replace_world(world: World, at: Callable[[float], list[RankFacts]]) -> World:
    return World(world.size, world.culprits, world.action, world.kind, at, world.limit_s)


def skipped(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    """One rank is in the next step's reduction, the others in a collective of the script's."""
    size = max(size, 3)

    def at(t: float) -> list[RankFacts]:
        ahead = waiting(victim, t, base, step=base.step + 1)
        others = [
            waiting(r, t, base, outer=Phase.SCRIPT, operation="barrier")
            for r in range(size)
            if r != victim
        ]
        return [*others, ahead]

    limit_s = mismatch_s(base, POLICY)
    return World(size, (victim,), HangAction.ABORT_AND_REFORM, HangKind.MISMATCH, at, limit_s)


def lost_message(rng: random.Random, size: int, victim: int, base: RankFacts) -> World:
    def at(t: float) -> list[RankFacts]:
        return [waiting(r, t, base) for r in range(size)]

    limit_s = lost_message_s(base, POLICY)
    return World(size, (), HangAction.ABORT_AND_REFORM, HangKind.LOST_MESSAGE, at, limit_s)


def test_the_right_culprit_is_found_in_time_and_no_other_rank() -> None:
    for seed in SEEDS:
        world = draw(seed)
        for part in (0.0, 0.1, 0.5, 0.9, 0.99):
            early = judge(world.at(part * world.limit_s), world.size, POLICY)
            assert early.action is HangAction.WAIT, (seed, early)
        verdict = judge(world.at(1.01 * world.limit_s), world.size, POLICY)
        assert (verdict.action, verdict.kind, verdict.culprits) == (
            world.action,
            world.kind,
            world.culprits,
        ), seed
        named = any(what in verdict.reason for what in ("all_reduce", "barrier", "next world"))
        assert named, (seed, verdict.reason)


def test_no_rank_is_killed_while_unknown_ranks_may_be_running() -> None:
    """Ranks without known facts are no reason to form another world, and no culprits."""
    for seed in SEEDS:
        world = draw(seed)
        known = [r for r in world.at(1000 * world.limit_s) if r.rank not in world.culprits]
        if not world.culprits:
            known.remove(random.Random(seed).choice(known))
        assert judge(known, world.size, POLICY).action is HangAction.WAIT, seed


@pytest.mark.parametrize(
    "innocent",
    [
        {"phase": Phase.SCRIPT, "quiet_s": 600.0},
        {"phase": Phase.EVALUATION, "quiet_s": 600.0},
        {"phase": Phase.CHECKPOINT, "quiet_s": 600.0},
        {"phase": Phase.COMPUTE, "quiet_s": 10.0, "flags": Flag.GARBAGE},
        {"phase": Phase.COMPUTE, "quiet_s": 400.0, "flags": Flag.COMPILING},
        {"phase": Phase.COMPUTE, "quiet_s": 60.0, "steps_in_world": 1},
        {"phase": Phase.DATA, "quiet_s": 30.0},
        {"phase": Phase.DATA, "quiet_s": 250.0, "idle_s": 30.0, "steps_in_world": 0},
        {"phase": Phase.COMPUTE, "quiet_s": 15.0, "longest_s": 4.0},
        {"phase": Phase.COMPUTE, "quiet_s": 15.0, "typical_s": 1.0},
    ],
    ids=str,
)
def test_operations_that_may_take_long_are_no_hang(innocent: dict[str, object]) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        size = rng.randint(2, 9)
        slow = rng.randrange(size)
        ranks = [waiting(r, 700.0, fact(0)) for r in range(size) if r != slow]
        ranks.append(fact(slow, kernel=KernelFacts(state="R", cpu_share=1.0), **innocent))
        assert judge(ranks, size, POLICY).action is HangAction.WAIT, seed


@pytest.mark.parametrize(
    "debugged",
    [
        {"flags": Flag.DEBUGGER},
        {"kernel": KernelFacts(state="t", tracer_pid=7)},
        {"kernel": KernelFacts(state="S", tracer_pid=7)},
        {"kernel": KernelFacts(state="T", tracer_pid=7)},
    ],
    ids=str,
)
def test_a_debugged_rank_and_the_ranks_that_wait_for_it_are_not_killed(
    debugged: dict[str, object],
) -> None:
    ranks = [waiting(0, 5000.0, fact(0)), fact(1, quiet_s=5000.0, **debugged)]
    verdict = judge(ranks, 2, POLICY)
    assert verdict.action is HangAction.LEAVE_ALONE
    assert verdict.culprits == (1,)
    assert "debug" in verdict.reason
    stopped: Judgment = judge_stopped(ranks[1], 5000.0, 1.0)
    assert stopped.action is HangAction.LEAVE_ALONE


def test_a_stopped_worker_is_the_culprit_after_its_grace() -> None:
    facts = fact(1, kernel=KernelFacts(state="T"))
    assert judge_stopped(facts, 0.8, 1.0).action is HangAction.WAIT
    verdict = judge_stopped(facts, 1.0, 1.0)
    assert (verdict.action, verdict.kind, verdict.culprits) == (
        HangAction.KILL,
        HangKind.STOPPED,
        (1,),
    )
    assert judge_stopped(fact(1), 5.0, 1.0).action is HangAction.WAIT
    before_its_world = fact(-1, local_rank=2, kernel=KernelFacts(state="T"))
    assert judge_stopped(before_its_world, 1.0, 1.0).reason.startswith("local rank 2 on n")


def test_of_two_hung_ranks_the_one_behind_is_killed_first() -> None:
    ranks = [
        waiting(0, 9.0, fact(0)),
        fact(1, quiet_s=9.0, step=58),
        fact(2, quiet_s=8.0, step=57),
    ]
    assert judge(ranks, 3, POLICY).culprits == (2,)


def test_a_rank_that_never_completes_its_restore_is_the_culprit() -> None:
    """Its peers wait in a collective of the same world; until then, all ranks are forming it."""
    forming = fact(1, phase=Phase.FORMING, steps_in_world=0)
    for t in (4.0, 0.99 * POLICY.outside_step_s, 1.01 * POLICY.outside_step_s):
        peers = [waiting(r, t, fact(0), steps_in_world=0) for r in (0, 2)]
        verdict = judge([*peers, replace(forming, quiet_s=t)], 3, POLICY)
        is_over = t > POLICY.outside_step_s
        assert verdict.action is (HangAction.KILL if is_over else HangAction.WAIT)
        assert verdict.culprits == ((1,) if is_over else ())
    assert "rank 1 on node0 hangs in the change of the world, asleep" in verdict.reason
    long_s = 2 * POLICY.outside_step_s
    all_form = [replace(fact(r), phase=Phase.FORMING, quiet_s=long_s) for r in range(3)]
    assert judge(all_form, 3, POLICY).action is HangAction.WAIT
    earlier = [waiting(0, long_s, fact(0), generation=2), *all_form[1:]]
    assert judge(earlier, 3, POLICY).culprits == (0,), "it has not left the last world"


@pytest.mark.parametrize("flags", [Flag.NONE, Flag.ON_STREAM])
def test_a_rank_in_a_collective_waits_for_ranks_that_may_still_join(flags: Flag) -> None:
    """A joining rank waits in the next world, while the others complete the remaining steps."""
    where = Phase.COMPUTE if flags else Phase.COLLECTIVE
    for t in (16.0, 0.99 * POLICY.outside_step_s, 1.01 * POLICY.outside_step_s):
        evaluates = fact(0, phase=Phase.EVALUATION, quiet_s=t, flags=flags, collective=57)
        waits = fact(1, phase=where, quiet_s=t, flags=flags, collective=58)
        joins = replace(fact(2, phase=Phase.FORMING, quiet_s=t, flags=flags), generation=4)
        verdict = judge([evaluates, waits, joins], 3, POLICY)
        assert verdict.culprits == ((0,) if t > POLICY.outside_step_s else ()), t
    if where is Phase.COLLECTIVE:
        assert judge([waits, joins], 3, POLICY).action is HangAction.WAIT, "rank 0 may be running"
    left = replace(evaluates, phase=Phase.FORMING, generation=4)
    assert judge([left, waits, joins], 3, POLICY).culprits == (1,), "no rank will join it"


def test_a_read_behind_an_asynchronous_collective_waits_for_others() -> None:
    """``dist.all_reduce(t)`` on NCCL returns at once, and ``t.item()`` blocks in the script."""
    for t in (0.99 * POLICY.outside_step_s, 1.01 * POLICY.outside_step_s):
        blocked = [
            fact(r, phase=Phase.SCRIPT, quiet_s=t, flags=Flag.ON_STREAM, collective=58)
            for r in (0, 2)
        ]
        hangs = fact(1, phase=Phase.SCRIPT, quiet_s=t, flags=Flag.ON_STREAM, collective=57)
        verdict = judge([*blocked, hangs], 3, POLICY)
        assert verdict.culprits == ((1,) if t > POLICY.outside_step_s else ()), t


def test_a_long_evaluation_is_no_wait_for_the_collective_of_the_host_that_others_are_in() -> None:
    """On NCCL, ``run.mean`` on the CPU waits for rank 0, which has queued as much as the others."""
    for t in (1.01 * lost_message_s(fact(0), POLICY), 0.99 * POLICY.outside_step_s):
        evaluates = fact(0, phase=Phase.SCRIPT, quiet_s=t, flags=Flag.ON_STREAM, collective=57)
        flags = Flag.ON_STREAM | Flag.ON_HOST
        others = [waiting(r, t, fact(r), flags=flags, collective=57) for r in (1, 2)]
        assert judge([evaluates, *others], 3, POLICY).action is HangAction.WAIT, t


@pytest.mark.parametrize("flags", [Flag.ON_STREAM, Flag.ON_STREAM | Flag.ON_HOST])
def test_a_rank_blocked_in_a_barrier_on_a_device_is_published_and_waits(flags: Flag) -> None:
    """NCCL's ``barrier`` blocks the script in C++. Others wait on the device for later gradients,
    or on the host after fewer collectives."""
    collective = 57 if flags & Flag.ON_HOST else 58
    for t in (0.99, 1.01):
        quiet_s = t * lost_message_s(fact(0), POLICY)
        blocked = [
            fact(r, phase=Phase.SCRIPT, quiet_s=quiet_s, flags=Flag.ON_STREAM, collective=58)
            for r in (1, 2)
        ]
        other = waiting(0, quiet_s, fact(0), flags=flags, collective=collective)
        verdict = judge([other, *blocked], 3, POLICY)
        expected = HangAction.ABORT_AND_REFORM if t > 1 else HangAction.WAIT
        assert verdict.action is expected, verdict
    assert suspicion_s(blocked[0], POLICY) < POLICY.hang_timeout_s
    assert lost_message_s(blocked[0], POLICY) in thresholds_s(blocked[0], POLICY)


def test_a_mismatch_of_two_names_both_places_with_low_confidence() -> None:
    ranks = [
        waiting(0, 9.0, fact(0), outer=Phase.SCRIPT),
        waiting(1, 9.0, fact(0), step=58),
    ]
    verdict = judge(ranks, 2, POLICY)
    assert (verdict.kind, verdict.culprits) == (HangKind.MISMATCH, (1,))
    assert "the script's own code" in verdict.reason
    assert "the forward and backward pass" in verdict.reason
    assert verdict.confidence.value == "low"


def test_the_reason_does_not_depend_on_the_duration() -> None:
    """The same hang three times in a row ends the job, which compares the texts."""
    texts = {
        judge([waiting(0, t, fact(0)), fact(1, quiet_s=t)], 2, POLICY).reason
        for t in (4.0, 5.5, 60.0)
    }
    assert len(texts) == 1


def test_the_same_hang_three_times_in_a_row_ends_the_job() -> None:
    for seed in range(60):
        world = draw(seed)
        reason = judge(world.at(1.01 * world.limit_s), world.size, POLICY).reason
        history = [
            budget.Breakage(
                generation=generation,
                lived_s=5.0,
                failures=(budget.Failure("node1", reason, 1),),
                lost=(),
                at_s=10.0 * generation,
                steps=0,
            )
            for generation in (1, 2, 3)
        ]
        stop = budget.verdict(history, 40.0, budget.FailureBudget())
        assert stop is not None, seed
        assert reason in stop.reason, seed
