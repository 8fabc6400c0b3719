"""The JSON of control messages: one object, finite numbers, bounded depth, no duplicate fields.

``json.loads`` accepts ``Infinity``, keeps the last of two equal keys and recurses once per bracket:
each of these has ended a parsing thread [measured: ``{"id": Infinity}`` in the store of a world,
5,000 brackets with a low recursion limit].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from elastic.secure_channel.errors import ProtocolError

MAX_DEPTH = 16
_MAX_DIGITS = 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def encode(message: Mapping[str, Any]) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinities."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes | bytearray, *, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The object in ``data``. Raises ProtocolError, and nothing else.

    >>> decode(b'{"id": 3}')
    {'id': 3}
    >>> decode(b'{"id": Infinity}')
    Traceback (most recent call last):
    elastic.secure_channel.errors.ProtocolError: not JSON: Infinity is not a JSON number
    """
    _check_depth(data, max_depth)
    try:
        message = json.loads(
            data,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a JSON {type(message).__name__}, not an object")
    return message


def _check_depth(data: bytes | bytearray, max_depth: int) -> None:
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", data)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > max_depth:
            raise ProtocolError(f"JSON nested more than {max_depth} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate field in an object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number
