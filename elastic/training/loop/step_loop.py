"""Begins and commits steps. A step begins when the script gets it, and commits when the script
requests the next one."""

from __future__ import annotations

from typing import Any

import torch

from elastic.errors import TrainingError, WorldChanged
from elastic.hangs.phases import phases
from elastic.telemetry.ledger import Ledger
from elastic.telemetry.log import get_logger
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.randomness import derive_seed, seed_all, seed_between_steps
from elastic.training.lifecycle import Lifecycle
from elastic.training.loop.boundary import StepBoundary
from elastic.training.loop.commits import Commits
from elastic.training.loop.counted_rates import CountedRates
from elastic.training.loop.reading_ahead import ReadingAhead
from elastic.training.loop.scope import CallEnded, Scope
from elastic.training.misuse.early_leave import EarlyLeave
from elastic.training.misuse.module_structures import ModuleStructures
from elastic.training.misuse.source.counted_epochs import refuse_range
from elastic.training.misuse.weight_averages import WeightAverages
from elastic.training.recovery.bootstrap import Bootstrap
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.training_state import TrainingState
from elastic.training.step import Batches, Step, StepBatch
from elastic.world.world import World

EPOCHS = "run.epochs"  # the place between two epochs
OWN_LOOP = "run.begin"  # the place of steps in the script's own loop


