"""The loops that resume: epochs, and steps within an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from elastic.errors import TrainingError
from elastic.training.data.consumers import Consumer, consumer_of
from elastic.training.data.following import Pass, follow
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.plan import Position
from elastic.training.step import Step
from elastic.world.world import world_from_environment

if TYPE_CHECKING:
    from elastic.training.session import Session


def epochs(session: Session, count: int) -> Iterator[int]:
    """The epochs that are left of ``count``; the first may be in its middle.

    An epoch is over when the next one is asked for: what the script does after the loader
    (evaluation, schedulers) belongs to it, and happens again if it was interrupted.
    """
    session.enter_loop()
    session.owns_epochs = True
    try:
        while session.job.progress.epoch < count:
            yield session.job.progress.epoch
            session.settle()
            session.job.progress.epoch += 1
    finally:
        session.owns_epochs = False
    session.finish()


def steps(session: Session, loader: ElasticLoader) -> Generator[Step]:
    """The steps that are left of the loader's epoch.

    A step begins when it is handed out and commits when the next is asked for, or when the loop
    is left after an optimizer has stepped. So a peek costs nothing.
    """
    session.enter_loop()
    session.begin_pass(loader)
    world = session.world
    batches = loader.batches(world.rank, world.size, keeps_workers=True)
    try:
        for first in batches:
            yield session.begin(loader, first, batches)
            session.commit()
        session.script_goes_on()
    except GeneratorExit:
        session.leave(world, loader)
        raise


def batches(session: Session, loader: ElasticLoader) -> Iterator[Any]:
    """The steps' data, for steps of one micro-batch: what iterating a loader means.

    Within a step of another loader: batches of this one, which follows it.
    """
    passed = loader.following.new_pass()
    iterator = _batches(session, loader, passed)
    passed.iterator = weakref.ref(iterator)
    return iterator


def _batches(session: Session, loader: ElasticLoader, passed: Pass) -> Iterator[Any]:
    consumer = Consumer()
    if passed.is_first or not loader.following.follows:  # a follower may begin one in each step
        # No name here for the iterator: it would keep itself alive.
        consumer = consumer_of(passed.iterator and passed.iterator(), everywhere=passed.is_first)
    if session.is_peek:
        # Nothing can be trained yet: a look at the data, to learn its shape or statistics.
        loader.following.looked(passed)
        world = session.world if session.has_world else world_from_environment()
        for _, data in loader.batches(world.rank, world.size):
            yield data
        return
    consumer.refuse_cycle()
    if session.leading(loader) is not None:
        yield from follow(session, loader, passed)
        return
    loader.following.looked(passed)
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
    with closing(steps(session, loader)) as left:
        for step in left:
            consumer.warn_of_count(step.index)
            consumer = Consumer()
            yield step.only_micro_batch()


def index(session: Session, loader: ElasticLoader) -> int:
    """Within the epoch: of the present step of the loader, or else of the next one."""
    if not session.is_peek:
        session.enter_loop()
    position = loader.position
    left = session.left_step(loader)
    if left is not None and left.optimizer_stepped:
        position = Position(position.epoch, position.step + 1)  # settled when the next loop begins
    if session.owns_epochs:
        return position.step if position.epoch == session.job.progress.epoch else 0
    return position.step % len(loader)
