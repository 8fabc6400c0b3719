"""Hugging Face Trainer with recovery in process ::

    -from transformers import Trainer
    +from elastic.integrations.transformers import ElasticTrainer as Trainer

Every subclass of Trainer works with the mixin before it ::

    from trl import SFTTrainer
    class ElasticSFTTrainer(ElasticTrainerMixin, SFTTrainer): ...

Import this module before TrainingArguments are created: they create a process group, which
``elastic.join()`` defers. Call ``elastic.join(…)`` with options before that, if there are any.

How it works. An update of Trainer is a step of the job. ``Trainer._run_epoch`` is the loop over
updates; it is called in ``run.retry`` for each epoch that is left, with the arguments of Trainer's
own resume, so that a fault repeats one update and no hook of the training's beginning. Everything
that Trainer's loop changes is one tracked object. Logs, evaluations and saves are units of
``run.once``, so that a fault in an evaluation repeats only that evaluation.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import elastic
from elastic.errors import ConfigError
from elastic.groups.world import World
from elastic.integrations.attributes import (
    ChangedAttributes,
    is_of_library,
    of_job,
    own_attributes,
    own_modules,
)
from elastic.telemetry.log import get_logger
from elastic.train.copies import copied
from elastic.train.rollback import RandomState
from elastic.train.sampler import Position

try:
    import transformers
    from accelerate.data_loader import BatchSamplerShard
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, trainer
    from transformers.trainer_callback import ExportableState, ProgressCallback
    from transformers.trainer_utils import SaveStrategy, TrainOutput
except ImportError as absent:
    raise ConfigError(
        f"elastic.integrations.transformers needs transformers and accelerate: {absent}",
        hint="pip install 'torch-elastic-harness[transformers]'",
    ) from absent


__all__ = ["ElasticTrainer", "ElasticTrainerMixin"]


# ----------------------------------------------------------------------------
# Private names of Trainer and Accelerate. Only this section and the overrides below know them.

_PARAMETERS = {
    "_run_epoch": (
        "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial "
        "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained "
        "steps_trained_in_current_epoch"
    ),
    "_init_training_state": (
        "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    ),
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_finalize_training": "trial num_train_samples start_time",
    "_maybe_log_save_evaluate": (
        "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_load_rng_state": "checkpoint",
    "_track_num_input_tokens": "inputs",
    "get_batch_samples": "epoch_iterator num_batches device",
    "training_step": "model inputs num_items_in_batch",
    "create_accelerator_and_postprocess": "",
}


def _missing() -> list[str]:
    """What this version of transformers lacks of the names used here."""
    missing = []
    for name, parameters in _PARAMETERS.items():
        function = getattr(Trainer, name, None)
        known = list(inspect.signature(function).parameters)[1:] if function is not None else None
        if known != parameters.split():
            missing.append(f"Trainer.{name}({', '.join(parameters.split())})")
    if not hasattr(trainer, "skip_first_batches"):
        missing.append("trainer.skip_first_batches")
    return missing


_MISSING = _missing()
IS_SUPPORTED = not _MISSING
"""Whether this version of transformers recovers in process; otherwise, by a restart."""


def _skip_first_batches(skip: Callable[..., Any]) -> Callable[..., Any]:
    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        # A loader of the job is at its position already.
        return loader if isinstance(loader, _Updates) else skip(loader, num_batches)

    return skip_first_batches


if IS_SUPPORTED:
    trainer.skip_first_batches = _skip_first_batches(trainer.skip_first_batches)
    # Joins before TrainingArguments create a process group. Plain Trainer creates its own.
    from elastic.integrations.accelerate import seedable, set_state


# ----------------------------------------------------------------------------
# The order of the samples: that of plain Trainer with as many ranks as the largest world has.


class _Plan:
    """The batches of all ranks, as Accelerate would distribute them."""

    def __init__(self, loader: DataLoader[Any], owner: Any, ranks: int) -> None:
        config, args = owner.accelerator.dataloader_config, owner.args
        self._loader, self._ranks = loader, ranks
        self._first_epoch = owner.first_epoch
        self._is_even = config.even_batches and not _drops_last(loader)
        # As in Accelerate, the seed that is set when training begins: by Trainer, or since then.
        self._global_seed = torch.random.initial_seed()
        self._seed = self._global_seed if args.data_seed is None else args.data_seed
        self._is_seedable = config.use_seedable_sampler and type(loader.sampler) is RandomSampler
        # The order of an epoch does not depend on those before it.
        sampled = (loader.sampler, loader.batch_sampler)
        given = (getattr(each, "generator", None) for each in sampled)
        self._generators = [(each, each.get_state()) for each in given if each is not None]
        self._has_seed = self._is_seedable or any(hasattr(each, "set_epoch") for each in sampled)
        # Batches of other classes have their own sizes: they are not divided. Nor are those of one
        # rank, whose last one may be smaller: Trainer's mean gives each batch the same weight.
        self.is_batched = ranks == 1 or type(loader.batch_sampler) is not BatchSampler
        size = 1 if self.is_batched else _batch_size(loader)
        splits = config.split_batches and not self.is_batched
        self._each = size if splits else size * ranks  # in a batch of all ranks
        self.per_update = self._each * args.gradient_accumulation_steps
        self.batches = self._count()

    def _count(self) -> int:
        """The number of batches that each rank reads in an epoch."""
        sampled: Any = self._loader.batch_sampler if self.is_batched else self._loader.sampler
        count = len(sampled)
        if _drops_last(self._loader):
            return count // self._each
        return -(-count // self._each)

    def is_of(self, other: _Plan) -> bool:
        """Whether both read the same data in the same updates."""
        own, others = self._loader.dataset, other._loader.dataset
        fingerprint = getattr(own, "_fingerprint", None)  # of datasets.Dataset
        is_same = own is others or (
            fingerprint is not None and fingerprint == getattr(others, "_fingerprint", None)
        )
        return is_same and (self.batches, self.per_update) == (other.batches, other.per_update)

    def order(self, epoch: int) -> list[Any]:
        """The samples of all ranks in an epoch of the job, or their batches."""
        epoch -= self._first_epoch()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._global_seed)
            for generator, state in self._generators:
                generator.set_state(state)
            # A sampler that draws global random numbers continues from one epoch to the next, and
            # torch's DataLoader draws a seed for its workers before each.
            for each in range(epoch if self._has_seed else 0, epoch + 1):
                torch.empty((), dtype=torch.int64, device="cpu").random_()
                drawn = self._draw(each)
        if self._is_even and drawn:  # Accelerate repeats the first samples
            missing = -len(drawn) % self._each
            drawn += (drawn * (missing // len(drawn) + 1))[:missing]
        return drawn

    def _draw(self, epoch: int) -> list[Any]:
        sampler: Any = self._loader.sampler
        batches: Any = self._loader.batch_sampler
        for each in (sampler, batches):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        if self._is_seedable:
            sampler = seedable(sampler, self._seed, epoch)
        if not self.is_batched:
            return list(sampler)
        if type(batches) is BatchSampler:
            batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        return [list(batch) for batch in batches]


class _InLargestWorld:
    """An Accelerator that tells the losses of whole batches the number of processes of the largest
    world, by which some are multiplied. Collectives use the current one, in its state."""

    elastic_processes: int | None = None
    state: Any

    @property
    def num_processes(self) -> int:
        own: int = self.state.num_processes
        return own if self.elastic_processes is None else self.elastic_processes


# Whose compute_loss is known.
_OF_LIBRARIES = {"transformers", "trl"}


def _is_normalised(model: torch.nn.Module) -> bool:
    """Whether a model's loss is that of transformers' ``loss_function``, divided by the number of
    items of an update, without another term."""
    model = getattr(model, "get_base_model", lambda: model)()  # of PEFT
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return False  # a term for the balance of experts
    try:
        source = inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):  # of a notebook, or generated
        return False
    return "self.loss_function(" in source


@functools.cache
def _runs_backward(kind: Any) -> bool:
    """Whether a class of the script runs backward passes itself, as in a ``training_step`` of its
    own: of another loss than ``compute_loss`` returns, or of several."""
    own = (
        member for each in kind.__mro__ if not is_of_library(each) for member in vars(each).values()
    )
    codes = (getattr(inspect.unwrap(each), "__code__", None) for each in own if callable(each))
    return any("backward" in code.co_names for code in codes if code is not None)


def _is_of_a_sample(label: Any) -> bool:
    """Whether a loss over this label is a mean over samples: it is a class, or numbers, of which
    none is masked."""
    values = torch.as_tensor(label, device="cpu")
    return values.dim() == 0 or values.is_floating_point()


def _drops_last(loader: DataLoader[Any]) -> bool:
    return getattr(loader.batch_sampler, "drop_last", False) is True


def _batch_size(loader: DataLoader[Any]) -> int:
    size: int = loader.batch_sampler.batch_size  # type: ignore[union-attr]
    return size


class _Updates:
    """The loader that Trainer's loop reads: each item is a step of the job."""

    def __init__(self, run: elastic.Run, loader: elastic.ElasticLoader, plan: _Plan) -> None:
        self._run, self.loader, self.plan = run, loader, plan

    def __len__(self) -> int:
        """The number of batches of an epoch on each rank of the largest world."""
        return self.plan.batches

    def __iter__(self) -> Iterator[elastic.Step]:
        return self._run.steps(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("loader", "batch_sampler", "set_epoch"):
            raise AttributeError(name)
        return getattr(self.loader, name)


# ----------------------------------------------------------------------------
# What Trainer's loop changes, besides the model, the optimizer and the schedule.

_OWN_FLAGS = {"is_local_process_zero", "is_world_process_zero"}  # of a rank, not of the job
_COUNTERS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "current_flos",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
)


