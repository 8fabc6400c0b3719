"""Reads a loader within the steps of another one (:mod:`elastic.training.data.following`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic.errors import TrainingError
from elastic.training.data import following
from elastic.training.data.following import Pass
from elastic.training.data.loader import BatchInfo, ElasticLoader
from elastic.training.data.plan import Position
from elastic.training.loop.step_loop import StepLoop
from elastic.training.step import Step
from elastic.world.world import World


def follow(loop: StepLoop, loader: ElasticLoader, passed: Pass) -> Iterator[Any]:
    """The batches of ``loader`` within the steps of another one."""
    following = loader.following
    following.start(passed, epochs_are_counted=loop.scope.owns_epochs)
    world: World | None = None
    at: tuple[int, Position] | None = None
    batches: Iterator[tuple[BatchInfo, Any]] = iter(())
    try:
        while True:
            leading = loop.current.leading(loader)
            if leading is None and loader.position.step == len(loader):
                following.end()  # zip(…, strict=True) checks that both have ended
                return
            if leading is None:
                raise following.not_within_a_step()
            leader, step = leading
            if not following.is_newest(passed):
                raise TrainingError(
                    "a loop over the loader continues after a newer one has begun",
                    hint="finish or leave one loop before the next",
                )
            put_backs, next_at = following.put_backs, following.position(step)
            if (world, at) != (loop.lifecycle.world, (put_backs, next_at)):
                world = loop.lifecycle.world
                batches = loader.batches(world.data_rank, world.data_size, keeps_workers=True)
            assert world is not None
            info, batch = next(batches, (None, None))
            if info is None:
                following.end()
                return
            _check_fits(leader, step, loader, info, world.data_size)
            at = (put_backs, following.give(step))
            yield batch
    except GeneratorExit:
        is_left = following.is_newest(passed) and at is not None and at[0] == following.put_backs
        if is_left and (loop.scope.owns_epochs or loop.current.inside is not None):
            following.end()
            loader.let_workers_go()
        raise


def _check_fits(
    leader: ElasticLoader, step: Step, loader: ElasticLoader, info: BatchInfo, world: int
) -> None:
    """Gradients are weighted by the leader's shares: those of its follower must be the same."""
    if len(step) != 1 or info.micro_batches != 1:
        raise TrainingError(
            f"step {step.number} is cut into micro-batches: {len(step)} of the first loader, "
            f"{info.micro_batches} of the one that is read within its steps",
            hint="read two loaders together without micro_batch=, or put both datasets into one "
            "loader: DataLoader(torch.utils.data.StackDataset(first, second), …)",
        )
    start, stop = leader.plan.span(step.index)
    samples, others = stop - start, info.global_samples
    if not following.same_shares(leader.plan, samples, loader.plan, others, world):
        raise TrainingError(
            f"step {step.number} has {samples} samples of the first loader and "
            f"{others} of the second: the {world} ranks would have other shares of "
            "one than of the other, and gradients wrong weights",
            hint="give both the same run.loader(…, global_batch=…), and both "
            "DataLoader(…, drop_last=True), so that no last batch is smaller",
        )
