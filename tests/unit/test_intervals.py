"""Every interval is defined once, with its reason; no module reads the environment at import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PLACES = (
    *(
        REPOSITORY / "elastic" / "tuning" / f"{name}.py"
        for name in ("timeouts", "agent_intervals", "worker_intervals", "doctor_intervals")
    ),
    REPOSITORY / "checkpoints" / "intervals.py",
)
# Files that define intervals of their own, and why.
OWN_PLACES = {
    "elastic/secure_channel/limits.py": "secure channels import only the standard library",
    "elastic/node/orphan_reaper.py": "the reaper runs as a script, without this package",
}
# The limits of the test kits do not apply to jobs.
TEST_KITS = ("elastic/testing/", "checkpoints/testing/")
_SUFFIX = re.compile(
    r"(?i)_(s|ms|us|interval|timeout|deadline|patience|seconds|attempts|retries|tries|backoff)$"
)
_PER_SECOND = re.compile(r"(?i)_per_s$")  # rates


def is_interval(name: str) -> bool:
    return bool(_SUFFIX.search(name)) and not _PER_SECOND.search(name)


def sources() -> Iterator[tuple[str, ast.Module]]:
    packages = (REPOSITORY / "elastic", REPOSITORY / "checkpoints")
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        name = path.relative_to(REPOSITORY).as_posix()
        yield name, ast.parse(path.read_text(), filename=name)


def has_number(value: ast.expr | None) -> bool:
    """Whether it is a number above zero: 0 is a start, or means no limit."""
    return value is not None and any(
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
        and node.value > 0
        for node in ast.walk(value)
    )


def intervals(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Constants of modules and classes, and defaults of parameters, that hold a number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                yield from assigned(statement)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from defaults(node.args)


def assigned(statement: ast.stmt) -> Iterator[tuple[str, int]]:
    if isinstance(statement, ast.Assign):
        targets = [node for target in statement.targets for node in ast.walk(target)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        names = [statement.target.id]
    else:
        return
    if has_number(statement.value):
        yield from ((name, statement.lineno) for name in names if is_interval(name))


def defaults(arguments: ast.arguments) -> Iterator[tuple[str, int]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    given = positional[len(positional) - len(arguments.defaults) :]
    pairs = [
        *zip(given, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if is_interval(argument.arg) and has_number(default):
            yield argument.arg, argument.lineno


# Waits of the standard library, of tenacity and of clocks: their numbers are intervals.
_WAITING = {
    "sleep",
    "wait",
    "join",
    "serve_forever",
    "stop_after_delay",
    "wait_fixed",
    "wait_exponential",
    "wait_random_exponential",
    "Timer",
    "settimeout",
}
_MOMENT = re.compile(r"(?i)(^|[._])(now|began|monotonic|time)(_s)?(\(\))?$")


def literal_intervals(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Literal intervals in code: arguments of waits, ``within_s=5.0``, ``now + 5.0``, and bounds of
    durations."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                given = [k for k in node.keywords if is_interval(k.arg or "")]
                if name in _WAITING:
                    keywords = [k.value for k in node.keywords if k.arg != "exp_base"]
                    literals = [v for v in (*node.args, *keywords) if holds_literal(v)]
                elif name == "Thread":
                    target = [ast.unparse(k.value) for k in node.keywords if k.arg == "target"]
                    waits = any(t.rpartition(".")[2] in _WAITING for t in target)
                    literals = [
                        k.value
                        for k in node.keywords
                        if k.arg == "args" and waits and holds_literal(k.value)
                    ]
                elif name in ("min", "max") and any(is_duration(v) for v in node.args):
                    literals = [v for v in node.args if holds_literal(v) and not is_epsilon(v)]
                elif name == "add_argument" and _of_interval(node):
                    literals = [
                        k.value
                        for k in node.keywords
                        if k.arg == "default" and holds_literal(k.value)
                    ]
                else:
                    literals = [k.value for k in given if holds_literal(k.value)]
                yield from ((f"{name}(… {ast.unparse(v)} …)", node.lineno) for v in literals)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                if _MOMENT.search(ast.unparse(left)) and holds_literal(right):
                    yield ast.unparse(node), node.lineno


def _of_interval(node: ast.Call) -> bool:
    """Whether it defines an option for an interval: ``--timeout-s``."""
    names = [a.value for a in node.args if isinstance(a, ast.Constant)]
    return any(is_interval(str(name).replace("-", "_")) for name in names)


def is_duration(value: ast.expr) -> bool:
    """Whether an expression is in seconds, by its names; a ratio of two durations is not."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        return False
    if isinstance(value, ast.Call) and ast.unparse(value.func) in (
        "round",
        "math.ceil",
        "math.floor",
    ):
        return False
    names = [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
    names += [n.attr for n in ast.walk(value) if isinstance(n, ast.Attribute)]
    return any(is_interval(name) for name in names)


def is_epsilon(value: ast.expr) -> bool:
    """A constant that keeps a divisor above zero."""
    return isinstance(value, ast.Constant) and isinstance(value.value, float) and value.value < 1e-4


def holds_literal(value: ast.expr) -> bool:
    """A number, a product or quotient of numbers, or a conditional with one."""
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            return holds_literal(body) or holds_literal(orelse)
        case ast.Tuple(elts=elements):
            return any(map(holds_literal, elements))
        case ast.BinOp(left=left, right=right):
            return holds_literal(left) and holds_literal(right)
        case ast.Call(func=ast.Name(id="min" | "max"), args=arguments):
            return any(map(holds_literal, arguments))
    return isinstance(value, ast.Constant) and has_number(value)


def read_when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes evaluated at import: defaults of functions, but not their bodies."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                yield from read_when_imported(default)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from read_when_imported(child)


def reads_environment(node: ast.AST) -> bool:
    """``os.environ[...]``, ``os.environ.get(...)``, ``os.getenv(...)``, or an argument.

    ``env: Mapping[str, str] = os.environ`` as a default binds the mapping, and reads nothing.
    """
    if isinstance(node, ast.Call):
        touched = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Subscript):
        touched = [node.value]
    else:
        return False
    said = [ast.unparse(one) for one in touched]
    return any(text.startswith(("os.environ", "os.getenv", "environ")) for text in said)


