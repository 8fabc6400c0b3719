"""What a worker process is in the middle of: its world, its progress, the step in hand.

:class:`Session` holds the state behind :class:`elastic.training.run.Run`, and the rules of when
what happens: a world begins at the first loop (or ``retry``), state is restored at the first
loop, a step begins when it is handed out and commits when the next one is asked for.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch import nn

from elastic.errors import NoWorld, TrainingError
from elastic.process_group.collectives import all_sum
from elastic.process_group.group import ProcessGroup
from elastic.process_group.pending import pending
from elastic.telemetry.journal import EventSink
from elastic.telemetry.ledger import Ledger
from elastic.telemetry.log import get_logger
from elastic.training import loop
from elastic.training.between_steps import BetweenSteps
from elastic.training.checkpointing.saver import Saver
from elastic.training.commits import Commits
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.randomness import derive_seed, seed_all
from elastic.training.gradients.optimizers import OptimizerGuard, inner_optimizers
from elastic.training.gradients.wrap import ElasticDDP
from elastic.training.listeners import Listeners
from elastic.training.recovery.changes import Changes, is_switch
from elastic.training.recovery.reconfiguration import Recovery
from elastic.training.recovery.restore import restore
from elastic.training.state.job_state import JobState
from elastic.training.step import Batch, Batches, OwnBatch, Step
from elastic.training.without_retry import say_without_retry
from elastic.worker.worlds import Worlds
from elastic.world.faults import is_world_fault, may_come_of_garbage
from elastic.world.world import World, largest_world


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
        # Whose loop was left in its middle, while nobody knows whether by the script's own will.
        self._left_loader: ElasticLoader | None = None
        self.in_retry = False
        self.owns_epochs = False  # run.epochs counts them, otherwise each pass of a loader is one
        self.saver = saver
        self.group = group
        self.ledger = ledger
        self.journal = journal
        self._world: World | None = None
        self._passes = 0  # of this attempt, over loaders whose epochs nobody counts
        self._is_restored = False
        self._is_registered_in_attempt = False  # something, by the function that retry calls
        self._outside: JobState | None = None  # what was registered before it
        self._inherited: dict[str, Any] | None = None  # state for what it registers anew
        self.worlds: Worlds | None = None  # an agent that changes worlds without a restart
        self._in_process = False
        self._has_warned_of_foreign_group = False
        self.changes = Changes(self)
        self.between = BetweenSteps(self)
        self.listeners = Listeners()
        self._loader: ElasticLoader | None = None  # whose step is in hand
        self.commits = Commits(self)
        self.guard = OptimizerGuard(lambda: self.current_step)

    def connect(self, link: str) -> None:
        """Say hello to the agent, which may change worlds without a restart from now on."""
        self.worlds = worlds = Worlds(
            abort=self.group.abort,
            position=self.changes.beat,
            current_step=self.changes.current_step,
        )
        self.set_saver(self.saver)
        worlds.connect(link, local_rank=int(os.environ.get("LOCAL_RANK", "0")))

    def set_saver(self, saver: Saver) -> None:
        """Save with this one. Before the state is restored."""
        self.saver = saver
        if self.worlds is not None:
            saver.is_superseded = self.worlds.is_superseded
            saver.is_permitted = self.worlds.is_permitted
        for module in self.job.modules.values():
            module.reduction.flags = self.between.flags if saver.is_on else None

    # -- what the script registers ------------------------------------------------------------

    def wrap(self, module: nn.Module, options: dict[str, Any]) -> ElasticDDP:
        """Make a module part of the job's state."""
        self._refuse_when_restored("wrap")
        self._is_registered_in_attempt |= self.in_retry
        wrapped = ElasticDDP(module, **options)
        wrapped.reduction.flags = self.between.flags if self.saver.is_on else None
        count = len(self.job.modules)
        self.job.modules["model" if count == 0 else f"model{count}"] = wrapped
        self.guard.watch(wrapped)
        return wrapped

    def track(self, named: dict[str, Any]) -> None:
        """Make objects with a state_dict part of the job's state."""
        self._refuse_when_restored("track")
        self._is_registered_in_attempt |= self.in_retry
        for name, tracked in named.items():
            self.job.track(name, tracked)
            self.guard.allow(name, tracked)
            for attribute, inner in inner_optimizers(tracked).items():
                self.job.track(f"{name}.{attribute}", inner)
                self.guard.allow(f"{name}.{attribute}", inner)

    def _refuse_when_restored(self, call: str) -> None:
        if self._is_restored:
            raise TrainingError(
                f"run.{call}() comes too late: the first loop, or run.begin(), has restored the "
                "job's state already",
                hint=f"call run.{call}() before `for … in run.epochs(…)`, the loader, run.retry "
                "and run.begin()",
            )

    def add_loader(self, loader: Any, **options: Any) -> ElasticLoader:
        """Make a loader part of the job's state, and its steps the job's."""
        self._refuse_when_restored("loader")
        self._is_registered_in_attempt |= self.in_retry
        count = len(self.job.loaders)
        name = "data" if count == 0 else f"data{count}"
        self.job.loaders[name] = made = ElasticLoader(
            loader,
            seed=self.job.seed,
            largest_world=largest_world(),
            drive=lambda driven: loop.batches(self, driven),
            index=lambda asked: loop.index(self, asked),
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
    def is_restored(self) -> bool:
        """Whether the job has its state: it can be saved."""
        return self._is_restored

    @property
    def is_in_process(self) -> bool:
        """Whether worlds change without a restart."""
        return self._in_process

    @property
    def has_world(self) -> bool:
        """Whether the first world has begun."""
        return self._world is not None

    def enter_world(self) -> World:
        """Form the world, unless there is one."""
        if self._world is None:
            if self._in_process:
                self.changes.enter_next()
            else:
                self._world = self.group.form()
                if self.worlds is not None:
                    self.worlds.formed(self._world.generation)
                    if not self._has_warned_of_foreign_group:
                        say_without_retry(self._world)
        return self.world

    def rank_and_size(self) -> tuple[int, int]:
        """Of the present world; forms the first one."""
        world = self.enter_world()
        return world.rank, world.size

    def enter_loop(self) -> None:
        """Form the world and restore the state, unless that has happened."""
        if self._is_restored:
            return
        if self._inherited is not None:
            self._inherit(self._inherited)
            return
        world = self.enter_world()
        if not self._is_restored:
            generation = restore(world, self.job, self.saver, self.journal)
            self.begin_world(dataclasses.replace(world, generation=generation))
            if self.job.progress.step:
                self.recovery.expect_weights()

    def restore_if_complete(self) -> None:
        """Within retry, once model, optimizer and loader are registered: what the function asks
        before its first loop is the restored state."""
        job = self.job
        if self.in_retry and job.modules and job.tracked and job.loaders:
            self.enter_loop()

    def begin_world(self, world: World) -> None:
        """State is restored and the same on all ranks: training goes on in ``world``."""
        self._world = world
        for module in self.job.modules.values():
            module.enter_world()
        self._is_restored = True
        self.commits.enter_world()
        self.between.enter_world()
        self.ledger.start(
            generation=world.generation,
            step=self.job.progress.step,
            rank=world.rank,
            size=world.size,
            node=world.node,
        )
        self.listeners.begin(world)

    def end_world(self, *, broken: bool) -> None:
        """Take the group down: the next one may be built."""
        self.saver.leave(broken=broken)
        if broken:
            self.group.abort()
        for module in self.job.modules.values():
            module.leave_world()
        self.group.destroy(is_for_next=True)

    # -- attempts -----------------------------------------------------------------------------

    def begin_attempt(self, *, is_again: bool = False) -> None:
        """The training function is about to run."""
        self.commits.callbacks.begin_attempt(is_again=is_again)
        self.listeners.begin_attempt(is_again=is_again)
        self._passes = 0
        if not is_again:
            self._outside = self.job.registered()
        elif self._is_registered_in_attempt:
            self._register_anew()
        if self.worlds is not None and not self._is_restored:
            if self.group.is_foreign:
                self._warn_of_foreign_group()
            else:
                self._in_process = True
        if not (self.job.modules or self.job.loaders):
            if not self._in_process:
                self.enter_world()
            return  # what the job consists of is registered inside the function
        self.enter_loop()  # the function may ask run.state how far the job is

    def _register_anew(self) -> None:
        """The function makes model, optimizer and loader by itself, and does so again: the new
        ones take over the state of those that its last call has made."""
        assert self._outside is not None
        self._inherited = self.job.tree()
        for module in self.job.modules.values():
            module.leave_world()
        self.job.go_back_to(self._outside)
        self.guard.go_back_to(self.job)
        self.changes.recovery.register_anew()
        self._is_restored = self._is_registered_in_attempt = False

    def _inherit(self, tree: dict[str, Any]) -> None:
        self.job.check(tree, "the state that this job has trained")
        self.job.apply(tree)
        self._inherited = None
        for module in self.job.modules.values():
            module.enter_world()
        self._is_restored = True
        self.recovery.expect_weights()

    def _warn_of_foreign_group(self) -> None:
        if not self._has_warned_of_foreign_group:
            self._has_warned_of_foreign_group = True
            get_logger().warning(
                "torch.distributed.init_process_group() was called before run.retry(): recovery "
                "in process is off, and every change of the world restarts all workers from the "
                "last checkpoint. Remove the call (and destroy_process_group): run.retry and the "
                "first loop make the process group; elastic.join(backend=…) chooses its backend."
            )

    def end_attempt(self) -> None:
        """The training function has returned. Nobody is done before everybody is: a rank that
        fails in the last step still finds peers that have its state."""
        pending.settle()
        self.finish()
        if self._in_process:
            if self.has_world and self.world.size > 1 and not self.recovery.is_catching_up:
                all_sum([1.0])
            self.recovery.retries += 1

    def is_fault(self, error: BaseException) -> bool:
        """Whether an exception says that the world is over, and another one can go on."""
        if not self._in_process or self.worlds is None:
            return False
        if is_world_fault(error) or is_switch(error):
            return True
        # Whatever the script makes of results that an abort has left is not its mistake.
        return pending.may_be_garbage and may_come_of_garbage(error)

    def recover(self, error: BaseException) -> None:
        """Go on in the next world, after a fault or a switch."""
        self.changes.recover(error)

    @property
    def recovery(self) -> Recovery:
        """What this rank knows of its own progress."""
        return self.changes.recovery

    # -- steps --------------------------------------------------------------------------------

    @property
    def is_peek(self) -> bool:
        """Whether a loop now can only be a look at the data: there is nothing to train yet."""
        return not (self._is_restored or self.in_retry or self.job.tracked)

    def begin_pass(self, loader: ElasticLoader) -> None:
        """A loop over ``loader`` begins: in the run's epoch, or in its own next one."""
        self.settle()
        self.between.left_with = None
        self.recovery.script_has_run()
        if self.owns_epochs:
            loader.begin_epoch(self.job.progress.epoch)
            return
        self._passes += 1
        if self._passes == 2 and self.in_retry and not self.job.user:
            get_logger().warning(
                "this is the second pass over the loader, without run.epochs: after a fault "
                "run.retry calls its function again, where `for epoch in range(n)` begins at 0 "
                "and trains too much. Use `for epoch in run.epochs(n)`, or keep the count in "
                "run.state"
            )
        if loader.position.step == len(loader):
            loader.begin_epoch(loader.position.epoch + 1)
        self.job.progress.epoch = loader.position.epoch

    def begin_alone(self) -> Step:
        """A step without a loader of ours: each rank counts for the same share."""
        if not self.in_retry:
            self.in_retry = True
            self.begin_attempt()
        self.enter_loop()
        info = OwnBatch(self.job.progress.epoch, self.job.progress.step, self.world.size)
        self.recovery.script_has_run()
        step = self.begin(None, (info, None), iter(()))
        step.only_micro_batch()
        return step

    def begin(self, loader: ElasticLoader | None, first: tuple[Batch, Any], rest: Batches) -> Step:
        """A step is handed out. Saves first, if it is time: everything before it is complete."""
        if self.step is not None:
            raise self._second_step(loader)
        number = self.job.progress.step
        if self.commits.accumulated_since is None:
            pending.settle()  # what the script has done since the last step counts from here on
            self.commits.call_back_again()
            if self.worlds is not None:
                self.worlds.wait_until_permitted()
            self.between.pass_boundary()
            if self.can_roll_back:
                self.recovery.before_step(number)
        step = Step(number, first, rest, self._begin_micro_batch, self.recovery.masked(number))
        for module in self.job.modules.values():
            module.begin_step(step.share)
        self.step, self._loader = step, loader
        if self._in_process:
            self.changes.raise_if_due(step)
        if self.ledger.is_on:
            self.ledger.begin(
                generation=self.world.generation,
                step=number,
                epoch=step.epoch,
                rank=self.world.rank,
                samples=step.indices,
            )
        return step

    def _begin_micro_batch(self, step: Step) -> None:
        seed_all(derive_seed(self.job.seed, step.number, self.world.rank, step.micro_batch))
        is_last = step.is_last_micro_batch
        for module in self.job.modules.values():
            if module.require_backward_grad_sync != is_last:  # to set it costs more than to look
                module.require_backward_grad_sync = is_last

    def commit(self) -> None:
        """The step in hand has taken effect."""
        step, loader = self.step, self._loader
        if step is None:
            return
        for module in self.job.modules.values():
            if module.reduction.failure is not None:
                raise module.reduction.failure  # the script has swallowed it
            module.reduction.wait()
        pending.settle()  # what was queued may have ended because the group was aborted
        if not step.is_last_micro_batch:
            raise TrainingError(
                f"step {step.number} was left before the last of its {len(step)} micro-batches",
                hint="iterate each step to its end: every sample counts once",
            )
        self.commits.commit(step, loader)

    @property
    def can_roll_back(self) -> bool:
        """Whether the state of the last commit may be needed: by peers, or for a checkpoint."""
        return self._in_process or self.saver.is_on

    def _second_step(self, loader: ElasticLoader | None) -> TrainingError:
        assert self.step is not None
        if loader is None:
            return TrainingError(
                f"run.begin() while step {self.step.number} has begun and is not committed",
                hint="call run.commit() at the end of each step, or run.recover(error) after a "
                "fault of the world",
            )
        return TrainingError(
            f"a second loop begins a step while step {self.step.number} has begun",
            hint="evaluate with run.shard(loader); finish one training loop before the next",
        )

    def leave(self, world: World, loader: ElasticLoader) -> None:
        """The loop over the steps of ``loader`` is left in the middle, for whatever reason.

        After `break` or `return` the step in hand counts if an optimizer has stepped; after a
        fault of the world it does not. Here they look the same: :meth:`settle` knows.
        """
        if self.is_in_process and self.changes.is_recovering:
            return  # what is left of an interrupted attempt goes away
        if world is self._world:
            self._left_loader = loader
            if not self._in_process:
                self.between.left_with = self.step
                self.settle()

    def settle(self) -> None:
        """The script goes on after it has left a loop: it was its own will."""
        loader, self._left_loader = self._left_loader, None
        if loader is None:
            return
        loader.let_workers_go()
        step = self.step
        if step is not None and (step.optimizer_stepped or self._has_new_gradients(step)):
            self.commit()
        self.drop_step()
        self.script_goes_on()

    def _has_new_gradients(self, step: Step) -> bool:
        return step.is_last_micro_batch and bool(self.guard.accumulating(step))

    def script_goes_on(self) -> None:
        """A loop has ended: the script's own code runs outside of one from here on."""
        if self.can_roll_back and self.commits.accumulated_since is None:
            self.recovery.rollback.script_goes_on()

    @property
    def current_step(self) -> Step | None:
        """The step that the script is inside of."""
        return self.step if self._left_loader is None else None

    def left_step(self, loader: ElasticLoader) -> Step | None:
        """The step that a loop over ``loader`` was left in, until that is settled."""
        return self.step if self._left_loader is loader else None

    def leading(self, loader: ElasticLoader) -> tuple[ElasticLoader, Step] | None:
        """The other loader that the script is inside a step of, and the step."""
        step, leader = self.current_step, self._loader
        if step is None or leader is None or leader is loader:
            return None
        return leader, step

    def drop_step(self) -> None:
        """The step in hand is none any more."""
        self.step = self._loader = self._left_loader = None

    def drop_steps(self) -> None:
        """Nothing that is not committed has happened."""
        self.drop_step()
        self.commits.drop()

    # -- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is complete so far: save what is not saved yet."""
        self.settle()
        if self.in_retry:
            pending.settle()
        if not self._is_restored or self.step is not None:
            return
        self.commits.finish()
        if not self.recovery.is_catching_up:
            self.saver.save(self.job)

    def close(self, *, clean: bool, error: str = "", is_of_the_world: bool = False) -> None:
        """The process ends; ``error`` is what ended it, for its agent."""
        self.guard.close()
        if clean and not self.between.has_gone:
            self._close_in_order()
        else:
            # In-process, who goes on has the state. Otherwise all processes end now.
            is_held = is_of_the_world and self._in_process
            self.between.end_with("" if is_held else error)
            if self._in_process:
                self.group.abort()  # peers need not wait for this process to be gone
        # After an error nothing else is touched: a step is in hand, peers may be gone.
        if self.worlds is not None:
            self.worlds.close(clean=clean, error=error)

    def _close_in_order(self) -> None:
        self.finish()
        self.between.end_well()
        for module in self.job.modules.values():
            module.leave_world()
        self.group.destroy()
