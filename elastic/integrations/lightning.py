"""Lightning with recovery in process ::

    +from elastic.integrations.lightning import ElasticStrategy

    -trainer = Trainer(strategy="ddp", num_nodes=3, …)
    +trainer = Trainer(strategy=ElasticStrategy(checkpoints="/mnt/shared/job"), …)
     trainer.fit(model, datamodule=data)

The strategy wraps the module, tracks optimizers, schedulers, callbacks and the progress of
Lightning's loops, divides each batch of the largest world among the ranks of the current one, and
runs ``fit`` as one call of ``run.retry``. An optimizer step, with all batches that it accumulates,
is a step of the job; the beginning and the end of an epoch, and each validation, is a unit of
``run.once``. Files and logs are those of plain Lightning on the largest world.

Start reading at :class:`Fit`, which drives the loops. Lightning's private names are used in this
file only; :func:`missing_names` reads them once.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib
import inspect
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import elastic
from elastic.errors import ConfigError, TrainingError
from elastic.groups.world import World
from elastic.integrations.attributes import ChangedAttributes, own_attributes, own_modules
from elastic.integrations.prepared import batches_of, weighted
from elastic.telemetry.files import replacing
from elastic.telemetry.log import get_logger
from elastic.train.copies import copied
from elastic.train.loader import BatchInfo, ElasticLoader
from elastic.train.run import Run
from elastic.train.sampler import Position

__all__ = ["ElasticStrategy"]

P = ParamSpec("P")
T = TypeVar("T")

# ----------------------------------------------------------------------------
# Lightning is published twice, as `lightning` and as `pytorch_lightning`, with different classes.

_PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def _packages() -> list[str]:
    """The packages that the script has imported, or the one that is installed.

    Raises ConfigError if there is none.
    """
    if imported := [name for name in _PACKAGES if name in sys.modules]:
        return imported
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return [name]
    raise ConfigError(
        "elastic.integrations.lightning needs Lightning",
        hint="pip install 'torch-elastic-harness[lightning]'",
    )


# The loops that `Fit` drives, with the parameters of each method.
_NAMES = {
    "loops.fit_loop._FitLoop": {
        "run": "",
        "reset": "",
        "setup_data": "",
        "on_run_start": "",
        "on_advance_start": "",
        "on_advance_end": "",
        "on_run_end": "",
        "on_iteration_done": "",
        "state_dict": "destination prefix",
        "load_state_dict": "state_dict prefix",
    },
    "loops.training_epoch_loop._TrainingEpochLoop": {
        "reset": "",
        "advance": "data_fetcher",
        "on_advance_end": "data_fetcher",
        "on_iteration_done": "",
        "_should_accumulate": "",
        "_should_check_val_fx": "data_fetcher",
    },
    "loops.evaluation_loop._EvaluationLoop": {"setup_data": "", "teardown": ""},
    "trainer.trainer.Trainer": {"_run_sanity_check": ""},
    "trainer.connectors.logger_connector.result._ResultCollection": {"reset": "metrics fx"},
    "callbacks.ModelCheckpoint": {"file_exists": "filepath trainer"},
}


def missing_names(package: str) -> str:
    """What this version of Lightning lacks of what is used here; empty: nothing."""
    for path, methods in _NAMES.items():
        module, _, name = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(f"{package}.{module}"), name)
        except (ImportError, AttributeError):
            return path
        for method, expected in methods.items():
            function = getattr(cls, method, None)
            if function is None:
                return f"{path}.{method}"
            _, *given = inspect.signature(function).parameters
            if given != expected.split():
                return f"{path}.{method}({', '.join(expected.split())})"
    return ""


# ----------------------------------------------------------------------------
# Data: batches of the largest world.


class SharedLoader:
    """This rank's part of each batch that the ranks of the largest world read together, in the
    order of Lightning's sampler.

    ``position``: the epoch, and the number of its batches that were read, at which an iteration
    begins. ``is_whole``: read all batches, for an evaluation before the first world.
    ``whole_batches``: those of the largest world, of which this rank may have several in the place
    of one: the item, and :attr:`rest`.
    """

    def __init__(
        self,
        run: Run,
        loader: DataLoader[Any],
        position: Callable[[], tuple[int, int]],
        *,
        is_whole: bool = False,
        whole_batches: bool = False,
    ) -> None:
        self._run, self._given, self._position = run, loader, position
        self._is_whole = is_whole
        self.rest: list[tuple[float, Any]] = []  # with their weights
        self._cycle = 0  # iterations since `resume`
        self.current: BatchInfo | None = None
        order = _order_of(loader, run.largest_world)
        batches = None
        if whole_batches and order is not None:
            batches = batches_of(order, loader, run.largest_world)
        self._loader = ElasticLoader(
            loader,
            order=order if batches is None else batches,
            largest_world=run.largest_world,
            weights="equal" if whole_batches else "samples",
            whole_batches=whole_batches,
        )

    def __getattr__(self, name: str) -> Any:
        # Not the position of a StatefulDataLoader, which would be saved and loaded.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._given, name)

    def __len__(self) -> int:
        return len(self._loader)

    def resume(self) -> None:
        """Let the next iteration begin at the position, and those after it at the beginning."""
        self._cycle = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, read = self._position() if self._cycle == 0 else (self._position()[0], 0)
        self._cycle += 1
        # The shorter of several loaders begins again (CombinedLoader, mode="max_size_cycle").
        self._loader.seek(Position(epoch, read % len(self) if read != len(self) else read))
        rank, size = self._rank_and_size()
        batches = self._loader.batches(rank, size, keeps_workers=True)
        for info, batch in batches:
            others = [next(batches) for _ in range(1, info.micro_batches)]
            weights = info.share.mean_weights
            self.rest = [(weights[each.micro_batch], other) for each, other in others]
            self.current = info
            yield batch

    def _rank_and_size(self) -> tuple[int, int]:
        if self._is_whole:
            return 0, 1
        if not self._run.has_world:
            return int(os.environ.get("RANK", 0)), self._run.largest_world
        return self._run.world.rank, self._run.world.size

    @property
    def weight(self) -> float:
        """The factor of a mean over this rank's samples of the current batch, whose mean over all
        ranks is then that over the samples of all. 1 if all ranks have equally many."""
        info = self.current
        if info is None:
            return 1.0
        return info.share.mean_weights[0] * info.rank_weight * self._run.world.size

    def stop(self) -> None:
        """End the data workers."""
        self._loader.stop_workers()


def _order_of(loader: DataLoader[Any], ranks: int) -> Callable[[int], list[int]] | None:
    """What the samplers of all ranks of the largest world yield, one index of each in turn: their
    batches, one after the other. None: that of the loader's own sampler, which is divided."""
    sampler: Any = loader.sampler
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas != ranks:
        return None
    if hasattr(sampler.dataset, "_sampler"):  # DistributedSamplerWrapper, of a sampler of any class
        return None

    def order(epoch: int) -> list[int]:
        sampler.set_epoch(epoch)
        own, states = sampler.rank, _random_states()
        try:
            indices = []
            for sampler.rank in range(ranks):
                _set_random_states(states)  # all ranks of a job have the same
                indices.append(list(sampler))
        finally:
            sampler.rank = own
        return [index for each in zip(*indices, strict=True) for index in each]

    return order


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _unwrapped(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader with the sampler that Lightning has wrapped in a DistributedSampler."""
    inner = getattr(getattr(loader.sampler, "dataset", None), "_sampler", None)
    if inner is None or not isinstance(loader.sampler, DistributedSampler):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=inner,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
    )


# ----------------------------------------------------------------------------
# State: what Lightning's objects know, besides weights and optimizers.


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it. Other values belong to their process."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_plain(value)}


class Progress:
    """The progress of a call of ``fit``: Lightning's loops, its callbacks, and which unit of work
    is next.

    An object with state, which the job tracks. The state of another call, which the job has left
    or already begun, is kept as it is.
    """

    def __init__(self, is_private: Callable[[Any], bool]) -> None:
        self._is_private = is_private
        self.fits = 0  # calls of fit() in this process
        self.of_other: Mapping[str, Any] | None = None  # the job's state, if it is of another call
        self.units = 0  # of `run.once`, complete
        self.files: list[str] = []  # that ModelCheckpoint has saved and not removed
        self.versions: list[Any] | None = None  # of the loggers, once ranks have agreed on them
        self.entries: list[int] = []  # that each logger was given
        self._restart()

    def attach(self, trainer: Any) -> None:
        """Called by each call of fit()."""
        if self.fits:
            self.of_other = copied(self.state_dict())
        self.fits += 1
        self._trainer = trainer
        self._callbacks = trainer.callbacks
        modules = own_modules(trainer.lightning_module)
        self._own = ChangedAttributes(modules)
        self._own.begin()

    def begin(self, logged: tuple[list[Any] | None, list[int]]) -> None:
        """Begin the attached call, with the versions of its loggers and the numbers of entries."""
        self.of_other = None
        self._restart()
        self.versions, self.entries = logged

    def _restart(self) -> None:
        self.is_checked = False  # the sanity check was run
        self.is_started = False  # on_train_start was called on a rank that has trained since
        self.in_epoch = False
        self.owes_validation = False  # after the last step
        self.is_over = False
        self.loaded: tuple[float, float] | None = None  # restored
        self.metrics: dict[str, Any] = {}  # rank 0's, after the last unit

    _OWN = ("units", "is_checked", "is_started", "in_epoch", "owes_validation", "is_over")

    def state_dict(self) -> Mapping[str, Any]:
        if self.of_other is not None:
            return self.of_other
        trainer = self._trainer
        return {
            "fits": self.fits,
            "own": {name: getattr(self, name) for name in self._OWN},
            "files": self.files,
            "metrics": self.metrics,
            "versions": self.versions,
            "entries": self.entries,
            "loops": _state_of_loops(trainer.fit_loop),
            "should_stop": trainer.should_stop,
            "has_validated": self._val_loop._has_run,
            "loaded": list(self._epochs_of_loaders()),
            "seen": [list(each) for each in self._val_loop._seen_batches_per_dataloader.items()],
            "callbacks": {str(i): self._state_of(c) for i, c in enumerate(self._callbacks)},
            "modules": self._own.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["fits"] != self.fits:
            self.of_other = copied(state)
            return
        self.of_other = None
        trainer = self._trainer
        for name in self._OWN:
            setattr(self, name, state["own"][name])
        self.files, self.metrics = list(state["files"]), dict(state["metrics"])
        self.versions, self.entries = copied(state["versions"]), list(state["entries"])
        trainer.fit_loop.load_state_dict(state["loops"])
        _continue(trainer.fit_loop)
        trainer.should_stop = state["should_stop"]
        self._val_loop._has_run = state["has_validated"]
        self.loaded = tuple(state["loaded"])
        self._val_loop._seen_batches_per_dataloader.clear()
        self._val_loop._seen_batches_per_dataloader.update(state["seen"])
        for number, callback in enumerate(self._callbacks):
            self._restore(callback, state["callbacks"].get(str(number), {}))
        self._own.load_state_dict(state["modules"])

    @property
    def _val_loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.val_loop

    def _epochs_of_loaders(self) -> tuple[float, float]:
        """In which epochs the loaders were requested (reload_dataloaders_every_n_epochs)."""
        loop = self._trainer.fit_loop
        return loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch

    def load_data(self, *, is_alone: bool) -> None:
        """Request the loaders that all ranks have by now. ``is_alone``: this rank has joined."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        val_loop = loop.epoch_loop.val_loop
        train_epoch, val_epoch = self.loaded if is_alone and self.loaded else (None, None)
        if train_epoch is not None and loop._last_train_dl_reload_epoch != train_epoch:
            loop._combined_loader = None
            loop.setup_data()
        if trainer.enable_validation:
            trainer.validating = True
            val_loop.setup_data()
            trainer.training = True
        if train_epoch is not None:
            loop._last_train_dl_reload_epoch = train_epoch
            val_loop._last_val_dl_reload_epoch = val_epoch

    def _state_of(self, callback: Any) -> dict[str, Any]:
        if self._is_private(callback):
            return {}
        own = {n: v for n, v in _plain(vars(callback)).items() if "time" not in n}
        return {"attributes": own, "state": _plain(callback.state_dict())}

    def _restore(self, callback: Any, state: Mapping[str, Any]) -> None:
        if not state:
            return
        # Not that of ModelCheckpoint, which is part of its attributes, and warns of other folders.
        if state["state"] and not hasattr(callback, "file_exists"):
            callback.load_state_dict(dict(state["state"]))
        vars(callback).update(state["attributes"])


def _state_of_loops(loop: Any, prefix: str = "") -> dict[str, Any]:
    """``loop.state_dict()``, which copies each number with ``dataclasses.asdict``: that takes
    longer than all else that is read in a step."""
    state = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if hasattr(value, "restarting"):
            state |= _state_of_loops(value, f"{prefix}{name}.")
        elif _is_progress(value):
            state[f"{prefix}{name}"] = _fields_of(value)
    return state


def _is_progress(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "load_state_dict")


def _fields_of(progress: Any) -> dict[str, Any]:
    return {
        name: _fields_of(value) if _is_progress(value) else value
        for name, value in vars(progress).items()
    }


def _continue(loop: Any) -> None:
    """Let a loop and its inner ones go on as if they had never been left: they are not restarting
    from a checkpoint of Lightning, which is saved in one of its hooks."""
    for each in (loop, *(one for one in vars(loop).values() if hasattr(one, "restarting"))):
        each._restarting = each._loaded_from_state_dict = each._resuming_from_checkpoint = False
        if each is not loop:
            _continue(each)


class Averages:
    """What ``self.log(…, on_epoch=True, sync_dist=True)`` has added up in the epoch's training
    steps, over the samples of all ranks. An object with state, which is the same on all.

    Lightning adds up the values of each rank, and sums over ranks at the end of the epoch: a death
    would lose those of the dead rank.
    """

    def __init__(self, run: Run, results: Callable[[], Mapping[str, Any]]) -> None:
        self._run, self._results = run, results
        self._totals: dict[str, list[float]] = {}  # the sum, and the number of samples
        self._own: dict[str, tuple[Any, Any, int]] = {}  # of this rank, as far as they are given
        self._sums: list[Mapping[str, float]] = []  # of the current step

    def state_dict(self) -> dict[str, Any]:
        """The sums of all ranks."""
        return {"totals": {key: list(both) for key, both in self._totals.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with sums of :meth:`state_dict`."""
        self._totals = {key: list(both) for key, both in state["totals"].items()}

    def begin_epoch(self) -> None:
        """Begin with nothing."""
        self._totals.clear()

    def begin_step(self) -> None:
        """Called before the first batch of a step."""
        self._sums = []
        self._own = {
            key: (*_totals(metric), metric._update_count) for key, metric in self._shared()
        }

    def _new(self, *, counts: bool) -> dict[str, torch.Tensor]:
        """What was logged since the last call: on a rank that has joined, the same as on others, to
        which earlier values are known. ``counts``: it is not of a filler."""
        values: dict[str, torch.Tensor] = {}
        for key, metric in self._shared():
            value, weight, updates = (*_totals(metric), metric._update_count)
            before, weight_before, updates_before = self._own.get(key, (0.0, 0, 0))
            if updates == updates_before:
                continue
            self._own[key] = value, weight, updates
            new = torch.as_tensor(weight - weight_before, device=value.device)
            values[f"{key}:value"] = (value - before).double() * counts
            values[f"{key}:weight"] = new.double() * counts
        return values

    def give(self, *, counts: bool = True) -> None:
        """Called before a backward pass: sum what the batch has logged with its gradients, if it
        ``counts``."""
        if values := self._new(counts=counts):
            sums = self._run.sum_with_gradients(**values)
            if not any(sums is earlier for earlier in self._sums):  # of passes under no_sync()
                self._sums.append(sums)

    def end_step(self, sum_over_ranks: Callable[..., torch.Tensor], *, counts: bool) -> None:
        """Called after the last batch of a step: add the sums of all ranks. What manual
        optimization has logged after its last backward pass costs a collective."""
        if late := self._new(counts=counts):
            summed = sum_over_ranks(torch.stack(list(late.values()))).tolist()
            self._sums.append(dict(zip(late, summed, strict=True)))
        for sums in self._sums:
            for name, number in sums.items():
                key, _, what = name.rpartition(":")
                self._totals.setdefault(key, [0.0, 0.0])[what == "weight"] += number

    def end_epoch(self, callback_metrics: dict[str, Any]) -> None:
        """Let Lightning read the values of all ranks. A rank that has joined after the last step
        has not logged any itself."""
        metrics = dict(self._shared())
        for key, (value, weight) in self._totals.items():
            metric, name = metrics.get(key), key.partition(".")[2]
            if metric is None:
                total = value / weight if weight else value
                mean = torch.tensor(total, device=self._run.device)
                callback_metrics.update({name: mean, f"{name}_epoch": mean})
            else:
                total = value / weight if weight and metric.meta.is_mean_reduction else value
                metric._computed = metric.value.new_tensor(total)

    def _shared(self) -> Iterator[tuple[str, Any]]:
        for key, metric in self._results().items():
            if is_shared(metric):
                yield key, metric


def is_shared(metric: Any) -> bool:
    """Whether a logged value is a sum or a mean over an epoch's batches and over all ranks."""
    meta = metric.meta
    is_sum = meta.is_mean_reduction or meta.is_sum_reduction
    is_of_all = meta.sync.should and not meta.sync.rank_zero_only
    is_of_step = meta.fx == "training_step"
    return bool(metric.is_tensor and is_sum and meta.on_epoch and is_of_all and is_of_step)


def _is_reduced(metric: Any) -> bool:
    """Whether Lightning reduces a value over all ranks at the end of an epoch."""
    if not metric.is_tensor:
        return metric.meta.metric_attribute is not None
    return bool(metric.meta.on_epoch and metric.meta.sync.should and not is_shared(metric))


def _arguments_of_log(metric: Any) -> dict[str, Any]:
    """With which Lightning registers the same value on another rank."""
    meta = metric.meta
    names = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
    value = float("-inf") if meta.is_max_reduction else float("inf")
    if meta.is_mean_reduction or meta.is_sum_reduction:
        value = 0.0
    return {
        **{name: getattr(meta, name) for name in names},
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "metric_attribute": meta.metric_attribute,
        "value": torch.tensor(value, device=metric.value.device if metric.is_tensor else "cpu"),
    }


def _totals(metric: Any) -> tuple[Any, Any]:
    return metric.value, getattr(metric, "cumulated_batch_size", 0)


def _set_totals(metric: Any, value: Any, weight: Any) -> None:
    metric.value = torch.as_tensor(value, dtype=metric.value.dtype, device=metric.value.device)
    if metric.meta.is_mean_reduction:
        metric.cumulated_batch_size = torch.as_tensor(weight, device=metric.value.device)
    metric._computed = None
    metric._update_count = max(1, metric._update_count)  # compute() warns before the first one


class OwnResults:
    """What a rank itself has logged in the epoch, and the lists and dicts of its LightningModule:
    state of this rank alone."""

    def __init__(self, module: Any, results: Callable[[], Mapping[str, Any]]) -> None:
        self._module, self._results = module, results

    def state_dict(self) -> dict[str, Any]:
        logged = {
            key: [*_totals(metric), metric.has_reset, metric._update_count]
            for key, metric in self._results().items()
            if metric.is_tensor and not is_shared(metric)
        }
        return {"logged": logged, "module": dict(self._containers())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, metric in self._results().items():
            if metric.is_tensor and not is_shared(metric):
                metric.reset()
                if key in state["logged"]:
                    value, weight, has_reset, updates = state["logged"][key]
                    _set_totals(metric, value, weight)
                    metric.has_reset, metric._update_count = has_reset, updates
        for name, value in dict(self._containers()).items():
            if name not in state["module"]:
                value.clear()
        for name, value in state["module"].items():
            own = getattr(self._module, name, None)
            if isinstance(own, list):
                own[:] = value
            else:
                setattr(self._module, name, value)

    def _containers(self) -> Iterator[tuple[str, Any]]:
        for name, value in own_attributes(self._module).items():
            if type(value) in (list, dict) and _is_plain(value):
                yield name, value


# ----------------------------------------------------------------------------
# Effects outside of the job: log entries and files.


class Logs:
    """Holds log entries back until the step or the unit that has written them is complete, so that
    none is written twice."""

    def __init__(self, trainer: Any, progress: Progress) -> None:
        self._trainer, self._progress = trainer, progress
        self._held: list[Callable[[], object]] = []
        self._first: list[Callable[[], object]] = []  # before training: of hyper-parameters
        self._is_resumed = False  # the job has continued from a checkpoint
        self._is_open = False  # this process has written entries since it is rank 0
        self._saves = [logger.save for logger in trainer.loggers]
        for number, logger in enumerate(trainer.loggers):
            logger.log_metrics = functools.partial(self._hold, number, logger.log_metrics)
            logger.save = lambda: None  # it would open the files

    def remove(self) -> None:
        """Write entries at once from now on."""
        self.drop()
        for logger in self._trainer.loggers:
            for name in ("log_metrics", "save"):
                vars(logger).pop(name, None)

    def _hold(self, number: int, write: Callable[..., object], *args: Any, **options: Any) -> None:
        entry = functools.partial(write, *args, **options)
        if not self._progress.entries:
            self._first.append(entry)
            return
        self._progress.entries[number] += 1
        self._held.append(entry)

    def drop(self) -> None:
        """Forget the entries of an interrupted step."""
        self._held.clear()

    def write(self) -> None:
        """Write the entries of a complete step."""
        if not self._held:
            return
        entries, self._held = self._held, []
        if self._trainer.is_global_zero and not self._is_open:
            self._is_open = True
            new = len(entries) // len(self._saves)
            if not any(kept > new for kept in self._progress.entries):
                entries = self._first + entries
            for number, logger in enumerate(self._trainer.loggers):
                self._continue(logger, max(0, self._progress.entries[number] - new))
        for write in entries:
            write()
        for save in self._saves:
            save()

    def enter_world(self, versions: list[Any] | None, *, is_resumed: bool) -> None:
        """Use the version of each logger that the job's first rank 0 has chosen."""
        self._is_resumed |= is_resumed
        self._is_open &= self._trainer.is_global_zero
        for logger, version in zip(self._trainer.loggers, versions or [], strict=False):
            if "_version" in vars(logger) and logger._version != version:
                logger._version, logger._experiment = version, None

    def _continue(self, logger: Any, entries: int) -> None:
        """Continue the files of an earlier process, with its first entries: those of steps that
        the job has not lost."""
        kind = type(logger).__name__
        if kind == "TensorBoardLogger" and logger._experiment is None and self._is_resumed:
            logger._kwargs["purge_step"] = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        if kind == "CSVLogger" and (logger._experiment is None or self._is_resumed):
            reopen(logger, entries)


def reopen(logger: Any, entries: int) -> None:
    """Open the file of a CSVLogger, which removes it, and give it its first entries again. A
    process that dies meanwhile leaves them for the next one."""
    path = Path(logger.log_dir, "metrics.csv")
    kept = path.with_suffix(".kept")
    if path.is_file():
        path.replace(kept)
    lines = kept.read_text().splitlines(keepends=True) if kept.is_file() else []
    writer = logger.experiment
    if lines:
        with replacing(path) as new:
            new.write_text("".join(lines[: 1 + entries]))
        writer.metrics_keys = next(csv.reader(lines))
        kept.unlink()


class Files:
    """The files of ModelCheckpoint. One that belongs to the job, but is not part of its state, was
    saved after the place at which the job continues: it does not exist, and is saved again.

    A list beside the files, ``.elastic-RUN_ID``, names those of the job.
    """

    def __init__(self, strategy: Any, run: Run, progress: Progress) -> None:
        self._strategy, self._run, self._progress = strategy, run, progress

    def watch(self, callback: Any) -> None:
        """Replace the question whether a file exists."""
        callback.file_exists = functools.partial(self._exists, callback)

    def _exists(self, callback: Any, filepath: Any, trainer: Any) -> bool:
        exists = trainer.is_global_zero and callback._fs.exists(filepath)
        if exists and str(filepath) not in self._progress.files:
            exists = not self._is_ours(Path(filepath))
        return bool(trainer.strategy.reduce_boolean_decision(bool(exists), all=False))

    def _is_ours(self, path: Path) -> bool:
        names = self._list(path)
        return names.is_file() and path.name in names.read_text().splitlines()

    def _list(self, path: Path) -> Path:
        return path.parent / f".elastic-{self._run.id}"

    def before_save(self, filepath: Any) -> None:
        """Called on all ranks before rank 0 saves a file."""
        path = Path(filepath)
        if self._strategy.is_global_zero and not self._is_ours(path) and "://" not in str(filepath):
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._list(path).open("a") as names:
                names.write(f"{path.name}\n")
        if str(filepath) not in self._progress.files:
            self._progress.files.append(str(filepath))

    def removed(self, filepath: Any) -> None:
        """Called on all ranks when a file is removed."""
        if str(filepath) in self._progress.files:
            self._progress.files.remove(str(filepath))


# ----------------------------------------------------------------------------
# What is registered.


class Job:
    """The objects that are registered: the first ``fit`` does it. A later one, of the same Trainer
    or another one, uses the same objects, with the state of its own new ones at its beginning."""

    def __init__(self, run: Run, is_private: Callable[[Any], bool]) -> None:
        self._run = run
        self.fit: Any = None  # the last one that has begun
        self.progress = Progress(is_private)
        self.averages = Averages(run, lambda: self.fit.epochs._results)
        self.is_resumed = False  # from a checkpoint
        self._has_world = False
        self._wrapped: Any = None
        self._tracked: dict[str, Any] = {}

    def wrap(self, module: nn.Module, options: Mapping[str, Any]) -> Any:
        """The wrapped module. Raises ConfigError for another one than that of the first call."""
        if self._wrapped is None:
            self._wrapped = self._run.wrap(module, **options)
        elif self._wrapped.module is not module:
            raise ConfigError(
                "trainer.fit() is called again with another LightningModule: a job trains one",
                hint="start a job for each model, such as each fold of a cross-validation",
            )
        return self._wrapped

    def begin(self, fit: Fit) -> None:
        """Called by each ``fit`` before it trains. Raises ConfigError for other optimizers,
        schedules or modules of callbacks than those of the first one."""
        new = dict(_stateful_of(fit))
        if self.fit is None:
            self._register(fit, new)
            return
        if {k: _kind(v) for k, v in new.items()} != {k: _kind(v) for k, v in self._tracked.items()}:
            raise ConfigError(
                "trainer.fit() is called again with other optimizers, schedules or callbacks with "
                "weights: those of a job stay",
                hint="return optimizers of the same parameters, with other learning rates or "
                "frozen parameters; or start a job for each phase, which loads the last one's file",
            )
        states = {name: copied(each.state_dict()) for name, each in new.items()}
        of_job = {name: copied(each.state_dict()) for name, each in self._tracked.items()}
        _replace(fit, new, self._tracked)
        self._load(of_job)
        self.fit = fit

        def begin() -> None:
            self._load(states)
            self.progress.begin(_logged(fit))

        self._run.once("fit", fit.strategy.together(begin), at=self.progress.fits)

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._tracked[name].load_state_dict(copied(state))

    def _register(self, fit: Fit, tracked: dict[str, Any]) -> None:
        self.fit, self._tracked, module = fit, tracked, fit.trainer.lightning_module
        self.progress.begin((None, []))  # they agree in the first world
        self._run.track(**tracked, averages=self.averages, lightning=self.progress)
        results = OwnResults(module, lambda: self.fit.epochs._results)
        local = {
            f"metric_{name}": each
            for name, each in module.named_modules()
            if isinstance(getattr(type(each), "metric_state", None), property)
        }
        self._run.track(**local, results=results, local=True)
        self._run.on_world(lambda world: self.fit.strategy.together(self._enter_world)(world))

    def _enter_world(self, world: World) -> None:
        fit, progress = self.fit, self.progress
        fit.strategy.set_world_ranks()  # of rank_zero_only, too
        # A joining process is not rank 0 in its first world.
        is_resumed = not self._has_world and world.rank == 0 and progress.units > 0
        self._has_world, self.is_resumed = True, self.is_resumed or is_resumed
        if progress.of_other is not None:
            return  # that call enters it
        if progress.versions is None:
            progress.versions, progress.entries = _logged(fit)
        fit.logs.enter_world(progress.versions, is_resumed=is_resumed)
        if is_resumed and fit.trainer.ckpt_path:
            get_logger().info(
                "fit() continues from the job's own state, after %d optimizer steps, and not from "
                "ckpt_path=%s",
                *(fit.epochs.global_step, fit.trainer.ckpt_path),
            )


def _logged(fit: Fit) -> Any:
    """Rank 0's versions of its loggers, and the numbers of entries that their files have."""
    loggers = fit.trainer.loggers
    versions = [getattr(logger, "version", None) for logger in loggers]
    entries = [_entries_of(logger) for logger in loggers]
    return fit.strategy.broadcast(([v if _is_plain(v) else None for v in versions], entries))


def _entries_of(logger: Any) -> int:
    if type(logger).__name__ != "CSVLogger" or logger._experiment is None:
        return 0
    logger._experiment.save()
    path = Path(logger.log_dir, "metrics.csv")
    return len(path.read_text().splitlines()) - 1 if path.is_file() else 0


def _stateful_of(fit: Fit) -> Iterator[tuple[str, Any]]:
    """The optimizers of a ``fit``, its schedules, scaler, and modules of callbacks."""
    strategy = fit.strategy
    for i, optimizer in enumerate(strategy.optimizers):
        yield f"optimizer{i}", optimizer
    for i, config in enumerate(strategy.lr_scheduler_configs):
        yield f"scheduler{i}", config.scheduler
    if (scaler := getattr(strategy.precision_plugin, "scaler", None)) is not None:
        yield "scaler", scaler
    own = set(fit.trainer.lightning_module.modules())
    for i, callback in enumerate(fit.trainer.callbacks):
        for name, value in vars(callback).items():
            if isinstance(value, nn.Module) and value not in own:
                yield f"callback{i}_{name}", value


def _kind(value: Any) -> Any:
    groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else ()
    return type(value), [list(map(id, group["params"])) for group in groups]


def _replace(fit: Fit, new: Mapping[str, Any], tracked: Mapping[str, Any]) -> None:
    """Let ``fit`` use the tracked objects in place of its new ones."""
    strategy = fit.strategy
    count = len(strategy.optimizers)
    strategy.optimizers = [tracked[f"optimizer{i}"] for i in range(count)]
    optimizers = {id(new[f"optimizer{i}"]): each for i, each in enumerate(strategy.optimizers)}
    for i, config in enumerate(strategy.lr_scheduler_configs):
        own, config.scheduler = config.scheduler, tracked[f"scheduler{i}"]
        vars(config.scheduler).update(vars(own))
        _reattach(config.scheduler, optimizers)
    if "scaler" in tracked:
        strategy.precision_plugin.scaler = tracked["scaler"]
    for i, callback in enumerate(fit.trainer.callbacks):
        for name in [name for name in vars(callback) if f"callback{i}_{name}" in tracked]:
            setattr(callback, name, tracked[f"callback{i}_{name}"])


def _reattach(scheduler: Any, optimizers: Mapping[int, Any]) -> None:
    scheduler.optimizer = optimizers.get(id(scheduler.optimizer), scheduler.optimizer)
    for inner in getattr(scheduler, "_schedulers", ()):  # SequentialLR, ChainedScheduler
        _reattach(inner, optimizers)


_JOBS: WeakKeyDictionary[Run, Job] = WeakKeyDictionary()


# ----------------------------------------------------------------------------
# The loops.


class Fit:
    """``trainer.fit``: drives Lightning's loops in the function of ``run.retry``.

    All state of these loops is in attributes, so the function continues where they stand: after a
    fault, :class:`Progress` has restored them to the end of the last step or unit.
    """

    def __init__(self, strategy: Any, trainer: Any, job: Job) -> None:
        self.strategy, self.trainer, self.run, self.job = strategy, trainer, strategy.run, job
        self.loop = trainer.fit_loop
        self.epochs = self.loop.epoch_loop
        self.progress, self.averages = job.progress, job.averages
        self.progress.attach(trainer)
        self.logs = Logs(trainer, self.progress)
        self.files = Files(strategy, self.run, self.progress)
        self._has_started = False  # on_train_start, in this process
        self._forward = trainer.lightning_module.forward
        self._check_sanity = trainer._run_sanity_check
        trainer._run_sanity_check = lambda: None  # there is no world yet
        self.loop.run = self._run
        for loop in (self.loop, self.epochs.val_loop):
            # Compares lengths on all ranks, in the first call of each process only.
            loop.setup_data = strategy.together(loop.setup_data, is_together=False)
        if hasattr(self.epochs, "_broadcast_sigterm_tensor"):
            # A collective in each batch, whose faults it ignores. Nodes leave between two steps.
            self.epochs._broadcast_sigterm_tensor = lambda: None
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "file_exists"):
                self.files.watch(callback)

    @property
    def weight(self) -> float:
        """The factor of a loss that is the mean over this rank's samples of the current batch."""
        combined = self.loop._combined_loader
        return combined.flattened[0].weight if combined is not None else 1.0

    def rest(self, *, takes: bool = False) -> list[tuple[float, Any]]:
        """Further batches of this rank in the place of the current one."""
        combined = self.loop._combined_loader
        if combined is None or not self.strategy._whole_batches:
            return []
        (loader,) = combined.flattened
        rest = loader.rest
        if takes:
            loader.rest = []
        return list(rest)

    @contextmanager
    def joined_logs(self) -> Iterator[Callable[..., None]]:
        """Log what further batches log as a part of the first one, whose place they take. The
        function is called before each of their backward passes."""
        results = self.epochs._results
        own = OwnResults(self.trainer.lightning_module, lambda: results)
        sums = {key: metric._forward_cache for key, metric in self._logged_in_step()}
        states = [own.state_dict()]

        def joins(*, counts: bool) -> None:
            self.averages.give(counts=counts)
            for key, metric in self._logged_in_step():
                if metric.meta.sync.should and metric.meta.is_mean_reduction:
                    sums[key] = sums[key] + metric._forward_cache
            if not counts:
                own.load_state_dict(states[0])
            states[0] = copied(own.state_dict())

        yield joins
        for key, metric in self._logged_in_step():
            metric._forward_cache = sums[key]

    def _logged_in_step(self) -> Iterator[tuple[str, Any]]:
        for key, metric in self.epochs._results.items():
            if metric.is_tensor and metric.meta.on_step and metric.meta.fx == "training_step":
                yield key, metric

    def end(self) -> None:
        """Restore what was replaced."""
        self.logs.remove()
        self.trainer.__dict__.pop("_run_sanity_check", None)
        replaced = ("run", "setup_data", "_broadcast_sigterm_tensor")
        for owner in (self.loop, self.epochs, self.epochs.val_loop):
            for name in replaced:
                vars(owner).pop(name, None)
        for callback in self.trainer.checkpoint_callbacks:
            vars(callback).pop("file_exists", None)
        if self.loop._combined_loader is not None:
            for loader in self.loop._combined_loader.flattened:
                if isinstance(loader, SharedLoader):
                    loader.stop()

    # -- the function of run.retry ------------------------------------------------------------

    def _run(self) -> None:
        # The same calls of the job on all ranks, also if it was over when this node joined.
        self.loop.setup_data()
        loaders = self.loop._combined_loader
        if self.strategy._whole_batches and loaders is not None and len(loaders.flattened) > 1:
            raise ConfigError(
                "whole_batches=True with several loaders: each has its own batches in the place of "
                "one",
                hint="one DataLoader over torch.utils.data.StackDataset(first, second)",
            )
        state = self.progress.of_other
        self.job.begin(self)
        if not self.loop.skip:
            self.loop.reset()
        if state is not None and state["fits"] == self.progress.fits:  # this node joins in it
            self.progress.load_state_dict(state)
            self.logs.enter_world(self.progress.versions, is_resumed=self.job.is_resumed)
        self.run.retry(self.strategy.together(self._train))
        self._share_metrics()  # also if all was done
        self.loop._restarting = False

    def _train(self) -> None:
        if self.progress.of_other is not None or self.loop.skip:
            return  # the job is in a later call, or this one trains nothing
        self._resume()
        progress, loop = self.progress, self.loop
        if not progress.is_checked:
            self._once("sanity check", self._check)
        if not self._has_started:
            self._start()
        while not progress.is_over:
            if not progress.in_epoch:
                if loop.done:
                    self._once("end of training", self._end)
                    break
                self._once("beginning of an epoch", self._begin_epoch)
            self._batches()
            self._once("end of an epoch", self._end_epoch)

    def _resume(self) -> None:
        """Forget what an interrupted call has left outside of the state."""
        trainer = self.trainer
        self.logs.drop()
        self.strategy.weight = 1.0
        trainer.training = True
        trainer.lightning_module._current_fx_name = None
        # A fault before the module's forward pass leaves Lightning's redirection in its place.
        trainer.lightning_module.forward = self._forward
        is_first = self.epochs.batch_progress.current.ready == 0
        if is_first:
            self.epochs._results.reset(fx="training_step")
        # Lightning forgets what was logged before the first iteration of a loop.
        trainer._logger_connector._first_loop_iter = None if is_first else False
        trainer._logger_connector._current_fx = None
        val_loop = self.epochs.val_loop
        if val_loop._data_fetcher is not None:
            val_loop.teardown()
        val_loop._results.reset()
        self._share_metrics()
        torch.set_grad_enabled(True)

    def _share_metrics(self) -> None:
        """Let a node that has joined know what was logged before."""
        for name, value in self.progress.metrics.items():
            self.trainer._logger_connector._callback_metrics.setdefault(name, value)

    def _once(self, name: str, function: Callable[[], object]) -> None:
        progress = self.progress

        def unit() -> None:
            function()
            progress.units += 1
            progress.metrics = self.strategy.broadcast(_plain(self.trainer.callback_metrics))

        self.run.once(name, unit, at=progress.units)
        self.logs.write()

    def _check(self) -> None:
        self.progress.is_checked = True
        self._check_sanity()

    def _start(self) -> None:
        """Call on_train_start in each process; on one that joins, others do not call it."""
        is_alone = self.progress.is_started
        self.progress.load_data(is_alone=is_alone)
        self.strategy.together(self.loop.on_run_start, is_together=not is_alone)()
        self._has_started = self.progress.is_started = True

    def _end(self) -> None:
        self.progress.is_over = True
        self.loop.on_run_end()

    def _begin_epoch(self) -> None:
        self.averages.begin_epoch()
        self.loop.on_advance_start()
        self.epochs.reset()
        self.progress.in_epoch = True

    def _end_epoch(self) -> None:
        self.progress.in_epoch = False
        self.averages.end_epoch(self.trainer._logger_connector._callback_metrics)
        self._share_results()
        self.loop.on_advance_end()
        self.loop.on_iteration_done()

    def _share_results(self) -> None:
        """Let a rank that has joined after the epoch's last step know which values the others are
        about to reduce: its own part is empty."""
        results, module = self.epochs._results, self.trainer.lightning_module
        known = {key: _arguments_of_log(each) for key, each in results.items() if _is_reduced(each)}
        for key, arguments in self.strategy.broadcast(known).items():
            if key not in results:
                path = arguments["metric_attribute"]
                value = arguments["value"] if path is None else module.get_submodule(path)
                results.log(**{**arguments, "value": value}, sync_dist_fn=self.strategy.reduce)

    def _batches(self) -> None:
        progress, epochs, fetcher = self.progress, self.epochs, self.loop._data_fetcher
        self._open(fetcher)
        while True:
            if progress.owes_validation:
                self._once("validation", self._end_step)
            if epochs.done:
                break
            if self._is_after_batch():
                self._once("rest of a step", self._continue_checkpoint)
                continue
            try:
                self._step(fetcher)
            except StopIteration:  # on_train_batch_start has returned -1
                break
            finally:
                epochs.on_iteration_done()

    def _is_after_batch(self) -> bool:
        """Whether ``fit(ckpt_path=…)`` continues with a validation after a batch, or after it."""
        epochs = self.epochs
        is_evaluation = epochs.val_loop.restarted_mid_evaluation or epochs.restarted_on_last
        return bool(
            epochs.restarting
            and is_evaluation
            and epochs._should_check_val_fx(self.loop._data_fetcher)
        )

    def _continue_checkpoint(self) -> None:
        self.epochs.advance(self.loop._data_fetcher)  # without a batch
        self.epochs.on_advance_end(self.loop._data_fetcher)
        self.epochs.on_iteration_done()

    def _open(self, fetcher: Any) -> None:
        read = self.epochs.batch_progress.current.ready
        for loader in self.loop._combined_loader.flattened:
            loader.resume()
        iter(fetcher)
        fetcher.fetched = read
        fetcher.done = fetcher.length is not None and read >= fetcher.length
        fetcher._start_profiler = self.epochs._on_before_fetch
        fetcher._stop_profiler = self.epochs._on_after_fetch

    def _step(self, fetcher: Any) -> None:
        """An optimizer step, with all batches that it accumulates, and what follows it."""
        epochs, updates = self.epochs, self.epochs.global_step
        self.run.begin()
        self.averages.begin_step()
        try:
            epochs.advance(fetcher)
            while self._accumulates(updates) and not epochs.done:
                epochs.on_advance_end(fetcher)
                epochs.on_iteration_done()
                epochs.advance(fetcher)
            if self._is_validation_due(fetcher):
                self.progress.owes_validation = True
            else:
                self._end_batch(fetcher, validate=False)
        except StopIteration:
            self._commit()
            raise
        self._commit()

    def _commit(self) -> None:
        self.averages.end_step(self.strategy.sum, counts=self.weight > 0)
        self.run.commit(changes_follow=False)
        self.logs.write()

    def _accumulates(self, updates: int) -> bool:
        """Whether no optimizer has used the gradients of the step's batches. ``updates``: that
        optimizers had made before it."""
        if self.trainer.lightning_module.automatic_optimization:
            return bool(self.epochs._should_accumulate())
        return bool(self.epochs.global_step == updates)

    def _end_step(self) -> None:
        self.progress.owes_validation = False
        self._end_batch(self.loop._data_fetcher, validate=True)

    def _is_validation_due(self, fetcher: Any) -> bool:
        is_due = bool(self.epochs._should_check_val_fx(fetcher))
        if getattr(self.trainer, "_val_check_time_interval", None) is None:
            return is_due
        return bool(self.strategy.broadcast(is_due))  # clocks of ranks differ

    def _end_batch(self, fetcher: Any, *, validate: bool) -> None:
        trainer = self.trainer
        if (interval := getattr(trainer, "_val_check_time_interval", None)) is None:
            self.epochs.on_advance_end(fetcher)
            return
        trainer._val_check_time_interval = -math.inf if validate else math.inf
        try:
            self.epochs.on_advance_end(fetcher)
        finally:
            trainer._val_check_time_interval = interval


# ----------------------------------------------------------------------------
# The strategy.


def _define(package: str) -> Any:
    """The strategy for one of Lightning's packages."""
    if name := missing_names(package):
        return _define_restarting(package, name)
    pl: Any = importlib.import_module(package)
    fabric = _PACKAGES[package]
    environments: Any = importlib.import_module(f"{fabric}.plugins.environments")
    reset_seed = importlib.import_module(f"{fabric}.utilities.seed").reset_seed
    base: Any = importlib.import_module(f"{package}.strategies")
    call: Any = importlib.import_module(f"{package}.trainer.call")
    data_connector = importlib.import_module(f"{package}.trainer.connectors.data_connector")

    class Environment(environments.ClusterEnvironment):
        """The ranks of the current world; before the first one, those of the largest."""

        creates_processes_externally = True
        main_address, main_port = "", 0  # no group is opened with them

        def __init__(self, run: Run | None) -> None:
            self._run = run

        @staticmethod
        def detect() -> bool:
            return False

        def world_size(self) -> int:
            if self._run is None:
                return _variable("WORLD_SIZE", 1)
            return self._run.world.size if self._run.has_world else self._run.largest_world

        def global_rank(self) -> int:
            has_world = self._run is not None and self._run.has_world
            return self._run.world.rank if self._run and has_world else _variable("RANK", 0)

        def local_rank(self) -> int:
            return _variable("LOCAL_RANK", 0)

        def node_rank(self) -> int:
            return _variable("GROUP_RANK", 0)

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            workers = _variable("LOCAL_WORLD_SIZE", 1)
            if num_devices != workers:
                raise ConfigError(
                    f"Trainer(devices={num_devices}) on a node with {workers} workers",
                    hint=f"Trainer(devices={workers}), or torchrun --nproc-per-node={num_devices}",
                )

        def set_world_size(self, size: int) -> None:
            """Set by the world."""

        def set_global_rank(self, rank: int) -> None:
            """Set by the world."""

    class ElasticStrategy(base.DDPStrategy):
        """DDP whose ``fit`` continues in the same processes when nodes fail, leave or join.

        ``Trainer(strategy=ElasticStrategy(checkpoints=…))``; ``strategy="elastic"`` after this
        module's import, with ``ELASTIC_CHECKPOINTS``. ``devices`` is the number of workers per
        node, as with "ddp"; ``num_nodes`` has no effect. ``whole_batches``: a rank gets whole
        batches of the largest world, for a loss that is not a mean over samples; in a smaller world
        ``training_step`` is called for several, one after the other, in the place of one.
        ``checkpoints``, ``when``, ``keep`` and ``seed`` are those of :func:`elastic.join`,
        ``find_unused_parameters`` and others those of DDP.

        Raises ConfigError for options of DDPStrategy that cannot be supported, and the errors of
        :func:`elastic.join`.
        """

        strategy_name = "elastic"

        def __init__(
            self,
            *,
            checkpoints: Any = None,
            when: Any = None,
            keep: Any = None,
            seed: int = 0,
            whole_batches: bool = False,
            **options: Any,
        ) -> None:
            _refuse_options(options)
            self._whole_batches = whole_batches
            self._trainer: Any = None
            self.weight = 1.0  # of this rank's mean over its samples of the current batch
            self._fit: Fit | None = None
            self._is_in_rest, self._syncs = False, True
            self._arguments: tuple[Any, ...] = ()
            self._is_together = False  # in a function that all ranks call, and repeat after a fault
            self.run = elastic.join(checkpoints=checkpoints, when=when, keep=keep, seed=seed)
            super().__init__(cluster_environment=Environment(self.run), **options)

        # -- the world ------------------------------------------------------------------------

        def setup_distributed(self) -> None:
            """The group of a world comes with run.retry."""
            reset_seed()
            if not dist.is_initialized():
                dist.init_process_group()  # deferred: a DistributedSampler asks for ranks
            self.set_world_ranks()
            _prepare_data_alone(self.lightning_module.trainer, data_connector)

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            """Those of the largest world, whose batches are divided; for predictions, of the
            current one."""
            if self._is_predicting:
                size = self.world_size if self.run.has_world else 1
                return {"num_replicas": size, "rank": self.global_rank if size > 1 else 0}
            rank = min(self.global_rank, self.run.largest_world - 1)
            return {"num_replicas": self.run.largest_world, "rank": rank}

        @property
        def _is_predicting(self) -> bool:
            return self._trainer is not None and str(self._trainer.state.fn.value) == "predict"

        def together(self, function: Callable[P, T], *, is_together: bool = True) -> Callable[P, T]:
            """``function``, in which ranks communicate. Elsewhere they do not: a node that joins
            makes calls that the others have left behind, and a fault would not be recovered."""

            @functools.wraps(function)
            def call(*args: P.args, **options: P.kwargs) -> T:
                before, self._is_together = self._is_together, is_together
                try:
                    return function(*args, **options)
                finally:
                    self._is_together = before

            return call

        def barrier(self, *args: Any, **options: Any) -> None:
            """Wait for all ranks."""
            if self._is_together:
                super().barrier(*args, **options)
            elif self.run.has_world and "Trainer.save_checkpoint" in args:  # by the script
                self.run.once("lightning save", bool)

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            """The object of rank ``src``; where ranks do not communicate, this rank's own."""
            return super().broadcast(obj, src) if self._is_together else obj

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            """The mean or sum over all ranks; in a training step, a mean over all samples."""
            if not self._is_together:
                return tensor
            if isinstance(tensor, torch.Tensor) and _is_mean(reduce_op):
                if not tensor.is_floating_point():
                    tensor = tensor.double()  # Lightning rounds a mean of numbers of samples down
                if self.weight != 1.0:
                    tensor = tensor * self.weight
            return super().reduce(tensor, group, reduce_op=reduce_op)

        def sum(self, numbers: torch.Tensor) -> torch.Tensor:
            """The sum over all ranks."""
            summed: torch.Tensor = super().reduce(numbers, reduce_op="sum")
            return summed

        def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
            """Whether all ranks, or any of them, decide so."""
            if not self._is_together:
                return decision
            return bool(super().reduce_boolean_decision(decision, all))

        def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
            """The tensors of all ranks."""
            if not self._is_together:
                return tensor[None]
            if self.run.world.size < self.run.largest_world:
                _check_shapes(tensor)
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)

        # -- fit ------------------------------------------------------------------------------

        def setup(self, trainer: Any) -> None:
            """Wrap the module, create optimizers, and prepare to drive the loops."""
            self._trainer, kind = trainer, str(trainer.state.fn.value)
            if kind == "fit":
                _refuse_callbacks(trainer.callbacks)
                if self._whole_batches:
                    _refuse_own_loops(trainer.lightning_module)
                super().setup(trainer)
                self._fit = Fit(self, trainer, self._job)
                return
            self.accelerator.setup(trainer)  # DDPStrategy broadcasts weights, too
            self.model = self.precision_plugin.convert_module(self.lightning_module)
            self.model_to_device()
            self.setup_precision_plugin()
            if self.run.has_world:
                loop = trainer.predict_loop if kind == "predict" else trainer._evaluation_loop
                _repeat_if_interrupted(self, loop, kind)

        @property
        def _job(self) -> Job:
            if self.run not in _JOBS:
                _JOBS[self.run] = Job(self.run, _is_progress_bar(pl))
            return _JOBS[self.run]

        def _setup_model(self, model: nn.Module) -> Any:
            return self._job.wrap(model, self._ddp_kwargs)

        def _register_ddp_hooks(self) -> None:
            """None: gradients are reduced by elastic."""

        def process_dataloader(self, dataloader: Any) -> Any:
            """The part of this rank of a loader's batches."""
            if self._trainer is None or self._is_predicting:
                return dataloader
            _check_loader(dataloader)
            is_training = self._trainer.training
            if is_training:
                _check_sampler(dataloader, self._trainer, self.run.largest_world)
            return SharedLoader(
                self.run,
                _unwrapped(dataloader),
                self._position if is_training else self._start,
                is_whole=self._trainer.evaluating and not self.run.has_world,
                whole_batches=is_training and self._whole_batches,
            )

        def _position(self) -> tuple[int, int]:
            batches = self._trainer.fit_loop.epoch_loop.batch_progress
            return self._start()[0], batches.current.ready

        def _start(self) -> tuple[int, int]:
            return self._trainer.fit_loop.epoch_progress.current.processed, 0

        def training_step(self, *args: Any, **options: Any) -> Any:
            """The module's training step, in which means over ranks are those over samples."""
            assert self._fit is not None
            if not self._is_in_rest:
                self.weight, self._arguments = self._fit.weight, args
                self._syncs = getattr(self.model, "require_backward_grad_sync", True)
                if self._fit.rest():
                    self.model.require_backward_grad_sync = False  # until the last batch
            try:
                return super().training_step(*args, **options)
            finally:
                self.weight = 1.0

        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
            """A backward pass: gradients of all ranks add up to those of plain Lightning."""
            assert self._fit is not None
            backward = functools.partial(super().backward, optimizer=optimizer)
            self._fit.averages.give()
            returned = backward(weighted(closure_loss, self._fit.weight), *args, **options)
            if rest := self._fit.rest(takes=True):
                with self._fit.joined_logs() as joins:
                    for number, (weight, batch) in enumerate(rest, start=1):
                        if number == len(rest):
                            self.model.require_backward_grad_sync = self._syncs
                        loss = self._step_of_rest(batch, weight)
                        joins(counts=weight > 0)
                        backward(weighted(loss, weight), *args, **options)
            return returned

        def _step_of_rest(self, batch: Any, weight: float) -> Any:
            """The loss of another batch of this rank, in the place of one of the largest world."""
            trainer, module = self._trainer, self.lightning_module
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
            trainer._results.batch, trainer._results.batch_size = batch, None
            self._is_in_rest, self.weight = True, weight
            try:
                output = call._call_strategy_hook(
                    trainer, "training_step", batch, *self._arguments[1:]
                )
            finally:
                self._is_in_rest = False
            loss = output["loss"] if isinstance(output, Mapping) else output
            return loss / trainer.accumulate_grad_batches

        # -- files and the end ----------------------------------------------------------------

        def save_checkpoint(self, checkpoint: Any, filepath: Any, **options: Any) -> None:
            """Save a file on rank 0, once all ranks know of it."""
            if self._fit is not None:
                self._fit.files.before_save(filepath)
                self.barrier()
            super().save_checkpoint(checkpoint, filepath, **options)

        def remove_checkpoint(self, filepath: Any) -> None:
            """Remove a file on rank 0."""
            if self._fit is not None:
                self._fit.files.removed(filepath)
            super().remove_checkpoint(filepath)

        def teardown(self) -> None:
            """Unwrap the module."""
            if self._fit is not None:
                self._fit.end()
            self.model = self.lightning_module
            super().teardown()

    return _named(ElasticStrategy, base)


def _define_restarting(package: str, missing: str) -> Any:
    """The strategy for a version of Lightning whose loops cannot be driven: DDP in any world."""
    base: Any = importlib.import_module(f"{package}.strategies")
    environments: Any = importlib.import_module(f"{_PACKAGES[package]}.plugins.environments")

    class Environment(environments.TorchElasticEnvironment):
        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            """The world has the size that it has."""

    class ElasticStrategy(base.DDPStrategy):
        """DDP in a world of any size. After a fault, the agent restarts the script."""

        strategy_name = "elastic"

        def __init__(
            self, *, checkpoints: Any = None, when: Any = None, keep: Any = None, **options: Any
        ) -> None:
            options.pop("seed", None)
            _refuse_options(options)
            version = importlib.import_module(package).__version__
            get_logger().warning(
                "ElasticStrategy recovers by restarts only, like DDPStrategy: %s %s has no %s. "
                "Install a version that docs/how-to/lightning.md names, or save and pass ckpt_path",
                *(package, version, missing),
            )
            environment = Environment() if Environment.detect() else None
            super().__init__(cluster_environment=environment, **options)

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            """The ranks of this world."""
            return {"num_replicas": self.world_size, "rank": self.global_rank}

    return _named(ElasticStrategy, base)


def _named(strategy: Any, base: Any) -> Any:
    """The class under its public name, registered as ``strategy="elastic"``."""
    strategy.__module__, strategy.__qualname__ = __name__, "ElasticStrategy"
    if "elastic" not in base.StrategyRegistry:
        base.StrategyRegistry.register("elastic", strategy, description=strategy.__doc__)
    return strategy


def _refuse_options(options: dict[str, Any]) -> None:
    """Raise ConfigError for options of DDPStrategy that cannot be supported."""
    refused = {
        "cluster_environment": "omit it: the world sets ranks",
        "ddp_comm_hook": "omit it: elastic reduces gradients itself",
        "ddp_comm_state": "omit it: elastic reduces gradients itself",
        "ddp_comm_wrapper": "omit it: elastic reduces gradients itself",
        "model_averaging_period": "omit it: all ranks have the same weights after each step",
        "process_group_backend": "elastic.join(backend=…) before it",
        "start_method": "start the script with torchrun or `elastic run`",
        "timeout": "omit it: the job's options set timeouts (docs/timeouts.md)",
    }
    for name in options.keys() & refused.keys():
        raise ConfigError(f"ElasticStrategy({name}=…) is not supported", hint=refused[name])


def _refuse_own_loops(module: Any) -> None:
    """Raise ConfigError for a training step that cannot be called for one batch after the other."""
    if not module.automatic_optimization:
        raise ConfigError(
            "whole_batches=True calls training_step for several batches before an update, and "
            "manual optimization updates in each call",
            hint="automatic optimization; or omit whole_batches, if losses are means over samples",
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(
            "whole_batches=True passes batches to training_step, which reads dataloader_iter",
            hint="training_step(self, batch, batch_idx)",
        )


def _refuse_callbacks(callbacks: list[Any]) -> None:
    """Raise ConfigError for callbacks that change what the job consists of, or train before it."""
    finder = 'run it once with strategy="auto" on one device, and set what it suggests'
    refused = {
        "BaseFinetuning": (
            "adds parameters to the optimizer during training: a node that joins has not added "
            "them",
            "create all parameter groups in configure_optimizers(), with lr=0 or "
            "requires_grad_(False) until they train; or run each phase as a job",
        ),
        "StochasticWeightAveraging": (
            "replaces the schedule during training: a node that joins has another learning rate",
            "WeightAveraging(), with a schedule in configure_optimizers()",
        ),
        "LearningRateFinder": ("trains before the job does, with another schedule", finder),
        "BatchSizeFinder": ("trains before the job does, with other global batches", finder),
    }
    for callback in callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in refused:
                problem, hint = refused[base.__name__]
                raise ConfigError(f"{type(callback).__name__} {problem}", hint=hint)


def _prepare_data_alone(trainer: Any, module: Any) -> None:
    """Let each node prepare data without waiting for other nodes, which may be far ahead."""
    connector = trainer._data_connector

    def prepare_data() -> None:
        barrier, module._InfiniteBarrier = module._InfiniteBarrier, nullcontext
        try:
            type(connector).prepare_data(connector)
        finally:
            module._InfiniteBarrier = barrier

    connector.prepare_data = prepare_data


def _repeat_if_interrupted(strategy: Any, loop: Any, kind: str) -> None:
    """Let an evaluation or prediction after ``fit`` survive faults, too."""
    evaluate = type(loop).run.__get__(loop)
    predicted: list[Any] = []  # by this rank

    def results() -> list[dict[str, float]]:
        if kind == "predict":
            predicted[:] = evaluate() or []
            return []
        loop._results.reset()  # what an interrupted evaluation has added up
        return [{name: float(v) for name, v in each.items()} for each in evaluate()]

    def run_once() -> list[Any]:
        returned = strategy.run.once(f"lightning {kind}", strategy.together(results))
        return predicted if kind == "predict" else returned

    loop.run = run_once


def _check_shapes(tensor: torch.Tensor) -> None:
    """Raise TrainingError if ranks have tensors of different shapes: gloo ends the process, and
    NCCL waits."""
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, tuple(tensor.shape))
    if len(set(shapes)) > 1:
        raise TrainingError(
            f"all_gather() of tensors of shapes {', '.join(map(str, shapes))}: ranks of a smaller "
            "world have different numbers of samples",
            hint="let self.log(…, sync_dist=True) or a metric of torchmetrics reduce over ranks; "
            "or gather sums, or torch.distributed.all_gather_object",
        )


def _check_loader(loader: Any) -> None:
    """Raise ConfigError for data without a position."""
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return
    kind = type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
    raise ConfigError(
        f"{kind} cannot be divided among a changing number of ranks: it has no positions",
        hint="use a DataLoader over a dataset with __getitem__ and __len__; streams recover by a "
        'restart, with strategy="ddp"',
    )


def _check_sampler(loader: Any, trainer: Any, ranks: int) -> None:
    """Raise ConfigError if each rank would read all samples."""
    is_distributed = isinstance(loader.sampler, DistributedSampler)
    if trainer._accelerator_connector.use_distributed_sampler or is_distributed or ranks == 1:
        return
    raise ConfigError(
        "Trainer(use_distributed_sampler=False): each rank would read all samples of "
        f"{type(loader.sampler).__name__}, or a part for a fixed number of ranks",
        hint="omit it: the sampler's order is divided among the ranks of each world",
    )


def _variable(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _is_mean(reduce_op: Any) -> bool:
    return str(reduce_op).lower().rpartition(".")[2] in ("mean", "avg")


def _is_progress_bar(pl: Any) -> Callable[[Any], bool]:
    return lambda callback: isinstance(callback, pl.callbacks.ProgressBar)


ElasticStrategy, *_ = (_define(package) for package in _packages())
