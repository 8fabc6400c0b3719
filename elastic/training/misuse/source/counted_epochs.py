"""Refuses ``for epoch in range(n)`` around a loader, in a job that resumes.

After a death, the function of run.retry is called again, or a restarted script resumes from its
checkpoint. It counts from 0, but the loader resumes: the job trains too long. It is certain from
the source if nothing in the loop's body can leave it early or skip an epoch, and if it makes more
than one pass. Other counts are only warned of.

The same applies to ``if i == 9: break`` with the count of ``enumerate(loader)``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from elastic.errors import TrainingError
from elastic.training.misuse.frames import LIBRARIES, frames_of_script, tree_of

_RANGES = ("range", "trange")
_WAYS_OUT = (ast.Break, ast.Continue)
_ENDS = (ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)


def refuse_range(
    passes: int,
    *,
    is_over_loader: bool = True,
    has_own_state: bool = False,
    is_in_retry: bool = True,
) -> None:
    """Raise TrainingError if a range counts the passes over loaders, or without one
    (``is_over_loader=False``) the calls of run.begin. ``passes``: so far in this call of the
    function, including the one that begins. ``has_own_state``: the script keeps values in the job's
    state, from which it may compute how many epochs remain. ``is_in_retry``: the function of
    run.retry is called again; otherwise the script, in a restarted job."""
    found: list[tuple[FrameType, ast.For]] = []
    is_innermost = True
    for frame in frames_of_script(sys._getframe(1)):
        if frame is None:  # the call of run.retry
            break
        if LIBRARIES in frame.f_code.co_filename:
            continue
        tree, line = tree_of(frame), frame.f_lineno
        attempt = max((n.lineno for n in _attempts_around(tree, line)), default=0)
        if any(_is_in_body(line, n) and n.lineno > attempt for n in _whiles(tree)):
            return  # it may count in run.state
        found += [
            (frame, loop)
            for loop in _ranges_around(tree, line, needs_loop=is_innermost and is_over_loader)
            if loop.lineno > attempt and _begins_alike(loop, tree, has_own_state=has_own_state)
        ]
        is_innermost = False
        if attempt:
            break
    else:
        if is_in_retry:
            return  # not called again
    for frame, loop in found:
        count = _arguments(loop)[-1]
        is_given = not has_own_state and _is_name(_without_constant(count))
        if (passes > 1 and is_given) or _value(count, frame) > 1 + _start(loop):
            raise _refusal(
                loop, ast.unparse(count), is_over_loader=is_over_loader, is_in_retry=is_in_retry
            )


def refuse_break() -> None:
    """Raise TrainingError if the loop whose iterator begins is left by a count of ``enumerate``
    that begins at 0 or 1."""
    for frame in frames_of_script(sys._getframe(1)):
        if frame is None:
            return
        for node in ast.walk(tree_of(frame)):
            if not (isinstance(node, ast.For) and _is_head(frame.f_lineno, node)):
                continue
            target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            if not (isinstance(target, ast.Name) and called and _is_named(called, "enumerate")):
                continue
            for inner in _within(node.body):
                if isinstance(inner, ast.If) and _breaks_by(inner, target.id):
                    raise _refusal_of_break(ast.unparse(inner.test))
        return  # the loop is in the innermost frame


def _within(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements of a loop, without those of loops and functions inside."""
    for node in body:
        if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
            yield node
            yield from _within(ast.iter_child_nodes(node))


def _breaks_by(node: ast.If, count: str) -> bool:
    """Whether ``if`` compares this count, and leaves the loop."""
    test = node.test
    if not (isinstance(test, ast.Compare) and isinstance(node.body[-1], ast.Break)):
        return False
    return any(isinstance(n, ast.Name) and n.id == count for n in (test.left, *test.comparators))


def _refusal_of_break(test: str) -> TrainingError:
    return TrainingError(
        f"`if {test}: break` counts from the step at which a loop resumes: after a recovery or a "
        "restart, the epoch would have more steps",
        hint="run.loader(…, max_steps=n), whose epochs end at the same step, or "
        "enumerate(loader, start=loader.index)",
    )


def _whiles(tree: ast.AST) -> Iterator[ast.While]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.While))


def _attempts_around(tree: ast.AST, line: int) -> Iterator[ast.For]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and _is_in_body(line, node):
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "attempts":
                yield node


