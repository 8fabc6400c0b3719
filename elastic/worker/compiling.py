"""Keeps ``torch.compile`` out of functions of ours that run inside compiled models.

A compiled DDP runs Python of ours around and inside of its forward pass. Dynamo would trace it, and
fails at process groups ("ProcessGroup name not set"). ``torch.compiler.disable`` does the same as
this, but imports Dynamo, which takes seconds that most jobs need not spend.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Run ``function`` as it is, and with it what it calls."""
    _skip(function, is_recursive=True)
    return function


def not_compiled_itself(function: F) -> F:
    """Run ``function`` as it is; what it calls may be compiled (a module's own forward)."""
    _skip(function, is_recursive=False)
    return function


def _skip(function: Callable[..., Any], *, is_recursive: bool) -> None:
    # As torch._dynamo.eval_frame.skip_code does it (torch 2.13). A torch that has other names for
    # it still trains; compiled models fail there with Dynamo's own message.
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        called = action.SKIP if is_recursive else action.DEFAULT
        strategy = eval_frame._FrameExecStrategy(action.SKIP, called)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
