"""Enters a process's first world, and restores the job's state there."""

from __future__ import annotations

from typing import Any

from elastic.errors import TrainingError
from elastic.training.lifecycle import Lifecycle
from elastic.training.rebuilding.built import AGAIN
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.training_state import TrainingState
from elastic.world.world import World


class Bootstrap:
    """Enters worlds and restores state. One per process."""

    def __init__(self, state: TrainingState, lifecycle: Lifecycle, strategies: Strategies) -> None:
        self._job = state.job
        self._progress = state.progress
        self._lifecycle = lifecycle
        self._strategies = strategies
        self._inherited: dict[str, Any] | None = None  # state for objects registered again

    def enter_world(self) -> World:
        """Enter a world, unless this process is in one."""
        if not self._lifecycle.has_world:
            self._strategies.active.enter_world()
        return self._lifecycle.world

    def rank_and_size(self) -> tuple[int, int]:
        """This rank's index among the ranks that split the data, and their number. Enters the first
        world."""
        world = self.enter_world()
        return world.data_rank, world.data_size

    def enter_loop(self) -> None:
        """Enter a world and restore the state, unless that is done.

        Raises ConfigError, before any change, if an object was sharded after its registration.
        """
        if self._lifecycle.is_restored:
            return
        self._job.check_unsharded()
        if self._inherited is not None:
            self._inherit(self._inherited)
            return
        if self._job.is_rebuilt and self._job.built is None:
            raise TrainingError(
                "run.build() was not called in this world: the model and the optimizer belong to "
                "an ended world",
                hint=AGAIN,
            )
        self.enter_world()
        if not self._lifecycle.is_restored:
            self._strategies.active.restore()

    def inherit_later(self, tree: dict[str, Any]) -> None:
        """Set the state for the objects that the script registers before the next loop."""
        self._inherited = tree

    def _inherit(self, tree: dict[str, Any]) -> None:
        self._job.check(tree, "the state that this job has trained")
        self._job.apply(tree)
        self._inherited = None
        self._lifecycle.registered_again()
        self._progress.enter_world()
