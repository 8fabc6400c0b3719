"""The state of a step boundary, without the large tensors: taken at each boundary, restored later.

A boundary's state is everything that the job tracks: each key of each ``state_dict``, modules'
buffers (those that are not persistent, too) and extra state, ``run.state`` and positions. Its large
tensors (weights, optimizer state, averages) are kept by :mod:`elastic.training.state.rollback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from elastic import torch_private
from elastic.training.data.plan import Position
from elastic.training.gradients.sharding import local_value
from elastic.training.state.copies import can_hold, copied, rebuilt, tensors_in
from elastic.training.state.in_place import Writing, write_into
from elastic.training.state.job_state import JobState, Stateful
from elastic.training.state.optimizer_state import load_tracked
from elastic.training.state.typed_values import items_of

SMALL_BYTES = 64 << 10  # the tensors of an object of more bytes are not copied with its values

Snapshot = dict[str, Any]
"""Only plain values and tensors, so that it can be sent to other ranks."""
Path = tuple[Any, ...]
"""Keys and indices that lead to a value in plain containers."""
KeptTensor = Callable[[Path, torch.Tensor | None], torch.Tensor | None]
"""The tensor to load at a place, given the one that is there now."""
_TENSOR = "\0tensor"  # in place of a large tensor


class Keeper(Protocol):
    """Copies and restores one object's state, except for its large tensors."""

    def take(self) -> Any: ...
    def restore(self, taken: Any, kept: KeptTensor, writing: Writing) -> None: ...
    def large(self) -> Mapping[Path, torch.Tensor]:
        """The object's large tensors, by their place in it."""


class BoundaryState:
    """Takes and restores the state of a boundary. Created when the job's objects are complete."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._keepers: dict[str, Keeper] = {n: _keeper(t) for n, t in job.all_tracked.items()}
        self._modules = {name: _Module(m.module) for name, m in job.modules.items()}

    def take(self, *, with_gradients: bool = False) -> Snapshot:
        """A copy of the current state, valid until the next copy is taken."""
        job = self._job
        gradients = {"gradients": copied(job.gradients())} if with_gradients else {}
        return {
            **gradients,
            "keeps_gradients": job.keeps_gradients,
            "progress": dict(vars(job.progress)),
            "state": copied(job.user),
            "loaders": {n: [x.sampler.epoch, x.sampler.step] for n, x in job.loaders.items()},
            "tracked": {name: keeper.take() for name, keeper in self._keepers.items()},
            "buffers": {name: module.take() for name, module in self._modules.items()},
            "extra": {name: module.take_extra() for name, module in self._modules.items()},
            "frozen": {name: module.frozen_indices() for name, module in job.modules.items()},
        }

    def large(self) -> dict[Path, torch.Tensor]:
        """The large tensors of tracked objects other than optimizers."""
        return {
            (name, *path): tensor
            for name, keeper in self._keepers.items()
            for path, tensor in keeper.large().items()
        }

    def restore(self, snapshot: Snapshot, kept: KeptTensor | None = None) -> None:
        """Restore the state. The snapshot stays valid.

        ``kept``: the large tensors of tracked objects, by their place in :meth:`large`; by default
        the objects' own.
        """
        job = self._job
        job.progress.load(copied(snapshot["progress"]))
        writing = Writing(job.tensors_of_modules())
        writing.write(job.user, copied(snapshot["state"]))
        for name, (epoch, step) in snapshot["loaders"].items():
            if name in job.loaders:
                job.loaders[name].seek(Position(epoch, step))
        # Objects that hold an optimizer load into it, so the optimizers come last.
        keepers = sorted(self._keepers.items(), key=lambda item: isinstance(item[1], _Optimizer))
        for name, keeper in keepers:
            keeper.restore(snapshot["tracked"][name], _below(name, kept), writing)
        for name, module in self._modules.items():
            module.restore(snapshot["buffers"][name])
            module.restore_extra(snapshot["extra"][name])
        for name, wrapped in job.modules.items():
            wrapped.set_frozen(snapshot["frozen"][name])
        job.keeps_gradients = job.keeps_gradients or snapshot["keeps_gradients"]
        if "gradients" in snapshot:
            job.set_gradients(snapshot["gradients"])


def _below(name: str, kept: KeptTensor | None) -> KeptTensor:
    if kept is None:
        return lambda path, own: own
    return lambda path, own: kept((name, *path), own)


def _keeper(tracked: Stateful) -> Keeper:
    if isinstance(tracked, torch.optim.Optimizer):
        return _Optimizer(tracked)
    if isinstance(tracked, GradScaler) and tracked.is_enabled():  # a disabled one has no state
        return _Scaler(tracked)
    if isinstance(tracked, nn.Module) and type(tracked).state_dict is nn.Module.state_dict:
        parameters = list(tracked.parameters())
        if size_bytes(parameters) > SMALL_BYTES:
            return _LargeModule(tracked)
    return _Object(tracked)


def size_bytes(value: Any) -> int:
    """Total size of all tensors in plain containers."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


