"""From one world to the next without a restart: agree, give state to who lacks it, rebuild.

The main thread of every rank runs this between two steps of the job. Nothing of a rank's state
changes before what it receives is complete, so a fault in here is followed by another try in the
next world, from the same standing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from checkpoints import Ancestor
from checkpoints.tree import pack, unpack
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import CheckpointRequired
from elastic.events import StateReceived, StateSent, WorldJoined
from elastic.telemetry.journal import EventSink
from elastic.training.restore import restore, together
from elastic.training.saver import Saver
from elastic.training.snapshot import SmallState, Snapshot
from elastic.training.state import JobState
from elastic.worker.agreement import Agreement, Standing, Tag, agree
from elastic.worker.collectives import all_gather_json
from elastic.worker.transfer import broadcast_blob, transfer
from elastic.worker.world import World


class Recovery:
    """What a rank knows of its own progress, and how it becomes that of a world."""

    def __init__(
        self, job: JobState, saver: Saver, journal: EventSink, device: torch.device
    ) -> None:
        self._job = job
        self._saver = saver
        self._journal = journal
        self._device = device
        self._small: SmallState | None = None
        self._snapshot: Snapshot = {}
        self.tag: Tag | None = None  # of this rank's weights
        self.begun = False  # a step was in hand
        self.replay: tuple[str, ...] = ()  # optimizers to mask in the next step

    # -- while training -----------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Copy the small state: at each step's begin and commit."""
        if self._small is None:
            self._small = SmallState(self._job)
        self._snapshot = self._small.take()

    def put_back(self) -> None:
        """Undo what the step in hand has done to the small state."""
        if self._small is not None:
            self._small.put_back(self._snapshot)

    def committed(self) -> None:
        """A step has taken effect."""
        assert self.tag is not None
        self.tag = Tag(self.tag.generation, self._job.progress.step)
        self.begun = False
        self.replay = ()

    def interrupted(self, *, stepped: tuple[str, ...], begun: bool, is_torn: bool) -> None:
        """A fault, or a switch: say where the weights stand, put the small state back."""
        if self.tag is None:
            return
        assert self._small is not None
        self._small.put_back(self._snapshot)
        self.begun = begun
        if is_torn:
            self.tag = None
        else:
            self.tag = Tag(self.tag.generation, self._job.progress.step, stepped)

    # -- in a new world -----------------------------------------------------------------------

    def enter(self, world: World, committed_step: int | None) -> World:
        """Bring all ranks of the group to one state; the world as the job numbers it.

        Raises CheckpointRequired if nobody has a state, no checkpoint can be loaded, and steps
        were committed before.
        """
        began_s = SYSTEM_CLOCK.monotonic()
        agreement = agree(Standing(world.nonce, self.tag, self.begun))
        if agreement.is_fresh:
            world = self._start_fresh(world, committed_step)
        else:
            world = self._go_on(world, agreement)
        all_gather_json(True)  # nobody goes on before everybody has everything
        job = self._job
        stepped = agreement.tag.stepped if agreement.tag is not None else ()
        self.tag = Tag(world.generation, job.progress.step, stepped)
        self.replay = stepped
        self._journal.emit(
            WorldJoined(
                generation=world.generation,
                rank=world.rank,
                size=world.size,
                step=job.progress.step,
                source=agreement.source,
                replay=stepped,
                duration_s=round(SYSTEM_CLOCK.monotonic() - began_s, 4),
            )
        )
        return world

    def _start_fresh(self, world: World, committed_step: int | None) -> World:
        generation = restore(world, self._job, self._saver, self._journal)
        step = self._job.progress.step
        if committed_step and step == 0:
            raise CheckpointRequired(
                f"the job had committed {committed_step} steps, no rank that has them is left, "
                "and there is no checkpoint to go on from",
                hint="give elastic.join(checkpoints=…) a folder that all nodes share; to start "
                "from step 0 again, use another --rdzv-id",
            )
        self.take_snapshot()
        return dataclasses.replace(world, generation=generation)

    def _go_on(self, world: World, agreement: Agreement) -> World:
        source, tag = agreement.source, agreement.tag
        assert source is not None and tag is not None
        is_source = world.rank == source
        node, tensors = (
            together(world, self._pack_small)
            if is_source
            else (together(world, lambda: None) or (None, {}))
        )
        node, tensors = broadcast_blob(node, tensors, source)
        if agreement.receivers:
            self._transfer(world, agreement)
        told = unpack(node, lambda path, name: tensors[name])
        if not is_source:
            if self._small is None:
                self._small = SmallState(self._job)
            self._small.put_back(told["small"])
            self._snapshot = told["small"]
            self.tag = tag  # the same bits: a fault from here on is no loss
        generation = max(world.generation, told["generation"] + 1)
        lineage = tuple(Ancestor(*pair) for pair in told["lineage"])
        step = self._job.progress.step
        self._saver.inherit((*lineage, Ancestor(generation, step)), generation, told["saved_step"])
        return dataclasses.replace(world, generation=generation)

    def _pack_small(self) -> tuple[Any, dict[str, torch.Tensor]]:
        lineage, generation, saved_step = self._saver.origin
        return pack(
            {
                "small": self._snapshot,
                "lineage": [[a.generation, a.began_at_step] for a in lineage],
                "generation": generation,
                "saved_step": saved_step,
            }
        )

    def _transfer(self, world: World, agreement: Agreement) -> None:
        source, tag = agreement.source, agreement.tag
        assert source is not None and tag is not None
        began_s = SYSTEM_CLOCK.monotonic()
        is_source, is_receiver = world.rank == source, world.rank in agreement.receivers
        packed = together(world, lambda: pack(self._job.tree()) if is_source else (None, {}))
        node, tensors = packed
        received = transfer(
            node, tensors, source=source, receivers=agreement.receivers, device=self._device
        )
        size = sum(t.numel() * t.element_size() for t in tensors.values())

        def take_over() -> None:
            if received is None:
                return
            tree = unpack(received[0], lambda path, name: received[1][name])
            self._job.check(tree, f"the state of rank {source}")
            self.tag = None  # if taking over fails half way, the weights belong to no step
            self._job.apply(tree)
            self.tag = tag

        together(world, take_over)
        took_s = round(SYSTEM_CLOCK.monotonic() - began_s, 4)
        if is_receiver and received is not None:
            size = sum(t.numel() * t.element_size() for t in received[1].values())
            self._journal.emit(
                StateReceived(source=source, step=tag.step, bytes=size, duration_s=took_s)
            )
        elif is_source:
            self._journal.emit(
                StateSent(
                    receivers=agreement.receivers, step=tag.step, bytes=size, duration_s=took_s
                )
            )
