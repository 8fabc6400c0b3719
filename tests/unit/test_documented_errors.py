"""What a public name raises by itself, or by a helper of this project's, is in its docstring."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import runpy
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import elastic

REPOSITORY = Path(__file__).parents[2]
SITE = runpy.run_path(str(REPOSITORY / "scripts" / "docs_site.py"))
PUBLIC_MODULES: tuple[str, ...] = SITE["PUBLIC_MODULES"]
public_names: Callable[[str], list[str]] = SITE["public_names"]

PACKAGES = ("elastic", "checkpoints")
SAME_AS = re.compile(r"the\s+same\s+errors\s+as\s+:(?:func|meth):`(?:checkpoints\.)?(\w+)`")
DEPTH = 2
# Bugs of this project's own, and methods of abstract classes.
INTERNAL = frozenset({AssertionError, NotImplementedError})


@dataclass(frozen=True)
class Function:
    """Code, and the class of its ``self``."""

    call: Callable[..., Any]
    owner: type | None


@dataclass(frozen=True)
class PublicFunction:
    """A function that users call, and the text in which its errors may be named."""

    name: str
    function: Function
    text: str


def public_functions() -> Iterator[PublicFunction]:
    for module_name in PUBLIC_MODULES:
        module = importlib.import_module(module_name)
        for name in public_names(module_name):
            found = getattr(module, name)
            if inspect.isfunction(found):
                yield PublicFunction(
                    f"{module_name}.{name}", Function(found, None), found.__doc__ or ""
                )
            elif inspect.isclass(found) and not getattr(found, "_is_protocol", False):
                yield from of_class(f"{module_name}.{name}", found)


def of_class(qualified: str, found: type) -> Iterator[PublicFunction]:
    """Methods and properties, inherited ones too, and what makes an instance."""
    seen: set[str] = set()
    for kind in found.__mro__:
        if kind.__module__.partition(".")[0] not in PACKAGES or issubclass(found, Enum):
            continue
        for name, value in vars(kind).items():
            if name in seen or getattr(kind, "_is_protocol", False):
                continue
            seen.add(name)
            function = value.fget if isinstance(value, property) else value
            function = getattr(function, "__func__", function)  # static methods, class methods
            makes = name in ("__init__", "__post_init__", "__new__")
            if not inspect.isfunction(function) or (name.startswith("_") and not makes):
                continue
            text = " ".join(filter(None, map(inspect.getdoc, same_method(found, name))))
            if makes:
                text = f"{text}\n{found.__doc__}\n{inspect.getdoc(found.__init__)}"
            yield PublicFunction(f"{qualified}.{name}", Function(function, found), text)


def same_method(found: type, name: str) -> Iterator[object]:
    """Of the class and its bases, and of the public protocols that have it."""
    for kind in (*found.__mro__, *PROTOCOLS):
        if name in vars(kind):
            yield vars(kind)[name]
            yield kind  # which may say it of all of its methods


@dataclass(frozen=True)
class Found:
    """A call of a function of this project's, or the name of a class that is raised."""

    what: Function | str
    caught: frozenset[str]  # around it


def body_of(function: Function) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function.call)))
    except (OSError, SyntaxError):  # made by dataclasses: it has no source, and raises nothing
        return ast.Module(body=[], type_ignores=[])


@cache
def contents(function: Function) -> tuple[Found, ...]:
    return tuple(_contents(body_of(function), function, frozenset()))


def _contents(node: ast.AST, inside: Function, caught: frozenset[str]) -> Iterator[Found]:
    if isinstance(node, ast.Raise) and node.exc is not None:
        made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(made, ast.Name) and made.id[0].isupper():
            yield Found(made.id, caught)
    elif (called := called_by(node, inside)) is not None:
        yield Found(called, caught)
    elif isinstance(node, ast.Try):
        within = caught | {name for handler in node.handlers for name in names_in(handler.type)}
        for statement in node.body:
            yield from _contents(statement, inside, within)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            yield from _contents(part, inside, caught)
        return
    elif isinstance(node, ast.With):
        caught |= {name for item in node.items for name in suppressed(item.context_expr)}
    for child in ast.iter_child_nodes(node):
        yield from _contents(child, inside, caught)


def names_in(node: ast.expr | None) -> set[str]:
    if node is None:
        return {"BaseException"}
    return {ast.unparse(kind) for kind in (node.elts if isinstance(node, ast.Tuple) else [node])}


def suppressed(context: ast.expr) -> set[str]:
    match context:
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=kinds):
            return {name for kind in kinds for name in names_in(kind)}
    return set()


def called_by(node: ast.AST, inside: Function) -> Function | None:
    match node:
        case ast.Call():
            return resolve(node.func, inside)
        case ast.Attribute():
            return read_property(node, inside)
    return None


# Which function is called ----------------------------------------------------------------------


def resolve(called: ast.expr, inside: Function) -> Function | None:
    """A function of this project's that an expression names, directly or as an attribute of
    something whose class is declared."""
    owner: type | None = None
    found: Any = None
    match called:
        case ast.Name(id=name):
            found = inside.call.__globals__.get(name)
        case ast.Attribute(value=ast.Name(id=module), attr=name) if inspect.ismodule(
            inside.call.__globals__.get(module)
        ):
            found = getattr(inside.call.__globals__[module], name, None)
        case ast.Attribute(value=value, attr=name):
            owner = class_of(value, inside)
            found = inspect.getattr_static(owner, name, None) if owner is not None else None
    if inspect.isclass(found):
        owner = found
        makers = (vars(found).get(maker) for maker in ("__post_init__", "__init__"))
        found = next((maker for maker in makers if maker is not None), None)
    return own_function(found, owner)


