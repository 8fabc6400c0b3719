"""Scripts whose results would be wrong after a fault: found at their first use."""

from __future__ import annotations

import ast
import ctypes
import dis
import functools
import hashlib
import inspect
import linecache
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
)
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import get_worker_info

from checkpoints.tensors import is_dtensor, local_of
from elastic.errors import ConfigError, TrainingError
from elastic.groups.collectives import all_gather_json
from elastic.groups.world import World
from elastic.telemetry.log import get_logger
from elastic.train.origin import is_installed, is_own
from elastic.train.rollback import contents
from elastic.train.state import JobState
from elastic.train.syntax import walk
from elastic.train.untracked import saved_optimizers

# ----------------------------------------------------------------------------
# Determines how the script has left a loop over one of our generators.
#
# Python closes a generator in three cases that it does not distinguish: the loop was left by
# `break` or `return`, an exception passes through the function, or the last reference is gone.

# The instruction that removes a loop's iterator: POP_ITER since Python 3.14.
_REMOVES_ITERATOR = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}


def is_left_on_purpose() -> bool:
    """Whether the script is in a `break` or `return` that leaves the loop over the calling
    generator.

    False if that is unknown, as for a generator in a variable. A generator around it, such as a
    progress bar's, is closed first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_own(code):
            if code.co_code[frame.f_lasti] in _REMOVES_ITERATOR:
                return True
            if not code.co_flags & inspect.CO_GENERATOR:
                return False
        frame = frame.f_back
    return False


# ----------------------------------------------------------------------------
# The script's frames, and their variables.


def frames_of_script(frame: FrameType | None) -> Iterator[FrameType | None]:
    """From the loop over the loader to the call of run.retry, which is None."""
    has_begun = False
    while frame is not None:
        if not is_own(frame.f_code):
            has_begun = True
            yield frame
        elif has_begun:
            if frame.f_code.co_name == "retry":
                yield None
            return
        frame = frame.f_back


def variables(frame: FrameType) -> Iterator[dict[str, object]]:
    """The variables of each frame of the script, and the global ones of its modules."""
    modules: set[int] = set()
    for one in frames_of_script(frame):
        if one is None or is_installed(one.f_code):
            continue
        if one.f_code.co_flags & inspect.CO_OPTIMIZED:
            yield local_variables(one)
        if id(one.f_globals) not in modules:
            modules.add(id(one.f_globals))
            yield one.f_globals


def local_variables(frame: FrameType) -> dict[str, object]:
    """A copy of a function's variables, or of a module's.

    Before Python 3.13, ``f_locals`` is one dict per call, which the function gets from
    ``locals()``, too, and which would keep the objects alive, such as a loss or the iterator of a
    loader. So it is emptied, and not read of a function that may hold it.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)  # a copy, or the variables of a module or class
    if _may_hold_locals(frame.f_code):
        return {}
    live = frame.f_locals
    copied = dict(live)
    if not _is_in_trace_function(frame):
        live.clear()
        # Having been read, it would be filled again at the frame's next traced line, and keep that
        # content (Python 3.11). With an empty dict, this assigns nothing, and only ends that.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)
    return copied


def _is_in_trace_function(frame: FrameType) -> bool:
    """Whether a debugger has stopped in the frame. It has the dict, whose values become the frame's
    variables when the trace function returns: emptied, the frame would lose them."""
    callee: FrameType | None = sys._getframe(1)
    while callee is not None and callee.f_back is not frame:
        callee = callee.f_back
    if callee is None or frame.f_trace is None:
        return False
    return callee.f_code is getattr(frame.f_trace, "__code__", callee.f_code)


