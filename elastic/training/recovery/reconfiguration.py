"""Gives all ranks of a new world the same state without a restart: agreement, then transfer.

The main thread of every rank runs this between two steps of the job. A rank's state does not change
before the received state is complete, so after a fault the next world retries from the same
state. A rank without a state receives weights directly into its model; its state is torn, as in the
middle of an update, until everything has arrived and is verified.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from checkpoints import Ancestor
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import CheckpointRequired, TrainingError
from elastic.events import StateReceived, StateSent, WorldJoined
from elastic.process_group import all_gather_json, peer_group
from elastic.telemetry.journal import EventSink
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.recovery.agreement import Agreement, Tag, agree
from elastic.training.recovery.progress import RankProgress, tag_of
from elastic.training.recovery.transfer import Room, Specs, broadcast_blob, transfer
from elastic.training.state.all_ranks import on_all_ranks
from elastic.training.state.job_state import JobState
from elastic.training.state.received_memory import Reserve
from elastic.training.state.shards import identical_names, own_memory, pack, unpack, warm_up
from elastic.world.world import World, joins_running_job


class Reconfiguration:
    """The reconfiguration of a rank. One per process."""

    def __init__(
        self,
        job: JobState,
        progress: RankProgress,
        checkpoints: CheckpointManager,
        journal: EventSink,
        device: torch.device,
    ) -> None:
        self._job = job
        self._progress = progress
        self._checkpoints = checkpoints
        self._journal = journal
        self._device = device
        self._reserve = Reserve()

    def prepare(self) -> None:
        """Allocate the memory of a state before this rank is ready for its first world.

        If it joins a running job, the other ranks train meanwhile; later they would wait for
        anything that is not done here.
        """
        if joins_running_job() and self._progress.tag is None and not self._job.is_rebuilt:
            self._reserve.fill(
                tracked
                for tracked in self._job.tracked.values()
                if isinstance(tracked, torch.optim.Optimizer)
            )
            warm_up(self._job)

    def enter(self, world: World, committed_step: int | None) -> World:
        """Give all ranks of the group the same state. Returns the world with the job's generation.

        Raises CheckpointRequired if no rank has a state, no checkpoint can be loaded, and the job
        has committed steps.
        """
        began_s = SYSTEM_CLOCK.monotonic()
        agreement = agree(self._progress.rank_state(world.nonce), world.mesh.size)
        self._progress.agreed_on_calls(agreement)
        try:
            if agreement.is_fresh:
                if self._job.is_sharded:
                    committed_step = self._not_to_lose(committed_step)
                world = self._start_fresh(world, committed_step, may_begin=not agreement.is_torn)
            else:
                world = self._continue(world, agreement)
        finally:
            self._reserve.clear()
        self._joined(world, agreement.source, agreement.tag, began_s)
        return world

    def meet(self, world: World) -> World:
        """Verify that all ranks of the group are in one world, and that none has a state:
        :meth:`restore` loads the state once its objects are built."""
        agreement = agree(self._progress.rank_state(world.nonce))
        self._progress.agreed_on_calls(agreement)
        if not agreement.is_fresh:
            raise TrainingError(
                f"rank {agreement.source} has a complete model, but this rank builds a sharded "
                "model in each world",
                hint="run the same script on every rank: call run.build on all ranks or on none",
            )
        return world

    def restore(self, world: World, committed_step: int | None) -> World:
        """Load the state of the objects built in ``world``. Returns the world with the job's
        generation.

        Without a checkpoint, the job starts over if it loses no more steps than lie between two
        saves to memory. Raises CheckpointRequired if it would lose more.
        """
        began_s = SYSTEM_CLOCK.monotonic()
        world = self._start_fresh(world, self._not_to_lose(committed_step), may_begin=True)
        self._joined(world, None, None, began_s)
        return world

    def _not_to_lose(self, committed_step: int | None) -> int | None:
        """The progress without which the job must not start over; None for fewer steps than lie
        between two saves to memory."""
        may_lose = self._checkpoints.first_memory_step
        is_short = may_lose is not None and (committed_step or 0) <= may_lose + 1
        return None if is_short else committed_step

    def _joined(self, world: World, source: int | None, tag: Tag | None, began_s: float) -> None:
        all_gather_json(True)  # no rank continues before all ranks have received everything
        job = self._job
        if tag is None:
            tag = tag_of(0, job.progress)
        self._progress.agreed(tag, generation=world.generation)
        self._journal.emit(
            WorldJoined(
                generation=world.generation,
                rank=world.rank,
                size=world.size,
                step=job.progress.step,
                source=source,
                duration_s=round(SYSTEM_CLOCK.monotonic() - began_s, 4),
            ),
            level=logging.DEBUG,
        )

    def _start_fresh(self, world: World, committed_step: int | None, *, may_begin: bool) -> World:
        generation = self._checkpoints.restore(world, self._job, may_begin=may_begin)
        step = self._job.progress.step
        if committed_step and step == 0 and not self._checkpoints.is_resumed:
            raise CheckpointRequired(
                f"the job had committed {committed_step} steps, but no remaining rank has them, "
                "and there is no checkpoint to resume from",
                hint="pass elastic.join(checkpoints=…) a folder that all nodes share; to start "
                "from step 0 again, use another --rdzv-id",
            )
        return dataclasses.replace(world, generation=generation)

    def _continue(self, world: World, agreement: Agreement) -> World:
        source, tag = agreement.holders[0], agreement.tag
        assert tag is not None
        is_source = world.replica == source
        node, tensors = (
            on_all_ranks(world, self._pack_non_parameters)
            if is_source
            else (on_all_ranks(world, lambda: None) or (None, {}))
        )
        node, tensors = broadcast_blob(node, tensors, source, peer_group())
        if agreement.receivers:
            self._transfer(world, agreement)
        state = unpack(node, tensors, self._job)
        self._progress.rollback.adopt(state["needs_copies"], state["small"])
        if not is_source:
            self._progress.tag = tag  # equal weights: from here on, a fault loses nothing
        generation = max(world.generation, state["generation"] + 1)
        lineage = tuple(Ancestor(*pair) for pair in state["lineage"])
        step = self._job.progress.step
        self._checkpoints.inherit(
            (*lineage, Ancestor(generation, step)), generation, state["saved_step"]
        )
        return dataclasses.replace(world, generation=generation)

    def _pack_non_parameters(self) -> tuple[Any, dict[str, torch.Tensor]]:
        rollback = self._progress.rollback
        lineage, generation, saved_step = self._checkpoints.origin
        return pack(
            {
                "small": rollback.snapshot,
                "needs_copies": rollback.needs_copies,
                "lineage": [[a.generation, a.began_at_step] for a in lineage],
                "generation": generation,
                "saved_step": saved_step,
            }
        )

    def _room(self, tag: Tag) -> Room:
        """Receive into the memory of this rank's model, unless another rank may need its weights,
        and into the reserve."""

        def room(packed: Any, specs: Specs) -> dict[str, torch.Tensor]:
            own: dict[str, torch.Tensor] = {}
            if self._progress.can_spare_weights(tag):
                own = own_memory(packed, specs, self._job)
            if own:
                self._progress.begin_taking_over()
            others = {name: spec for name, spec in specs.items() if name not in own}
            return own | self._reserve.take(others)

        return room

    def _transfer(self, world: World, agreement: Agreement) -> None:
        tag = agreement.tag
        assert tag is not None
        began_s = SYSTEM_CLOCK.monotonic()
        size, position = world.mesh.size, world.rank_in_replica
        # Each position in the replicas has a separate transfer, from all replicas that have the
        # state; the first source differs between positions.
        turn = position % len(agreement.holders)
        holders = (*agreement.holders[turn:], *agreement.holders[:turn])
        packed = on_all_ranks(
            world,
            lambda: pack(self._job.tree()) if world.replica in holders else (None, {}),
        )
        node, tensors = packed
        moved = transfer(
            node,
            tensors,
            sources=holders,
            receivers=sorted({rank // size for rank in agreement.receivers}),
            device=self._device,
            group=peer_group(),
            room=self._room(tag),
            identical=identical_names(tensors, self._job),
        )
        sources = tuple(replica * size + position for replica in moved.sources)

        def take_over() -> None:
            if moved.tensors is None:
                return
            tree = unpack(moved.node, moved.tensors, self._job)
            self._job.check(tree, f"the state of rank {holders[0] * size + position}")
            self._progress.begin_taking_over()
            self._job.apply(tree)
            self._progress.took_over(tag)

        on_all_ranks(world, take_over, is_loss=True)
        took_s = round(SYSTEM_CLOCK.monotonic() - began_s, 4)
        if moved.tensors is not None:
            self._journal.emit(
                StateReceived(
                    source=holders[0] * size + position,
                    sources=sources,
                    step=tag.step,
                    bytes=sum(t.nbytes for t in moved.tensors.values()),
                    duration_s=took_s,
                )
            )
        elif world.rank in sources:
            self._journal.emit(
                StateSent(
                    receivers=tuple(r for r in agreement.receivers if r % size == position),
                    step=tag.step,
                    bytes=moved.sent_bytes,
                    duration_s=took_s,
                ),
                level=logging.DEBUG,
            )
