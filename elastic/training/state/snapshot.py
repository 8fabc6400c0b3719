"""Copies the non-parameter state that a step may change, at its beginning and at its commit.

This includes schedulers, the gradient scaler, hyperparameters, ``run.state``, buffers and
positions: everything except weights and optimizer state, which change only when an optimizer steps.
After a fault it is restored, so that a repeated step starts from the same state.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from elastic import torch_private
from elastic.training.data.plan import Position
from elastic.training.gradients.sharding import local_value
from elastic.training.state.copies import can_hold, copied, placed_like, tensors_in
from elastic.training.state.job_state import JobState, Stateful

SMALL_BYTES = 64 << 10  # larger tracked objects (an EMA) are copied on demand: rollback.py

Snapshot = dict[str, Any]
"""Only plain values and tensors, so that it can be sent to other ranks."""


class Keeper(Protocol):
    """Copies and restores one object's non-parameter state."""

    def take(self) -> Any: ...
    def restore(self, taken: Any) -> None: ...


class NonParameterState:
    """Takes snapshots of a job. Created when its objects are complete."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._keepers: dict[str, Keeper] = {
            name: keeper
            for name, tracked in job.tracked.items()
            if (keeper := _keeper(tracked)) is not None
        }
        self.large = {name: t for name, t in job.tracked.items() if _keeper(t) is None}
        self._buffers = {name: _Buffers(m.module) for name, m in job.modules.items()}

    def take(self) -> Snapshot:
        """A copy of the current state, valid until the next copy is taken."""
        job = self._job
        return {
            "progress": dict(vars(job.progress)),
            "state": copied(job.user),
            "loaders": {n: [x.sampler.epoch, x.sampler.step] for n, x in job.loaders.items()},
            "tracked": {name: keeper.take() for name, keeper in self._keepers.items()},
            "buffers": {name: buffers.take() for name, buffers in self._buffers.items()},
            "frozen": {name: module.frozen_indices() for name, module in job.modules.items()},
        }

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of the modules' current buffers, for :meth:`restore_buffers`."""
        return {name: buffers.copies() for name, buffers in self._buffers.items()}

    def restore_buffers(self, taken: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore the modules' buffers."""
        for name, buffers in self._buffers.items():
            buffers.restore(taken[name])

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the state. The snapshot stays valid."""
        job = self._job
        job.progress.load(snapshot["progress"])
        user = placed_like(copied(snapshot["state"]), job.user)
        job.user.clear()
        job.user.update(user)
        for name, (epoch, step) in snapshot["loaders"].items():
            if name in job.loaders:
                job.loaders[name].seek(Position(epoch, step))
        for name, keeper in self._keepers.items():
            keeper.restore(snapshot["tracked"][name])
        for name, buffers in self._buffers.items():
            buffers.restore(snapshot["buffers"][name])
        for name, module in job.modules.items():
            module.set_frozen(snapshot["frozen"][name])


def _keeper(tracked: Stateful) -> Keeper | None:
    if isinstance(tracked, torch.optim.Optimizer):
        return _HyperParameters(tracked)
    if isinstance(tracked, GradScaler) and tracked.is_enabled():  # a disabled one has no state
        return _Scaler(tracked)
    inner = getattr(tracked, "optimizer", None)
    if not isinstance(tracked, torch.optim.lr_scheduler.LRScheduler) and isinstance(
        inner, torch.optim.Optimizer
    ):
        return _HyperParameters(inner)  # a wrapper around an optimizer
    return WholeObject(tracked) if size_bytes(tracked.state_dict()) <= SMALL_BYTES else None


def size_bytes(value: Any) -> int:
    """Total size of all tensors in plain containers."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


class WholeObject:
    """An object that is copied as its complete state_dict: schedulers, counters, averages."""

    def __init__(self, tracked: Stateful) -> None:
        self._tracked = tracked

    def take(self) -> Any:
        return copied(self._tracked.state_dict())

    def restore(self, taken: Any) -> None:
        """``taken`` may be another rank's, which arrives on the CPU."""
        own = self._tracked.state_dict() if tensors_in(taken) else None
        self._tracked.load_state_dict(placed_like(copied(taken), own))


class _HyperParameters:
    """An optimizer's groups without their parameters: learning rates, momentum factors, …"""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def take(self) -> Any:
        groups: list[dict[str, Any]] = [dict(group) for group in self._optimizer.param_groups]
        for group in groups:
            del group["params"]
            for name, value in group.items():
                if isinstance(value, torch.Tensor):
                    group[name] = value.detach().clone()
        return groups

    def restore(self, taken: Any) -> None:
        del self._optimizer.param_groups[len(taken) :]  # added by the undone step
        for group, values in zip(self._optimizer.param_groups, taken, strict=True):
            for name, value in values.items():
                current = group.get(name)
                if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                    current.copy_(value)  # compiled code may refer to a tensor learning rate
                else:
                    group[name] = copied(value)


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

    def restore(self, taken: Any) -> None:
        torch_private.set_scales(self._scaler, taken)


class _Buffers:
    """A module's buffers, copied into the same memory each time.

    All of them are copied, changed or not, because batch norm updates its statistics without
    incrementing their version [measured, torch 2.13]. The list of modules is computed once, as in
    DDP: traversing a large model in every step would cost more than the copies.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = [
            (f"{path}." if path else "", part) for path, part in module.named_modules()
        ]
        self._copies: dict[str, torch.Tensor] = {}

    def _current_buffers(self) -> dict[str, torch.Tensor]:
        """The current buffers, by name: the script may have replaced tensors."""
        return {
            f"{path}{name}": buffer
            for path, part in self._modules
            if (own := torch_private.buffers_of(part))
            for name, buffer in own.items()
            if buffer is not None
        }

    def copies(self) -> dict[str, torch.Tensor]:
        """New copies of the current values."""
        return {name: buffer.detach().clone() for name, buffer in self._current_buffers().items()}

    def take(self) -> dict[str, torch.Tensor]:
        buffers = self._current_buffers()
        if any(not can_hold(self._copies.get(name), buffer) for name, buffer in buffers.items()):
            self._copies = {name: torch.empty_like(buffer) for name, buffer in buffers.items()}
        if buffers:
            with torch.no_grad():
                copies = [local_value(self._copies[name]) for name in buffers]
                torch_private.copy_each(copies, map(local_value, buffers.values()))
        return self._copies

    def restore(self, taken: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._current_buffers().items():
                before = taken.get(name)
                if before is None:  # registered within the step
                    continue
                if buffer.shape != before.shape:
                    buffer.resize_(before.shape)
                buffer.copy_(before)