class _LoopState:
    """Everything that the loop changes besides the model, its optimizer and schedule. Tracked."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        # Calls of train() continue to count the job's epochs.
        self.trainings, self.first_epoch = 1, 0  # calls that have begun, and the last one's epoch
        self.start = [0, 0]  # an epoch, and its updates: those of ``resume_from_checkpoint``
        self.ended_epochs = 0  # of the job, of which on_epoch_end has been called
        self.units = 0  # logs, evaluations and saves that are complete
        self.last: list[Any] = [None, None]  # norm of the gradients, and rate, of the last update
        callbacks = owner.callback_handler.callbacks
        self.own = ChangedAttributes(
            {"trainer": owner}
            | {f"callback {number}": each for number, each in enumerate(callbacks)}
            | {f"module {name}": each for name, each in own_modules(owner.model).items()}
        )

    def state_dict(self) -> dict[str, Any]:
        owner = self._owner
        return {
            "state": {
                each.name: getattr(owner.state, each.name)
                for each in fields(owner.state)
                if each.name not in _OWN_FLAGS
            },
            "control": dict(vars(owner.control)),
            "callbacks": [each.state()["attributes"] for each in self._callbacks()],
            "loss": owner._tr_loss,
            "counters": {name: getattr(owner, name) for name in _COUNTERS},
            "trainings": [self.trainings, self.first_epoch],
            "start": self.start,
            "ended_epochs": self.ended_epochs,
            "units": self.units,
            "last": self.last,
            "own": self.own.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        owner = self._owner
        vars(owner.state).update(state["state"])
        vars(owner.control).update(state["control"])
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=False):
            vars(callback).update(attributes)
        owner._tr_loss.copy_(state["loss"])
        vars(owner).update(state["counters"])
        self.trainings, self.first_epoch = state["trainings"]
        self.start, self.last = list(state["start"]), list(state["last"])
        self.ended_epochs, self.units = state["ended_epochs"], state["units"]
        self.own.load_state_dict(state.get("own", {}))

    def _callbacks(self) -> list[Any]:
        """Those whose state Trainer saves, too."""
        callbacks = self._owner.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]


# Where TRL's trainers collect what they log with the next loss.
_COLLECTED = ("_metrics", "_total_train_tokens")


class _LocalState:
    """Simple attributes that are not the job's: of callbacks, lists of a script's Trainer, and the
    metrics of TRL's trainers. Those of a rank, which an interrupted step, evaluation or save must
    not change twice."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def state_dict(self) -> dict[str, Any]:
        state = {
            str(number): _rest(each, vars(each))
            for number, each in enumerate(self._owner.callback_handler.callbacks)
            if not isinstance(each, ExportableState)
        }
        state["trainer"] = _rest(self._owner, own_attributes(self._owner))
        return state | {name: vars(self._owner)[name] for name in self._collected()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._collected():
            if isinstance(own := vars(self._owner)[name], dict):
                for mode, values in own.items():  # stay of their class, with defaults
                    values.clear()
                    values.update(state[name].get(mode, {}))
            else:
                setattr(self._owner, name, state[name])
        for number, each in enumerate(self._owner.callback_handler.callbacks):
            vars(each).update(state.get(str(number), {}))
        vars(self._owner).update(state["trainer"])

    def _collected(self) -> list[str]:
        own = vars(self._owner)
        return [name for name in _COLLECTED if name in own and _is_simple(own[name])]


def _rest(owner: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are simple, and not the job's."""
    others = of_job(owner)
    return {n: v for n, v in attributes.items() if n not in others and _is_simple(v)}


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_simple(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_simple, value))
    return value is None or isinstance(value, (int, float, str, torch.Tensor))


# ----------------------------------------------------------------------------
# Trainer.

_DISTRIBUTED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
}
_TRAINERS: WeakKeyDictionary[elastic.Run, Any] = WeakKeyDictionary()  # that train
_FLAGS = {"should_log": "log", "should_evaluate": "evaluate", "should_save": "save"}


