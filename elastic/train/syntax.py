"""Walks and copies syntax trees, several times faster than :mod:`ast` and :mod:`copy`.

A script's functions are analysed before the first step of each loop, by each worker.
"""

from __future__ import annotations

import ast
from typing import Any, TypeVar

_Node = TypeVar("_Node", bound=ast.AST)


# Contexts and operators are nodes without fields; names and numbers are no nodes.
_WITHOUT_NODES = frozenset({"ctx", "op", "ops", "id", "attr", "arg", "type_comment", "kind"})
_fields: dict[type[ast.AST], tuple[str, ...]] = {}


def _fields_with_nodes(kind: type[ast.AST]) -> tuple[str, ...]:
    """Fields of a kind of node that may hold other nodes."""
    if (names := _fields.get(kind)) is None:
        names = tuple(name for name in kind._fields if name not in _WITHOUT_NODES)
        _fields[kind] = names
    return names


def walk(tree: ast.AST) -> list[ast.AST]:
    """The node and all nodes in it as :func:`ast.walk` yields them, breadth first, without
    contexts (``ast.Load()``) and operators (``ast.Add()``)."""
    nodes = [tree]
    for node in nodes:  # it grows
        nodes += children(node)
    return nodes


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes directly in a node, without contexts and operators."""
    nodes: list[ast.AST] = []
    for name in _fields_with_nodes(type(node)):
        value = getattr(node, name, None)
        if type(value) is list:
            nodes += [each for each in value if isinstance(each, ast.AST)]
        elif isinstance(value, ast.AST):
            nodes.append(value)
    return nodes


class Transformer(ast.NodeTransformer):
    """As its base, without visits of contexts and operators."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in _fields_with_nodes(type(node)):
            value = getattr(node, name, None)
            if type(value) is list:
                value[:] = [new for each in value for new in self._visited(each)]
            elif isinstance(value, ast.AST):
                new = self.visit(value)
                if new is None:
                    delattr(node, name)
                else:
                    setattr(node, name, new)
        return node

    def _visited(self, each: object) -> list[object]:
        if not isinstance(each, ast.AST):
            return [each]
        new = self.visit(each)
        if new is None:
            return []
        return [new] if isinstance(new, ast.AST) else list(new)


def copied(node: _Node) -> _Node:
    """A deep copy of a tree. Contexts, operators and what is not a node are shared."""
    kind: Any = type(node)
    if not kind._fields:
        return node
    new: Any = kind.__new__(kind)
    entries = new.__dict__
    for name, value in node.__dict__.items():
        if isinstance(value, ast.AST):
            value = copied(value)
        elif type(value) is list:
            value = [copied(each) if isinstance(each, ast.AST) else each for each in value]
        entries[name] = value
    return new  # type: ignore[no-any-return]
