"""The variables that a check of the script reads."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from torch import nn

from elastic.train.checks import local_variables, variables

of_the_module = object()


def names_seen_from_below() -> set[str]:
    return {name for found in variables(sys._getframe(1)) for name in found}


def test_global_variables_are_found() -> None:
    assert "of_the_module" in names_seen_from_below()


class Loss:
    """An object that can be referred to weakly."""


def every_line(*_: object) -> Any:
    return every_line


@contextmanager
def traced(trace: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("trace", [None, every_line, lambda *_: None])
def test_local_variables_are_found_and_not_kept_alive(trace: Any) -> None:
    seen: list[bool] = []

    def script() -> set[str]:  # without assert, for which pytest adds a call of locals()
        average = Loss()
        for _ in range(2):
            alive = weakref.ref(average)
            names = names_seen_from_below()
            average = Loss()
            seen.append(alive() is None)
        return names

    with traced(trace):
        names = script()
    assert "average" in names
    assert seen == [True, True]


def test_a_debugger_that_reads_variables_changes_none() -> None:
    seen: list[str] = []

    def debugger(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is script.__code__ and event == "line":
            seen.extend(local_variables(frame))
        return debugger

    def script() -> int:
        first = 1
        second = first + 1
        return first + second

    with traced(debugger):
        assert script() == 3
    assert seen == ["first", "first", "second"]


def test_a_function_that_evaluates_a_model_has_variables() -> None:
    def script() -> set[str]:
        model = nn.Identity()
        model.eval()
        return names_seen_from_below()

    assert "model" in script()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="locals() is a copy since then")
def test_the_dict_of_locals_is_not_changed() -> None:
    taken = locals()
    later = object()
    assert "later" not in names_seen_from_below()
    assert "later" not in taken
    del later
