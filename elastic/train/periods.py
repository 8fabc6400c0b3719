"""What depends on the count of ``enumerate(loader)``, and is the same wherever the loop resumes.

A loop resumes after a step in which an optimizer has used the gradients, and ``enumerate`` begins
again there. So the last batches of accumulations are the same, ``(i + 1) % 4 == 0``, if all
updates are made in them: the count begins again with an accumulation. ``i % 4 == 0`` is not, nor
is ``(i + 1) % 8 == 0`` then, such as an average of the weights in every second update.

It is computed, for the counts of an epoch: expressions of a count and of numbers that the script
has, such as ``args.accumulate`` and ``len(loader)``, are evaluated with the count as it is without
a fault, and as it is after each update.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import Any

from elastic.train.checks import Loop

_LONGEST = 1 << 16  # batches of an epoch that are considered
_SHORTEST = 64
_UNKNOWN = 7  # for a number that is not known
_DEPTH = 8  # variables that depend on each other
_COMPUTED = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp)
_PARTS = (*_COMPUTED, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_GROWS = (ast.Pow, ast.LShift)
_LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_Test = tuple[ast.expr, bool]  # a condition, and whether it is true
_Scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Periods:
    """Of the counts of a loop. Nodes of its source may have ``number``, a value that the script
    has, ``start`` and ``length``, of a count, and ``updates``, of a call ``….step()``."""

    def __init__(self, loop: Loop) -> None:
        self._values: dict[str, dict[str, ast.expr]] = {}  # that the loop assigns, by their text
        for node in ast.walk(loop):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._values.setdefault(node.id, {})
        for target, value in _assigned(loop):
            self._values[target][ast.dump(value)] = value
        starts = [n for n in ast.walk(loop) if hasattr(n, "start")]
        self._same: dict[str, bool] = {}  # by the text of expressions of a count
        self.counts = frozenset(n.id for n in starts if isinstance(n, ast.Name))
        self._count: Any = starts[0] if len(self.counts) == 1 else None
        if self._count is None:
            return
        self._updates = [*_updates(loop.body, ())]
        tests = [test for tests in self._updates for test, _ in tests]
        self._longest = self._length(tests)

    def without_same(self, node: ast.AST) -> ast.AST:
        """A copy of an expression or statement, without the parts that are the same wherever the
        loop resumes."""
        return _WithoutSame(self).visit(copy.deepcopy(node))  # type: ignore[no-any-return]

    def is_same(self, expression: ast.expr) -> bool:
        """Whether an expression of counts has its value in the same batches wherever the loop
        resumes."""
        if self._count is None or (closed := self._closed(expression)) is None:
            return False
        if not any(isinstance(node, ast.Name) for node in ast.walk(closed)):
            return True
        text = ast.dump(closed)
        if text not in self._same:
            self._same[text] = self._has_period(expression, closed)
        return self._same[text]

    def _has_period(self, expression: ast.expr, closed: ast.expr) -> bool:
        length = max(self._longest, self._length([expression]))
        values = self._evaluated(closed, length)
        if values is None or (_has_unknown(closed) and len(set(values)) == 1):
            return False
        checked: list[int] = []
        for offset in self._offsets(length):
            if any(offset % other == 0 for other in checked):
                continue
            if values[offset:] != values[: length - offset]:
                return False
            checked.append(offset)
        return True

    def _offsets(self, length: int) -> Iterator[int]:
        """After how many batches the loop may resume."""
        if not self._updates or () in self._updates:
            yield 1
            return
        made = [False] * length
        for tests in self._updates:
            now = [True] * length
            for test, is_true in (part for given in tests for part in self._parts(*given)):
                closed = self._closed(test)
                values = None if closed is None else self._evaluated(closed, length)
                if values is not None:
                    now = [a and bool(b) == is_true for a, b in zip(now, values, strict=True)]
            made = [a or b for a, b in zip(made, now, strict=True)]
        yield from (i + 1 for i, is_made in enumerate(made) if is_made)

    def _parts(self, test: ast.expr, is_true: bool, depth: int = 0) -> Iterator[_Test]:
        """The conditions that have to be met for one: those of ``a and b``."""
        if isinstance(test, ast.Name) and len(values := self._values.get(test.id, {})) == 1:
            test = next(iter(values.values()))
        test = test.value if isinstance(test, ast.NamedExpr) else test
        is_split = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == is_true
        if depth < _DEPTH and isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self._parts(test.operand, not is_true, depth + 1)
        elif depth < _DEPTH and isinstance(test, ast.BoolOp) and is_split:
            for value in test.values:
                yield from self._parts(value, is_true, depth + 1)
        else:
            yield test, is_true

    def _length(self, expressions: Sequence[ast.expr]) -> int:
        """How many batches show the periods of expressions."""
        trees = [tree for each in expressions if (tree := self._closed(each)) is not None]
        nodes = (node for tree in trees for node in ast.walk(tree))
        numbers = [n.value for n in nodes if isinstance(n, ast.Constant)]
        largest = max((int(abs(n)) for n in numbers if isinstance(n, (int, float))), default=0)
        length = min(max(2 * largest + 2, _SHORTEST), _LONGEST)
        return length if self._count.length is None else min(length, self._count.length)

    def _evaluated(self, closed: ast.expr, length: int) -> list[Any] | None:
        tree: Any = ast.parse("[0 for count in counts]", mode="eval")
        tree.body.elt = closed
        code = compile(ast.fix_missing_locations(tree), "", "eval")
        counts = range(self._count.start, self._count.start + length)
        try:
            return eval(code, {"counts": counts, "unknown": _UNKNOWN})  # type: ignore[no-any-return]
        except (ArithmeticError, TypeError, ValueError):
            return None

    def _closed(self, node: ast.expr, depth: int = 0) -> Any:
        """The same expression of ``count`` alone, if it depends on nothing else that changes."""
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.Name) and node.id in self.counts:
            return ast.Name("count", ast.Load())
        if isinstance(node, ast.Name) and len(values := self._values.get(node.id, {})) == 1:
            value = next(iter(values.values()))
            return self._closed(value, depth + 1) if depth < _DEPTH else None
        if isinstance(node, _PARTS):
            if isinstance(node, _GROWS):
                return None
            closed = copy.copy(node)
            for name, value in ast.iter_fields(node):
                parts = value if isinstance(value, list) else [value]
                new = [self._closed(part, depth) for part in parts]
                if None in new:
                    return None
                setattr(closed, name, new if isinstance(value, list) else new[0])
            return closed
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if names & self._values.keys():
            return None
        number = getattr(node, "number", None)
        return ast.Name("unknown", ast.Load()) if number is None else ast.Constant(number)


def _has_unknown(closed: ast.AST) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "unknown" for n in ast.walk(closed))


class _WithoutSame(ast.NodeTransformer):
    def __init__(self, periods: Periods) -> None:
        self._periods = periods

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (*_COMPUTED, ast.Name)) and self._periods.is_same(node):
            return ast.Constant(0)
        return self.generic_visit(node)


def _assigned(loop: Loop) -> Iterator[tuple[str, ast.expr]]:
    """The variables that a loop assigns, each with an expression for its value."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and not _is_none(node.value):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for part, value in pairs:
                    for name in (n for n in ast.walk(part) if isinstance(n, ast.Name)):
                        if isinstance(name.ctx, ast.Store):
                            yield name.id, value if name is part else ast.Yield()
        elif isinstance(node, ast.NamedExpr):
            yield node.target.id, node.value
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target, ast.Name):
            is_new = isinstance(node, ast.AnnAssign) and node.value is not None
            yield node.target.id, node.value if is_new else ast.Yield()  # type: ignore[misc]


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _updates(body: Sequence[ast.stmt], tests: tuple[_Test, ...]) -> Iterator[tuple[_Test, ...]]:
    """The conditions of each call in statements by which an optimizer updates weights."""
    for node in body:
        if isinstance(node, _Scopes):
            continue
        own = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
        if any(_is_update(n) for each in own for n in ast.walk(each)):
            yield tests
        if isinstance(node, ast.If):
            yield from _updates(node.body, (*tests, (node.test, True)))
            yield from _updates(node.orelse, (*tests, (node.test, False)))
            for branch, is_true in ((node.body, True), (node.orelse, False)):
                if branch and isinstance(branch[-1], _LEAVES):
                    tests = (*tests, (node.test, not is_true))
            continue
        for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for name in ("body", "orelse", "finalbody"):
                yield from _updates(getattr(part, name, ()), tests)


def _is_update(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(getattr(node, "updates", False))