@functools.cache
def _may_hold_locals(code: CodeType) -> bool:
    """Whether a function calls ``locals()`` or its like: not the method ``model.eval()``."""
    instructions = dis.get_instructions(code)
    names = {n.argval for n in instructions if n.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return not names.isdisjoint({"locals", "vars", "eval", "exec"})


def assigned_globals(frame: FrameType) -> frozenset[str]:
    """The global variables that functions of the script assign (``global step``), of those that are
    being called. Variables of a loop at the top level of a module are not among them."""
    calls = [one.f_code for one in frames_of_script(frame) if one is not None]
    return frozenset().union(*map(_assigned_globals, calls))


@functools.cache
def _assigned_globals(code: CodeType) -> frozenset[str]:
    stores = (one for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
    return frozenset(one.argval for one in stores)


def tree_of(frame: FrameType) -> ast.AST:
    """The source of a frame's function, with the line numbers of its file; empty if unknown."""
    code = frame.f_code
    linecache.getlines(code.co_filename, frame.f_globals)  # of a module that is no file, too
    return parsed(code, code.co_filename)  # equal code may be in two files


@functools.lru_cache(maxsize=16)  # several checks read the functions of one call
def parsed(code: CodeType, file: str) -> ast.AST:
    """The source of a function, or the statement around a lambda or a comprehension."""
    tree = tree_of_file(file)
    if code.co_name == "<module>":
        return tree
    statements = [n for n in walk(tree) if isinstance(n, ast.stmt)]
    around = [n for n in statements if _first_line(n) <= code.co_firstlineno <= _last_line(n)]
    if not code.co_name.startswith("<"):
        around = [n for n in around if getattr(n, "name", "") == code.co_name]
    return ast.Module(body=around[-1:], type_ignores=[])  # the innermost is the last


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", ())
    return min((d.lineno for d in decorators), default=statement.lineno)


def _last_line(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def tree_of_file(file: str) -> ast.AST:
    """The source of a file; empty if it is unknown."""
    return _tree_of_source("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=16)
def _tree_of_source(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def state_of_place(user: Mapping[str, object]) -> dict[str, object]:
    """The entries of ``run.state`` in ``at=…`` of the call of run.once that is being made, or in
    the variables there, unless the script decides by the entry whether it makes the call. Their
    values are those of the variables, if the entry may have changed since."""
    for frame in frames_of_script(sys._getframe(1)):
        for place, conditions in _place_of_once(frame) if frame is not None else ():
            assert frame is not None
            given = _assigned_to(place, tree_of(frame))
            decides = {key for each in conditions for key in _entries(each, tree_of(frame))}
            keys = _entries(place, tree_of(frame)) - decides
            named = {key: user[key] for key in keys if key in user}
            known = (
                local_variables(frame)
                if given and frame.f_code.co_flags & inspect.CO_OPTIMIZED
                else {}
            )
            for name, value in given:
                if name in known and (key := _entry(value)) in named:
                    named[key] = known[name]
            return {k: value for k, value in named.items() if isinstance(value, (int, str))}
    return {}


def _place_of_once(frame: FrameType) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
    """The place that the current call of run.once names, and the conditions around the call."""
    code = frame.f_code
    names = (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    if "once" not in names:  # a trainer's file would be parsed for nothing
        return
    tree, line = tree_of(frame), frame.f_lineno
    around = [n for n in walk(tree) if isinstance(n, (ast.If, ast.Call)) and _is_at(n, line)]
    conditions = [node.test for node in around if isinstance(node, ast.If)]
    for call in around:
        if isinstance(call, ast.Call) and _name_of(call.func) == "once":
            yield from ((k.value, conditions) for k in call.keywords if k.arg == "at")


def _assigned_to(expression: ast.expr, tree: ast.AST) -> list[tuple[str, ast.expr]]:
    """The variables in an expression, and what the function assigns to each, also with others:
    ``first, batches = …``."""
    names = {n.id for n in walk(expression) if isinstance(n, ast.Name)}
    given: list[tuple[str, ast.expr]] = []
    for node in walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                given += [(_stored(part), value) for part, value in pairs]
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            given.append((_stored(node.target), node.value))
    return [(name, value) for name, value in given if name in names]


def _entries(expression: ast.expr, tree: ast.AST) -> set[str]:
    """The keys in an expression, and in what is assigned to its variables."""
    given = [value for _, value in _assigned_to(expression, tree)]
    return _strings(expression).union(*map(_strings, given))


def _entry(value: ast.expr) -> str:
    """The key of an expression that is an entry: ``state["key"]``, or ``state.get("key", 0)``."""
    key = value.slice if isinstance(value, ast.Subscript) else None
    if isinstance(value, ast.Call) and _name_of(value.func) in ("get", "setdefault") and value.args:
        key = value.args[0]
    is_string = isinstance(key, ast.Constant) and isinstance(key.value, str)
    return key.value if is_string else ""  # type: ignore[union-attr]


def _is_at(node: ast.If | ast.Call, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _strings(expression: ast.expr) -> set[str]:
    constants = (n.value for n in walk(expression) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


# ----------------------------------------------------------------------------
# Refuses optimizer state that a checkpoint, or a joining node, would change without an error.
#
# - Plain tensors that differ between the shards of a parameter: 8-bit codes of this rank's shard,
#   a preconditioner of it. State in DTensors is saved by shards, a plain tensor once, so every
#   rank would resume with the values of one. Values computed from whole tensors, as in Muon and
#   SOAP with ``full_tensor()``, are the same on all ranks, up to rounding: ranks compare a digest,
#   and if it differs, a few numbers of each tensor. Only ranks of the same pipeline stage are
#   compared.
# - Tensor subclasses that consist of several tensors, such as torchao's ``OptimState8bit``: their
#   values are saved, but torch's optimizers restore those as a plain tensor, no longer quantised.

_MOST_ENTRIES = 64  # compared in detail
_SAMPLE_OPTIMIZER_STATES = 8  # numbers of each tensor
_ROUNDING = 1e-3  # relative to the largest number of the sample

Sample = tuple[list[int], list[float]]
"""The shape of a tensor, and some of its numbers."""


class _Entry(NamedTuple):
    """A value in an optimizer's state that is no DTensor."""

    place: str  # the index of its parameter, and its key
    parameter: torch.Tensor
    key: str
    value: torch.Tensor | float


def _optimizers(job: JobState) -> dict[str, torch.optim.Optimizer]:
    """The optimizers whose state is saved, by the names of the tracked objects."""
    return {
        name: optimizer
        for name, tracked in job.all_tracked.items()
        for optimizer in saved_optimizers(tracked)
    }


def refuse_subclasses(job: JobState, world: World, step: int) -> None:
    """Raise TrainingError if an optimizer's state has a tensor subclass of several tensors."""
    for name, optimizer in _optimizers(job).items():
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                inner = local_of(value) if is_dtensor(value) else value
                if isinstance(inner, torch.Tensor) and hasattr(inner, "__tensor_flatten__"):
                    kind = type(inner).__name__
                    raise TrainingError(
                        f"after step {step}, {name} ({type(optimizer).__name__}) keeps "
                        f"state[{key!r}] as a {kind}, a tensor subclass: a checkpoint and joining "
                        "nodes would have its values only, and continue with a plain tensor",
                        hint="keep the tensors that it consists of in the optimizer's state, and "
                        f"create it where it is used: {kind}(state['codes'], state['scale'])",
                    )


def refuse_states_of_shards(job: JobState, world: World, step: int) -> None:
    """Raise TrainingError on all ranks if an optimizer over sharded parameters keeps plain values
    that differ between ranks of the same pipeline stage. A collective of the world, after step
    number ``step``."""
    optimizers = _optimizers(job)
    own: dict[str, Any] = {name: _digest(optimizer) for name, optimizer in optimizers.items()}
    gathered = all_gather_json(own)
    stages = [_stage_of(rank, world) for rank in range(world.size)]
    first = {stage: stages.index(stage) for stage in stages}
    if all(theirs == gathered[first[stages[rank]]] for rank, theirs in enumerate(gathered)):
        return
    entries = {name: _first_entries(optimizer) for name, optimizer in optimizers.items()}
    samples = {
        name: {place: _sample(entry.value) for place, entry in theirs.items()}
        for name, theirs in entries.items()
    }
    all_samples = all_gather_json(samples)
    for rank, theirs in enumerate(all_samples):
        for name, place in _differing(theirs, all_samples[first[stages[rank]]]):
            raise _refusal_optimizer_states(
                job.all_modules, name, optimizers[name], entries[name].get(place), (step, rank)
            )


def _stage_of(rank: int, world: World) -> int:
    stage = world.mesh.stage_of(rank % world.mesh.size)
    return stage.index if stage is not None else 0


def _entries_optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[_Entry]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for index, parameter in enumerate(parameters):
        if not _is_sharded(parameter):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, int | float) or (
                isinstance(value, torch.Tensor) and not is_dtensor(value)
            ):
                yield _Entry(f"{index}/{key}", parameter, str(key), value)


def _is_sharded(parameter: Any) -> bool:
    return is_dtensor(parameter) and any(
        not placement.is_replicate() and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _first_entries(optimizer: torch.optim.Optimizer) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for entry in _entries_optimizer_states(optimizer):
        if len(entries) == _MOST_ENTRIES:
            break
        entries[entry.place] = entry
    return entries


def _digest(optimizer: torch.optim.Optimizer) -> str:
    entries = list(_entries_optimizer_states(optimizer))
    tensors = [entry.value for entry in entries if isinstance(entry.value, torch.Tensor)]
    described = [
        (e.place, list(e.value.shape) if isinstance(e.value, torch.Tensor) else e.value)
        for e in entries
    ]
    text = repr((described, contents(tensors)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _sample(value: torch.Tensor | float) -> Sample:
    if not isinstance(value, torch.Tensor):
        return [], [float(value)]
    flat = value.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // _SAMPLE_OPTIMIZER_STATES)][:_SAMPLE_OPTIMIZER_STATES]
    numbers = torch.view_as_real(chosen).reshape(-1) if chosen.is_complex() else chosen
    return list(value.shape), numbers.double().tolist()


def _differing(
    own: Mapping[str, Mapping[str, Sample]], expected: Mapping[str, Mapping[str, Sample]]
) -> Iterator[tuple[str, str]]:
    for name, theirs in own.items():
        reference = expected.get(name, {})
        for place in dict.fromkeys((*theirs, *reference)):
            if not _is_close(theirs.get(place), reference.get(place)):
                yield name, place


def _is_close(own: Sample | None, expected: Sample | None) -> bool:
    if own is None or expected is None or own[0] != expected[0]:
        return False
    largest = max(map(abs, (*own[1], *expected[1])), default=0.0)
    return all(
        a == b or abs(a - b) <= _ROUNDING * largest
        for a, b in zip(own[1], expected[1], strict=True)
    )


def _refusal_optimizer_states(
    modules: Mapping[str, nn.Module],
    name: str,
    optimizer: torch.optim.Optimizer,
    entry: _Entry | None,
    place: tuple[int, int],
) -> TrainingError:
    step, rank = place
    kind = type(optimizer).__name__
    what = "plain values" if entry is None else _described(entry, modules)
    return TrainingError(
        f"after step {step}, {name} ({kind}) keeps {what} that differ between ranks (on rank "
        f"{rank}, among others): a checkpoint has plain tensors once, so all ranks would resume "
        "with those of one",
        hint="keep state of a sharded parameter p as DTensors, which are saved by shards: "
        'state["exp_avg"] = torch.zeros_like(p), or '
        'state["codes"] = DTensor.from_local(codes, p.device_mesh, p.placements, run_check=False, '
        "shape=p.shape, stride=p.stride()); or compute it from whole tensors, the same on all "
        "ranks: p.grad.full_tensor(). Replicas without checkpoints= may keep it",
    )


def _described(entry: _Entry, modules: Mapping[str, nn.Module]) -> str:
    names = {id(p): path for module in modules.values() for path, p in module.named_parameters()}
    kind = "plain tensors" if isinstance(entry.value, torch.Tensor) else "numbers"
    of = names.get(id(entry.parameter), f"parameter {entry.place.partition('/')[0]}")
    return f"{kind} state[{entry.key!r}] for the shards of {of!r}"


# ----------------------------------------------------------------------------
# Refuses copies of the trained weights that the function of run.retry makes before its loop.
#
# ``reference = copy.deepcopy(policy)`` is DPO's reference model, or the anchor of a penalty. In
# the next world run.retry calls its function again, and the copy would be one of the weights
# trained so far. Nothing raises an error. It is certain from the source if the copied module
# existed before run.retry, the loop uses the copy, and the script overwrites no weights: then it
# is no mere buffer for an evaluation. Otherwise a warning is logged.

Loop = ast.For | ast.While

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
        function = _function_of(one)
        if function is None:
            continue
        for copied in _copies(
            function, one.f_lineno, _variables_copied_weights(one, call), trained
        ):
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


def _function_of(frame: FrameType) -> ast.FunctionDef | None:
    """The source of a frame's function; None for a module's, and if it is unknown."""
    for node in walk(tree_of(frame)):
        if isinstance(node, ast.FunctionDef) and node.name == frame.f_code.co_name:
            return node
    return None


def _variables_copied_weights(
    frame: FrameType, call: Sequence[tuple[str, object]]
) -> Mapping[str, object]:
    """Variables of a function whose values existed before run.retry: global ones and, in its own
    function, arguments and variables of the enclosing function."""
    code = frame.f_code
    known = dict(frame.f_globals)
    for name in code.co_varnames:
        known.pop(name, None)
    _, function = call[0] if call else ("", None)
    owner = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    if isinstance(plain, FunctionType) and plain.__code__ is code:
        cells = zip(code.co_freevars, plain.__closure__ or (), strict=False)
        known |= {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
        known |= {name: value for name, value in call[1:] if name}
    first = code.co_varnames[0] if code.co_argcount else ""
    if owner is not None and first:
        own = inspect.getattr_static(type(owner), code.co_name, None)
        if getattr(own, "__code__", None) is code:
            known[first] = owner
    return known


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _copies(
    function: ast.AST, line: int, variables: Mapping[str, object], trained: set[int]
) -> Iterator[_Copy]:
    around = loops_around(function, line)
    if not around:
        return
    loop = around[0].lineno
    for statement in statements_before(function, loop):
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        if not isinstance(target, (ast.Name, ast.Attribute)):
            continue
        name = ast.unparse(target)
        calls = [n for n in walk(statement.value) if isinstance(n, ast.Call)]
        is_copy = any(_name_of(c.func) in _COPIES for c in calls)
        if not is_copy or not any(_is_trained(n, variables, trained) for n in _copied(calls)):
            continue
        if any(_name_of(c.func) in _KEEPERS for c in calls) or _is_kept(function, name):
            continue
        if any(_is_use(n, name, after=loop) for n in walk(function)):
            yield _Copy(name, ast.unparse(statement.value))


def loops_around(function: ast.AST, line: int) -> list[Loop]:
    """The outermost first."""
    loops = [n for n in walk(function) if isinstance(n, Loop)]
    around = [n for n in loops if n.lineno <= line <= (n.end_lineno or line)]
    return sorted(around, key=lambda loop: loop.lineno)


def statements_before(function: ast.AST, loop: int) -> Iterator[ast.stmt]:
    """The statements of a function, or of a loop's body, before a line, also those in `if` and
    `with`."""
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
    value = _value_copied_weights(expression, variables)
    return isinstance(value, nn.Module) and any(id(p) in trained for p in value.parameters())


def _value_copied_weights(expression: ast.expr, variables: Mapping[str, object]) -> object:
    """The value of a variable or of its attributes, without calling any code of the script."""
    if isinstance(expression, ast.Name):
        return variables.get(expression.id)
    if not isinstance(expression, ast.Attribute):
        return None
    owner = _value_copied_weights(expression.value, variables)
    known = dict(getattr(owner, "__dict__", None) or {})
    if isinstance(owner, nn.Module):
        known |= dict(owner.named_children())
    return known.get(expression.attr)


def _is_kept(function: ast.AST, name: str) -> bool:
    """Whether the function passes the copy to run.track or run.wrap."""
    for call in walk(function):
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


# ----------------------------------------------------------------------------
# Refuses ``for epoch in range(n)`` around a loader, in a job that resumes.
#
# After a death, the function of run.retry is called again, or a restarted script resumes from its
# checkpoint. It counts from 0, but the loader resumes: the job trains too long. It is certain from
# the source if nothing in the loop's body can leave it early or skip an epoch, and if it makes
# more than one pass. Other passes are refused when the second one begins.
#
# The same applies to ``if i == 9: break`` with the count of ``enumerate(loader)``.

_RANGES = ("range", "trange")
_WRAPPERS = ("enumerate", "iter", "list", "reversed", "tqdm", "track", "tuple")
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
    loops: list[tuple[FrameType, ast.For]] = []
    is_innermost = True
    for frame in frames_of_script(sys._getframe(1)):
        if frame is None:  # the call of run.retry
            break
        if is_installed(frame.f_code):
            continue
        tree, line = tree_of(frame), frame.f_lineno
        attempt = max((n.lineno for n in attempts_around(tree, line)), default=0)
        whiles = [n for n in _whiles(tree) if _is_in_body(line, n) and n.lineno > attempt]
        counted = [loop for n in whiles if (loop := _as_range(n, tree)) is not None]
        if len(counted) < len(whiles):
            return  # it may count in run.state
        loops += [
            (frame, loop)
            for loop in _ranges_around(
                tree, line, counted, needs_loop=is_innermost and is_over_loader
            )
            if loop.lineno > attempt and _begins_alike(loop, tree, has_own_state=has_own_state)
        ]
        is_innermost = False
        if attempt:
            break
    else:
        if is_in_retry:
            return  # not called again
    for frame, loop in loops:
        count = _arguments(loop)[-1]
        is_given = not has_own_state and _is_name(_without_constant(count))
        if (passes > 1 and is_given) or _value_counted_epochs(count, frame) > 1 + _start(loop):
            raise _refusal_counted_epochs(
                loop, ast.unparse(count), is_over_loader=is_over_loader, is_in_retry=is_in_retry
            )


_POSITION = "position"  # of a loader: its epoch


def refuse_uncounted_passes(*, is_in_retry: bool) -> None:
    """Raise TrainingError for a second pass over a loader that nothing in the job's state counts:
    of two calls of a function, of ``map(train, range(3))``, of a loop that may be left. The script
    would begin with its first pass again, and the loader resumes in a later one.

    Not in a ``while``, which need not count, nor where the script reads the loader's position or
    begins a range at a number that it has computed, nor in loops of libraries. ``is_in_retry``: as
    for :func:`refuse_range`.
    """
    is_innermost = True
    for frame in frames_of_script(sys._getframe(1)):
        if frame is None:  # the call of run.retry
            break
        if is_installed(frame.f_code):
            if is_innermost:
                return
            continue
        is_innermost = False
        tree, line = tree_of(frame), frame.f_lineno
        attempt = max((n.lineno for n in attempts_around(tree, line)), default=0)
        around = [n for n in loops_with(tree, line) if n.lineno > attempt]
        if _POSITION in frame.f_code.co_names or not all(_begins_again(n, tree) for n in around):
            return
        if attempt:
            break
    else:
        if is_in_retry:
            return  # not called again
    again = (
        "in the next world run.retry calls its function again, which"
        if is_in_retry
        else "a restarted job resumes from its last checkpoint, but the script"
    )
    raise TrainingError(
        "this is the second pass over the loader without run.epochs, and nothing counts passes in "
        f"run.state: {again} would begin with its first pass and train too long",
        hint="for epoch in run.epochs(n):, or, in the function of run.retry, "
        'while run.state.setdefault("epoch", 0) < n: with run.state["epoch"] += 1 after each pass',
    )


def refuse_counts_before_restore() -> None:
    """Raise TrainingError if a loop around the first pass or step of a script without run.retry
    counts in run.state, which is restored when that pass begins: in a restarted job, the loop has
    read the values of a new one."""
    for frame in frames_of_script(sys._getframe(1)):
        if frame is None:  # the call of run.retry, which restores the state when it is read
            return
        if is_installed(frame.f_code):
            continue
        tree, line = tree_of(frame), frame.f_lineno
        for loop in loops_with(tree, line):
            head = loop.iter if isinstance(loop, ast.For) else loop.test
            assigned = [value for _, value in _assigned_to(head, tree)]
            if any(_reads_state(value, frame) for value in (head, *assigned)):
                raise _refusal_of_counts_before_restore(loop)


def _reads_state(expression: ast.expr, frame: FrameType) -> bool:
    """Whether an expression contains ``run.state``, or a loader's ``position``."""
    for node in walk(expression):
        if not isinstance(node, ast.Attribute) or node.attr not in ("state", _POSITION):
            continue
        if isinstance(node.value, ast.Attribute) and node.value.attr.endswith("run"):
            return True
        if isinstance(node.value, ast.Name):
            owners = [v[node.value.id] for v in variables(frame) if node.value.id in v]
            if owners and type(owners[0]).__module__.startswith("elastic."):
                return True
    return False


def _refusal_of_counts_before_restore(loop: ast.For | ast.While) -> TrainingError:
    if isinstance(loop, ast.For):
        header = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
    else:
        header = f"while {ast.unparse(loop.test)}"
    return TrainingError(
        f"`{header}` reads the job's state outside of run.retry, where it is restored only when "
        "the first loop over the loader begins: a restarted job would count from the values of a "
        "new one, and train too long",
        hint="put the loop into a function and call run.retry(function), or count by "
        "`for epoch in run.epochs(n):`",
    )


def _begins_again(loop: ast.For | ast.While, tree: ast.AST) -> bool:
    if isinstance(loop, ast.While):
        return _as_range(loop, tree) is not None
    return _range_of(loop.iter) is None or _begins_alike(loop, tree, has_own_state=False)


def refuse_break(*, is_enumerated: bool = True, is_in_retry: bool = True) -> None:
    """Raise TrainingError if the loop whose iterator begins is left by a count of its steps that
    begins at 0 or 1: of ``enumerate``, of ``zip(itertools.count(), loader)``, or of a variable.
    ``is_enumerated``: an ``enumerate`` of the loader begins there. ``is_in_retry``: as for
    :func:`refuse_range`; otherwise a variable, or ``return``, may mean the
    steps of this process."""
    for frame in frames_of_script(sys._getframe(1)):
        if frame is None:
            return
        tree = tree_of(frame)
        for node in walk(tree):
            if not (isinstance(node, ast.For) and _is_head(frame.f_lineno, node)):
                continue
            counts = {*_counts_of_head(node, is_enumerated=is_enumerated)}
            ways_out: tuple[type[ast.stmt], ...] = (ast.Break,)
            if is_in_retry:
                counts |= {*_counts_in_body(node, tree)}
                ways_out += (ast.Return,)
            for inner in _within(node.body):
                if isinstance(inner, ast.If) and _leaves_by(inner, counts, ways_out):
                    raise _refusal_of_break(inner)
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # the loop is in the innermost frame that is not a generator's


def counts_from_constant(frame: FrameType) -> bool:
    """Whether the script's current loop is over ``enumerate(…)`` with a constant for its start."""
    script = next(frames_of_script(frame), None)
    if script is None:
        return False
    heads = [
        node.iter
        for node in walk(tree_of(script))
        if isinstance(node, ast.For) and _is_head(script.f_lineno, node)
    ]
    calls = [
        call
        for head in heads
        for call in walk(head)
        if isinstance(call, ast.Call) and _name_of(call.func) == "enumerate"
    ]
    starts = [v for call in calls for v in (*call.args[1:], *(k.value for k in call.keywords))]
    return bool(calls) and all(isinstance(start, ast.Constant) for start in starts)


def refuse_break_after_commit() -> bool:
    """Raise TrainingError if the loop of the current call of run.commit is left after it: a fault
    before that would resume the loop with the step after the one in which it is to be left.

    Returns whether the script itself makes the call, and not a framework.
    """
    is_script = False
    for frame in frames_of_script(sys._getframe(1)):
        if frame is None or is_installed(frame.f_code):
            break
        is_script = True
        if (loop := _loop_around(tree_of(frame), frame.f_lineno)) is not None:
            if (left := _left_after(loop, frame.f_lineno)) is not None:
                raise _refusal_of_break_after_commit(left)
            break
    return is_script


def follows_its_loop() -> bool:
    """Whether the current call of run.commit follows a loop that calls ``next()``, in its function.
    (A loop over micro-batches is followed by the update, too.)"""
    frame = next(frames_of_script(sys._getframe(1)), None)
    if frame is None or is_installed(frame.f_code):
        return False
    return _follows_a_loop(tree_of(frame), frame.f_lineno)


def is_where_batches_are_requested() -> bool:
    """Whether the script's current statement is in the body of a loop that calls ``next()``, in
    that body itself."""
    frame = next(frames_of_script(sys._getframe(1)), None)
    if frame is None or is_installed(frame.f_code):
        return False
    loop = _loop_around(tree_of(frame), frame.f_lineno)
    return loop is not None and any(_is_call_of(node, "next") for node in _within(loop.body))


@functools.lru_cache(maxsize=16)
def _follows_a_loop(tree: ast.AST, line: int) -> bool:
    outer = _loop_around(tree, line)
    begins, ends = 0 if outer is None else outer.lineno, 0
    for node in walk(tree):
        is_before = isinstance(node, (ast.For, ast.While)) and begins < node.lineno
        if is_before and (node.end_lineno or line) < line and _calls_named(node, "next"):  # type: ignore[attr-defined]
            ends = max(ends, node.end_lineno or 0)  # type: ignore[attr-defined]
    updates = (n.lineno for n in walk(tree) if _is_call_of(n, "step"))  # type: ignore[attr-defined]
    return bool(ends) and not any(ends < update < line for update in updates)


def _calls_named(tree: ast.AST, name: str) -> bool:
    return any(_is_call_of(node, name) for node in walk(tree))


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) == name


@functools.lru_cache(maxsize=16)  # called in each step
def _loop_around(tree: ast.AST, line: int) -> Loop | None:
    """The innermost loop whose body contains a line."""
    return max(loops_with(tree, line), key=lambda loop: loop.lineno, default=None)


def loops_with(tree: ast.AST, line: int) -> list[Loop]:
    """The loops whose bodies contain a line."""
    loops = [n for n in walk(tree) if isinstance(n, Loop)]
    return [loop for loop in loops if _is_in_body(line, loop)]


@functools.lru_cache(maxsize=16)
def _left_after(loop: ast.For | ast.While, line: int) -> ast.If | None:
    """The condition on which the loop is left after a line in its body."""
    for node in _within(loop.body):
        is_left = isinstance(node, ast.If) and isinstance(node.body[-1], (ast.Break, ast.Return))
        if is_left and node.lineno > line:  # type: ignore[attr-defined]
            return node  # type: ignore[return-value]
    return None


def _refusal_of_break_after_commit(left: ast.If) -> TrainingError:
    way_out, test = "break" if isinstance(left.body[-1], ast.Break) else "return", left.test
    return TrainingError(
        f"`if {ast.unparse(test)}: {way_out}` after run.commit(): a fault between them resumes the "
        "loop with the next step, and trains that one, too",
        hint=f"leave the loop before run.commit(), so that the step ends with the code after the "
        "loop; or, if what follows the commit decides, keep the decision in run.state, and check "
        f"it at the beginning of the loop's body, before the update:\n    if …:\n        {way_out}",
    )


def refuse_count_from_index() -> None:
    """Raise TrainingError if the loop that requests the first batch of a pass counts its batches
    from the index: ``range(loader.index, loader.index + 3)`` has as many of them again where it
    resumes. Not if it computes them from run.state, too."""
    frame = next(frames_of_script(sys._getframe(1)), None)
    if frame is None or is_installed(frame.f_code):
        return
    tree = tree_of(frame)
    loop = _loop_around(tree, frame.f_lineno)
    stop = _counted_from_index(loop, tree) if isinstance(loop, ast.For) else None
    if stop is not None and not _reads_state(stop, frame):
        raise _refusal_of_count_from_index(loop, stop)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=16)
def _counted_from_index(loop: ast.For, tree: ast.AST) -> ast.expr | None:
    """The end of a range that begins at ``loader.index`` and ends at a sum with it."""
    call = _range_of(loop.iter)
    if call is None or len(call.args) < 2 or not _is_index(call.args[0], tree):
        return None
    stop = call.args[1]
    if isinstance(stop, ast.Name) and len(values := _assigned(stop.id, tree)) == 1:
        stop = values[0]
    sums = (n for n in walk(stop) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add))
    is_counted = any(_is_index(part, tree) for n in sums for part in (n.left, n.right))
    return stop if is_counted else None


def _is_index(expression: ast.expr, tree: ast.AST) -> bool:
    if isinstance(expression, ast.Name):
        given = (value for _, value in _assigned_to(expression, tree))
        return any(_is_index(value, tree) for value in given if not isinstance(value, ast.Name))
    return isinstance(expression, ast.Attribute) and expression.attr == "index"


def _refusal_of_count_from_index(loop: ast.For, stop: ast.expr) -> TrainingError:
    header = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}:"
    return TrainingError(
        f"`{header}` counts batches from the index at which the pass begins, to "
        f"{ast.unparse(stop)}: a pass that resumes in its middle would have as many again, and the "
        "job would train too long",
        hint="let the range end at an index within the epoch, with run.epochs:\n"
        f"    for {ast.unparse(loop.target)} in range(loader.index, min(n, len(loader))):\n"
        "  or shorten the epochs, run.loader(…, max_steps=n), and use range(loader.index, "
        "len(loader))",
    )


def _counts_of_head(loop: ast.For, *, is_enumerated: bool) -> Iterator[str]:
    """The first of several targets, if it counts from a constant."""
    called = loop.iter if isinstance(loop.iter, ast.Call) else None
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    if called is None or not isinstance(target, ast.Name):
        return
    if _name_of(called.func) == "enumerate":
        is_counted = is_enumerated
    else:
        first = called.args[0] if _name_of(called.func) == "zip" and called.args else None
        is_counted = isinstance(first, ast.Call) and _name_of(first.func) == "count"
        starts = first.args[:1] if isinstance(first, ast.Call) else []
        is_counted = is_counted and all(isinstance(start, ast.Constant) for start in starts)
    if is_counted:
        yield target.id


def _counts_in_body(loop: ast.For, tree: ast.AST) -> Iterator[str]:
    """Variables that each iteration increments, or each update of an accumulation, and that only
    constants are assigned to."""
    targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    counts = {*_incremented(loop.body), *map(_stored, targets[:-1])}
    updates = [n for n in loop.body if isinstance(n, ast.If) and _is_update(n.test, counts)]
    counters = [*_incremented(loop.body), *(c for n in updates for c in _incremented(n.body))]
    stored = [_stored(n) for n in walk(tree) if isinstance(n, (ast.Name, ast.arg))]
    for name in filter(None, counters):
        values = _assigned(name, tree)
        is_alone = stored.count(name) == len(values) + counters.count(name)
        if values and is_alone and all(isinstance(v, ast.Constant) for v in values):
            yield name


def _incremented(body: Iterable[ast.AST]) -> list[str]:
    return [_stored(n.target) for n in body if isinstance(n, ast.AugAssign)]


def _is_update(test: ast.expr, counts: Collection[str]) -> bool:
    """``if accelerator.sync_gradients``, or ``if (i + 1) % k == 0`` by a count of batches."""
    if isinstance(test, ast.Attribute):
        return test.attr == "sync_gradients"
    remainders = (n for n in walk(test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod))
    return any(
        isinstance(name, ast.Name) and name.id in counts
        for n in remainders
        for name in walk(n.left)
    )


def _within(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements of a loop, without those of loops and functions inside."""
    for node in body:
        if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
            yield node
            yield from _within(ast.iter_child_nodes(node))


def _leaves_by(node: ast.If, counts: Collection[str], ways_out: tuple[type[ast.stmt], ...]) -> bool:
    """Whether ``if`` compares one of these counts, and leaves the loop."""
    test = node.test
    if not (isinstance(test, ast.Compare) and isinstance(node.body[-1], ways_out)):
        return False
    return any(isinstance(n, ast.Name) and n.id in counts for n in (test.left, *test.comparators))


def _refusal_of_break(left: ast.If) -> TrainingError:
    way_out = "break" if isinstance(left.body[-1], ast.Break) else "return"
    return TrainingError(
        f"`if {ast.unparse(left.test)}: {way_out}` counts from the step at which a loop resumes: "
        "after a recovery or a restart, the epoch would have more steps",
        hint="run.loader(…, max_steps=n), whose epochs end at the same step, or "
        "enumerate(loader, start=loader.index),\n"
        '  or a count of the job: run.state.setdefault("steps", 0), and run.state["steps"] += 1',
    )


def _whiles(tree: ast.AST) -> Iterator[ast.While]:
    return (node for node in walk(tree) if isinstance(node, ast.While))


def attempts_around(tree: ast.AST, line: int) -> Iterator[ast.For]:
    for node in walk(tree):
        if isinstance(node, ast.For) and _is_in_body(line, node):
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "attempts":
                yield node


def _ranges_around(
    tree: ast.AST, line: int, counted: Iterable[ast.For], *, needs_loop: bool
) -> Iterator[ast.For]:
    """Loops over ``range(n)`` around the line, and of those ``counted`` alike, without a way out.
    ``needs_loop``: the line must be the head of another loop inside, or the range may count
    steps."""
    for node in (*walk(tree), *counted):
        if not isinstance(node, ast.For) or not _is_in_body(line, node):
            continue
        if needs_loop and not any(_is_head(line, n) for n in walk(node) if n is not node):
            continue
        if _range_of(node.iter) is not None and not _has_way_out(node.body):
            yield node


def _is_in_body(line: int, loop: ast.For | ast.While) -> bool:
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or line)


def _is_head(line: int, node: ast.AST) -> bool:
    is_loop = isinstance(node, ast.For) and _range_of(node.iter) is None
    return is_loop and node.lineno <= line < node.body[0].lineno  # type: ignore[attr-defined]


def _range_of(expression: ast.expr) -> ast.Call | None:
    """The call of ``range``, possibly in a progress bar: ``tqdm(range(n))``. Of a list of
    constants, ``range`` of their number."""
    if isinstance(expression, (ast.List, ast.Tuple)):
        is_constant = all(isinstance(n, ast.Constant) for n in expression.elts)
        return _range(0, ast.Constant(len(expression.elts))) if is_constant else None
    if not isinstance(expression, ast.Call) or not expression.args:
        return None
    if isinstance(expression.func, ast.Name) and expression.func.id in _RANGES:
        return expression
    is_wrapper = any(_name_of(expression.func) == name for name in _WRAPPERS)
    return _range_of(expression.args[0]) if is_wrapper else None


def _range(first: int, stop: ast.expr) -> ast.Call:
    args = [ast.Constant(first), stop] if first else [stop]
    return ast.Call(func=ast.Name("range"), args=args, keywords=[])


def _as_range(loop: ast.While, tree: ast.AST) -> ast.For | None:
    """A loop such as ``while epoch < 3``, with ``epoch = 0`` before it and ``epoch += 1`` at the
    end of its body, as a loop over a range; None for any other one."""
    test, last = loop.test, loop.body[-1]
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name):
        return None
    name, is_less = test.left.id, isinstance(test.ops[0], ast.Lt) and len(test.ops) == 1
    stores = [_stored(n) for n in walk(tree)].count(name)
    values = _assigned(name, tree)
    is_counted = isinstance(last, ast.AugAssign) and _stored(last.target) == name
    if not (is_less and is_counted and stores == 2 and len(values) == 1):
        return None
    first = values[0].value if isinstance(values[0], ast.Constant) else None
    is_one = isinstance(last.value, ast.Constant) and last.value.value == 1  # type: ignore[attr-defined]
    if not isinstance(first, int) or not is_one:
        return None
    counted = ast.For(
        target=ast.Name(name),
        iter=_range(first, test.comparators[0]),
        body=loop.body,
        orelse=[],
        type_comment=f"while {ast.unparse(test)}",  # for the error
    )
    return ast.copy_location(counted, loop)


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
    stores = [n for n in walk(tree) if isinstance(n, (ast.Name, ast.arg)) and _stored(n) == name]
    values = _assigned(name, tree)
    if len(stores) != 1 or len(values) != 1 or not isinstance(values[0], ast.Constant):
        return None
    return values[0].value if isinstance(values[0].value, int) else None


def _assigned(name: str, tree: ast.AST) -> list[ast.expr]:
    """What is assigned to a variable, without updates and other targets."""
    assigned = (n for n in walk(tree) if isinstance(n, ast.Assign))
    return [a.value for a in assigned if any(_stored(target) == name for target in a.targets)]


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


def _value_counted_epochs(expression: ast.expr, frame: FrameType) -> int:
    """The value of a constant or a global variable; 0 if it is another expression."""
    value: Any = None
    if isinstance(expression, ast.Constant):
        value = expression.value
    elif isinstance(expression, ast.Name):
        is_local = expression.id in frame.f_code.co_varnames
        value = None if is_local else frame.f_globals.get(expression.id)
    return value if isinstance(value, int) else 0


def _refusal_counted_epochs(
    loop: ast.For, count: str, *, is_over_loader: bool, is_in_retry: bool
) -> TrainingError:
    target = ast.unparse(loop.target)
    header = loop.type_comment or f"for {target} in {ast.unparse(loop.iter)}"
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
        else "a restarted job resumes from its last checkpoint, but the loop"
    )
    return TrainingError(
        f"`{header}` around {what}: {again} would count from {_start(loop)} and train too long",
        hint=hint,
    )


# ----------------------------------------------------------------------------
# Warns of local variables of the training function on which the training depends.
#
# ``completed_steps = 0`` before the loop, ``completed_steps += 1`` in it, and ``if completed_steps
# >= max_train_steps: break``: in the next world run.retry calls its function again, the loop
# resumes, but the count restarts, and the job trains too long. The same applies to a sequence
# length that grows with the count. It is read from the source, because most locals of a loop change
# in each step, and it is not refused, because the loop may end before.
# Counts that are only printed, or that select the batches of an accumulation, cause no warning.

_REPORTS = (
    *("print", "log", "info", "debug", "warning", "write", "format", "add_scalar", "add_scalars"),
    *("set_postfix", "set_description", "log_metrics", "log_dict"),
)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def warn_of_local_state(frame: FrameType | None = None) -> None:
    """Called in the first step of a process. ``frame``: the caller's."""
    frames = list(frames_of_script(frame or sys._getframe(1)))
    if not frames or frames[-1] is not None:
        return  # the function is not called again
    for one in frames:
        if one is None:
            return
        function = _function_of(one)
        for name, first in _counters(function, one.f_lineno) if function is not None else ():
            get_logger().warning(
                "%s counts from %d again when run.retry calls its function again in the next "
                'world, while the loop resumes. Call run.state.setdefault("%s", %d) in %s, and '
                'count in run.state["%s"]',
                name,
                first,
                name,
                first,
                one.f_code.co_name,
                name,
            )


def _counters(function: ast.FunctionDef, line: int) -> Iterator[tuple[str, int]]:
    """The names of such counters, and their first values."""
    parents = {child: node for node in walk(function) for child in ast.iter_child_nodes(node)}
    around = loops_around(function, line)
    if not around:
        return
    seen: set[str] = set()
    for node in walk(around[0]):
        if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Name):
            continue
        name, loop = node.target.id, _loop_of(node, parents)
        is_count = isinstance(node.op, ast.Add) and _integer(node.value) is not None
        if not is_count or loop not in around or name in seen:
            continue
        first = _first_value(function, name, loop)
        if first is None:
            continue
        is_reset = any(_assigns(n, name) for n in walk(loop))
        is_counted_always = parents[node] is loop and not is_reset
        uses = [n for n in walk(around[0]) if isinstance(n, ast.Name) and n.id == name]
        loads = [n for n in uses if isinstance(n.ctx, ast.Load)]
        if any(decides_on_the_end(n, parents) for n in loads) or (
            is_counted_always and any(matters(n, parents) for n in loads)
        ):
            seen.add(name)
            yield name, first


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
    for node in walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return None
        if _assigns(node, name) and node.lineno < loop.lineno:  # type: ignore[attr-defined]
            values.append(_integer(node.value))  # type: ignore[attr-defined]
    return values[-1] if values and None not in values else None


def _assigns(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(n, ast.Name) and n.id == name for target in node.targets for n in walk(target)
    )


def _integer(expression: ast.expr) -> int | None:
    value = expression.value if isinstance(expression, ast.Constant) else None
    return value if type(value) is int else None


def decides_on_the_end(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
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


def matters(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
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
            if _name_of(parent.func) in _REPORTS:
                return False
            matters = matters or node is not parent.func
        node = parent
    return matters


# ----------------------------------------------------------------------------
# Refuses ``elastic.join`` in a data worker, and in other processes that the script starts.
#
# A process that multiprocessing spawns runs the script again, as the module ``__mp_main__``. It
# would join the job as another worker, and the agent refuses it without a reason that the script
# has.


def refuse_child_process(frame: FrameType | None = None, *, is_forked: bool = False) -> None:
    """Raise ConfigError in a data worker, in a process forked from one that has joined, and while
    multiprocessing runs the script again. ``frame``: the caller's.

    A function that a launcher starts in a spawned process is not refused here: its process may be
    the worker. Otherwise the agent refuses it.
    """
    is_main_again = _is_main_module_again(frame or sys._getframe(1))
    if get_worker_info() is None and not is_main_again and not is_forked:
        return
    again = ", which runs the script from its beginning" if is_main_again else ""
    raise ConfigError(
        "elastic.join() was called in a data worker or another child process of this worker"
        f"{again}",
        hint='if __name__ == "__main__":\n    main()    # everything that only the worker does',
    )


def _is_main_module_again(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False
