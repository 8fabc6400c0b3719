"""Finds untracked companions of an optimizer: schedulers, gradient scalers, weight averages.

They would cause no error. But a joining process restarts the schedule, a repeated step advances it
twice, and ranks train at different learning rates; a rank 0 that joined later saves an average that
it restarted. So schedulers and scalers are searched for once, when their optimizer steps for the
first time, and averages before the first update after their creation, which a torch hook reports.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic.errors import TrainingError
from elastic.train.copies import tensors_in
from elastic.train.ddp import Wrapped
from elastic.train.rebuilding import holder_of
from elastic.train.sharding import local_value

_DEPTH = 3  # levels of objects inside tracked ones: a SequentialLR in a user-defined wrapper
_FRAMES = 12  # between an optimizer's hook and the scaler that called step()
_OF_SCALERS = GradScaler.step.__code__.co_filename
# timm's ModelEmaV2 and V3, torchvision's ExponentialMovingAverage, ema-pytorch's EMA, and copies.
_AVERAGES = re.compile(r"Ema(?![a-z])|EMA|MovingAverage|AveragedModel")
Companion = LRScheduler | GradScaler | nn.Module
_OPAQUE = (torch.Tensor, nn.Module, torch.optim.Optimizer)


class Companions:
    """Finds untracked companions of this process's optimizers. Detects averages created after
    it."""

    def __init__(self) -> None:
        # Optimizers whose companions are tracked: the slow search is not repeated for them.
        self._complete: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._averages: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # not yet checked
        self._handle = register_module_module_registration_hook(self._on_registration)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def require_tracked(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        tracked: Collection[object],
        wrapped: Sequence[Wrapped],
    ) -> None:
        """Raise TrainingError for an untracked scheduler of ``optimizer``, for the scaler that
        calls it now, and for an average of a ``wrapped`` module.

        An object inside a ``tracked`` one counts as tracked. ``name``: the optimizer's. Each
        optimizer and each average is checked once.
        """
        if optimizer not in self._complete:
            _require(lambda: _untracked(optimizer, tracked), name)
            self._complete.add(optimizer)
        if self._averages:
            modules = [one.module for one in wrapped]
            _require(lambda: _untracked_average(self._averages, tracked, modules), name)
            self._averages.clear()

    def _on_registration(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, AveragedModel) or _AVERAGES.search(type(module).__name__):
            self._averages.add(module)


def saved_optimizers(tracked: object) -> Iterator[torch.optim.Optimizer]:
    """Return the optimizers whose state is saved with a tracked object: itself, and the one that a
    wrapper exposes as ``.optimizer``.

    A scheduler exposes its optimizer, too, but its state excludes it: torch's and timm's."""
    if isinstance(tracked, torch.optim.Optimizer):
        yield tracked
    inner = getattr(tracked, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(tracked, LRScheduler):
        return
    state_dict = getattr(tracked, "state_dict", dict)
    if isinstance(tracked, torch.optim.Optimizer) or _has_groups(state_dict()):
        yield inner


def _has_groups(state: object) -> bool:
    """Whether ``state`` contains the state of an optimizer, at any depth."""
    if not isinstance(state, dict):
        return False
    return "param_groups" in state or any(_has_groups(part) for part in state.values())


def _require(untracked: Callable[[], Companion | None], name: str) -> None:
    if untracked() is None:
        return
    gc.collect()  # objects of an ended attempt may still exist
    if (one := untracked()) is not None:
        raise _refusal(name, one)


def _untracked(optimizer: torch.optim.Optimizer, tracked: Collection[object]) -> Companion | None:
    companions: list[Companion] = [*_schedulers(optimizer), *_calling_scaler()]
    known = _ids(tracked, _DEPTH) if companions else set()
    return next((one for one in companions if id(one) not in known), None)


def _schedulers(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    """Find schedulers that refer to the optimizer, directly or in their dict, by the garbage
    collector."""
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, LRScheduler):
            yield holder
        elif type(holder) is dict and holder.get("optimizer") is optimizer:
            yield from (o for o in gc.get_referrers(holder) if isinstance(o, LRScheduler))


def _calling_scaler() -> Iterator[GradScaler]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        # Read no other frame's locals: until Python 3.12 that keeps their objects alive.
        if frame.f_code.co_filename == _OF_SCALERS:
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, GradScaler) and scaler.is_enabled():
                yield scaler
                return
        frame = frame.f_back


def _ids(objects: Iterable[object], depth: int) -> set[int]:
    """The ids of the objects and of objects inside them."""
    ids = set()
    for one in objects:
        ids.add(id(one))
        if depth and not isinstance(one, _OPAQUE):
            ids |= _ids(_held(one), depth - 1)
    return ids


def _held(holder: object) -> Iterable[object]:
    if isinstance(holder, (list, tuple)):
        return holder
    return list((holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).values())


def _untracked_average(
    averages: Iterable[nn.Module], tracked: Collection[object], wrapped: Sequence[nn.Module]
) -> nn.Module | None:
    known = {id(m) for holder in (*tracked, *wrapped) for m in _modules_of(holder)}
    return next((one for one in averages if id(one) not in known and _copies(one, wrapped)), None)


def _copies(average: nn.Module, wrapped: Iterable[nn.Module]) -> bool:
    """Whether ``average`` holds a copy of one of the modules."""
    inner = [_shapes(child) for child in average.children()]
    return any(shapes and shapes in inner for shapes in map(_shapes, wrapped))


def _shapes(module: nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(p.shape) for p in module.parameters())


def _modules_of(holder: object) -> Iterator[nn.Module]:
    """The modules of an object and of its attributes: a user-defined wrapper may contain the
    average."""
    for one in (holder, *getattr(holder, "__dict__", {}).values()):
        if isinstance(one, nn.Module):
            yield from one.modules()


def _refusal(name: str, untracked: Companion) -> TrainingError:
    kind = type(untracked).__name__
    if isinstance(untracked, nn.Module):
        return TrainingError(
            f"{kind} averages the weights that {name} updates, but is not tracked: a joining node "
            "would restart the average, and a restart would lose it",
            hint="call run.track(ema=ema) on every rank, right after you create it",
        )
    if isinstance(untracked, GradScaler):
        return TrainingError(
            f"{kind} scales the gradients of {name}, but is not tracked: a joining node would "
            "use a different scale from the other ranks",
            hint="run.track(optimizer=optimizer, scaler=scaler)",
        )
    return TrainingError(
        f"{kind} sets the learning rate of {name}, but is not tracked: a joining node would "
        "restart the schedule, and a repeated step would advance it twice",
        hint="create it before the first loop, and run.track(optimizer=optimizer, "
        "scheduler=scheduler), each scheduler under a name of its own",
    )


class UnsavedParameters:
    """Refuses updates of parameters that only this process has."""

    def __init__(self) -> None:
        # Optimizers all of whose parameters are saved: the slow search is not repeated for them.
        self._complete: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._began: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._began = weakref.WeakKeyDictionary()  # the step of the first update

    def refuse(
        self,
        name: str | None,
        optimizer: torch.optim.Optimizer,
        own: Sequence[torch.Tensor],
        tracked: Collection[object],
        state: Mapping[str, object],
        step: int,
    ) -> None:
        """Raise TrainingError if the optimizer updates parameters that are neither in a tracked
        object nor in ``state``, the script's ``run.state``.

        ``own``: its parameters in no wrapped module. ``name``: of a tracked optimizer. An untracked
        one may update parameters that do not outlive the step.
        """
        is_first = self._began.setdefault(optimizer, step) == step
        if optimizer in self._complete or (name is None and is_first):
            return
        if unsaved := _unsaved(own, tracked, state):
            raise _not_saved(name, optimizer, unsaved, step)
        if all(p.grad is not None for p in own):
            self._complete.add(optimizer)


def _unsaved(
    own: Sequence[torch.Tensor], tracked: Collection[object], state: Mapping[str, object]
) -> list[torch.Tensor]:
    trained = [local_value(p) for p in own if p.grad is not None and p.numel()]
    others = [one for one in tracked if not isinstance(one, torch.optim.Optimizer)]
    modules = [m for one in others for m in _modules_of(one)]
    saved = {local_value(p).data_ptr() for m in modules for p in m.parameters(recurse=False)}
    unsaved = [p for p in trained if p.data_ptr() not in saved]
    if not unsaved:
        return []
    # A state_dict may return copies.
    values = [*tensors_in(dict(state)), *(v for one in others for v in _tensors_of(one))]
    return [p for p in unsaved if not any(_is_equal(p, value) for value in values)]


def _not_saved(
    name: str | None, optimizer: torch.optim.Optimizer, unsaved: Sequence[torch.Tensor], step: int
) -> TrainingError:
    kind = type(optimizer).__name__
    who = f"{name} ({kind})" if name is not None else f"{kind}, which is not tracked,"
    shapes = ", ".join(str(list(p.shape)) for p in unsaved[:3]) + ", …" * (len(unsaved) > 3)
    return TrainingError(
        f"{who} updates parameters at step {step} that are in no wrapped or tracked module "
        f"({len(unsaved)}, of shape {shapes}): no checkpoint has them, and a joining node does not "
        "get them",
        hint="model = run.wrap(model), before you create the optimizer; bare tensors become an "
        "nn.Parameter of a module. Or, if all ranks compute the same gradients of them, "
        "run.track(parameters=nn.ParameterList(parameters)), and the optimizer, too",
    )


def _tensors_of(tracked: object) -> list[torch.Tensor]:
    state_dict = getattr(tracked, "state_dict", dict)
    return tensors_in(state_dict())


def _is_equal(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    value = local_value(value)
    is_alike = value.shape == parameter.shape and value.dtype == parameter.dtype
    return is_alike and torch.equal(value.detach().cpu(), parameter.detach().cpu())


def not_tracked(optimizer: torch.optim.Optimizer, tracked: Mapping[str, object]) -> TrainingError:
    """The error for an optimizer of wrapped parameters that is not tracked. ``tracked``: the
    objects that are."""
    if (holder := holder_of(optimizer, tracked)) is not None:
        name, expression = holder
        return TrainingError(
            f"{type(optimizer).__name__} is about to change wrapped parameters, but only the "
            f"{type(tracked[name]).__name__} that contains it is tracked, as {name!r}",
            hint='track each of its optimizers: run.track(**{f"optimizer{i}": one for i, one in '
            f"enumerate({expression})}}), and {name!r} only if it has other state",
        )
    return TrainingError(
        f"{type(optimizer).__name__} is about to change wrapped parameters, but is not tracked",
        hint="call run.track(optimizer=optimizer) before run.retry: a restart would lose an "
        "untracked state. If the script creates optimizers during training, create all of them "
        "before run.retry, and track each under its own name",
    )


def in_backward(optimizer: torch.optim.Optimizer, step: int) -> TrainingError:
    """The error for an update during the backward pass."""
    return TrainingError(
        f"{type(optimizer).__name__}.step() at step {step} during the backward pass: a hook "
        "(register_post_accumulate_grad_hook) updates a parameter before its gradient is summed "
        "over all ranks, which the end of the pass decides",
        hint="without the hooks: loss.backward(), then step() and zero_grad() of each optimizer. "
        "Where the memory of the gradients matters, run.build supports optimizers in the backward "
        "pass",
    )


def initializes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch calls ``optimizer.step()`` to create its state, which then counts a step:
    torch/distributed/checkpoint/state_dict.py, _init_optim_state."""
    return not optimizer.state and not any(group.get("lr") for group in optimizer.param_groups)


