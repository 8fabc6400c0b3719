"""JSON as typed records: dataclasses with all fields present, each of exactly its declared type.

:func:`elastic.wire.base.decode` parses, because msgspec accepts duplicate keys and has no depth
limit. msgspec checks the types. It accepts an object that lacks a field with a default, or has
unknown fields; here both are errors.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import reprlib
import threading
import typing
from collections.abc import Iterable
from enum import Enum
from types import NoneType
from typing import Any, TypeVar

import msgspec

from elastic.wire import base
from elastic.wire.base import ProtocolError

T = TypeVar("T")
Json = dict[str, Any]

# A hostile value must neither fill the log nor exceed the recursion limit of repr.
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 120
# "Expected `int`, got `str` - at `$.members[0].nproc`" (msgspec 0.19 to 0.22, _core.c).
_AT = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
# msgspec caches its description of a dataclass on the class before the description is complete: a
# second thread that converts to the class meanwhile crashes with SIGSEGV (0.19 to 0.22, _core.c,
# DataclassInfo_Convert). So classes are described one at a time, and never during a fork, whose
# child would keep an incomplete description.
_describing = threading.RLock()
_described: set[type[Any]] = set()
os.register_at_fork(
    before=_describing.acquire,
    after_in_parent=_describing.release,
    after_in_child=_describing.release,
)


class DecodeError(ValueError):
    """The data is not the expected record. The text is a clause that names the field and value."""


def parse(data: bytes | bytearray) -> Json:
    """Parse a JSON object strictly (:mod:`elastic.wire.base`).

    Raises:
        DecodeError: ``data`` is not a strict JSON object.
    """
    try:
        return base.decode(data)
    except ProtocolError as error:
        raise DecodeError(f"is {error}") from None


def convert(cls: type[T], data: Json) -> T:
    """Convert a parsed object to the dataclass ``cls``.

    Raises:
        DecodeError: a field is unknown, missing or of another type.
    """
    if cls not in _described:
        _describe(cls)
    try:
        record = msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise DecodeError(_explain(cls, data, str(error))) from None
    except UnicodeEncodeError as error:  # a lone surrogate in a text field
        raise DecodeError(f"has {shown(error.object)}, which is not valid Unicode") from None
    _check_fields(data, record, "")
    return record


def _describe(cls: type[Any]) -> None:
    """Have msgspec describe ``cls`` and the classes of its fields."""
    with _describing:
        msgspec.json.Decoder(cls)
        _described.add(cls)


def to_json(record: object) -> Any:
    """The record as dicts, lists and plain values that ``json`` can write."""
    return msgspec.to_builtins(record)


def shown(value: object) -> str:
    """The ``repr`` of a value, bounded in length."""
    return _shown.repr(value)


def _explain(cls: type[Any], data: Json, message: str) -> str:
    """msgspec's message, with the value, which it omits, and an enum's values."""
    at = _AT.search(message)
    path = at.group(1) if at else ""
    message = _AT.sub("", message)
    if missing := _MISSING.match(message):
        return _differs(path, set(), {missing.group(1)})
    value: Any = data
    hint: Any = cls
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
        hint = typing.get_type_hints(hint)[name] if name else typing.get_args(hint)[0]
        if NoneType in typing.get_args(hint):
            hint = typing.get_args(hint)[0]
    expected = message[:1].lower() + message[1:].replace("`", "")
    if isinstance(hint, type) and issubclass(hint, Enum):
        expected = f"expected one of: {', '.join(str(member.value) for member in hint)}"
    return f"has {path.lstrip('.')}={shown(value)}, {expected}"


def _check_fields(data: Any, record: object, path: str) -> None:
    """Raise DecodeError unless the objects in ``data`` have exactly the fields of ``record``."""
    if isinstance(record, tuple):
        for index, item in enumerate(record):
            _check_fields(data[index], item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(record):
        kind: Any = type(record)
        names = _names_of(kind)
        if data.keys() != names:
            raise DecodeError(_differs(path, data.keys() - names, names - data.keys()))
        for name, value in data.items():
            if isinstance(value, (dict, list)):
                _check_fields(value, getattr(record, name), f"{path}.{name}")


@functools.cache
def _names_of(cls: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))


def _differs(path: str, unknown: Iterable[str], missing: Iterable[str]) -> str:
    names = [
        f"{word} {', '.join(map(shown, sorted(fields)))}"
        for word, fields in (("unknown", unknown), ("missing", missing))
        if fields
    ]
    return f"has in {path.lstrip('.') or 'the top'}: {'; '.join(names)}"
