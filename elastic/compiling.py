"""Excludes functions of this package from ``torch.compile``.

Compiled models, optimizer steps and training functions of the script run this package's Python: in
forward passes, in hooks of optimizers, and where they call the API. Dynamo would trace it, and fail
("ProcessGroup name not set") or turn its decisions into constants. So each function that a compiled
function of the script can reach is excluded: it ends the graph, and runs as it is.
``torch.compiler.disable`` has the same effect, but imports Dynamo, which takes seconds that most
jobs need not spend.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from elastic.torch_private import end_dynamo_graph, exclude_from_dynamo

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def not_compiled(function: F) -> F:
    """Run ``function`` uncompiled, including the functions that it calls."""
    _skip(function, is_recursive=True)
    end_dynamo_graph(
        function,
        "torch-elastic-harness runs it uncompiled. Without fullgraph=True, the code around it is "
        "compiled",
    )
    return function


def not_compiled_methods(kind: type[T]) -> type[T]:
    """Run all methods of a class uncompiled. Getters of properties are methods, too."""
    for member in vars(kind).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            not_compiled(function)
    return kind


def not_compiled_itself(function: F) -> F:
    """Run ``function`` uncompiled; the functions that it calls may be compiled (a module's own
    forward)."""
    _skip(function, is_recursive=False)
    return function


def _skip(function: Callable[..., Any], *, is_recursive: bool) -> None:
    exclude_from_dynamo(function.__code__, is_recursive=is_recursive)
