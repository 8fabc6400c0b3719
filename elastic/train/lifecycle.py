"""The phases of a worker, from one world to the next.

Every transition is checked against :data:`TRANSITIONS`; one that is not listed raises
:class:`~elastic.errors.TrainingError` and names both phases::

    JOINING ──> FORMED ──> TRAINING ──> CHANGING ──> TRAINING …
       └───────────────────^  │  ^
                              │  └── REGISTERING, PAUSED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from elastic.errors import NoWorld, TrainingError
from elastic.groups.collectives import RankGroup, peer_group, world_group
from elastic.groups.group import ProcessGroup
from elastic.groups.replica import ModelReplica, ReplicaProcessGroup
from elastic.groups.world import World
from elastic.hangs.page import phases
from elastic.telemetry.ledger import Ledger
from elastic.train.checkpointing import CheckpointManager
from elastic.train.hooks import Hooks
from elastic.train.state import JobState


class WorldPhase(Enum):
    """The phase of a worker with respect to its world."""

    JOINING = "no world yet, or a world ended before its state was restored: waiting for a world"
    FORMED = "the process group of a world exists, but the job's state is not restored yet"
    TRAINING = "the state is restored and the same on all ranks"
    REGISTERING = "the function of run.retry registers its objects again; they inherit the state"
    PAUSED = "the world has fewer nodes than the job's minimum: nothing is trained"
    CHANGING = "the world has ended, and the next one is being entered with its state"
    CLOSED = "the process is ending"


TRANSITIONS: Mapping[WorldPhase, frozenset[WorldPhase]] = {
    WorldPhase.JOINING: frozenset({WorldPhase.FORMED, WorldPhase.TRAINING, WorldPhase.CLOSED}),
    WorldPhase.FORMED: frozenset({WorldPhase.TRAINING, WorldPhase.JOINING, WorldPhase.CLOSED}),
    WorldPhase.TRAINING: frozenset(
        {WorldPhase.REGISTERING, WorldPhase.PAUSED, WorldPhase.CHANGING, WorldPhase.CLOSED}
    ),
    WorldPhase.REGISTERING: frozenset({WorldPhase.TRAINING, WorldPhase.JOINING, WorldPhase.CLOSED}),
    WorldPhase.PAUSED: frozenset({WorldPhase.CHANGING, WorldPhase.CLOSED}),
    WorldPhase.CHANGING: frozenset(
        {
            WorldPhase.FORMED,
            WorldPhase.TRAINING,
            WorldPhase.CLOSED,
        }
    ),
    WorldPhase.CLOSED: frozenset(),
}

_WITH_STATE = frozenset({WorldPhase.TRAINING, WorldPhase.PAUSED, WorldPhase.CHANGING})


class Lifecycle:
    """The current world, the phase, and the objects tied to a world. One per process."""

    def __init__(
        self,
        job: JobState,
        group: ProcessGroup,
        checkpoints: CheckpointManager,
        ledger: Ledger,
        hooks: Hooks,
        replica: ModelReplica | None = None,
    ) -> None:
        self._job = job
        self._group = group
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._hooks = hooks
        self.replica = replica or ModelReplica()  # one or several ranks, including this one
        self._phase = WorldPhase.JOINING
        self._world: World | None = None

    @property
    def phase(self) -> WorldPhase:
        """The current phase."""
        return self._phase

    @property
    def world(self) -> World:
        """The current world, or the last one. Raises NoWorld before the first."""
        if self._world is None:
            raise NoWorld(
                "there is no world yet: it begins with run.retry or the first loop",
                hint="read run.world and run.is_main inside the training function; "
                "run.on_main(function) calls a function on rank 0 as soon as there is one",
            )
        return self._world

    @property
    def has_world(self) -> bool:
        """Whether the first world has begun."""
        return self._world is not None

    @property
    def is_restored(self) -> bool:
        """Whether this process holds the job's state, so that it can be saved."""
        return self._phase in _WITH_STATE

    @property
    def is_changing(self) -> bool:
        """Whether an interrupted attempt has ended and the next one has not begun yet."""
        return self._phase in (WorldPhase.CHANGING, WorldPhase.PAUSED)

    def formed(self, world: World) -> None:
        """Record that the process group of ``world`` exists; its state is restored later."""
        self._move(WorldPhase.FORMED)
        self._world = world

    def begin(self, world: World) -> None:
        """Continue training in ``world``: the state is restored and the same on all ranks."""
        self._world = world
        self._enter_modules()
        self._move(WorldPhase.TRAINING)
        self._checkpoints.begin_world(world, self._job)
        self._ledger.start(
            generation=world.generation,
            step=self._job.progress.step,
            rank=world.rank,
            size=world.size,
            node=world.node,
        )
        phases.begin_world(world.rank)
        self._hooks.enter_world(world, self._job.progress.step)

    def register_again(self) -> None:
        """Begin to register the script's new objects in the same world."""
        self._move(WorldPhase.REGISTERING)

    def registered_again(self) -> None:
        """End the registration: the new objects have inherited the state."""
        self._enter_modules()
        self._move(WorldPhase.TRAINING)

    def pause(self) -> None:
        """Pause training, and keep the state for the next world."""
        self._hooks.leave_world("pause")
        self._move(WorldPhase.PAUSED)

    def begin_change(self) -> None:
        """Leave the current world for another one."""
        following = WorldPhase.CHANGING if self.is_restored else WorldPhase.JOINING
        if following is not self._phase:
            self._move(following)

    def synchronize(self) -> None:
        """Wait until the work that the script has queued on a device has succeeded.

        Raises GroupAborted if an abort may have left invalid results.
        """
        self._group.synchronize()

    def end(self, *, broken: bool) -> None:
        """Destroy the process group of an ended world, so that the next one can be built."""
        self.begin_change()
        self._checkpoints.end_world(broken=broken)
        if broken:
            self._group.abort()
        for module in self._job.modules.values():
            module.leave_world()
        self._job.order.leave_world()
        self._group.destroy(is_for_next=True)

    def close(self) -> None:
        """Enter the final phase: the process is ending."""
        if self._phase is not WorldPhase.CLOSED:
            self._move(WorldPhase.CLOSED)

    def _enter_modules(self) -> None:
        kind = "replica" if self.replica.mesh else "rank"
        if self._job.modules and self.world.size > 1:
            self._job.order.enter_world(_gradient_group(self._group), peer_group(), kind=kind)
        self._job.order.sums.enter_world(
            self.world.rank,
            self.world.size,
            can_follow=bool(self._job.modules) and not self.replica.mesh,
            wait=self._wait_for_gradients,
        )
        for module in self._job.modules.values():
            module.enter_world()

    def _wait_for_gradients(self) -> None:
        for module in self._job.modules.values():
            module.reduction.wait()

    def _move(self, phase: WorldPhase) -> None:
        if phase not in TRANSITIONS[self._phase]:
            raise TrainingError(
                f"illegal transition from {self._phase.name} ({self._phase.value}) to "
                f"{phase.name} ({phase.value})",
                hint="after run.close() a script cannot train; otherwise this is a bug: report it "
                "with this traceback",
            )
        self._phase = phase


def _gradient_group(group: ProcessGroup) -> RankGroup:
    """The ranks that sum the gradients of the same parameters."""
    across = group.across if isinstance(group, ReplicaProcessGroup) else None
    return world_group() if across is None else across