def _ranges_around(tree: ast.AST, line: int, *, needs_loop: bool) -> Iterator[ast.For]:
    """Loops over ``range(n)`` around the line, without a way out. ``needs_loop``: the line must be
    the head of another loop inside, or the range may count steps."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not _is_in_body(line, node):
            continue
        if needs_loop and not any(_is_head(line, n) for n in ast.walk(node) if n is not node):
            continue
        if _range_of(node.iter) is not None and not _has_way_out(node.body):
            yield node


def _is_in_body(line: int, loop: ast.For | ast.While) -> bool:
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or line)


def _is_head(line: int, node: ast.AST) -> bool:
    is_loop = isinstance(node, ast.For) and _range_of(node.iter) is None
    return is_loop and node.lineno <= line < node.body[0].lineno  # type: ignore[attr-defined]


def _range_of(expression: ast.expr) -> ast.Call | None:
    """The call of ``range``, possibly in a progress bar: ``tqdm(range(n))``."""
    if not isinstance(expression, ast.Call) or not expression.args:
        return None
    if isinstance(expression.func, ast.Name) and expression.func.id in _RANGES:
        return expression
    return _range_of(expression.args[0]) if _is_named(expression.func, "tqdm") else None


def _is_named(function: ast.expr, name: str) -> bool:
    return name in (getattr(function, "id", ""), getattr(function, "attr", ""))


def _begins_alike(loop: ast.For, tree: ast.AST, *, has_own_state: bool) -> bool:
    """Whether the range begins at the same number in each call: ``range(n)``, ``range(1, n)``, or,
    in a script without state of its own, ``range(start, n)`` after ``start = 0``, and
    ``range(args.start_epoch, n)``."""
    first, *others = _arguments(loop)
    if not others or (len(others) == 1 and isinstance(first, ast.Constant)):
        return True
    if len(others) > 1 or has_own_state:
        return False
    if isinstance(first, ast.Attribute):
        return "start" in first.attr
    return isinstance(first, ast.Name) and _constant(first.id, tree) is not None


def _constant(name: str, tree: ast.AST) -> int | None:
    """The integer that the only assignment to a variable of this function gives it."""
    stores = [
        n for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.arg)) and _stored(n) == name
    ]
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    values = [a.value for a in assigned if any(_stored(t) == name for t in a.targets)]
    if len(stores) != 1 or len(values) != 1 or not isinstance(values[0], ast.Constant):
        return None
    return values[0].value if isinstance(values[0].value, int) else None


def _stored(node: ast.AST) -> str:
    if isinstance(node, ast.arg):
        return node.arg
    is_store = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    return node.id if is_store else ""  # type: ignore[attr-defined]


def _without_constant(count: ast.expr) -> ast.expr:
    """``args.epochs`` of ``args.epochs + 1``."""
    is_sum = isinstance(count, ast.BinOp) and isinstance(count.right, ast.Constant)
    return count.left if is_sum else count  # type: ignore[attr-defined]


def _is_name(expression: ast.expr) -> bool:
    return isinstance(expression, (ast.Name, ast.Attribute))


def _arguments(loop: ast.For) -> list[ast.expr]:
    call = _range_of(loop.iter)
    assert call is not None
    return call.args


def _start(loop: ast.For) -> int:
    first, *others = _arguments(loop)
    value = first.value if others and isinstance(first, ast.Constant) else 0
    return value if isinstance(value, int) else 0


def _has_way_out(parts: Iterable[ast.AST], *, is_inner: bool = False) -> bool:
    """Whether these statements may leave the loop that they are in, or skip the rest of its body.
    ``is_inner``: they are in an inner loop."""
    for part in parts:
        if isinstance(part, _ENDS) or (not is_inner and isinstance(part, _WAYS_OUT)):
            return True
        if isinstance(part, (ast.FunctionDef, ast.Lambda)):
            continue
        is_loop = isinstance(part, (ast.For, ast.While))
        inner = part.body if is_loop else []  # type: ignore[attr-defined]
        others = [node for node in ast.iter_child_nodes(part) if node not in inner]
        if _has_way_out(inner, is_inner=True) or _has_way_out(others, is_inner=is_inner):
            return True
    return False


def _value(expression: ast.expr, frame: FrameType) -> int:
    """The value of a constant or a global variable; 0 if it is another expression."""
    value: Any = None
    if isinstance(expression, ast.Constant):
        value = expression.value
    elif isinstance(expression, ast.Name):
        is_local = expression.id in frame.f_code.co_varnames
        value = None if is_local else frame.f_globals.get(expression.id)
    return value if isinstance(value, int) else 0


def _refusal(
    loop: ast.For, count: str, *, is_over_loader: bool, is_in_retry: bool
) -> TrainingError:
    target, counted = ast.unparse(loop.target), ast.unparse(loop.iter)
    what = "the loader" if is_over_loader else "run.begin()"
    first = _start(loop)
    hint = f"for {target} in run.epochs({count}):"
    if first:
        hint = f"for {target} in run.epochs({count} - {first}):    # from 0, not {first}"
    if not is_over_loader:
        hint = (
            f'while run.state.setdefault("{target}", {_start(loop)}) < {count}:\n'
            f'    … run.state["{target}"] += 1, before the last run.commit() of an iteration'
        )
    again = (
        "in the next world run.retry calls its function again, which"
        if is_in_retry
        else "a restarted job resumes from its last checkpoint, but the range"
    )
    return TrainingError(
        f"`for {target} in {counted}` around {what}: {again} would count from {_start(loop)} and "
        "train too long",
        hint=hint,
    )
