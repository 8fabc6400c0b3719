"""What a public function raises by itself is in its docstring."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import checkpoints
import elastic

_OF_ABSTRACT_METHODS = {"NotImplementedError"}


def public_functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Name, function, and the text in which its errors may be named."""
    for package in (elastic, checkpoints):
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isfunction(found):
                yield f"{package.__name__}.{name}", found, found.__doc__ or ""
            elif inspect.isclass(found) and not getattr(found, "_is_protocol", False):
                yield from of_class(f"{package.__name__}.{name}", found)


def of_class(qualified: str, found: type) -> Iterator[tuple[str, Callable[..., Any], str]]:
    for name, value in vars(found).items():
        function = value.fget if isinstance(value, property) else value
        is_public = not name.startswith("_") or name == "__init__"
        if is_public and inspect.isfunction(function):
            text = function.__doc__ or ""
            if name == "__init__":
                text += found.__doc__ or ""
            yield f"{qualified}.{name}", function, text


def raised_in(function: Callable[..., Any]) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # made by dataclasses: it has no source, and raises nothing
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(made, ast.Name) and made.id[0].isupper():
                names.add(made.id)
    return names - _OF_ABSTRACT_METHODS


FUNCTIONS = list(public_functions())


def test_there_are_public_functions_that_raise() -> None:
    assert sum(bool(raised_in(function)) for _, function, _ in FUNCTIONS) >= 5


@pytest.mark.parametrize(
    ("name", "function", "text"), FUNCTIONS, ids=[name for name, _, _ in FUNCTIONS]
)
def test_errors_are_in_the_docstring(name: str, function: Callable[..., Any], text: str) -> None:
    missing = {error for error in raised_in(function) if error not in text}
    assert not missing, f"{name} raises {missing}: say so, and when, in its docstring"
