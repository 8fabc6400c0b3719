"""``Run``: the object that ``elastic.join`` returns, and the parts behind it."""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from checkpoints import Root, SaveError
from elastic import errors, torch_private
from elastic.errors import ConfigError, NodeUnfit, TrainingError
from elastic.groups.faults import FailureHook, causes
from elastic.groups.group import ProcessGroup, choose_device
from elastic.groups.pending import refuse_stale_group, uses_stale_group
from elastic.groups.replica import ModelReplica, mesh_of, process_group
from elastic.groups.world import (
    World,
    is_launched,
    largest_world,
    node_name,
    world_from_environment,
)
from elastic.hangs.page import phases
from elastic.link.link import Heartbeat, ReplicaFormed
from elastic.telemetry.events import CheckpointSkipped, RunClosed
from elastic.telemetry.journal import EventSink, Journal
from elastic.telemetry.ledger import Ledger
from elastic.telemetry.log import get_logger
from elastic.telemetry.runs import chosen_journal
from elastic.torch_private import not_compiled_methods
from elastic.tracebacks import described
from elastic.train import loop as loops
from elastic.train import rebuilding
from elastic.train.changes import ChangeDetector
from elastic.train.checkpointing import CheckpointManager, leaving_s
from elastic.train.checks import (
    refuse_child_process,
    refuse_counts_before_restore,
    refuse_range,
)
from elastic.train.current import CurrentStep, Halt, Listeners, StepAccount, logged_at
from elastic.train.ddp import ElasticDDP
from elastic.train.early_leave import EarlyLeave
from elastic.train.folder import Checkpoints, KeepGiven, WhenGiven, checkpoints_from
from elastic.train.hooks import Hooks
from elastic.train.lifecycle import Lifecycle
from elastic.train.loader import ElasticLoader, Ordering, shard_by
from elastic.train.loop import (
    CallEnded,
    StepLoop,
    steps_left,
)
from elastic.train.metrics import Loggable, MetricsLog, MetricsWriter, default_writers, weighted
from elastic.train.observers import (
    ProfileRequest,
    ProgressLine,
    StepProfiler,
    request_of,
)
from elastic.train.observers import is_wanted as progress_is_wanted
from elastic.train.optimizers import Registry
from elastic.train.preemption import Preemption
from elastic.train.progress import RankProgress, StepTimer
from elastic.train.rebuilding import AGAIN, Built
from elastic.train.recovery import Bootstrap, InProcess, Restart
from elastic.train.rollback import RandomState, StepCopies, StepCopiesName, step_copies_from
from elastic.train.sampler import derive_seed, seed_all
from elastic.train.session import Scope, Session, StepCallbacks
from elastic.train.sharded import StageReduction, reduce_stages
from elastic.train.state import JobState
from elastic.train.step import OwnBatch, Step, counts_values
from elastic.train.structure import ModuleStructures
from elastic.train.sums import Sums
from elastic.train.transfer import gather
from elastic.train.units import At, Units
from elastic.tuning.environment import MODE, RESTART
from elastic.tuning.intervals import (
    REPLICA_RENDEZVOUS_S,
    SHARE_S,
)
from elastic.wire.messages import number_on_node
from elastic.worker.node_first import node_first, require_fit
from elastic.worker.worlds import Worlds

# The last save at the end of training is not urgent; a slow disk may take long, but a peer that
# dies in its last second must not delay the others for long.
LAST_SAVE_S = 600.0

# ----------------------------------------------------------------------------
# Calls of the training function: ``run.retry``, ``run.attempts`` and ``run.begin``.


class Attempts:
    """Begins and ends attempts, and tracks the objects that each registers. One per process."""

    def __init__(
        self,
        session: Session,
        bootstrap: Bootstrap,
        loop: StepLoop,
        units: Units,
        failure: FailureHook,
        changes: ChangeDetector,
        structures: ModuleStructures,
    ) -> None:
        self.failure = failure
        self._changes = changes
        self._structures = structures
        self.units = units
        self._session = session
        self._registry = session.registry
        self._job = session.job
        self._progress = session.progress
        self._scope = session.scope
        self._lifecycle = session.lifecycle
        self._bootstrap = bootstrap
        self._loop = loop
        self._own_steps = 0  # begun by run.begin: the first two
        self._random = RandomState()
        self._has_registered = False  # the function that retry calls registered an object
        self._has_outer_data = False  # a loader was registered before that function was called
        self._outside: JobState | None = None  # objects registered before that function was called
        self._has_collective_outside = False  # in that function, outside of its loops

    # -- registration -------------------------------------------------------------------------

    def check_registration(self, call: str) -> None:
        """Called before a registration. Raises TrainingError if the state is already restored."""
        if self._lifecycle.is_restored:
            raise TrainingError(
                f"run.{call}() is called too late: the first loop, or run.begin(), has already "
                "restored the job's state",
                hint=f"call run.{call}() before `for … in run.epochs(…)`, the loader, run.retry "
                "and run.begin(); for several models, as in cross-validation, before the first "
                "loop, or in one job each",
            )
        self._has_registered |= self._scope.in_retry

    def restore_if_complete(self) -> None:
        """Within retry, restore the state once model, optimizer and loader are registered, so that
        the function can read it before its first loop."""
        self.enter_if_complete()
        if self._scope.in_retry and self._registry.is_complete:
            self._bootstrap.enter_loop()
            if not self._job.progress.callbacks_left:  # else the function may register callbacks
                self._loop.end_call_if_over()

    def enter_if_complete(self) -> None:
        """Within retry, if a loader was registered before it: enter the world and restore the
        state, unless the function calls run.build."""
        if self._scope.in_retry and self._has_outer_data and not self._job.is_rebuilt:
            self._bootstrap.enter_loop()

    def note_collective(self, call: str = "run.mean()") -> None:
        """Called before ranks exchange values at the script's request. Raises TrainingError if the
        others have completed this call of run.retry."""
        self._loop.early_leave.confirm()
        self._loop.end_call_if_over()
        if self._progress.is_catching_up:
            raise TrainingError(
                f"{call} was called on a joining node, in a call of run.retry that the other "
                "ranks have completed, so they do not call it",
                hint=_ONE_FUNCTION,
            )
        if self.units.is_running:
            return  # a joining node skips the complete unit
        is_outside = not self._scope.owns_epochs and self._loop.current.step is None
        self._has_collective_outside |= self._scope.in_retry and is_outside

    # -- attempts -----------------------------------------------------------------------------

    def begin(self, *, is_again: bool = False) -> None:
        """Called before the training function."""
        self.failure.begin_training()
        self._session.in_training(True)
        self._bootstrap.has_entered = False
        self._session.callbacks.begin_attempt(is_again=is_again)
        self._session.listeners.begin_attempt(is_again=is_again)
        self.units.begin_attempt()
        self._scope.passes, self._loop.committed_early = 0, None
        self._scope.begun.clear()
        self._progress.surroundings.begin_call(self._changes.roots(), is_again=is_again)
        self._structures.begin_call(is_again=is_again)
        if not is_again:
            self._random.take()
            self._warn_of_collectives_outside()
            self._outside = self._job.registered()
            if self._registry.has_data:
                self._loop.generators.note()
        else:
            self._random.restore()
            for loader in self._job.loaders.values():
                loader.resume()
            if self._has_registered:
                self._register_again()
        if not self._lifecycle.is_restored:
            self._bootstrap.begin_retry()
        self._has_outer_data = self._registry.has_data and not self._job.is_rebuilt
        if self._registry.has_model:
            self._bootstrap.enter_loop()  # the function may read the job's progress from run.state
        elif not self._session.strategy.waits_for_registration:
            self._bootstrap.enter_world()

    def _warn_of_collectives_outside(self) -> None:
        if self._has_collective_outside:
            self._has_collective_outside = False
            get_logger().warning(
                "an earlier run.retry has called run.mean() outside of its loops: a node that joins"
                " from now on calls it, too, without the other ranks, and fails. %s",
                _ONE_FUNCTION,
            )

    def _register_again(self) -> None:
        """For a function that creates model, optimizer and loader in each call: new objects inherit
        the state of the objects from its previous call."""
        assert self._outside is not None
        if not self._job.is_rebuilt:
            self._bootstrap.inherit_later(self._job.own_tree())
            self._progress.register_again()
            self._lifecycle.register_again()
        self._registry.restore_registrations(self._outside)
        self._has_registered = False

    def end(self) -> None:
        """Called after the training function."""
        # Before any collective, which may fail: a complete step is not repeated.
        self._loop.end_last_loop()
        self._session.strategy.training_returned()
        self._loop.finish()
        if not self._progress.is_in_past_call:
            for loader in self._job.loaders.values():
                loader.call_ended()
        self._session.strategy.end_attempt()
        is_restored = self._lifecycle.is_restored
        self._progress.call_ended(
            takes_boundary=is_restored and self._session.strategy.can_roll_back
        )
        self._session.in_training(False)

    def begin_own_step(self) -> Step:
        """Begin a step of the script's own loop, in which each rank has the same share."""
        if not self._scope.in_retry:
            if self._loop.resumes:
                refuse_counts_before_restore()
            self._scope.in_retry = True
            self.begin()
        self._bootstrap.enter_loop()
        progress = self._job.progress
        if self._own_steps < 2:
            self._own_steps += 1
            refuse_range(
                self._own_steps, is_over_loader=False, has_own_state=self._job.has_own_state
            )
        info = OwnBatch(progress.epoch, progress.step, self._lifecycle.world.data_size)
        self._loop.reach_own_step()
        step = self._loop.begin(None, (info, None), iter(()))
        step.only_micro_batch()
        return step

    def attempt(self, *, is_again: bool, is_last: bool) -> Attempt:
        """Create one call of the training function. ``is_again``: not the first one. ``is_last``:
        no other call of ``run.retry`` follows."""
        return Attempt(self, self._session, is_again=is_again, is_last=is_last)


