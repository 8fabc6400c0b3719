"""Variables whose values a loop carries from step to step, and on which its training depends.

``run.retry`` calls its function again after a death, and a restarted script begins again, while its
loops resume. So what a variable kept from the step before is lost: the hidden state of an RNN
(``out, h = model(x, h)``), a baseline, a temperature that decays, the batch before, a queue of
keys. Nothing raises an error.

It is decided from the source of the functions that are being called, before a loop's first step:
as one function, with attributes as variables (:mod:`elastic.train.inlining`). A loop
*carries* a variable that an iteration may read before it assigns it, and that the loop assigns, or
a container or tensor from before the loop that it changes in place. Values are then followed
through the loop's body and what follows it, in the order of statements, to where they train: a
backward pass, gradients, settings of an optimizer, the end of the training. A sum of losses that is
only printed gets there on no path: it is refused nowhere, and named where a loop resumes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.train.checks import (
    Loop,
    frames_of_script,
    loops_around,
    tree_of,
    tree_of_file,
)
from elastic.train.inlining import (
    KEEPERS,
    Inlined,
    inlined,
    is_from_outside,
    key_of,
    plain_name,
    reads_weights,
    source_of,
    text_of,
)
from elastic.train.origin import is_installed
from elastic.train.sharding import local_value
from elastic.train.syntax import children, walk

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Attributes of the run, a loader or a step from which a script computes where it resumes.
_RESUMED = frozenset({"state", "index", "position", "epoch", "number", "epochs", "largest_world"})
# Iterators: what they read next is the concern of the loader.
_ITERATORS = frozenset({"iter", "enumerate", "zip", "cycle", "map", "tqdm"})
_SETTINGS = frozenset({"lr", "betas", "eps", "momentum", "weight_decay", "alpha"})
_TRAINS = frozenset({"backward", "param_groups"})
# A progress bar, or when gradients are summed, which has to fit the updates (train/sharded.py).
_SETS_OTHERS = ("set_postfix", "set_description", "set_requires_", "set_is_last_backward")
_CONTAINERS = frozenset(
    {"list", "dict", "deque", "set", "defaultdict", "OrderedDict", "Counter", "clone", "deepcopy"}
    | {"zeros", "ones", "full", "empty", "rand", "randn", "tensor", "arange", "as_tensor"}
    | {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like"}
)
# Methods that change a container, of which some remove what they return.
_REMOVES = frozenset({"pop", "popleft", "popitem"})
_CHANGES = _REMOVES | {
    *("append", "appendleft", "extend", "extendleft", "insert", "remove", "reverse", "rotate"),
    *("sort", "add", "discard", "update", "setdefault", "subtract", "move_to_end"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
}
_RETURN_NOTHING = frozenset({"append", "appendleft", "extend", "extendleft", "insert"})
# Of random, NumPy and the standard library: the first argument.
_CHANGES_ARGUMENT = frozenset(
    {"shuffle", "heapify", "heappop", "heappush", "heappushpop", "heapreplace"}
    | {"insort", "insort_left", "insort_right", "copyto"}
)
_REPLACES = frozenset(
    {"clear", "zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"}
)
_SHAPES = frozenset(
    {"shape", "device", "dtype", "ndim", "size", "dim", "numel", "len"}
    | {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
)
_ELEMENTS = 100  # of a container in which values are looked for
_PASSES = 2  # over statements, for names that others have
_OF_WEIGHTS = frozenset({"parameters", "named_parameters", "buffers", "state_dict"})
_LISTS = frozenset({"list", "tuple", "sorted", "filter", "dict"})
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
_SAME_ON_ALL_RANKS = frozenset({"max", "min", "abs", "round", "float", "int", "bool", "math"})


@dataclass(frozen=True)
class CarriedVariable:
    """A variable that a loop carries into a step, and where it is used there."""

    name: str
    change: ast.stmt  # that the loop makes
    use: ast.expr | None  # that trains, or ends the training; None: it is only reported
    loop: Loop
    is_reset: bool  # by a loop around this one, as in each epoch


def refuse_carried(
    frame: FrameType | None,
    *,
    is_saved: bool,
    saved: Collection[int] = (),
    counts_continue: bool = False,
    ignored: Collection[str] = (),
    modules: Iterable[nn.Module] = (),
) -> list[CarriedVariable]:
    """Raise TrainingError for a variable that a loop of the script's functions, up to run.retry,
    carries into its steps, or that the functions compute from the weights of the trained
    ``modules`` before the loop. ``is_saved``: the script may also resume from a checkpoint, and
    then all of it begins again. ``saved``: ids of what belongs to the job's state.
    ``counts_continue``: ``enumerate`` continues its count where the loop resumes. ``ignored``:
    names of variables that need not be saved. Returns those that are only reported."""
    reported: list[CarriedVariable] = []
    *frames, last = [*frames_of_script(frame)] or [None]
    if last is not None:
        if not is_saved:
            return reported  # the functions are not called again
        frames.append(last)
    calls = [f for f in frames if f is not None and not is_installed(f.f_code)]
    trains = set[str]().union(*map(_training_functions, calls))
    modules = [*modules]
    parameters = {p for module in modules for p in module.parameters() if p.requires_grad}
    is_in_retry = is_called_again = last is None
    functions = inlined(calls, saved, counts_continue=counts_continue, modules=modules)
    for number, function in enumerate(functions):
        for carried in carried_variables(function.tree, function.loops, trains):
            is_state = _is_state(carried.name, function)
            if is_state or _is_ignored(plain_name(carried.name), ignored):
                continue
            if carried.use is not None:
                raise _refusal(carried, carried.use, function, is_in_retry=is_in_retry)
            if carried.name not in {*function.iterators, *function.generators}:
                reported.append(carried)
        if function.loops:
            _refuse_recomputed(
                function,
                parameters,
                trains,
                is_called_again=is_called_again,
                is_once=not number,
                saved=saved,
                ignored=ignored,
            )
            is_called_again = True  # what a loop calls
    return reported


def _is_state(name: str, function: Inlined) -> bool:
    """Whether it is a number or flag of a module, which belongs to the job's state, and gets values
    that are the same on all ranks: a temperature that decays, or is lower from an epoch on."""
    *outer, _ = function.loops
    counted = {n for loop in outer if isinstance(loop, ast.For) for n in _targets(loop.target)}
    kept = _kept(function.tree)  # run.state is the same on all ranks
    same = {*function.attributes, *counted, *kept, *_SAME_ON_ALL_RANKS}
    return name in same and _gets_only(function.loops[0].body, name, same)


def _gets_only(body: Iterable[ast.stmt], name: str, same: Collection[str]) -> bool:
    """Whether what statements assign to a variable, and when, depends on these variables only."""
    for statement in body:
        if name not in {n for s in walk(statement) if isinstance(s, ast.stmt) for n in _stored(s)}:
            continue
        decides = "value" if name in _stored(statement) else "test"
        settings = {
            id(inner)
            for node in walk(statement)
            if isinstance(node, ast.Attribute)
            and (node.attr == "training" or hasattr(node, "variable"))  # nothing assigns it
            for inner in walk(node)
        }
        reads = [n for n in walk(getattr(statement, decides, ast.Pass())) if id(n) not in settings]
        if not {n.id for n in reads if isinstance(n, ast.Name)} <= {*same}:
            return False
        if not all(_gets_only(block, name, same) for _, block in _blocks(statement)):
            return False
    return True


def _steps_with(use: ast.expr, name: str) -> bool:
    """Whether it is the call of ``step()`` of a variable: of one of several optimizers."""
    return isinstance(use, ast.Call) and _name_of(use.func) == "step" and _root(use.func) == name


def _is_ignored(name: str, ignored: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in ignored)


def _training_functions(frame: FrameType) -> set[str]:
    """The names of functions that make backward passes or set rates: those of the frame's file, and
    those that its module has imported."""
    imported = {
        name
        for name, value in list(frame.f_globals.items())
        if isinstance(value, FunctionType) and _TRAINS & set(value.__code__.co_names)
    }
    return imported | _training_functions_of(frame.f_code.co_filename)


@functools.lru_cache(maxsize=16)
def _training_functions_of(file: str) -> frozenset[str]:
    functions = [n for n in walk(tree_of_file(file)) if isinstance(n, ast.FunctionDef)]
    return frozenset(f.name for f in functions if _is_training(f))


def _is_training(function: ast.FunctionDef) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in _TRAINS for n in walk(function))


def _refusal(
    carried: CarriedVariable, use: ast.expr, function: Inlined, *, is_in_retry: bool
) -> TrainingError:
    name = plain_name(carried.name)
    change = text_of(carried.change)
    where = source_of(carried.change, function.code).co_name
    again = (
        "after a death, run.retry calls its function again"
        if is_in_retry
        else "a restarted job resumes from its last checkpoint, but runs the script again"
    )
    owner, _, key = name.rpartition(".")
    if name.startswith("enumerate("):
        keeps = "enumerate(loader, start=loader.index), or start=1 + loader.index to count from 1"
        changed = f"the count of {name}"
    elif carried.name in function.iterators:
        state = f"run.state[{key!r}]"
        keeps = (
            f"keep its position: run.state.setdefault({key!r}, 0) before the loop, and for each "
            f"item values[{state} % len(values)] and {state} += 1"
        )
        changed = f"the position of {name}"
    elif carried.name in function.generators:
        keeps = (
            f"run.track({key}={name}), before training, if all ranks draw the same numbers from "
            "it; otherwise draw from torch's, NumPy's or random's default generator, which have a "
            "seed for each step and rank"
        )
        changed = f"what {name} draws next"
    elif carried.name in function.buffers:
        keeps = (
            f"make it a buffer of its module, register_buffer({key!r}, …), with the same value on "
            "all ranks, and run.track(…) or run.wrap the module"
        )
        changed = name
    elif isinstance(function.values.get(owner), nn.Module) and carried.name in function.of_modules:
        keeps = (
            f"run.track({owner.rpartition('.')[2]}={owner}) before training: the buffers, numbers "
            "and flags of tracked modules belong to the job's state"
        )
        changed = name
    elif isinstance(function.values.get(carried.name), nn.Module):
        keeps = f"run.track({key}={name}) before training"
        changed = f"what {name} holds"
    elif carried.name in _emptied(carried.loop):
        keeps = (
            f"call {name}.clear() where each step begins, and not at its end: an interrupted step "
            "leaves elements, with which it is repeated"
        )
        changed = name
    elif (steps := _steps_with(use, carried.name)) or callable(function.values.get(carried.name)):
        keeps = (
            f"choose it in each epoch, from the number of the epoch: {name} = … if epoch >= 1 else "
            "…, or from an entry of run.state"
        )
        if steps:
            keeps += "; create both before training, and run.track(…) them"
        changed = name
    else:
        start = "where each epoch begins" if carried.is_reset else "before the loop"
        value = f"[{key!r}] = …" if carried.is_reset else f".setdefault({key!r}, …)"
        keeps = (
            "keep it in run.state, with the same value on all ranks: "
            f"run.state{value} {start}, and run.state[{key!r}] from there on"
        )
        changed = name
        if key != name:
            keeps += "; or run.track(…) an object with state_dict and load_state_dict that holds it"
    return TrainingError(
        f"`{change}` in {where}: {again}, and {changed} restarts or differs between ranks, but the "
        f"next steps depend on it: line {use.lineno}, `{text_of(use)}`",
        hint=f"{keeps}; or call run.untracked({name!r}) before training, if it need not be exact",
    )


def carried_variables(
    function: ast.AST, loops: Iterable[Loop], trains: Collection[str] = ()
) -> Iterator[CarriedVariable]:
    """The variables that one of a function's ``loops`` carries and nothing in the function saves or
    restores: those on which its training depends, and sums, counts and bests that are read
    elsewhere. ``trains``: names of functions that train."""
    kept = _kept(function)
    seen: set[str] = set()
    around: list[Loop] = []
    for loop in loops:
        outer, around = around, [*around, loop]
        changes: dict[str, list[ast.stmt]] = {}
        for name, statement in _changes(function, loop):
            changes.setdefault(name, []).append(statement)
        read, assigned = _reads_of(loop)
        # What only some iterations assign, and the code after the loop reads, may be of an earlier
        # one, too.
        candidates = changes.keys() & (read | changes.keys() - assigned) - kept
        if not candidates:
            continue
        following = _after(function, loop)
        flow = _Flow(trains, loop, following)
        after = flow.loop(loop, {name: frozenset({name}) for name in candidates})
        flow.follow(following, after)
        for name in sorted(candidates - seen):
            use = flow.uses.get(name)
            if use is None and not (
                _accumulates(loop, name) and _is_read(function, name, changes[name])
            ):
                continue
            seen.add(name)
            is_reset = any(_resets(each, loop, name) for each in outer)
            yield CarriedVariable(name, changes[name][-1], use, loop, is_reset)


def _accumulates(loop: Loop, name: str) -> bool:
    """Whether a loop computes the variable's value from the one before."""
    for node in _statements(loop):
        if name in _changed_in_place(node):
            return True
        if isinstance(node, ast.If) and name in _loads(node.test):
            inner = (s for _, body in _blocks(node) for s in body)
            if any(name in _stored(s) for s in inner):
                return True
        if name in _stored(node) and (
            isinstance(node, ast.AugAssign)
            or (isinstance(node, ast.Assign) and name in _loads(node.value))
        ):
            return True
    return False


