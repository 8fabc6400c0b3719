"""Loops that count the batches which they request by ``next()``.

``for _ in range(9): x, y = next(batches)`` has nine iterations however many batches of its pass
were trained before a fault: where the pass resumes, all nine are requested again, and nothing
raises an error. A ``for`` loop over the loader itself ends where the interrupted one would have,
also in ``itertools.islice`` and ``zip`` (:mod:`elastic.train.reading`): those ask the loader.

It is decided from the source of the functions that are being called when a pass requests its first
batch. What counts is the outermost loop around ``next()`` that does not also create the iterator:
the loops inside it repeat with it, such as the ``n_critic`` updates of a GAN's step.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import FrameType

from elastic.errors import TrainingError
from elastic.train.carried import assignments
from elastic.train.checks import frames_of_script
from elastic.train.origin import is_installed
from elastic.train.syntax import walk

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Loop = ast.For | ast.AsyncFor | ast.While | _Comprehension
# What a script computes from these continues where the pass does.
_RESUMED = frozenset({"state", "index", "position", "epoch", "epochs", "steps", "attempts"})
_ENDLESS = frozenset({"count", "iter", "cycle", "repeat"})


def refuse_counted_requests(
    frame: FrameType | None, *, has_own_state: bool, in_epochs: bool, is_in_retry: bool
) -> None:
    """Raise TrainingError if the script requests the batches of the pass that begins by ``next()``,
    in a loop that counts from its beginning again where the pass resumes.

    ``frame``: of the loader's iterator. ``has_own_state``: a number that a function is given may
    be computed from run.state. ``in_epochs``: below run.epochs. ``is_in_retry``: the function of
    run.retry is called again; otherwise the script is, and without run.epochs its loop may mean the
    steps of this process.
    """
    if not (is_in_retry or in_epochs):
        return
    name, loops = "", list[tuple[_Loop, FrameType]]()
    for each in frames_of_script(frame):
        if each is None:
            return
        if is_installed(each.f_code):
            return  # it counts in its own way
        tree = _tree_around(each)
        if not name:
            calls = [*_requests(tree, each.f_lineno)]
            if not calls:
                if each.f_code.co_flags & _GENERATOR:
                    continue  # it passes the batches on: its reader may count them
                return
            name = ast.unparse(calls[0].args[0])
        created = [target for target, _ in _given(name, tree)]
        around = [*_loops_around(tree, each.f_lineno)]
        if created:
            shared = [loop for loop in around if all(_contains(loop, n) for n in created)]
            around = [loop for loop in around if loop not in shared]
        loops += [(loop, each) for loop in reversed(around)]
        if created:
            break
        name = _as_argument(name, each) or name
        if name.endswith(")"):
            break  # it is created for this call
    else:
        return
    if not loops:
        return
    loop, where = loops[-1]
    if _counts_again(loop, _tree_around(where), name, has_own_state=has_own_state):
        raise _refusal(loop, name, in_epochs=in_epochs)


_GENERATOR = 0x20  # inspect.CO_GENERATOR


def _tree_around(frame: FrameType) -> ast.AST:
    """The function with the current line of a frame, or the module. A comprehension has a frame of
    its own, but is read within its function."""
    code = frame.f_code
    linecache.getlines(code.co_filename, frame.f_globals)  # of a module that is no file, too
    return _function_at(code.co_filename, frame.f_lineno)


@functools.lru_cache(maxsize=16)
def _function_at(file: str, line: int) -> ast.AST:
    try:
        module = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])  # no source
    functions = [n for n in walk(module) if isinstance(n, _Function) and _has_line(n, line)]
    return max(functions, key=lambda n: n.lineno, default=module)


def _has_line(node: ast.AST, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or line))  # type: ignore[attr-defined]


def _requests(tree: ast.AST, line: int) -> Iterator[ast.Call]:
    """The calls of ``next`` on a line."""
    for node in walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id == "next" and node.args and _has_line(node, line):  # type: ignore[attr-defined]
            yield node  # type: ignore[misc]


def _loops_around(tree: ast.AST, line: int) -> Iterator[_Loop]:
    """The loops that request batches on a line, the outermost first."""
    loops = [n for n in walk(tree) if isinstance(n, _Loop) and _has_line(n, line)]
    for loop in sorted(loops, key=lambda n: (n.lineno, n.col_offset)):
        is_head = isinstance(loop, (ast.For, ast.AsyncFor)) and line < loop.body[0].lineno
        is_other = isinstance(loop, _Comprehension) and not [*_requests(loop, line)]
        if not (is_head or is_other):
            yield loop


def _given(name: str, tree: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """The assignments to a variable or attribute: targets and values."""
    return [pair for pair in assignments(tree) if ast.unparse(pair[0]) == name]


def _contains(loop: ast.AST, node: ast.AST) -> bool:
    return any(inner is node for inner in walk(loop))


def _as_argument(name: str, frame: FrameType) -> str:
    """What the caller passes for a parameter: the iterator, by the caller's name."""
    code, caller = frame.f_code, frame.f_back
    parameters = code.co_varnames[: code.co_argcount]
    if name not in parameters or caller is None:
        return ""
    for call in walk(_tree_around(caller)):
        if not isinstance(call, ast.Call) or not _has_line(call, caller.f_lineno):
            continue
        called = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if called != code.co_name:
            continue
        is_method = isinstance(call.func, ast.Attribute) and parameters[0] in ("self", "cls")
        given = dict(zip(parameters[is_method:], call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if name in given:
            return ast.unparse(given[name])
    return ""


def _counts_again(loop: _Loop, tree: ast.AST, name: str, *, has_own_state: bool) -> bool:
    """Whether a loop has the same number of iterations again where its pass resumes."""
    if isinstance(loop, ast.While):
        return _is_left_by(loop, {*_counters(loop, tree)})
    source = loop.generators[0].iter if isinstance(loop, _Comprehension) else loop.iter
    if _is_resumed(source, tree, name):
        return False
    if isinstance(source, ast.Call):
        called = getattr(source.func, "attr", getattr(source.func, "id", ""))
        if called in _ENDLESS and not (called == "repeat" and len(source.args) > 1):
            return isinstance(loop, ast.For) and _is_left_by(loop, {*_names(loop.target)})
        if called == "range" and len(source.args) > 1 and not _is_constant(source.args[0], tree):
            return False  # it may begin where the pass resumes
    if has_own_state and not _parameters(tree).isdisjoint(_names(source)):
        return False
    return not (_ends_with_pass(loop) and "len(" in ast.unparse(source))


def _counters(loop: ast.While, tree: ast.AST) -> Iterator[str]:
    """The variables that a loop increments, and that are constants before."""
    for node in walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            values = [value for _, value in _given(node.target.id, tree)]
            if values and all(isinstance(value, ast.Constant) for value in values):
                yield node.target.id


def _is_resumed(source: ast.expr, tree: ast.AST, name: str) -> bool:
    """Whether the iterator, the job's state or a loader's position is part of an expression, or of
    what is assigned to its variables."""
    given = [*assignments(tree)]
    left, seen = [source], set[str]()
    while left:
        for node in walk(left.pop()):
            if isinstance(node, ast.Attribute) and node.attr in _RESUMED:
                return True
            if not isinstance(node, ast.Name) or node.id in seen:
                continue
            if node.id in (name, "state"):
                return True
            seen.add(node.id)
            left += [value for target, value in given if node.id in _names(target)]
    return False


def _names(expression: ast.expr) -> Iterator[str]:
    return (n.id for n in walk(expression) if isinstance(n, ast.Name))


def _is_constant(expression: ast.expr, tree: ast.AST) -> bool:
    values = [expression]
    if isinstance(expression, ast.Name):
        values = [value for _, value in _given(expression.id, tree)]
    return bool(values) and all(isinstance(value, ast.Constant) for value in values)


def _parameters(tree: ast.AST) -> set[str]:
    arguments = tree.args if isinstance(tree, _Function) else None
    if arguments is None:
        return set()
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _is_left_by(loop: ast.For | ast.While, counts: set[str]) -> bool:
    """Whether a comparison with a count ends the loop."""
    tests = [loop.test] if isinstance(loop, ast.While) else []
    ways_out = (ast.Break, ast.Return)
    conditions = (n for n in walk(loop) if isinstance(n, ast.If))
    tests += [n.test for n in conditions if isinstance(n.body[-1], ways_out)]
    compared = (n for test in tests for n in walk(test) if isinstance(n, ast.Compare))
    return any(
        isinstance(part, ast.Name) and part.id in counts
        for comparison in compared
        for part in (comparison.left, *comparison.comparators)
    )


def _ends_with_pass(loop: _Loop) -> bool:
    """Whether the loop ends, or its iterator is replaced, where no batch is left."""
    for node in walk(loop):
        caught = node.type if isinstance(node, ast.ExceptHandler) else None
        if caught is not None and "StopIteration" in ast.unparse(caught):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "next" and len(node.args) > 1:
            return True
    return False


def _refusal(loop: _Loop, name: str, *, in_epochs: bool) -> TrainingError:
    if isinstance(loop, ast.While):
        header, count = f"while {ast.unparse(loop.test)}", "n"
    elif isinstance(loop, _Comprehension):
        source = loop.generators[0]
        header = f"for {ast.unparse(source.target)} in {ast.unparse(source.iter)}"
        count = _number_of(source.iter)
    else:
        header = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
        count = _number_of(loop.iter)
    if in_epochs and "len(" in count:
        hint = (
            "for batch in loader:\n"
            f"  or for i in range(loader.index, len(loader)): with next({name})"
        )
    elif in_epochs:
        hint = (
            f"for batch in itertools.islice(loader, {count}):    # ends where that one would have\n"
            f"  or for i in range(loader.index, min({count}, len(loader))): with next({name})"
        )
    else:
        hint = (
            f'while run.state.setdefault("done", 0) < {count}:\n'
            f'    … next({name}) … run.state["done"] += 1\n'
            "  or, with for epoch in run.epochs(…), for batch in itertools.islice(loader, n)"
        )
    return TrainingError(
        f"`{header}` (line {loop.lineno}) counts the batches that next({name}) requests: where the "
        "loop resumes after a fault, it begins again, and the job would train too long",
        hint=hint,
    )


def _number_of(source: ast.expr) -> str:
    """``9`` of ``range(9)``; ``n`` if it is not known."""
    is_range = isinstance(source, ast.Call) and ast.unparse(source.func).endswith("range")
    args = source.args if is_range else []  # type: ignore[attr-defined]
    return ast.unparse(args[0]) if len(args) == 1 else "n"