class Attempt:
    """One call of the training function: ``with attempt: …``. Created by ``run.attempts()``."""

    def __init__(
        self, attempts: Attempts, session: Session, *, is_again: bool, is_last: bool
    ) -> None:
        self._attempts = attempts
        self._session = session
        self._scope = session.scope
        self._is_again, self._is_last = is_again, is_last
        self._is_inner = session.scope.in_retry
        self._has_begun = False
        self.is_over = False
        self.succeeded = False

    def begin(self) -> None:
        """Enter the world, if that is possible before the function is called."""
        self._has_begun = True
        if not self._is_inner:
            self._scope.in_retry, self._scope.is_last_call = True, self._is_last
            self._scope.has_left_retry = False
            try:
                self._attempts.begin(is_again=self._is_again)
            except BaseException as error:
                self._leave(error)
                raise

    @property
    def has_nothing_left(self) -> bool:
        """Whether the function need not be called: it has returned on all ranks."""
        progress = self._session.progress
        # Of outstanding callbacks, the function may have to register some.
        is_complete = not self._session.job.progress.callbacks_left
        return not self._is_inner and progress.is_over and is_complete

    def __enter__(self) -> None:
        if not self._has_begun:
            self.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.is_over = True
        if self._is_inner:
            self.succeeded = error is None
            return False
        try:
            is_handled = self._end(error)
        except BaseException as failure:
            self._leave(failure)
            raise
        if error is not None and not is_handled and not self.succeeded:
            self._leave(error)
        return is_handled

    def _leave(self, error: BaseException) -> None:
        self._scope.has_left_retry = True
        self._attempts.failure.end_training(error)

    def _end(self, error: BaseException | None) -> bool:
        """Whether the exception is handled: the function has returned, or is called again."""
        strategy, returned = self._session.strategy, error
        has_returned = False
        try:
            if error is None or isinstance(error, CallEnded) or _is_clean_exit(error):
                has_returned = True
                self._attempts.end()
                self.succeeded = True
                return not isinstance(error, SystemExit)
        except Exception as failure:
            refuse_stale_group(failure)
            for each in causes(failure):  # the end of the call is not the cause of this fault
                if isinstance(each.__context__, CallEnded):
                    each.__context__ = None
            if not strategy.is_fault(failure):
                raise
            error = failure
        finally:
            self._scope.in_retry, self._scope.is_last_call = False, True
        refuse_stale_group(error)
        if not strategy.is_fault(error):
            _refuse_single_samples(error, self._session)
            if isinstance(error, StopIteration) and self._scope.resumed_at:
                raise _at_the_end(self._scope.resumed_at) from error
            return False
        self._scope.in_retry = True
        if not has_returned:
            self._session.progress.surroundings.end_call()
        strategy.recover(error)
        session = self._session
        if has_returned and session.lifecycle.is_restored and session.progress.is_over:
            # On all ranks: only the end is repeated.
            self._scope.is_last_call, self._scope.passes = self._is_last, 0
            return self._end(returned)
        self._scope.in_retry = False
        return True


def _is_clean_exit(error: BaseException) -> bool:
    """Whether the script calls ``sys.exit()``: as ``return``, the same on all ranks."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


_ONE_SAMPLE = "more than 1 value per channel"  # torch/nn/functional.py, _verify_batch_size


def _refuse_single_samples(error: BaseException, session: Session) -> None:
    """Raise ConfigError if BatchNorm has failed because a rank's share of a batch is one sample."""
    is_batch_norm = isinstance(error, ValueError) and _ONE_SAMPLE in described(error)
    if not is_batch_norm or not session.lifecycle.has_world:
        return
    ranks = session.lifecycle.world.data_size
    for plan in (loader.plan for loader in session.job.loaders.values()):
        start, stop = plan.span(plan.steps - 1)
        smallest = min(plan.global_batch, stop - start)
        parts = plan.micro_batch_count(0, smallest, 1)
        if plan.world_of_pairs(smallest) < ranks:
            last = "" if smallest == plan.global_batch else f", and {smallest} in its last step"
            divided = f" and {parts} micro-batches" * (parts > 1)
            raise ConfigError(
                f"BatchNorm needs two samples: a global batch of {plan.global_batch} samples{last}"
                f" leaves a rank with one of them in a world of {ranks} ranks{divided}",
                hint=f"raise global_batch to at least {2 * ranks * plan.micro_batches_per_step}"
                + ", pass drop_last=True to the DataLoader" * bool(last)
                + f", or run on at most {max(1, smallest // (2 * parts))} ranks (--nnodes)",
            ) from error


_ONE_FUNCTION = (
    "Call a function with all trainings (folds, phases) once: def main(): …; run.retry(main)"
)


def _at_the_end(resumed_at: int) -> TrainingError:
    return TrainingError(
        f"next() was called at the end of an epoch that was resumed at step {resumed_at}: "
        "`for i in range(len(loader))` counts from 0 and requests more batches than remain",
        hint="for i in range(loader.index, len(loader)):\n    batch = next(iterator)",
    )


# ----------------------------------------------------------------------------
# Ends the process: after training, or with an exception of the script.


