"""A `break` or `return` is distinguished from an exception by the instruction at which Python
closes a generator. It differs between versions of Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import pytest

from elastic.train.checks import is_left_on_purpose

found: list[bool] = []


def _steps() -> Iterator[int]:
    try:
        yield from range(10)
    except GeneratorExit:
        found.append(is_left_on_purpose())
        raise


def batches() -> Iterator[int]:
    with contextlib.closing(_steps()) as steps:  # type: ignore[type-var]
        yield from steps


def progress_bar(iterable: Iterable[int]) -> Iterator[int]:
    try:
        yield from iterable
    finally:
        pass


def left_by_break() -> None:
    for i in batches():
        if i == 3:
            break


def left_by_return() -> int:
    for i in batches():
        if i == 3:
            return i + 1
    return 0


def left_with_enumerate() -> None:
    for i, _ in enumerate(batches()):
        if i == 3:
            return


def left_with_a_progress_bar() -> None:
    for i in progress_bar(batches()):
        if i == 3:
            break


def left_within_blocks() -> None:
    for i in batches():
        with contextlib.suppress(KeyError):
            try:
                for _ in range(2):
                    if i == 3:
                        return
            finally:
                len(found)


@pytest.mark.parametrize(
    "leave",
    [
        left_by_break,
        left_by_return,
        left_with_enumerate,
        left_with_a_progress_bar,
        left_within_blocks,
    ],
)
def test_break_and_return_are_on_purpose(leave: Callable[[], object]) -> None:
    found.clear()
    leave()
    assert found == [True]


def fails_below_finally() -> None:
    try:
        for i in batches():
            if i == 3:
                raise ValueError
    finally:
        len(found)


def fails_and_catches() -> None:
    try:
        for i in batches():
            if i == 3:
                int("x")
    except ValueError:
        pass


def fails_in_a_progress_bar() -> None:
    try:
        for i in progress_bar(batches()):
            if i == 3:
                raise ValueError
    finally:
        len(found)


def ends_with_a_variable() -> None:
    iterator = batches()
    next(iterator)


@pytest.mark.parametrize(
    "end", [fails_below_finally, fails_and_catches, fails_in_a_progress_bar, ends_with_a_variable]
)
def test_exceptions_and_forgotten_iterators_are_not(end: Callable[[], object]) -> None:
    found.clear()
    with contextlib.suppress(ValueError):
        end()
    assert found == [False]
