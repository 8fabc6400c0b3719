"""The API that scripts use: ``run = elastic.join()``, and everything on ``run``.

In restart mode a fault of the world ends the process; torchrun's agent starts it again, and the
script comes back here. ``retry`` is where in-process recovery takes place under the same API.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from checkpoints import Root
from elastic import torch_private
from elastic.errors import NodeUnfit
from elastic.mesh import mesh_of, process_group
from elastic.process_group import all_sum, choose_device
from elastic.telemetry.journal import EventSink
from elastic.telemetry.ledger import Ledger
from elastic.training.attempts import Attempt
from elastic.training.building.builder import BuildsInWorlds
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.checkpointing.options import (
    Checkpoints,
    KeepGiven,
    WhenGiven,
    checkpoints_from,
)
from elastic.training.components import Components, assemble, journal_of_environment
from elastic.training.data.evaluation import shard_by
from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.wrap import ElasticDDP
from elastic.training.loop import loops
from elastic.training.observers.values import WorldMean
from elastic.training.run_logging import RunLogging
from elastic.training.step import Step
from elastic.worker.node_first import node_first
from elastic.worker.preflight import require_fit
from elastic.worker.worlds import Worlds
from elastic.world.failure import FailureHook
from elastic.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Run(BuildsInWorlds, RunLogging):
    """One job, as one of its workers sees it. Made by :func:`join`."""

    def __init__(self, components: Components) -> None:
        reporting = components.reporting
        super().__init__(reporting.metrics, reporting.profiler, components.script.scope)
        self._parts = components
        self._turns = 0

    # -- the world ----------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The run id that torchrun was given; ``local`` without torchrun."""
        return os.environ.get("TORCHELASTIC_RUN_ID", "local")

    @property
    def device(self) -> torch.device:
        """This worker's device: ``cuda:LOCAL_RANK``, or the CPU."""
        return self._parts.connectivity.group.device

    @property
    def state(self) -> dict[str, Any]:
        """JSON values that travel with the model: saved, and restored on all ranks.

        Set them on all ranks alike. Where ranks differ, those of the lowest one count when the
        world changes; a warning is logged.
        """
        self._parts.attempts.restore_if_complete()
        return self._parts.job.user

    @property
    def world(self) -> World:
        """Generation, rank, size and more. Raises NoWorld before the first world."""
        self._parts.attempts.enter_if_complete()
        return self._parts.lifecycle.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0. False before the first world."""
        self._parts.attempts.enter_if_complete()
        lifecycle = self._parts.lifecycle
        return lifecycle.has_world and lifecycle.world.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """Of this replica, with the dimensions of ``join(mesh=…)``. Raises ConfigError without."""
        return self._parts.lifecycle.replica.device_mesh

    # -- what the job consists of -------------------------------------------------------------

    def wrap(self, module: nn.Module, **ddp: Any) -> ElasticDDP:
        """A DistributedDataParallel of ``module``, one object for life; with ``join(mesh=…)`` the
        module itself, sharded over :attr:`mesh`.

        ``ddp`` are its options. Call before the first loop, in the same order on all ranks.
        Raises ConfigError for options that cannot work here, TrainingError if it is too late.
        """
        self._parts.attempts.note_registration("wrap")
        return cast(ElasticDDP, self._parts.state.registry.wrap(module, ddp))

    def track(self, **named: Any) -> None:
        """Save and restore these objects: anything with ``state_dict`` and ``load_state_dict``.

        Optimizers of wrapped modules must be tracked. Call before the first loop.
        """
        self._parts.attempts.note_registration("track")
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
        """Deal a DataLoader out over the world, at a constant global batch.

        Iterating gives this rank's share of each step, from the job's position to the end of
        the epoch. ``dataloader`` names the DataLoader inside a wrapper. ``global_batch`` is the
        samples per step over all ranks, by default batch_size × the largest world;
        ``micro_batch`` the most samples at once, for :meth:`steps`; ``max_steps`` the most steps
        of an epoch. Call before the first loop. See docs/data.md.
        """
        self._parts.attempts.note_registration("loader")
        loop = self._parts.loop
        return self._parts.state.registry.add_loader(
            loader,
            drive=lambda driven: loops.batches(loop, driven),
            index=lambda asked: loops.index(loop, asked),
            dataloader=dataloader,
            global_batch=global_batch,
            micro_batch=micro_batch,
            max_steps=max_steps,
        )

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """This rank's part of a DataLoader for evaluation: every sample once, no padding.

        The dataset in its order, or the part of it that the loader's sampler is of; how often
        and in which order a sampler draws has no effect. A rank may get nothing: keep collectives
        (:meth:`mean`) out of the loop over it.
        """
        return shard_by(loader, self._parts.recovery.bootstrap.rank_and_size)

    # -- loops --------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of ``count``; nothing when the job is complete."""
        return loops.epochs(self._parts.loop, count)

    def steps(
        self,
        loader: ElasticLoader,
        *,
        checkpoints: Checkpoints | Root | None = None,
        when: WhenGiven = None,
        keep: KeepGiven = None,
    ) -> Iterator[Step]:
        """The steps that are left of the loader's epoch, for loops over micro-batches.

        ``checkpoints``, ``when`` and ``keep`` are those of :func:`join`, and override them from
        here on: ``when=EverySeconds(600) | OnPreemption()``, ``keep=2``. A job that has joined
        without a folder can name it here only before any state is restored, which ``run.retry``
        and ``run.epochs`` do. Raises ConfigError and TrainingError.
        """
        if (checkpoints, when, keep) != (None, None, None):
            manager, lifecycle = self._parts.checkpoints, self._parts.lifecycle
            manager.amend(checkpoints, when, keep, is_restored=lifecycle.is_restored)
            self._parts.state.registry.piggyback(manager.flags)
        return loops.steps(self._parts.loop, loader)

    def retry(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``fn`` in a world; the one recovery point, around the complete loop.

        When the world changes, ``fn`` is called again in the next one: loops resume, locals
        restart. Exceptions other than faults of the world are raised. An inner retry raises all of
        them to the outer one. Where the launcher cannot change worlds without a
        restart, faults end the process, for its agent to start anew.
        """
        for attempt in self.attempts():
            with attempt:
                result = fn(*args, **kwargs)
        return result

    def attempts(self) -> Iterator[Attempt]:
        """:meth:`retry` inline: ``for attempt in run.attempts(): with attempt: …``."""
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
        """Begin a step of a loop that the caller owns: for plug-ins (Lightning, Accelerate, …).

        The first call enters the world. Raises WorldChanged when the world is to change now.
        The caller distributes the data and tracks its position; every rank has the same share.
        """
        return self._parts.attempts.begin_own_step()

    def commit(self) -> None:
        """The step begun by :meth:`begin` has taken effect."""
        self._parts.loop.commit()

    def is_fault(self, error: BaseException) -> bool:
        """Whether ``error`` means that the world is over and :meth:`recover` can help."""
        return self._parts.recovery.strategies.active.is_fault(error)

    def recover(self, error: BaseException) -> None:
        """Enter the next world; the state is that of the last commit. Raises ``error`` itself
        if it is not a fault of the world."""
        if not self.is_fault(error):
            raise error
        self._parts.recovery.strategies.active.recover(error)

    # -- callbacks ----------------------------------------------------------------------------

    def after_step(self, callback: Callable[[Step], object]) -> None:
        """Call back after each optimizer step, for example to update an EMA.

        Once per step: a callback that a fault of the world interrupts is called again in the next
        world, and those before it are not. Register it before :meth:`retry`, or in its function.
        """
        self._parts.script.callbacks.add(callback)

    def on_world(self, callback: Callable[[World], object]) -> None:
        """Call back when a world has begun and its state is restored; at once if one has."""
        self._parts.script.listeners.on_world(callback)

    def on_main(self, callback: Callable[[], object]) -> None:
        """Call back when this rank becomes main; at once if it is."""
        self._parts.script.listeners.on_main(callback)

    # -- things to do together ----------------------------------------------------------------

    def mean(self, weight: float, **values: float | torch.Tensor) -> dict[str, float]:
        """The weighted mean of each value over the world; NaN if all weights are 0.

        Every rank calls it, with the same names. A rank of weight 0 has no influence, whatever
        its values are.
        """
        self._parts.recovery.bootstrap.enter_world()
        names = sorted(values)
        parts = [float(values[name]) * weight if weight else 0.0 for name in names]
        with self._parts.lifecycle.replica.whole():
            total, *sums = all_sum([weight, *parts])
        means = [s / total if total else math.nan for s in sums]
        return {n: WorldMean(m) for n, m in zip(names, means, strict=True)}

    def node_first(self) -> AbstractContextManager[None]:
        """The body runs on one worker of each node first, then on its others: for downloads."""
        self._turns += 1
        return node_first(self._turns)

    def close(self, *, clean: bool, error: str = "", is_of_the_world: bool = False) -> None:
        """The job ends for this process. ``join`` does it at exit.

        A clean end saves what is not saved and takes the group down. So does an error of the
        script, if no update was under way. After one ``of the world`` nothing is touched
        in-process, since peers continue with the state; where worlds change by a restart, it is
        saved as after any other.
        """
        self._parts.ending.shutdown.close(clean=clean, error=error, is_of_the_world=is_of_the_world)


_run: Run | None = None


def join(
    *,
    checkpoints: Checkpoints | Root | None = None,
    when: WhenGiven = None,
    keep: KeepGiven = None,
    seed: int = 0,
    backend: str | None = None,
    preflight: bool = False,
    mesh: Mapping[str, int] | None = None,
) -> Run:
    """Become part of the job. The same object on every call.

    ``checkpoints`` is a folder or :class:`Checkpoints`; by default ``ELASTIC_CHECKPOINTS``, and
    without that nothing is saved. ``when`` is a policy of :mod:`checkpoints.policies.save`, or the
    number of steps between two saves (50); ``keep`` is one of
    :mod:`checkpoints.policies.retention`, or how many of the newest are retained (3). ``seed``
    determines the order of the data and every random number inside steps. ``backend`` is
    torch.distributed's, by default ``gloo`` on CPUs and ``cpu:gloo,cuda:nccl`` on GPUs. ``mesh``
    names the dimensions of a replica, ``{"shard": 2}``: docs/how-to/sharded.md.

    ``preflight`` checks this node first, in a second or two: ``/dev/shm``, limits and GPUs (unless
    its agent has: ``--rdzv-conf preflight=1``), and the folder of checkpoints.

    Raises ConfigError for options that contradict each other, and NodeUnfit (exit code 71) for a
    node that has failed, before this worker contacts any other node.
    """
    global _run
    if _run is None:
        policy = checkpoints_from(checkpoints, when=when, keep=keep)
        if preflight:
            _require_fit(policy)
        _run = _join(policy, seed, backend, mesh)
    return _run


def components_of_process() -> Components | None:
    """The parts of the run that :func:`join` has made in this process; None before. For tests."""
    return _run._parts if _run is not None else None


def _require_fit(policy: Checkpoints | None) -> None:
    try:
        require_fit(policy.local_folder if policy is not None else None)
    except NodeUnfit:
        FailureHook().install()  # else torchrun knows of an exit code alone
        raise


def _join(
    policy: Checkpoints | None, seed: int, backend: str | None, mesh: Mapping[str, int] | None
) -> Run:
    parts = start_components(policy, seed=seed, backend=backend, mesh=mesh)
    run = Run(parts)
    hook = FailureHook(parts.reporting.recorders.journal, parts.position)
    hook.install()
    atexit.register(
        lambda: run.close(
            clean=not hook.failed, error=hook.text, is_of_the_world=hook.is_of_the_world
        )
    )
    return run


def start_components(
    policy: Checkpoints | None,
    *,
    seed: int = 0,
    backend: str | None = None,
    journal: EventSink | None = None,
    worlds: Worlds | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Components:
    """The parts of a run, for a caller that closes it: :func:`join` without the hooks at the end of
    the process. By default ``journal`` is that of ``ELASTIC_JOURNAL``, and ``worlds`` the link of
    ``ELASTIC_LINK``."""
    torch_private.check()
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    replica = mesh_of(mesh, device)
    own = journal_of_environment() if journal is None else None
    journal = own if own is not None else journal
    assert journal is not None
    components = assemble(
        seed=seed,
        group=process_group(device, backend, replica, journal),
        replica=replica,
        checkpoints=CheckpointManager(policy, journal),
        ledger=Ledger.from_environment(),
        journal=journal,
        worlds=worlds,
    )
    if own is not None:
        own.locate(components.position)
        if components.worlds is not None:
            own.listen(components.worlds.count)
    components.ending.preemption.install()
    return components
