"""Tracked objects, and the optimizers among them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic.errors import ConfigError, TrainingError
from elastic.groups.group import ProcessGroup
from elastic.groups.pending import pending_works
from elastic.groups.replica import ReplicaProcessGroup
from elastic.groups.world import largest_world
from elastic.hangs.page import OPTIMIZER, SCRIPT, phases
from elastic.torch_private import current_backward, not_compiled, not_compiled_itself
from elastic.train.backward import before_closure
from elastic.train.ddp import ElasticDDP, Wrapped, hint_of_unreduced
from elastic.train.loader import ElasticLoader
from elastic.train.order import ControlFlags
from elastic.train.rebuilding import Built, inner_optimizers, only_passes_on, optimizers_instead_of
from elastic.train.rollback import Rollback
from elastic.train.sharding import created_too_early, refusal, refuse_module, sharded_parameter
from elastic.train.state import JobState
from elastic.train.step import Step
from elastic.train.untracked import (
    Companions,
    UnsavedParameters,
    groups_added,
    has_gradient,
    in_backward,
    initializes_state,
    not_tracked,
    outside_of_steps,
    predates_sharding,
    saved_optimizers,
)

# ----------------------------------------------------------------------------
# Watches optimizer steps, and refuses steps with gradients that are not the job's.
#
# The hook covers all of torch's optimizers, so that unregistered ones are detected, too.

Closure = Callable[[], Any]


class OptimizerWatch:
    """Checks every ``optimizer.step()`` that would change wrapped parameters."""

    def __init__(self, current_step: Callable[[], Step | None]) -> None:
        self.tracked: dict[str, torch.optim.Optimizer] = {}
        self.user: Mapping[str, object] = {}  # run.state
        self.has_stepped = False  # a tracked optimizer has stepped in this process
        self.rollback: Rollback | None = None  # notified of updates
        # Called before each update of a tracked optimizer, with the step's number and its name.
        self.on_update: Callable[[int, str, torch.optim.Optimizer], object] | None = None
        self._current_step = current_step
        self._modules: list[Wrapped] = []
        self._known: dict[int, _Known] = {}  # by id
        self._objects: dict[str, object] = {}  # all tracked objects
        self._companions = Companions()
        self._unsaved = UnsavedParameters()
        self._updates: list[_Update] = []  # in progress, the outermost first
        self._unwrapped: dict[int, _Known] = {}  # by id: with parameters in no wrapped module
        self._handles: Sequence[Any] = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def watch(self, module: Wrapped) -> None:
        """Watch this module's parameters from now on."""
        self._modules.append(module)
        for known in self._known.values():
            known.count = None

    def allow(self, name: str, tracked: object) -> None:
        """Add a tracked object."""
        self._objects[name] = tracked
        for optimizer in saved_optimizers(tracked):
            known = self._known_facts(optimizer)
            if known.is_built:
                continue
            known.name = known.name or name
            if known.name == name:
                self.tracked[name] = optimizer

    def allow_built(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer built for the current world, over sharded parameters. Its updates are
        recorded, but never undone."""
        known = self._known_facts(optimizer)
        known.name, known.is_built = name, True

    def restore_registrations(self, job: JobState) -> None:
        """Watch only the objects registered in ``job``."""
        self.tracked.clear()
        self._modules = list(job.modules.values())
        self._known.clear()
        self._objects.clear()
        self._unwrapped.clear()
        for name, tracked in job.tracked.items():
            self.allow(name, tracked)

    def reset(self) -> None:
        """Begin a new attempt: forget interrupted updates."""
        self._updates.clear()

    def close(self) -> None:
        """Stop watching."""
        self._companions.close()
        for handle in self._handles:
            handle.remove()

    def accumulating(self, step: Step) -> list[str]:
        """Tracked optimizers with unused gradients from this step."""
        waiting = [name for name in self.tracked if name not in step.stepped]
        if not waiting or not any(m.reduction.has_new_gradients for m in self._modules):
            return []
        used = {id(p) for name in step.stepped for p in _parameters(self.tracked[name])}
        new = {
            id(p)
            for module in self._modules
            if module.reduction.has_new_gradients
            for p in _with_gradients(module)
            if id(p) not in used
        }
        return [
            name for name in waiting if any(id(p) in new for p in _parameters(self.tracked[name]))
        ]

    @property
    def unwrapped(self) -> dict[str, list[torch.Tensor]]:
        """Stepped parameters that are in no wrapped module, by optimizer."""
        return {known.label: known.own for known in self._unwrapped.values() if known.own}

    @property
    def unwrapped_and_tracked(self) -> list[torch.Tensor]:
        """Those of these parameters that belong to tracked optimizers."""
        return [p for known in self._unwrapped.values() if known.name for p in known.own]

    # Both hooks run in every step, with cold caches.

    @not_compiled
    def _before(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        phases.enter(OPTIMIZER)
        known, step = self._known_facts(optimizer), self._current_step()
        if known.is_container(optimizer):
            return None
        self._forget_abandoned(optimizer)
        name, closure = known.name, _closure(args, kwargs)
        update = _Update(optimizer, name)
        if closure is None:
            self._prepare(update, known, step)
            self._updates.append(update)
            return None
        if name is None and self._touched(known, optimizer):
            raise not_tracked(optimizer, self._objects)
        self._updates.append(update)
        before_closure(optimizer)

        @not_compiled_itself
        def prepared_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._prepare(update, known, step)
            return _searched(loss, known) if isinstance(optimizer, torch.optim.LBFGS) else loss

        return _with_closure(args, kwargs, prepared_closure)

    def _prepare(self, update: _Update, known: _Known, step: Step | None) -> None:
        """Check the step and prepare for its update, once gradients exist."""
        optimizer = update.optimizer
        pending_works().raise_failure()  # gradients may be missing or partial
        if known.is_built:
            if self.rollback is not None:
                self.rollback.before_update()
            return
        touched = self._touched(known, optimizer)
        if known.sharded and step is not None:
            kind = type(optimizer).__name__
            raise refusal(f"{kind}.step() at step {step.number}: its {known.sharded}")
        if known.own and step is not None:
            self._unwrapped[id(optimizer)] = known
            is_unknown = known.name is None and not touched
            if is_unknown and predates_sharding(known.own, self._modules):
                raise created_too_early(optimizer, step.number)
            tracked = self._objects.values()
            self._unsaved.refuse(known.name, optimizer, known.own, tracked, self.user, step.number)
        if known.name is not None and step is not None:
            self._companions.require_tracked(
                known.name, optimizer, self._objects.values(), self._modules
            )
        if known.name is not None and step is not None and self.on_update is not None:
            self.on_update(step.number, known.name, optimizer)
        for module in touched:
            if has_gradient(module):
                _check(optimizer, known.name, step, module, self._objects)
            elif step is not None:  # no gradients: sharding may have replaced its parameters
                call = "the wrapped module was sharded after run.wrap"
                stale = [known.name or type(optimizer).__name__]
                if isinstance(module, nn.Module):
                    refuse_module(call, module, stale=stale)
        if self.rollback is not None and known.name is not None:
            self.rollback.before_update()

    @not_compiled
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        phases.enter(SCRIPT)
        if self._known_facts(optimizer).is_container(optimizer):
            return
        update = self._updates.pop() if self._updates else None
        if update is None or update.name is None:
            return
        self.has_stepped = True
        step = self._current_step()
        if step is not None:
            step.stepped.append(update.name)

    def _forget_abandoned(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget an update that ended with an exception that the script caught."""
        for place, update in enumerate(self._updates):
            if update.optimizer is optimizer:
                del self._updates[place:]
                return

    def _known_facts(self, optimizer: torch.optim.Optimizer) -> _Known:
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = _Known(optimizer)
        return known

    def _touched(self, known: _Known, optimizer: torch.optim.Optimizer) -> list[Wrapped]:
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if known.count != count:
            if known.name is not None and known.count is not None and known.count < count:
                raise groups_added(known.name)
            known.scan(optimizer, self._modules)
            known.count = count
        return known.touched


def _with_gradients(module: Wrapped) -> list[torch.Tensor]:
    if module.holds_gradients:
        return [p for p in module.all_parameters if p.requires_grad]
    return [p for p in module.all_parameters if p.grad is not None]


@dataclass
class _Update:
    """An ``optimizer.step()`` that has begun."""

    optimizer: torch.optim.Optimizer
    name: str | None  # None: not tracked


class _Known:
    """Known facts about an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name: str | None = None  # None: not tracked
        self.is_built = False  # created by run.build
        self.count: int | None = None  # number of its parameters at the last scan
        self.touched: list[Wrapped] = []  # modules that contain some of its parameters
        self.own: list[torch.Tensor] = []  # parameters in no wrapped module
        self.sharded = ""  # a description of its first sharded parameter
        self._only_passes_on: bool | None = None

    @property
    def label(self) -> str:
        return self.name or type(self.optimizer()).__name__

    def is_container(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is an untracked container, whose optimizers are watched."""
        if self.name is not None or self.is_built:
            return False
        if self._only_passes_on is None:
            self._only_passes_on = only_passes_on(optimizer)
        return self._only_passes_on

    def scan(self, optimizer: torch.optim.Optimizer, modules: Sequence[Wrapped]) -> None:
        parameters = list(_parameters(optimizer))
        ids = {id(p) for p in parameters}
        wrapped = {m: {id(p) for p in m.module.parameters()} for m in modules}
        self.touched = [m for m, parameter_ids in wrapped.items() if ids & parameter_ids]
        self.own = [p for p in parameters if not any(id(p) in t for t in wrapped.values())]
        is_known = not self.own and any(isinstance(m, nn.Module) is False for m in self.touched)
        self.sharded = "" if is_known else sharded_parameter(optimizer)


def _searched(loss: Any, known: _Known) -> Any:
    """The loss of a closure over all ranks: LBFGS decides by it how far to go, and whether to
    stop, which must be the same on all ranks. Weighted as the gradients are."""
    reductions = [m.reduction for m in known.touched if isinstance(m, ElasticDDP) and m.in_world]
    if not reductions or reductions[0].order is None:
        return loss
    weight = reductions[0].weight
    (mean,) = reductions[0].order.sum_values([weight * float(loss) if weight else 0.0])
    return loss.detach().new_tensor(mean) if isinstance(loss, torch.Tensor) else mean


def _closure(args: Any, kwargs: Any) -> Closure | None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def _with_closure(args: Any, kwargs: Any, closure: Closure) -> tuple[Any, Any]:
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def _check(
    optimizer: torch.optim.Optimizer,
    name: str | None,
    step: Step | None,
    module: Wrapped,
    tracked: Mapping[str, object],
) -> None:
    """Raise TrainingError unless the module's gradients are the job's in this step."""
    kind = type(optimizer).__name__
    if name is None:
        raise not_tracked(optimizer, tracked)
    if not module.in_world:
        return  # before the first world: all ranks will get rank 0's result
    if step is None:
        raise outside_of_steps(optimizer)
    if not step.is_last_micro_batch:
        raise TrainingError(
            f"{kind}.step() at step {step.number} before the last of its {len(step)} micro-batches",
            hint="call it once per step: after the loop over micro-batches, or "
            "`if step.is_last_micro_batch`",
        )
    reduction = module.reduction
    if reduction.failure is not None:
        raise reduction.failure  # the script caught it
    if not isinstance(module, nn.Module) and current_backward() >= 0:
        raise in_backward(optimizer, step.number)
    reduction.wait()
    if reduction.flags is not None:
        reduction.flags.require_one_step(step.number)
    if not reduction.is_complete:
        if current_backward() >= 0:
            raise in_backward(optimizer, step.number)
        if initializes_state(optimizer):
            raise outside_of_steps(optimizer)
        reduction.refuse_partial()
        raise TrainingError(
            f"{kind}.step() at step {step.number} with gradients that were not reduced over "
            "the world",
            hint=hint_of_unreduced(module),
        )
    if reduction.is_late:
        raise TrainingError(
            f"{kind}.step() at step {step.number} with gradients of a forward pass in the previous "
            "step: the next batch was requested between the forward and the backward pass, where a "
            "change of the world would lose the batch",
            hint="request the next batch after loss.backward() and optimizer.step()",
        )
    if len(step) > 1 and not step.is_weighted:
        raise TrainingError(
            f"{kind}.step() at step {step.number} with unweighted gradients of "
            f"{len(step)} micro-batches",
            hint="use step.backward(loss), or (loss * step.weight).backward()",
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


# ----------------------------------------------------------------------------
# Registers the script's objects: modules, optimizers and other stateful objects, and loaders.


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

    def track(self, named: dict[str, Any], *, local: bool = False) -> None:
        """Make objects with a state_dict part of the job's state, or of this rank's (``local``). A
        container of optimizers is replaced by these."""
        for name, tracked in named.items():
            if local:
                self.job.track(name, tracked, local=True)
                continue
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
        plans = [loader.plan for loader in self.job.loaders.values()]
        if any(map(_needs_pairs, self.job.all_modules.values())):
            shares = min((plan.max_world_of_pairs for plan in plans), default=0)
        else:
            shares = min((plan.max_world for plan in plans), default=0)
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


def _needs_pairs(module: nn.Module) -> bool:
    """Whether a forward pass of one sample fails: BatchNorm1d computes its statistics from the
    samples only, unless a convolution gives each of them a length."""
    parts = list(module.modules())
    if any(isinstance(part, (nn.Conv1d, nn.ConvTranspose1d)) for part in parts):
        return False
    return any(isinstance(part, nn.BatchNorm1d) and part.training for part in parts)


def _sharded(module: nn.Module, options: dict[str, Any], group: ReplicaProcessGroup) -> Wrapped:
    # Importing FSDP takes a second; a script that has sharded a module has imported it.
    from elastic.train.sharded import ShardedModule

    if options:
        raise ConfigError(
            f"run.wrap(…, {next(iter(options))}=…): a sharded module takes no options of DDP",
            hint="run.wrap(fully_shard(model, …)): pass FSDP's options to fully_shard",
        )
    return ShardedModule(module, group)
