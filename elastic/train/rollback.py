"""The state of a boundary: what it is, what changes it, and how it is restored."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Protocol

import torch
import xxhash
from torch import nn
from torch.amp.grad_scaler import GradScaler

from checkpoints.values import is_array, items_of
from elastic import torch_private
from elastic.errors import SYSTEM_CLOCK, ConfigError
from elastic.telemetry.log import get_logger
from elastic.train.backward import frozen_indices, set_frozen
from elastic.train.copies import (
    RepeatedCopies,
    WeightCopies,
    can_hold,
    copied,
    keyed_tensors,
    load_tracked,
    rebuilt,
    tensors_in,
)
from elastic.train.local import position_of
from elastic.train.sampler import Position
from elastic.train.sharding import local_value
from elastic.train.state import JobState, Stateful
from elastic.train.values import Writing, write_into

# A copy of the weights at each step that takes less is not worth a decision: a thousandth of a step
# of a quarter of a second, and less than a gradient reduction over any network.
COPY_IS_CHEAP_S = 250e-6

# ----------------------------------------------------------------------------
# Detects weights that were changed by other means than ``optimizer.step()``.
#
# torch counts in-place changes of each tensor (``Tensor._version``). The count is cheap to
# compare, but misses changes through ``.data`` and through NumPy. Comparing contents finds these,
# but reads all memory: it is done only in a few steps, because a script that changes weights does
# so in every step, or in the first ones.

_FIRST_STEPS = 3  # steps of a process with compared contents; then at each power of two
_CHUNK = 1 << 22  # elements of a device's tensor that are converted at a time
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = Callable[[], Sequence[torch.Tensor]]


def compares_content(step: int) -> bool:
    """Whether contents are compared in step number ``step`` of this process, counted from 0.

    >>> [step for step in range(70) if compares_content(step)]
    [0, 1, 2, 4, 8, 16, 32, 64]
    """
    return step < _FIRST_STEPS or step & (step - 1) == 0


class ChangeWatch:
    """Detects changes of tensors since :meth:`expect`; none before its first call.

    ``counted``: the tensors whose changes torch counts, if they differ: torch counts operations on
    a DTensor there, and operations on its local tensor at the local tensor [measured, torch 2.13].
    """

    def __init__(self, tensors: Tensors, counted: Tensors | None = None) -> None:
        self._tensors = tensors
        self._counted = counted or tensors
        self._version: int | None = None
        self._content: tuple[int, ...] | None = None

    def expect(self, *, by_content: bool) -> None:
        """Expect the current values."""
        self._version = versions(self._counted())
        self._content = contents(self._tensors()) if by_content else None

    @property
    def knows_content(self) -> bool:
        """Whether contents are compared, so that no change remains undetected."""
        return self._content is not None

    def restored(self) -> None:
        """The tensors have got the expected values again, by writing them: torch counts that."""
        if self._version is not None:
            self._version = versions(self._counted())

    def forget(self) -> None:
        """Stop expecting values."""
        self._version = self._content = None

    @property
    def has_counted_changes(self) -> bool:
        """Whether torch has counted changes: cheap, for each step."""
        return self._version is not None and versions(self._counted()) != self._version

    @property
    def has_changed(self) -> bool:
        """Whether the values differ from the expected ones."""
        if self._version is None:
            return False
        if self._content is not None:  # equal contents after a change, too: it was undone
            return contents(self._tensors()) != self._content
        return versions(self._counted()) != self._version


def versions(tensors: Iterable[torch.Tensor]) -> int:
    """A number that grows with every counted change of any tensor."""
    return torch_private.count_of_changes(tensors)


def contents(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """A digest of each tensor's bits, in which their positions count."""
    with torch.no_grad():
        plain = [t.detach() for t in tensors if t.numel() and not t.is_sparse]
        plain = [torch.view_as_real(t) if t.is_complex() else t for t in plain]
        if any(t.device.type != "cpu" for t in plain):
            # One copy to the host for each device: a module may keep metrics on the CPU.
            digests = {
                device: iter(torch.stack([digest_on_device(t) for t in each]).tolist())
                for device, each in _by_device(plain).items()
            }
            return tuple(next(digests[t.device]) for t in plain)
        flat = (t.contiguous().view(-1).view(torch.uint8) for t in plain)
        return tuple(xxhash.xxh3_64_intdigest(t.numpy().data) for t in flat)


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    grouped: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        grouped.setdefault(tensor.device, []).append(tensor)
    return grouped


