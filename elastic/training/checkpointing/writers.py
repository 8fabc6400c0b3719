"""The writers of a checkpoint: the ranks of the current world, its generation and lineage.

A save belongs to the world that began it. When that world breaks, a dead peer's share may be
missing: a save that is not committed by then is abandoned, and the next world's rank 0 removes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import checkpoints
from elastic.training.state.job_state import JobState
from elastic.world.world import World


@dataclass(eq=False)
class Writers:
    """The ranks of one world, as the writers of its checkpoints."""

    group: checkpoints.WriterGroup
    is_over: bool = False  # the world broke: uncommitted saves lack a share


class WriterHistory:
    """The writers of the current world, and the lineage of their saves. One per process."""

    def __init__(self) -> None:
        self.lineage: checkpoints.Lineage = ()
        self.generation = 0  # of this rank's state
        self.present: Writers | None = None  # between two worlds, the writers of the last one
        self.is_writer = True  # this rank writes a share of its world's saves
        self.broken_worlds = 0  # in this process

    def descend(self, lineage: checkpoints.Lineage, generation: int) -> None:
        """Save as ``generation`` from now on, with these ancestors."""
        self.lineage, self.generation = lineage, generation

    def enter(
        self, world: World, job: JobState, may_commit: Callable[[Writers], bool]
    ) -> checkpoints.WriterGroup:
        """Save for ``world`` from now on. ``may_commit`` is called on the engine's thread."""
        # Each replica of several ranks holds one copy of the state: the first replica writes.
        self.is_writer = not job.is_sharded or world.replica == 0
        writers = Writers(
            checkpoints.WriterGroup(
                nonce=world.nonce,
                generation=self.generation,
                rank=world.rank_in_replica if job.is_sharded else world.rank,
                size=world.mesh.size if job.is_sharded else world.size,
                lineage=self.lineage,
                section=job.stage.ranks if job.stage is not None else None,
                fence=lambda: may_commit(writers),
            )
        )
        self.present = writers
        return writers.group

    def leave(self, *, broken: bool) -> bool:
        """End the current world; returns whether it has just broken."""
        if self.present is None or not broken or self.present.is_over:
            return False
        self.present.is_over = True
        self.broken_worlds += 1
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the ranks of the current world can still save together."""
        return self.present is not None and not self.present.is_over

    @property
    def rank(self) -> int:
        """This writer's rank in the current or last world."""
        return self.present.group.rank if self.present is not None else 0

    @property
    def world_size(self) -> int:
        """The number of writers in the current or last world."""
        return self.present.group.size if self.present is not None else 1

    @property
    def nonce(self) -> str:
        """The nonce of the current or last world."""
        return self.present.group.nonce if self.present is not None else ""

    def before_callbacks(self, left: int) -> checkpoints.WriterGroup:
        """The writers of this world whose last step still lacks ``left`` callbacks."""
        assert self.present is not None
        group = self.present.group
        return dataclasses.replace(group, nonce=f"{group.nonce}c{left}")

    def of_one(self, nonce: str) -> checkpoints.WriterGroup:
        """The writer group of a checkpoint that only this rank writes."""
        return checkpoints.WriterGroup(
            nonce=nonce, generation=self.generation, lineage=self.lineage
        )