def _is_read(function: ast.AST, name: str, changes: Iterable[ast.stmt]) -> bool:
    """Whether other statements than those that change the variable read it."""
    own = {id(n) for statement in changes for n in walk(statement)}
    return any(
        isinstance(n, ast.Name)
        and n.id == name
        and isinstance(n.ctx, ast.Load)
        and id(n) not in own
        for n in walk(function)
    )


def _resets(outer: Loop, inner: Loop, name: str) -> bool:
    inside = set(map(id, walk(inner)))
    return any(name in _stored(s) for s in _statements(outer) if id(s) not in inside)


# ----------------------------------------------------------------------------
# Values that a function computes from the weights before a loop: an anchor of the weights, a norm
# by which it divides, the outputs of the epoch's beginning. The loop resumes, but the function
# computes them again, from the weights of the step at which it resumes.


def _refuse_recomputed(
    function: Inlined,
    parameters: Collection[torch.Tensor],
    trains: Collection[str],
    *,
    is_called_again: bool,
    is_once: bool,
    saved: Collection[int],
    ignored: Collection[str],
) -> None:
    """Raise TrainingError for a variable that holds a value of the trained ``parameters``, computed
    before the innermost loop, and with which its steps train. ``is_called_again``: where the loop
    resumes. ``is_once``: by run.retry, and not in each epoch."""
    values = _Values(function.values, parameters, saved)
    first: Any = _function_around(function.tree, function.loops[0]) if is_called_again else None
    before: dict[str, tuple[ast.stmt, bool]] = {}
    for around, loop in zip([first, *function.loops], function.loops, strict=False):
        if around is not None:
            values.follow(_statements_before(around.body, loop))
            is_outer = around is first and is_once
            before |= {n: (s, is_outer) for n, s in values.computed.items() if n not in before}
    before = {n: each for n, each in before.items() if not _is_ignored(plain_name(n), ignored)}
    if not before:
        return
    loop = function.loops[-1]
    flow = _Flow(trains, loop)
    flow.loop(loop, {name: frozenset({name}) for name in before})
    for name, use in flow.uses.items():
        statement, is_outer = before[name]
        key = plain_name(name).rpartition(".")[2]
        condition = f"{key!r} not in run.state" if is_outer else "loader.index == 0"
        raise TrainingError(
            f"`{text_of(statement)}` is computed from the weights, and the steps of the loop train "
            f"with it: line {use.lineno}, `{text_of(use)}`. Where the loop resumes, it would be "
            "computed again, from later weights",
            hint=f"compute it once: if {condition}: run.state[{key!r}] = …, and use "
            f"run.state[{key!r}] from there on; or call run.untracked({plain_name(name)!r}) before "
            "training, if it need not be exact",
        )