def digest_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor without a copy on the host: a scalar of 64 bits."""
    flat = tensor.contiguous().view(-1)
    # At most 32 bits: factors cannot move the sign of a 64-bit number within the digest.
    flat = flat.view(_INTEGERS[min(4, tensor.element_size())])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=flat.device)
        total += (part * (places * _MIX + 1)).sum()
    return total


# ----------------------------------------------------------------------------
# The state of a step boundary, without the large tensors: taken at each boundary, restored later.
#
# A boundary's state is everything that the job tracks: each key of each ``state_dict``, modules'
# buffers (those that are not persistent, too) and extra state, ``run.state`` and positions. Its
# large tensors (weights, optimizer state, averages) are kept by
# :class:`Rollback`.

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
        self._user = RepeatedCopies()

    def take(self, *, with_gradients: bool = False) -> Snapshot:
        """A copy of the current state, valid until the next copy is taken."""
        job = self._job
        gradients = {"gradients": copied(job.gradients())} if with_gradients else {}
        return {
            **gradients,
            "keeps_gradients": job.keeps_gradients,
            "progress": dict(vars(job.progress)),
            "state": self._user.copy(job.user),
            "units": copied(job.units),
            "loaders": {n: [x.sampler.epoch, x.sampler.step] for n, x in job.loaders.items()},
            "tracked": {name: keeper.take() for name, keeper in self._keepers.items()},
            "buffers": {name: module.take() for name, module in self._modules.items()},
            "extra": {name: module.take_extra() for name, module in self._modules.items()},
            "frozen": {n: frozen_indices(m.all_parameters) for n, m in job.modules.items()},
            "attributes": {name: one.take() for name, one in job.attributes().items()},
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
        needs_copies = job.progress.needs_copies  # stays known
        job.progress.load(copied(snapshot["progress"]))
        job.progress.needs_copies = needs_copies or job.progress.needs_copies
        writing = Writing(job.tensors_of_modules())
        writing.write(job.user, copied(snapshot["state"]))
        job.set_units(copied(snapshot["units"]))
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
            set_frozen(wrapped.all_parameters, snapshot["frozen"][name])
        for name, attributes in job.attributes().items():
            attributes.restore(snapshot["attributes"].get(name, {}))
        job.keeps_gradients = job.keeps_gradients or snapshot["keeps_gradients"]
        if "gradients" in snapshot:
            job.set_gradients(snapshot["gradients"])

    def restore_parts(self, snapshot: Snapshot, parts: Iterable[Part]) -> None:
        """Restore these parts only, without large tensors."""
        job, writing = self._job, Writing(self._job.tensors_of_modules())
        for section, name in parts:
            if name not in snapshot[section]:
                job.user.pop(name, None)  # removed from run.state; other sections keep their names
                continue
            value = copied(snapshot[section][name])
            match section:
                case "state":
                    job.user[name] = writing.write(job.user.get(name), value)
                case "tracked":
                    self._keepers[name].restore(value, _below(name, None), writing)
                case "buffers":
                    self._modules[name].restore(value)
                case "extra":
                    self._modules[name].restore_extra(value)
                case "attributes":
                    if (attributes := job.attributes().get(name)) is not None:
                        attributes.restore(value)
                case "frozen":
                    set_frozen(job.modules[name].all_parameters, value)


Part = Sequence[Any]
"""A part of a boundary's state that work between steps may change: a section of a snapshot, and a
name in it."""
_SECTIONS = ("state", "tracked", "buffers", "extra", "frozen", "attributes")
_MISSING = object()


def changed_parts(before: Snapshot, after: Snapshot) -> list[list[Any]]:
    """The parts that differ."""
    return [
        [section, name]
        for section in _SECTIONS
        for name in before[section] | after[section]
        if not _equal(before[section].get(name, _MISSING), after[section].get(name, _MISSING))
    ]


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
        )
    items, others = items_of(one), items_of(other)
    if items is None or others is None:
        if is_array(one):
            return one.shape == other.shape and bool((one == other).all())
        return bool(one == other)
    owned, expected = dict(items), dict(others)
    return list(owned) == list(expected) and all(
        _equal(value, expected[key]) for key, value in owned.items()
    )


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
        self._copies = RepeatedCopies(_mark if self._has_large else copied)
        self._buffers = _Module(tracked) if isinstance(tracked, nn.Module) else None

    def take(self) -> Any:
        state: Any = self._tracked.state_dict()
        if not isinstance(state, dict):
            return {"whole": copied(state)}
        values = self._copies.copy(state)
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


def _mark(tensor: torch.Tensor) -> str:
    """What replaces a large object's tensors."""
    return _TENSOR


