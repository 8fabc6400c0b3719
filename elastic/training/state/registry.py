"""Registers the script's objects: modules, optimizers and other stateful objects, and loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.mesh import ReplicaProcessGroup
from elastic.process_group import ProcessGroup
from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.control_flags import ControlFlags
from elastic.training.gradients.sharding import refuse_module
from elastic.training.gradients.wrap import ElasticDDP, Wrapped
from elastic.training.rebuilding.built import Built
from elastic.training.rebuilding.containers import inner_optimizers, optimizers_instead_of
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerWatch
from elastic.training.step import Step
from elastic.world.world import largest_world


class Registry:
    """The job's registry. One per process. ``inside`` returns the step that the script is in."""

    def __init__(
        self, *, seed: int, inside: Callable[[], Step | None], group: ProcessGroup | None = None
    ) -> None:
        self._group = group if isinstance(group, ReplicaProcessGroup) else None
        self.job = JobState(seed=seed, is_sharded=self._group is not None)
        self.optimizer_watch = OptimizerWatch(inside)
        self.optimizer_watch.user = self.job.user
        self._flags: ControlFlags | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a model, a tracked object and a loader are registered."""
        is_built = self.job.built is not None
        return bool((is_built or (self.job.modules and self.job.tracked)) and self.job.loaders)

    @property
    def has_model(self) -> bool:
        """Whether a module is wrapped."""
        return bool(self.job.modules)

    @property
    def has_data(self) -> bool:
        """Whether a loader is registered."""
        return bool(self.job.loaders)

    def piggyback(self, flags: ControlFlags | None) -> None:
        """Send ``flags`` with the gradients of all current and future modules."""
        self._flags = flags
        for index, module in enumerate(self.job.modules.values()):
            module.reduction.flags = self._flags_of(index)

    def _flags_of(self, index: int) -> ControlFlags | None:
        """The control flags that a module sends. With pipeline stages, ranks may have different
        numbers of modules, which are reduced together: the first one sends them."""
        has_stages = self._group is not None and self._group.replica.mesh.has_stages
        return None if has_stages and index else self._flags

    def wrap(self, module: nn.Module, options: dict[str, Any]) -> nn.Module:
        """Make a module part of the job's state, and return the module to train.

        That is a DDP around ``module``, or the sharded module itself. Raises ConfigError for an
        unsupported module.
        """
        stale = self.job.optimizers_of_others(module)
        if self._group is not None:
            self._add(_sharded(module, options, self._group))
            return module
        refuse_module("run.wrap() of a sharded module", module, stale=stale)
        if self.job.is_rebuilt:
            raise ConfigError(
                "run.wrap() cannot be used in addition to run.build(): ranks keep a wrapped "
                "module's state, but only checkpoints keep a built module's state",
                hint="return it, sharded, from the function of run.build()",
            )
        wrapped = ElasticDDP(module, **options)
        self._add(wrapped)
        return wrapped

    def _add(self, wrapped: Wrapped) -> None:
        count = len(self.job.modules)
        wrapped.reduction.flags = self._flags_of(count)
        name = "model" if count == 0 else f"model{count}"
        self.job.modules[name] = wrapped
        wrapped.match(self.job.order, name)
        self.optimizer_watch.watch(wrapped)

    def hold(self, built: Built) -> None:
        """Make the objects built for the current world part of the job's state."""
        self.job.built = built
        for name, optimizer in built.optimizers.items():
            self.optimizer_watch.allow_built(name, optimizer)

    def track(self, named: dict[str, Any]) -> None:
        """Make objects with a state_dict part of the job's state. A container of optimizers is
        replaced by these."""
        for name, tracked in named.items():
            if contained := optimizers_instead_of(tracked):
                self.track({f"{name}.{i}": one for i, one in enumerate(contained)})
                continue
            self._refuse_scaler(name, tracked)
            self.job.track(name, tracked)
            self.optimizer_watch.allow(name, tracked)
            for attribute, inner in inner_optimizers(tracked).items():
                self.job.track(f"{name}.{attribute}", inner)
                self.optimizer_watch.allow(f"{name}.{attribute}", inner)

    def _refuse_scaler(self, name: str, tracked: object) -> None:
        """Raise ConfigError for a GradScaler over several pipeline stages: each would skip its
        updates by its own gradients."""
        has_stages = self._group is not None and self._group.replica.mesh.stages > 1
        if has_stages and isinstance(tracked, torch.amp.GradScaler) and tracked.is_enabled():
            raise ConfigError(
                f"run.track({name}=…): with a dimension 'pp', a GradScaler skips the update of one "
                "stage whose gradients overflow, and not of the others",
                hint="train in bfloat16, which needs no loss scaling: torch.autocast(dtype="
                "torch.bfloat16), or MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
            )

    def add_loader(self, loader: Any, **options: Any) -> ElasticLoader:
        """Make a loader part of the job's state."""
        count = len(self.job.loaders)
        name = "data" if count == 0 else f"data{count}"
        self.job.loaders[name] = registered = ElasticLoader(
            loader, seed=self.job.seed, largest_world=self._most_shares(), **options
        )
        if options.get("global_batch") is None:
            self.job.open_batch.add(name)
        return registered

    def max_ranks(self) -> int:
        """The size of the largest world among whose ranks all global batches can be split; 0: there
        are no loaders."""
        shares = min((loader.plan.max_world for loader in self.job.loaders.values()), default=0)
        if self._group is None:
            return shares
        mesh = self._group.replica.mesh
        return shares // mesh.data_size * mesh.size

    def _most_shares(self) -> int:
        """The number of parts into which the largest world splits a global batch."""
        if self._group is None:
            return largest_world()
        mesh = self._group.replica.mesh
        return largest_world() // mesh.size * mesh.data_size

    def restore_registrations(self, earlier: JobState) -> None:
        """Forget registrations since ``earlier = job.registered()``."""
        for module in self.job.modules.values():
            module.leave_world()
        self.job.restore_registrations(earlier)
        self.job.order.keep(self.job.modules)
        self.optimizer_watch.restore_registrations(self.job)


def _sharded(module: nn.Module, options: dict[str, Any], group: ReplicaProcessGroup) -> Wrapped:
    # Importing FSDP takes a second; a script that has sharded a module has imported it.
    from elastic.training.gradients.sharded import ShardedModule

    if options:
        raise ConfigError(
            f"run.wrap(…, {next(iter(options))}=…): a sharded module takes no options of DDP",
            hint="run.wrap(fully_shard(model, …)): pass FSDP's options to fully_shard",
        )
    return ShardedModule(module, group)
