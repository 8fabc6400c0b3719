"""The types of values in a state, beyond those that a checkpoint's tree can hold.

A tree holds tensors, None, bool, int, float, str, dicts, lists and tuples. Values of other types (a
Counter, a namedtuple, an IntEnum, NumPy's numbers) are converted to these, and their types are kept
beside the tree. A value that would return as another type, or lose a part, is refused with its
path. Nothing is imported or unpickled to restore a type: its module has to be imported already.
"""

from __future__ import annotations

import enum
import functools
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from checkpoints.errors import LoadError, StateError
from checkpoints.tensors import is_dtensor
from checkpoints.tree import MAX_DEPTH, Types, has_plain_bytes, has_plain_keys, where

if TYPE_CHECKING:
    import torch

PLAIN = frozenset({type(None), bool, int, float, str})
"""Immutable types that a tree holds."""

_Path = tuple[Any, ...]
_FACTORIES: tuple[Any, ...] = (None, bool, int, float, complex, str, list, tuple, dict, set,
                               Counter, OrderedDict)  # fmt: skip


def plain_form(state: Any, *, typed_tensors: bool = False) -> tuple[Any, list[list[Any]]]:
    """``state`` with values that a tree holds, and the types of the converted ones. Copies no
    tensor.

    ``typed_tensors``: whether subclasses of tensors, parameters and NumPy's arrays are converted,
    too. Otherwise arrays are refused, and tensors are left as they are.

    Raises :class:`StateError`, with the path of the first value that cannot be stored.
    """
    types: list[list[Any]] = []
    return _Conversion(types, typed_tensors).plain(state, ()), types


def typed_form(plain: Any, types: Types, failed: list[tuple[_Path, str]] | None = None) -> Any:
    """The state whose :func:`plain_form` this is. New containers; the same tensors.

    Raises :class:`LoadError` for a class that is not in this process, or no longer has that value.
    With ``failed``, such values stay as they are, and their paths and the reasons are appended.
    """
    return _typed(plain, (), _Branch.of(types), failed) if types else plain


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


class _Conversion:
    def __init__(self, types: list[list[Any]], typed_tensors: bool) -> None:
        import torch

        self._types = types
        self._typed_tensors = typed_tensors
        self._tensor_type = torch.Tensor

    def plain(self, value: Any, path: _Path) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, self._tensor_type) and not (
            self._typed_tensors and _has_own_type(value)
        ):
            return value
        if len(path) > MAX_DEPTH:
            raise StateError(
                f"the state is nested more than {MAX_DEPTH} levels deep at {where(path[:5])} …",
                hint="Does a dict or list contain itself?",
            )
        if kind is dict and has_plain_keys(value):
            return {key: self.plain(item, (*path, key)) for key, item in value.items()}
        if kind is list or kind is tuple:
            return kind(self.plain(item, (*path, i)) for i, item in enumerate(value))
        children, name, detail = plain_item(value, path, typed_tensors=self._typed_tensors)
        self._types.append([list(path), name, detail])
        return children if isinstance(children, self._tensor_type) else self.plain(children, path)


def plain_item(
    value: Any, path: _Path = (), *, typed_tensors: bool = False
) -> tuple[Any, str, Any]:
    """The plain form of a value that is no tensor and of none of the types of a tree, with its
    items as they are; the name of its class; and what else it needs.

    Raises :class:`StateError` if it cannot be stored.
    """
    key = (type(value), typed_tensors)
    if key not in _FORM_OF:
        fitting = (form for form in _forms(typed_tensors) if isinstance(value, form.of))
        _FORM_OF[key] = next(fitting, None)
    form = _FORM_OF[key]
    if form is None:
        raise _unstorable(value, path)
    _require_rebuildable(value, path)
    try:
        children = form.plain(value)
    except (TypeError, ValueError) as error:
        raise _unstorable(value, path, str(error)) from None
    return children, _name_of(type(value)), form.detail(value)


_FORM_OF: dict[tuple[type, bool], _Form | None] = {}  # a history may have 10,000 numbers of NumPy


