"""The training loop: a step from its first batch to its commit, passes and epochs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from types import FrameType
from typing import Any

import torch

from elastic.errors import TrainingError, WorldChanged
from elastic.groups.collectives import all_gather_json
from elastic.groups.faults import ControlFlow
from elastic.groups.world import World, world_from_environment
from elastic.hangs.page import DATA, SCRIPT, phases
from elastic.telemetry.log import get_logger
from elastic.torch_private import not_compiled
from elastic.train.carried import needs_last_iteration
from elastic.train.checks import (
    counts_from_constant,
    follows_its_loop,
    is_where_batches_are_requested,
    refuse_break,
    refuse_break_after_commit,
    refuse_count_from_index,
    refuse_counts_before_restore,
    refuse_range,
    refuse_states_of_shards,
    refuse_subclasses,
    refuse_uncounted_passes,
)
from elastic.train.counted import refuse_counted_requests
from elastic.train.ddp import Wrapped
from elastic.train.early_leave import EarlyLeave
from elastic.train.loader import BatchInfo, ElasticLoader, Pass, RankWeights, same_shares
from elastic.train.reading import (
    Consumer,
    EarlierGenerators,
    OtherLoaders,
    ReadingAhead,
    consumer_of,
    created_too_early,
)
from elastic.train.recovery import Bootstrap
from elastic.train.replicas import (
    Weights,
    compare,
    differing_names,
    is_compared_after,
    warn_of_copies,
    warn_of_differing,
)
from elastic.train.sampler import (
    SAME_ORDER,
    Position,
    derive_seed,
    rank_samples,
    seed_all,
    seed_between_steps,
)
from elastic.train.session import Scope, Session
from elastic.train.sharding import HeldParts, compare_same_parts
from elastic.train.state import JobState
from elastic.train.step import Batches, Step, StepBatch
from elastic.train.weight_digest import WeightDigest

# ----------------------------------------------------------------------------
# Commits steps at their end, or once their gradients are used, and calls the callbacks.
#
# See docs/decisions/0020.


class Commits:
    """Decides when steps are committed. One per process.

    ``copies``: digests of untracked copies of the model, by name.
    """

    def __init__(self, session: Session, copies: Callable[[], Mapping[str, str]] = dict) -> None:
        self._session = session
        self._job = session.job
        self._optimizer_watch = session.optimizer_watch
        self._current = session.current
        self._progress = session.progress
        self._lifecycle = session.lifecycle
        self._checkpoints = session.checkpoints
        self._callbacks = session.callbacks
        self._ledger = session.ledger
        self._hooks = session.hooks
        self._compared_in: World | None = None  # the last world in which replicas were compared
        self._digests: WeightDigest | None = None  # of that world's weights, if it has replicas
        self._is_calling_back = False
        self._has_warned_of_accumulation = False
        self._has_warned_of_state = self._has_warned_of_copies = False
        self._copies = copies
        self.ends_pass = False  # the step that is committed is the last of its pass
        # Epochs of loaders that were read since the last commit, with the digest of their order,
        # and the world and epochs of which ranks have compared them.
        self._read: dict[str, tuple[int, str]] = {}
        self._compared_orders: tuple[World | None, dict[str, int]] = (None, {})

    def commit(self, step: Step, loader: ElasticLoader | None) -> None:
        """End an iteration: its data is used. Commit it, unless its gradients are still unused."""
        waiting = self._waiting(step)
        if waiting and loader is None:
            self._warn_of_accumulation(waiting)
            waiting = []
        self._current.is_committing = True
        try:
            self._end(step, loader, is_waiting=bool(waiting))
        finally:
            self._current.is_committing = False

    def _end(self, step: Step, loader: ElasticLoader | None, *, is_waiting: bool) -> None:
        self._current.drop()
        for module in self._job.modules.values():
            module.end_step()
        self._job.progress.step += 1
        phases.committed(self._job.progress.step)
        self._checkpoints.step_ended()
        if loader is not None:
            self._note_order(loader, step.epoch)
            loader.advance()
            if self.ends_pass:
                loader.begin_pass()  # the next epoch, if this one is complete
            for other in self._job.loaders.values():
                if (epoch := other.following.commit(step)) is not None:
                    self._note_order(other, epoch)
        self._hooks.commit(self._job.progress.step)
        if is_waiting:
            self._current.accumulation.add(step)
        else:
            is_last = loader is not None and loader.position.step in (0, len(loader))
            lengths = None if is_last else self._current.accumulation.shorter_length(step)
            self._commit(step)
            if lengths is not None:
                self._checkpoints.stop()  # do not save these weights
                raise _counter_shifted(step, *lengths)

    def finish(self) -> None:
        """End training: commit an open accumulation."""
        self.call_back_again()
        self._current.is_committing = True
        try:
            if (last := self._current.accumulation.take_last()) is not None:
                self._commit(last)  # unused gradients are dropped, as in any loop
        finally:
            self._current.is_committing = False

    def _waiting(self, step: Step) -> list[str]:
        """The optimizers that keep gradients of this step for later ones."""
        if self._job.built is not None:
            return self._job.built.accumulating(step.stepped)
        waiting = self._optimizer_watch.accumulating(step)
        if not waiting or self._optimizer_watch.has_stepped:
            return waiting
        # The script may use gradients without an optimizer.
        return [] if self._progress.rollback.changes_by_script else waiting

    def _commit(self, last: Step) -> None:
        """Commit the iterations up to ``last``: optimizers have used all gradients."""
        self._progress.has_committed = True
        if unwrapped := self._optimizer_watch.unwrapped_and_tracked:
            self._progress.rollback.copy_also(unwrapped)
        for module in self._job.modules.values():
            module.reduction.forget_gradients()
        for step in self._current.accumulation.end(last):
            self._note_in_ledger(step)
        if self._session.strategy.can_roll_back:
            place = (last.number, last.epoch, last.index)
            self._progress.committed(place, len(self._callbacks))
        self._current.is_committing = False
        self._job.check_user()
        # After the commit, because a peer may fail now.
        self._compare_orders(last)
        self._compare_replicas(last)
        self._call_back(last, len(self._callbacks))
        self._session.committed()

    def _note_in_ledger(self, step: Step) -> None:
        if self._ledger.is_on:
            self._ledger.step(
                generation=self._lifecycle.world.generation,
                step=step.number,
                epoch=step.epoch,
                rank=self._lifecycle.world.rank,
                samples=step.indices,
            )

    def _call_back(self, step: Step, left: int) -> None:
        """Call the last ``left`` callbacks, each once even if the world changes meanwhile."""
        callbacks = self._callbacks.last(left)
        left = len(callbacks)  # fewer if another version of the script resumes from a checkpoint
        self._is_calling_back = True
        try:
            for callback in callbacks:
                callback(step)
                self._lifecycle.synchronize()  # it may have used an invalid result
                left -= 1
                if self._session.strategy.can_roll_back:
                    self._progress.called_back(left)
        finally:
            self._is_calling_back = False

    def call_back_again(self) -> None:
        """Call the last step's callbacks that were not called because of a fault.

        Their changes are missing in the current state, whether a peer or a checkpoint had it.
        """
        progress = self._job.progress
        if progress.callbacks_left and not self._is_calling_back:
            self._progress.undo_before_place()
            step = Step.past(*progress.last, self._lifecycle.world.data_size)
            self._call_back(step, progress.callbacks_left)

    def _warn_of_accumulation(self, waiting: list[str]) -> None:
        if not self._has_warned_of_accumulation and not self._job.has_scaler:
            self._has_warned_of_accumulation = True
            get_logger().warning(
                "a step has ended while %s has unapplied gradients, which a change of the world "
                "would discard. Let it end after optimizer.step(): with run.begin() before the "
                "first micro-batch and run.commit() after the update, or by the framework's own "
                "accumulation.",
                ", ".join(waiting),
            )

    def digest(self, number: int) -> torch.Tensor | None:
        """The digest of some weights at the beginning of step ``number``; None if ranks compare
        none: they have not compared all weights in this world yet."""
        if self._digests is None or self._compared_in is not self._lifecycle.world:
            return None
        if self._checkpoints.flags.has_sent_digest:
            self._digests.compared(number - 1)
        bits = self._digests.bits(number)
        is_boundary = self._current.accumulation.since is None
        if is_boundary and self._session.strategy.can_roll_back:
            self._progress.rollback.has_part_changed = self._digests.has_part_changed
        return bits

    def _note_order(self, loader: ElasticLoader, epoch: int) -> None:
        digest = loader.sampler.order_digest(epoch)
        if digest is not None:
            self._read[self._job.name_of(loader)] = (epoch, digest)

    def _compare_orders(self, step: Step) -> None:
        """Compare the orders that the script computes, after the first step of each epoch and of
        each world: ranks with different ones would repeat and omit samples."""
        if not self._read:
            return
        world, (compared_in, compared) = self._lifecycle.world, self._compared_orders
        compared = compared if compared_in is world else {}
        read = {n: order for n, order in self._read.items() if compared.get(n) != order[0]}
        self._read.clear()
        if not read:
            return
        self._compared_orders = world, compared | {name: epoch for name, (epoch, _) in read.items()}
        if world.size == 1:
            return
        with self._lifecycle.replica.whole():
            orders = all_gather_json({name: digest for name, (_, digest) in read.items()})
        for rank, others in enumerate(orders):
            for name, digest in others.items():
                if digest != orders[0].get(name):
                    self._checkpoints.stop()  # do not save these weights
                    raise _differing_orders(step, read[name][0], rank)

    def _compare_replicas(self, step: Step) -> None:
        """Compare replicas after the first update of each world, in which a joining process that
        lacks some of the script's state differs; then if digests of their weights differ, and
        periodically what no digest covers."""
        world, flags = self._lifecycle.world, self._checkpoints.flags
        is_different, flags.has_different_weights = flags.has_different_weights, False
        is_due = step.optimizer_stepped and is_compared_after(step.number)
        if is_due:
            self._check_optimizer_states(step, refuse_subclasses)
        if world.size == 1:
            return
        has_updated = step.optimizer_stepped or not self._optimizer_watch.tracked
        is_first = has_updated and self._compared_in is not world
        if is_first or is_due:
            self._compare_state(step)
        # Scripts that reduce gradients themselves send no digests.
        is_unread = has_updated and is_compared_after(step.number) and not flags.has_sent_digest
        if not (is_first or is_due or is_different or is_unread):
            return
        begins = is_first or is_different
        try:
            with self._lifecycle.replica.whole():
                self._compare_weights(
                    step,
                    is_periodic=is_first or is_due,
                    of_all=begins or is_unread,
                    begins_digests=begins,
                )
        except TrainingError:
            self._checkpoints.stop()  # do not save these weights
            raise

    def _compare_state(self, step: Step) -> None:
        """Warn about other state that differs between ranks, and refuse optimizers of shards.

        On all ranks, because it is a collective, and even after a warning: new ranks have not
        warned yet.
        """
        with self._lifecycle.replica.whole():
            tracked = self._job.tracked if self._lifecycle.world.mesh.stages == 1 else {}
            differing = differing_names(self._job.user, tracked, self._copies())
        if (differing.state or differing.tracked) and not self._has_warned_of_state:
            self._has_warned_of_state = True
            warn_of_differing(differing)
        if differing.copies and not self._has_warned_of_copies:
            self._has_warned_of_copies = True
            warn_of_copies(differing.copies)
        if self._has_states_of_shards and self._checkpoints.is_on:
            with self._lifecycle.replica.whole():
                self._check_optimizer_states(step, refuse_states_of_shards)

    def _compare_weights(
        self, step: Step, *, is_periodic: bool, of_all: bool, begins_digests: bool
    ) -> None:
        """Compare what no digest covers if ``is_periodic``, and all weights if ``of_all``.
        ``begins_digests``: the next steps send digests of these weights."""
        world, modules, parts = self._lifecycle.world, self._job.modules, self._parts
        wrapped: Weights = {name: module.local_parameters for name, module in modules.items()}
        has_same_parts = is_periodic and bool(world.mesh.same_part_dims)
        if has_same_parts and compare_same_parts(wrapped, parts, world, step.number):
            for module in modules.values():
                module.gradients_compared()
        unwrapped = dict(sorted(self._optimizer_watch.unwrapped.items())) if of_all else {}
        digests = self._digests if of_all and self._compared_in is world else None
        is_exact = compare(
            {**wrapped, **unwrapped} if of_all else {},
            self._optimizer_watch.tracked,
            world,
            step.number,
            parts=parts,
            changed_in=None if digests is None else digests.changed_in(step.number),
        )
        if not begins_digests:
            return
        # Processors may round differently, and a script may change weights at the beginning of each
        # step and back: comparing all of them in every step would slow training down.
        is_sent = is_exact and digests is None
        first = step.number + 1 if is_sent else 2 * step.number + 1
        self._compared_in, self._digests = world, None
        if world.size > world.mesh.size:  # several replicas
            own = {name: functools.partial(_parameters, module) for name, module in modules.items()}
            own |= {name: functools.partial(_same, each) for name, each in unwrapped.items()}
            same_after = step.number if is_exact else None
            self._digests = WeightDigest(own, same_after=same_after, first=first)

    @property
    def _has_states_of_shards(self) -> bool:
        return self._job.is_sharded or self._job.built is not None

    def _check_optimizer_states(
        self, step: Step, refuse: Callable[[JobState, World, int], None]
    ) -> None:
        try:
            refuse(self._job, self._lifecycle.world, step.number)
        except TrainingError:
            self._checkpoints.stop()  # do not save this state
            raise

    @property
    def _parts(self) -> dict[str, HeldParts]:
        return {name: module.held_parts() for name, module in self._job.modules.items()}


def _parameters(module: Wrapped) -> Sequence[torch.Tensor]:
    return module.all_parameters


def _same(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return tensors


def _differing_orders(step: Step, epoch: int, rank: int) -> TrainingError:
    return TrainingError(
        f"step {step.number} read epoch {epoch} in another order on rank {rank} than on rank 0: "
        "some of its samples were read twice, and others by no rank",
        hint=SAME_ORDER,
    )


def _counter_shifted(step: Step, length: int, usual: int) -> TrainingError:
    return TrainingError(
        f"step {step.number} used the gradients of {length} batches, but earlier steps used "
        f"{usual}: the script's batch counter was not reset when a fault repeated the accumulation "
        "from its first batch",
        hint="count with enumerate(loader), or create the counter in the "
        "function that run.retry calls",
    )


# ----------------------------------------------------------------------------
# The part of the API that the script is currently in.


class CallEnded(ControlFlow):
    """Ends a call of the training function that has returned on another rank: no step is left.

    Not an Exception, which the script may catch.
    """


# ----------------------------------------------------------------------------
# Begins and commits steps. A step begins when the script gets it, and commits when the script
# requests the next one.

EPOCHS = "run.epochs"  # the place between two epochs
OWN_LOOP = "run.begin"  # the place of steps in the script's own loop


class StepLoop:
    """The loop over steps. One per process."""

    def __init__(
        self,
        session: Session,
        bootstrap: Bootstrap,
        early_leave: EarlyLeave,
        copies: Callable[[], Mapping[str, str]],
    ) -> None:
        self._session = session
        self.current = session.current
        self.scope = session.scope
        self.lifecycle = session.lifecycle
        self.bootstrap = bootstrap
        self._job = session.job
        self._optimizer_watch = session.optimizer_watch
        self._progress = session.progress
        self._checkpoints = session.checkpoints
        self._commits = Commits(session, copies)
        self.early_leave = early_leave
        self.reading_ahead = ReadingAhead()
        self.generators = EarlierGenerators()
        self.other_loaders = OtherLoaders(lambda: self.step_number if self.resumes else None)
        self._has_warned_of_counts = False
        self.left_held: Step | None = None  # its iterator ends if the script requests more
        self.committed_early: Step | None = None  # by run.commit(), and nothing was requested since
        self.is_limited = False  # the current pass resumes up to the same step: islice(loader, n)
        self._pass_is_read = False  # of the loop that was left: to the end of its data
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
        self._refuse_left_after_commit()
        self._job.progress.epoch += 1
        self._job.progress.place = EPOCHS
        self._leave_held()
        self.end_left_loop()

    def begin_epochs(self) -> None:
        """The script begins to count epochs: it may resume here, with a new epoch."""
        self.end_call_if_over()
        self._progress.reach(EPOCHS)

    def end_call_if_over(self) -> None:
        """Raise CallEnded if the function has returned on all ranks, with its last step. The other
        ranks do not call it again, as this one does, to register its objects."""
        if self._progress.is_over:
            raise CallEnded

    @property
    def is_peek(self) -> bool:
        """Whether a loop can only inspect data, because nothing to train is registered yet."""
        is_set_up = self.lifecycle.is_restored or self.scope.in_retry or self._job.tracked
        return not is_set_up

    @property
    def user_state(self) -> Mapping[str, object]:
        """``run.state``."""
        return self._job.user

    @property
    def resumes(self) -> bool:
        """Whether loops may resume, in the next world or from a checkpoint, while the script counts
        from its beginning."""
        return self.scope.in_retry or self._checkpoints.is_on

    def begin_pass(self, loader: ElasticLoader) -> None:
        """Begin a loop over ``loader``: in the run's epoch, or in the loader's next epoch."""
        self.end_call_if_over()
        self._session.in_training(True)
        self.end_left_loop(ends_pass=not self.scope.owns_epochs)
        self._pass_is_read = False  # if a fault has ended the pass
        if self.resumes:
            refuse_count_from_index()
        self._refuse_left_after_commit()
        is_rest = loader.rest_is_reached and self._has_no_batch_left(loader)
        self._progress.begin_pass(self._job.name_of(loader), is_known=is_rest)
        # Not only before the next step: at the end of an epoch, an evaluation comes before it.
        self._commits.call_back_again()
        loader.requests_first()
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
        if self.scope.passes == 1 and self.resumes and not self.scope.in_retry:
            refuse_counts_before_restore()
        if self.scope.passes == 1 and self.resumes and not self._job.user:
            self._warn_of_counts()
        is_again = id(loader) in self.scope.begun
        self.scope.begun.add(id(loader))
        if is_again and self.resumes and not self._job.has_own_state:
            refuse_uncounted_passes(is_in_retry=self.scope.in_retry)
        loader.begin_pass()
        self._job.progress.epoch = loader.position.epoch

    def loop_ended(self) -> None:
        """A loop has ended, whether or not it was left early: outside of run.retry and run.epochs,
        the script may end."""
        if not self.scope.in_retry and not self.scope.owns_epochs:
            self._session.in_training(False)

    def approach(self, loader: ElasticLoader) -> None:
        """The script has created an iterator over ``loader``, or read the index from which it
        counts. A loop that then requests no batch, because none is left, begins here."""
        progress = self._progress
        is_near = progress.is_before_place and loader.index_was_read and loader.is_iterated
        if is_near and self._has_no_batch_left(loader):
            loader.rest_is_reached = progress.reach(self._job.name_of(loader))
            if loader.rest_is_reached and not self.scope.owns_epochs:
                self.scope.passes += 1
                self.scope.begun.add(id(loader))
            self.call_back_again()

    def _refuse_left_after_commit(self) -> None:
        """Raise TrainingError if the script has left a pass in which it holds the iterator after
        run.commit(), and trains on: a fault between them would resume that pass."""
        step, self.committed_early = self.committed_early, None
        if step is not None:
            raise _left_after_commit(step)

    def _has_no_batch_left(self, loader: ElasticLoader) -> bool:
        """Whether the pass resumes at the end of its epoch."""
        position = loader.position
        is_same = loader.resumes_at_end
        if self.scope.owns_epochs:
            is_same = position.epoch == self.epoch
        return is_same and position.step == len(loader)

    def reach_own_step(self) -> None:
        """Begin a step of the script's own loop: it may resume here."""
        if self._job.progress.place != OWN_LOOP or self._progress.is_before_place:
            self._progress.begin_pass(OWN_LOOP)

    def call_back_again(self) -> None:
        """Call the last step's callbacks that a fault has left."""
        self._commits.call_back_again()

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
        in step ``number``, which ``is_first`` of the loop, or after it was committed there.

        After `break` or `return` the current step counts if an optimizer has stepped; after a fault
        of the world it does not. :meth:`end_left_loop` distinguishes them; it is not possible here.
        """
        if self.lifecycle.is_changing:
            return  # the frames of an interrupted attempt are cleared
        if self.lifecycle.has_world and world is self.lifecycle.world:
            step = self.current.step
            if step is not None and step.number == number:  # not that of a newer loop
                is_last = loader.position.step + 1 == len(loader)
                self.early_leave.leave_steps(is_first=is_first, is_last=is_last)
                self._seed_after_loop()
            elif step is None and loader.position.step < len(loader):
                self.early_leave.leave()
            self.current.leave(loader)

    @property
    def can_leave_open(self) -> bool:
        """Whether a loop may resume in its last step, with the code after it."""
        can_undo = self._session.strategy.can_roll_back and not self._job.is_rebuilt
        return self.resumes and can_undo

    def leave_open(self, loader: ElasticLoader, step: Step, *, is_read: bool) -> bool:
        """At the end of the loop over ``loader``: let the code after it belong to the last step, as
        after `break`, if that step can be undone. ``is_read``: no batch of the pass is left."""
        is_open = step is self.current.step and step.optimizer_stepped
        if not is_open or self.current.accumulation.since is not None:
            return False
        if self._job.order.sums.is_pending:
            return False  # the code after the loop may read them
        if not self._progress.rollback.leave_open():
            return False
        self.current.leave(loader)
        self._pass_is_read = is_read
        self._seed_after_loop()
        return True

    def _seed_after_loop(self) -> None:
        """All ranks draw the same numbers after a loop whose last step stays open, in each attempt:
        as after a commit."""
        if self.current.accumulation.since is None:
            seed_between_steps(self._job.seed, self.epoch, self.step_number + 2)

    def _leave_held(self) -> None:
        """Leave a loop whose iterator outlives it, in an attribute or a variable of the module."""
        step, loader = self.current.inside, self.current.loader
        if step is not None and loader is not None and self.lifecycle.has_world:
            self.left_held = step
            self.leave(self.lifecycle.world, loader, step.number, is_first=False)

    def end_left_loop(self, *, ends_pass: bool = False) -> None:
        """End a loop that the script has left: it has continued, so it left deliberately.

        ``ends_pass``: all the code that follows the loop has run. It is a part of the loop's last
        step: if that step was the epoch's last one, too, its boundary belongs to the next epoch, or
        a fault would repeat that code.

        Raises a fault of the world again if the script has caught it in the loop.
        """
        self._check_world()
        self._end_left(ends_pass=ends_pass)

    def end_left_loop_before_work(self) -> None:
        """The same before work between steps. But code that follows a left loop has run, and more
        of it follows: a step that the loop has trained lasts until then."""
        self._check_world()
        if not self.counts(self.current.step):
            self._end_left()

    def _check_world(self) -> None:
        self.early_leave.confirm()
        self.refuse_swallowed()
        if self.current.step is not None:
            self.lifecycle.synchronize()

    def refuse_swallowed(self) -> None:
        """Raise the end of this world again if the script has caught it."""
        if self._ended is not None and self._ended is self.lifecycle.world:
            raise WorldChanged(
                "the script caught the exception that ended this world",
                hint="do not catch it: run.retry continues in the next world",
            )

    def _end_left(self, *, ends_pass: bool = False) -> None:
        loader = self.current.take_left_loader()
        if loader is None:
            return
        is_read, self._pass_is_read = self._pass_is_read, False
        if not is_read:
            loader.stop_workers()
        if self.counts(self.current.step):
            self._commits.ends_pass = ends_pass
            try:
                self.commit()
            finally:
                self._commits.ends_pass = False
        self.current.drop()
        self.leave_step()

    def counts(self, step: Step | None) -> bool:
        """Whether a step counts in which the script has left its loop."""
        return self._is_used_only(step) or self._has_effect(step)

    def holds(self, loader: ElasticLoader) -> bool:
        """Whether the script is in a step over ``loader`` that counts, if it has left its loop: it
        may hold the iterator."""
        return self.current.loader is loader and self.counts(self.current.inside)

    def _has_effect(self, step: Step | None) -> bool:
        return step is not None and (step.optimizer_stepped or self._has_new_gradients(step))

    def _is_used_only(self, step: Step | None) -> bool:
        """Whether a forward pass, which may change buffers and counters, is all that the script has
        done with the step."""
        if step is None or not step.is_last_micro_batch or self._has_effect(step):
            return False
        return self._has_trained(step)

    def _has_new_gradients(self, step: Step) -> bool:
        return step.is_last_micro_batch and bool(self._optimizer_watch.accumulating(step))

    def leave_step(self) -> None:
        """End a loop: from now on the script runs outside of a step."""
        is_accumulating = self.current.accumulation.since is not None
        if self._session.strategy.can_roll_back and not is_accumulating:
            self._progress.rollback.leave_step()
        if not is_accumulating:
            progress = self._job.progress
            seed_between_steps(self._job.seed, progress.epoch, progress.step + 1)

    # -- steps --------------------------------------------------------------------------------

    def begin(
        self,
        loader: ElasticLoader | None,
        first: tuple[StepBatch, Any],
        rest: Batches,
        *,
        with_copies: bool = False,
    ) -> Step:
        """Begin a step. Saves first if a save is due: everything before is committed.
        ``with_copies``: the code after the loop will belong to it.

        Raises CallEnded if other ranks' functions have returned.
        """
        if self._progress.has_returned:
            raise CallEnded
        if self.current.step is not None:
            raise _second_step(self.current.step, loader)
        number, strategy = self._job.progress.step, self._session.strategy
        self._session.hooks.begin(number)
        if self.current.accumulation.since is None:
            self.lifecycle.synchronize()  # work that the script queued since the last step
            self._commits.call_back_again()
            self._cross_boundary()
            can_undo = strategy.can_roll_back
            self._progress.before_step(can_undo=can_undo, with_copies=with_copies)
            self._job.order.sums.drop()
        step = Step(number, first, rest, self._begin_micro_batch)
        self._begin_reduction(step)
        self.current.begin(step, loader)
        phases.begin_step(number, step.samples)
        try:
            strategy.before_step(step)
        except WorldChanged:
            self._ended = self.lifecycle.world
            raise
        if self._session.ledger.is_on:
            self._session.ledger.begin(
                generation=self.lifecycle.world.generation,
                step=number,
                epoch=step.epoch,
                rank=self.lifecycle.world.rank,
                samples=step.indices,
            )
        return step

    def _begin_reduction(self, step: Step) -> None:
        """Prepare what the gradients of ``step`` are summed with: shares, flags and a digest."""
        size, digest = self.lifecycle.world.size, self._commits.digest(step.number)
        self._checkpoints.flags.begin_step(step.number, size, digest)
        self._job.order.begin_step(step.number)
        for module in self._job.modules.values():
            module.begin_step(step.rank_weight, has_samples=step.share > 0)
        if self.current.accumulation.since is None:
            for earlier in self._job.earlier_gradients:
                earlier.begin_step()
        if self._job.built is not None:
            self._job.built.begin_step(step.rank_weight if step.share else 0.0, size)

    def _cross_boundary(self) -> None:
        """Before the next step: save if a save is due. Does not return if the process ends here.

        The ranks of a replica need no vote here unless they exchange control flags by a collective
        of the world, which an abort may end on only some of them. Flags that came with the
        gradients, and the decision to leave before the next step, were agreed at the end of the
        backward pass, so all ranks decide equally. Nothing else here waits for a peer.
        """
        worlds, halt = self._session.worlds, self._session.halt
        if worlds is not None:
            worlds.wait_until_permitted()
        if not self._checkpoints.is_open:
            return
        halt.at_boundary()
        replica = self.lifecycle.replica
        received = self._checkpoints.at_boundary(self._job, replica.whole)
        self._session.strategy.at_boundary(received)
        is_requested = worlds is not None and worlds.is_asked_to_leave
        is_leaving = halt.is_preempted or is_requested
        self._checkpoints.announce(self._job, is_leaving=is_leaving)

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

    def commit_early(self, *, changes_follow: bool) -> None:
        """Commit the current step at the script's request: what follows belongs to no step. A step
        in which a loop was left ends with the code that follows the loop, even then: the loop would
        resume with the step after it."""
        if self.current.inside is None:
            return
        step, loader = self.current.step, self.current.loader
        is_checked = loader is not None and self.resumes
        is_in_middle = loader is not None and loader.position.step + 1 < len(loader)
        is_alone = self.current.accumulation.since is None
        # A loop over the micro-batches of an accumulation ends in the middle of an epoch, too.
        may_follow = is_checked and step is not None and (is_alone or not is_in_middle)
        if may_follow and follows_its_loop():
            assert step is not None
            if is_in_middle:
                raise _left_after_commit(step)
            self._leave_held()  # no batch is left
            return
        is_script = is_checked and refuse_break_after_commit()
        self.commit()
        if is_script and is_in_middle and not self.is_limited:
            self.committed_early = step
        if changes_follow:
            self._progress.script_has_run()
        if loader is not None and self.current.accumulation.since is None:
            seed_between_steps(self._job.seed, self.epoch, self.step_number)

    def commit(self) -> None:
        """Commit the current step."""
        step, loader = self.current.step, self.current.loader
        if step is None:
            return
        for module in self._job.modules.values():
            if module.reduction.failure is not None:
                raise module.reduction.failure  # the script caught it
            module.reduction.wait()
        self.lifecycle.synchronize()  # an abort may have ended queued work
        self._checkpoints.flags.require_one_step(step.number)
        self._job.order.end_step(self.lifecycle.replica.whole)
        if not self._job.order.accumulates:
            self._job.order.sums.sum_rest(self.lifecycle.replica.whole)
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

    def end_last_loop(self) -> None:
        """The training function has returned: commit the step in which it left its last loop."""
        self.lifecycle.synchronize()
        self.refuse_swallowed()
        self._leave_held()
        self._progress.function_returned()
        is_everywhere = True
        if self.counts(self.current.step):
            can_undo = self._progress.rollback.can_undo_updates
            is_everywhere = self._session.strategy.function_returned(can_undo=can_undo)
        self._progress.reach_end(on_all_ranks=is_everywhere)
        self.end_left_loop()
        if not self._progress.is_catching_up:
            self._progress.end_function()

    def finish(self, *, is_last: bool = False) -> None:
        """At the end of training: save the state unless it is already saved.

        ``is_last``: the process ends, no other loop follows, and the caller saves the state. A step
        in which the last loop was left ends here on this rank, maybe not on all: the boundary
        before it, or an earlier one, is kept for the case that this rank saves alone.
        """
        self._leave_held()
        if is_last and not self.scope.in_retry and self.counts(self.current.step):
            can_undo = self._session.strategy.can_roll_back
            rollback = self._progress.rollback
            self._progress.keeps_boundary = can_undo and (
                rollback.can_restore or rollback.has_earlier
            )
        self.end_left_loop()
        if is_last:
            self._progress.end_function()
        if self.scope.in_retry:
            self.lifecycle.synchronize()
        if not self.lifecycle.is_restored or self.current.step is not None:
            return
        if self._progress.is_before_place:  # at the end of an earlier phase, which is complete
            return
        self._commits.finish()
        if self.scope.passes:
            for loader in self._job.loaders.values():
                loader.pass_has_ended()
        if self.scope.is_last_call and not is_last and not self._progress.is_catching_up:
            self._checkpoints.save(self._job)  # unless this step is already saved


def _no_training(step: Step) -> TrainingError:
    return TrainingError(
        f"step {step.number} ran without gradients or in eval mode, but each batch of run.loader "
        "is a training step of the job: a recovery would resume this pass in its middle",
        hint="evaluate with run.shard(DataLoader(…)); for torch.optim.swa_utils.update_bn and "
        "other passes over the data, use the plain DataLoader",
    )


def _left_after_commit(step: Step) -> TrainingError:
    return TrainingError(
        f"run.commit() ends step {step.number}, but its loop is left there, before the end of the "
        "epoch: a fault in the code after the loop would resume the loop with the step after it",
        hint="let the loop request its batches, and omit run.commit() after it:\n"
        "    for batch in loader:\n"
        "        …\n"
        "        if is_done:\n"
        "            break",
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


# ----------------------------------------------------------------------------
# Reads a loader within the steps of another loader (:mod:`elastic.train.loader`).


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
    if leader.weights is not RankWeights.SAMPLES:
        return
    ours = rank_samples(leader.sampler, Position(step.epoch, step.index), world)
    others = rank_samples(loader.sampler, Position(info.epoch, info.step), world)
    if not same_shares(ours, others):
        raise TrainingError(
            f"step {step.number} has {sum(ours)} samples of the first loader and {sum(others)} of "
            f"the second: their shares on the {world} ranks would differ, and gradients would have "
            "wrong weights",
            hint="use the same run.loader(…, global_batch=…) for both, and "
            "DataLoader(…, drop_last=True), so that no last batch is smaller",
        )


# ----------------------------------------------------------------------------
# Loops that resume: over epochs, steps, and batches.


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
        loop.loop_ended()
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
def steps(
    loop: StepLoop, loader: ElasticLoader, limit: Callable[[], int | None] = lambda: None
) -> Generator[Step]:
    """The remaining steps of the loader's epoch, or as many as ``limit`` returns once the pass has
    begun.

    A step begins when it is yielded. It commits when the next one is requested, or when the loop is
    left after an optimizer has stepped. So a peek at the first batch has no effect.
    """
    if loop.scope.in_retry:
        loop.generators.refuse()
    loop.bootstrap.enter_loop()
    loop.begin_pass(loader)
    if loader.position.step < len(loader):
        loop.scope.resumed_at = loader.position.step
    world = loop.lifecycle.world
    left = limit()
    end = len(loader) if left is None else min(len(loader), loader.position.step + left)
    batches: Batches = iter(())
    if left != 0:
        batches = loader.batches(world.data_rank, world.data_size, keeps_workers=True)
    needs_last = loop.can_leave_open and needs_last_iteration(sys._getframe())
    begun, number = 0, 0
    phases.enter(DATA)
    try:
        for first in batches:
            begun, number = begun + 1, loop.step_number
            is_open = needs_last and loader.position.step + 1 >= end
            step = loop.begin(loader, first, batches, with_copies=is_open)
            yield step
            if step is loop.left_held:
                return
            loop.committed_early = None
            is_open = is_open and loop.lifecycle.world is world
            if is_open and loop.leave_open(loader, step, is_read=left is None):
                phases.enter(DATA)
                if left is None:
                    next(batches, None)  # its end, so that data workers may begin the next pass
                phases.enter(SCRIPT)
                loop.loop_ended()
                return
            del step
            if loop.lifecycle.world is not world:
                raise created_too_early()  # created by an attempt that has ended
            done = loader.position.step + (loop.step_number == number)
            is_last = done >= end
            if not is_last:
                loop.early_leave.begin(number + 1)
            loop.commit()  # unless the script has
            phases.enter(DATA)
            if is_last and left is not None:
                loader.stop_workers()
                break
        phases.enter(SCRIPT)
        loop.leave_step()
        loop.loop_ended()
    except GeneratorExit:
        phases.enter(SCRIPT)
        loop.leave(world, loader, number, is_first=begun <= 1)
        loop.loop_ended()
        raise


@not_compiled
def batches(loop: StepLoop, loader: ElasticLoader) -> Iterator[Any]:
    """The batches of steps with one micro-batch: what iterating over a loader yields.

    Within a step of another loader, this loader follows that one.
    """
    passed = loader.following.new_pass()
    iterator = _batches(loop, loader, passed)
    passed.iterator = weakref.ref(iterator)
    loader.begin_iteration(in_step=loop.holds(loader))
    loop.approach(loader)
    return iterator


@not_compiled
def _batches(loop: StepLoop, loader: ElasticLoader, passed: Pass) -> Iterator[Any]:
    consumer = Consumer()
    if passed.is_first or not loader.following.follows:  # a follower may begin a pass in each step
        # The iterator must not be a local variable: it would keep itself alive.
        consumer = consumer_of(
            passed.iterator and passed.iterator(),
            everywhere=passed.is_first,
            is_resumed=loader.is_resumed,
        )
    if loop.is_peek:
        # Training cannot begin yet: the script inspects the data, for its shape or statistics.
        loader.following.release(passed)
        world = loop.lifecycle.world if loop.lifecycle.has_world else world_from_environment()
        for _, data in loader.batches(world.data_rank, world.data_size):
            yield data
        return
    consumer.refuse_cycle()
    knows_index, loader.index_was_read, loader.is_iterated = loader.index_was_read, False, False
    if loop.resumes and not knows_index and not loop.scope.owns_epochs:
        consumer.refuse_limit(len(loader) - loader.position.step)
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
    loader.counts_continue = bool(consumer.counters)
    if loop.resumes and not knows_index:
        consumer.refuse_restart()
        refuse_break(is_enumerated=consumer.counts_apart, is_in_retry=loop.scope.in_retry)
        refuse_counted_requests(
            sys._getframe(),
            has_own_state=bool(loop.user_state),
            in_epochs=loop.scope.owns_epochs,
            is_in_retry=loop.scope.in_retry,
        )
    loop.is_limited = consumer.takes is not None and not knows_index
    limit = functools.partial(_batches_of_pass, loop, loader, consumer, may_subtract=knows_index)
    begins = True
    with closing(steps(loop, loader, limit)) as left:
        for step in left:
            if begins:
                begins = _continue_counts(consumer, loader, step, knows_index=knows_index)
            batch = step.only_micro_batch()
            loop.reading_ahead.step_began(batch)
            yield batch
            del batch


@not_compiled
def steps_for_script(loop: StepLoop, loader: ElasticLoader) -> Iterator[Step]:
    """What ``run.steps`` returns: the steps of a pass, which ``enumerate`` may number."""
    made: list[weakref.ref[Iterator[Step]]] = []
    iterator = _steps_for_script(loop, loader, made)
    made.append(weakref.ref(iterator))
    return iterator


@not_compiled
def _steps_for_script(
    loop: StepLoop, loader: ElasticLoader, made: list[weakref.ref[Iterator[Step]]]
) -> Iterator[Step]:
    # (As in _batches, the iterator must not be a local variable.)
    everywhere = not loop.lifecycle.is_restored
    consumer = consumer_of(made.pop()(), everywhere=everywhere, is_resumed=loader.is_resumed)
    knows_index, begins = loader.index_was_read, True
    loader.counts_continue = bool(consumer.counters)
    with closing(steps(loop, loader)) as left:
        for step in left:
            if begins:
                begins = _continue_counts(consumer, loader, step, knows_index=knows_index)
            yield step
            del step


def _continue_counts(
    consumer: Consumer, loader: ElasticLoader, step: Step, *, knows_index: bool
) -> bool:
    """In the first step of a pass: let ``enumerate`` continue its count, if the pass does. Returns
    False."""
    if consumer.counts_apart and loader.continues and step.index:
        get_logger().warning(
            "this loop resumes at step %d of its epoch, but its enumerate, which numbers other "
            "items than the loader's batches, begins again",
            step.index,
        )
    if consumer.counters:
        frame = sys._getframe(1)
        consumer.continue_counts(
            step.index if loader.continues else 0,
            knows_index=knows_index,
            from_constant=lambda: counts_from_constant(frame),
        )
    return False


def _batches_of_pass(
    loop: StepLoop, loader: ElasticLoader, consumer: Consumer, *, may_subtract: bool
) -> int | None:
    """The number of batches of a pass that has just begun, if its consumer counts more of them
    than an interrupted epoch has left; None: it has the right number.

    Raises TrainingError if it counts another number than in the interrupted pass, or if it limits
    the second of two passes over an epoch. ``may_subtract``: the script has read the index.
    """
    epoch, step = loader.position.epoch, loader.position.step
    counted, takes = loader.counted, consumer.takes
    if not loop.resumes or not loop.scope.owns_epochs or (takes is None and not consumer.is_slice):
        return None
    if step == 0 and takes is not None:
        loader.counted = (epoch, takes)
        return None
    if loader.continues and takes is not None and counted is not None and counted[0] == epoch:
        if takes == counted[1]:
            return max(0, takes - step)
        if takes == counted[1] - step:
            return None
    if not may_subtract:
        consumer.refuse_limit(len(loader) - step)
    return None


def share_is_read(loop: StepLoop) -> None:
    """The script weights its losses itself."""
    if loop.current.step is not None:
        loop.current.step.is_weighted = True


@not_compiled
def index(loop: StepLoop, loader: ElasticLoader) -> int:
    """The index within the epoch of the loader's current step; between steps, of the next one.

    A script that holds its iterator may have left the loop in the current step. It has if it reads
    the index where it has read it for an earlier pass.
    """
    if not loop.is_peek:
        loop.bootstrap.enter_loop()
    in_step, reader = loop.holds(loader), _stack()
    is_reported = in_step and loader.may_be_asked_for_a_pass(reader)
    if is_reported and is_where_batches_are_requested():
        loader.index_is_reported(reader)
    is_of_next_pass = loader.index_is_read(reader, in_step=in_step)
    loop.approach(loader)
    position = loader.position
    left = loop.current.left_step(loader)
    if is_of_next_pass or loop.counts(left):
        # Committed when the next loop begins.
        position = Position(position.epoch, position.step + 1)
    if loop.scope.owns_epochs:
        return position.step if position.epoch == loop.epoch else 0
    return position.step if loader.resumes_at_end else position.step % len(loader)


def _stack() -> tuple[tuple[int, int], ...]:
    """The instructions that are being executed."""
    frame: FrameType | None = sys._getframe(1)
    instructions = []
    while frame is not None:
        instructions.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(instructions)