def _function_around(tree: ast.AST, loop: Loop) -> ast.AST:
    around = [n for n in walk(tree) if isinstance(n, ast.FunctionDef) and _contains(n, loop)]
    return max(around, key=lambda function: function.lineno, default=tree)


def _contains(node: ast.AST, loop: Loop) -> bool:
    return any(inner is loop for inner in walk(node))


def _statements_before(body: Iterable[ast.stmt], loop: Loop) -> Iterator[ast.stmt]:
    for statement in body:
        if statement is loop:
            return
        if _contains(statement, loop):
            inside = [block for _, block in _blocks(statement)]
            around = (block for block in inside if any(_contains(each, loop) for each in block))
            yield from _statements_before(next(around, ()), loop)
            return
        yield statement


def _storage(tensor: torch.Tensor) -> int:
    return local_value(tensor).untyped_storage().data_ptr()


class _Values:
    """Which variables refer to weights, or hold values that statements have computed from them.

    ``variables``: their values now, as far as they are known.
    """

    def __init__(
        self,
        variables: Mapping[str, object],
        parameters: Iterable[torch.Tensor] = (),
        saved: Collection[int] = (),
    ) -> None:
        self._variables = variables
        self._parameters = {id(p): _storage(p) for p in parameters}
        self._storages = frozenset(self._parameters.values())
        self._saved = saved
        self.references = set[str]()
        self.computed: dict[str, ast.stmt] = {}  # by the statements

    def follow(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, (ast.For, ast.AsyncFor)) and self.reads(statement.iter):
                for name in _targets(statement.target):
                    self._assign(name, statement)
            for target, value in (
                assignments(statement) if isinstance(statement, _ASSIGNMENTS) else ()
            ):
                if self.reads(value) and not _is_of_the_job(target, ()):
                    for name in _targets(target) or {_root(target)}:
                        self._assign(name, statement)
                if not self.reads(value) and isinstance(target, ast.Name):
                    self.references.discard(target.id)
                    self.computed.pop(target.id, None)
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                call = statement.value
                if _is_in_place(call) and any(map(self.reads, call.args)):
                    self._assign(_receiver(call), statement)
            for _, block in _blocks(statement):
                self.follow(block)

    def reads(self, expression: ast.AST) -> bool:
        """Whether an expression is computed from the weights."""
        return any(
            reads_weights(node) or (isinstance(node, ast.Name) and node.id in self.references)
            for node in _nodes_of_contents(expression)
        )

    def _assign(self, name: str, statement: ast.stmt) -> None:
        value = self._variables.get(name)
        if value is None or self._is_reference(value):
            self.references.add(name)
        elif id(value) not in self._saved and self._is_value(value):
            self.computed[name] = statement

    def _is_reference(self, value: object) -> bool:
        elements = [*value] if isinstance(value, (list, tuple)) else [value]
        return any(id(each) in self._parameters for each in elements[:_ELEMENTS])

    def _is_value(self, value: object) -> bool:
        """Whether it is a number or tensors, and not the weights themselves."""
        if isinstance(value, torch.Tensor):
            return value.is_floating_point() and _storage(value) not in self._storages
        if isinstance(value, dict):
            return any(map(self._is_value, [*value.values()][:_ELEMENTS]))
        if isinstance(value, (list, tuple)):
            return any(map(self._is_value, value[:_ELEMENTS]))
        return isinstance(value, float)


# ----------------------------------------------------------------------------
# Whether the code after a loop needs the loop's last iteration.


def needs_last_iteration(frame: FrameType | None) -> bool:
    """Whether the script reads, after its loop over a loader, variables that only the loop assigns:
    ``print(loss.item())`` after an evaluation. They would not exist where the loop resumes at its
    end."""
    for one in frames_of_script(frame):
        if one is not None and not is_installed(one.f_code):
            return _needs_last_iteration(tree_of(one), one.f_lineno)
    return False


@functools.lru_cache(maxsize=16)  # asked in each pass
def _needs_last_iteration(tree: ast.AST, line: int) -> bool:
    return any(read_after(tree, loop) for loop in loops_around(tree, line)[-1:])


def read_after(function: ast.AST, loop: Loop) -> set[str]:
    """The variables that only the loop assigns, and that are read after it."""
    inside = set(map(id, walk(loop)))
    assigned = _targets(loop.target) if isinstance(loop, ast.For) else set()
    assigned = assigned.union(*map(_stored, _statements(loop)))
    elsewhere = {
        n.id
        for n in walk(function)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and id(n) not in inside
    }
    reads = _Reads()
    reads.block(_after(function, loop), set())
    return reads.names & assigned - elsewhere


# ----------------------------------------------------------------------------
# Which variables a function keeps in the job's state, or has from it.


