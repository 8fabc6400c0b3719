"""Hugging Face Accelerate with recovery in process ::

    -from accelerate import Accelerator
    +import elastic
    +from elastic.integrations.accelerate import ElasticAccelerator as Accelerator

    +run = elastic.join(checkpoints="/mnt/shared/job")
     accelerator = Accelerator(gradient_accumulation_steps=2)
     model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    +def train():
    -    for epoch in range(3):
    +    for epoch in run.epochs(3):
             for batch in loader:
                 with accelerator.accumulate(model):
                     …

    +run.retry(train)

What a script prepares is what a job consists of: models are wrapped by ``run.wrap``; optimizers,
schedulers, the scaler and the objects of ``register_for_checkpointing`` are tracked; a loader is
divided by ``run.loader`` in training, and by Accelerate in evaluation. Sizes that Accelerate
derives from the number of processes, the global batch and the step rate of schedulers, are those of
the largest world in every world.

One private name of Accelerate is used, the list of models that ``save_state`` reads: without it,
the files hold the weights of the module instead of its wrapper's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import elastic
from elastic.errors import ConfigError, TrainingError
from elastic.groups.world import World
from elastic.integrations.prepared import PreparedLoader, is_training, weighted
from elastic.telemetry.log import get_logger
from elastic.train.loader import Share
from elastic.train.run import Run

try:
    from accelerate import Accelerator
    from accelerate.data_loader import (
        DataLoaderStateMixin,
        SeedableRandomSampler,
        prepare_data_loader,
    )
    from accelerate.local_sgd import LocalSGD
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, PartialState, is_initialized
    from accelerate.tracking import GeneralTracker
    from accelerate.utils import DDPCommunicationHookType, DistributedType, send_to_device
except ImportError as absent:
    raise ConfigError(
        f"elastic.integrations.accelerate needs Accelerate: {absent}",
        hint="pip install 'torch-elastic-harness[accelerate]'",
    ) from absent


__all__ = ["ElasticAccelerator"]

_PROCESSES = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
}


def _joining_first(initialize: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: PartialState, cpu: bool = False, **options: Any) -> None:
        if not self.initialized:
            run = elastic.join()  # or the run that the script has joined with its options
            # Without it, on a machine without GPUs, Accelerate takes each process for a job of its
            # own, whose gather() returns what this rank has.
            cpu |= run.device.type == "cpu"
        initialize(self, cpu, **options)

    return __init__


# TrainingArguments, a tracker or a logger may create it before an Accelerator does. It opens a
# process group, which elastic.join() defers.
PartialState.__init__ = _joining_first(PartialState.__init__)

# What begins trackers, on the main process alone, by ``@on_main_process``. Other processes do it
# when they become the main one.
_BEGIN = {"__init__": GeneralTracker, "init_trackers": Accelerator}
_deferred: list[Callable[[], object]] = []


def _deferring(on_main_process: Callable[..., Any]) -> Callable[..., Any]:
    def of_state(self: PartialState, function: Callable[..., Any] | None = None) -> Any:
        chosen = on_main_process(self, function)
        owner = _BEGIN.get(getattr(function, "__name__", ""))
        if function is None or chosen is function or owner is None:
            return chosen

        def defer(*args: Any, **options: Any) -> Any:
            if args and isinstance(args[0], owner):
                _deferred.append(functools.partial(function, *args, **options))
            return chosen(*args, **options)

        return defer

    return of_state


PartialState.on_main_process = _deferring(PartialState.on_main_process)


def _refusing(enter: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(self: LocalSGD) -> Any:
        if self.enabled and isinstance(self.accelerator, ElasticAccelerator):
            raise ConfigError(
                "LocalSGD lets the weights of ranks differ between two averages: those of a rank "
                "that dies would be lost",
                hint="LocalSGD(…, enabled=False); accumulate gradients to reduce them less often",
            )
        return enter(self)

    return __enter__


LocalSGD.__enter__ = _refusing(LocalSGD.__enter__)


def set_state(**values: Any) -> None:
    """Replace what Accelerate reads once, such as its rank and size, by a world's."""
    # Objects of each class share their attributes.
    for state in (PartialState(), *([AcceleratorState()] if is_initialized() else [])):
        vars(state).update(values)


