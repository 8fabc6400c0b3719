"""Refuses copies of the trained weights that the function of run.retry makes before its loop.

``reference = copy.deepcopy(policy)`` is DPO's reference model, or the anchor of a penalty. In the
next world run.retry calls its function again, and the copy would be one of the weights trained so
far. Nothing raises an error. It is certain from the source if the copied module existed before
run.retry, the loop uses the copy, and the script overwrites no weights: then it is no mere buffer
for an evaluation. Otherwise a warning is logged.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType

from torch import nn

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.training.misuse.frames import frames_of_script, tree_of

_COPIES = ("deepcopy", "clone")
_KEEPERS = ("track", "wrap")  # of a run: the copy is state of the job
_OVERWRITES = ("load_state_dict", "copy_(", "lerp_(", "swap_")


@dataclass(frozen=True)
class _Copy:
    name: str  # of the variable or attribute
    value: str  # the expression that is assigned


def refuse_copies(
    modules: Iterable[nn.Module], call: Sequence[tuple[str, object]], frame: FrameType | None = None
) -> None:
    """Raise TrainingError for a copy of one of the wrapped ``modules``. Called in the first step.

    ``call``: the function of run.retry, and its arguments by name. ``frame``: the caller's.
    """
    frames = list(frames_of_script(frame or sys._getframe(1)))
    if not frames or frames[-1] is not None:
        return  # the function is not called again
    trained = {id(p) for module in modules for p in module.parameters() if p.requires_grad}
    for one in frames:
        if one is None:
            return
        function = next((n for n in ast.walk(tree_of(one)) if _is_function(n, one.f_code)), None)
        if function is None:
            continue
        for copied in _copies(function, one.f_lineno, _variables(one, call), trained):
            _refuse(copied, is_certain=not _overwrites(one))


def _refuse(copied: _Copy, *, is_certain: bool) -> None:
    what = (
        f"`{copied.name} = {copied.value}` in the function of run.retry: in the next world it is "
        "called again, and would copy the weights trained until then"
    )
    short = copied.name.rpartition(".")[2]
    hint = (
        f"make the copy before run.retry, and track it, unless it is loaded from a file:\n"
        f"    {copied.name} = {copied.value}\n"
        f"    run.track({short}={copied.name})"
    )
    if is_certain:
        raise TrainingError(what, hint=hint)
    get_logger().warning("%s\n  %s", what, hint)


def _is_function(node: ast.AST, code: CodeType) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == code.co_name


def _variables(frame: FrameType, call: Sequence[tuple[str, object]]) -> Mapping[str, object]:
    """Variables of a function whose values existed before run.retry: global ones and, in its own
    function, arguments and variables of the enclosing function."""
    code = frame.f_code
    found = dict(frame.f_globals)
    for name in code.co_varnames:
        found.pop(name, None)
    _, function = call[0] if call else ("", None)
    owner = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    if isinstance(plain, FunctionType) and plain.__code__ is code:
        cells = zip(code.co_freevars, plain.__closure__ or (), strict=False)
        found |= {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
        found |= {name: value for name, value in call[1:] if name}
    first = code.co_varnames[0] if code.co_argcount else ""
    if owner is not None and first:
        own = inspect.getattr_static(type(owner), code.co_name, None)
        if getattr(own, "__code__", None) is code:
            found[first] = owner
    return found


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _copies(
    function: ast.AST, line: int, variables: Mapping[str, object], trained: set[int]
) -> Iterator[_Copy]:
    loops = (n for n in ast.walk(function) if isinstance(n, (ast.For, ast.While)))
    around = (n.lineno for n in loops if n.lineno <= line <= (n.end_lineno or line))
    loop = min(around, default=None)
    if loop is None:
        return
    for statement in _before(function, loop):
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        if not isinstance(target, (ast.Name, ast.Attribute)):
            continue
        name = ast.unparse(target)
        calls = [n for n in ast.walk(statement.value) if isinstance(n, ast.Call)]
        is_copy = any(_name_of(c.func) in _COPIES for c in calls)
        if not is_copy or not any(_is_trained(n, variables, trained) for n in _copied(calls)):
            continue
        if any(_name_of(c.func) in _KEEPERS for c in calls) or _is_kept(function, name):
            continue
        if any(_is_use(n, name, after=loop) for n in ast.walk(function)):
            yield _Copy(name, ast.unparse(statement.value))


def _before(function: ast.AST, loop: int) -> Iterator[ast.stmt]:
    """The statements before the loop, also those in `if` and `with`."""
    left = list(getattr(function, "body", ()))
    while left:
        statement = left.pop(0)
        if statement.lineno >= loop:
            return
        if isinstance(statement, (ast.If, ast.With)):
            left[:0] = [*statement.body, *getattr(statement, "orelse", ())]
        else:
            yield statement


def _copied(calls: Iterable[ast.Call]) -> Iterator[ast.expr]:
    """The expressions whose weights may be copied: of ``deepcopy(model)`` and
    ``deepcopy(model.state_dict())``, and of ``[p.clone() for p in model.parameters()]``."""
    for call in calls:
        if _name_of(call.func) == "deepcopy" and call.args:
            yield call.args[0]
        if isinstance(call.func, ast.Attribute) and call.func.attr in (
            "parameters",
            "named_parameters",
            "state_dict",
        ):
            yield call.func.value


def _is_trained(expression: ast.expr, variables: Mapping[str, object], trained: set[int]) -> bool:
    found = _value(expression, variables)
    return isinstance(found, nn.Module) and any(id(p) in trained for p in found.parameters())


def _value(expression: ast.expr, variables: Mapping[str, object]) -> object:
    """The value of a variable or of its attributes, without calling any code of the script."""
    if isinstance(expression, ast.Name):
        return variables.get(expression.id)
    if not isinstance(expression, ast.Attribute):
        return None
    owner = _value(expression.value, variables)
    known = dict(getattr(owner, "__dict__", None) or {})
    if isinstance(owner, nn.Module):
        known |= dict(owner.named_children())
    return known.get(expression.attr)


def _is_kept(function: ast.AST, name: str) -> bool:
    """Whether the function passes the copy to run.track or run.wrap."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and _name_of(call.func) in _KEEPERS:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if name in map(ast.unparse, given):
                return True
    return False


def _is_use(node: ast.AST, name: str, *, after: int) -> bool:
    if not isinstance(node, (ast.Name, ast.Attribute)) or node.lineno < after:
        return False
    return isinstance(node.ctx, ast.Load) and ast.unparse(node) == name


def _name_of(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _overwrites(frame: FrameType) -> bool:
    """Whether the script's file may overwrite the weights of a copy anywhere."""
    try:
        source = Path(frame.f_code.co_filename).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True
    return any(word in source for word in _OVERWRITES)