def _kept(function: ast.AST) -> set[str]:
    """The names of tracked and wrapped objects, of what is stored in run.state or computed from it,
    and of parameters, whose first values the caller knows."""
    kept = {a.arg for n in walk(function) if isinstance(n, ast.arguments) for a in _args(n)}
    assigned = [*assignments(function)]
    for call in (n for n in walk(function) if isinstance(n, ast.Call)):
        if _name_of(call.func) in KEEPERS:
            kept |= {n for value in (*call.args, *call.keywords) for n in _loads(value)}
    has_changed = True
    while has_changed:
        before = len(kept)
        for target, value in assigned:
            names = {n.id for n in walk(target) if isinstance(n, ast.Name)}
            if isinstance(target, ast.Name):
                if _is_of_the_job(value, kept):
                    kept.add(target.id)
            elif isinstance(target, (ast.Tuple, ast.List)):
                if _is_of_the_job(value, kept) and not isinstance(value, ast.Tuple):
                    kept |= names
            elif _is_of_the_job(target, set()) or _root(target) in kept:
                kept |= set(_loads(value))  # run.state["h"] = h
        has_changed = len(kept) > before
    return kept


def _args(arguments: ast.arguments) -> list[ast.arg]:
    more = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more]


def _is_of_the_job(value: ast.AST, kept: Collection[str]) -> bool:
    for node in walk(value):
        if isinstance(node, ast.Attribute) and node.attr in _RESUMED:
            return True
        if isinstance(node, ast.Name) and plain_name(node.id) == "state":  # state = run.state
            return True
        if isinstance(node, ast.Call) and _name_of(node.func) in KEEPERS | _ITERATORS:
            return True
    # An element or a copy of what is kept, not what is computed with it: model(x).
    root = _root(value)
    return (root in kept and isinstance(value, (ast.Name, ast.Attribute, ast.Subscript))) or (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ("get", "setdefault", "clone", "to", "item")
        and root in kept
    )


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and values, those of tuples in pairs."""
    for node in walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if (
                    isinstance(target, (ast.Tuple, ast.List))
                    and isinstance(node.value, (ast.Tuple, ast.List))
                    and len(target.elts) == len(node.value.elts)
                ):
                    yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield node.target, node.value


# ----------------------------------------------------------------------------
# Which variables a loop changes, and which an iteration reads before it assigns them.


def _changes(function: ast.AST, loop: Loop) -> Iterator[tuple[str, ast.stmt]]:
    """The variables that a loop assigns, or changes in place if they hold a container or tensor
    from before the loop, each with a statement that does."""
    inside = set(map(id, walk(loop)))
    filled_first = _filled_first(loop)
    before = [
        (target.id, value)
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and id(target) not in inside and _is_container(value)
    ]
    emptied = {n for n in _emptied(loop) if _begins_empty([v for name, v in before if name == n])}
    held = {name for name, _ in before} - (_memos(loop) | filled_first | emptied)
    of_tensors = held - {name for name, value in before if _holds_numbers(value)}
    same = _made_once(loop) | filled_first
    elements = _elements(loop)
    for statement in _statements(loop):
        for name in _stored(statement):
            if name not in same:
                yield name, statement
            if isinstance(statement, ast.AugAssign) and elements.get(name) in of_tensors:
                yield elements[name], statement  # the tensor in the container
        for name in _changed_in_place(statement):
            if (of := elements.get(name, name)) in held:
                yield of, statement


def _emptied(loop: Loop) -> set[str]:
    """Containers that each iteration leaves empty."""
    if any(isinstance(n, ast.Continue) for n in walk(loop)):
        return set()
    last: dict[str, ast.stmt] = {}
    for statement in loop.body:
        last |= {n.id: statement for n in walk(statement) if isinstance(n, ast.Name)}
    return {
        name
        for name, statement in last.items()
        if _is_emptying(statement, name)
        or (isinstance(statement, Loop) and name in _emptied(statement))
    }


def _is_emptying(statement: ast.stmt, name: str) -> bool:
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    method = _name_of(statement.value.func) if is_call else "clear"  # type: ignore[attr-defined]
    return method == "clear" and _replaced(statement) == name


def _begins_empty(values: Sequence[ast.expr]) -> bool:
    """Whether each call of the function makes a new container without elements: one from outside
    keeps those of an interrupted step."""
    return all(map(_is_empty, values)) and not all(map(is_from_outside, values))


def _is_empty(value: ast.expr) -> bool:
    return not (getattr(value, "elts", ()) or getattr(value, "keys", ()) or _passes(value))


def _passes(value: ast.expr) -> bool:
    is_display = isinstance(value, (ast.List, ast.Dict, ast.Set))
    return not is_display and not (isinstance(value, ast.Call) and not value.args)


def _holds_numbers(value: ast.expr) -> bool:
    """Whether a container's elements are numbers, which ``+=`` does not change."""
    elements = value.elts if isinstance(value, (ast.List, ast.Tuple)) else []
    return bool(elements) and all(isinstance(each, ast.Constant) for each in elements)


def _pairs(target: ast.expr, source: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The parts of a loop's target, with what they are read from: ``zip``, ``enumerate``."""
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    args = source.args if isinstance(source, ast.Call) else []
    name = _name_of(source.func) if isinstance(source, ast.Call) else ""
    if name == "zip" and len(parts) == len(args):
        for part, arg in zip(parts, args, strict=True):
            yield from _pairs(part, arg)
    elif name == "enumerate" and len(parts) == 2 and args:
        yield parts[0], source
        yield from _pairs(parts[1], args[0])
    else:
        yield target, source


def _elements(loop: Loop) -> dict[str, str]:
    """The variables of loops inside a loop that are elements of containers, with these:
    ``for total, p in zip(totals, parameters)``."""
    elements: dict[str, str] = {}
    for inner in _statements(loop):
        if not isinstance(inner, ast.For):
            continue
        pairs = [(inner.target, inner.iter)]
        while pairs:
            target, source = pairs.pop()
            call = source if isinstance(source, ast.Call) else None
            parts = target.elts if isinstance(target, ast.Tuple) else []
            name = "" if call is None else _name_of(call.func)
            if call is not None and name == "zip":
                pairs += zip(parts, call.args, strict=False)
            elif call is not None and name == "enumerate" and len(parts) == 2:
                pairs += [(parts[1], source) for source in call.args[:1]]
            elif call is not None and isinstance(call.func, ast.Attribute):
                if name in ("items", "named_parameters", "named_buffers") and len(parts) == 2:
                    pairs.append((parts[1], call.func.value))
                elif name in ("values", "parameters", "buffers"):
                    pairs.append((target, call.func.value))
            elif isinstance(target, ast.Name) and isinstance(source, ast.Name):
                elements[target.id] = source.id
    return elements


def _statements(loop: Loop) -> Iterator[ast.stmt]:
    """Of a loop's body, without those of functions in it."""
    left: list[ast.stmt] = list(reversed(loop.body))
    while left:
        statement = left.pop()
        yield statement
        left += reversed([inner for _, body in _blocks(statement) for inner in body])


def _blocks(statement: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The names of a statement's blocks, and their statements, without those of functions."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for name in ("body", "orelse", "finalbody"):
            if block := getattr(part, name, None):
                yield name, block


def _stored(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        targets: Sequence[ast.AST] = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    else:
        return [n.target.id for n in _expressions(statement) if isinstance(n, ast.NamedExpr)]
    names = [n for target in targets for n in walk(target) if isinstance(n, ast.Name)]
    return [n.id for n in names if isinstance(n.ctx, ast.Store)]


def _changed_in_place(statement: ast.stmt) -> list[str]:
    names: list[str] = []
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Delete)):
        is_one = isinstance(statement, ast.AugAssign)
        targets = [statement.target] if is_one else statement.targets  # type: ignore[union-attr]
        names += [_root(t) for t in targets if isinstance(t, ast.Subscript)]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        names += [_receiver(call) for call in _chain(statement.value) if _is_in_place(call)]
    value = getattr(statement, "value", None)
    for call in walk(value) if isinstance(value, ast.expr) else ():
        if not isinstance(call, ast.Call):
            continue
        names += [_root(k.value) for k in call.keywords if k.arg == "out"]
        if _is_in_place(call):
            names.append(_receiver(call))
        function = _name_of(call.func)
        if call.args and (function in _CHANGES_ARGUMENT or _is_of_lists(function)):
            names.append(_root(call.args[0]))
    return names


def _is_of_lists(function: str) -> bool:
    """Whether it changes the tensors of a list: ``torch._foreach_mul_``."""
    return function.startswith("_foreach_") and function.endswith("_")


def _chain(call: ast.Call) -> Iterator[ast.Call]:
    """The calls of ``a.mul_(0.9).add_(b)``."""
    node: ast.AST = call
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func


def _is_in_place(call: ast.Call) -> bool:
    name = _name_of(call.func)
    is_method = isinstance(call.func, ast.Attribute)
    is_change = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
    return is_method and (is_change or name == "load_state_dict")


def _receiver(call: ast.Call) -> str:
    return _root(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)):
        return True
    return isinstance(value, ast.Call) and _name_of(value.func) in _CONTAINERS