class Shutdown:
    """Saves and reports at the end of the process. One per process."""

    def __init__(self, session: Session, loop: StepLoop, failure: FailureHook) -> None:
        self._failure = failure
        self._session = session
        self._job = session.job
        self._optimizer_watch = session.optimizer_watch
        self._current = session.current
        self._progress = session.progress
        self._lifecycle = session.lifecycle
        self._checkpoints = session.checkpoints
        self._loop = loop
        self._halt = session.halt
        self._group = session.group
        self._worlds = session.worlds
        self._ledger = session.ledger
        self._hooks = session.hooks
        self._journal = session.journal

    def close(self, *, clean: bool, error: str = "", is_of_the_world: bool = False) -> None:
        """End the job for this process. ``error`` is reported to the agent as the reason."""
        report = ""
        if clean and not error:
            # Of a script that handled an exception of its training function itself, and exits.
            clean, error = not self._failure.failed, self._failure.text
            report = self._failure.report
        strategy = self._session.strategy
        self._optimizer_watch.close()
        if clean and not error and not self._halt.has_left:
            unsaved = self._close_in_order()
            if unsaved:
                clean, error = False, unsaved
        else:
            self._hooks.leave_world("close" if clean else "fault")
            must_save = strategy.must_save_after_error(is_of_the_world=is_of_the_world)
            self._end_with(error if must_save else "")
            if clean:
                # The exit code after a handled exception is not known yet. If it is that of a
                # failure, the agent learns of it when the process ends: peers must not break
                # earlier, or the next world would include this rank.
                self._group.keep_connections()
            else:
                self._group.abort()  # peers need not wait for the end of this process
        self._hooks.close()
        # After an error, change nothing else: a step may have begun, and peers may have ended.
        if self._worlds is not None:
            self._worlds.close(clean=clean, error=report or error)
        self._lifecycle.close()
        self._journal.emit(RunClosed(clean=clean, error=error), level=logging.DEBUG)

    def _close_in_order(self) -> str:
        """Save the last state after training has completed. Returns why it is not saved; empty: it
        is, or another rank reports it."""
        unsaved = ""
        self._loop.finish(is_last=True)
        self._hooks.leave_world("close")
        if self._lifecycle.is_restored and self._ledger.is_on:
            self._ledger.end(
                generation=self._lifecycle.world.generation,
                step=self._job.progress.step,
                rank=self._lifecycle.world.rank,
                sha256=self._job.weights_sha256(),
                position=self._lifecycle.world.rank_in_replica,
            )
        if self._lifecycle.is_restored and self._current.step is None:
            unsaved = self._save_end()
        self._checkpoints.release()
        self._checkpoints.close(0.0)
        for module in self._job.modules.values():
            module.leave_world()
        self._group.destroy()
        if unsaved:
            # Not a TrainingError, a refusal that ends the job: the storage may be back at the next
            # start of the workers.
            unsaved_error = SaveError(
                unsaved,
                hint="free space, or make the folder writable: the next start continues from the "
                "newest checkpoint",
            )
            self._failure.fail_at_exit(unsaved_error)
        return unsaved

    def _save_end(self) -> str:
        """Save the last state, unless it is saved. Where the script counts passes over loaders, and
        not run.epochs, the code after the last pass is part of it, on all ranks. So is the code
        after a loop that was left, as a part of the last step; this rank saves the boundary before
        that step if it has to save alone, because others have not ended it."""
        strategy = self._session.strategy
        is_begun = self._checkpoints.has_begun(self._job.progress.step)
        is_left = self._session.progress.keeps_boundary
        if not (self._session.scope.passes or is_begun or is_left):
            strategy.leave_end()
        saver = self._checkpoints
        is_saved = saver.flush(
            self._job, LAST_SAVE_S, before_alone=lambda: strategy.leave_end(is_alone=True)
        )
        # One rank speaks for all: a rank that cannot read the folder does not know of the others.
        return "" if is_saved or self._lifecycle.world.rank > 0 else saver.why_unsaved(self._job)

    def _end_with(self, error: str) -> None:
        """Save the last commit, if possible, before the script's exception ends the process."""
        if error and self._lifecycle.is_restored and self._checkpoints.is_open:
            with self._halt.own_save():
                self._save_after(error)
        self._checkpoints.close(SHARE_S)

    def _save_after(self, error: str) -> None:
        if not self._progress.roll_back():
            step = self._job.progress.step
            reason = f"the script failed in the middle of an update: {error}"
            self._journal.emit(CheckpointSkipped(name=f"step {step}", reason=reason))
        elif self._checkpoints.writers.world_size == 1:
            self._checkpoints.flush(self._job, leaving_s())
        else:
            self._session.strategy.flush_after_error()


# ----------------------------------------------------------------------------
# Assembles the components of training. The only module that imports all of them.


@dataclass(frozen=True, kw_only=True)
class Components:
    """The parts that :class:`~elastic.train.run.Run` delegates to. One per process."""

    session: Session
    bootstrap: Bootstrap
    loop: StepLoop
    changes: ChangeDetector
    attempts: Attempts
    metrics: MetricsLog
    profiler: StepProfiler
    failure: FailureHook
    shutdown: Shutdown
    preemption: Preemption


def assemble(
    *,
    seed: int,
    group: ProcessGroup,
    replica: ModelReplica | None = None,
    checkpoints: CheckpointManager,
    ledger: Ledger,
    journal: EventSink,
    worlds: Worlds | None = None,
    on_job_folder: Callable[[str], object] = lambda folder: None,
) -> Components:
    """Assemble the components of one process. ``worlds``: the link to its agent; by default the one
    in ``ELASTIC_LINK``, or none. ``on_job_folder`` is called with the job's checkpoint folder.

    Raises LinkError if the agent does not answer.
    """
    current, timer, scope = CurrentStep(), StepTimer(), Scope()
    registry = Registry(seed=seed, inside=lambda: current.inside, group=group)
    job = registry.job
    if worlds is None and (link := os.environ.get("ELASTIC_LINK")):
        worlds = _connect(link, group, job, current, timer)
    if replica is not None and replica.mesh:
        _form(replica, worlds)
        job.stage = replica.mesh.stage_of(replica.position)
    metrics = MetricsLog(
        journal, lambda: logged_at(current, job.progress), default_writers=default_writers
    )
    progress_line = ProgressLine(
        lambda: metrics.newest, lambda: steps_left(scope, job), is_on=progress_is_wanted()
    )
    profiler = StepProfiler(journal)
    hooks, listeners = Hooks(), Listeners()
    registry.piggyback(checkpoints.flags)
    session = Session(
        registry=registry,
        current=current,
        progress=RankProgress(job, registry.optimizer_watch, current),
        timer=timer,
        scope=scope,
        callbacks=StepCallbacks(),
        listeners=listeners,
        group=group,
        lifecycle=Lifecycle(job, group, checkpoints, ledger, hooks, replica),
        worlds=worlds,
        checkpoints=checkpoints,
        halt=Halt(),
        ledger=ledger,
        journal=journal,
        hooks=hooks,
    )
    session.strategy = Restart(session)
    early_leave = EarlyLeave(session)
    changes = ChangeDetector(job, lambda: checkpoints.is_on)
    structures = ModuleStructures(job, changes.is_new_loop)
    failure = FailureHook(journal, session.position)
    in_process = None
    if worlds is not None:
        checkpoints.locate(partial(_job_folder, worlds, on_job_folder))
        checkpoints.fence(is_superseded=worlds.is_superseded, is_permitted=worlds.is_permitted)
        worlds.max_ranks = registry.max_ranks
        worlds.on_heartbeat = early_leave.on_heartbeat
        worlds.on_profile = lambda request: profiler.request(
            ProfileRequest(request.steps, ranks=request.ranks)
        )
        if worlds.in_process:
            in_process = InProcess(session, worlds, early_leave)
        failure.notify = worlds.fail
    bootstrap = Bootstrap(session, in_process)
    loop = StepLoop(session, bootstrap, early_leave, changes.copies)
    units = Units(session, bootstrap, loop, timer.restart)
    hooks.install(
        (
            StepAccount(journal),
            metrics,
            progress_line,
            profiler,
            early_leave,
            changes,
            units,
            structures,
            listeners,
        )
    )
    return Components(
        session=session,
        bootstrap=bootstrap,
        loop=loop,
        changes=changes,
        attempts=Attempts(session, bootstrap, loop, units, failure, changes, structures),
        metrics=metrics,
        profiler=profiler,
        failure=failure,
        shutdown=Shutdown(session, loop, failure),
        preemption=Preemption(session),
    )