def _with_tensors(value: Any, own: Any, path: Path, kept: KeptTensor) -> Any:
    """``value`` with the tensors that ``own`` has at the same places, where :func:`_mark` was."""
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
    ``state_dict``. Its state is large: :class:`elastic.train.copies.WeightCopies`."""

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


# ----------------------------------------------------------------------------
# Returns a rank to the last boundary between two steps, bit for bit, or reports that it cannot.
#
# The non-parameter state of a boundary is copied at each boundary. Its large tensors are weights,
# optimizer state, and averages. A copy of them makes every interrupted step undoable, whatever the
# script does in it. It is taken at each boundary where it costs little, or where the script needs
# it: where a step changes weights before its last collective, so that a fault can interrupt the
# step after the change. Otherwise a rank that has begun to change weights completes the step,
# because nothing can interrupt it, and the boundary at its end is the one to which all ranks go.
# Where a script does for the first time what needs a copy, and a fault hits that step, training is
# repeated from an earlier boundary, which is copied every COPY_EVERY steps (docs/decisions/0032).

# Copies are affordable if they cost this fraction of a step, or less than COPY_IS_CHEAP_S.
AFFORDABLE_FRACTION = 0.01
AFFORDABLE_MEMORY = 0.1  # of the memory that is free, on the host or on the device
# At which a device copies: less than those in use reach, so that a copy is not underestimated.
DEVICE_BYTES_PER_S = 1e12
# A step that would have needed a copy is repeated from the last one: at most so many steps, once in
# a job. A copy takes less time than a step, so that this is less than 1/64 of the time.
COPY_EVERY = 64
FIRST_STEPS = 3  # of a process: always copied, while the cost and the script are not known yet
# Of gradients that may belong to the state, until a step has added to them: they are sent at once.
UNKNOWN_GRADIENTS_BYTES = 64 << 20


StepCopiesName = Literal["auto", "always", "never"]


class StepCopies(Enum):
    """Whether the large state is copied at each boundary: ``elastic.join(step_copies=…)``."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"  # unless the script changes weights before the last collective of a step


def step_copies_from(name: str) -> StepCopies:
    """Parse the argument of ``elastic.join``. Raises ConfigError for another value."""
    values = [mode.value for mode in StepCopies]
    if name not in values:
        raise ConfigError(
            f"elastic.join: step_copies={name!r} is not one of {', '.join(map(repr, values))}"
        )
    return StepCopies(name)


def _never() -> bool:
    return False