def _memos(loop: Loop) -> set[str]:
    """Containers that the loop fills where it lacks an entry: a cache of what is the same each
    time, which is not computed from the weights."""
    tests = (n for n in walk(loop) if isinstance(n, ast.Compare))
    values = _Values({})
    values.follow(loop.body)
    return {
        _root(right)
        for test in tests
        for operation, right in zip(test.ops, test.comparators, strict=True)
        if isinstance(operation, (ast.In, ast.NotIn))
    } - values.references


def _filled_first(loop: Loop) -> set[str]:
    """Containers of which an iteration reads only elements that it has assigned: weights that SAM
    gives back (``old[p] = p.data.clone()``), outputs of layers that hooks keep."""
    inner = [n for statement in loop.body for n in walk(statement) if isinstance(n, ast.For)]
    slots = _Slots({name for each in inner for name in _targets(each.target)}, loop)
    slots.block(loop.body, set())
    return slots.stored - slots.others


_Slot = tuple[str, object]
"""An element of a container: the variable of the container, and a key, or the variable of one."""


class _Slots:
    """Finds elements of containers that are read without having been assigned, or whole containers
    that are read before all that the loop assigns. ``keys``: variables that may name elements."""

    def __init__(self, keys: Collection[str], loop: Loop) -> None:
        self._keys = keys
        self._of_loop: dict[str, set[_Slot]] = {}
        for target in (n for n in walk(loop) if isinstance(n, ast.Subscript)):
            if isinstance(target.ctx, ast.Store) and (slot := _slot(target, keys)) is not None:
                self._of_loop.setdefault(slot[0], set()).add(slot)
        self.stored: set[str] = set()
        self.others: set[str] = set()

    def block(self, body: Iterable[ast.AST], filled: set[_Slot]) -> None:
        """``filled``: elements that are assigned before; those that are after."""
        for node in body:
            self._visit(node, filled)

    def _visit(self, node: ast.AST, filled: set[_Slot]) -> None:
        slot = _slot(node, self._keys)
        if slot is not None:
            is_filled = any(slot[0] == container for container, _ in filled)
            if not is_filled or not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
                self.others.add(slot[0])
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and not self._is_filled(node.id, filled):
                self.others.add(node.id)
        elif isinstance(node, ast.Assign):
            self._visit(node.value, filled)
            for target in node.targets:
                if (slot := _slot(target, self._keys)) is None:
                    self._visit(target, filled)
                else:
                    self.stored.add(slot[0])
                    filled.add(slot)
        elif isinstance(node, ast.If):
            self._visit(node.test, filled)
            ways = [{*filled}, {*filled}]
            self.block(node.body, ways[0])
            self.block(node.orelse, ways[1])
            filled |= ways[0] & ways[1]
        else:
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                self.others.add(_root(node))
            elif isinstance(node, ast.Call) and _is_in_place(node):
                container = getattr(node.func, "value", None)  # itself, not an element
                self.others |= {container.id} if isinstance(container, ast.Name) else set()
            self.block(ast.iter_child_nodes(node), filled)

    def _is_filled(self, container: str, filled: set[_Slot]) -> bool:
        return container in self._of_loop and self._of_loop[container] <= filled


def _slot(node: ast.AST, keys: Collection[str]) -> _Slot | None:
    """An element whose key is constant, or the variable of a loop."""
    while isinstance(node, ast.Subscript):
        key, container = node.slice, node.value
        known = key_of(node)
        if known is None and isinstance(key, ast.Name) and key.id in keys:
            known = (key.id,)
        if isinstance(container, ast.Name):
            return None if known is None else (container.id, known)
        node = container
    return None


def _made_once(loop: Loop) -> set[str]:
    """Variables that the loop assigns only where they have no value yet, or one of another size: a
    mask, which is the same each time, unlike a mean of the first batch."""
    again, once = set[str](), set[str]()
    contents = _Values({})  # of the weights and of the batch
    contents.references |= _batch_of(loop)
    contents.follow(loop.body)
    left: list[tuple[ast.stmt, dict[str, bool]]] = [(node, {}) for node in loop.body]
    while left:
        statement, lacking = left.pop()
        for name in _stored(statement):
            read = statement.value if isinstance(statement, ast.Assign) else statement
            is_once = name in lacking and name not in _loads(read)
            is_same = lacking.get(name) or not contents.reads(read)
            (once if is_once and is_same else again).add(name)
        for part, body in _blocks(statement):
            is_tested = isinstance(statement, ast.If) and part == "body"
            more = _lacking(statement.test) if is_tested else {}  # type: ignore[attr-defined]
            left += [(inner, lacking | more) for inner in body]
    return once - again


def _batch_of(loop: Loop) -> set[str]:
    if not isinstance(loop, ast.For):
        return set()
    is_enumerated = isinstance(loop.iter, ast.Call) and _name_of(loop.iter.func) == "enumerate"
    is_pair = is_enumerated and isinstance(loop.target, ast.Tuple)
    return _targets(loop.target.elts[-1] if is_pair else loop.target)  # type: ignore[attr-defined]