def _form(replica: ModelReplica, worlds: Worlds | None) -> None:
    """Form the group of this replica's ranks. Raises ConfigError without an agent to form it."""
    if replica.mesh.size == 1:
        replica.form()
        return
    if worlds is None or not worlds.in_process:
        raise ConfigError(
            f"elastic.join(mesh=…) with replicas of {replica.mesh.size} ranks (mesh "
            f"{replica.mesh}) needs an agent in in-process mode",
            hint="torchrun --rdzv-backend=etcd …; with other launchers, sharded models recover by "
            "a restart (docs/how-to/sharded.md)",
        )
    point = worlds.rendezvous_of_replica(
        replica.mesh.size,
        REPLICA_RENDEZVOUS_S,
        mesh=str(replica.mesh),
        on_device=replica.device.type != "cpu",
    )
    replica.form(point, os.path.dirname(os.environ["ELASTIC_LINK"]))
    worlds.send(ReplicaFormed())


def _connect(
    link: str, group: ProcessGroup, job: JobState, current: CurrentStep, timer: StepTimer
) -> Worlds:
    def position() -> Heartbeat:
        group.report_collectives()
        return timer.heartbeat(worlds.entering, job, current)

    worlds = Worlds(
        abort=group.abort,
        position=position,
        current_step=lambda: current.first_number,
        in_process=os.environ.get(MODE) != RESTART,
    )
    worlds.connect(link, local_rank=number_on_node(os.environ))
    return worlds


def _job_folder(worlds: Worlds, on_known: Callable[[str], object], own: str) -> str:
    folder = worlds.job_folder(own)
    on_known(folder)
    return folder


def _move_journal(journal: Journal, checkpoints: str) -> None:
    """Continue the journal beside the job's checkpoints, and write profiles there."""

    def moved(folder: str) -> None:
        os.environ["ELASTIC_JOURNAL"] = folder

    journal.move(checkpoints, moved)


def journal_of_environment() -> Journal:
    """The journal in the folder ``ELASTIC_JOURNAL``, which the agent sets; without the variable it
    writes no file."""
    return Journal(
        folder=chosen_journal(),
        identity={
            "node": node_name(),
            "rank": int(os.environ.get("RANK", "0")),
            "generation": world_from_environment().generation,
        },
        role="worker",
        run_id=os.environ.get("TORCHELASTIC_RUN_ID"),
    )


def start_components(
    policy: Checkpoints | None,
    *,
    seed: int = 0,
    backend: str | None = None,
    journal: EventSink | None = None,
    manager: CheckpointManager | None = None,
    worlds: Worlds | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Components:
    """The components of a run that the caller closes: :func:`join` without the exit hooks.

    By default ``journal`` is the one in ``ELASTIC_JOURNAL``, ``manager`` one for ``policy``, and
    ``worlds`` the link in ``ELASTIC_LINK``.
    """
    torch_private.check()
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    replica = mesh_of(mesh, device, backend)
    own = journal_of_environment() if journal is None else None
    journal = own if own is not None else journal
    assert journal is not None
    components = assemble(
        seed=seed,
        group=process_group(device, backend, replica, journal),
        replica=replica,
        checkpoints=CheckpointManager(policy, journal) if manager is None else manager,
        ledger=Ledger.from_environment(),
        journal=journal,
        worlds=worlds,
        on_job_folder=partial(_move_journal, own) if own is not None else lambda folder: None,
    )
    if own is not None:
        own.locate(components.session.position)
        if components.session.worlds is not None:
            own.listen(components.session.worlds.count)
    components.preemption.install()
    return components


# ----------------------------------------------------------------------------
# ``run.build``: objects that are created in each world, on a DeviceMesh of that world.

T = TypeVar("T")

MESH_DIM = "shard"
_SEED = 0x6275696C64  # for random numbers in the function: equal on all ranks and in all worlds


class BuildsInWorlds:
    """The part of a run that rebuilds objects in each world."""

    _parts: Components

    def build(self, fn: Callable[[DeviceMesh], T]) -> T:
        """Call ``fn`` with a DeviceMesh of the current world, and return its result.

        For models that are sharded over the whole world, so that no rank has a full copy (FSDP2)::

            def build(mesh):
                model = Net()
                fully_shard(model, mesh=mesh)
                return model, torch.optim.AdamW(model.parameters())

            def train():
                model, optimizer = run.build(build)
                for epoch in run.epochs(3):
                    for x, y in loader: …

            run.retry(train)

        ``mesh`` has one dimension, ``shard``, of the world's size. ``fn`` returns a module, or a
        tuple, list or dict of modules, optimizers and other objects with state; all of it is part
        of the job's state, and is loaded before the first loop: surviving ranks contribute only
        the shards in their nodes' memory. Random numbers in ``fn`` are the same on all ranks
        and in all worlds. Gradients are those of the mean over the global batch, even if ranks
        have different numbers of samples.

        When the world changes, ``run.retry`` calls its function again, which must call this again.
        Using an object of an earlier world raises TrainingError.

        Raises:
            ConfigError: the result of ``fn`` is not sharded over ``mesh``, or cannot be saved; or
                the job has no checkpoints, or has a wrapped module.
            TrainingError: called outside of ``run.retry``, twice in a world, or too late.
        """
        parts = self._parts
        job, lifecycle = parts.session.job, parts.session.lifecycle
        self._check_call()
        parts.attempts.check_registration("build")
        job.is_rebuilt = True
        parts.session.checkpoints.keep_shards_in_memory()
        world = parts.bootstrap.enter_world()
        if (remains := job.remains) is not None:
            remains.warn_if_in_memory()
        device = parts.session.group.device
        mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=(MESH_DIM,))
        seed_all(derive_seed(job.seed, _SEED))
        rebuilding.freeze_older_objects()
        torch_private.forget_meshes()  # the script may have used objects of an ended world since
        with torch.enable_grad():
            returned = fn(mesh)
        parts.session.registry.hold(Built(returned, mesh, generation=lifecycle.world.generation))
        return returned

    def _check_call(self) -> None:
        parts = self._parts
        job = parts.session.job
        if not parts.session.scope.in_retry:
            raise TrainingError(
                "run.build() was called outside the function that run.retry calls: its result "
                "belongs to one world, and each world needs a new one",
                hint=AGAIN,
            )
        if job.built is not None:
            raise TrainingError(
                "run.build() was called twice in one world",
                hint="return all models and optimizers from one function: "
                "return model, critic, optimizer, critic_optimizer",
            )
        if parts.session.lifecycle.is_restored:
            raise TrainingError(
                "run.build() is called too late: the job's state is already restored",
                hint="call run.build() first in the function that run.retry calls: before "
                "run.state, run.world, run.is_main, run.epochs and the loader are read",
            )
        if job.is_sharded:
            raise ConfigError(
                "run.build() cannot be used with elastic.join(mesh=…): a replica keeps its model",
                hint="use run.wrap(fully_shard(model, mesh=run.mesh)), or omit mesh=",
            )
        if job.modules:
            raise ConfigError(
                "run.build() cannot be used in a job that calls run.wrap()",
                hint="return all modules, sharded, from the function of run.build(); or wrap all",
            )
        if not parts.session.checkpoints.is_on:
            raise ConfigError(
                "run.build() needs checkpoints: no rank holds the complete state, so a rank's "
                "death would lose it",
                hint='elastic.join(checkpoints="/shared/folder"); the newest checkpoints are also '
                "kept in the nodes' memory",
            )


