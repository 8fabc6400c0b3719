"""When a step begins and ends: it begins when the script gets it, and commits when the script asks
for the next one."""

from __future__ import annotations

from typing import Any

from elastic.errors import TrainingError
from elastic.hangs.phases import phases
from elastic.telemetry.ledger import Ledger
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.current_step import CurrentStep
from elastic.training.data.loader import ElasticLoader
from elastic.training.data.randomness import derive_seed, seed_all
from elastic.training.halt import Halt
from elastic.training.lifecycle import Lifecycle
from elastic.training.loop.commits import Commits
from elastic.training.loop.scope import Scope
from elastic.training.recovery.bootstrap import Bootstrap
from elastic.training.recovery.progress import RankProgress
from elastic.training.recovery.selection import Strategies
from elastic.training.state.registry import Registry
from elastic.training.step import Batches, Step, StepBatch
from elastic.worker.worlds import Worlds
from elastic.world.world import World


class StepLoop:
    """One per process."""

    def __init__(
        self,
        *,
        registry: Registry,
        current: CurrentStep,
        scope: Scope,
        lifecycle: Lifecycle,
        strategies: Strategies,
        bootstrap: Bootstrap,
        progress: RankProgress,
        checkpoints: CheckpointManager,
        commits: Commits,
        halt: Halt,
        worlds: Worlds | None,
        ledger: Ledger,
    ) -> None:
        self.current = current
        self.scope = scope
        self.lifecycle = lifecycle
        self.bootstrap = bootstrap
        self._registry = registry
        self._job = registry.job
        self._strategies = strategies
        self._progress = progress
        self._checkpoints = checkpoints
        self._commits = commits
        self._halt = halt
        self._worlds = worlds
        self._ledger = ledger

    # -- loops --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The job's present epoch."""
        return self._job.progress.epoch

    def end_epoch(self) -> None:
        """The script asks for the next epoch."""
        self.settle()
        self._job.progress.epoch += 1

    @property
    def is_peek(self) -> bool:
        """Whether a loop now can only inspect the data: there is nothing to train yet."""
        is_set_up = self.lifecycle.is_restored or self.scope.in_retry or self._job.tracked
        return not is_set_up

    def begin_pass(self, loader: ElasticLoader) -> None:
        """A loop over ``loader`` begins: in the run's epoch, or in its own next one."""
        self.settle()
        self.current.last_left = None
        self._progress.script_has_run()
        if self.scope.owns_epochs:
            loader.begin_epoch(self._job.progress.epoch)
            return
        self.scope.passes += 1
        if self.scope.passes == 2 and self.scope.in_retry and not self._job.user:
            get_logger().warning(
                "this is the second pass over the loader, without run.epochs: after a fault "
                "run.retry calls its function again, where `for epoch in range(n)` begins at 0 "
                "and trains too much. Use `for epoch in run.epochs(n)`, or keep the count in "
                "run.state"
            )
        if loader.position.step == len(loader):
            loader.begin_epoch(loader.position.epoch + 1)
        self._job.progress.epoch = loader.position.epoch

    def leave(self, world: World, loader: ElasticLoader) -> None:
        """The loop over the steps of ``loader`` is left in the middle, for whatever reason.

        After `break` or `return` the current step counts if an optimizer has stepped; after a
        fault of the world it does not. Here they look the same: :meth:`settle` knows.
        """
        if self.lifecycle.is_changing:
            return  # the frames of an interrupted attempt are cleared
        if self.lifecycle.has_world and world is self.lifecycle.world:
            self.current.leave(loader)
            if self._strategies.active.settles_left_loops:
                self.current.last_left = self.current.step
                self.settle()

    def settle(self) -> None:
        """The script continues after it has left a loop: it was its own will."""
        loader = self.current.take_left_loader()
        if loader is None:
            return
        loader.let_workers_go()
        step = self.current.step
        if step is not None and (step.optimizer_stepped or self._has_new_gradients(step)):
            self.commit()
        self.current.drop()
        self.script_goes_on()

    def _has_new_gradients(self, step: Step) -> bool:
        return step.is_last_micro_batch and bool(self._registry.guard.accumulating(step))

    def script_goes_on(self) -> None:
        """A loop has ended: the script's own code runs outside of one from here on."""
        is_accumulating = self.current.accumulation.since is not None
        if self._strategies.active.can_roll_back and not is_accumulating:
            self._progress.rollback.script_goes_on()

    # -- steps --------------------------------------------------------------------------------

    def begin(
        self, loader: ElasticLoader | None, first: tuple[StepBatch, Any], rest: Batches
    ) -> Step:
        """A step is handed out. Saves first, if it is time: everything before it is complete."""
        if self.current.step is not None:
            raise _second_step(self.current.step, loader)
        number, strategy = self._job.progress.step, self._strategies.active
        if self.current.accumulation.since is None:
            self.lifecycle.settle()  # what the script has done since the last step counts now
            self._commits.call_back_again()
            if self._worlds is not None:
                self._worlds.wait_until_permitted()
            self._pass_boundary()
            if strategy.can_roll_back:
                self._progress.before_step(number)
        step = Step(number, first, rest, self._begin_micro_batch, self._progress.masked(number))
        for module in self._job.modules.values():
            module.begin_step(step.share)
        self.current.begin(step, loader)
        phases.begin_step(number, step.samples)
        strategy.before_step(step)
        if self._ledger.is_on:
            self._ledger.begin(
                generation=self.lifecycle.world.generation,
                step=number,
                epoch=step.epoch,
                rank=self.lifecycle.world.rank,
                samples=step.indices,
            )
        return step

    def _pass_boundary(self) -> None:
        """Everything before the next step is complete: save if it is time, or leave."""
        if not self._checkpoints.is_open:
            return
        self._halt.at_boundary()
        self.current.last_left = None
        received = self._checkpoints.at_boundary(self._job)
        self._strategies.active.at_boundary(received)
        is_told = self._worlds is not None and self._worlds.is_told_to_leave
        is_leaving = self._halt.is_preempted or is_told
        self._checkpoints.announce(self._job, is_leaving=is_leaving)

    def _begin_micro_batch(self, step: Step) -> None:
        rank = self.lifecycle.world.rank
        seed_all(derive_seed(self._job.seed, step.number, rank, step.micro_batch))
        is_last = step.is_last_micro_batch
        for module in self._job.modules.values():
            if module.require_backward_grad_sync != is_last:  # to set it costs more than to look
                module.require_backward_grad_sync = is_last

    def commit(self) -> None:
        """The current step has taken effect."""
        step, loader = self.current.step, self.current.loader
        if step is None:
            return
        for module in self._job.modules.values():
            if module.reduction.failure is not None:
                raise module.reduction.failure  # the script has swallowed it
            module.reduction.wait()
        self.lifecycle.settle()  # what was queued may have ended because the group was aborted
        if not step.is_last_micro_batch:
            raise TrainingError(
                f"step {step.number} was left before the last of its {len(step)} micro-batches",
                hint="iterate each step to its end: every sample counts once",
            )
        self._commits.commit(step, loader)

    # -- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is complete so far: save what is not saved yet."""
        self.settle()
        if self.scope.in_retry:
            self.lifecycle.settle()
        if not self.lifecycle.is_restored or self.current.step is not None:
            return
        self._commits.finish()
        if not self._progress.is_catching_up:
            self._checkpoints.save(self._job)


def _second_step(step: Step, loader: ElasticLoader | None) -> TrainingError:
    if loader is None:
        return TrainingError(
            f"run.begin() while step {step.number} has begun and is not committed",
            hint="call run.commit() at the end of each step, or run.recover(error) after a "
            "fault of the world",
        )
    return TrainingError(
        f"a second loop begins a step while step {step.number} has begun",
        hint="evaluate with run.shard(loader); finish one training loop before the next",
    )
