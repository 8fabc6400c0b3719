"""Reads a loader within the steps of another loader (:mod:`elastic.training.data.following`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic.compiling import not_compiled
from elastic.errors import TrainingError
from elastic.training.data import following
from elastic.training.data.following import Pass
from elastic.training.data.loader import BatchInfo, ElasticLoader
from elastic.training.data.plan import Position
from elastic.training.loop.step_loop import StepLoop
from elastic.training.step import Step
from elastic.world.world import World


@not_compiled
def follow(loop: StepLoop, loader: ElasticLoader, passed: Pass) -> Iterator[Any]:
    """The batches of ``loader`` within the steps of another loader."""
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
                    "a loop over the loader continues after a newer loop has begun",
                    hint="finish or leave a loop before you start the next one",
                )
            resets, next_at = following.resets, following.position(step)
            if (world, at) != (loop.lifecycle.world, (resets, next_at)):
                world = loop.lifecycle.world
                batches = loader.batches(world.data_rank, world.data_size, keeps_workers=True)
            assert world is not None
            info, batch = next(batches, (None, None))
            if info is None:
                following.end()
                return
            _check_fits(leader, step, loader, info, world.data_size)
            at = (resets, following.record_batch(step))
            yield batch
    except GeneratorExit:
        is_left = following.is_newest(passed) and at is not None and at[0] == following.resets
        if is_left and (loop.scope.owns_epochs or loop.current.inside is not None):
            following.end()
            loader.stop_workers()
        raise


def _check_fits(
    leader: ElasticLoader, step: Step, loader: ElasticLoader, info: BatchInfo, world: int
) -> None:
    """Raise TrainingError unless both loaders have the same shares: the leader's are the weights
    of the gradients."""
    if len(step) != 1 or info.micro_batches != 1:
        raise TrainingError(
            f"step {step.number} is divided into micro-batches: {len(step)} of the first loader, "
            f"{info.micro_batches} of the loader that is read within its steps",
            hint="read two loaders together without micro_batch=, or put both datasets into one "
            "loader: DataLoader(torch.utils.data.StackDataset(first, second), …)",
        )
    start, stop = leader.plan.span(step.index)
    samples, others = stop - start, info.global_samples
    if not following.same_shares(leader.plan, samples, loader.plan, others, world):
        raise TrainingError(
            f"step {step.number} has {samples} samples of the first loader and {others} of the "
            f"second: their shares on the {world} ranks would differ, and gradients would have "
            "wrong weights",
            hint="use the same run.loader(…, global_batch=…) for both, and "
            "DataLoader(…, drop_last=True), so that no last batch is smaller",
        )