def _has_own_type(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor with these elements would be another value: for a parameter, another
    tensor for which gradients are computed, and a subclass. DTensors, and subclasses that hold
    other tensors, are stored or refused by the rules of the format."""
    import torch

    kind = type(tensor)
    if kind is torch.Tensor:
        return tensor.requires_grad and tensor.is_leaf
    if kind is torch.nn.Parameter:
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
    kind = type(value)
    if kind not in _SLOTS:
        slots = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
        _SLOTS[kind] = set[str]().union(*((s,) if isinstance(s, str) else s for s in slots))
    names = _SLOTS[kind].union(getattr(value, "__dict__", ()))
    return {name for name in names if hasattr(value, name)}


_SLOTS: dict[type, set[str]] = {}


def _unstorable(value: Any, path: _Path, reason: str = "") -> StateError:
    kind = type(value)
    if isinstance(value, Mapping):
        hint = "Save a dict of it."
    elif is_array(value):
        hint = "Convert arrays to tensors (torch.from_numpy)."
    else:
        hint = (
            "Use tensors, numbers, strings, and dicts, lists, tuples, sets or deques of them; "
            "of an object, save its state_dict() or vars()."
        )
    return StateError(
        f"{where(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored"
        + (f": {reason}" if reason else ""),
        hint=hint,
    )


def _detail_of(value: Any) -> Any:
    """What a container needs besides its class and its plain form."""
    if isinstance(value, defaultdict):
        return _FACTORIES.index(value.default_factory) if _is_known_factory(value) else 0
    return value.maxlen if isinstance(value, deque) else None


def _is_known_factory(value: defaultdict[Any, Any]) -> bool:
    return value.default_factory in _FACTORIES


# -- the types ------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How values of a type, and of its subclasses, are stored."""

    of: Any  # a class, or several
    plain: Callable[[Any], Any]
    typed: Callable[[Any, Any, Any], Any]  # of the class, the plain form and the detail
    detail: Callable[[Any], Any] = lambda value: None  # what else a value needs


def _pairs(value: Mapping[Any, Any]) -> Any:
    """A dict; a list of pairs if it has keys other than str and int."""
    return dict(value) if has_plain_keys(value) else [[k, v] for k, v in value.items()]


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
    return value.value if _is_stored_by_value(value) else value.name


def _typed_enum(kind: Any, plain: Any, by_value: Any) -> Any:
    return kind(plain) if by_value or issubclass(kind, enum.Flag) else kind[plain]


def _is_stored_by_value(value: enum.Enum) -> bool:
    """Whether the value is a plain one that names the member: what readers without the class get,
    such as "linear" and not LINEAR."""
    is_plain = type(value.value) in PLAIN and value.value == value.value
    return isinstance(value, enum.Flag) or (is_plain and type(value)(value.value) is value)


def _typed_tensor(kind: Any, plain: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    tensor: torch.Tensor = plain.detach().as_subclass(kind)
    return tensor.requires_grad_(requires_grad)


def _plain_number(value: Any) -> Any:
    plain = value.item()
    if type(plain) not in PLAIN:
        raise TypeError("it is no bool, int, float or str")
    return plain


def _typed_number(kind: Any, plain: Any, _: Any) -> Any:
    if not issubclass(kind, tuple(map(_numpy, ("number", "bool_", "str_")))):
        raise TypeError(f"{kind.__qualname__} is no bool, int, float or str")
    return kind(plain)  # a void of a number would be memory of that size


def _plain_array(value: Any) -> torch.Tensor:
    import torch

    numpy = sys.modules["numpy"]
    if type(value) is not numpy.ndarray:
        raise TypeError("it is a subclass of an array")
    own = value if value.flags.writeable else value.copy()
    return torch.from_numpy(numpy.ascontiguousarray(own).reshape(value.shape))


def _numpy(name: str) -> Any:
    return getattr(sys.modules.get("numpy"), name, ())


_BUILTIN_BASES = (dict, list, tuple, deque, set, frozenset, str, int, float, bytes, bytearray)
_LOST_ATTRIBUTES = {"_metadata"}  # of a module's state_dict: versions of its layout


@functools.cache
def _forms(typed_tensors: bool) -> tuple[_Form, ...]:
    """The forms; the first that fits applies: an IntEnum is an int, and NumPy's float64 a float."""
    import torch

    tensors = (
        _Form(torch.Tensor, lambda v: v.detach().as_subclass(torch.Tensor), _typed_tensor,
              lambda v: v.requires_grad),
        _Form(_numpy("ndarray"), _plain_array, lambda k, p, d: p.numpy()),
    )  # fmt: skip
    return (
        *(tensors if typed_tensors else ()),
        _Form(enum.Enum, _plain_enum, _typed_enum, _is_stored_by_value),
        _Form(_numpy("generic"), _plain_number, _typed_number),
        _Form(dict, _pairs, _filled, _detail_of),
        _Form((list, deque), list, _filled, _detail_of),
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
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _name_of(kind: type) -> str:
    module = kind.__module__.removesuffix("._local")  # of pathlib, in Python 3.13
    return f"{module}:{kind.__qualname__}"


def _class_named(name: str) -> Any:
    """The class, if its module is imported. A state never causes an import, which the getattr of a
    module may do."""
    module, _, path = name.partition(":")
    target: Any = sys.modules.get(module)
    for part in path.split("."):
        target = getattr(target, "__dict__", {}).get(part)
    return target if isinstance(target, type) else None


# -- to typed values ------------------------------------------------------------------------------


class _Branch:
    """A part of a state: its type, if it is none of a tree's own, and its parts with such types."""

    def __init__(self) -> None:
        self.type: tuple[str, Any] | None = None
        self.parts: dict[Any, _Branch] = {}

    @classmethod
    def of(cls, types: Types) -> _Branch:
        root = cls()
        for path, name, detail in types:
            branch = root
            for key in path:
                branch = branch.parts.setdefault(key, cls())
            branch.type = (name, detail)
        return root


def _typed(plain: Any, path: _Path, branch: _Branch, failed: list[tuple[_Path, str]] | None) -> Any:
    items = items_of(plain)
    if branch.parts and items is not None:
        typed = {
            key: _typed(item, (*path, key), branch.parts[key], failed)
            if key in branch.parts
            else item
            for key, item in items
        }
        plain = typed if isinstance(plain, dict) else type(plain)(typed.values())
    if branch.type is None:
        return plain
    name, detail = branch.type
    try:
        return _restored(plain, path, name, detail)
    except LoadError as error:
        if failed is None:
            raise
        failed.append((path, error.message))
        return plain


def _restored(plain: Any, path: _Path, name: str, detail: Any) -> Any:
    """The value of the class with this name. Raises :class:`LoadError`."""
    kind = _class_named(name)
    forms = (f for f in _forms(True) if kind and f.of and issubclass(kind, f.of))
    form = next(forms, None)
    module, _, qualname = name.partition(":")
    was = f"{where(path)} was saved as a {module}.{qualname}"
    if form is None:
        raise LoadError(
            f"{was}, which this script has not defined or imported", hint=f"Import {module} first."
        )
    try:
        return form.typed(kind, plain, detail)
    except (  # of a crafted or former value
        *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    ) as error:
        raise LoadError(f"{was}, which cannot have the saved value here: {error!r}") from error