class Rollback:
    """Takes the state of boundaries, and returns to the last one. One per process, created once all
    objects are registered."""

    def __init__(
        self,
        job: JobState,
        optimizers: Mapping[str, torch.optim.Optimizer],
        mode: StepCopies = StepCopies.AUTO,
    ) -> None:
        self._job = job
        self._optimizers = optimizers
        self._mode = mode
        self._state = BoundaryState(job)
        self._local = job.local_state
        self._watch = ChangeWatch(self._tensors, self._counted)
        self._copies = WeightCopies()
        self._costs = CopyCosts()
        self._digests = CopyCosts()  # of the large state, where it is not copied
        self._has_copies = False  # of the last boundary
        # The boundary of the copies, if not every step is copied; None: there is none.
        self._earlier: Snapshot | None = None
        self._copied: list[torch.Tensor] = []  # the weights in these copies
        self._changes_between_loops = False
        self._has_changed = False  # weights changed before an optimizer's update in this step
        self._has_updates = False  # an optimizer has begun an update in this step
        self._updated_at: int | None = None  # collectives begun before it; None: not counted
        self._left_at: int | None = None  # those begun when the loop ended in this step
        # Whether a part of the weights has changed since the last boundary, by any means.
        self.has_part_changed: Callable[[], bool] = _never
        self._own: tuple[torch.Tensor, ...] = ()
        self.snapshot: Snapshot = {}
        # The state, and marks of its large tensors, where work between steps has begun.
        self._unit: tuple[Snapshot, Mapping[Any, Any]] = ({}, {})

    def _weights(self) -> Sequence[torch.Tensor]:
        modules = list(self._job.modules.values())
        if len(modules) == 1 and not self._own:
            return modules[0].local_parameters
        return [*(p for module in modules for p in module.local_parameters), *self._own]

    def _tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that only updates may change within a step, for copies that do not exist."""
        large = self._state.large()
        return [*self._weights(), *large.values()] if large else self._weights()

    def _counted(self) -> Sequence[torch.Tensor]:
        modules = list(self._job.modules.values())
        counted = [p for module in modules for p in module.counted_parameters]
        return [*counted, *self._own, *self._state.large().values()]

    # -- while training -----------------------------------------------------------------------

    def take(self, *, with_copies: bool = False) -> None:
        """Make the current state that of the last boundary.

        ``with_copies``: copy it completely, whatever that costs, if there is enough memory.
        """
        step = self._job.progress.step
        is_copied = with_copies or self._copies_steps or self._is_due(step)
        is_alone = is_copied and not (self._copies_steps or self._job.is_rebuilt)
        self.snapshot = self._state.take(with_gradients=self._includes_gradients or is_alone)
        self._local.take(position_of(self.snapshot["progress"]))
        self._has_changed = self._has_updates = False
        self._left_at = None
        self.has_part_changed = _never
        self._has_copies = is_copied and self._copy()
        self._expect(by_content=with_copies or compares_content(self._costs.steps))

    # -- work between steps -------------------------------------------------------------------
    #
    # What the script has changed since the last boundary is repeated after a fault, up to the call
    # of run.once. So only what the work itself changes is added to that boundary.

    def begin_unit(self) -> None:
        """Begin work between steps. Until :meth:`end_unit` the last boundary stays as it is."""
        if not self.snapshot:
            self.take()
        self.snapshot = copied(self.snapshot)  # buffers are copied into the same memory each time
        if not self._has_copies and self._keeps_earlier and not self._watch.has_changed:
            self._has_copies = self._copy()  # the work may change large tensors
        self._unit = copied(self._state.take()), self._marks()

    def end_unit(self, record: Callable[[list[list[Any]]], None]) -> None:
        """Add what the work has changed to the last boundary. ``record`` is called with the changed
        parts, and adds the work to the job's finished units."""
        (before, marks), self._unit = self._unit, ({}, {})
        after = copied(self._state.take())
        parts = changed_parts(before, after)
        for section, name in parts:
            if name in after[section]:
                self.snapshot[section][name] = after[section][name]
            else:
                del self.snapshot[section][name]
        now = self._marks()
        changed = {key for key, mark in now.items() if marks.get(key) != mark}
        if changed or marks.keys() != now.keys():
            if self._has_copies:
                self._copies.update(*self._copied_tensors(), changed)
            self._has_changed = self._has_updates = False
            self._expect(by_content=compares_content(self._costs.steps))
        record(parts)
        self.snapshot["units"] = copied(self._job.units)
        self.snapshot["progress"]["units"] = self._job.progress.units
        self._local.take(position_of(self.snapshot["progress"]))
        if self._has_copies and self._earlier is not None:
            self._earlier = copied(self.snapshot)
            self._local.keep()

    def restore_unit(self, parts: Iterable[Part]) -> None:
        """Give the parts that finished work has changed their values in the last boundary again."""
        if self.snapshot:
            self._state.restore_parts(self.snapshot, parts)

    def _marks(self) -> Mapping[Any, Any]:
        """A value for each large tensor that changes with it. On devices, only changes count that
        torch counts."""
        tensors = keyed_tensors(*self._copied_tensors())
        counts = {key: (id(t), versions([t, local_value(t)])) for key, t in tensors.items()}
        if not self._is_on_host:
            return counts
        return {
            key: (*count, contents([local_value(tensors[key])])) for key, count in counts.items()
        }

    def _copied_tensors(
        self,
    ) -> tuple[Sequence[torch.Tensor], list[torch.optim.Optimizer], Mapping[Any, torch.Tensor]]:
        return self._weights(), list(self._optimizers.values()), self._state.large()

    @property
    def _includes_gradients(self) -> bool:
        """Whether gradients belong to the state of the boundary, as far as known: a script that
        sets them to None or zero has no use for them."""
        if self._job.keeps_gradients:
            return True
        if self._costs.steps >= FIRST_STEPS or self._job.is_rebuilt:
            return False
        return size_bytes(self._job.gradients()) <= UNKNOWN_GRADIENTS_BYTES

    @property
    def _adds_to_earlier_gradients(self) -> bool:
        return any(earlier.are_added_to for earlier in self._job.earlier_gradients)

    def note_weights(self) -> None:
        """Note the current weights, without a way back to them."""
        self._has_changed = self._has_updates = False
        self.has_part_changed = _never
        self._watch.expect(by_content=False)

    def _expect(self, *, by_content: bool) -> None:
        """Note the current tensors, to notice changes: by their contents in some steps, and in each
        one that has no copy where that is affordable."""
        is_measured = not self._has_copies and self._digests.are_affordable
        began_s = SYSTEM_CLOCK.monotonic()
        self._watch.expect(by_content=by_content or is_measured)
        if is_measured:
            took_s = SYSTEM_CLOCK.monotonic() - began_s
            self._digests.copied(took_s=took_s if self._is_on_host else math.inf, fits=True)

    @property
    def _is_on_host(self) -> bool:
        return all(p.device.type == "cpu" for p in self._weights()[:1])

    @property
    def _copies_steps(self) -> bool:
        if self._job.is_rebuilt:  # after a fault, the state comes from the nodes' memory
            return False
        if self.needs_copies or self._mode is StepCopies.ALWAYS:
            return True
        if self._costs.steps < FIRST_STEPS:
            return True
        return self._mode is StepCopies.AUTO and self._costs.are_affordable

    @property
    def _keeps_earlier(self) -> bool:
        """Whether copies are kept, as a way back from a step that turns out to need them."""
        return self._mode is StepCopies.AUTO and self._costs.fits and not self._job.is_rebuilt

    def _is_due(self, step: int) -> bool:
        if not self._keeps_earlier:
            return False
        earlier = self._earlier
        # At the same steps on all ranks, whatever a copy costs on each of them.
        return earlier is None or step // COPY_EVERY > earlier["progress"]["step"] // COPY_EVERY

    def _copy(self) -> bool:
        """Copy the large state of the last boundary. Returns whether there was enough memory."""
        began_s = SYSTEM_CLOCK.monotonic()
        self._earlier = None
        try:
            self._copies.take(*self._copied_tensors(), self._job.tensors_of_modules())
        except (torch.OutOfMemoryError, MemoryError):
            self._copies = WeightCopies()
            if self.needs_copies:
                get_logger().warning(
                    "not enough memory for a copy of the weights: after an interrupted step, the "
                    "state is restored from a peer or a checkpoint"
                )
            return False
        took_s, size_bytes = SYSTEM_CLOCK.monotonic() - began_s, self._copies.size_bytes
        if not self._is_on_host:  # the copy is only queued
            took_s += 2 * size_bytes / DEVICE_BYTES_PER_S
        is_first = self._costs.is_first
        free_bytes = self._free_bytes() if is_first else 0
        self._costs.copied(
            took_s=took_s, fits=size_bytes <= AFFORDABLE_MEMORY * free_bytes, size_bytes=size_bytes
        )
        if is_first and not self._costs.fits and self._mode is StepCopies.AUTO:
            get_logger().info(
                "a copy of the weights and the optimizer state (%d MiB) exceeds a tenth of the "
                "free memory, so none is kept: if a fault interrupts the first step that "
                "communicates after its update, training continues from a checkpoint, unless "
                'elastic.join(step_copies="always") makes these copies',
                size_bytes >> 20,
            )
        if not self._copies_steps and self._keeps_earlier:
            # The next boundary's buffers are copied into the memory of this one's.
            self._earlier, self._copied = copied(self.snapshot), list(self._weights())
            self._local.keep()
        return True

    def _free_bytes(self) -> int:
        device = next(iter(p.device for p in self._weights()), None)
        if device is not None and device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0]
        return available_bytes()

    def committed(self) -> None:
        """End a step; :meth:`take` must follow. Learns what the script does in its steps."""
        for costs in (self._costs, self._digests):
            costs.step_ended(SYSTEM_CLOCK.monotonic())
        self._learn()
        if not (self._copies_steps or self._keeps_earlier):
            self._copies = WeightCopies()  # frees the memory

    def _learn(self) -> None:
        """Learn from a step whether the next ones need a copy."""
        if self._adds_to_earlier_gradients:
            self._job.keeps_gradients = True
        if not self.needs_copies:
            if self._job.keeps_gradients:
                self._need_copies("gradients of a step are kept for the next one")
            elif self.changes_by_script:
                self._need_copies("weights change outside of optimizer.step()")
            elif self._is_followed_by_collectives:
                self._need_copies("ranks communicate after an update")

    def leave_step(self) -> None:
        """Called at the end of a loop: later changes by the script belong to no step."""
        if self._has_copies:
            return
        # The step has ended without a change that belongs to none.
        self._has_copies = self._changes_between_loops and self._copy()
        if not self._has_copies and not self._watch.has_changed:
            self._watch.expect(by_content=True)

    def script_has_run(self) -> None:
        """Called at the beginning of a loop; :meth:`take` must follow."""
        # For example, weights that are exchanged for an evaluation.
        self._changes_between_loops |= self._watch.has_changed

    def _need_copies(self, why: str) -> None:
        self._job.progress.needs_copies = why
        if not (self._costs.are_affordable or self._mode is StepCopies.ALWAYS):
            get_logger().info(
                "%s: from now on the weights are copied at the beginning of each step, so that an "
                "interrupted step is undone exactly. run.commit() directly after the update makes "
                "the copies unnecessary.",
                why,
            )

    @property
    def _is_followed_by_collectives(self) -> bool:
        """Whether this rank has communicated since the step's first update, so that a fault could
        have interrupted the step after it."""
        if not self._has_updates:
            return False
        now = _communications() if self._left_at is None else self._left_at
        return now is None or now != self._updated_at

    def before_update(self) -> None:
        """Called before an optimizer changes weights."""
        if not self._has_updates:
            self._has_updates = True
            watch, learns = self._watch, compares_content(self._costs.steps)
            changed = watch.has_changed if learns else watch.has_counted_changes
            if not (learns or changed) and self._is_on_host:
                changed = self.has_part_changed()
            self._has_changed = self._has_changed or changed
            self._updated_at = _communications()

    def copy_also(self, parameters: Sequence[torch.Tensor]) -> None:
        """Include weights of the job that are in no wrapped module."""
        self._own = tuple(parameters)
        self._has_copies, self._earlier = False, None
        self._watch.forget()

    @property
    def changes_by_script(self) -> bool:
        """Whether the script changes weights in its steps, other than by an optimizer."""
        if self._has_changed:
            return True
        return not self._has_updates and self._watch.has_changed

    @property
    def weights_have_changed(self) -> bool:
        """Whether weights have changed since the last boundary, by any means that is noticed."""
        return self._watch.has_changed

    # -- other ranks --------------------------------------------------------------------------

    @property
    def needs_copies(self) -> str:
        """Why the script needs copies; empty: it does not, as far as known."""
        return self._job.progress.needs_copies

    def adopt(self, snapshot: Snapshot) -> None:
        """Load the non-parameter state of the rank with whose state the job continues."""
        self._state.restore(snapshot)
        self._local.adopt(position_of(snapshot["progress"]))
        self.snapshot = snapshot
        self.forget()

    def forget(self) -> None:
        """Forget the last boundary's tensors, which were replaced; :meth:`take` must follow."""
        self._watch.forget()
        self._earlier, self.has_part_changed = None, _never
        self._has_copies = self._has_changed = self._has_updates = False

    # -- after a fault ------------------------------------------------------------------------

    @property
    def can_restore(self) -> bool:
        """Whether :meth:`restore` will return True."""
        if self._adds_to_earlier_gradients and "gradients" not in self.snapshot:
            return False  # for the first time: they are not copied yet
        if self._has_copies:
            return True
        if self._has_updates or self._has_changed or self._watch.has_changed:
            return False
        return not self.has_part_changed()  # through .data, which torch does not count

    @property
    def has_copies(self) -> bool:
        """Whether everything that a step changes can be restored."""
        return self._has_copies

    def leave_open(self) -> bool:
        """The loop has ended, and the code that follows belongs to its last step. Returns whether
        that can be undone. What communicates there says nothing about other steps."""
        if self._has_copies:
            self._left_at = _communications()
        return self._has_copies

    @property
    def can_undo_updates(self) -> bool:
        """Whether a step that has changed the weights can be undone, maybe with earlier ones."""
        return self._has_copies or self.has_earlier or self._job.is_rebuilt

    @property
    def has_earlier(self) -> bool:
        """Whether :meth:`restore_earlier` will return True."""
        return self._earlier is not None and self._copies_are_of_weights

    @property
    def _copies_are_of_weights(self) -> bool:
        """Whether the job has the weights of which copies are kept, not others in their place."""
        weights = self._weights()
        # The shard of a DTensor is another object each time.
        return len(weights) == len(self._copied) and all(
            own is copied or (own.shape == copied.shape and own.data_ptr() == copied.data_ptr())
            for own, copied in zip(weights, self._copied, strict=True)
        )

    def can_restore_surely(self, *, by_content: bool) -> bool:
        """The same; ``by_content``: only if no change of the tensors can have remained unnoticed,
        for a script that may just have exchanged them."""
        is_sure = self._has_copies or self._watch.knows_content or not by_content
        return is_sure and self.can_restore

    def restore(self) -> bool:
        """Return to the last boundary. Returns False if that is impossible without the state of
        another rank or a checkpoint; then only the non-parameter state is that of the boundary."""
        is_exact = self.can_restore
        if self._has_copies:
            self._restore_copies()
        if self.snapshot:
            self._state.restore(self.snapshot, self._kept if self._has_copies else None)
            self._local.restore()
        if self._has_copies:
            self._has_changed = self._has_updates = False
            self._watch.restored()  # or the script would seem to have written the copies
        return is_exact

    def restore_earlier(self, *, learns: bool = True) -> bool:
        """Return to an earlier boundary, if its copies are kept: the last one is lost. From then on
        each step is copied, if this rank ``learns`` from it. Returns False if that is
        impossible."""
        earlier, torn = self._earlier, self._job.progress.step
        if earlier is None or not self.has_earlier:
            return False
        if learns:
            self._learn()
        self.snapshot, self._has_copies = earlier, True
        self._restore_copies()
        self._state.restore(earlier, self._kept)
        self._local.adopt(position_of(earlier["progress"]))
        if learns and not self.needs_copies:
            self._need_copies("a step was interrupted after its update")
        get_logger().warning(
            "step %d was interrupted and cannot be undone: weights were not copied before it "
            "(%s): training is repeated from step %d",
            torn,
            f"{self.needs_copies}, for the first time" if learns else "the code after its loop",
            self._job.progress.step,
        )
        return True

    def _restore_copies(self) -> None:
        self._copies.restore(*self._copied_tensors())

    def _kept(self, path: Path, own: torch.Tensor | None) -> torch.Tensor | None:
        return self._copies.tensor(path, own)


