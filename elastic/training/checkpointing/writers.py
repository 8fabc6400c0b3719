"""Who writes a checkpoint: the ranks of the present world, its generation, and its lineage.

A save belongs to the world that began it. When that world breaks, a peer may be gone with its
share: what could not be committed by then is abandoned, and removed by the next world's rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import checkpoints
from elastic.training.state.job_state import JobState
from elastic.world.world import World


@dataclass(eq=False)
class Writers:
    """The ranks of one world, as the writers of its checkpoints."""

    group: checkpoints.WriterGroup
    is_over: bool = False  # the world broke: what it could not commit by now lacks a share


class WriterHistory:
    """The writers of the present world, and what their saves descend from. One per process."""

    def __init__(self) -> None:
        self.lineage: checkpoints.Lineage = ()
        self.generation = 0  # that this rank's state belongs to
        self.present: Writers | None = None  # of the last world, between two
        self.is_writer = True  # this rank has a share in the saves of its world
        self.broken_worlds = 0  # of this process

    def descend(self, lineage: checkpoints.Lineage, generation: int) -> None:
        """From now on save as ``generation``, with these ancestors."""
        self.lineage, self.generation = lineage, generation

    def enter(
        self, world: World, job: JobState, may_commit: Callable[[Writers], bool]
    ) -> checkpoints.WriterGroup:
        """Saves are for ``world`` from now on. ``may_commit`` is asked on the engine's thread."""
        # Each replica of several ranks holds the state once: the first one writes.
        self.is_writer = not job.is_sharded or world.replica == 0
        writers = Writers(
            checkpoints.WriterGroup(
                nonce=world.nonce,
                generation=self.generation,
                rank=world.rank_in_replica if job.is_sharded else world.rank,
                size=world.mesh.size if job.is_sharded else world.size,
                lineage=self.lineage,
                fence=lambda: may_commit(writers),
            )
        )
        self.present = writers
        return writers.group

    def leave(self, *, broken: bool) -> bool:
        """The present world is over. Whether it has just broken."""
        if self.present is None or not broken or self.present.is_over:
            return False
        self.present.is_over = True
        self.broken_worlds += 1
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the ranks of the present world can still save together."""
        return self.present is not None and not self.present.is_over

    @property
    def rank(self) -> int:
        """In the present world, or the last one."""
        return self.present.group.rank if self.present is not None else 0

    @property
    def world_size(self) -> int:
        """Of the present world, or the last one."""
        return self.present.group.size if self.present is not None else 1

    @property
    def nonce(self) -> str:
        """Of the present world, or the last one."""
        return self.present.group.nonce if self.present is not None else ""

    def of_one(self, nonce: str) -> checkpoints.WriterGroup:
        """The writer group of a checkpoint that only this rank writes."""
        return checkpoints.WriterGroup(
            nonce=nonce, generation=self.generation, lineage=self.lineage
        )
