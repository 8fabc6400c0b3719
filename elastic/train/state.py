"""The complete state of a job: its contents, and how another state is checked and loaded.

The state as a tree::

    {"model": {"model": state_dict, …}, "tracked": {"optimizer": state_dict, …},
     "state": run.state, "units": …, "progress": vars(Progress), "seed": …, "loaders": {…}}
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from checkpoints.errors import StateError
from checkpoints.tree import flatten
from elastic import torch_private
from elastic.errors import ConfigError, TrainingError
from elastic.groups.world import StagePlace, check_saved_stages
from elastic.telemetry.log import get_logger
from elastic.train.attributes import PlainAttributes, attributes_of_data, attributes_of_module
from elastic.train.backward import EarlierGradients, frozen_indices, set_frozen
from elastic.train.copies import copied, is_plain, layouts_of, load_tracked
from elastic.train.ddp import Wrapped
from elastic.train.generators import GENERATORS, GeneratorState
from elastic.train.loader import ElasticLoader
from elastic.train.local import LocalState, position_of
from elastic.train.order import ReductionOrder
from elastic.train.rebuilding import Built, Remains
from elastic.train.sharding import (
    local_value,
    named_tensors,
    refuse_module,
    refuse_optimizer,
    refuse_stale_optimizers,
    refuse_tensors,
)
from elastic.train.step import Progress
from elastic.train.values import Writing, plain_form, typed_form

Units = dict[str, list[list[Any]]]
"""Finished calls of ``run.once`` with a name, at the last step that has one: each is a
:class:`elastic.train.units.UnitRecord` as a list."""

UNKNOWN_COMMITS = 3  # before which gradients are saved: the next step may add to them


class Stateful(Protocol):
    """The interface of objects for ``run.track``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@dataclass
