"""Values of a state: their types, and writing new contents into existing objects."""

from __future__ import annotations

import enum
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from checkpoints.errors import StateError
from checkpoints.tensors import is_dtensor
from checkpoints.tree import MAX_DEPTH, has_plain_bytes, path_name
from elastic.errors import TrainingError
from elastic.train.sharding import local_value

# ----------------------------------------------------------------------------
# Types of values in a state, beyond those of checkpoints.
#
# Checkpoints, and messages to other ranks, hold tensors, None, bool, int, float, str, dicts, lists
# and tuples. Values of other types (a Counter, a namedtuple, an IntEnum, NumPy's numbers) are
# converted to these, and their types are kept beside them, as a part of the state. A value that
# would return as another type, or lose a part, is refused with its path.

PLAIN = frozenset({type(None), bool, int, float, str})
"""Immutable types that a checkpoint holds."""

Types = list[list[Any]]
"""For each value of another type: its path in the plain form, its class, and what else it needs."""

_Path = tuple[Any, ...]
_FACTORIES: tuple[Any, ...] = (None, bool, int, float, complex, str, list, tuple, dict, set,
                               Counter, OrderedDict)  # fmt: skip


def plain_form(state: Any) -> tuple[Any, Types]:
    """``state`` with values that a checkpoint holds, and the types of the converted ones. Copies no
    tensor.

    Raises checkpoints.StateError, with the path of the first value that cannot be stored.
    """
    types: Types = []
    return _plain(state, (), types), types


def typed_form(plain: Any, types: Types) -> Any:
    """The state whose :func:`plain_form` this is. New containers; the same tensors.

    Raises TrainingError if a type does not exist in this process.
    """
    if not types:
        return plain
    return _typed(plain, (), {tuple(path): (name, detail) for path, name, detail in types})


def like(container: Any, items: Any) -> Any:
    """A new container of the same type with these items: pairs for a dict."""
    return _filled(type(container), items, _detail_of(container))


def items_of(container: Any) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a container by key or position; None for anything else, and for sets, whose
    elements cannot be changed in place."""
    if isinstance(container, dict):
        return container.items()
    if isinstance(container, (list, tuple, deque)):
        return enumerate(container)
    return None


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array. NumPy is optional, and torch imports it if it exists."""
    return isinstance(value, _numpy("ndarray"))


# -- to plain values ------------------------------------------------------------------------------


def _plain(value: Any, path: _Path, types: Types) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor) and not _has_own_type(value):
        return value
    if len(path) > MAX_DEPTH:
        raise StateError(
            f"the state is nested more than {MAX_DEPTH} levels deep at {_where(path[:5])} …",
            hint="Does a dict or list contain itself?",
        )
    if kind is dict and _has_plain_keys(value):
        return {key: _plain(item, (*path, key), types) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_plain(item, (*path, i), types) for i, item in enumerate(value))
    form = next((form for form in _FORMS if isinstance(value, form.of)), None)
    if form is None:
        raise _unstorable(value, path)
    _require_rebuildable(value, path)
    try:
        children = form.plain(value)
    except (TypeError, ValueError) as error:
        raise _unstorable(value, path, str(error)) from None
    types.append([list(path), _name_of(kind), _detail_of(value)])
    return children if isinstance(children, torch.Tensor) else _plain(children, path, types)