class _Object:
    """Any tracked object, by its ``state_dict``.

    Large tensors are not copied here: they are read from the object again when its state is loaded.
    """

    def __init__(self, tracked: Stateful) -> None:
        self._tracked = tracked
        self._has_large = size_bytes(tracked.state_dict()) > SMALL_BYTES
        self._buffers = _Module(tracked) if isinstance(tracked, nn.Module) else None

    def take(self) -> Any:
        state: Any = self._tracked.state_dict()
        if not isinstance(state, dict):
            return {"whole": copied(state)}
        values = copied(_without_tensors(state) if self._has_large else state)
        transient = self._buffers.take(is_transient=True) if self._buffers is not None else {}
        return {"state": values, "large": self._has_large, "buffers": transient}

    def large(self) -> Mapping[Path, torch.Tensor]:
        return dict(_leaves(self._tracked.state_dict())) if self._has_large else {}

    def restore(self, taken: Any, kept: KeptTensor, writing: Writing) -> None:
        """``taken`` may be another rank's, which arrives on the CPU."""
        with writing.keeping(self._tracked):
            load_tracked(self._tracked, self._state(taken, kept), {})
        if self._buffers is not None:
            self._buffers.restore(taken.get("buffers", {}))

    def _state(self, taken: Any, kept: KeptTensor) -> Any:
        if "whole" in taken:
            return copied(taken["whole"])
        values = copied(taken["state"])
        return (
            _with_tensors(values, self._tracked.state_dict(), (), kept)
            if taken["large"]
            else values
        )


class _LargeModule:
    """A tracked module, such as an average of the weights. Its ``state_dict`` would take a third of
    a millisecond in each step."""

    def __init__(self, tracked: nn.Module) -> None:
        self._tracked = tracked
        self._module = _Module(tracked)

    def take(self) -> Any:
        return {"buffers": self._module.take(), "extra": self._module.take_extra()}

    def large(self) -> Mapping[Path, torch.Tensor]:
        return {(name,): p for name, p in self._tracked.named_parameters()}

    def restore(self, taken: Any, kept: KeptTensor, writing: Writing) -> None:
        self._module.restore(taken["buffers"])
        self._module.restore_extra(taken["extra"])


