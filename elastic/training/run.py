"""The public API: ``run = elastic.join()``, and all methods of ``run``.

In restart mode, a fault of the world ends the process; torchrun's agent restarts it, and the script
calls ``join`` again. In-process recovery takes place in ``retry``, with the same API.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from checkpoints import Root
from elastic import arguments
from elastic.compiling import not_compiled_methods
from elastic.errors import NodeUnfit
from elastic.process_group import refuse_stale_group, uses_stale_group
from elastic.training import components
from elastic.training.attempts import Attempt
from elastic.training.building.builder import BuildsInWorlds
from elastic.training.building.stages import ReducesStages
from elastic.training.checkpointing.options import (
    Checkpoints,
    KeepGiven,
    WhenGiven,
    checkpoints_from,
)
from elastic.training.data.evaluation import shard_by
from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.wrap import ElasticDDP
from elastic.training.loop import loops
from elastic.training.misuse.child_processes import refuse_child_process
from elastic.training.observers.values import weighted
from elastic.training.run_logging import RunLogging
from elastic.training.state.rollback import StepCopies, StepCopiesName, step_copies_from
from elastic.training.step import Step
from elastic.worker.node_first import node_first
from elastic.worker.preflight import require_fit
from elastic.world.failure import FailureHook
from elastic.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@not_compiled_methods
class Run(BuildsInWorlds, ReducesStages, RunLogging):
    """A worker's interface to its job. Created by :func:`join`."""

    def __init__(self, parts: components.Components) -> None:
        reporting = parts.reporting
        super().__init__(reporting.metrics, reporting.profiler, parts.script.scope)
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
        return self._parts.connectivity.group.device

    @property
    def state(self) -> dict[str, Any]:
        """Values that are part of the job's state: saved, and restored on all ranks.

        Numbers, strings, None, tensors, arrays, enumerations, and containers of them, which stay
        the same objects; anything else raises TrainingError at the end of the step. Set the same on
        all ranks. If ranks differ, a warning
        is logged, and a new world uses the lowest rank's. Raises the same errors as :meth:`epochs`.
        """
        self._parts.attempts.restore_if_complete()
        return self._parts.job.user

    @property
    def world(self) -> World:
        """The current world: generation, rank, size and more.

        Raises NoWorld before the first world, and the same errors as :meth:`epochs`.
        """
        self._parts.attempts.enter_if_complete()
        return self._parts.lifecycle.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the world.

        Raises NoWorld before the first world, where :meth:`on_main` helps, and the same errors as
        :meth:`epochs`.
        """
        return self.world.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """The replica's DeviceMesh. Raises ConfigError without ``join(mesh=…)``."""
        return self._parts.lifecycle.replica.device_mesh

    # -- registration -------------------------------------------------------------------------

    def wrap(self, module: nn.Module, **ddp: Any) -> ElasticDDP:
        """Wrap ``module`` in a DistributedDataParallel that persists across worlds; with
        ``join(mesh=…)``, return the module itself, sharded over :attr:`mesh`.

        ``ddp``: options of DDP. Call it before the first loop, in the same order on all ranks.
        Raises ConfigError for anything but a module and for unsupported options, TrainingError if
        it is called too late.
        """
        hint = "model = run.wrap(Net().to(run.device)), each module by a call of its own"
        arguments.instance("run.wrap", module, nn.Module, hint=hint)
        self._parts.attempts.check_registration("wrap")
        return cast(ElasticDDP, self._parts.state.registry.wrap(module, ddp))

    def track(self, *unnamed: NoReturn, **named: Any) -> None:
        """Save and restore these objects: anything with ``state_dict`` and ``load_state_dict``.

        Optimizers of wrapped modules must be tracked. Call it before the first loop. Raises
        TrainingError if it is called too late, for an object without these methods, and for a name
        in use; ConfigError for an object with sharded tensors, and for one without a name.
        """
        arguments.named_only("run.track", unnamed, "run.track(optimizer=optimizer)")
        self._parts.attempts.check_registration("track")
        self._parts.state.registry.track(named)

    # -- data ---------------------------------------------------------------------------------

    def loader(
        self,
        loader: Iterable[Any],
        *,
        dataloader: DataLoader[Any] | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        max_steps: int | None = None,
    ) -> ElasticLoader:
        """Distribute a DataLoader over the world, at a constant global batch.

        Iterating yields this rank's share of each step, from the job's position to the end of the
        epoch. ``dataloader``: the DataLoader inside a wrapper. ``global_batch``: samples per step
        over all ranks, by default batch_size × the largest world. ``micro_batch``: the maximum
        number of samples at once, for :meth:`steps`. ``max_steps``: the maximum number of steps of
        an epoch. Call it before the first loop. See docs/data.md.

        Raises TrainingError if it is called too late; ConfigError for an object that is not a
        DataLoader, for data that cannot be split (an IterableDataset, a sampler that cannot be
        repeated), and for invalid sizes.
        """
        self._parts.attempts.check_registration("loader")
        loop = self._parts.loop
        return self._parts.state.registry.add_loader(
            loader,
            drive=lambda driven: loops.batches(loop, driven),
            index=lambda elastic_loader: loops.index(loop, elastic_loader),
            dataloader=dataloader,
            global_batch=global_batch,
            micro_batch=micro_batch,
            max_steps=max_steps,
        )

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """This rank's part of a DataLoader for evaluation: every sample once, without padding.

        Reads the dataset in its order, or the part of it that the loader's sampler covers; how
        often and in which order a sampler draws has no effect. A rank may get no batch: keep
        collectives (:meth:`mean`) out of the loop over it. With a sharded model, all ranks get the
        same number of batches. Raises ConfigError for data that :meth:`loader` cannot split either.
        """
        job = self._parts.job
        return shard_by(
            loader,
            self._parts.recovery.bootstrap.rank_and_size,
            is_even=lambda: job.is_sharded or job.built is not None,
            begins=self._parts.state.current.evaluation_begins,
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
        count = arguments.whole_number("run.epochs: ", count, least=0, hint=hint)
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
        arguments.instance("run.steps", loader, ElasticLoader, hint=hint)
        if (checkpoints, when, keep) != (None, None, None):
            manager, lifecycle = self._parts.checkpoints, self._parts.lifecycle
            manager.amend(checkpoints, when, keep, is_restored=lifecycle.is_restored)
            self._parts.state.registry.piggyback(manager.flags)
        return loops.steps(self._parts.loop, loader)

    def retry(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``fn`` in a world: the single recovery point, around the complete loop.

        When the world changes, ``fn`` is called again in the next one: loops resume, and local
        variables are reset. Exceptions other than faults of the world propagate; from an inner
        retry, all exceptions propagate to the outer one. If the launcher cannot change worlds in
        process, the agent restarts it after a fault. Raises ConfigError if ``fn`` is no function.
        """
        arguments.function("run.retry", fn, hint="pass the function itself: run.retry(train)")
        self._parts.loop.averages.call(fn, args, kwargs)
        result: Any = None  # of the last call that has returned
        for attempt in self.attempts():
            with attempt:
                result = fn(*args, **kwargs)
        return cast("T", result)

    def attempts(self) -> Iterator[Attempt]:
        """Inline form of :meth:`retry`: ``for attempt in run.attempts(): with attempt: …``."""
        is_again = False
        while True:
            attempt = self._parts.attempts.attempt(is_again=is_again)
            is_again = True
            yield attempt
            if not attempt.is_over:
                return  # the loop was left with `break`
            if attempt.succeeded:
                return

    # -- for frameworks with their own loop -----------------------------------------------------

    def begin(self) -> Step:
        """Begin a step of the caller's own loop, for frameworks (Lightning, Accelerate, …).

        The first call enters the world. The caller distributes the data and tracks its position;
        every rank has the same share. Raises WorldChanged if the world changes before this step,
        NoWorld after :meth:`close`, and the same errors as :meth:`epochs`.
        """
        return self._parts.attempts.begin_own_step()

    def commit(self) -> None:
        """Commit the step begun by :meth:`begin`. Raises TrainingError if some of its micro-batches
        are missing."""
        self._parts.loop.commit()

    def is_fault(self, error: BaseException) -> bool:
        """Whether ``error`` means that the world has ended, so that :meth:`recover` can help."""
        if uses_stale_group(error):
            return False
        return self._parts.recovery.strategies.active.is_fault(error)

    def recover(self, error: BaseException) -> None:
        """Enter the next world, with the state of the last commit. Raises ``error`` itself
        if it is not a fault of the world; TrainingError for a group of an earlier world."""
        refuse_stale_group(error)
        if not self.is_fault(error):
            raise error
        self._parts.recovery.strategies.active.recover(error)

    # -- callbacks ----------------------------------------------------------------------------

    def after_step(self, callback: Callable[[Step], object]) -> None:
        """Call ``callback`` after each optimizer step, for example to update an EMA.

        It is called once per step: a callback that a fault of the world interrupts is called again
        in the next world, but callbacks before it are not. Register it before :meth:`retry`, or in
        its function. Raises ConfigError if it is not a function.
        """
        arguments.function("run.after_step", callback, hint="it is called with the step")
        self._parts.script.callbacks.add(callback)
        self._parts.loop.averages.add_callback(callback)

    def on_world(self, callback: Callable[[World], object]) -> None:
        """Call ``callback`` when a world's state is restored; immediately if that is the case.

        Raises ConfigError if it is not a function.
        """
        arguments.function("run.on_world", callback, hint="it is called with the world")
        self._parts.script.listeners.on_world(callback)

    def on_main(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when this rank becomes rank 0; immediately if it is. Raises ConfigError
        if it is not a function."""
        arguments.function("run.on_main", callback, hint="it is called without arguments")
        self._parts.script.listeners.on_main(callback)

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
        if self._parts.state.current.lacks_samples:
            weight = 0.0
        numbers = weighted(weight, [(name, values[name]) for name in names])
        self._parts.recovery.bootstrap.enter_world()
        self._parts.attempts.meets()
        with self._parts.lifecycle.replica.whole():
            total, *sums = self._parts.job.order.sum_values(numbers)
        means = [s / total if total else math.nan for s in sums]
        known = self._parts.reporting.metrics.means
        return {name: known.add(mean) for name, mean in zip(names, means, strict=True)}

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
        self._parts.ending.shutdown.close(clean=clean, error=error, is_of_the_world=is_of_the_world)


_run: Run | None = None
_joined_with: dict[str, Any] = {}


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
    either, nothing is saved. ``when``: a policy of :mod:`checkpoints.policies.save`, or the number
    of steps between two saves (50). ``keep``: a policy of :mod:`checkpoints.policies.retention`, or
    the number of newest checkpoints to keep (3). ``seed`` determines the order of the data and
    every random number inside steps. ``backend``: torch.distributed's, by default ``gloo`` on CPUs
    and ``cpu:gloo,cuda:nccl`` on GPUs. ``mesh``: the dimensions of a replica, ``{"shard": 2}``
    (docs/how-to/sharded.md). ``step_copies``: whether weights and optimizer state are copied at the
    beginning of each step, so that an interrupted step can be undone: ``"auto"``, where it costs at
    most 1 % of a step, or where the script needs it; ``"always"``; ``"never"``, unless the script
    needs it (docs/explanation/step.md).

    ``preflight`` first checks this node, in one to two seconds: ``/dev/shm``, limits and GPUs
    (unless its agent has done so: ``--rdzv-conf preflight=1``), and the checkpoint folder.

    Raises ConfigError in a child process of a worker, for contradictory options, arguments that
    differ from those of the first call, or an unsupported torch; NodeUnfit (exit code 71) if the
    node fails the preflight checks, before this worker contacts another node; and LinkError if this
    node's agent refuses the worker or does not answer.
    """
    global _run, _joined_with
    if _run is None:
        refuse_child_process()
    policies = {"checkpoints": checkpoints, "when": when, "keep": keep}
    given = {**policies, "seed": seed, "backend": backend, "mesh": mesh}
    given["step_copies"] = step_copies
    if _run is not None:
        arguments.same_as_before("elastic.join", given, _joined_with)
    else:
        arguments.whole_number("elastic.join: seed=", seed, least=0)
        policy = checkpoints_from(checkpoints, when=when, keep=keep)
        mode = step_copies_from(step_copies)
        if preflight:
            _require_fit(policy)
        _run, _joined_with = _join(policy, seed, backend, mesh, mode), given
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
    parts = components.start_components(policy, seed=seed, backend=backend, mesh=mesh)
    parts.state.progress.step_copies = step_copies
    run = Run(parts)
    hook = parts.ending.failure
    hook.install()
    atexit.register(lambda: run.close(clean=True, is_of_the_world=hook.is_of_the_world))
    return run