def read_property(node: ast.Attribute, inside: Function) -> Function | None:
    owner = class_of(node.value, inside)
    found = inspect.getattr_static(owner, node.attr, None) if owner is not None else None
    return own_function(found.fget, owner) if isinstance(found, property) else None


def own_function(found: Any, owner: type | None) -> Function | None:
    found = getattr(found, "__func__", found)  # static methods, class methods
    found = inspect.unwrap(found) if callable(found) else None
    if not inspect.isfunction(found) or found.__module__.partition(".")[0] not in PACKAGES:
        return None
    if owner is not None and getattr(owner, "_is_protocol", False):
        return None
    return Function(found, owner)


def class_of(value: ast.expr, inside: Function) -> type | None:
    """The declared class of ``self``, of an argument, or of an attribute of one."""
    match value:
        case ast.Name(id="self" | "cls"):
            return inside.owner
        case ast.Name(id=name):
            parameter = inspect.signature(inside.call).parameters.get(name)
            return declared(parameter.annotation, inside.call.__globals__) if parameter else None
        case ast.Attribute(value=outer, attr=name):
            owner = class_of(outer, inside)
            return attribute_class(owner, name) if owner is not None else None
    return None


@cache
def attribute_class(owner: type, name: str) -> type | None:
    for kind in owner.__mro__:
        names = vars(sys.modules[kind.__module__])
        annotation = inspect.get_annotations(kind).get(name)
        if annotation is not None:
            return declared(annotation, names)
        value = vars(kind).get(name)
        if isinstance(value, property) and value.fget is not None:
            return declared(inspect.signature(value.fget).return_annotation, names)
        maker = vars(kind).get("__init__")
        if inspect.isfunction(maker) and maker.__module__.partition(".")[0] in PACKAGES:
            found = _assigned_class(Function(maker, kind), name)
            if found is not None:
                return found
    return None


def _assigned_class(maker: Function, name: str) -> type | None:
    for node in ast.walk(body_of(maker)):
        match node:
            case ast.AnnAssign(target=ast.Attribute(attr=attr), annotation=kind) if attr == name:
                return declared(ast.unparse(kind), maker.call.__globals__)
            case ast.Assign(targets=[target], value=value):
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=True))
                for left, right in pairs:
                    if isinstance(left, ast.Attribute) and left.attr == name:
                        if isinstance(right, ast.Call) and isinstance(right.func, ast.Name):
                            return declared(right.func.id, maker.call.__globals__)
                        return class_of(right, maker)
    return None


def declared(annotation: Any, names: dict[str, Any]) -> type | None:
    """The class that an annotation is about; of ``X | None`` that is X."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, names)
        except Exception:  # noqa: BLE001  imported for type checks only
            return None
    for part in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(part) and part.__module__.partition(".")[0] in PACKAGES:
            return part
    return None


# What it raises --------------------------------------------------------------------------------


def error_class(name: str, function: Function) -> type | None:
    first, *rest = name.split(".")
    found = function.call.__globals__.get(first, getattr(builtins, first, None))
    for attribute in rest:
        found = getattr(found, attribute, None)
    return found if inspect.isclass(found) and issubclass(found, BaseException) else None


@cache
def raised_by(function: Function, depth: int = DEPTH) -> frozenset[type]:
    """The classes of errors that leave a function, of calls up to ``depth`` deep."""
    errors = set()
    for found in contents(function):
        inner: frozenset[type] = frozenset()
        if isinstance(found.what, str):
            kind = error_class(found.what, function)
            inner = frozenset({kind} if kind is not None else ())
        elif depth:
            inner = raised_by(found.what, depth - 1)
        caught = [error_class(name, function) for name in found.caught]
        errors |= {e for e in inner if not any(kind and issubclass(e, kind) for kind in caught)}
    return frozenset(errors - INTERNAL)


def is_named(error: type, text: str) -> bool:
    """Itself or a base class of it, as long as that says what happened; by another docstring if the
    text says that it raises the same."""
    for name in SAME_AS.findall(text):
        others = (getattr(owner, name, None) for owner in (checkpoints, elastic.Run))
        text += "".join(other.__doc__ or "" for other in others if other is not None)
    bases = (kind for kind in error.__mro__ if kind not in (BaseException, Exception, object))
    return any(re.search(rf"\b{kind.__name__}\b", text) for kind in bases)


PROTOCOLS = [
    found
    for module in PUBLIC_MODULES
    for name in public_names(module)
    if getattr(found := getattr(importlib.import_module(module), name), "_is_protocol", False)
]
FUNCTIONS = list(public_functions())


def test_there_are_public_functions_that_raise() -> None:
    assert sum(bool(raised_by(public.function)) for public in FUNCTIONS) >= 40


@pytest.mark.parametrize("public", FUNCTIONS, ids=[public.name for public in FUNCTIONS])
def test_errors_are_in_the_docstring(public: PublicFunction) -> None:
    missing = {e.__name__ for e in raised_by(public.function) if not is_named(e, public.text)}
    assert not missing, f"{public.name} raises {missing}: say so, and when, in its docstring"