def _nodes_of_contents(expression: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression on whose values its value depends, not only on their shapes."""
    left = [expression]
    while left:
        node = left.pop()
        if isinstance(node, ast.Attribute) and node.attr in _SHAPES:
            continue
        yield node
        is_shape = isinstance(node, ast.Call) and _name_of(node.func) in _SHAPES
        left += [] if is_shape else children(node)


def _lacking(test: ast.expr) -> dict[str, bool]:
    """The variables of which a condition asks whether they have a value, or which size: True."""
    names: dict[str, bool] = {}
    for node in walk(test):
        if isinstance(node, ast.Attribute) and node.attr in ("size", "shape"):
            names[_root(node)] = True
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is):
            for name in _loads(node.left) if _is_none(node.comparators[0]) else ():
                names.setdefault(name, False)
    return names


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _reads_of(loop: Loop) -> tuple[set[str], set[str]]:
    """The names that an iteration may read before it assigns them, and those that each assigns: all
    that it does, if there is only one iteration."""
    reads = _Reads()
    known = _targets(loop.target) if isinstance(loop, ast.For) else set()
    if isinstance(loop, ast.While):
        known = reads.expression(loop.test, known)
    assigned = reads.block(loop.body, known)
    if assigned is None:
        assigned = set().union(*map(_stored, _statements(loop)))
    return reads.names, assigned


class _Reads:
    """The names that statements may read although no statement before has assigned them."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def block(self, body: Sequence[ast.stmt], known: set[str]) -> set[str] | None:
        """``known``: the names that are assigned. Returns those after the statements, None if
        these are left in every case."""
        now: set[str] | None = known
        for statement in body:
            if now is None:
                return None
            now = self._statement(statement, now)
        return now

    def expression(self, node: ast.AST | None, known: set[str]) -> set[str]:
        """Returns the names that are assigned after an expression."""
        if node is None:
            return known
        ends: dict[str, tuple[int, int]] = {}  # where variables are assigned in the expression
        for inner in walk(node):
            if isinstance(inner, ast.NamedExpr):
                ends[inner.target.id] = (inner.end_lineno or 0, inner.end_col_offset or 0)
        reads = (n for n in walk(node) if isinstance(n, ast.Name) and n.id in ends)
        earlier = {
            n.id
            for n in reads
            if isinstance(n.ctx, ast.Load) and (n.lineno, n.col_offset) < ends[n.id]
        }
        self.names |= set(_loads(node)) - known - (ends.keys() - earlier)
        return known | ends.keys()

    def _statement(self, node: ast.stmt, known: set[str]) -> set[str] | None:
        if isinstance(node, ast.If):
            known = self.expression(node.test, known)
            return _both(self.block(node.body, known), self.block(node.orelse, known))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(node, known)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                known = self.expression(item.context_expr, known)
                known = known | (_targets(item.optional_vars) if item.optional_vars else set())
            return self.block(node.body, known)
        if isinstance(node, (ast.Try, ast.Match)):
            return self._branches(node, known)
        if isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            self.expression(node, known)
            return None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.expression(node, known)
            return known | {node.name}
        return self._plain(node, known)

    def _plain(self, node: ast.stmt, known: set[str]) -> set[str]:
        if isinstance(node, ast.AugAssign):
            known = self.expression(node.value, known)
            if isinstance(node.target, ast.Name):
                self.names |= {node.target.id} - known
            return self.expression(node.target, known) | _targets(node.target)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            known = self.expression(node.value, known)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if (name := _replaced_by(target)) is None:
                    known = self.expression(target, known) | _targets(target)
                else:
                    known = known | {name}
            return known
        if (name := _replaced(node)) is not None:
            return self.expression(node, known | {name})
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return known | {(a.asname or a.name).partition(".")[0] for a in node.names}
        return self.expression(node, known)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, known: set[str]) -> set[str]:
        is_for = not isinstance(node, ast.While)
        known = self.expression(node.iter if is_for else node.test, known)  # type: ignore[union-attr]
        inside = known | (_targets(node.target) if is_for else set())  # type: ignore[union-attr]
        # Without an iteration, most scripts would fail: a loss that is read after the loop is that
        # of this iteration of the loop around it.
        after = inside | (self.block(node.body, inside) or set())
        return after | (self.block(node.orelse, after) or set())

    def _branches(self, node: ast.Try | ast.Match, known: set[str]) -> set[str] | None:
        if isinstance(node, ast.Match):
            known = self.expression(node.subject, known)
            after: list[set[str] | None] = [known]
            for case in node.cases:
                names = {n.name for n in walk(case.pattern) if isinstance(n, ast.MatchAs)}
                after.append(self.block(case.body, known | {n for n in names if n}))
        else:
            done = self.block(node.body, known)
            after = [done if done is None else self.block(node.orelse, done)]
            for handler in node.handlers:
                after.append(self.block(handler.body, known | {handler.name or ""}))
        end: set[str] | None = None
        for each in after:
            end = _both(end, each)
        if isinstance(node, ast.Try) and node.finalbody:
            last = self.block(node.finalbody, known)
            end = None if end is None or last is None else end | last
        return end


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _replaced(statement: ast.stmt) -> str | None:
    """The variable all of whose content a statement replaces: ``losses.clear()``, ``del a[:]``."""
    if isinstance(statement, ast.Delete):
        return _replaced_by(statement.targets[0])
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None
    first = list(_chain(call))[-1]
    is_whole = isinstance(first.func, ast.Attribute) and isinstance(first.func.value, ast.Name)
    return _receiver(first) if is_whole and _name_of(first.func) in _REPLACES else None


def _replaced_by(target: ast.expr) -> str | None:
    """The same for an assignment: ``buffer[:] = …``."""
    is_all = (
        isinstance(target, ast.Subscript)
        and isinstance(target.value, ast.Name)
        and isinstance(target.slice, ast.Slice)
        and target.slice.lower is target.slice.upper is None
    )
    return target.value.id if is_all else None  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------
# Where values of variables get to.

_Origins = Mapping[str, frozenset[str]]
_NONE: frozenset[str] = frozenset()


def _is_count(node: ast.AST) -> bool:
    return hasattr(node, "is_count")