class CopyCosts:
    """What copies or digests of the large state cost, in relation to a step."""

    def __init__(self) -> None:
        self.steps = 0  # committed in this process
        self._copy_s: float | None = None  # the shortest of recent copies; None: there was none
        self._size_bytes = 0  # of that copy: an optimizer's state begins with its first update
        self._copies = 0  # in the current step
        self._copies_per_step = 1  # in a recent step: before it, too, if the script runs there
        self._step_s = 0.0  # the shortest of recent steps, including the copy
        self.fits = True  # into the memory that was free at the first copy
        self._last_end_s: float | None = None
        self.are_affordable = True

    @property
    def is_first(self) -> bool:
        """Whether no copy was recorded yet."""
        return self._copy_s is None

    def copied(self, *, took_s: float, fits: bool, size_bytes: int = 0) -> None:
        """Record a copy; of the first one, whether it fits into the memory."""
        if self._copy_s is None:
            self.fits = fits
        is_larger, self._size_bytes = size_bytes > self._size_bytes, size_bytes
        self._copy_s = took_s if is_larger else min(took_s, self._copy_s or took_s)
        self._copies += 1

    def step_ended(self, now_s: float) -> None:
        """Record the end of a step; decides again whether copies are affordable at the third step,
        and at each power of two."""
        self.steps += 1
        self._copies_per_step, self._copies = max(1, self._copies), 0
        if self._last_end_s is not None:
            took_s = now_s - self._last_end_s
            self._step_s = min(took_s, self._step_s or took_s)
        self._last_end_s = now_s
        is_decided = self.steps == FIRST_STEPS or self.steps & (self.steps - 1) == 0
        if self.are_affordable and self.steps >= FIRST_STEPS and is_decided:
            limit_s = max(COPY_IS_CHEAP_S, AFFORDABLE_FRACTION * self._step_s)
            costs_s = self._copies_per_step * (self._copy_s or 0.0)
            self.are_affordable = self.fits and costs_s <= limit_s
            if self.steps > FIRST_STEPS:
                self._step_s = 0.0