class StepLoop:
    """The loop over steps. One per process."""

    def __init__(
        self,
        *,
        state: TrainingState,
        scope: Scope,
        lifecycle: Lifecycle,
        strategies: Strategies,
        bootstrap: Bootstrap,
        boundary: StepBoundary,
        commits: Commits,
        early_leave: EarlyLeave,
        ledger: Ledger,
    ) -> None:
        self.current = state.current
        self.scope = scope
        self.lifecycle = lifecycle
        self.bootstrap = bootstrap
        self._job = state.job
        self._optimizer_watch = state.optimizer_watch
        self._progress = state.progress
        self._strategies = strategies
        self._boundary = boundary
        self._commits = commits
        self.early_leave = early_leave
        self.averages = WeightAverages(state.job)
        self.structures = ModuleStructures()
        commits.copies = self.averages.copies
        self._ledger = ledger
        self.reading_ahead = ReadingAhead()
        self._has_warned_of_counts = False
        self.left_held: Step | None = None  # its iterator ends if the script requests more
        self._ended: World | None = None  # the world whose end was raised in the script

    # -- loops --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The job's current epoch."""
        return self._job.progress.epoch

    @property
    def step_number(self) -> int:
        """The number of the current step or, between two steps, of the next one."""
        return self._job.progress.step

    def end_epoch(self) -> None:
        """Begin the next epoch, at the script's request."""
        # A step that is committed only now ends after the code that follows the epoch's loop: its
        # boundary belongs to the next epoch, or that code would run again after a fault.
        self._job.progress.epoch += 1
        self._job.progress.place = EPOCHS
        self._leave_held()
        self.settle()

    def begin_epochs(self) -> None:
        """The script begins to count epochs: it may resume here, with a new epoch."""
        self._progress.reach(EPOCHS)

    @property
    def is_peek(self) -> bool:
        """Whether a loop can only inspect data, because nothing to train is registered yet."""
        is_set_up = self.lifecycle.is_restored or self.scope.in_retry or self._job.tracked
        return not is_set_up

    @property
    def resumes(self) -> bool:
        """Whether loops may resume, in the next world or from a checkpoint, while the script counts
        from its beginning."""
        return self.scope.in_retry or self._boundary.saves

    def begin_pass(self, loader: ElasticLoader) -> None:
        """Begin a loop over ``loader``: in the run's epoch, or in the loader's next epoch."""
        self.settle()
        self._progress.begin_pass(self._job.name_of(loader))
        # Not only before the next step: at the end of an epoch, an evaluation comes before it.
        self._commits.call_back_again()
        self.current.last_left = None
        if self.scope.owns_epochs:
            phases.plan_steps(self.scope.plan(id(loader), len(loader)))
            loader.begin_epoch(self._job.progress.epoch)
            return
        self.scope.passes += 1
        if self.resumes and self.scope.passes <= 2:
            refuse_range(
                self.scope.passes,
                has_own_state=self._job.has_own_state,
                is_in_retry=self.scope.in_retry,
            )
        if self.scope.passes == 1 and self.resumes and not self._job.user:
            self._warn_of_counts()
        if self.scope.passes == 2 and self.resumes and not self._job.user:
            get_logger().warning(
                "this is the second pass over the loader without run.epochs: after a fault, the "
                "loop resumes, but `for epoch in range(n)` begins at 0, and the job trains too "
                "long. Use `for epoch in run.epochs(n)`, or keep the count in run.state"
            )
        loader.begin_pass()
        self._job.progress.epoch = loader.position.epoch

    def reach_own_step(self) -> None:
        """Begin a step of the script's own loop: it may resume here."""
        if self._job.progress.place == OWN_LOOP and not self._progress.is_before_place:
            self._progress.script_has_run()
        else:
            self._progress.begin_pass(OWN_LOOP)

    def counted_rates(self) -> CountedRates:
        """A watch over the learning rates, for a pass whose batches the script counts itself."""
        return CountedRates(self._job.all_tracked, self._job.user)

    def _warn_of_counts(self) -> None:
        """Warn in the first pass of an attempt without ``run.epochs`` and with nothing in
        ``run.state``."""
        step = self._job.progress.step
        if step and not self._has_warned_of_counts:
            self._has_warned_of_counts = True
            get_logger().warning(
                "this loop resumes after %d steps without run.epochs: a step or epoch counter in a "
                "local variable restarts at zero, and the job trains too long. Keep the count in "
                "run.state, or use run.epochs",
                step,
            )

    def leave(self, world: World, loader: ElasticLoader, number: int, *, is_first: bool) -> None:
        """Handle a loop over the steps of ``loader`` that is left in the middle, for any reason:
        in step ``number``, which ``is_first`` of the loop.

        After `break` or `return` the current step counts if an optimizer has stepped; after a fault
        of the world it does not. :meth:`settle` distinguishes them; it is not possible here.
        """
        if self.lifecycle.is_changing:
            return  # the frames of an interrupted attempt are cleared
        if self.lifecycle.has_world and world is self.lifecycle.world:
            step = self.current.step
            if step is not None and step.number == number:  # not that of a newer loop
                is_last = loader.position.step + 1 == len(loader)
                self.early_leave.leave_steps(is_first=is_first, is_last=is_last)
            self.current.leave(loader)
            if self._strategies.active.settles_left_loops:
                self.current.last_left = self.current.step
                # If a reduction failed, the next loop settles instead, since it can raise: Python
                # only prints exceptions raised here, where the loop's generator is closed.
                if not any(m.reduction.failure for m in self._job.modules.values()):
                    self._settle_left()

    def _leave_held(self) -> None:
        """Leave a loop whose iterator outlives it, in an attribute or a variable of the module."""
        step, loader = self.current.inside, self.current.loader
        if step is not None and loader is not None and self.lifecycle.has_world:
            self.left_held = step
            self.leave(self.lifecycle.world, loader, step.number, is_first=False)

    def settle(self) -> None:
        """Settle a loop that the script has left: it has continued, so it left deliberately.

        Raises a fault of the world again if the script has caught it in the loop.
        """
        self.early_leave.settle()
        self.refuse_swallowed()
        if self.current.step is not None:
            self.lifecycle.settle()
        self._settle_left()

    def refuse_swallowed(self) -> None:
        """Raise the end of this world again if the script has caught it."""
        if self._ended is not None and self._ended is self.lifecycle.world:
            raise WorldChanged(
                "the script caught the exception that ended this world",
                hint="do not catch it: run.retry continues in the next world",
            )

    def _settle_left(self) -> None:
        loader = self.current.take_left_loader()
        if loader is None:
            return
        loader.stop_workers()
        step = self.current.step
        if step is not None and (step.optimizer_stepped or self._has_new_gradients(step)):
            self.commit()
        self.current.drop()
        self.leave_step()

    def _has_new_gradients(self, step: Step) -> bool:
        return step.is_last_micro_batch and bool(self._optimizer_watch.accumulating(step))

    def leave_step(self) -> None:
        """End a loop: from now on the script runs outside of a step."""
        is_accumulating = self.current.accumulation.since is not None
        if self._strategies.active.can_roll_back and not is_accumulating:
            self._progress.rollback.leave_step()
        if not is_accumulating:
            progress = self._job.progress
            seed_between_steps(self._job.seed, progress.epoch, progress.step + 1)

    # -- steps --------------------------------------------------------------------------------

    def begin(
        self, loader: ElasticLoader | None, first: tuple[StepBatch, Any], rest: Batches
    ) -> Step:
        """Begin a step. Saves first if a save is due: everything before is committed.

        Raises CallEnded if other ranks' functions have returned.
        """
        if self._progress.has_returned:
            raise CallEnded
        if self.current.step is not None:
            raise _second_step(self.current.step, loader)
        number, strategy = self._job.progress.step, self._strategies.active
        self.early_leave.begins(number)
        self.averages.step_begins()
        self.structures.step_begins(self._job.modules.values())
        if self.current.accumulation.since is None:
            self.lifecycle.settle()  # work that the script queued since the last step
            self._commits.call_back_again()
            self._boundary.cross()
            self._progress.before_step(can_undo=strategy.can_roll_back)
        step = Step(number, first, rest, self._begin_micro_batch)
        self._boundary.begin_step(number, self._commits.digest(number))
        self._job.order.begin_step(number)
        for module in self._job.modules.values():
            module.begin_step(step.share)
            module.reduction.may_add_to_earlier = self.current.accumulation.since is None
        if self._job.built is not None:
            self._job.built.begin_step(step.share, self.lifecycle.world.size)
        self.current.begin(step, loader)
        phases.begin_step(number, step.samples)
        try:
            strategy.before_step(step)
        except WorldChanged:
            self._ended = self.lifecycle.world
            raise
        if self._ledger.is_on:
            self._ledger.begin(
                generation=self.lifecycle.world.generation,
                step=number,
                epoch=step.epoch,
                rank=self.lifecycle.world.rank,
                samples=step.indices,
            )
        return step

    def begin_epoch(self) -> None:
        """The script begins an epoch, or resumes in its middle: it draws the same numbers."""
        seed_between_steps(self._job.seed, self._job.progress.epoch, 0)

    def _begin_micro_batch(self, step: Step) -> None:
        rank = self.lifecycle.world.data_rank
        seed_all(derive_seed(self._job.seed, step.number, rank, step.micro_batch))
        is_last = step.is_last_micro_batch
        for module in self._job.modules.values():
            if (
                module.require_backward_grad_sync != is_last
            ):  # setting it costs more than reading it
                module.require_backward_grad_sync = is_last

    def commit(self) -> None:
        """Commit the current step."""
        step, loader = self.current.step, self.current.loader
        if step is None:
            return
        for module in self._job.modules.values():
            if module.reduction.failure is not None:
                raise module.reduction.failure  # the script caught it
            module.reduction.wait()
        self.lifecycle.settle()  # an abort may have ended queued work
        self._boundary.check_flags(step.number)
        self._job.order.end_step(self.lifecycle.replica.whole)
        if not step.is_last_micro_batch:
            raise TrainingError(
                f"step {step.number} was left before the last of its {len(step)} micro-batches",
                hint="iterate over each step to its end: every sample counts once",
            )
        if loader is not None and self._is_evaluation(step):
            raise _no_training(step)
        if loader is not None:
            self.reading_ahead.step_ended(
                step.number,
                [module.module for module in self._job.modules.values()],
                trained=self._has_trained(step),
            )
        self._commits.commit(step, loader)

    def _is_evaluation(self, step: Step) -> bool:
        """Whether the script has used the step's batch without training on it."""
        modules = self._job.modules.values()
        if self._has_trained(step):
            return False
        return not torch.is_grad_enabled() or (
            bool(modules) and not any(m.module.training for m in modules)
        )

    def _has_trained(self, step: Step) -> bool:
        modules = self._job.modules.values()
        return bool(step.stepped) or any(m.reduction.has_forward for m in modules)

    # -- the end ------------------------------------------------------------------------------

    def settle_last(self) -> None:
        """The training function has returned: commit the step in which it left its last loop."""
        self.lifecycle.settle()
        self.refuse_swallowed()
        self._leave_held()
        self.settle()
        if not self._progress.is_catching_up:
            self._progress.end_function()

    def finish(self, *, is_last: bool = False) -> None:
        """At the end of training: save the state unless it is already saved.

        ``is_last``: the process ends, and no other loop follows.
        """
        self._leave_held()
        self.settle()
        if is_last:
            self._progress.end_function()
        if self.scope.in_retry:
            self.lifecycle.settle()
        if not self.lifecycle.is_restored or self.current.step is not None:
            return
        if self._progress.is_before_place:  # at the end of an earlier phase, which is complete
            return
        self._commits.finish()
        if self.scope.passes:  # the code after the last pass has run
            for loader in self._job.loaders.values():
                loader.begin_pass()
        if not self._progress.is_catching_up:
            self._boundary.finish()


def _no_training(step: Step) -> TrainingError:
    return TrainingError(
        f"step {step.number} ran without gradients or in eval mode, but each batch of run.loader "
        "is a training step of the job: a recovery would resume this pass in its middle",
        hint="evaluate with run.shard(DataLoader(…)); for torch.optim.swa_utils.update_bn and "
        "other passes over the data, use the plain DataLoader",
    )


def _second_step(step: Step, loader: ElasticLoader | None) -> TrainingError:
    if loader is None:
        return TrainingError(
            f"run.begin() was called while step {step.number} is not committed",
            hint="call run.commit() at the end of each step, or run.recover(error) after a "
            "fault of the world",
        )
    return TrainingError(
        f"a second loop begins a step while step {step.number} is not committed",
        hint="evaluate with run.shard(loader); finish one training loop before the next",
    )