def outside_of_steps(optimizer: torch.optim.Optimizer) -> TrainingError:
    """The error for an update that belongs to no step."""
    kind = type(optimizer).__name__
    if initializes_state(optimizer):
        return TrainingError(
            f"{kind}.step() with a learning rate of 0, before the first update of the loop: "
            "get_optimizer_state_dict, get_state_dict and set_optimizer_state_dict call it for an "
            "optimizer without state",
            hint="call them before run.retry, or after the first optimizer.step() of the loop; the "
            "job's own state is saved and restored without them",
        )
    return TrainingError(
        f"{kind}.step() outside of a step of the loop",
        hint="call it inside `for … in loader`, where loader = run.loader(…), before the next "
        "batch is requested; without a loader, between run.begin() and run.commit()",
    )


def groups_added(name: str) -> TrainingError:
    """The error for a tracked optimizer that got more parameters during training."""
    return TrainingError(
        f"{name} got more parameters during training, by add_param_group: neither a joining node "
        "nor a checkpoint could restore its state",
        hint="create all groups before run.retry, with lr=0 until they are used, or with "
        "requires_grad_(False) on their parameters",
    )


def predates_sharding(parameters: Collection[torch.Tensor], modules: Sequence[Wrapped]) -> bool:
    """Whether these parameters of an optimizer are a sharded module's former ones: of the same
    shapes, but without gradients, while the module has some. torch does not detect that, and
    nothing is trained."""
    if any(p.grad is not None for p in parameters):
        return False
    shapes = Counter(p.shape for p in parameters)
    return any(
        shapes <= Counter(p.shape for p in m.module.parameters()) and has_gradient(m)
        for m in modules
        if not isinstance(m, nn.Module)  # a module that the script has sharded
    )


def has_gradient(module: Wrapped) -> bool:
    """Whether a parameter has one."""
    return any(parameter.grad is not None for parameter in module.all_parameters)