class JobState:
    """The live objects. One per process."""

    seed: int
    progress: Progress = field(default_factory=Progress)
    modules: dict[str, Wrapped] = field(default_factory=dict)
    tracked: dict[str, Stateful] = field(default_factory=dict)
    local: dict[str, Stateful] = field(default_factory=dict)  # of this rank alone
    loaders: dict[str, ElasticLoader] = field(default_factory=dict)
    open_batch: set[str] = field(default_factory=set)  # loaders whose global batch was not given
    user: dict[str, Any] = field(default_factory=dict)
    units: Units = field(default_factory=dict)  # of work between steps that are finished, by name
    is_sharded: bool = False  # elastic.join(mesh=…): each rank holds shards of a replica
    stage: StagePlace | None = None  # the pipeline stage of this rank, among several
    is_rebuilt: bool = False  # run.build was called: each world has a new model and optimizers
    _attributes: dict[str, PlainAttributes] = field(default_factory=dict)
    keeps_gradients: bool = False  # steps add to gradients of committed ones: they are state
    # In which the modules' gradients are reduced.
    order: ReductionOrder = field(default_factory=ReductionOrder)
    local_state: LocalState = field(init=False)  # of the objects in `local`
    built: Built | None = None  # the result of run.build in the current world
    remains: Remains | None = None  # objects of the last world that may still be in memory

    def __post_init__(self) -> None:
        self.local_state = LocalState(self.local)

    @property
    def all_modules(self) -> dict[str, nn.Module]:
        """The modules of the job, wrapped and built."""
        wrapped = {name: module.module for name, module in self.modules.items()}
        return wrapped | (self.built.modules if self.built is not None else {})

    @property
    def all_tracked(self) -> dict[str, Stateful]:
        """Objects tracked by the script, and built objects other than modules."""
        return self.tracked | (self.built.tracked if self.built is not None else {})

    @property
    def has_own_state(self) -> bool:
        """Whether the script keeps values of its own: in ``run.state``, or in a tracked object of
        another class than torch's."""
        kinds = (nn.Module, torch.optim.Optimizer)
        return bool(self.user) or any(
            not isinstance(one, kinds) and type(one).__module__.partition(".")[0] != "torch"
            for one in self.tracked.values()
        )

    def track(self, name: str, tracked: Any, *, local: bool = False) -> None:
        """Register an object under a unique name. ``local``: it is state of this rank alone.

        Raises TrainingError for an unsuitable object or a name in use, ConfigError for an object
        with sharded tensors.
        """
        if isinstance(tracked, type):
            raise TrainingError(f"run.track({name}={tracked.__name__}): a class, not an object")
        own, other = (self.local, self.tracked) if local else (self.tracked, self.local)
        if isinstance(tracked, GENERATORS):
            known = getattr(own.get(name), "generator", None)
            tracked = own[name] if known is tracked else GeneratorState(tracked)
        if not (hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict")):
            raise TrainingError(
                f"run.track({name}=…): a {type(tracked).__name__} has no state_dict and "
                "load_state_dict",
                hint="keep numbers, strings and tensors in the dict run.state: "
                f'run.state["{name}"] = …, the same on all ranks',
            )
        if any(tracked is module for module in self.modules.values()):
            raise TrainingError(
                f"run.track({name}=…): a wrapped module is already part of the state",
                hint="remove it from the call",
            )
        if name in other or own.get(name, tracked) is not tracked:
            raise TrainingError(f"run.track({name}=…): the name is used by another object")
        if local:
            self._track_local(name, tracked)
            return
        self._refuse_sharded(name, tracked)
        if isinstance(tracked, torch.optim.Optimizer):
            settings = [{k: v for k, v in g.items() if k != "params"} for g in tracked.param_groups]
            require_storable(f"run.track({name}=…)", {"param_groups": settings})
        elif not isinstance(tracked, nn.Module):
            require_storable(f"run.track({name}=…)", tracked.state_dict())
        self.tracked[name] = tracked

    def _track_local(self, name: str, tracked: Any) -> None:
        """Raise TrainingError for an object that must be the same on all ranks."""
        same = (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
        if isinstance(tracked, same):
            raise TrainingError(
                f"run.track({name}=…, local=True): a {type(tracked).__name__} must be the same on "
                "all ranks",
                hint=f"run.track({name}={name})",
            )
        self.local[name] = tracked

    def check_unsharded(self) -> None:
        """Raise ConfigError, naming the object, if it was sharded after its registration."""
        for module in self.modules.values():
            module.reshard()
        for name, module in self.modules.items():
            stale = self.optimizers_of_others(module.module)
            if self.is_sharded:
                refuse_stale_optimizers(name, stale)
                continue
            if isinstance(module, nn.Module):
                call = f"the wrapped {name} was sharded after run.wrap"
                refuse_module(call, module, stale=stale)
        for name, tracked in self.tracked.items():
            self._refuse_sharded(name, tracked)

    def _refuse_sharded(self, name: str, tracked: Any) -> None:
        """Raise ConfigError for a sharded module or optimizer, or for an object that wraps it.

        With a mesh, optimizers may be sharded. So may a scheduler's optimizer from run.build.
        """
        call = f"run.track({name}=…) of a sharded"
        built = self.built.optimizers.values() if self.built is not None else ()
        for candidate in (tracked, getattr(tracked, "optimizer", None)):
            if isinstance(candidate, nn.Module):
                try:
                    refuse_module(f"{call} module", candidate)
                except ConfigError as error:
                    raise (_second_module(name, error) if self.is_sharded else error) from None
            if isinstance(candidate, torch.optim.Optimizer) and not self.is_sharded:
                if candidate is not tracked and any(candidate is own for own in built):
                    continue
                refuse_optimizer(f"{call} model's {type(candidate).__name__}", candidate)

    def optimizers_of_others(self, module: nn.Module) -> list[str]:
        """Tracked optimizers with a parameter that is neither in ``module`` nor in wrapped
        modules."""
        modules = [module, *(wrapped.module for wrapped in self.modules.values())]
        known = {id(p) for one in modules for p in one.parameters()}
        return [
            name
            for name, tracked in self.tracked.items()
            if isinstance(tracked, torch.optim.Optimizer)
            and any(id(p) not in known for group in tracked.param_groups for p in group["params"])
        ]

    def name_of(self, loader: ElasticLoader) -> str:
        """The name under which a loader is registered."""
        return next((name for name, one in self.loaders.items() if one is loader), "")

    def registered(self) -> JobState:
        """A copy of the current registrations, for :meth:`restore_registrations`."""
        return dataclasses.replace(
            self,
            modules=dict(self.modules),
            tracked=dict(self.tracked),
            local=dict(self.local),
            loaders=dict(self.loaders),
            open_batch=set(self.open_batch),
            built=None,
            remains=None,
        )

    def retire_built(self) -> None:
        """Drop the references to objects built for the current world, which has ended.

        They must be freed before the next objects are built.
        """
        built, self.built = self.built, None
        if built is not None:
            self.remains = built.retire()

    def restore_registrations(self, earlier: JobState) -> None:
        """Forget later registrations. Progress and ``run.state`` are kept."""
        self.modules = dict(earlier.modules)
        self.tracked = dict(earlier.tracked)
        self.local.clear()
        self.local.update(earlier.local)
        self.loaders = dict(earlier.loaders)
        self.open_batch = set(earlier.open_batch)

    def tree(self) -> dict[str, Any]:
        """The current state as a tree, with the live tensors.

        With a mesh, tensors are DTensors of the replica. Raises ConfigError for sharded tensors
        without a mesh or run.build, since every rank must have the complete state.
        """
        modules = {name: m.module.state_dict() for name, m in self.modules.items()}
        tracked = {name: t.state_dict() for name, t in self.tracked.items()}
        if not self.is_sharded:
            state = {"model": modules, "tracked": tracked, "state": self.user}
            refuse_tensors("the job's state is sharded", dict(named_tensors("", state)))
        if self.built is not None:
            modules |= {name: m.state_dict() for name, m in self.built.modules.items()}
            tracked |= {name: t.state_dict() for name, t in self.built.tracked.items()}
        # Modules' extra state may have any types.
        plain, types = plain_form(
            {"model": modules, "tracked": tracked, "state": self.user, "units": self.units}
        )
        return {
            **plain,
            "types": types,
            "transient": {n: transient_buffers(m) for n, m in self.named_modules().items()},
            "progress": vars(self.progress),
            "seed": self.seed,
            "loaders": {name: loader.state_dict() for name, loader in self.loaders.items()},
            "frozen": self._frozen(),
            "attributes": {name: one.take() for name, one in self.attributes().items()},
            "keeps_gradients": self.keeps_gradients,
            "gradients": self.gradients() if self._may_keep_gradients else {},
            "layouts": layouts_of(self.all_tracked),
        }

    def own_tree(self) -> dict[str, Any]:
        """The current state, with that of this rank alone: for the objects that replace this
        process's."""
        return {**self.tree(), "local": self.local_state.states()}

    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """The gradients of each module, by the position of their parameter."""
        return {
            name: {
                str(i): p.grad
                for i, p in enumerate(parameters)
                if p.grad is not None and not p.grad.is_sparse
            }
            for name, parameters in self._parameters().items()
        }

    @property
    def _may_keep_gradients(self) -> bool:
        """Whether gradients are state, as far as known: in the first steps it is not."""
        return self.keeps_gradients or self.progress.commits < UNKNOWN_COMMITS

    def set_gradients(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Give parameters copies of these gradients, in place where they have some, and all others
        none."""
        for name, parameters in self._parameters().items():
            for i, p in enumerate(parameters if name in saved else ()):
                given = saved[name].get(str(i))
                if given is None:
                    p.grad = None
                    continue
                if p.grad is None:
                    p.grad = given.detach().to(p.device, copy=True)
                else:
                    p.grad.detach().copy_(given)

    def _parameters(self) -> dict[str, Sequence[torch.Tensor]]:
        built = self.built.modules if self.built is not None else {}
        return {
            **{name: module.all_parameters for name, module in self.modules.items()},
            **{name: tuple(module.parameters()) for name, module in built.items()},
        }

    @property
    def earlier_gradients(self) -> list[EarlierGradients]:
        """What is known of the gradients of committed steps, for each module."""
        wrapped = [module.earlier for module in self.modules.values()]
        return wrapped + (self.built.earlier if self.built is not None else [])

    def saved_tree(self) -> dict[str, Any]:
        """The current state as a part of a checkpoint: with pipeline stages, one of several."""
        self.local_state.save(position_of(vars(self.progress)))
        tree = self.tree()
        return tree if self.stage is None else {self.stage.key: tree}

    def _frozen(self) -> dict[str, list[int]]:
        built = self.built.modules if self.built is not None else {}
        return {n: frozen_indices(m.all_parameters) for n, m in self.modules.items()} | {
            n: frozen_indices(m.parameters()) for n, m in built.items()
        }

    @property
    def has_scaler(self) -> bool:
        """Whether a GradScaler may skip steps because of an overflow."""
        return any(isinstance(t, torch.amp.GradScaler) for t in self.all_tracked.values())

    def check_user(self) -> None:
        """Raise TrainingError for a value in ``run.state`` that checkpoints and messages to other
        ranks cannot hold: otherwise the first save, or the first recovery, would fail."""
        if not is_plain(self.user):
            require_storable("run.state", self.user)

    def show_before_units(self) -> set[str]:
        """Give entries of run.state the values that they had before the units of the last boundary,
        and return their names.

        The script then returns to that boundary on its way of then: a counter of epochs that a unit
        has changed would lead it past the loop in which it resumes.
        """
        records = [each for of_name in self.units.values() for each in of_name]
        records = [each for each in records if each[3] >= self.progress.units_before]
        shown: set[str] = set()
        writing = Writing(self.tensors_of_modules())
        for *_, before in sorted(records, key=lambda record: record[3]):
            for name, *value in before:
                if name not in shown and value:
                    self.user[name] = writing.write(self.user.get(name), copied(value[0]))
                elif name not in shown:
                    self.user.pop(name, None)
                shown.add(name)
        return shown

    def set_units(self, units: Units) -> None:
        """Replace the finished units of work between steps."""
        self.units.clear()
        self.units.update(units)

    def data_position(self) -> dict[str, Any]:
        """The position of each loader, for the inspection of checkpoints."""
        return {name: loader.state_dict() for name, loader in self.loaders.items()}

    def check(self, tree: Mapping[str, Any], source: str) -> None:
        """Raise TrainingError or ConfigError, naming the differences, unless ``tree`` fits."""
        if "model" not in tree:
            check_saved_stages(tree, None, source)
        modules, tracked = self.all_modules, self.all_tracked
        problems = _differing_names("wrapped module", modules, tree["model"])
        problems += _differing_names("tracked object", tracked, tree["tracked"])
        for name in sorted(modules.keys() & tree["model"].keys()):
            problems += _differing_tensors(name, modules[name], tree["model"][name])
        for name in sorted(tracked.keys() & tree["tracked"].keys()):
            problems += _differing_groups(name, tracked[name], tree["tracked"][name])
        if problems:
            more = [f"… {len(problems) - 20} more"] if len(problems) > 20 else []
            shown = "\n    ".join(problems[:20] + more)
            raise TrainingError(
                f"{source} belongs to another model; nothing was changed:\n    {shown}",
                hint="use another checkpoint folder, or the script that wrote this one",
            )
        if tree["seed"] != self.seed:
            raise ConfigError(
                f"seed={self.seed}, but {source} was trained with seed={tree['seed']}: "
                "samples would be repeated and omitted",
                hint=f"pass join(seed={tree['seed']}), or use another checkpoint folder",
            )
        for name in sorted(self.loaders.keys() & tree["loaders"].keys()):
            self._check_data(name, tree["loaders"][name])

    def _check_data(self, name: str, saved: dict[str, Any]) -> None:
        loader = self.loaders[name]
        if name in self.open_batch:
            # The default depends on the world's size; a job keeps its initial value.
            plan = dataclasses.replace(loader.plan, global_batch=saved["global_batch"])
            loader.plan = loader.sampler.plan = plan
        loader.load_state_dict(saved)

    def apply(self, tree: Mapping[str, Any]) -> None:
        """Load a state that :meth:`check` has accepted."""
        modules = _typed(tree, "model")
        for name, module in self.all_modules.items():
            module.load_state_dict(modules[name])
        self.apply_non_parameters(tree)

    def apply_non_parameters(self, tree: Mapping[str, Any]) -> None:
        """Load everything except the modules' tensors."""
        saved, layouts = _typed(tree, "tracked"), tree.get("layouts", {})
        writing = Writing(self.tensors_of_modules())
        with writing.keeping(*self.all_tracked.values()):
            for name, tracked in self.all_tracked.items():
                load_tracked(tracked, saved[name], layouts.get(name, {}))
        for name, indices in tree.get("frozen", {}).items():  # not in older checkpoints
            if name in self.modules:
                set_frozen(self.modules[name].all_parameters, indices)
            elif self.built is not None:
                set_frozen(self.built.modules[name].parameters(), indices)
        for name, attributes in self.attributes().items() if "attributes" in tree else ():
            attributes.restore(tree["attributes"].get(name, {}))
        modules = self.named_modules()
        for name, saved_buffers in tree.get("transient", {}).items():  # not in older checkpoints
            if name in modules:
                _load_transient(modules[name], saved_buffers)
        if gradients := tree.get("gradients"):
            self.keeps_gradients |= tree.get("keeps_gradients", True)  # not in older checkpoints
            self.set_gradients(gradients)
        self.local_state.load(tree.get("local", {}))
        if new := sorted(self.user.keys() - _typed(tree, "state").keys()):
            get_logger().warning(
                "not in the restored state, and removed from run.state: %s; read an entry that an "
                "older version of the script did not have with run.state.get(name, default)",
                ", ".join(map(repr, new[:10])),
            )
        writing.write(self.user, _typed(tree, "state"))
        self.set_units(_typed(tree, "units") if "units" in tree else {})  # not in older checkpoints
        self.progress.load(tree["progress"])
        for name in self.loaders.keys() & tree["loaders"].keys():
            self.loaders[name].load_state_dict(tree["loaders"][name])

    def named_modules(self) -> dict[str, nn.Module]:
        """All modules of the job, wrapped, built or tracked, by distinct names."""
        tracked = {
            f"tracked.{n}": t for n, t in self.all_tracked.items() if isinstance(t, nn.Module)
        }
        return {f"model.{name}": module for name, module in self.all_modules.items()} | tracked

    def attributes(self) -> dict[str, PlainAttributes]:
        """The plain attributes of all modules and of the loaders' data."""
        known, self._attributes = self._attributes, {}
        for name, module in self.named_modules().items():
            one = known.get(name)
            if one is None or one.owner is not module:
                wrapper = self.modules.get(name.removeprefix("model."))
                one = attributes_of_module(
                    module, wrapper if isinstance(wrapper, nn.Module) else None
                )
            self._attributes[name] = one
        for name, loader in self.loaders.items():
            key, dataset = f"loader.{name}", loader.dataset
            one = known.get(key)
            if one is None or one.owner is not dataset:
                one = attributes_of_data(dataset, loader.collate_fn)
            self._attributes[key] = one
        return self._attributes

    def tensors_of_modules(self) -> list[torch.Tensor]:
        """The tensors of all modules, which load them in place."""
        tracked = [t for t in self.all_tracked.values() if isinstance(t, nn.Module)]
        modules = [*self.all_modules.values(), *tracked]
        return [t for m in modules for t in (*m.parameters(), *m.buffers())]

    def weights_sha256(self) -> str:
        """A hash of all wrapped modules' tensors: equal if and only if the weights are equal."""
        digest = hashlib.sha256()
        for name, module in sorted(self.modules.items()):
            for key, value in sorted(module.module.state_dict().items()):
                if isinstance(value, torch.Tensor):
                    data = (
                        local_value(value).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    )
                    digest.update(f"{name}.{key} {value.dtype} {tuple(value.shape)}\n".encode())
                    digest.update(data.numpy().tobytes())
        return digest.hexdigest()


def transient_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not in the module's ``state_dict``, by name. They are state of the job
    all the same: a running statistic decides later weights wherever it is saved."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name in torch_private.transient_buffers_of(part)
    }


def _load_transient(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    own = transient_buffers(module)
    with torch.no_grad():
        for name in own.keys() & saved.keys():
            if (
                own[name].shape == saved[name].shape
            ):  # otherwise computed by the script, like a mask
                own[name].copy_(saved[name])


def _typed(tree: Mapping[str, Any], key: str) -> Any:
    """A part of the state, with the types that its values had. Older checkpoints have none."""
    types = [entry for entry in tree.get("types", []) if entry[0][0] == key]
    return typed_form({key: tree[key]}, types)[key]


def require_storable(owner: str, state: Any) -> None:
    """Raise TrainingError for a value that checkpoints and messages to other ranks cannot hold."""
    try:
        flatten(plain_form(state)[0])
    except StateError as error:
        raise TrainingError(f"{owner}: {error.message}", hint=error.hint) from None


def _differing_names(kind: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{kind} {n!r} is not in the checkpoint" for n in sorted(live.keys() - saved.keys())
    ]
    return problems + [
        f"{kind} {n!r} is not in this script" for n in sorted(saved.keys() - live.keys())
    ]


def _differing_tensors(name: str, module: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    live = module.state_dict()
    problems = [f"{name}: {key} is missing" for key in live if key not in saved]
    problems += [f"{name}: {key} is unexpected" for key in saved if key not in live]
    for key in (key for key in live if key in saved):  # in an order that repeats
        own, other = (getattr(d[key], "shape", None) for d in (live, saved))
        if own != other and not _resizes(module, key, saved):
            problems.append(f"{name}: {key} has shape {_shape(other)}, here {_shape(own)}")
    return problems


def _resizes(module: nn.Module, key: str, saved: Mapping[str, Any]) -> bool:
    """Whether ``module`` can load its buffer ``key`` in another shape, tried with a copy. Observers
    of torch's quantisation are empty until their first batch, and resize buffers to load them."""
    path, _, name = key.rpartition(".")
    owner, prefix = module.get_submodule(path), f"{path}." if path else ""
    if name not in dict(owner.named_buffers(recurse=False)):
        return False
    own = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
    try:
        trial = copy.deepcopy(owner)
        trial.load_state_dict({k: v for k, v in own.items() if "." not in k}, strict=False)
    except Exception:  # noqa: BLE001  of another shape, or a module of the script's own
        return False
    return bool(trial.get_buffer(name).shape == saved[key].shape)


def _differing_groups(name: str, tracked: Stateful, saved: Mapping[str, Any]) -> list[str]:
    """Compare parameter groups. Optimizers check them, too, but only while loading, after the model
    was changed. One of the script's own class may save its state in another form (Lookahead)."""
    if not isinstance(tracked, torch.optim.Optimizer) or "param_groups" not in saved:
        return []
    own = [len(group["params"]) for group in tracked.param_groups]
    other = [len(group["params"]) for group in saved["param_groups"]]
    if own == other:
        return []
    return [
        f"{name}: parameter groups have sizes {other}, here {own}; groups added during training "
        "cannot be restored: create all groups before run.retry, with lr=0 until they are used"
    ]


def _shape(shape: Any) -> str:
    return "none" if shape is None else str(tuple(shape))


def _second_module(name: str, error: ConfigError) -> ConfigError:
    """In replicas, all sharded modules are received by replaced ranks in the same way."""
    return ConfigError(
        error.message.partition(";")[0],
        hint=f"{name} = run.wrap({name}): an average of the weights, or a teacher, is a wrapped "
        "module like the model",
    )
