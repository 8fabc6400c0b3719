"""Excludes functions of this package that run inside compiled models from ``torch.compile``.

A compiled DDP model runs this package's Python around and inside its forward pass. Dynamo would
trace it, and fail at process groups ("ProcessGroup name not set"). ``torch.compiler.disable`` has
the same effect, but imports Dynamo, which takes seconds that most jobs need not spend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from elastic.torch_private import exclude_from_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Run ``function`` uncompiled, including the functions that it calls."""
    _skip(function, is_recursive=True)
    return function


def not_compiled_itself(function: F) -> F:
    """Run ``function`` uncompiled; the functions that it calls may be compiled (a module's own
    forward)."""
    _skip(function, is_recursive=False)
    return function


def _skip(function: Callable[..., Any], *, is_recursive: bool) -> None:
    exclude_from_dynamo(function.__code__, is_recursive=is_recursive)
