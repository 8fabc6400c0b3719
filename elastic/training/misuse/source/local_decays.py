"""Warns of a local or global variable that decays from step to step: ``epsilon *= 0.99``.

A teacher-forcing ratio, a temperature, the exploration of an agent: ``run.retry`` calls its
function again after a death, so a local variable restarts, and a global one is that of the script's
beginning on a joining node. It is found in the source of the functions that are being called: an
update from the variable itself and constants, in the loop around the current line, as its only
assignment there, of a variable that is used for more than printing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

from elastic.telemetry.log import get_logger
from elastic.training.misuse.frames import frames_of_script, tree_of

_LOOPS = (ast.For, ast.While)
_ONLY_SHOWN = ("print", "log", "info", "debug", "add_scalar", "set_postfix", "format", "append")
_BOUNDS = ("min", "max")


def warn_of_decays(frame: FrameType | None) -> None:
    """Warn of the first variable that decays in the script's functions, up to run.retry."""
    *frames, last = [*frames_of_script(frame)] or [None]
    if last is not None:
        return  # the functions are not called again
    for one in filter(None, frames):
        for name, update in _decays(tree_of(one), one.f_lineno):
            get_logger().warning(
                "`%s` in %s: after a death, run.retry calls its function again, and %s restarts or "
                "differs between ranks. Keep it in run.state: run.state.setdefault(%r, …) before "
                "the loop, and run.state[%r] in it",
                ast.unparse(update),
                one.f_code.co_name,
                name,
                name,
                name,
            )
            return


def _decays(tree: ast.AST, line: int) -> Iterator[tuple[str, ast.stmt]]:
    loops = [n for n in ast.walk(tree) if isinstance(n, _LOOPS)]
    around = [n for n in loops if n.lineno <= line <= (n.end_lineno or n.lineno)]
    if not around:
        return
    outermost = min(around, key=lambda n: n.lineno)
    inside = set(map(id, ast.walk(outermost)))
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and _is_store(n)]
    changing = {n.id for n in stored if id(n) in inside}
    shared = {name for n in ast.walk(tree) if isinstance(n, ast.Global) for name in n.names}
    for node in ast.walk(outermost):
        name = _updated(node, changing)
        if not name or sum(n.id == name and id(n) in inside for n in stored) != 1:
            continue
        assert isinstance(node, ast.stmt)
        if (name in shared or _begins_constant(name, tree, inside)) and _is_used(
            name, outermost, node
        ):
            yield name, node


def _updated(node: ast.AST, changing: set[str]) -> str:
    """The variable that a statement computes from itself and from constants; "" if none."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        is_count = isinstance(node.op, ast.Add) and _is_one(node.value)
        is_fixed = not _names(node.value) & changing and not _calls(node.value)
        return node.target.id if is_fixed and not is_count else ""
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
        return ""
    target = node.targets[0]
    if not isinstance(target, ast.Name):
        return ""
    is_fixed = _names(node.value) & changing == {target.id}
    calls = [c for c in ast.walk(node.value) if isinstance(c, ast.Call)]
    is_bounded = all(isinstance(c.func, ast.Name) and c.func.id in _BOUNDS for c in calls)
    is_arithmetic = any(
        isinstance(n, ast.BinOp) and target.id in _names(n) and not _counts(n)
        for n in ast.walk(node.value)
    )
    return target.id if is_fixed and is_bounded and is_arithmetic else ""


def _counts(node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.Add) and (_is_one(node.right) or _is_one(node.left))


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _calls(node: ast.expr) -> bool:
    return any(isinstance(n, (ast.Call, ast.Subscript)) for n in ast.walk(node))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - set(_BOUNDS)


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _begins_constant(name: str, tree: ast.AST, inside: set[int]) -> bool:
    """Whether a number is assigned to the variable, outside of the loop and nothing else is."""
    values = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign)
        and id(n) not in inside
        and any(isinstance(t, ast.Name) and t.id == name for t in n.targets)
    ]
    return len(values) == 1 and isinstance(values[0], ast.Constant)


def _is_used(name: str, loop: ast.AST, update: ast.stmt) -> bool:
    """Whether the loop uses the variable elsewhere, for more than showing it."""
    others: set[int] = set(map(id, ast.walk(update)))
    for node in ast.walk(loop):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in _ONLY_SHOWN:
                others |= set(map(id, ast.walk(node)))
    uses = (n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.id == name)
    return any(id(n) not in others for n in uses)