class _InProcess:
    """The methods of Trainer that are steps and units of the job."""

    is_in_train: bool
    control: Any
    current_flos: float
    lr_scheduler: Any
    _scheduler: Any  # of the first call of train(), which is tracked

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._refuse()

    def _refuse(self) -> None:
        """Raise ConfigError for what cannot recover in process."""
        args, dataset = self.args, self.train_dataset
        cases = [
            (
                self.is_deepspeed_enabled
                or self.is_fsdp_enabled
                or self.accelerator.distributed_type not in _DISTRIBUTED,
                f"{self.accelerator.distributed_type.value} does not recover in process",
                "use plain Trainer, which recovers by a restart; or, in a loop of your own, FSDP2 "
                "with run.build: docs/how-to/sharded.md",
            ),
            (
                isinstance(dataset, IterableDataset),
                "an IterableDataset has no position that another number of ranks can continue from",
                "use a map-style dataset, or plain Trainer, which recovers by a restart",
            ),
            (
                hasattr(self, "_generate_and_score_completions"),  # GRPO, RLOO
                "this trainer keeps the completions that a rank has generated over several steps, "
                "in groups that are divided among a fixed number of ranks",
                "use TRL's own class, which recovers by a restart",
            ),
            (
                args.auto_find_batch_size,
                "auto_find_batch_size=True changes the global batch",
                "set per_device_train_batch_size",
            ),
            (
                not args.average_tokens_across_devices and args.world_size > 1,
                "average_tokens_across_devices=False weights tokens by the number of ranks",
                "omit it",
            ),
            (
                args.train_sampling_strategy == "batch_rebalance",
                "train_sampling_strategy='batch_rebalance' is for a fixed number of ranks",
                "use 'group_by_length'",
            ),
            (
                args.n_gpu > 1,
                f"this process uses {args.n_gpu} GPUs (DataParallel)",
                "start one process for each GPU, with `elastic run` or torchrun",
            ),
        ]
        for is_refused, problem, hint in cases:
            if is_refused:
                raise ConfigError(f"ElasticTrainer: {problem}", hint=hint)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator, and let it wrap models for all worlds."""
        self.elastic_run = elastic.join()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (_InLargestWorld, kind), {})
        accelerator.prepare_model = functools.partial(
            self._prepare_model, accelerator.prepare_model
        )
        accelerator.backward = functools.partial(self._backward, accelerator.backward)
        self._loop: _LoopState | None = None
        self._updates: Any = None  # _Updates
        self._trainings = 0  # calls of train() in this process
        self._planned_steps = 0
        self._ended: dict[str, Any] | None = None  # state where the training before has ended
        self._joined_in: dict[str, Any] | None = None  # state of a training that others have begun
        self._steps: Any = None
        self._has_whole_batches = False  # those of the largest world, with its losses
        self._groups: list[list[Any]] = []  # batches of this rank, of which Trainer sees the last
        self._accumulated = 1  # batches of a rank of the largest world
        # These replace attributes: a subclass's own methods are called by them.
        self.training_step = self._step_of_group
        self.get_train_dataloader = self._train_dataloader
        self._is_stopped = self._counts_items = False
        # Of batches that a smaller world evaluates: items of this rank's, and of all ranks'.
        self._items: list[tuple[float, float]] = []
        self._evaluated: list[tuple[float, float, float]] = []  # with their losses
        self._has_begun_epoch: int | None = None
        self.elastic_run.on_world(self._enter_world)

    def _enter_world(self, world: World) -> None:
        set_state(process_index=world.rank, num_processes=world.size)
        self._eval_dataloaders: dict[str, Any] = {}  # those with workers are of the last world
        if "state" not in vars(self):  # of a Trainer that is created in a world
            return
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        if self.is_world_process_zero() and self.is_in_train:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                    callback.on_train_begin(self.args, self.state, self.control)

    def _prepare_model(
        self,
        prepare: Callable[..., Any],
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        prepared = prepare(model, device_placement, evaluation_mode=True)  # all but DDP
        if evaluation_mode:
            return prepared
        accelerator = self.accelerator
        handler = accelerator.ddp_handler
        options = {} if handler is None else handler.to_kwargs()
        options = {k: v for k, v in options.items() if not k.startswith("comm_")}
        wrapped = self.elastic_run.wrap(prepared, **options)
        accelerator._models[-1] = wrapped
        return wrapped

    # -- once for each process --------------------------------------------------------------------

    def _train_dataloader(self) -> Any:
        """The job's part of each update, instead of one process's part of a fixed number."""
        kind: Any = type(self)
        accelerator, given = self.accelerator, []
        prepare = accelerator.prepare_data_loader

        def prepare_and_keep(loader: Any, *args: Any, **options: Any) -> Any:
            given.append(loader)
            return prepare(loader, *args, **options)

        accelerator.prepare_data_loader = prepare_and_keep
        try:
            kind.get_train_dataloader(self)
        finally:
            accelerator.prepare_data_loader = prepare
        if not given:
            raise ConfigError(
                f"{kind.__name__}.get_train_dataloader() returns a loader that it has not "
                "passed to self.accelerator.prepare(): each rank would read all samples",
                hint="return self.accelerator.prepare(DataLoader(…))",
            )
        if _TRAINERS.setdefault(self.elastic_run, self) is not self:
            raise ConfigError(
                "a second Trainer trains in this process: a job trains one model",
                hint="start a job for each training, such as each fold of a cross-validation",
            )
        plan = _Plan(given[-1], self, self.elastic_run.largest_world)
        if self._updates is not None:
            if not plan.is_of(self._updates.plan):
                raise ConfigError(
                    "train() was called again with another data set or batch size: a job has one",
                    hint="start a job for it, or train on a ConcatDataset with a sampler",
                )
            return self._updates
        self._has_whole_batches = not self._divides_batches(given[-1].dataset)
        loader = self.elastic_run.loader(
            given[-1],
            order=plan.order,
            global_batch=plan.per_update,
            micro_batches=self.args.gradient_accumulation_steps,
            weights="largest",
            whole_batches=self._has_whole_batches,
        )
        self._updates = _Updates(self.elastic_run, loader, plan)
        return self._updates

    def _divides_batches(self, dataset: Any) -> bool:
        """Whether the loss of a batch follows from those of its parts: it is normalised over the
        update, or known to be a mean over samples. Reads a sample.

        Trainer counts the items of an update for each model whose ``forward`` takes any keywords.
        BERT and T5 do, and return the mean over a batch.
        """
        kind: Any = type(self)
        is_own = kind.compute_loss.__module__.partition(".")[0] not in _OF_LIBRARIES
        if is_own or self.compute_loss_func is not None or self.label_smoother is not None:
            return False
        if _runs_backward(kind):
            return False
        if self.model_accepts_loss_kwargs:
            return _is_normalised(self.accelerator.unwrap_model(self.model))
        states = RandomState()
        states.take()
        sample = dataset[0]
        states.restore()
        names = [*self.label_names, "label", "label_ids"]  # which collators rename
        labels = [sample[name] for name in names if name in sample]
        return bool(labels) and all(map(_is_of_a_sample, labels))

    def first_epoch(self) -> int:
        """The job's epoch in which the current call of train() has begun."""
        return 0 if self._loop is None else self._loop.first_epoch

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        self._trainings += 1
        if self._loop is not None and self._ended is None:  # it had no epoch left
            self._ended = copied(self._loop.state_dict())
        epoch, batches = super()._init_training_state(*args, **options)  # type: ignore[misc]
        self._started_at = (epoch, batches // self.args.gradient_accumulation_steps)
        return epoch, batches

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        prepared = super()._prepare_for_training(  # type: ignore[misc]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        self._planned_steps += max_steps
        self.elastic_run.plan_steps(self._planned_steps)
        if self._loop is not None:
            self._begin_again(resume_from_checkpoint)
            return prepared
        self._loop = _LoopState(self)
        self._loop.start = list(self._started_at)
        self._resume = (resume_from_checkpoint, self.state.global_step)
        # Trainer sets them again before its loop; nothing is restored before that.
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, device=self.args.device), 0.0
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._scheduler, scaler = self.lr_scheduler, self.accelerator.scaler
        self.elastic_run.track(
            optimizer=self.optimizer.optimizer,
            lr_scheduler=self.lr_scheduler,
            trainer=self._loop,
            **({} if scaler is None else {"scaler": scaler}),
        )
        self.elastic_run.track(callbacks=_LocalState(self), local=True)
        if not self.elastic_run.saves:
            folder = os.path.join(self.args.output_dir, "elastic")
            self.elastic_run.steps(train_dataloader.loader, checkpoints=folder)
        return prepared

    def _begin_again(self, resume_from_checkpoint: str | None) -> None:
        """Begin another call of train(), whose objects are those of the first."""
        loop, ended, scheduler = self._loop, self._ended, self._scheduler
        assert loop is not None and ended is not None
        self._ended = None
        rates = copied(scheduler.state_dict())
        if scheduler is not self.lr_scheduler:  # Trainer has created another one
            vars(scheduler).update(vars(self.lr_scheduler))
            self.lr_scheduler = self.callback_handler.lr_scheduler = scheduler
        if loop.trainings >= self._trainings:
            # This node joins in it, or the job has resumed in it.
            self._joined_in = {"loop": ended, "scheduler": rates}
        new, new_rates = copied(loop.state_dict()), copied(scheduler.state_dict())
        new["control"] |= dict.fromkeys(
            ("should_training_stop", "should_epoch_stop", *_FLAGS), False
        )
        new["loss"] = torch.zeros_like(self._tr_loss)
        step = self.state.global_step
        new["counters"] |= dict.fromkeys(("_globalstep_last_logged", "_initial_global_step"), step)
        new["counters"] |= {"_total_loss_scalar": 0.0}
        first = loop.first_epoch + ended["state"]["num_train_epochs"]
        new |= {"trainings": [self._trainings, first], "last": [None, None], "ended_epochs": first}
        new |= {"start": [first + self._started_at[0], self._started_at[1]]}

        def begin() -> None:
            # What on_train_begin has set in its own attributes stays.
            loop.load_state_dict(new | {"units": loop.units, "own": loop.own.state_dict()})
            scheduler.load_state_dict(new_rates)
            if resume_from_checkpoint is not None:
                self._load_all(resume_from_checkpoint)

        self.elastic_run.once("training", begin, at=self._trainings)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the random numbers of each step have a seed of their own."""

    # -- the loop ---------------------------------------------------------------------------------

    def _run_epoch(self, **call: Any) -> None:
        """Train all epochs that are left: Trainer's own loop over them cannot be entered again."""
        self._has_begun_epoch = call["epoch"]
        assert self._loop is not None
        if self._joined_in is not None:
            self._loop.load_state_dict(self._joined_in["loop"])
            self._scheduler.load_state_dict(self._joined_in["scheduler"])
            self._joined_in = None
        self._loop.own.begin()
        self.elastic_run.retry(self._train_epochs, call)
        # Before Trainer logs the end of the training, which a call that ends it again repeats.
        self._ended = copied(self._loop.state_dict())
        self._is_stopped = self.control.should_training_stop
        self.control.should_training_stop = True  # ends Trainer's loop

    def _train_epochs(self, call: dict[str, Any]) -> None:
        assert self._loop is not None
        first = self._loop.first_epoch
        for epoch in self.elastic_run.epochs(first + self.state.num_train_epochs):
            self._choose_checkpoint(call)
            if epoch < self._loop.start[0]:
                if self._updates.loader.position.step:
                    self._pass_over()
                continue
            self._work(call | {"epoch": epoch - first})  # that a fault has interrupted
            if self._loop.ended_epochs <= epoch:
                self._train_epoch(epoch, call)
            else:
                self._pass_over()
            if self.control.should_training_stop:
                break

    def _train_epoch(self, epoch: int, call: dict[str, Any]) -> None:
        assert self._loop is not None
        loader = self._updates.loader
        done = self._seek(epoch)
        epoch -= self._loop.first_epoch
        if self._has_begun_epoch != epoch and not done:
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self._has_begun_epoch, self._steps = None, None
        self.accelerator.gradient_state._set_sync_gradients(True)
        changed: dict[str, Any] = {"epoch": epoch, "resume_from_checkpoint": None}
        if done:
            accumulated = self.args.gradient_accumulation_steps
            batches = min(done * accumulated, call["steps_in_epoch"])
            changed |= {
                "resume_from_checkpoint": "of the job",
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": batches,
            }
            stops = self.control.should_epoch_stop or self.control.should_training_stop
            if stops or done == len(loader):
                # Trainer rounds the updates of these batches down.
                changed["num_update_steps_per_epoch"] = batches // accumulated
                self._pass_over()
        super()._run_epoch(**(call | changed))  # type: ignore[misc]

    def _pass_over(self) -> None:
        """Begin the loop of an epoch in which no update is left, and leave it: a job resumes in the
        loop over its loader."""
        steps = self.elastic_run.steps(self._updates.loader)
        next(steps, None)
        steps.close()  # type: ignore[attr-defined]

    def _seek(self, epoch: int) -> int:
        """The number of updates of ``epoch`` that are done."""
        assert self._loop is not None
        loader, (start, updates) = self._updates.loader, self._loop.start
        position = loader.position
        if epoch == start and (position.epoch, position.step) < (start, updates):
            self._pass_over()  # the job's own place is before this one
            loader.seek(Position(start, updates))
        position = loader.position
        return position.step if position.epoch == epoch else 0

    def _choose_checkpoint(self, call: dict[str, Any]) -> None:
        """Continue from ``resume_from_checkpoint`` if it is newer than what was restored."""
        (path, step), self._resume = self._resume, (None, 0)
        if path is None:
            return
        own = self.state.global_step
        if own > step:
            get_logger().warning(
                "resume_from_checkpoint=%s is of step %d: the job continues from its own newer "
                "checkpoint of step %d",
                *(path, step, own),
            )
        elif own < step:
            get_logger().warning(
                "the job's own checkpoint is of step %d: training continues from the newer "
                "resume_from_checkpoint=%s of step %d",
                *(own, path, step),
            )
            self.elastic_run.once("resume", self._load_all, path, at=step)

    def _load_all(self, path: str) -> None:
        assert self._loop is not None
        self._load_from_checkpoint(path)
        self._load_optimizer_and_scheduler(path)
        self._load_scaler(path)
        saved = trainer.TrainerState.load_from_json(os.path.join(path, trainer.TRAINER_STATE_NAME))
        for each in fields(saved):
            if each.name not in _OWN_FLAGS:
                setattr(self.state, each.name, getattr(saved, each.name))
        self._load_callback_state()
        epoch, updates = self._started_at
        self._loop.start = [self._loop.first_epoch + epoch, updates]
        self._loop.ended_epochs = self._loop.start[0]
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        self._tr_loss.zero_()
        self._total_loss_scalar = 0.0

    # -- an update --------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of this rank in the next step, and the number of items of all ranks."""
        self._steps = epoch_iterator
        batches = list(next(self._steps))
        loader = self._updates.loader
        self._weights = loader.share.mean_weights
        self._calls = self._backwards = 0
        self._is_reduced = False  # a backward pass of this update, of several in a training step
        self._sums: list[Mapping[str, float]] = []
        self._returned = torch.zeros((), dtype=torch.float64, device=self.args.device)
        self._before = self._tr_loss.clone(), self.current_flos
        self._flops = sum(
            float(self.floating_point_ops(batch))
            for batch, weight in zip(batches, self._weights, strict=True)
            if weight
        )
        counted = [
            batch if weight else _without_items(batch)
            for batch, weight in zip(batches, self._weights, strict=True)
        ]
        prepared, items = super().get_batch_samples(iter(counted), len(counted), device)  # type: ignore[misc]
        fillers = zip(prepared, batches, self._weights, strict=True)
        batches = [own if weight else filler for own, filler, weight in fillers]
        # In a smaller world, this rank may have several batches in the place of one.
        count = min(num_batches, len(batches))
        self._accumulated = count
        bounds = [len(batches) * each // count for each in range(count + 1)]
        self._groups = [batches[first:last] for first, last in itertools.pairwise(bounds)]
        return [group[-1] for group in self._groups], items

    def _step_of_group(self, model: Any, inputs: Any, items: Any = None) -> torch.Tensor:
        """Trainer's training step for each batch of a group, whose last is ``inputs``. It replaces
        the attribute, so that a subclass's own ``training_step`` sees each of them."""
        kind: Any = type(self)
        if not self.elastic_run.in_step:
            return kind.training_step(self, model, inputs, items)
        assert self._loop is not None
        *others, _ = self._groups.pop(0)
        losses = []
        try:
            if self._has_whole_batches:
                self.accelerator.elastic_processes = self.elastic_run.largest_world
            # A script that counts its calls counts one, as a rank of the largest world.
            counted = self._loop.own.values() if others else {}
            for each in others:
                with self.accelerator.no_sync(model=model):
                    losses.append(self._step_of_batch(model, each, items))
                self._track_num_input_tokens(each)
                self._loop.own.set(counted)
            losses.append(self._step_of_batch(model, inputs, items))
        finally:
            self.accelerator.elastic_processes = None
        return torch.stack(losses).sum() if others else losses[0]

    def _step_of_batch(self, model: Any, inputs: Any, items: Any) -> torch.Tensor:
        kind: Any = type(self)
        loss: torch.Tensor = kind.training_step(self, model, inputs, items)
        if self._weights[self._calls]:
            self._returned += loss.detach()
        self._calls += 1
        return loss

    @property
    def current_gradient_accumulation_steps(self) -> float:
        """By what Trainer divides the mean over a batch: the gradients of all batches of all ranks
        then add up to those of the mean over the update."""
        if self._has_whole_batches:
            return float(self._accumulated)
        weight = self._weights[min(self._calls, len(self._weights) - 1)]
        return 1 / weight if weight else 1.0

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, value: int) -> None:
        """Trainer's own value is that of another number of ranks."""

    def _backward(self, backward: Callable[..., None], loss: torch.Tensor, **options: Any) -> None:
        if not self.elastic_run.in_step:
            backward(loss, **options)
            return
        self._backwards += 1
        if not self._weights[self._calls]:
            # Not × 0: a NaN of the filler must not reach the gradients.
            loss = torch.where(torch.zeros((), dtype=torch.bool, device=loss.device), loss, 0.0)
        flops = self._flops if self._backwards == 1 else 0.0
        run = self.elastic_run
        sums = run.sum_with_gradients(loss=loss.detach(), flops=flops)
        if not any(sums is earlier for earlier in self._sums):  # of passes under no_sync()
            self._sums.append(sums)
        # Token losses are × the number of ranks, in float32: as in the largest world, rounding in
        # the backward pass does not depend on the world. Adam amplifies 1e-8 to 5e-6 [measured].
        ratio = run.largest_world / run.world.size
        if ratio != 1.0 and not self._has_whole_batches:
            loss = loss * ratio
        if ratio != 1.0 and self._is_reduced:  # again, with weights of ranks that add up to less
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(ratio)
        self._is_reduced = getattr(self.model_wrapped, "require_backward_grad_sync", True)
        backward(loss, **options)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not self._weights[self._calls - 1]:
            inputs = {k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    def store_flos(self) -> None:
        """Add the operations since the last call, which are those of all ranks already."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def _end_update(self, grad_norm: Any, learning_rate: float | None) -> None:
        """Commit the step, with the loss of all ranks: a death loses no part of a logged mean."""
        assert self._loop is not None
        if self._groups:
            raise ConfigError(
                "ElasticTrainer: training_step was replaced after the trainer was created",
                hint="override training_step in a subclass",
            )
        loss, flops = self._before
        run = self.elastic_run
        ranks = run.largest_world if self._has_whole_batches else run.world.size
        kind: Any = type(self)
        if _runs_backward(kind) or self._backwards != self._calls:
            # Plain Trainer logs what it returns: at the price of a collective.
            total = self.accelerator.reduce(self._returned, reduction="sum").item()
        else:
            total = sum(sums["loss"] for sums in self._sums)
        mean = total / ranks
        if self.args.logging_nan_inf_filter and not math.isfinite(mean):
            mean = loss.item() / max(1, self.state.global_step - self._globalstep_last_logged)
        self._tr_loss.copy_(loss + mean)
        self.current_flos = flops + sum(sums["flops"] for sums in self._sums)
        norm = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
        self._loop.last = [norm, learning_rate]
        self.elastic_run.commit(changes_follow=False)

    # -- logs, evaluations and saves --------------------------------------------------------------

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        loader = self._updates.loader
        if self.elastic_run.in_step:
            self._end_update(grad_norm, learning_rate)
            if loader.position.step == len(loader):
                next(self._steps, None)  # ends the pass
        else:
            if self._steps is not None:
                self._steps.close()
            self._do_once("epoch", self._end_epoch, int(epoch))
        self._work(
            {
                "model": model,
                "trial": trial,
                "epoch": epoch,
                "ignore_keys_for_eval": ignore_keys_for_eval,
                "start_time": start_time,
            }
        )

    def _end_epoch(self, epoch: int) -> None:
        assert self._loop is not None
        self._loop.ended_epochs = self._loop.first_epoch + epoch + 1

    def _do_once(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Complete a unit of work, and count it."""
        loop = self._loop
        assert loop is not None

        def count_and_do() -> None:
            loop.units += 1
            function(*args)

        self.elastic_run.once(name, count_and_do, at=loop.units)

    def _work(self, call: Mapping[str, Any]) -> None:
        """Log, evaluate and save if that is due."""
        for flag, name in _FLAGS.items():
            if getattr(self.control, flag):
                self._do_once(name, self._do, flag, call)

    def _do(self, flag: str, call: Mapping[str, Any]) -> None:
        assert self._loop is not None
        others = {each: getattr(self.control, each) for each in _FLAGS if each != flag}
        if flag == "should_evaluate" and self.args.save_strategy == SaveStrategy.BEST:
            others["should_save"] = False  # the evaluation decides
        vars(self.control).update(dict.fromkeys(others, False))
        grad_norm, learning_rate = self._loop.last
        super()._maybe_log_save_evaluate(  # type: ignore[misc]
            self._tr_loss,
            grad_norm,
            call["model"],
            call["trial"],
            call["epoch"],
            call["ignore_keys_for_eval"],
            call["start_time"],
            learning_rate=learning_rate,
        )
        # Callbacks may have set others.
        new = {each: getattr(self.control, each) or value for each, value in others.items()}
        vars(self.control).update(new | {flag: False})

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        """An evaluation at the start of training is a unit of its own."""
        evaluate = super()._evaluate  # type: ignore[misc]
        if self.elastic_run.has_world and self._has_begun_epoch is None:
            return evaluate(*args, **options)
        return self.elastic_run.once("eval_on_start", evaluate, *args, **options)

    # -- after the loop ---------------------------------------------------------------------------

    def _finalize_training(self, *args: Any, **options: Any) -> TrainOutput:
        self.control.should_training_stop = self._is_stopped
        finalize = super()._finalize_training  # type: ignore[misc]
        output = self.elastic_run.once("finalize", lambda: list(finalize(*args, **options)))
        self.is_in_train = False
        return TrainOutput(*output)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """See Trainer. Outside of training, all ranks repeat an evaluation that a fault interrupts;
        before the first training each of them evaluates all samples."""
        evaluate = super().evaluate  # type: ignore[misc]
        if self.is_in_train:
            return evaluate(*args, **options)
        if self._loop is None:
            with self._alone():
                return evaluate(*args, **options)
        return self.elastic_run.once("evaluation", evaluate, *args, **options)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """See Trainer. The loss by token is that of the largest world."""
        self._evaluated.clear()
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        output = super().evaluation_loop(*given)  # type: ignore[misc]
        loss = self._loss_of_largest_world(dataloader) if self._evaluated else None
        if loss is not None and output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """See Trainer. Some losses are multiplied by the number of ranks."""
        self._items.clear()
        largest = self.elastic_run.largest_world
        # Reading numbers waits for the device: only where they are needed.
        self._counts_items = self.accelerator.state.num_processes != largest
        self.accelerator.elastic_processes = largest
        try:
            loss, *others = super().prediction_step(*args, **options)  # type: ignore[misc]
        finally:
            self.accelerator.elastic_processes, self._counts_items = None, False
        if loss is not None and self._items:
            self._evaluated.append((float(loss), *self._items[0]))
        return loss, *others

    def _get_num_items_in_batch(self, batches: Any, *args: Any, **options: Any) -> Any:
        items = super()._get_num_items_in_batch(batches, *args, **options)  # type: ignore[misc]
        if self._counts_items and items is not None and self.args.average_tokens_across_devices:
            self._items.append((self._count_items(batches, *args, **options), float(items)))
        return items

    def _count_items(self, batches: Any, *args: Any, **options: Any) -> float:
        """Of this rank alone."""
        count = super()._get_num_items_in_batch  # type: ignore[misc]
        self.args.average_tokens_across_devices = False
        try:
            return float(count(batches, *args, **options))
        finally:
            self.args.average_tokens_across_devices = True

    def _loss_of_largest_world(self, loader: Any) -> float | None:
        """The mean of the evaluated losses, each divided by the number of items in as many batches
        as the largest world has ranks. None where it is that of the current world, or unknown."""
        ranks, largest = self.accelerator.state.num_processes, self.elastic_run.largest_world
        sampler = getattr(loader, "batch_sampler", None)
        batches: Any = sampler.batch_sampler if isinstance(sampler, BatchSamplerShard) else sampler
        is_known = isinstance(getattr(batches, "sampler", None), SequentialSampler)
        is_known = is_known and not (batches.drop_last or getattr(sampler, "split_batches", False))
        if not is_known or not self._is_by_item():
            return None
        shards = [BatchSamplerShard(batches, largest, rank) for rank in range(largest)]
        filled = [batch for group in zip(*shards, strict=True) for batch in group]
        sizes = [len(batch) for batch in batches]
        states = RandomState()
        states.take()  # a collator may draw random numbers
        try:
            if ranks == 1 and sizes[-1] < len(filled[0]):  # nothing has filled the last batch
                self._evaluated.pop()
                last = self._collated(loader, filled[len(sizes) - 1])
                self.prediction_step(self.model, last, True)
            own = torch.tensor([self._evaluated], dtype=torch.float64, device=self.args.device)
            evaluated = self.accelerator.gather(own).transpose(0, 1).flatten(0, 1).cpu()
            losses, items, of_group = evaluated[: len(filled)].unbind(1)
            others = [
                self._count_items([self._collated(loader, batch)], "cpu")
                for batch in filled[len(items) :]
            ]
        finally:
            states.restore()
        counts = torch.cat([items, torch.tensor(others, dtype=items.dtype, device="cpu")])
        of_largest = counts.view(-1, largest).sum(1).repeat_interleave(largest)
        means = (losses * of_group)[: len(sizes)] / of_largest[: len(sizes)]
        return float(means @ torch.tensor(sizes, dtype=means.dtype, device="cpu") / sum(sizes))

    def _collated(self, loader: Any, samples: list[int]) -> Any:
        return loader.collate_fn([loader.dataset[i] for i in samples])

    def _is_by_item(self) -> bool:
        """Whether a loss is a sum over items, divided by the number of items of all ranks."""
        kind: Any = type(self)
        if kind.compute_loss.__module__.partition(".")[0] not in _OF_LIBRARIES:
            return False
        model = self.accelerator.unwrap_model(self.model)
        return self.label_smoother is None and (
            self.compute_loss_func is not None or _is_normalised(model)
        )

    def predict(self, *args: Any, **options: Any) -> Any:
        """See Trainer, and :meth:`evaluate`. A rank that joins later, when the others have their
        predictions, predicts all samples itself."""
        predict = super().predict  # type: ignore[misc]
        if self.is_in_train:
            return predict(*args, **options)
        outputs: list[Any] = []  # arrays: too large for the job's state

        def keep() -> None:
            outputs[:] = [predict(*args, **options)]

        if self._loop is not None:
            self.elastic_run.once("prediction", keep)
        if not outputs:
            with self._alone():
                keep()
        return outputs[0]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Evaluate without other ranks, as before the first world."""
        state = PartialState()
        size, kind = state.num_processes, state.distributed_type
        set_state(num_processes=1, distributed_type=DistributedType.NO)
        try:
            yield
        finally:
            set_state(num_processes=size, distributed_type=kind)


def _without_items(batch: Any) -> Any:
    """A batch of which no item counts: Trainer counts the labels other than -100."""
    if not isinstance(batch, Mapping):
        return batch
    masked = {
        name: torch.full_like(batch[name], -100)
        for name in ("labels", "shift_labels")
        if isinstance(batch.get(name), torch.Tensor)
    }
    return {**batch, **masked}


class _ByRestart:
    """With a version of transformers that is not supported: plain Trainer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        get_logger().warning(
            "transformers %s has no %s: the job recovers by restarts, from the checkpoints that "
            "trainer.train(resume_from_checkpoint=…) loads. Versions that recover in process are "
            "in docs/how-to/hugging-face.md",
            transformers.__version__,
            ", ".join(_MISSING),
        )
        super().__init__(*args, **options)


class ElasticTrainerMixin(_InProcess if IS_SUPPORTED else _ByRestart):  # type: ignore[misc]
    """Recovery in process for a subclass of Trainer ::

        class ElasticSFTTrainer(ElasticTrainerMixin, SFTTrainer): ...

    ``elastic_run`` is the job's :class:`elastic.Run`. Raises ConfigError for a training that cannot
    recover in process: docs/how-to/hugging-face.md.
    """

    elastic_run: elastic.Run


class ElasticTrainer(ElasticTrainerMixin, Trainer):
    """``transformers.Trainer`` whose updates are steps of an elastic job."""