def test_intervals_are_defined_in_their_modules() -> None:
    found = [
        f"{name}:{line}: {constant}"
        for name, tree in sources()
        if REPOSITORY / name not in PLACES
        and name not in OWN_PLACES
        and not name.startswith(TEST_KITS)
        for constant, line in intervals(tree)
    ]
    assert found == [], "move these to elastic/tuning or checkpoints/intervals.py, with reasons"


def test_code_has_no_literal_intervals() -> None:
    found = [
        f"{name}:{line}: {code}"
        for name, tree in sources()
        if not name.startswith(TEST_KITS)
        for code, line in literal_intervals(tree)
    ]
    assert found == [], "name these in elastic/tuning or checkpoints/intervals.py, with reasons"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("clock.sleep(0.1)", 1),
        ("process.wait(timeout=0.2)", 1),
        ("process.wait(SLICE_S)", 0),
        ("event.wait(0.0)", 0),
        ("server.serve_forever(0.05)", 1),
        ("Thread(target=server.serve_forever, args=(0.05,))", 1),
        ("Thread(target=work, args=(1,))", 0),
        ("tenacity.wait_random_exponential(multiplier=0.5, max=CAP_S)", 1),
        ("tenacity.wait_fixed(PAUSE_S)", 0),
        ("until_s = now + 5.0", 1),
        ("until_s = clock.monotonic() + 2 * 5", 1),
        ("soon = now + (RECHECK_S if silent else 5.0)", 1),
        ("until_s = now + RECHECK_S", 0),
        ("max(until_s - now_s, 0.05)", 1),
        ("max(count, 5)", 0),
        ("max(1e-9, end_s - start_s)", 0),
        ("min(1.0, busy_s / whole_s)", 0),
        ("find(within_s=5.0)", 1),
        ("parser.add_argument('--timeout-s', type=float, default=300.0)", 1),
        ("parser.add_argument('--count', default=3)", 0),
    ],
)
def test_literal_intervals_are_recognised(source: str, count: int) -> None:
    assert len(list(literal_intervals(ast.parse(source)))) == count


def test_no_interval_has_an_alias() -> None:
    """``_WAIT_S = WAIT_S``: a reader would have to look it up twice."""
    found = [
        f"{name}:{statement.lineno}: {ast.unparse(statement)}"
        for name, tree in sources()
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and re.fullmatch(r"[A-Z_]+_(S|MS)", statement.value.id)
        and REPOSITORY / name not in PLACES
    ]
    assert found == []


def test_exceptions_for_own_intervals_are_still_needed() -> None:
    for name in OWN_PLACES:
        assert list(intervals(ast.parse((REPOSITORY / name).read_text())))


@pytest.mark.parametrize("place", PLACES, ids=lambda path: path.stem)
def test_every_interval_has_a_comment_in_full_sentences(place: Path) -> None:
    """docs/timeouts.md prints each comment alone, so that each has to be complete."""
    lines = place.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for statement in (s for body in (tree.body, *(c.body for c in classes)) for s in body):
        for name, line in assigned(statement):
            if name.startswith("_"):
                continue
            first = line - 1
            while lines[first - 1].strip().startswith("# "):
                first -= 1
            reason = " ".join(text.strip().removeprefix("# ") for text in lines[first : line - 1])
            said = f"{place.name}:{line}: {name}: {reason}"
            assert re.fullmatch(r"[A-Z`].{10,}\.", reason), said


def test_no_interval_is_defined_twice() -> None:
    statements = (s for place in PLACES for s in ast.parse(place.read_text()).body)
    names = [name for statement in statements for name, _ in assigned(statement)]
    assert len(names) == len(set(names))


def test_no_module_reads_the_environment_at_import() -> None:
    found = [
        f"{name}:{getattr(node, 'lineno', 0)}"
        for name, tree in sources()
        for statement in tree.body
        for node in read_when_imported(statement)
        if reads_environment(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("WAIT_S = 2.0", 1),
        ("_RETRY_MS: int = 2 * 5", 1),
        ("LIMIT_S = {1: 2.0}", 1),
        ("LIMIT_S, FACTOR = 10.0, 2.0", 1),
        ("class A:\n    wait_s: float = 1.0", 1),
        ("def f(*, within_s: float = 5.0) -> None: ...", 1),
        ("START_S = 0.0", 0),
        ("BYTES_PER_S = 5", 0),
        ("WAIT_S = timeouts.WAIT_S", 0),
        ("def f() -> None:\n    until_s = 5.0", 0),
    ],
)
def test_intervals_are_recognised(source: str, count: int) -> None:
    assert len(list(intervals(ast.parse(source)))) == count


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("import os\nA = os.environ['X']", True),
        ("A = of_environment(os.environ)", True),
        ("class C:\n    a = os.getenv('X')", True),
        ("def f(env=os.environ.get('X')): ...", True),
        ("def f(env=os.environ): return env['X']", False),
    ],
)
def test_reads_of_the_environment_are_recognised(source: str, is_read: bool) -> None:
    nodes = (n for s in ast.parse(source).body for n in read_when_imported(s))
    assert any(map(reads_environment, nodes)) == is_read
