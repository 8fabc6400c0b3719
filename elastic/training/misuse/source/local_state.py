"""Warns of local variables of the training function on which the training depends.

``completed_steps = 0`` before the loop, ``completed_steps += 1`` in it, and ``if completed_steps >=
max_train_steps: break``: in the next world run.retry calls its function again, the loop resumes,
but the count begins anew, and the job trains too long. The same applies to a sequence length that
grows with the count, and to ``rng = random.Random(0)``, which selects the loader of each batch. It
is read from the source, and it is not refused, because the loop may end before. Counts that are
only printed, or that select the batches of an accumulation, cause no warning.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import FrameType

from elastic.telemetry.log import get_logger
from elastic.training.misuse.frames import frames_of_script, tree_of
from elastic.training.misuse.untracked_generators import REMEDY

Loop = ast.For | ast.While

_REPORTS = (
    *("print", "log", "info", "debug", "warning", "write", "format", "add_scalar", "add_scalars"),
    *("set_postfix", "set_description", "log_metrics", "log_dict"),
)
_GENERATORS = ("Random", "default_rng", "RandomState", "Generator")
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def warn_of_local_state(frame: FrameType | None = None) -> None:
    """Called in the first step of a process. ``frame``: the caller's."""
    frames = list(frames_of_script(frame or sys._getframe(1)))
    if not frames or frames[-1] is not None:
        return  # the function is not called again
    for one in frames:
        if one is None:
            return
        for function in ast.walk(tree_of(one)):
            if isinstance(function, ast.FunctionDef) and function.name == one.f_code.co_name:
                _warn_of(function, one.f_lineno)
                break


def _warn_of(function: ast.FunctionDef, line: int) -> None:
    for name, first in _counters(function, line):
        _warn_of_counter(name, first, function.name)
    for name in _generators(function, line):
        get_logger().warning(
            "%s begins anew when run.retry calls %s again in the next world, while the loop "
            "resumes: it would draw the numbers of the first steps. %s",
            name,
            function.name,
            REMEDY,
        )


def _warn_of_counter(name: str, first: int, function: str) -> None:
    get_logger().warning(
        "%s counts from %d again when run.retry calls its function again in the next world, while "
        'the loop resumes. Call run.state.setdefault("%s", %d) in %s, and count in run.state["%s"]',
        name,
        first,
        name,
        first,
        function,
        name,
    )


def _counters(function: ast.FunctionDef, line: int) -> Iterator[tuple[str, int]]:
    """The names of such counters, and their first values."""
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    around = _loops_around(function, line)
    if not around:
        return
    seen: set[str] = set()
    for node in ast.walk(around[0]):
        if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Name):
            continue
        name, loop = node.target.id, _loop_of(node, parents)
        is_count = isinstance(node.op, ast.Add) and _integer(node.value) is not None
        if not is_count or loop not in around or name in seen:
            continue
        first = _first_value(function, name, loop)
        if first is None:
            continue
        is_reset = any(_assigns(n, name) for n in ast.walk(loop))
        is_counted_always = parents[node] is loop and not is_reset
        uses = [n for n in ast.walk(around[0]) if isinstance(n, ast.Name) and n.id == name]
        loads = [n for n in uses if isinstance(n.ctx, ast.Load)]
        if any(_decides_on_the_end(n, parents) for n in loads) or (
            is_counted_always and any(_matters(n, parents) for n in loads)
        ):
            seen.add(name)
            yield name, first


def _generators(function: ast.FunctionDef, line: int) -> Iterator[str]:
    """The names of random generators that are created before the loop, and used in it."""
    around = _loops_around(function, line)
    for node in ast.walk(function) if around else ():
        if not isinstance(node, ast.Assign) or node.lineno >= around[0].lineno:
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Name) or not isinstance(node.value, ast.Call):
            continue
        calls = [n for n in ast.walk(node.value) if isinstance(n, ast.Call)]
        if not any(_called(call) in _GENERATORS for call in calls):
            continue
        uses = [n for n in ast.walk(around[0]) if isinstance(n, ast.Name) and n.id == target.id]
        is_seeded = any(
            isinstance(n, ast.Attribute)
            and n.attr in ("seed", "manual_seed", "set_state")
            and n.value in uses
            for n in ast.walk(around[0])
        )
        if uses and not is_seeded:
            yield target.id


def _loops_around(function: ast.FunctionDef, line: int) -> list[Loop]:
    """The outermost first."""
    loops = [n for n in ast.walk(function) if isinstance(n, (ast.For, ast.While))]
    return [n for n in loops if n.lineno <= line <= (n.end_lineno or line)]


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _loop_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST | None:
    """The innermost loop around a node; None in a function inside."""
    while (node := parents.get(node, node)) in parents:
        if isinstance(node, Loop):
            return node
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            return None
    return None


def _first_value(function: ast.FunctionDef, name: str, loop: ast.AST) -> int | None:
    """The constant that a local variable is set to before the loop, and nothing else."""
    values = []
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return None
        if _assigns(node, name) and node.lineno < loop.lineno:  # type: ignore[attr-defined]
            values.append(_integer(node.value))  # type: ignore[attr-defined]
    return values[-1] if values and None not in values else None


def _assigns(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(n, ast.Name) and n.id == name
        for target in node.targets
        for n in ast.walk(target)
    )


def _integer(expression: ast.expr) -> int | None:
    value = expression.value if isinstance(expression, ast.Constant) else None
    return value if type(value) is int else None


def _decides_on_the_end(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a comparison with the count ends a loop: ``if n >= limit: break``, or ``while``."""
    node, compares = use, False
    while (parent := parents.get(node)) is not None and not isinstance(node, ast.stmt):
        compares = compares or isinstance(node, ast.Compare)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return False
        if isinstance(parent, ast.While) and node is parent.test:
            return compares
        if isinstance(parent, ast.If) and node is parent.test:
            ends = (ast.Break, ast.Return)
            return compares and any(isinstance(n, ends) for n in parent.body)
        node = parent
    return False


def _matters(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a computation depends on the count, and not only a message or a remainder."""
    node, matters = use, False
    while (parent := parents.get(node)) is not None and not isinstance(node, ast.stmt):
        if isinstance(parent, ast.BinOp):
            if isinstance(parent.op, ast.Mod):
                return False
            is_divisor = isinstance(parent.op, ast.Div) and node is parent.right
            matters = matters or not is_divisor
        elif isinstance(parent, ast.Compare):
            matters = matters or isinstance(parent.ops[0], _ORDERS)
        elif isinstance(parent, ast.Subscript):
            matters = matters or node is parent.slice
        elif isinstance(parent, ast.JoinedStr):
            return False
        elif isinstance(parent, ast.Call):
            if _called(parent) in _REPORTS:
                return False
            matters = matters or node is not parent.func
        node = parent
    return matters