# ----------------------------------------------------------------------------
# ``run.reduce_gradients``: the end of the backward passes of pipeline stages.


class ReducesStages:
    """The part of a run that reduces the gradients of pipeline stages."""

    _parts: Components

    def reduce_gradients(self) -> None:
        """With a dimension ``pp``: make all gradients those of the mean over the global batch.

        Call it on every rank, once per optimizer step, between the last backward pass and
        ``clip_grad_norm_``::

            schedule.step(x)  # on the last stage schedule.step(target=y)
            run.reduce_gradients()
            optimizer.step()

        Each stage is summed over the replicas, never over other stages. Without a dimension
        ``pp``, backward passes reduce the gradients, and this does nothing.

        Raises:
            ConfigError: the mesh has a dimension ``pp``, but this rank has wrapped no module.
            TrainingError: no backward pass has run, or its gradients are already reduced.
        """
        parts = self._parts
        if not parts.session.lifecycle.replica.mesh.has_stages:
            return
        reductions = [
            module.reduction
            for module in parts.session.job.modules.values()
            if isinstance(module.reduction, StageReduction)
        ]
        if not reductions:
            raise ConfigError(
                "run.reduce_gradients() on a rank without a module",
                hint="call run.wrap(stage) on every rank, each with its own stage",
            )
        if all(module.in_world for module in parts.session.job.modules.values()):
            reduce_stages(reductions)


# ----------------------------------------------------------------------------
# The methods of ``run`` for metrics, progress and profiles.


class RunLogging:
    """Base class of :class:`~elastic.train.run.Run`: metrics, progress and profiles."""

    def __init__(self, metrics: MetricsLog, profiler: StepProfiler, scope: Scope) -> None:
        self._metrics = metrics
        self._scope = scope
        self._profiler = profiler

    def log(self, values: Mapping[str, Loggable] | None = None, /, **named: Loggable) -> None:
        """Log numbers for the current step: ``run.log(loss=loss, lr=lr)``.

        Or ``run.log({"train/loss": loss})``. Call it on all ranks: only rank 0's values are
        written, and a rank that becomes rank 0 continues with its own.
        ``run.log(**run.mean(len(x), loss=loss))`` logs the mean over all ranks. A tensor must have
        one element; on a GPU it is read later, and no step waits for it. Repeated steps replace
        their values. See docs/how-to/metrics.md.

        Raises ConfigError for a value that is not a number.
        """
        self._metrics.log({**values, **named} if values else named)

    def log_to(self, *writers: MetricsWriter) -> None:
        """Write logged values to these writers instead of the default TensorBoard folder.

        :class:`elastic.TensorBoard`, or any object with the three methods of
        :class:`~elastic.train.metrics.MetricsWriter`. Call it on all ranks, before
        :meth:`log`: later it raises TrainingError.
        """
        for writer in writers:
            self._metrics.add_writer(writer)

    def plan_steps(self, total: int) -> None:
        """Set the total number of optimizer steps of the job: ``run.plan_steps(10_000)``.

        The progress line and `elastic status` then show the remaining time. Training does not end
        after these steps. `run.epochs` sets the total itself; call this if the script counts steps,
        or trains with :meth:`begin` and :meth:`commit`. The last call applies. Raises ConfigError
        for anything but a positive integer.
        """
        if type(total) is not int or total < 1:
            raise ConfigError(
                f"run.plan_steps({total!r}) is not a valid step count",
                hint="pass the number of optimizer steps of the whole job, including steps before "
                "a resume: run.plan_steps(10_000)",
            )
        self._scope.total_steps = total
        phases.plan_steps(total)

    def profile(self, steps: int | range, *, ranks: Sequence[int] = ()) -> None:
        """Profile the next ``steps`` steps, or a range of step numbers, with torch.profiler.

        Each rank, or each of ``ranks``, writes a trace
        ``gGENERATION-stepSTEP-rankRANK.pt.trace.json`` into ``profiles`` in the folder of
        ``ELASTIC_JOURNAL``, or in the working directory, for Perfetto or TensorBoard. It begins and
        ends between two steps; if the world ends earlier, it contains the completed steps.
        `elastic profile` does the same from outside. Call it before :meth:`retry`: in the function
        that retry calls, it would profile again after each recovery.

        Raises:
            ConfigError: ``steps`` is not 1 to 10,000 consecutive steps.
            TrainingError: another profile is running or requested.
        """
        if not self._profiler.request(request_of(steps, tuple(ranks))):
            raise TrainingError(
                "run.profile() was called while another profile is running or requested",
                hint="call it after the other profile has ended",
            )


# ----------------------------------------------------------------------------
# The public API: ``run = elastic.join()``, and all methods of ``run``.
#
# In restart mode, a fault of the world ends the process; torchrun's agent restarts it, and the
# script calls ``join`` again. In-process recovery takes place in ``retry``, with the same API.


