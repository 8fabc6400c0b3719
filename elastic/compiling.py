"""Keeps ``torch.compile`` out of functions of ours that run inside compiled models.

A compiled DDP runs Python of ours around and inside of its forward pass. Dynamo would trace it, and
fails at process groups ("ProcessGroup name not set"). ``torch.compiler.disable`` does the same as
this, but imports Dynamo, which takes seconds that most jobs need not spend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from elastic.torch_private import keep_dynamo_out

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
    keep_dynamo_out(function.__code__, is_recursive=is_recursive)