class _Flow:
    """Follows the values of carried variables through a loop's body and what follows it, and notes
    where they train, or decide when the training ends."""

    def __init__(
        self, trains: Collection[str], loop: Loop, following: Iterable[ast.stmt] = ()
    ) -> None:
        # Of enumerate, that begin again where the loop resumes.
        self._counts = frozenset(getattr(n, "id", "") for n in walk(loop) if _is_count(n))
        self._trains = trains
        self._called = _called(loop)
        self._weights = _names_of_weights([loop, *following])
        self._inner_loops = -1
        self.uses: dict[str, ast.expr] = {}

    def follow(self, body: Sequence[ast.stmt], now: _Origins) -> None:
        """The statements after the loop. They are in a loop around it, or end the function."""
        self._inner_loops += 1
        self._block(body, now, _NONE)
        self._inner_loops -= 1

    def loop(
        self,
        loop: ast.For | ast.AsyncFor | ast.While,
        before: _Origins,
        counts: frozenset[str] = _NONE,
    ) -> _Origins:
        """Returns the origins of each variable's value after the loop. ``counts``: on which it
        depends whether there is a loop."""
        self._inner_loops += 1
        after = self._loop(loop, before, counts)
        self._inner_loops -= 1
        return after

    def _loop(
        self, loop: ast.For | ast.AsyncFor | ast.While, before: _Origins, counts: frozenset[str]
    ) -> _Origins:
        now, decides = before, counts
        while True:
            if isinstance(loop, ast.While):
                inside = self._named(loop.test, now)
                decides = counts | self._of(loop.test, inside)
            else:
                self._note(loop.iter, now)
                inside = now
                for target, source in _pairs(loop.target, loop.iter):
                    inside = _with(inside, _targets(target), self._of(source, now))
            after = self._block(loop.body, inside, decides)
            joined = _join(now, after)
            if joined == now:
                return self._block(loop.orelse, now, _NONE)
            now = joined

    def _block(self, body: Sequence[ast.stmt], now: _Origins, decides: frozenset[str]) -> _Origins:
        """``decides``: on what it depends whether the statements are executed."""
        for statement in body:
            now = self._statement(statement, now, decides)
        return now

    def _statement(self, node: ast.stmt, now: _Origins, decides: frozenset[str]) -> _Origins:
        if isinstance(node, ast.If):
            self._note(node.test, now)
            now = self._named(node.test, now)
            if self._inner_loops == 0 and _leaves(node):
                self._train(node.test, self._of(node.test, now))
            origins = self._of(node.test, now)
            counts = origins & self._counts
            if _trains_somewhere(node):
                self._train(node.test, counts)
            if _is_remainder(node.test) and _trains_at_times(node):
                self._train(node.test, origins - counts)
            inner = decides | self._of_condition(node.test, now)
            return _join(self._block(node.body, now, inner), self._block(node.orelse, now, inner))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self.loop(node, now, decides & self._counts)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._note(item.context_expr, now)
                if item.optional_vars is not None:
                    origins = self._of(item.context_expr, now)
                    now = _with(now, _targets(item.optional_vars), origins)
            return self._block(node.body, now, decides)
        if isinstance(node, ast.Try):
            after = self._block(node.body, now, decides)
            ends = self._block(node.orelse, after, decides)
            for handler in node.handlers:
                ends = _join(ends, self._block(handler.body, _join(now, after), decides))
            return self._block(node.finalbody, ends, decides)
        if isinstance(node, ast.Match):
            inner, ends = decides | self._of(node.subject, now), now
            for case in node.cases:
                ends = _join(ends, self._block(case.body, now, inner))
            return ends
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _with(now, {node.name}, self._of(node, now))
        return self._plain(node, now, decides)

    def _plain(self, node: ast.stmt, now: _Origins, decides: frozenset[str]) -> _Origins:
        for expression in _expressions(node):
            self._note(expression, now)
        now = self._named(node, now)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                now = self._assign(target, node.value, now, decides)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            now = self._assign(node.target, node.value, now, decides)
        elif isinstance(node, ast.AugAssign):
            if _root(node.target) in self._weights:
                self._train(node.value, self._of(node.value, now) | decides)
            both = self._of(node.value, now) | self._of(_as_load(node.target), now)
            now = self._store(node.target, both, now, decides)
        elif isinstance(node, ast.Delete) and (replaced := _replaced(node)) is not None:
            now = _with(now, {replaced}, _NONE)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if self._changes_weights(node.value):
                self._train(node.value, decides - self._counts)
            for call in _chain(node.value):
                if _is_in_place(call) and (name := _receiver(call)) and not _is_kept(call.func):
                    is_new = _replaced(node) == name
                    before = _NONE if is_new else now.get(name, _NONE)
                    now = _with(now, {name}, before | self._of_arguments(call, now) | decides)
        return now

    def _assign(
        self, target: ast.expr, value: ast.expr, now: _Origins, decides: frozenset[str]
    ) -> _Origins:
        pairs = [(target, value)]
        if (
            isinstance(target, (ast.Tuple, ast.List))
            and isinstance(value, (ast.Tuple, ast.List))
            and len(target.elts) == len(value.elts)
        ):
            pairs = list(zip(target.elts, value.elts, strict=True))
        origins = [
            self._of(v, now) if isinstance(v, ast.BinOp) else self._of_condition(v, now)
            for _, v in pairs
        ]
        for (each, _), given in zip(pairs, origins, strict=True):
            now = self._store(each, given, now, decides)
        return now

    def _store(
        self, target: ast.expr, value: frozenset[str], now: _Origins, decides: frozenset[str]
    ) -> _Origins:
        origins = value | decides
        if isinstance(target, (ast.Tuple, ast.List, ast.Name, ast.Starred)):
            return _with(now, _targets(target), origins)
        if _is_training_state(target):
            # In some steps, an evaluation may replace the weights, and give them back.
            is_swap = isinstance(target, ast.Attribute) and target.attr == "data"
            self._train(target, origins - (decides & self._counts if is_swap else _NONE))
            return now
        if _is_kept(target):
            return now
        root = _replaced_by(target)
        before = _NONE if root is not None else now.get(_root(target), _NONE)
        # An attribute of another object: what else is read from it hardly depends on it. But it may
        # be a setting of a module: model.temperature = …; model(x)
        is_part = isinstance(target, ast.Subscript) or _root(target) in self._called
        return _with(now, {_root(target)}, before | origins) if is_part else now

    def _named(self, node: ast.AST, now: _Origins) -> _Origins:
        for inner in (n for n in walk(node) if isinstance(n, ast.NamedExpr)):
            now = _with(now, {inner.target.id}, self._of(inner.value, now))
        return now

    def _of(self, expression: ast.AST, now: _Origins) -> frozenset[str]:
        if isinstance(expression, ast.Call) and _name_of(expression.func) in _RETURN_NOTHING:
            return _NONE
        return _NONE.union(*(now.get(name, _NONE) for name in _loads(expression)))

    def _of_condition(self, expression: ast.expr, now: _Origins) -> frozenset[str]:
        """Without remainders of other counts than enumerate's, which select the batches of an
        accumulation, or the steps of a report."""
        if isinstance(expression, ast.BoolOp):
            return _NONE.union(*(self._of_condition(part, now) for part in expression.values))
        if isinstance(expression, ast.UnaryOp):
            return self._of_condition(expression.operand, now)
        is_choice = isinstance(expression, (ast.Compare, ast.BinOp)) and _is_remainder(expression)
        origins = self._of(expression, now)
        return origins & self._counts if is_choice else origins

    def _of_arguments(self, call: ast.Call, now: _Origins) -> frozenset[str]:
        return _NONE.union(*(self._of(value, now) for value in (*call.args, *call.keywords)))

    def _note(self, expression: ast.AST, now: _Origins) -> None:
        """Note the calls in an expression that train with a carried value."""
        for call in (n for n in walk(expression) if isinstance(n, ast.Call)):
            name = _name_of(call.func)
            if name == "backward":
                self._train(call, self._of(call, now))
            elif name in self._trains or name == "step" or _sets(call) or _changes_job(call):
                self._train(call, self._of_arguments(call, now))
                if name == "step":  # by which of two optimizers
                    self._train(call, now.get(_root(call.func), _NONE))
            elif _changes_state(call) or self._changes_weights(call):
                origins = self._of_arguments(call, now)
                counts = self._counts if _is_replacement(call) else _NONE
                self._train(call, origins - counts)

    def _changes_weights(self, call: ast.Call) -> bool:
        name = _name_of(call.func)
        if _is_of_lists(name) and call.args:
            return _root(call.args[0]) in self._weights
        is_change = _is_in_place(call) and _receiver(call) in self._weights
        return is_change or name == "vector_to_parameters"

    def _train(self, use: ast.expr, origins: frozenset[str]) -> None:
        for name in origins:
            self.uses.setdefault(name, use)


