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
from checkpoints.format.state_tree import flatten, unflatten
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import CheckpointRequired, TrainingError
from elastic.events import StateReceived, StateSent, WorldJoined
from elastic.process_group.collectives import all_gather_json
from elastic.telemetry.journal import EventSink
from elastic.training.checkpointing.saver import Saver
from elastic.training.gradients.optimizers import OptimizerGuard
from elastic.training.recovery.agreement import Agreement, RankState, Tag, agree
from elastic.training.recovery.restore import restore, together
from elastic.training.recovery.transfer import broadcast_blob, transfer
from elastic.training.state.job_state import JobState
from elastic.training.state.rollback import Rollback
from elastic.world.world import World


class Recovery:
    """What a rank knows of its own progress, and how it becomes that of a world."""

    def __init__(
        self,
        job: JobState,
        saver: Saver,
        journal: EventSink,
        device: torch.device,
        guard: OptimizerGuard,
    ) -> None:
        self._job = job
        self._saver = saver
        self._journal = journal
        self._device = device
        self._guard = guard
        self._rollback: Rollback | None = None
        self._replaced: Rollback | None = None  # of objects that the script has made anew
        self._is_fresh = False  # nothing of the script has run since the last snapshot
        self._is_entering = False  # no step has begun in the present world
        self._is_torn = False  # weights that are not the initial ones, and of no step
        self.retries = 0  # calls of run.retry that this rank has completed
        self._retries_of_others = 0  # the most that a rank of this world had when it began
        self.tag: Tag | None = None  # of this rank's weights
        self.begun = False  # a step was begun
        self._masked: tuple[str, ...] = ()  # optimizers to mask in a step that is done again
        self._masked_at = 0  # its number
        self.callback_step = (0, 0, 0)  # number, epoch, index of the last committed step

    @property
    def rollback(self) -> Rollback:
        """Made late: the objects of the job are registered first."""
        if self._rollback is None:
            self._rollback = self._guard.rollback = Rollback(self._job, self._guard.tracked)
            if (replaced := self._replaced) is not None:
                self._rollback.adopt(replaced.habits, replaced.snapshot)
                self._rollback.final_buffers = replaced.final_buffers
                self._replaced = None
        return self._rollback

    @property
    def is_catching_up(self) -> bool:
        """Whether other ranks have completed the call of run.retry that this one is in: it has
        nothing to train in it, and nobody to save or wait with."""
        return self.retries < self._retries_of_others

    # -- while training -----------------------------------------------------------------------

    def before_step(self, number: int) -> None:
        """Outside of an accumulation: the state is that of a commit, and a step comes next.

        Raises TrainingError if the script has overwritten the state that the world began with.
        """
        if self._is_fresh:
            return
        if self._is_entering and number > 0 and self.rollback.weights_have_changed:
            raise TrainingError(
                f"weights were changed after they had been restored for step {number}: "
                "run.retry calls its function again in each new world",
                hint="initialize weights, or load pretrained ones, before run.retry(train), not "
                "in train",
            )
        self.rollback.script_has_run()
        self._take()

    def expect_weights(self) -> None:
        """A world begins with the present weights: nothing but training may change them."""
        self._is_entering = True
        self.rollback.expect_weights()

    def register_anew(self) -> None:
        """The objects of the job are about to be replaced by others of the same kind."""
        self._replaced = self._rollback
        self._rollback = self._guard.rollback = None
        self._is_fresh = False

    def script_has_run(self) -> None:
        """It may have changed what it likes."""
        self._is_fresh = False

    def masked(self, number: int) -> tuple[str, ...]:
        """The optimizers whose update in step ``number`` is in the weights already."""
        return self._masked if number == self._masked_at else ()

    def committed(self, step: tuple[int, int, int], callbacks: int = 0) -> None:
        """A step (number, epoch, index) has taken effect; so many callbacks of it come next."""
        self.rollback.committed()
        self.begun = False
        self._masked = ()
        self.callback_step = step
        self.called_back(callbacks)

    def called_back(self, left: int) -> None:
        """One more callback of the last committed step is done; so many are left."""
        self._take()
        if self.tag is not None:
            step = self._job.progress.step
            self.tag = Tag(self.tag.generation, step, callbacks=left)

    def _take(self) -> None:
        self.rollback.take()
        self._is_fresh, self._is_entering = True, False

    def interrupted(self, *, number: int | None, stepped: tuple[str, ...], is_torn: bool) -> None:
        """A fault, or a switch: put the state back to the last commit, say where weights stand.

        Args:
            number: of the step that was begun; None between two steps.
            stepped: the optimizers whose updates of it are in the weights.
            is_torn: whether an update was begun and not ended.
        """
        if self.tag is None:
            return
        self._is_fresh = False
        self.begun = number is not None
        if number is None or (self._masked and number < self._masked_at):
            stepped, number = self._masked, self._masked_at
        is_updated = bool(stepped) and stepped != self._masked
        done = self.rollback.put_back(is_torn=is_torn, is_updated=is_updated)
        if done.is_torn:
            self.tag, self._is_torn = None, True
            return
        if not done.has_updates:
            stepped, number = self._masked, self._masked_at  # those were in the weights before
        step = self._job.progress.step
        iteration = number - step if stepped else 0
        left = self.tag.callbacks
        self.tag = Tag(self.tag.generation, step, stepped, iteration, left)

    # -- in a new world -----------------------------------------------------------------------

    def enter(self, world: World, committed_step: int | None) -> World:
        """Bring all ranks of the group to one state; the world as the job numbers it.

        Raises CheckpointRequired if nobody has a state, no checkpoint can be loaded, and steps
        were committed before.
        """
        began_s = SYSTEM_CLOCK.monotonic()
        mine = RankState(world.nonce, self.tag, self.begun, self._is_torn, self.retries)
        agreement = agree(mine)
        self._retries_of_others = agreement.retries
        if agreement.is_fresh:
            world = self._start_fresh(world, committed_step, may_begin=not agreement.is_torn)
        else:
            world = self._go_on(world, agreement)
        all_gather_json(True)  # nobody goes on before everybody has everything
        job = self._job
        tag = agreement.tag if agreement.tag is not None else Tag(0, job.progress.step)
        self.tag = dataclasses.replace(tag, generation=world.generation)
        self._masked, self._masked_at = tag.stepped, tag.step + tag.iteration
        self._is_fresh, self._is_entering, self._is_torn = False, True, False
        self._journal.emit(
            WorldJoined(
                generation=world.generation,
                rank=world.rank,
                size=world.size,
                step=job.progress.step,
                source=agreement.source,
                replay=tag.stepped,
                duration_s=round(SYSTEM_CLOCK.monotonic() - began_s, 4),
            )
        )
        return world

    def _start_fresh(self, world: World, committed_step: int | None, *, may_begin: bool) -> World:
        generation = restore(world, self._job, self._saver, self._journal, may_begin=may_begin)
        step = self._job.progress.step
        if committed_step and step == 0:
            raise CheckpointRequired(
                f"the job had committed {committed_step} steps, no rank that has them is left, "
                "and there is no checkpoint to go on from",
                hint="give elastic.join(checkpoints=…) a folder that all nodes share; to start "
                "from step 0 again, use another --rdzv-id",
            )
        self._take()
        self.rollback.forget()
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
        told = unflatten(node, lambda path, name: tensors[name])
        self.rollback.adopt(told["habits"], told["small"])
        self.rollback.final_buffers = told["final_buffers"]
        number, epoch, index = told["callback_step"]
        self.callback_step = (number, epoch, index)
        if not is_source:
            self.tag = tag  # the same bits: a fault from here on is no loss
        generation = max(world.generation, told["generation"] + 1)
        lineage = tuple(Ancestor(*pair) for pair in told["lineage"])
        step = self._job.progress.step
        self._saver.inherit((*lineage, Ancestor(generation, step)), generation, told["saved_step"])
        return dataclasses.replace(world, generation=generation)

    def _pack_small(self) -> tuple[Any, dict[str, torch.Tensor]]:
        lineage, generation, saved_step = self._saver.origin
        return flatten(
            {
                "small": self.rollback.snapshot,
                "habits": self.rollback.habits,
                "callback_step": list(self.callback_step),
                "final_buffers": self.rollback.final_buffers,
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
        packed = together(world, lambda: flatten(self._job.tree()) if is_source else (None, {}))
        node, tensors = packed
        received = transfer(
            node, tensors, source=source, receivers=agreement.receivers, device=self._device
        )
        size = sum(t.numel() * t.element_size() for t in tensors.values())

        def take_over() -> None:
            if received is None:
                return
            tree = unflatten(received[0], lambda path, name: received[1][name])
            self._job.check(tree, f"the state of rank {source}")
            # If taking over fails half way, the weights belong to no step.
            self.tag, self._is_torn = None, True
            self._job.apply(tree)
            self.tag, self._is_torn = tag, False

        together(world, take_over, is_loss=True)
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
