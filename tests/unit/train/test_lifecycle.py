"""The phases of a worker's world: legal transitions, and the error for illegal ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import cast

import pytest
from kit.journal import MemoryJournal

from elastic.errors import NoWorld, TrainingError
from elastic.groups.group import ProcessGroup
from elastic.groups.world import World, world_from_environment
from elastic.telemetry.ledger import Ledger
from elastic.train.checkpointing import CheckpointManager
from elastic.train.current import Listeners, StepAccount
from elastic.train.hooks import Hooks
from elastic.train.lifecycle import TRANSITIONS, Lifecycle, WorldPhase
from elastic.train.state import JobState

WORLD = world_from_environment({})

JOINING, FORMED, TRAINING = WorldPhase.JOINING, WorldPhase.FORMED, WorldPhase.TRAINING
REGISTERING, PAUSED = WorldPhase.REGISTERING, WorldPhase.PAUSED
CHANGING, CLOSED = WorldPhase.CHANGING, WorldPhase.CLOSED


class Group:
    """A process group that records its calls."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def abort(self) -> None:
        self.done.append("abort")

    def destroy(self, *, is_for_next: bool) -> None:
        self.done.append("destroy")


def lifecycle_of(group: Group | None = None, listeners: Listeners | None = None) -> Lifecycle:
    return Lifecycle(
        JobState(seed=0),
        cast(ProcessGroup, group or Group()),
        CheckpointManager(None, MemoryJournal()),
        Ledger(None),
        Hooks(StepAccount(MemoryJournal()), listeners or Listeners()),
    )


# The calls that lead from the first phase to each phase, and the call that enters the phase.
PATHS: dict[WorldPhase, list[WorldPhase]] = {
    JOINING: [],
    FORMED: [FORMED],
    TRAINING: [TRAINING],
    REGISTERING: [TRAINING, REGISTERING],
    PAUSED: [TRAINING, PAUSED],
    CHANGING: [TRAINING, CHANGING],
    CLOSED: [CLOSED],
}
MOVES: dict[WorldPhase, Callable[[Lifecycle], object]] = {
    FORMED: lambda life: life.formed(WORLD),
    TRAINING: lambda life: life.begin(WORLD),
    REGISTERING: lambda life: life.register_again(),
    PAUSED: lambda life: life.pause(),
    CHANGING: lambda life: life.begin_change(),
    CLOSED: lambda life: life.close(),
}


def in_phase(phase: WorldPhase) -> Lifecycle:
    life = lifecycle_of()
    for step in PATHS[phase]:
        MOVES[step](life)
    assert life.phase is phase
    return life


@pytest.mark.parametrize(("present", "following"), list(product(WorldPhase, [*MOVES])))
def test_transitions_outside_the_table_are_rejected(
    present: WorldPhase, following: WorldPhase
) -> None:
    life = in_phase(present)
    if following is CHANGING and not life.is_restored:
        following = JOINING  # without state there is nothing to keep
    is_legal = following in TRANSITIONS[present] or following is present in (JOINING, CHANGING)
    move = MOVES[CHANGING if following is JOINING else following]
    if is_legal or (present, following) == (CLOSED, CLOSED):
        move(life)
        assert life.phase is following
        return
    with pytest.raises(TrainingError) as told:
        move(life)
    assert life.phase is present
    assert f"from {present.name} (" in str(told.value)
    assert f"to {following.name} (" in str(told.value)


def test_every_phase_but_the_last_has_transitions() -> None:
    assert set(TRANSITIONS) == set(WorldPhase)
    assert TRANSITIONS[CLOSED] == frozenset()
    assert all(CLOSED in following for phase, following in TRANSITIONS.items() if phase != CLOSED)
    reached = {JOINING}.union(*TRANSITIONS.values())
    assert reached == set(WorldPhase)


def test_the_state_can_be_saved_from_restore_until_the_next_restore() -> None:
    restored = {phase for phase in WorldPhase if in_phase(phase).is_restored}
    assert restored == {TRAINING, PAUSED, CHANGING}


def test_the_world_is_undefined_before_the_first_one() -> None:
    life = lifecycle_of()
    assert not life.has_world
    with pytest.raises(NoWorld, match=r"run\.retry or the first loop"):
        _ = life.world
    life.formed(WORLD)
    assert life.world is WORLD


@pytest.mark.parametrize(("broken", "done"), [(True, ["abort", "destroy"]), (False, ["destroy"])])
def test_the_end_of_a_world_aborts_or_destroys_its_group(broken: bool, done: list[str]) -> None:
    group = Group()
    life = lifecycle_of(group)
    life.begin(WORLD)
    life.end(broken=broken)
    assert (group.done, life.phase) == (done, CHANGING)


def test_a_world_can_be_left_after_a_listener_failed() -> None:
    """A collective in ``run.on_world`` may fail with the world that has just begun."""

    def fail(world: World) -> None:
        raise RuntimeError("told")

    listeners = Listeners()
    listeners.on_world(fail)
    life = lifecycle_of(listeners=listeners)
    with pytest.raises(RuntimeError, match="told"):
        life.begin(WORLD)
    life.end(broken=True)
    assert life.phase is CHANGING