def _names_of_weights(statements: Iterable[ast.stmt]) -> set[str]:
    """The variables that are parameters, or lists of them."""
    names: set[str] = set()

    def reads(expression: ast.AST) -> bool:
        return any(
            (isinstance(n, ast.Call) and _name_of(n.func) in _OF_WEIGHTS)
            or (isinstance(n, ast.Name) and (n.id in names or reads_weights(n)))
            or (isinstance(n, ast.Subscript) and key_of(n) == "params")
            for n in walk(expression)
        )

    nodes = [n for statement in statements for n in walk(statement)]
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and reads_weights(n)}
    for _ in range(_PASSES):
        for node in nodes:
            if isinstance(node, ast.For):
                read = [each for each, source in _pairs(node.target, node.iter) if reads(source)]
                names |= set[str]().union(*map(_targets, read))
            elif isinstance(node, ast.Assign) and _lists(node.value) and reads(node.value):
                names |= _targets(node.targets[0])
    return names


def _lists(value: ast.expr) -> bool:
    """Whether it lists what it reads: ``list(model.parameters())``, ``[p for p in …]``."""
    if isinstance(value, ast.ListComp):
        return isinstance(value.elt, ast.Name)
    is_call = isinstance(value, ast.Call)
    return is_call and _name_of(value.func) in _LISTS | _OF_WEIGHTS  # type: ignore[attr-defined]


def _leaves(node: ast.If) -> bool:
    """Whether a branch leaves the loop around it."""
    ways_out = (ast.Break, ast.Return)
    return any(isinstance(last, ways_out) for last in (node.body[-1], *node.orelse[-1:]))


def _after(function: ast.AST, loop: Loop) -> list[ast.stmt]:
    """The statements that follow a loop: those of the blocks around it, the innermost first."""
    for node in walk(function):
        for body in (getattr(node, "body", ()), getattr(node, "orelse", ())):
            if isinstance(body, list) and loop in body:
                rest = body[body.index(loop) + 1 :]
                around = () if node is function or not isinstance(node, ast.stmt) else (node,)
                return [*rest, *(s for n in around for s in _after(function, n))]  # type: ignore[arg-type]
    return []


def _is_kept(target: ast.expr) -> bool:
    """Whether it is an entry of run.state, which is restored."""
    return any(isinstance(n, ast.Attribute) and n.attr == "state" for n in walk(target))


def _called(loop: Loop) -> set[str]:
    """The variables that are called: modules, losses."""
    calls = (n for n in walk(loop) if isinstance(n, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def _sets(call: ast.Call) -> bool:
    """Whether a call sets a rate, or clips gradients: ``group.update(lr=…)``."""
    name = _name_of(call.func)
    if name.startswith(("set_", "clip_grad")):
        return not name.startswith(_SETS_OTHERS)
    return name == "update" and any(keyword.arg in _SETTINGS for keyword in call.keywords)


def _changes_state(call: ast.Call) -> bool:
    is_method = isinstance(call.func, ast.Attribute)
    return is_method and _is_in_place(call) and _is_training_state(call.func.value)  # type: ignore[attr-defined]


def _changes_job(call: ast.Call) -> bool:
    return getattr(call, "changes_job", False)


def _is_training_state(target: ast.expr) -> bool:
    """Gradients, weights, or a setting of an optimizer."""
    if isinstance(target, ast.Attribute):
        return target.attr in ("grad", "data")
    return isinstance(target, ast.Subscript) and key_of(target) in _SETTINGS


def _is_remainder(test: ast.expr) -> bool:
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in walk(test))


def _trains_somewhere(node: ast.If) -> bool:
    """Whether a branch computes or changes gradients, or updates weights, rates or averages. An
    evaluation may replace weights, and give them back."""
    weights = {
        name
        for inner in walk(node)
        if isinstance(inner, ast.For) and _names_called(inner.iter) & _OF_WEIGHTS
        for name in _targets(inner.target)
    }
    return any(
        _name_of(call.func) in ("backward", "step")
        or _sets(call)
        or _changes_job(call)
        or (_is_in_place(call) and _receiver(call) in weights and not _is_replacement(call))
        for call in walk(node)
        if isinstance(call, ast.Call) and "prof" not in _root(call.func)
    )


def _names_called(tree: ast.AST) -> set[str]:
    return {_name_of(n.func) for n in walk(tree) if isinstance(n, ast.Call)}


def _is_replacement(call: ast.Call) -> bool:
    return _name_of(call.func) in _REPLACES and _receiver(call) not in _loads(ast.Tuple(call.args))


def _trains_at_times(node: ast.If) -> bool:
    """Whether a branch computes gradients that other steps lack, as for the generator of a GAN, or
    updates an average of the weights: not as the batches of an accumulation, and after them."""
    names = _names_called(node)
    if "backward" in names:
        return "no_sync" not in names
    calls = (n for n in walk(node) if isinstance(n, ast.Call))
    return "step" not in names and any(map(_changes_job, calls))


def _with(now: _Origins, names: Iterable[str], origins: frozenset[str]) -> _Origins:
    return {**now, **dict.fromkeys(names, origins)}


def _join(one: _Origins, other: _Origins) -> _Origins:
    return {n: one.get(n, _NONE) | other.get(n, _NONE) for n in (*one, *other)}


# ----------------------------------------------------------------------------
# Names in expressions.


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    return (n for n in walk(statement) if isinstance(n, ast.expr))


def _loads(tree: ast.AST) -> Iterator[str]:
    """The variables that an expression reads, also in functions that it defines, without the
    variables of those and of comprehensions."""
    own: set[str] = set()
    for node in walk(tree):
        if isinstance(node, _COMPREHENSIONS):
            own |= {n for g in node.generators for n in _targets(g.target)}
        elif isinstance(node, _Function):
            own |= {a.arg for a in _args(node.args)} | _locals(node)
    for node in walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in own:
            yield node.id


def _locals(function: _Function) -> set[str]:
    nodes = walk(function)
    outer = {name for n in nodes if isinstance(n, (ast.Nonlocal, ast.Global)) for name in n.names}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name for name in stored - outer if "." not in name}  # attributes are of others


def _targets(target: ast.AST) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Starred):
        return _targets(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for each in target.elts for name in _targets(each)}
    return set()


def _as_load(target: ast.expr) -> ast.expr:
    return ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target


def _root(expression: ast.AST) -> str:
    """The variable of an attribute, an element or a method's result."""
    while isinstance(expression, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def _name_of(function: ast.expr) -> str:
    name = str(getattr(function, "attr", getattr(function, "id", "")))
    return plain_name(name).rpartition(".")[2]
