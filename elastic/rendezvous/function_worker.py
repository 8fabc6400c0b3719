"""A worker's function, for processes that do not inherit the agent's environment.

It is unpickled in the worker: nothing else may be imported here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any


class FunctionInEnvironment:
    """``function``, called with these variables in ``os.environ`` (None: unset)."""

    def __init__(self, function: Callable[..., Any], variables: Mapping[str, str | None]) -> None:
        functools.update_wrapper(self, function)  # torch shows its name
        self._function = function
        self._variables = dict(variables)

    def __call__(self, *args: Any) -> Any:
        for name, value in self._variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        return self._function(*args)