class _Scheduler(AcceleratedScheduler):
    """Accelerate steps a schedule once for each process in an update. Here that number is constant:
    the largest world's."""

    def __init__(self, prepared: AcceleratedScheduler, processes: int) -> None:
        super().__init__(
            prepared.scheduler,
            prepared.optimizers,
            step_with_optimizer=prepared.step_with_optimizer,
            split_batches=prepared.split_batches,
        )
        self._processes = processes

    def step(self, *args: Any, **kwargs: Any) -> None:
        current = AcceleratorState().num_processes
        set_state(num_processes=self._processes)
        try:
            super().step(*args, **kwargs)
        finally:
            set_state(num_processes=current)


class _Loader(PreparedLoader, DataLoaderStateMixin):
    """In evaluation as Accelerate divides it, so that ``gather_for_metrics`` knows the padding."""

    def __init__(self, accelerator: ElasticAccelerator, given: DataLoader[Any]) -> None:
        self._accelerator = accelerator
        self.gradient_state = accelerator.gradient_state
        super().__init__(accelerator.run, given, self._divide)

    def _divide(self) -> elastic.ElasticLoader:
        a, given, order = self._accelerator, self._given, None
        if a.dispatch_batches:
            raise ConfigError(
                "dispatch_batches=True reads all data on one process, and its place in it is lost "
                "when that process dies",
                hint="DataLoaderConfiguration(dispatch_batches=False)",
            )
        if a.use_seedable_sampler and isinstance(given.sampler, RandomSampler):
            seed = a.dataloader_config.data_seed
            if seed is None:
                seed = torch.random.initial_seed()  # now, as in Accelerate: each step has its own
            order = functools.partial(seedable, given.sampler, seed)
        size = getattr(given, "batch_size", None)
        if size is not None:
            size *= 1 if a.split_batches else a.run.largest_world
        return a.run.loader(given, global_batch=size, order=order, **a.division)

    def trains(self) -> bool:
        return is_training(self._accelerator.trained)

    def training(self) -> Iterator[Any]:
        return self._whole_batches() if self._accelerator.division else self._shares()

    def _shares(self) -> Iterator[Any]:
        # One `yield` for each batch, and no read of `loader.index`, as if the script read the
        # loader itself: its `enumerate` and `islice` continue (elastic.train.reading).
        with self._in_pass() as loader:
            for batch in loader:
                # Without reading one batch ahead.
                self.end_of_dataloader = loader.position.step + 1 == len(loader)
                yield self.to_device(batch)

    def _whole_batches(self) -> Iterator[Any]:
        with self._in_pass() as loader:
            for step in self._run.steps(loader):
                self.end_of_dataloader = step.index + 1 == len(loader)
                for batch in step:
                    self._accelerator.begin_batch(step, loader.share)
                    yield self.to_device(batch)

    @contextmanager
    def _in_pass(self) -> Iterator[elastic.ElasticLoader]:
        loader = self.job_loader
        self.begin()
        try:
            yield loader
        finally:
            self._accelerator.end_batches()
            self.end()

    def to_device(self, batch: Any) -> Any:
        return send_to_device(batch, self._accelerator.device)

    def evaluation(self) -> Any:
        a, size = self._accelerator, getattr(self._given, "batch_size", None)
        # Accelerate splits a batch among ranks that divide it. After a death they may not; each
        # then reads whole ones, as without split_batches.
        is_split = a.split_batches and (size is None or size % a.num_processes == 0)
        return prepare_data_loader(
            self._given,
            a.device,
            num_processes=a.num_processes,
            process_index=a.process_index,
            put_on_device=a.device_placement,
            split_batches=is_split,
            even_batches=a.even_batches,
        )


