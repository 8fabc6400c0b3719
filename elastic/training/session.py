"""What a worker process is in the middle of: its world, its progress, the step in hand.

:class:`Session` holds the state behind :class:`elastic.training.run.Run`, and the rules of when
what happens: a world begins at the first loop (or ``retry``), state is restored at the first
loop, a step begins when it is handed out and commits when the next one is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from elastic.errors import NoWorld, TrainingError
from elastic.telemetry.journal import EventSink
from elastic.telemetry.ledger import Ledger
from elastic.training import loop
from elastic.training.loader import BatchInfo, ElasticLoader
from elastic.training.optimizers import OptimizerGuard
from elastic.training.randomness import derive_seed, seed_all
from elastic.training.restore import restore
from elastic.training.saving import Saver
from elastic.training.state import JobState
from elastic.training.step import Batches, Step
from elastic.training.wrap import ElasticDDP
from elastic.worker.process_group import ProcessGroup
from elastic.worker.world import World, largest_world


class Session:
    """One per process. See the module."""

    def __init__(
        self,
        *,
        seed: int,
        group: ProcessGroup,
        saver: Saver,
        ledger: Ledger,
        journal: EventSink,
    ) -> None:
        self.job = JobState(seed=seed)
        self.step: Step | None = None
        self.after_step: list[Callable[[Step], object]] = []
        self.in_retry = False
        self.owns_epochs = False  # run.epochs counts them, otherwise each pass of a loader is one
        self.saver = saver
        self._group = group
        self._ledger = ledger
        self._journal = journal
        self._world: World | None = None
        self._is_restored = False
        self._on_world: list[Callable[[World], object]] = []
        self._on_main: list[Callable[[], object]] = []
        self._loader: ElasticLoader | None = None  # whose step is in hand
        self._guard = OptimizerGuard(lambda: self.step)

    # -- what the script registers ------------------------------------------------------------

    def wrap(self, module: nn.Module, options: dict[str, Any]) -> ElasticDDP:
        """Make a module part of the job's state."""
        self._refuse_when_restored("wrap")
        wrapped = ElasticDDP(module, **options)
        count = len(self.job.modules)
        self.job.modules["model" if count == 0 else f"model{count}"] = wrapped
        self._guard.watch(wrapped)
        return wrapped

    def track(self, named: dict[str, Any]) -> None:
        """Make objects with a state_dict part of the job's state."""
        self._refuse_when_restored("track")
        for name, tracked in named.items():
            self.job.track(name, tracked)
            self._guard.allow(tracked)

    def _refuse_when_restored(self, call: str) -> None:
        if self._is_restored:
            raise TrainingError(
                f"run.{call}() after the first loop has begun: state is already restored",
                hint=f"call run.{call}() before `for … in run.epochs(…)` or the loader",
            )

    def add_loader(self, loader: Any, **options: Any) -> ElasticLoader:
        """Make a loader part of the job's state, and its steps the job's."""
        self._refuse_when_restored("loader")
        count = len(self.job.loaders)
        name = "data" if count == 0 else f"data{count}"
        self.job.loaders[name] = made = ElasticLoader(
            loader,
            seed=self.job.seed,
            largest_world=largest_world(),
            drive=lambda driven: loop.batches(self, driven),
            **options,
        )
        if options.get("global_batch") is None:
            self.job.open_batch.add(name)
        return made

    # -- the world ----------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The present world. Raises NoWorld before the first."""
        if self._world is None:
            raise NoWorld(
                "there is no world yet: it begins with run.retry or the first loop",
                hint="read run.world inside the training function; run.is_main is False until then",
            )
        return self._world

    @property
    def has_world(self) -> bool:
        """Whether the first world has begun."""
        return self._world is not None

    def enter_world(self) -> World:
        """Form the world, unless there is one."""
        if self._world is None:
            self._world = self._group.form()
        return self._world

    def rank_and_size(self) -> tuple[int, int]:
        """Of the present world; forms the first one."""
        world = self.enter_world()
        return world.rank, world.size

    @contextmanager
    def retrying(self) -> Iterator[None]:
        """Around the training function. In restart mode every fault ends the process."""
        self.enter_world()
        self.in_retry = True
        try:
            yield
        finally:
            self.in_retry = False
        self.finish()

    def enter_loop(self) -> None:
        """Form the world and restore the state, unless that has happened."""
        if self._is_restored:
            return
        generation = restore(self.enter_world(), self.job, self.saver, self._journal)
        self._world = dataclasses.replace(self.world, generation=generation)
        for module in self.job.modules.values():
            module.enter_world()
        self._is_restored = True
        self._ledger.start(
            generation=self.world.generation,
            step=self.job.progress.step,
            rank=self.world.rank,
            size=self.world.size,
            node=self.world.node,
        )
        for heard in self._on_world:
            heard(self.world)
        if self.world.rank == 0:
            for promoted in self._on_main:
                promoted()

    def call_on_world(self, callback: Callable[[World], object]) -> None:
        """Call back for each world whose state is restored, the present one included."""
        self._on_world.append(callback)
        if self._is_restored:
            callback(self.world)

    def call_on_main(self, callback: Callable[[], object]) -> None:
        """Call back whenever this rank becomes main, or is it already."""
        self._on_main.append(callback)
        if self._is_restored and self.world.rank == 0:
            callback()

    # -- steps --------------------------------------------------------------------------------

    @property
    def is_peek(self) -> bool:
        """Whether a loop now can only be a look at the data: there is nothing to train yet."""
        return not (self._is_restored or self.in_retry or self.job.tracked)

    def begin_pass(self, loader: ElasticLoader) -> None:
        """A loop over ``loader`` begins: in the run's epoch, or in its own next one."""
        if self.owns_epochs:
            loader.begin_epoch(self.job.progress.epoch)
            return
        if loader.position.step == len(loader):
            loader.begin_epoch(loader.position.epoch + 1)
        self.job.progress.epoch = loader.position.epoch

    def begin(self, loader: ElasticLoader, first: tuple[BatchInfo, Any], rest: Batches) -> Step:
        """A step is handed out. Saves first, if it is time: everything before it is complete."""
        if self.step is not None:
            raise TrainingError(
                f"a second loop begins a step while step {self.step.number} is in hand",
                hint="evaluate with run.shard(loader); finish one training loop before the next",
            )
        self.saver.save_if_due(self.world, self.job)
        step = Step(self.job.progress.step, first, rest, self._begin_micro_batch)
        for module in self.job.modules.values():
            module.reduction.begin(step.share)
        self.step, self._loader = step, loader
        return step

    def _begin_micro_batch(self, step: Step) -> None:
        seed_all(derive_seed(self.job.seed, step.number, self.world.rank, step.micro_batch))
        for module in self.job.modules.values():
            module.require_backward_grad_sync = step.is_last_micro_batch

    def commit(self) -> None:
        """The step in hand has taken effect."""
        step, loader = self.step, self._loader
        if step is None or loader is None:
            return
        if not step.is_last_micro_batch:
            raise TrainingError(
                f"step {step.number} was left before the last of its {len(step)} micro-batches",
                hint="iterate each step to its end: every sample counts once",
            )
        self.step = self._loader = None
        self.job.progress.step += 1
        loader.advance()
        if self._ledger.is_on:
            self._ledger.step(
                generation=self.world.generation,
                step=step.number,
                epoch=step.epoch,
                rank=self.world.rank,
                samples=step.indices,
            )
        for done in self.after_step:
            done(step)

    def leave(self) -> None:
        """The loop is left early: the step in hand counts if an optimizer has stepped."""
        if self.step is not None and self.step.optimizer_stepped:
            self.commit()
        self.step = self._loader = None

    # -- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is complete so far: save what is not saved yet."""
        if self._is_restored and self.step is None:
            self.saver.save(self.world, self.job)

    def close(self, *, clean: bool) -> None:
        """The process ends."""
        self._guard.close()
        if not clean:
            return  # a step in hand, peers that may be gone: touch nothing
        self.finish()
        if self._is_restored and self._ledger.is_on:
            self._ledger.end(
                generation=self.world.generation,
                step=self.job.progress.step,
                rank=self.world.rank,
                sha256=self.job.weights_sha256(),
            )
        for module in self.job.modules.values():
            module.leave_world()
        self._group.destroy()