def _has_own_type(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor with these elements would be another value: for a parameter, another
    tensor for which gradients are computed, and a subclass. DTensors, and subclasses that hold
    other tensors, are stored or refused by the rules of the format."""
    kind = type(tensor)
    if kind is torch.Tensor:
        return tensor.requires_grad and tensor.is_leaf
    if kind is nn.Parameter:
        return True
    # Subclasses with attributes (quantised weights) are written into live ones, which keep them.
    is_plain = not is_dtensor(tensor) and has_plain_bytes(tensor)
    return is_plain and _class_named(_name_of(kind)) is kind and not _attributes_of(tensor)


def _require_rebuildable(value: Any, path: _Path) -> None:
    kind = type(value)
    if _class_named(_name_of(kind)) is not kind:
        raise _unstorable(value, path, "its class is not defined at the top level of a module")
    attributes = _attributes_of(value) - _LOST_ATTRIBUTES
    if attributes and isinstance(value, _BUILTIN_BASES) and not isinstance(value, enum.Enum):
        raise _unstorable(value, path, "it has attributes, which would be lost")
    if isinstance(value, defaultdict) and value.default_factory not in _FACTORIES:
        reason = "its default_factory is a function: use list, dict, set, int, float, …"
        raise _unstorable(value, path, reason)


def _attributes_of(value: Any) -> set[str]:
    """The names of a value's attributes, also of those in slots."""
    names = set(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    return {name for name in names if hasattr(value, name)}


def _unstorable(value: Any, path: _Path, reason: str = "") -> StateError:
    kind = type(value)
    return StateError(
        f"{_where(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored"
        + (f": {reason}" if reason else ""),
        hint="Use tensors, numbers, strings, and dicts, lists, tuples, sets or deques of them; "
        "give an object a state_dict and load_state_dict, and track it.",
    )


def _where(path: _Path) -> str:
    return f"state[{path_name(path)!r}]" if path else "the state"


def _has_plain_keys(value: Mapping[Any, Any]) -> bool:
    return all(type(key) is str or type(key) is int for key in value)


def _detail_of(value: Any) -> Any:
    """What a value needs besides its class and its plain form."""
    if isinstance(value, defaultdict):
        return _FACTORIES.index(value.default_factory) if _is_known_factory(value) else 0
    if isinstance(value, deque):
        return value.maxlen
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return None


def _is_known_factory(value: defaultdict[Any, Any]) -> bool:
    return value.default_factory in _FACTORIES


# -- the types ------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How values of a type, and of its subclasses, are stored."""

    of: Any  # a class, or several
    plain: Callable[[Any], Any]
    typed: Callable[[Any, Any, Any], Any]  # of the class, the plain form and the detail


def _pairs(value: Mapping[Any, Any]) -> Any:
    """A dict; a list of pairs if it has keys other than str and int."""
    return dict(value) if _has_plain_keys(value) else [[k, v] for k, v in value.items()]


def _filled(kind: Any, items: Any, detail: Any) -> Any:
    """A container of this class with these items, without its ``__init__``."""
    if issubclass(kind, dict):
        pairs = items.items() if isinstance(items, dict) else items
        made = kind.__new__(kind)
        if issubclass(kind, defaultdict):
            made.default_factory = _FACTORIES[detail or 0]
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        for key, item in pairs:
            base.__setitem__(made, key, item)
        return made
    if issubclass(kind, list):
        made = kind.__new__(kind)
        list.extend(made, items)
        return made
    if issubclass(kind, deque):
        made = kind.__new__(kind)
        deque.__init__(made, items, detail)
        return made
    if issubclass(kind, set):
        made = kind.__new__(kind)
        set.update(made, items)
        return made
    if issubclass(kind, frozenset):
        return frozenset.__new__(kind, items)
    # torch.Size, and the results of torch.max and others, are made in C++.
    is_of_python = kind.__new__ is tuple.__new__ or isinstance(kind.__new__, FunctionType)
    return tuple.__new__(kind, items) if is_of_python else kind(tuple(items))


def _plain_enum(value: enum.Enum) -> Any:
    return value.value if isinstance(value, enum.Flag) else value.name


def _typed_enum(kind: Any, plain: Any, _: Any) -> Any:
    return kind(plain) if issubclass(kind, enum.Flag) else kind[plain]


def _typed_tensor(kind: Any, plain: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    tensor: torch.Tensor = plain.detach().as_subclass(kind)
    return tensor.requires_grad_(requires_grad)


def _plain_number(value: Any) -> Any:
    plain = value.item()
    if type(plain) not in PLAIN:
        raise TypeError("it is no bool, int, float or str")
    return plain


def _plain_array(value: Any) -> torch.Tensor:
    numpy = sys.modules["numpy"]
    if type(value) is not numpy.ndarray:
        raise TypeError("it is a subclass of an array")
    own = value if value.flags.writeable else value.copy()
    return torch.from_numpy(numpy.ascontiguousarray(own).reshape(value.shape))


def _numpy(name: str) -> Any:
    return getattr(sys.modules.get("numpy"), name, ())


_BUILTIN_BASES = (dict, list, tuple, deque, set, frozenset, str, int, float, bytes, bytearray)
_LOST_ATTRIBUTES = {"_metadata"}  # of a module's state_dict: versions of its layout
# The first that fits: an IntEnum is an int, and NumPy's float64 is a float.
_FORMS = (
    _Form(torch.Tensor, lambda v: v.detach().as_subclass(torch.Tensor), _typed_tensor),
    _Form(enum.Enum, _plain_enum, _typed_enum),
    _Form(_numpy("generic"), _plain_number, lambda k, p, d: k(p)),
    _Form(_numpy("ndarray"), _plain_array, lambda k, p, d: p.numpy()),
    _Form(dict, _pairs, _filled),
    _Form((list, deque), list, _filled),
    _Form(tuple, tuple, _filled),
    # In an order that does not depend on the process: hashes of strings do.
    _Form((set, frozenset), lambda v: sorted(v, key=repr), _filled),
    _Form(str, str.__str__, lambda k, p, d: str.__new__(k, p)),
    _Form(int, int.__int__, lambda k, p, d: int.__new__(k, p)),
    _Form(float, float.__float__, lambda k, p, d: float.__new__(k, p)),
    _Form(complex, lambda v: [v.real, v.imag], lambda k, p, d: complex.__new__(k, *p)),
    _Form(bytes, lambda v: v.decode("latin-1"), lambda k, p, d: bytes.__new__(k, p, "latin-1")),
    _Form(bytearray, lambda v: v.decode("latin-1"), lambda k, p, d: k(p, "latin-1")),
    _Form(pathlib.PurePath, str, lambda k, p, d: k(p)),
    _Form(torch.dtype, lambda v: str(v).removeprefix("torch."), lambda k, p, d: _dtype(p)),
)  # fmt: skip


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _name_of(kind: type) -> str:
    module = kind.__module__.removesuffix("._local")  # of pathlib, in Python 3.13
    return f"{module}:{kind.__qualname__}"


def _class_named(name: str) -> Any:
    """The class, if its module is imported: a state never causes an import."""
    module, _, path = name.partition(":")
    target: Any = sys.modules.get(module)
    for part in path.split("."):
        target = getattr(target, part, None)
    return target if isinstance(target, type) else None


# -- to typed values ------------------------------------------------------------------------------


def _typed(plain: Any, path: _Path, types: Mapping[_Path, tuple[str, Any]]) -> Any:
    if isinstance(plain, dict):
        plain = {key: _typed(item, (*path, key), types) for key, item in plain.items()}
    elif isinstance(plain, (list, tuple)):
        plain = type(plain)([_typed(item, (*path, i), types) for i, item in enumerate(plain)])
    if path not in types:
        return plain
    name, detail = types[path]
    kind = _class_named(name)
    form = next((form for form in _FORMS if kind and form.of and issubclass(kind, form.of)), None)
    if form is None:
        module, _, qualname = name.partition(":")
        raise TrainingError(
            f"{_where(path)} was saved as a {module}.{qualname}, which this script has not defined "
            "or imported",
            hint=f"import {module} before run.retry",
        )
    return form.typed(kind, plain, detail)


# ----------------------------------------------------------------------------
# Writes arriving state into live objects, in place.
#
# Scripts refer to parts of their state: ``head = optimizer.param_groups[1]``, a list in
# ``run.state``, the history of a tracked object. So wherever state arrives (at the start, from a
# checkpoint or another rank, in a rollback), containers and tensors stay the same objects and get
# new contents.
#
# A live object is replaced only where writing to it would change something else: two parts of the
# live state share an object or memory, and have different values in the arriving state.


def write_into(live: Any, saved: Any) -> Any:
    """Give ``live`` the value of ``saved``. Returns ``live``, or where its type or the shape of a
    tensor differs, an object that replaces it.

    Parts of ``saved`` may become parts of ``live``: pass a copy to keep it.
    """
    return Writing().write(live, saved)


class Writing:
    """One arriving state, whose parts are written one after the other.

    ``occupied``: tensors that have their new value already, such as the weights. No other part of
    the state may change them.
    """

    def __init__(self, occupied: Iterable[torch.Tensor] = ()) -> None:
        self._memory = _Memory()
        # By id, with the objects themselves, so that no id is used again.
        self._written: dict[int, Any] = {}  # live containers
        # Arriving objects of the current part, and what they became: one that arrives in two
        # places stays one object.
        self._results: dict[int, tuple[Any, Any]] = {}
        for tensor in occupied:
            self._memory.add(tensor)

    def write(self, live: Any, saved: Any) -> Any:
        """As :func:`write_into`."""
        self._results.clear()
        return self._result(_keep(live, {}), saved)

    @contextmanager
    def keeping(self, *stateful: Any) -> Iterator[None]:
        """Within the block these objects load a state, and may replace what they refer to. At its
        end, the previous containers and tensors are put back, with the loaded values.
        """
        kept = _keep(stateful, {})
        yield
        self._results.clear()
        self._result(kept, stateful)

    def _result(self, kept: _Kept | None, new: Any) -> Any:
        if type(new) in PLAIN:
            return new
        if id(new) not in self._results:
            self._results[id(new)] = (new, new)  # an object may contain itself
            self._results[id(new)] = (new, self._write(kept, new))
        return self._results[id(new)][1]

    def _write(self, kept: _Kept | None, new: Any) -> Any:
        live = kept.live if kept is not None and type(kept.live) is type(new) else None
        parts = kept.parts if kept is not None else {}
        if isinstance(new, torch.Tensor):
            return self._write_tensor(kept.live if kept is not None else None, new)
        if (items := items_of(new)) is not None:
            written = {key: self._result(parts.get(key), item) for key, item in items}
            return self._write_container(live, new, written)
        if isinstance(new, set) and live is not None and self._may_write(live, new):
            if live is not new:
                live.clear()
                live.update(new)
            return live
        if is_array(new) and live is not None and self._may_write(live, new):
            if live is not new:
                live[...] = new
            return live
        if live is new and _is_stateful(new):
            for name, value in list(_attributes(new)):
                result = self._result(parts.get(name), value)
                if result is not value:
                    vars(new)[name] = result
        return new

    def _write_container(self, live: Any, new: Any, written: dict[Any, Any]) -> Any:
        values = list(written.values())
        if isinstance(new, tuple):
            for candidate in (live, new):
                if candidate is not None and _are_same(candidate, values):
                    return candidate
            return like(new, values)
        target = live if live is not None and self._may_write(live, new) else new
        if isinstance(target, dict):
            _fill(target, written)
        elif not _are_same(target, values):
            target.clear()
            target.extend(values)
        return target

    def _may_write(self, live: Any, new: Any) -> bool:
        """Whether ``live`` may get the value of ``new``: it is not a part of the state elsewhere,
        or has the same value there."""
        if live is new:
            return True
        if isinstance(live, deque) and live.maxlen != new.maxlen:
            return False
        if is_array(live) and not _fits_array(live, new):
            return False
        if id(live) in self._written and not _are_equal(live, new):
            return False
        self._written[id(live)] = live
        return True

    def _write_tensor(self, live: Any, new: torch.Tensor) -> torch.Tensor:
        if live is new or not isinstance(live, torch.Tensor):
            return new
        if not is_dtensor(new):
            new = new.to(live.device)
        if not _can_hold(live, new):
            return new
        if self._memory.overlaps(live):
            return live if _are_equal(live, new) else new
        with torch.no_grad():
            live.detach().copy_(new)
        self._memory.add(live)
        return live


@dataclass(slots=True)
class _Kept:
    """A live object, and its parts by key, position or attribute, before a load replaces them."""

    live: Any
    parts: dict[Any, _Kept] = field(default_factory=dict)


def _keep(live: Any, known: dict[int, _Kept]) -> _Kept | None:
    if type(live) in PLAIN:
        return None
    if (kept := known.get(id(live))) is not None:
        return kept
    items = _attributes(live) if _is_stateful(live) else items_of(live)
    if items is None and not isinstance(live, (torch.Tensor, set)) and not is_array(live):
        return None
    kept = known[id(live)] = _Kept(live)
    for key, item in items or ():
        if (part := _keep(item, known)) is not None:
            kept.parts[key] = part
    return kept


def _attributes(stateful: Any) -> Iterable[tuple[Any, Any]]:
    """The attributes that loading may replace. A scheduler's optimizer is none, and large."""
    is_scheduler = isinstance(stateful, LRScheduler)
    return (i for i in vars(stateful).items() if not (is_scheduler and i[0] == "optimizer"))


def _is_stateful(value: Any) -> bool:
    """Whether the attributes of an object with a state_dict are parts of a state. Modules load
    their tensors in place by themselves."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, nn.Module))
        and hasattr(type(value), "state_dict")
        and hasattr(type(value), "load_state_dict")
    )


def _fill(target: MutableMapping[Any, Any], items: dict[Any, Any]) -> None:
    """Give a dict these items, in this order, without methods that a subclass replaces: those of a
    Counter count."""
    base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    if list(target) != list(items):
        base.clear(target)
    for key, item in items.items():
        if key not in target or target[key] is not item:
            base.__setitem__(target, key, item)


def _are_same(container: Any, values: list[Any]) -> bool:
    return len(container) == len(values) and all(
        one is other for one, other in zip(container, values, strict=True)
    )


def _fits_array(live: Any, new: Any) -> bool:
    return bool(live.flags.writeable and live.shape == new.shape and live.dtype == new.dtype)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values of a state are equal. NaN equals itself."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _can_hold(one, other) and _have_equal_bytes(local_value(one), local_value(other))
    if type(one) is not type(other):
        return False
    if is_array(one):
        return bool(_fits_array(one, other) and one.tobytes() == other.tobytes())
    if (items := items_of(one)) is None:
        return bool(one == other or (one != one and other != other))
    others = dict(items_of(other) or ())
    own = dict(items)
    return own.keys() == others.keys() and all(_are_equal(own[k], others[k]) for k in own)


def _have_equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bytes(one), _bytes(other.to(one.device)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _can_hold(live: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether the values of ``new`` can be written to ``live``, which then equals it."""
    if live.shape != new.shape or live.dtype != new.dtype or live.device != new.device:
        return False
    if live.layout != torch.strided or new.layout != torch.strided or live.is_inference():
        return False
    if is_dtensor(live) or is_dtensor(new):
        return is_dtensor(live) and is_dtensor(new) and _layout_of(live) == _layout_of(new)
    is_result = live.grad_fn is not None  # of a computation, which autograd may still need
    is_expanded = any(s == 0 and n > 1 for s, n in zip(live.stride(), live.shape, strict=True))
    return not is_result and not is_expanded


def _layout_of(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements


class _Memory:
    """The memory of tensors."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # by storage
        self._tensors: list[torch.Tensor] = []  # which keep their addresses

    def add(self, tensor: torch.Tensor) -> None:
        if (place := _range_of(tensor)) is not None:
            storage, start, stop = place
            self._ranges.setdefault(storage, []).append((start, stop))
            self._tensors.append(tensor)

    def overlaps(self, tensor: torch.Tensor) -> bool:
        if (place := _range_of(tensor)) is None:
            return False
        storage, start, stop = place
        return any(a < stop and start < b for a, b in self._ranges.get(storage, ()))


def _range_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """The storage of a tensor, and the range of its addresses there; None without memory."""
    local = local_value(tensor)
    if local.layout != torch.strided or local.device.type == "meta" or not local.numel():
        return None
    start: int = local.data_ptr()
    last = sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
    return local.untyped_storage().data_ptr(), start, start + (last + 1) * local.element_size()