def seedable(sampler: RandomSampler, seed: int, epoch: int) -> SeedableRandomSampler:
    """What Accelerate replaces a sampler with, ``use_seedable_sampler=True``, in an epoch."""
    replaced = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler.num_samples,
        generator=torch.Generator(),
        data_seed=seed,
    )
    replaced.set_epoch(epoch)
    return replaced


class ElasticAccelerator(Accelerator):
    """An ``Accelerator`` whose processes are those of the current world.

    ``run``: what ``elastic.join()`` has returned; without one, it joins with the defaults. All
    other arguments are those of ``Accelerator``.

    ``whole_batches``: a rank gets whole batches of the largest world, for a loss that is not a mean
    over samples. In a smaller world it reads several in the place of one, as if it accumulated
    them: ``sync_gradients`` is True in the last one.

    Raises ConfigError for a kind of training whose state is not whole on each rank (FSDP,
    DeepSpeed, Megatron, TPUs).
    """

    def __init__(
        self, *args: Any, run: Run | None = None, whole_batches: bool = False, **kwargs: Any
    ) -> None:
        self.run = elastic.join() if run is None else run
        self.division: dict[str, Any] = {}
        """How a loader divides batches, as options of ``run.loader``."""
        if whole_batches:
            self.division = {"weights": "equal", "whole_batches": True}
        self._batches: elastic.Step | None = None
        self.end_batches()
        self.trained: list[nn.Module] = []
        """The models that are trained."""
        self._is_freed = False
        self._tracked: Counter[str] = Counter()
        if self.run.device.type == "cpu":
            kwargs.setdefault("cpu", True)
        super().__init__(*args, **kwargs)
        if self.distributed_type not in _PROCESSES:
            raise ConfigError(
                f"{self.distributed_type} does not recover in process under Accelerate",
                hint="use plain Accelerator, which recovers by a restart, or run.build with FSDP2: "
                "docs/how-to/sharded.md",
            )
        self.run.on_world(self._enter_world)

    def _enter_world(self, world: World) -> None:
        set_state(num_processes=world.size, process_index=world.rank)
        self.step = 0  # groups of accumulated batches are repeated from their first one
        self.sync_gradients = True
        self.end_batches()
        if self.is_main_process:
            begun, _deferred[:] = _deferred[:], []
            for begin in begun:
                begin()

    def epochs(self, count: int) -> Iterator[int]:
        """``run.epochs(count)``."""
        return self.run.epochs(count)

    def retry(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``run.retry(fn, …)``."""
        return self.run.retry(fn, *args, **kwargs)

    # -- what is prepared ---------------------------------------------------------------------

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        if not evaluation_mode:
            self._check_is_first()
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)  # no DDP
        if evaluation_mode or not any(p.requires_grad for p in prepared.parameters()):
            return prepared
        handler = self.ddp_handler
        options = {} if handler is None else handler.to_kwargs()  # without its hooks
        hooks = [] if handler is None else [handler.comm_hook, handler.comm_wrapper]
        if any(hook != DDPCommunicationHookType.NO for hook in hooks):
            raise ConfigError(
                f"DistributedDataParallelKwargs sets {', '.join(hook.value for hook in hooks)}: "
                "gradients are weighted by a hook of the job's own",
                hint="omit it; mixed precision halves what is reduced",
            )
        wrapped = self.run.wrap(prepared, **options)
        self.trained.append(wrapped)
        if models := getattr(self, "_models", None):
            models[-1] = wrapped
        return wrapped

    def _track(self, kind: str, *objects: Any) -> None:
        """Track objects of a kind, by their number among those of all calls."""
        for each in objects:
            self.run.track(**{f"{kind}{self._tracked[kind]}": each})
            self._tracked[kind] += 1

    def free_memory(self, *objects: Any) -> Any:
        """See Accelerator. The job's objects remain those that were prepared before it."""
        self._is_freed |= bool(self.trained or self._tracked)
        return super().free_memory(*objects)

    def _check_is_first(self) -> None:
        """Raise ConfigError where a script prepares its objects again, with another batch size."""
        if self._is_freed:
            raise ConfigError(
                "prepare() was called again after free_memory(), as find_executable_batch_size "
                "does: a job has one model and one global batch in all of its worlds",
                hint="set the batch size that fits in the smallest world, or one job each",
            )

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        if not isinstance(optimizer, AcceleratedOptimizer):
            self._check_is_first()
            if self.scaler is not None and not self._tracked["optimizer"]:
                self.run.track(scaler=self.scaler)
            self._track("optimizer", optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self.division and prepared is not optimizer:
            prepared.zero_grad = functools.partial(self._zero_grad, prepared.zero_grad)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(scheduler, AcceleratedScheduler):
            return prepared
        self._track("scheduler", scheduler)
        return _Scheduler(prepared, self.run.largest_world)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        return data_loader if isinstance(data_loader, _Loader) else _Loader(self, data_loader)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """What the script saves with ``save_state`` is state of the job, too."""
        super().register_for_checkpointing(*objects)
        self._track("custom", *objects)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """See Accelerator. What it loads is what the job begins with, at step 0."""
        if not self.run.has_world:
            get_logger().warning(
                "load_state(%s) sets what the job begins with, at step 0; a checkpoint of the job "
                "itself replaces it. To resume a job, delete this call: it resumes by itself",
                "" if input_dir is None else input_dir,
            )
        super().load_state(input_dir, *args, **kwargs)

    # -- whole batches: several of this rank in the place of one of the largest world -----------

    def begin_batch(self, step: elastic.Step, share: Share) -> None:
        """Called by a loader before it yields a batch."""
        self._batches, self._has_gradients = step, False
        self._weight = share.mean_weights[step.micro_batch]
        self.sync_gradients = step.is_last_micro_batch

    def end_batches(self) -> None:
        """Called by a loader after its last batch."""
        self._batches = None
        self._weight, self._has_gradients = 1.0, False

    @property
    def _is_last_batch(self) -> bool:
        return self._batches is None or self._batches.is_last_micro_batch

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """See Accelerator, which counts batches of the largest world."""
        if not self._is_last_batch:
            yield
            return
        with super().accumulate(*models):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """See Accelerator."""
        self._has_gradients = True
        super().backward(weighted(loss, self._weight), **kwargs)

    def _zero_grad(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """An optimizer's, before the first backward pass of these batches or after the last."""
        step = self._batches
        if step is not None and len(step) > 1 and not self._has_gradients:
            if step.micro_batch:
                return
            count = self.gradient_state.num_steps
            ends = self.gradient_state.end_of_dataloader or (self.step + 1) % count == 0
            self.sync_gradients = ends  # as Accelerate would have it in the one batch
        zero_grad(*args, **kwargs)
        if not self._is_last_batch:
            self.sync_gradients = False

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        """See Accelerator; without effect, and 0, while gradients of batches are missing."""
        if not self._is_last_batch:
            return torch.zeros((), device=self.device)
        return super().clip_grad_norm_(*args, **kwargs)

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> None:
        """See Accelerator, and :meth:`clip_grad_norm_`."""
        if self._is_last_batch:
            super().clip_grad_value_(*args, **kwargs)

    # -- in the loop ----------------------------------------------------------------------------

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if not isinstance(dataloader, _Loader) or not num_batches:
            return super().skip_first_batches(dataloader, num_batches)
        raise TrainingError(
            f"skip_first_batches(…, {num_batches}) would skip them twice: a loop over this loader "
            "begins at the job's position",
            hint="delete this call, and load_state() with it",
        )