def _without_tensors(value: Any) -> Any:
    """``value`` with a mark in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return _TENSOR
    return rebuilt(value, lambda _, item: _without_tensors(item))


def _with_tensors(value: Any, own: Any, path: Path, kept: KeptTensor) -> Any:
    """The inverse, with the tensors that ``own`` has at the same places."""
    if type(value) is str and value == _TENSOR:
        return kept(path, own if isinstance(own, torch.Tensor) else None)
    owned = dict(items_of(own) or ())
    return rebuilt(value, lambda key, item: _with_tensors(item, owned.get(key), (*path, key), kept))


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    for key, item in items_of(value) or ():
        yield from _leaves(item, (*path, key))


class _Optimizer:
    """An optimizer's groups without their parameters, and the values that a subclass adds to its
    ``state_dict``. Its state is large: :class:`elastic.training.state.copies.WeightCopies`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self._has_more = (
            kind.state_dict is not torch.optim.Optimizer.state_dict
            or torch_private.changes_saved_state(optimizer)
        )

    def take(self) -> Any:
        groups = [
            {name: copied(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        return {"groups": groups, "more": copied(self._more()) if self._has_more else {}}

    def _more(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        return {k: v for k, v in state.items() if k not in ("state", "param_groups")}

    def large(self) -> Mapping[Path, torch.Tensor]:
        return {}

    def restore(self, taken: Any, kept: KeptTensor, writing: Writing) -> None:
        if taken["more"]:
            own = self._optimizer.state_dict()
            with writing.keeping(self._optimizer):
                load_tracked(self._optimizer, {**own, **copied(taken["more"])}, {})
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        del groups[len(taken["groups"]) :]  # added by the undone step
        for group, values in zip(groups, taken["groups"], strict=True):
            # In place: compiled code may refer to a tensor learning rate.
            write_into(group, {"params": group["params"], **copied(values)})


class _Scaler:
    """``torch.amp.GradScaler``, without the device synchronization of its state_dict.

    Its per-optimizer stages of the current step are not in its state_dict; without restoring them,
    a repeated step would be refused [measured, torch 2.13].
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def take(self) -> Any:
        return {
            name: copied(value) for name, value in torch_private.scales_of(self._scaler).items()
        }

    def large(self) -> Mapping[Path, torch.Tensor]:
        return {}

    def restore(self, taken: Any, kept: KeptTensor, writing: Writing) -> None:
        torch_private.set_scales(self._scaler, taken)


class _Module:
    """A module's buffers, copied into the same memory each time, and its extra state.

    All buffers are copied, changed or not, because batch norm updates its statistics without
    incrementing their version [measured, torch 2.13]. The list of modules is computed once, as in
    DDP: traversing a large model in every step would cost more than the copies.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [
            (f"{path}." if path else "", part) for path, part in module.named_modules()
        ]
        plain = nn.Module.get_extra_state
        self._with_extra = [
            (path, part) for path, part in self._modules if type(part).get_extra_state is not plain
        ]
        self._copies: dict[str, torch.Tensor] = {}

    def _buffers(self, *, is_transient: bool) -> dict[str, torch.Tensor]:
        """The current buffers, by name: the script may have replaced tensors."""
        return {
            f"{path}{name}": buffer
            for path, part in self._modules
            if (own := torch_private.buffers_of(part))
            for name, buffer in own.items()
            if buffer is not None
            and (not is_transient or name in torch_private.transient_buffers_of(part))
        }

    def take(self, *, is_transient: bool = False) -> dict[str, torch.Tensor]:
        """Copies of the buffers. ``is_transient``: only of those that are not in a state_dict."""
        buffers = self._buffers(is_transient=is_transient)
        if any(not can_hold(self._copies.get(name), buffer) for name, buffer in buffers.items()):
            self._copies = {name: torch.empty_like(buffer) for name, buffer in buffers.items()}
        if buffers:
            with torch.no_grad():
                copies = [local_value(self._copies[name]) for name in buffers]
                torch_private.copy_each(copies, map(local_value, buffers.values()))
        return self._copies

    def restore(self, taken: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._buffers(is_transient=False).items():
                before = taken.get(name)
                if before is None:  # registered within the step, or copied elsewhere
                    continue
                if buffer.shape != before.shape:
                    buffer.resize_(before.shape)
                buffer.copy_(before)

    def take_extra(self) -> dict[str, Any]:
        return {path: copied(part.get_extra_state()) for path, part in self._with_extra}

    def restore_extra(self, taken: Mapping[str, Any]) -> None:
        for path, part in self._with_extra:
            if path in taken:
                part.set_extra_state(copied(taken[path]))
