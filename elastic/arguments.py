"""Checks of arguments of the public API: the error names the call, the value and the remedy.

They run before anything is changed. Without them a wrong type would surface as an AttributeError or
TypeError from within this package, often much later.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from elastic.errors import ConfigError


def whole_number(what: str, value: object, *, least: int, hint: str = "") -> int:
    """``value`` as an int, also NumPy's and a tensor's integers.

    Raises ConfigError for other types, a bool among them, and for a number below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{what}{value!r} is not an integer", hint=hint) from None
    if number < least:
        raise ConfigError(f"{what}{number} is below {least}", hint=hint)
    return number


def real_number(what: str, value: object, *, hint: str = "") -> float:
    """``value`` as a float: a number, or a tensor with one element.

    Raises ConfigError for anything else, text among it.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        shown = repr(value) if shape is None else f"a tensor of shape {tuple(shape)}"
        raise ConfigError(f"{what}{shown} is not a number", hint=hint) from None


def weight(what: str, value: object, *, hint: str = "") -> float:
    """``value`` as a finite number of at least 0; otherwise raises ConfigError."""
    number = real_number(what, value, hint=hint)
    if not (math.isfinite(number) and number >= 0.0):
        raise ConfigError(f"{what}{number} is not a weight of at least 0", hint=hint)
    return number


def described(value: object) -> str:
    """A value in an error: its type if it is an object, else the value."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_short = value is None or isinstance(value, int | float | str)
    return repr(value) if is_short else type(value).__name__


def instance(call: str, value: object, kind: type, *, hint: str) -> None:
    """Raise ConfigError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(f"{call}({described(value)}): no {kind.__name__}", hint=hint)


def function(call: str, value: object, *, hint: str = "") -> None:
    """Raise ConfigError unless ``value`` can be called."""
    if not callable(value):
        raise ConfigError(f"{call}({described(value)}): not a function", hint=hint)


def named_only(call: str, unnamed: Iterable[Any], example: str) -> None:
    """Raise ConfigError for arguments without a name, where names are part of the job's state."""
    for value in unnamed:
        raise ConfigError(
            f"{call}({type(value).__name__}): an object without a name",
            hint=f"checkpoints store objects by name: {example}",
        )


def same_as_before(call: str, given: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that is neither a default (None, 0) nor what it was in the
    first call."""
    for name, value in given.items():
        if value is None or value is before[name]:
            continue
        if value != 0 and value != before[name]:
            raise ConfigError(
                f"{call}({name}={value!r}) after a call with {name}={before[name]!r}",
                hint="pass all arguments to the first call; later ones return the same object",
            )
