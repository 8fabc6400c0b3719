"""The loops that resume: epochs, and steps within an epoch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from elastic.training.loader import ElasticLoader
from elastic.training.step import Step
from elastic.worker.world import world_from_environment

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
    """The steps' data, for steps of one micro-batch: what iterating a loader means."""
    if session.is_peek:
        # Nothing can be trained yet: a look at the data, to learn its shape or statistics.
        world = session.world if session.has_world else world_from_environment()
        for _, data in loader.batches(world.rank, world.size):
            yield data
        return
    with closing(steps(session, loader)) as left:
        for step in left:
            yield step.only_micro_batch()