@not_compiled_methods
class Run(BuildsInWorlds, ReducesStages, RunLogging):
    """A worker's interface to its job. Created by :func:`join`."""

    def __init__(self, parts: Components) -> None:
        super().__init__(parts.metrics, parts.profiler, parts.session.scope)
        self._parts = parts
        self._turns = 0

    # -- the world ----------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The run id passed to torchrun; ``local`` without torchrun."""
        return os.environ.get("TORCHELASTIC_RUN_ID", "local")

    @property
    def device(self) -> torch.device:
        """This worker's device: ``cuda:LOCAL_RANK``, or the CPU."""
        return self._parts.session.group.device

    @property
    def state(self) -> dict[str, Any]:
        """Values that are part of the job's state: saved, and restored on all ranks.

        Numbers, strings, None, tensors, arrays, enumerations, and containers of them, which stay
        the same objects; anything else raises TrainingError at the end of the step. Set the same on
        all ranks. If ranks differ, a warning
        is logged, and a new world uses the lowest rank's. Raises the same errors as :meth:`epochs`.
        """
        self._parts.attempts.restore_if_complete()
        return self._parts.session.job.user

    @property
    def world(self) -> World:
        """The current world: generation, rank, size and more.

        Raises NoWorld before the first world, and the same errors as :meth:`epochs`.
        """
        self._parts.attempts.enter_if_complete()
        return self._parts.session.lifecycle.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the world.

        Raises NoWorld before the first world, where :meth:`on_main` helps, and the same errors as
        :meth:`epochs`.
        """
        return self.world.rank == 0

    @property
    def has_world(self) -> bool:
        """Whether the first world has begun: :attr:`world` is known. Does not enter one."""
        return self._parts.session.lifecycle.has_world

    @property
    def largest_world(self) -> int:
        """The number of ranks of the largest world: the maximum number of nodes × the workers of
        one. The same in all worlds, and known before the first; under a launcher without a maximum,
        the current number."""
        return largest_world()

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and is not committed: between :meth:`begin`, or a batch of a
        loader, and the commit."""
        return self._parts.session.current.inside is not None

    @property
    def saves(self) -> bool:
        """Whether the job has a folder for checkpoints."""
        return self._parts.session.checkpoints.is_on

    @property
    def mesh(self) -> DeviceMesh:
        """The replica's DeviceMesh. Raises ConfigError without ``join(mesh=…)``."""
        return self._parts.session.lifecycle.replica.device_mesh

    # -- registration -------------------------------------------------------------------------

    def wrap(self, module: nn.Module, **ddp: Any) -> ElasticDDP:
        """Wrap ``module`` in a DistributedDataParallel that persists across worlds; with
        ``join(mesh=…)``, return the module itself, sharded over :attr:`mesh`.

        ``ddp``: options of DDP. Call it before the first loop, in the same order on all ranks.
        Raises ConfigError for anything but a module and for unsupported options, TrainingError if
        it is called too late.
        """
        hint = "model = run.wrap(Net().to(run.device)), each module by a call of its own"
        errors.instance("run.wrap", module, nn.Module, hint=hint)
        self._parts.attempts.check_registration("wrap")
        return cast(ElasticDDP, self._parts.session.registry.wrap(module, ddp))

    def track(self, *unnamed: NoReturn, local: bool = False, **named: Any) -> None:
        """Save and restore these objects: anything with ``state_dict`` and ``load_state_dict``, and
        generators of random numbers of torch, NumPy and random.

        Optimizers of wrapped modules must be tracked. Call it before the first loop.

        ``local``: the objects are state of this rank alone, such as meters and metrics of its
        samples. They are rolled back with an interrupted step, and never overwritten by another
        rank's; a joining rank begins with its own new ones. A dead rank's part is lost, and so is a
        rank's part of a step that others have committed and it has not. They are not compared
        between ranks, and not in checkpoints: after a restart they are new.
        :meth:`gather_states` collects them; :meth:`sum_with_gradients` loses nothing.

        Raises TrainingError if it is called too late, for an object without these methods, for a
        name in use, and for a local optimizer, scheduler or scaler; ConfigError for an object with
        sharded tensors, and for one without a name.
        """
        errors.named_only("run.track", unnamed, "run.track(optimizer=optimizer)")
        errors.instance("run.track: local=", local, bool, hint="run.track(meter=meter, local=True)")
        self._parts.attempts.check_registration("track")
        self._parts.session.registry.track(named, local=local)

    def gather_states(self, name: str) -> list[dict[str, Any]]:
        """The ``state_dict`` of an object of ``run.track(…, local=True)`` on each rank, in their
        order. Call it on all ranks; tensors arrive on the CPU.

        Raises TrainingError for another name, for a state that cannot be sent, and in a call of
        :meth:`retry` that other ranks have completed.
        """
        session = self._parts.session
        if (tracked := session.job.local.get(name)) is None:
            raise TrainingError(
                f"run.gather_states({name!r}): there is no local object of this name",
                hint=f"run.track({name}=…, local=True); all other state is the same on all ranks",
            )
        self._parts.bootstrap.enter_world()
        self._parts.attempts.note_collective("run.gather_states()")
        with session.lifecycle.replica.whole():
            return gather(tracked.state_dict(), session.job)

    def untracked(self, *names: str) -> None:
        """Declare that these values need not be saved: they do not influence training.

        ``names``: as in the warning or error about changes that are not part of the job's state,
        ``run.untracked("self.meter")``.
        """
        self._parts.changes.ignore(names)
        self._parts.loop.other_loaders.ignore(names)

    # -- data ---------------------------------------------------------------------------------

    def loader(
        self,
        loader: Iterable[Any],
        *,
        dataloader: DataLoader[Any] | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        micro_batches: int | None = None,
        order: Ordering | None = None,
        weights: str = "samples",
        whole_batches: bool = False,
        max_steps: int | None = None,
    ) -> ElasticLoader:
        """Distribute a DataLoader over the world, at a constant global batch.

        Iterating yields this rank's share of each step, from the job's position to the end of the
        epoch. ``dataloader``: the DataLoader inside a wrapper. ``global_batch``: samples per step
        over all ranks, by default batch_size × the largest world × ``micro_batches``. For
        :meth:`steps`, gradient accumulation: ``micro_batch`` is the maximum number of samples at
        once, ``micro_batches`` the number of micro-batches of a full step on each rank; a step of
        fewer samples has proportionally fewer, rounded up, and ``drop_last`` drops what does not
        fill one of all ranks. ``max_steps``: the maximum number of steps of an epoch.

        ``order(epoch)`` returns the dataset indices of an epoch, or its batches, each a list of
        indices, in place of the DataLoader's sampler. It may repeat and omit samples. Epochs have
        equal lengths, and all ranks must compute the same.

        ``weights``: those of the ranks' gradients. "samples": the rank's fraction of the step's
        samples, for a loss that is a mean over them. "equal": 1 / ranks, as in DDP, for a loss that
        is normalised over all ranks, such as a sum over tokens × ranks / the tokens of all ranks;
        micro-batches are summed, and a rank without samples adds nothing. "largest": 1 / the ranks
        of the largest world, for such a loss × ``largest_world / world.size``. The product is the
        same in all worlds, so that float32 numbers of the backward pass are rounded equally.

        ``whole_batches``: ranks get whole batches of the largest world instead of parts of them.
        Which samples share a forward pass is then the same in every world, so that any loss of a
        batch (a mean over tokens, a contrastive one) is exact, and a rank of a smaller world
        computes several in turn: of 8 batches, 7 ranks compute two each, one of them a filler on
        most. Use ``weights="equal"``, and each loss times ``loader.share.mean_weights``.

        Call it before the first loop. See docs/data.md.

        Raises TrainingError if it is called too late; ConfigError for an object that is not a
        DataLoader, for data that cannot be split (an IterableDataset, a sampler or order that
        cannot be repeated), and for invalid sizes.
        """
        self._parts.attempts.check_registration("loader")
        loop = self._parts.loop
        return self._parts.session.registry.add_loader(
            loader,
            drive=lambda driven: loops.batches(loop, driven),
            index=lambda elastic_loader: loops.index(loop, elastic_loader),
            dataloader=dataloader,
            share_is_read=lambda: loops.share_is_read(loop),
            global_batch=global_batch,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            order=order,
            weights=weights,
            whole_batches=whole_batches,
            max_steps=max_steps,
        )

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """This rank's part of a DataLoader for evaluation: every sample once, without padding.

        Reads the dataset in its order, or the part of it that the loader's sampler covers; how
        often and in which order a sampler draws has no effect. A rank may get no batch: keep
        collectives (:meth:`mean`) out of the loop over it. With a sharded model, all ranks get the
        same number of batches. Raises ConfigError for data that :meth:`loader` cannot split either.
        """
        job = self._parts.session.job
        return shard_by(
            loader,
            self._parts.bootstrap.rank_and_size,
            is_even=lambda: job.is_sharded or job.built is not None,
            begins=self._parts.session.current.evaluation_begins,
        )

    # -- loops --------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The remaining epochs of ``count``; none if the job is complete.

        The first loop enters the world and restores the state. Raises TrainingError if that is
        impossible: the state belongs to another model, or :meth:`build` was not called in this
        world; ConfigError if a checkpoint is required and there is none, and for a ``count`` that
        is not an integer of at least 0.
        """
        hint = "for epoch in run.epochs(10): the number of epochs of the whole job"
        count = errors.whole_number("run.epochs: ", count, least=0, hint=hint)
        return loops.epochs(self._parts.loop, count)

    def steps(
        self,
        loader: ElasticLoader,
        *,
        checkpoints: Checkpoints | Root | None = None,
        when: WhenGiven = None,
        keep: KeepGiven = None,
    ) -> Iterator[Step]:
        """The remaining steps of the loader's epoch, for loops over micro-batches.

        ``checkpoints``, ``when`` and ``keep`` are as in :func:`join`, and override its arguments
        from now on: ``when=EverySeconds(600) | OnPreemption()``, ``keep=2``. A job that joined
        without a folder can set it here only before ``run.retry`` or ``run.epochs`` restores the
        state. Raises ConfigError for invalid options and anything but a loader of :meth:`loader`,
        and TrainingError for a folder that is set too late.
        """
        hint = "loader = run.loader(DataLoader(…)); without one, use run.begin() and run.commit()"
        errors.instance("run.steps", loader, ElasticLoader, hint=hint)
        if (checkpoints, when, keep) != (None, None, None):
            manager, lifecycle = self._parts.session.checkpoints, self._parts.session.lifecycle
            manager.amend(checkpoints, when, keep, is_restored=lifecycle.is_restored)
            self._parts.session.registry.piggyback(manager.flags)
        return loops.steps_for_script(self._parts.loop, loader)

    def retry(self, fn: Callable[..., T], *args: Any, is_last: bool = True, **kwargs: Any) -> T:
        """Call ``fn`` in a world: the single recovery point, around the complete loop.

        When the world changes, ``fn`` is called again in the next one: loops resume, and local
        variables are reset. Numbers, lists, small tensors and hooks outside of it that it changes
        before its first loop are as before its first call. Exceptions other than faults of the
        world propagate; from an inner retry, all exceptions propagate to the outer one. If the
        launcher cannot change worlds in process, the agent restarts it after a fault. Raises
        ConfigError if ``fn`` is no function.

        ``is_last=False``: other calls follow in the same training, for example one for each epoch
        of a framework. The state is not saved at the end of such a call. All ranks make the same
        calls in the same order, also those that join later: calls that other ranks have completed
        have no effect there.

        Returns what ``fn`` returns. It is None on a rank that was interrupted in ``fn`` while the
        others completed it, and on one that joined later: no step is left in which it could begin.
        """
        errors.function("run.retry", fn, hint="pass the function itself: run.retry(train)")
        self._parts.changes.call(fn, args, kwargs)
        result: Any = None  # of the last call that has returned
        for attempt in self.attempts(is_last=is_last):
            with attempt:
                value = fn(*args, **kwargs)
                if not self._parts.session.progress.is_past_end:
                    result = value
        return cast("T", result)

    def attempts(self, *, is_last: bool = True) -> Iterator[Attempt]:
        """Inline form of :meth:`retry`: ``for attempt in run.attempts(): with attempt: …``."""
        is_again = False
        while True:
            attempt = self._parts.attempts.attempt(is_again=is_again, is_last=is_last)
            is_again = True
            attempt.begin()
            if attempt.has_nothing_left:
                attempt.__exit__(None, None, None)
            else:
                yield attempt
            if not attempt.is_over:
                return  # the loop was left with `break`
            if attempt.succeeded:
                return

    # -- work between steps -----------------------------------------------------------------------

    def once(
        self,
        name: str,
        fn: Callable[..., T],
        *args: Any,
        at: At | None = None,
        **kwargs: Any,
    ) -> T:
        """Call ``fn`` on all ranks between two steps: an evaluation, a save, a log.

        If a fault interrupts it, its changes are undone and the next call of ``once`` repeats it;
        the step before it is not repeated. It is complete when ``fn`` has returned on all ranks.
        From then on its changes of the job's state (tracked objects, :attr:`state`) are kept, and a
        call at the same place in training is skipped where :meth:`retry` calls its function again.
        It is no step: step numbers and saves by step do not count it.

        ``at``: the place in training, if the script decides by the job's state which work is due,
        ``at=step``; by default the call's place in the script, of which everything before the loop
        that resumes is past. Within a step that is not committed, ``fn`` is a part of that step.
        Outside of :meth:`retry`, this is a call of retry by itself.

        Returns what ``fn`` returns, which must be of the types of :attr:`state`, and the same on
        all ranks. A skipped call returns that value, or where no step since has one at this place,
        the last value of that name. Raises ConfigError if ``fn`` is no function, TrainingError for
        a value that cannot be kept and for a function that trains steps, and the same errors as
        :meth:`epochs`.
        """
        errors.instance("run.once", name, str, hint='run.once("evaluate", evaluate)')
        errors.function("run.once", fn, hint='run.once("evaluate", evaluate)')
        result: Any = None
        for attempt in self._attempts_of_unit():
            with attempt:
                result = self._parts.attempts.units.run(name, lambda: fn(*args, **kwargs), at)
        return cast("T", result)

    def _attempts_of_unit(self) -> Iterator[AbstractContextManager[object]]:
        session = self._parts.session
        can_recover = session.strategy.can_recover or not session.lifecycle.has_world
        if session.scope.in_retry or not can_recover:
            return iter((nullcontext(),))
        return self.attempts(is_last=False)

    # -- for frameworks with their own loop -----------------------------------------------------

    def begin(self) -> Step:
        """Begin a step of the caller's own loop, for frameworks (Lightning, Accelerate, …).

        The first call enters the world. The caller distributes the data and tracks its position;
        every rank has the same share. Raises WorldChanged if the world changes before this step,
        NoWorld after :meth:`close`, and the same errors as :meth:`epochs`.
        """
        return self._parts.attempts.begin_own_step()

    def commit(self, *, changes_follow: bool = True) -> None:
        """Commit the step begun by :meth:`begin`, or end the current step of a loop over a loader.

        What follows in the loop, such as logging or :meth:`once`, then belongs to no step. Call it
        after everything that the step changes: a fault that interrupts the rest of the loop's body
        does not repeat it. ``changes_follow``: pass False if the code between this call and the
        next step changes no state of the job, except in :meth:`once`: its state is then read once
        per step instead of twice. Without a current step, the call has no effect; nor after a loop
        over a loader that was left by `break`, whose last step ends when the next loop begins.
        Raises TrainingError if some of the step's micro-batches are missing, and for a `break`
        after the call: a fault between them would resume the loop.
        """
        self._parts.loop.commit_early(changes_follow=changes_follow)

    def is_fault(self, error: BaseException) -> bool:
        """Whether ``error`` means that the world has ended, so that :meth:`recover` can help."""
        if uses_stale_group(error):
            return False
        return self._parts.session.strategy.is_fault(error)

    def recover(self, error: BaseException) -> None:
        """Enter the next world, with the state of the last commit. Raises ``error`` itself
        if it is not a fault of the world; TrainingError for a group of an earlier world."""
        refuse_stale_group(error)
        if not self.is_fault(error):
            raise error
        self._parts.session.strategy.recover(error)

    # -- callbacks ----------------------------------------------------------------------------

    def after_step(self, callback: Callable[[Step], object]) -> None:
        """Call ``callback`` after each optimizer step, for example to update an EMA.

        It is called once per step: a callback that a fault of the world interrupts is called again
        in the next world, but callbacks before it are not. Register it before :meth:`retry`, or in
        its function. Raises ConfigError if it is not a function.
        """
        errors.function("run.after_step", callback, hint="it is called with the step")
        self._parts.session.callbacks.add(callback)
        self._parts.changes.add_callback(callback)

    def on_world(self, callback: Callable[[World], object]) -> None:
        """Call ``callback`` when a world's state is restored; immediately if that is the case.

        Raises ConfigError if it is not a function.
        """
        errors.function("run.on_world", callback, hint="it is called with the world")
        self._parts.session.listeners.on_world(callback)

    def on_main(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when this rank becomes rank 0; immediately if it is. Raises ConfigError
        if it is not a function."""
        errors.function("run.on_main", callback, hint="it is called without arguments")
        self._parts.session.listeners.on_main(callback)

    # -- collective operations ----------------------------------------------------------------

    def mean(self, weight: float, **values: float | torch.Tensor) -> dict[str, float]:
        """The weighted mean of each value over the world; NaN if all weights are 0.

        Call it on every rank, with the same names. Values of a rank with weight 0 are ignored, even
        NaN. So are those of a rank that has no sample in the current step, whatever their weight:
        its batch is a filler; but not after it has begun to read samples of :meth:`shard`. Raises
        NoWorld after :meth:`close`, ConfigError for a negative weight or no number, and
        TrainingError in a call of :meth:`retry` that other ranks have completed.
        """
        names = sorted(values)
        if self._parts.session.current.lacks_samples:
            weight = 0.0
        numbers = weighted(weight, [(name, values[name]) for name in names])
        self._parts.bootstrap.enter_world()
        self._parts.attempts.note_collective()
        with self._parts.session.lifecycle.replica.whole():
            total, *sums = self._parts.session.job.order.sum_values(numbers)
        means = [s / total if total else math.nan for s in sums]
        known = self._parts.metrics.means
        return {name: known.add(mean) for name, mean in zip(names, means, strict=True)}

    def sum_with_gradients(self, **values: float | torch.Tensor) -> Sums:
        """Sum these values over all ranks with the gradients of the current step: no collective of
        their own, and exact in float64 ::

            loss = criterion(model(x), y)
            sums = run.sum_with_gradients(loss=loss.detach() * len(x), samples=len(x))
            loss.backward()
            optimizer.step()
            run.state["loss"] += sums["loss"]  # the same on all ranks

        The sums can be read after the next backward pass that reduces gradients, and until then
        values of the same name are added: over micro-batches, or passes under ``no_sync()``. What a
        step makes of them is part of it: a death loses no rank's part, since a step is committed
        with the values of all ranks or repeated. Values of a filler, on a rank without samples,
        are ignored. Values that are given after the step's last backward pass, those of a sharded
        model, and of parameters in float16, are summed in a collective at the end of the step, and
        can be read after it.

        Call it on every rank, with the same names in the same order. Raises TrainingError outside
        of a step, and where ranks sum different names; ConfigError for a value that is not a
        number.
        """
        session = self._parts.session
        step = session.current.inside
        if step is None:
            raise TrainingError(
                "run.sum_with_gradients() was called outside of a step, where nothing is summed",
                hint="means = run.mean(samples, loss=loss / samples)",
            )
        counts = counts_values(step, tuple(values)) and not session.current.lacks_samples
        return session.job.order.sums.give(values, counts=counts)

    def node_first(self) -> AbstractContextManager[None]:
        """Run the body on one worker of each node first, then on the others, for example to
        download.

        Raises PermissionError if the lock file in the folder for temporary files is a link, or
        belongs to another user.
        """
        self._turns += 1
        return node_first(self._turns)

    def close(self, *, clean: bool, error: str = "", is_of_the_world: bool = False) -> None:
        """End the job for this process. ``join`` registers this at exit.

        A clean end saves the state, unless it is saved, and destroys the process group. So does an
        error of the script, if no update was in progress. After a fault of the world, in-process
        mode saves nothing, because peers continue with the state; restart mode saves the state as
        after any other error.
        """
        self._parts.shutdown.close(clean=clean, error=error, is_of_the_world=is_of_the_world)