def copy_regardless_of_costs() -> None:
    """For tests and `elastic check`: what a script does must not depend on the machine's speed."""
    global COPY_IS_CHEAP_S
    COPY_IS_CHEAP_S = math.inf


def available_bytes() -> int:
    """The memory of this machine that no process uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _communications() -> int | None:
    """A number that changes with every collective; None if a group does not count them."""
    counts = torch_private.collectives_of_groups()
    return sum(counts.values()) if counts is not None else None


# ----------------------------------------------------------------------------
# The states of the random generators where the function of ``run.retry`` begins.
#
# Steps, and the code between them, are seeded by their place:
# :mod:`elastic.train.sampler`.
# What the function draws before them must be the same whenever it is called again.


class RandomState:
    """This rank's states before the first call of the function."""

    def __init__(self) -> None:
        self._torch: torch.Tensor | None = None
        self._cuda: torch.Tensor | None = None
        self._python: tuple[Any, ...] = ()
        self._numpy: Any = None

    def take(self) -> None:
        """Copy the current states."""
        self._torch = torch.default_generator.get_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()
        self._python = random.getstate()
        if "numpy" in sys.modules:
            self._numpy = sys.modules["numpy"].random.get_state()

    def restore(self) -> None:
        """Restore the states that were taken, if any."""
        if self._torch is None:
            return
        torch.default_generator.set_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
