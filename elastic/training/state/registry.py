"""What the script registers: modules, optimizers and other objects with state, loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.control_flags import ControlFlags
from elastic.training.gradients.sharding import refuse_module
from elastic.training.gradients.wrap import ElasticDDP
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerGuard, inner_optimizers
from elastic.training.step import Step
from elastic.world.world import largest_world


class Registry:
    """One per process. ``inside`` returns the step that the script is inside of."""

    def __init__(self, *, seed: int, inside: Callable[[], Step | None]) -> None:
        self.job = JobState(seed=seed)
        self.guard = OptimizerGuard(inside)
        self._flags: ControlFlags | None = None

    @property
    def is_complete(self) -> bool:
        """Whether there is a model, something tracked, and a loader."""
        return bool(self.job.modules and self.job.tracked and self.job.loaders)

    @property
    def has_data_or_model(self) -> bool:
        """Whether a module or a loader is registered."""
        return bool(self.job.modules or self.job.loaders)

    def piggyback(self, flags: ControlFlags | None) -> None:
        """Send ``flags`` with the gradients of all modules, present and future."""
        self._flags = flags
        for module in self.job.modules.values():
            module.reduction.flags = flags

    def wrap(self, module: nn.Module, options: dict[str, Any]) -> ElasticDDP:
        """Make a module part of the job's state. Raises ConfigError for one that cannot be."""
        stale = self.job.optimizers_of_others(module)
        refuse_module("run.wrap() of a sharded module", module, stale=stale)
        wrapped = ElasticDDP(module, **options)
        wrapped.reduction.flags = self._flags
        count = len(self.job.modules)
        self.job.modules["model" if count == 0 else f"model{count}"] = wrapped
        self.guard.watch(wrapped)
        return wrapped

    def track(self, named: dict[str, Any]) -> None:
        """Make objects with a state_dict part of the job's state."""
        for name, tracked in named.items():
            self.job.track(name, tracked)
            self.guard.allow(name, tracked)
            for attribute, inner in inner_optimizers(tracked).items():
                self.job.track(f"{name}.{attribute}", inner)
                self.guard.allow(f"{name}.{attribute}", inner)

    def add_loader(self, loader: Any, **options: Any) -> ElasticLoader:
        """Make a loader part of the job's state, and its steps the job's."""
        count = len(self.job.loaders)
        name = "data" if count == 0 else f"data{count}"
        self.job.loaders[name] = made = ElasticLoader(
            loader, seed=self.job.seed, largest_world=largest_world(), **options
        )
        if options.get("global_batch") is None:
            self.job.open_batch.add(name)
        return made

    def go_back_to(self, earlier: JobState) -> None:
        """Forget what was registered since ``earlier = job.registered()``."""
        for module in self.job.modules.values():
            module.leave_world()
        self.job.go_back_to(earlier)
        self.guard.go_back_to(self.job)