_run: Run | None = None
_joined_with: dict[str, Any] = {}
_joined_in = 0  # the process


def join(
    *,
    checkpoints: Checkpoints | Root | None = None,
    when: WhenGiven = None,
    keep: KeepGiven = None,
    seed: int = 0,
    backend: str | None = None,
    preflight: bool = False,
    mesh: Mapping[str, int] | None = None,
    step_copies: StepCopiesName = "auto",
) -> Run:
    """Join the job. Later calls return the same object, and may repeat the first one's arguments.

    ``checkpoints``: a folder or :class:`Checkpoints`, by default ``ELASTIC_CHECKPOINTS``; without
    either, nothing is saved. ``when``: a policy of :mod:`checkpoints.policies`, or the number
    of steps between two saves (50). ``keep``: a policy of :mod:`checkpoints.policies`, or
    the number of newest checkpoints to keep (3). ``seed`` determines the order of the data and
    every random number inside steps. ``backend``: torch.distributed's, by default ``gloo`` on CPUs
    and ``cpu:gloo,cuda:nccl`` on GPUs. ``mesh``: the dimensions of a replica, ``{"shard": 2}``
    (docs/how-to/sharded.md). ``step_copies``: whether weights and optimizer state are copied at the
    beginning of each step, so that an interrupted step can be undone: ``"auto"``, where it costs at
    most 1 % of a step, or where the script needs it, and otherwise every 64 steps; ``"always"``;
    ``"never"``, unless the script needs it (docs/guarantees.md).

    ``preflight`` first checks this node, in one to two seconds: ``/dev/shm``, limits and GPUs
    (unless its agent has done so: ``--rdzv-conf preflight=1``), and the checkpoint folder.

    Raises ConfigError in a child process of a worker, for contradictory options, arguments that
    differ from those of the first call, or an unsupported torch; NodeUnfit (exit code 71) if the
    node fails the preflight checks, before this worker contacts another node; and LinkError if this
    node's agent refuses the worker or does not answer.
    """
    global _run, _joined_with, _joined_in
    if _run is None or os.getpid() != _joined_in:
        refuse_child_process(is_forked=_run is not None)
    policies = {"checkpoints": checkpoints, "when": when, "keep": keep}
    given = {**policies, "seed": seed, "backend": backend, "mesh": mesh}
    given["step_copies"] = step_copies
    if _run is not None:
        errors.same_as_before("elastic.join", given, _joined_with)
    else:
        errors.whole_number("elastic.join: seed=", seed, least=0)
        policy = checkpoints_from(checkpoints, when=when, keep=keep)
        mode = step_copies_from(step_copies)
        if preflight:
            _require_fit(policy)
        _run, _joined_with = _join(policy, seed, backend, mesh, mode), given
        _joined_in = os.getpid()
    return _run


def _require_fit(policy: Checkpoints | None) -> None:
    try:
        require_fit(policy.local_folder if policy is not None else None)
    except NodeUnfit:
        FailureHook().install()  # otherwise torchrun only gets the exit code
        raise


def _join(
    policy: Checkpoints | None,
    seed: int,
    backend: str | None,
    mesh: Mapping[str, int] | None,
    step_copies: StepCopies,
) -> Run:
    parts = start_components(policy, seed=seed, backend=backend, mesh=mesh)
    parts.session.progress.step_copies = step_copies
    if _creates_groups(parts):
        parts.session.group.defer(lambda: parts.bootstrap.has_entered)
    run = Run(parts)
    hook = parts.failure
    hook.install()
    atexit.register(lambda: run.close(clean=True, is_of_the_world=hook.is_of_the_world))
    return run


def _creates_groups(parts: Components) -> bool:
    """Whether torch's default group is that of a world, created here. Under a launcher that cannot
    change worlds in process, the script may create it, and in a mesh it is the replica's."""
    session = parts.session
    has_agent = session.worlds is not None and session.worlds.in_process
    is_in_process = has_agent or not is_launched()
    return is_in_process and not session.lifecycle.replica.mesh and not session.group.is_foreign
