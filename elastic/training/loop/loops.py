"""Loops that resume: over epochs, steps, and batches."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from elastic.compiling import not_compiled
from elastic.errors import TrainingError
from elastic.hangs.facts import DATA, SCRIPT
from elastic.hangs.phases import phases
from elastic.training.data.following import Pass
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.plan import Position
from elastic.training.loop.consumers import Consumer, consumer_of
from elastic.training.loop.counted_rates import CountedRates
from elastic.training.loop.follower import follow
from elastic.training.loop.generators import created_too_early
from elastic.training.loop.scope import Scope
from elastic.training.loop.step_loop import StepLoop
from elastic.training.misuse.source.counted_epochs import refuse_break
from elastic.training.state.job_state import JobState
from elastic.training.step import Step
from elastic.world.world import world_from_environment


@not_compiled
def epochs(loop: StepLoop, count: int) -> Iterator[int]:
    """The remaining epochs of ``count``; the first one may resume in its middle.

    An epoch ends when the next one begins: the code after the loop over the loader
    (evaluation, schedulers) is part of it, and is repeated if interrupted.
    """
    loop.bootstrap.enter_loop()
    loop.scope.owns_epochs, loop.scope.epochs = True, count
    loop.scope.epoch_steps.clear()
    loop.begin_epochs()
    try:
        while loop.epoch < count:
            loop.begin_epoch()
            yield loop.epoch
            loop.end_epoch()
    except GeneratorExit:
        if loop.epoch + 1 < count:
            loop.early_leave.leave()
        raise
    finally:
        loop.scope.owns_epochs, loop.scope.epochs = False, None
    loop.finish()


def steps_left(scope: Scope, job: JobState) -> int | None:
    """The number of remaining steps: from `run.plan_steps`, else from all epochs. None if the
    script counts steps itself or has several loaders."""
    if scope.total_steps is not None:
        return max(0, scope.total_steps - job.progress.step)
    if scope.epochs is None or len(job.loaders) != 1:
        return None
    (loader,) = job.loaders.values()
    position, epoch = loader.position, job.progress.epoch
    done = position.step if position.epoch == epoch else 0
    return max(0, (scope.epochs - epoch) * len(loader) - done)


@not_compiled
def steps(loop: StepLoop, loader: ElasticLoader) -> Generator[Step]:
    """The remaining steps of the loader's epoch.

    A step begins when it is yielded. It commits when the next one is requested, or when the loop is
    left after an optimizer has stepped. So a peek at the first batch has no effect.
    """
    if loop.scope.in_retry:
        loop.scope.generators.refuse()
    loop.bootstrap.enter_loop()
    loop.begin_pass(loader)
    if loader.position.step < len(loader):
        loop.scope.resumed_at = loader.position.step
    world = loop.lifecycle.world
    batches = loader.batches(world.data_rank, world.data_size, keeps_workers=True)
    begun, number = 0, 0
    phases.enter(DATA)
    try:
        for first in batches:
            begun, number = begun + 1, loop.step_number
            step = loop.begin(loader, first, batches)
            yield step
            if step is loop.left_held:
                return
            del step
            if loop.lifecycle.world is not world:
                raise created_too_early()  # created by an attempt that has ended
            if loader.position.step + 1 < len(loader):
                loop.early_leave.begins(number + 1)
            loop.commit()
            phases.enter(DATA)
        phases.enter(SCRIPT)
        loop.leave_step()
    except GeneratorExit:
        phases.enter(SCRIPT)
        loop.leave(world, loader, number, is_first=begun <= 1)
        raise


@not_compiled
def batches(loop: StepLoop, loader: ElasticLoader) -> Iterator[Any]:
    """The batches of steps with one micro-batch: what iterating over a loader yields.

    Within a step of another loader, this loader follows that one.
    """
    passed = loader.following.new_pass()
    iterator = _batches(loop, loader, passed)
    passed.iterator = weakref.ref(iterator)
    return iterator


@not_compiled
def _batches(loop: StepLoop, loader: ElasticLoader, passed: Pass) -> Iterator[Any]:
    consumer = Consumer()
    if passed.is_first or not loader.following.follows:  # a follower may begin a pass in each step
        # The iterator must not be a local variable: it would keep itself alive.
        consumer = consumer_of(passed.iterator and passed.iterator(), everywhere=passed.is_first)
    if loop.is_peek:
        # Training cannot begin yet: the script inspects the data, for its shape or statistics.
        loader.following.release(passed)
        world = loop.lifecycle.world if loop.lifecycle.has_world else world_from_environment()
        for _, data in loader.batches(world.data_rank, world.data_size):
            yield data
        return
    consumer.refuse_cycle()
    knows_index, loader.index_was_read = loader.index_was_read, False
    if loop.resumes and not knows_index:
        consumer.refuse_slice(len(loader) - loader.position.step)
    if loop.current.leading(loader) is not None:
        yield from follow(loop, loader, passed)
        return
    loader.following.release(passed)
    loader.following.check_leads()
    if loader.has_item_batches and loader.plan.global_batch > 1:
        raise TrainingError(
            f"with batch_size=None a step has {loader.plan.global_batch} batches of the dataset, "
            "and a rank may have several of them",
            hint="for step in run.steps(loader):\n"
            "    optimizer.zero_grad()\n"
            "    for batch in step:\n"
            "        step.backward(loss_of(batch))\n"
            "    optimizer.step()",
        )
    counts = consumer.counts_from in (0, 1) and not knows_index
    if counts and loop.resumes:
        refuse_break()
    rates: CountedRates | None = None
    with closing(steps(loop, loader)) as left:
        for step in left:
            consumer.warn_of_count(step.index)
            consumer = Consumer()
            if counts and rates is None:
                rates = loop.counted_rates()
            batch = step.only_micro_batch()
            loop.reading_ahead.step_began(batch)
            if rates is not None:
                rates.step_began()
            yield batch
            del batch
            if rates is not None:
                rates.step_ended(step.number)


@not_compiled
def index(loop: StepLoop, loader: ElasticLoader) -> int:
    """The index within the epoch of the loader's current step; between steps, of the next one."""
    if not loop.is_peek:
        loop.bootstrap.enter_loop()
    loader.index_was_read = True
    position = loader.position
    left = loop.current.left_step(loader)
    if left is not None and left.optimizer_stepped:
        position = Position(
            position.epoch, position.step + 1
        )  # committed when the next loop begins
    if loop.scope.owns_epochs:
        return position.step if position.epoch == loop.epoch else 0
    return position.step if loader.resumes_at_end else position.step % len(loader)
