"""The life of a worker from one world to the next, as an explicit phase.

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
from elastic.hangs.phases import phases
from elastic.mesh import ModelReplica
from elastic.process_group import ProcessGroup
from elastic.telemetry.ledger import Ledger
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.listeners import Listeners
from elastic.training.observers.step_observers import StepObservers
from elastic.training.state.job_state import JobState
from elastic.world.world import World


class WorldPhase(Enum):
    """What a worker does with its world."""

    JOINING = "no world yet, or one without restored state has ended: a first one is awaited"
    FORMED = "the process group of a world exists, the job's state is not restored"
    TRAINING = "the state is restored and the same on all ranks"
    REGISTERING = "the function of run.retry registers its objects again; they inherit the state"
    PAUSED = "the world has fewer nodes than the job's minimum: nothing is trained"
    CHANGING = "the world is over, the next one is being entered with the state of this one"
    CLOSED = "the process ends"


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
    """One per process: the present world, its phase, and what begins and ends with a world."""

    def __init__(
        self,
        job: JobState,
        group: ProcessGroup,
        checkpoints: CheckpointManager,
        ledger: Ledger,
        listeners: Listeners,
        observers: StepObservers,
        replica: ModelReplica | None = None,
    ) -> None:
        self._job = job
        self._group = group
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._listeners = listeners
        self._observers = observers
        self.replica = replica or ModelReplica()  # of this rank: itself, or several
        self._phase = WorldPhase.JOINING
        self._world: World | None = None

    @property
    def phase(self) -> WorldPhase:
        """The present phase."""
        return self._phase

    @property
    def world(self) -> World:
        """The present world, or the last one. Raises NoWorld before the first."""
        if self._world is None:
            raise NoWorld(
                "there is no world yet: it begins with run.retry or the first loop",
                hint="read run.world inside the training function; run.is_main is False until then",
            )
        return self._world

    @property
    def has_world(self) -> bool:
        """Whether the first world has begun."""
        return self._world is not None

    @property
    def is_restored(self) -> bool:
        """Whether this process holds the job's state: it can be saved."""
        return self._phase in _WITH_STATE

    @property
    def is_changing(self) -> bool:
        """Whether an interrupted attempt is over, and the next one has not begun."""
        return self._phase in (WorldPhase.CHANGING, WorldPhase.PAUSED)

    def formed(self, world: World) -> None:
        """The process group of ``world`` exists; its state comes later."""
        self._move(WorldPhase.FORMED)
        self._world = world

    def begin(self, world: World) -> None:
        """State is restored and the same on all ranks: training continues in ``world``."""
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
        self._observers.begin_world(world, self._job.progress.step)
        self._listeners.begin(world)

    def register_again(self) -> None:
        """The script replaces the objects that it has registered; the world stays."""
        self._move(WorldPhase.REGISTERING)

    def registered_again(self) -> None:
        """The new objects have inherited the state."""
        self._enter_modules()
        self._move(WorldPhase.TRAINING)

    def pause(self) -> None:
        """Wait for another world with the state of this one."""
        self._observers.pause()
        self._move(WorldPhase.PAUSED)

    def begin_change(self) -> None:
        """The present world is over, and another one follows."""
        following = WorldPhase.CHANGING if self.is_restored else WorldPhase.JOINING
        if following is not self._phase:
            self._move(following)

    def settle(self) -> None:
        """Return when what the script has queued on a device has ended well.

        Raises GroupAborted where an abort may have left something else than results.
        """
        self._group.settle()

    def end(self, *, broken: bool) -> None:
        """Destroy the process group of a world that is over: the next one may be built."""
        self.begin_change()
        self._checkpoints.end_world(broken=broken)
        if broken:
            self._group.abort()
        for module in self._job.modules.values():
            module.leave_world()
        self._group.destroy(is_for_next=True)

    def close(self) -> None:
        """The process ends."""
        if self._phase is not WorldPhase.CLOSED:
            self._move(WorldPhase.CLOSED)

    def _enter_modules(self) -> None:
        for module in self._job.modules.values():
            module.enter_world()

    def _move(self, phase: WorldPhase) -> None:
        if phase not in TRANSITIONS[self._phase]:
            raise TrainingError(
                f"illegal transition from {self._phase.name} ({self._phase.value}) to "
                f"{phase.name} ({phase.value})",
                hint="after run.close() nothing can be trained; otherwise this is a bug: report "
                "it with this traceback",
            )
        self._phase = phase
