"""The functions of a script that are being called, as one function.

What a loop carries from step to step need not be a variable of the function with the loop. It may
be an attribute (``self.count += 1``), a variable that a function inside changes (``nonlocal``,
``global``), the sum in a meter, or the position of an iterator. So the bodies of the script's
functions replace the calls of them, and what the script's objects hold becomes variables, of which
each has one name, whichever function uses it; so do containers and tensors, whichever names they
have. Functions that Python, torch or a library calls are replaced where that happens: special
methods, properties, hooks, arguments. A loop over a generator of the script becomes the
generator, with the loop's body in the place of ``yield``; a loop over callbacks has a body for
each. Which function a call executes, and which object a variable holds, is looked up in the frames
when the first step begins, and so is a condition that never changes (``if args.anneal:``).
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import inspect
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic import torch_private
from elastic.train.attributes import has_state, objects_of_data
from elastic.train.checks import (
    Loop,
    attempts_around,
    local_variables,
    loops_around,
    parsed,
    tree_of,
    tree_of_file,
)
from elastic.train.ddp import ElasticDDP
from elastic.train.generators import GENERATORS
from elastic.train.loader import ElasticLoader
from elastic.train.origin import is_defined_by_script, is_of_script
from elastic.train.syntax import Transformer, children, copied, walk

_DEPTH = 6  # calls inside each other
_STATEMENTS = 4_000  # of all functions
_MARK = "§"  # between a name and a number, where several variables have one name
_UNKNOWN = object()
# Instances of their classes hold no state of the script.
_STATELESS = frozenset({"torch", "torchvision", "numpy", "elastic", "checkpoints", "logging"})
_MUTABLE = (list, dict, set, deque, torch.Tensor, np.ndarray)
_READS_WEIGHTS = frozenset({"parameters", "named_parameters", "state_dict"})
# Calls by which the run keeps a value, or gives an object that belongs to it.
KEEPERS = frozenset({"track", "wrap", "loader", "shard", "build", "prepare", "setup"})
_OF_MODULES = frozenset(vars(nn.Module()))
_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CONSTANTS = (bool, int, float, str)
_SEEDS = frozenset({"manual_seed", "seed", "set_state", "setstate"})
_BARS = frozenset({"tqdm", "track"})  # tqdm's and rich's, around enumerate(loader)
_ELEMENTS = 16  # of a loop over callbacks
_SEARCHED = 200  # objects that an iterator may refer to


@dataclass(frozen=True)
class Inlined:
    """One function for calls inside each other."""

    tree: ast.AST
    loops: list[Loop]  # around the current line, the outermost first
    code: CodeType  # of the innermost call
    iterators: Collection[str]  # variables that stand for the positions of iterators
    generators: Collection[str]  # and of generators of random numbers
    buffers: Collection[str]  # variables that stand for tensors of modules
    of_modules: Collection[str]  # variables that stand for numbers, flags and buffers of modules
    attributes: Collection[str]  # for numbers and flags of the job's modules
    values: Mapping[str, object]  # of variables that exist now


def inlined(
    frames: Iterable[FrameType],
    saved: Collection[int] = (),
    *,
    counts_continue: bool = False,
    modules: Collection[nn.Module] = (),
) -> Iterator[Inlined]:
    """One function for the script's calls, or several, if a call cannot be found in its caller's
    source. ``frames``: the innermost first. ``saved``: ids of what belongs to the job's state.
    ``counts_continue``: ``enumerate`` continues its count where the loop resumes. ``modules``:
    those that are trained."""
    left = [*frames][::-1]
    while left:
        inliner = _Inliner(left, saved, counts_continue, modules)
        yield inliner.result()
        left = left[inliner.depth :]


def source_of(node: ast.AST, default: CodeType) -> CodeType:
    """The function that has a statement."""
    code = getattr(node, "code", default)
    return code if isinstance(code, CodeType) else default


def plain_name(name: str) -> str:
    """Of a variable, as the script spells it."""
    return name.partition(_MARK)[0]


def text_of(node: ast.AST) -> str:
    """The first line of a statement or expression, with the script's names."""
    if isinstance(text := getattr(node, "text", None), str):
        return text
    plain = copied(node.value if hasattr(node, "is_result") else node)  # type: ignore[attr-defined]
    for inner in walk(plain):
        if isinstance(inner, ast.Name):
            inner.id = getattr(inner, "spelled", plain_name(inner.id))
    return ast.unparse(plain).partition("\n")[0]


def key_of(node: ast.Subscript) -> object:
    """The key of an element, if it is the same in all steps; otherwise None."""
    return node.slice.value if isinstance(node.slice, ast.Constant) else getattr(node, "key", None)


def is_from_outside(container: ast.expr) -> bool:
    """Whether it takes the place of a container from before the functions are called."""
    return hasattr(container, "is_from_outside")


def reads_weights(node: ast.AST) -> bool:
    """Whether an expression is a call of a trained module, or reads or lists its weights."""
    return getattr(node, "reads_weights", False)


def is_stateless(module: str) -> bool:
    """Whether instances of a module's classes hold no state of the script."""
    # Integrations track objects that save the state of a trainer's own, such as its callbacks.
    package, _, name = module.partition(".")
    return package in _STATELESS and not name.startswith("integrations.")


# ----------------------------------------------------------------------------
# Which variable a name means.

_Node = TypeVar("_Node", bound=ast.AST)
_Key = Hashable  # equal for two names of one variable


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a function of the script."""

    number: int
    code: CodeType
    globals: Mapping[str, Any]
    values: dict[str, object]
    cells: Mapping[str, Any] = field(default_factory=dict)
    caller: _Call | None = None
    frame: FrameType | None = None
    first_line: int = 0  # what is called before is of no interest
    fixed: Collection[str] = ()  # parameters whose values are the same in all steps

    @property
    def around(self) -> Iterator[_Call]:
        """This call and those around it."""
        call: _Call | None = self
        while call is not None:
            yield call
            call = call.caller

    def key(self, name: str) -> _Key:
        if self._is_local(name):
            if name not in self.code.co_freevars:
                return (self.number, name)
            for call in (*self.around,)[1:]:
                if call._is_local(name) and self.code in _codes_in(call.code):
                    return call.key(name)
            return ("cell", id(self.cells.get(name)), name)
        value = self.globals.get(name, _UNKNOWN)
        if value is _UNKNOWN or isinstance(value, (ModuleType, type, FunctionType)):
            return name
        return ("global", id(self.globals), name)

    def value(self, name: str) -> object:
        if name in self.values:
            return self.values[name]
        if name in self.cells:
            return _content(self.cells[name])
        return _UNKNOWN if self._is_local(name) else self.globals.get(name, _UNKNOWN)

    def is_fixed(self, name: str) -> bool:
        """Whether a variable has its value in all steps."""
        if name in _rebound(self.code.co_filename).names:
            return False
        is_own = self._is_local(name) and name not in self.code.co_freevars
        for call in (self,) if is_own else self.around:
            last = _last_stores(call.code, call.code.co_filename).get(name, 0)
            if call.frame is None:
                if call is self and is_own:
                    return name in self.fixed and not last
            elif last >= max(call.first_line, 1) and (call is self or call._owns(name)):
                return False
        return True

    def _owns(self, name: str) -> bool:
        """Whether it is a variable of this function, or of a module that is being executed."""
        is_function = self.code.co_flags & inspect.CO_OPTIMIZED
        return not is_function or self._is_local(name)

    def _is_local(self, name: str) -> bool:
        code = self.code
        names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        return bool(code.co_flags & inspect.CO_OPTIMIZED) and name in names


def _key_of_object(value: object) -> _Key:
    return ("object", id(value))


def _keys_of_objects(variables: Mapping[str, object]) -> set[_Key]:
    return {_key_of_object(v) for v in variables.values() if isinstance(v, _MUTABLE)}


def _attributes(one: object) -> dict[str, object]:
    """Of an object, also those in ``__slots__``."""
    in_slots = {
        name: value.__get__(one)
        for each in type.mro(type(one))
        if "__slots__" in vars(each)
        for name, value in vars(each).items()
        if isinstance(value, MemberDescriptorType) and hasattr(one, name)
    }
    return {**in_slots, **getattr(one, "__dict__", {})}


def _attributes_and_buffers(module: nn.Module) -> dict[str, object]:
    return {**vars(module), **dict(module.named_buffers(recurse=False))}


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNKNOWN  # not assigned yet


@functools.lru_cache(maxsize=64)
def _codes_in(code: CodeType) -> frozenset[CodeType]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(inner).union(*map(_codes_in, inner))


@dataclass(frozen=True)
class _Rebound:
    """What functions of a file assign outside of their own variables."""

    names: frozenset[str]  # global, nonlocal
    attributes: frozenset[str]  # outside of constructors
    created: frozenset[str]  # attributes, by constructors


@functools.lru_cache(maxsize=16)
def _rebound(file: str) -> _Rebound:
    names, attributes, created = set[str](), set[str](), set[str]()
    left: list[tuple[ast.AST, set[str]]] = [(tree_of_file(file), attributes)]
    while left:
        node, stored = left.pop()
        if isinstance(node, ast.FunctionDef):
            stored = created if node.name == "__init__" else attributes
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            names |= {*node.names}
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            stored.add(node.attr)
        left += [(child, stored) for child in children(node)]
    return _Rebound(frozenset(names), frozenset(attributes), frozenset(created))


@functools.lru_cache(maxsize=64)
def _last_stores(code: CodeType, file: str) -> Mapping[str, int]:
    """The last lines in which a function assigns its variables."""
    last = dict[str, int]()
    tree = parsed(code, file)
    left: list[ast.AST] = [_function_in(tree, code) or tree]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            last[node.id] = max(last.get(node.id, 0), node.lineno)
        left += [child for child in children(node) if not isinstance(child, functions)]
    return last


def _files_of(owner: type) -> set[str]:
    """The files of the script that have the methods of a class."""
    values = (value for each in type.mro(owner) for value in vars(each).values())
    codes = (value.__code__ for value in values if isinstance(value, FunctionType))
    return {code.co_filename for code in codes if is_of_script(code)}


def _has_source(value: object) -> bool:
    """Whether it is a function of the script, or has methods that are."""
    code = getattr(value, "__code__", None)
    return is_of_script(code) if isinstance(code, CodeType) else bool(_files_of(type(value)))


def _entry(container: Any, key: object) -> object:
    if type(container) in (dict, defaultdict) and isinstance(key, (str, int)):
        return dict.get(container, key, _UNKNOWN)
    if isinstance(container, nn.ModuleDict) and isinstance(key, str):
        return dict(container.named_children()).get(key, _UNKNOWN)
    kinds = (list, tuple, nn.Sequential, nn.ModuleList)
    if isinstance(container, kinds) and isinstance(key, int):
        return container[key] if -len(container) <= key < len(container) else _UNKNOWN
    return _UNKNOWN


def _defaults(function: FunctionType, call: ast.Call) -> dict[str, object]:
    """The values of parameters that a call may leave out."""
    if any(keyword.arg is None for keyword in call.keywords):
        return {}
    defaults = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


@dataclass(frozen=True)
class _Hook:
    """A function that torch calls, with the module or optimizer on which it is registered."""

    function: object
    owner: object


def _hooks_of_modules(layers: Iterable[nn.Module], kind: str) -> Iterator[_Hook]:
    """Of the script. ``kind``: "forward" or "backward"."""
    for layer in layers:
        for hook in torch_private.hooks_of_pass(layer, kind):
            if _has_source(_plain(hook)):
                yield _Hook(hook, layer)


def _is_of_script(hook: _Hook) -> bool:
    return _has_source(_plain(hook.function))


def _plain(function: Any) -> object:
    """The function of a method, or of ``functools.partial``."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _unwrapped(module: Any) -> object:
    """The module that DDP or ``torch.compile`` calls."""
    if isinstance(module, ElasticDDP):
        return _unwrapped(module.module)
    original = torch_private.compiled(module) if isinstance(module, nn.Module) else None
    return module if original is None else _unwrapped(original)


def _inherited(owner: object, of: object, name: str) -> object:
    """What ``super()`` finds in a method of the class ``of``."""
    classes = type.mro(owner if isinstance(owner, type) else type(owner))
    after = classes[classes.index(of) + 1 :] if isinstance(of, type) and of in classes else []
    return next((vars(one)[name] for one in after if name in vars(one)), None)


@dataclass(frozen=True)
class _Called:
    """What a call in the source executes."""

    function: ast.FunctionDef
    call: _Call
    receiver: ast.expr | None  # the object whose method it is


# ----------------------------------------------------------------------------
# Makes one function.


class _Inliner:
    """Of the outermost frame, and of those that are called in it, as far as their calls are found.

    ``depth``: the number of these frames.
    """

    def __init__(
        self,
        frames: Sequence[FrameType],
        saved: Collection[int],
        counts_continue: bool,
        modules: Collection[nn.Module],
    ) -> None:
        self._frames = frames
        self._modules = modules
        parameters = (p for module in modules for p in module.parameters() if p.requires_grad)
        self._weights = frozenset(map(id, parameters))
        self._real: dict[int, _Call] = {}  # those of the frames, by number
        self._counts_continue = counts_continue
        self._saved = saved
        self._names: dict[_Key, str] = {}
        self._owners: dict[int, str] = {}  # expressions for objects, by id
        self._outside: dict[_Key, object] = {}  # values of what no call of a function creates
        self._read: list[tuple[ast.For, ElasticLoader]] = []  # loops over the job's loaders
        self._steps: list[tuple[ast.Call, list[FunctionType]]] = []  # of schedulers with functions
        self._layers: list[tuple[ast.Tuple, list[nn.Module]]] = []  # in calls of modules
        self._created: list[tuple[ast.Assign, object]] = []  # with the object before
        self._calls = self._statements = 0
        self.hooks_called: set[int] = set()  # in the current call of a module, by id
        self._loops: list[Loop] = []
        self._iterators: set[str] = set()
        self._generators: set[str] = set()
        self._buffers: set[str] = set()
        self._of_modules: set[str] = set()
        self._attributes: set[str] = set()
        self.depth = 0

    def result(self) -> Inlined:
        frame = self._frames[0]
        tree = copied(tree_of(frame))
        call = self._enter(frame, tree, None)
        root: Any = _function_in(tree, frame.f_code) or tree
        root.body = self.block(root.body, call)
        if isinstance(root, ast.FunctionDef):
            _Expressions(self, call).visit(root.args)
        nodes: list[Any] = [n for n in walk(tree) if hasattr(n, "variable")]
        stored = {n.variable for n in nodes if not isinstance(n.ctx, ast.Load)}
        held = {key for key, value in self._outside.items() if self._is_held(value)}
        for statement, owner in self._created:
            inside = _keys_of_objects(_attributes(owner))
            keys = [k for k in {*stored, *held, (id(owner), "")} if k in self._names]
            own = [k for k in keys if k in inside or (isinstance(k, tuple) and k[0] == id(owner))]
            statement.targets = [ast.Name(self._names[k], ast.Store()) for k in own]
        _Attributes(self._names, stored | held).visit(tree)
        assigned = {n.id for n in walk(tree) if isinstance(n, ast.Name) and _is_stored(n)}
        self._read_data({k for k, name in self._names.items() if name in assigned or k in held})
        before = {self._names[key]: self._outside[key] for key in held}
        containers = [_assignment(name, _display(before[name]), tree) for name in sorted(before)]
        root.body[:0] = containers
        innermost = self._frames[self.depth - 1].f_code
        ast.fix_missing_locations(tree)
        return Inlined(
            tree,
            self._loops,
            innermost,
            self._iterators,
            self._generators,
            self._buffers,
            self._of_modules,
            self._attributes,
            {n: v for k, n in self._names.items() if (v := self._now(k)) is not _UNKNOWN},
        )

    def _is_held(self, value: object) -> bool:
        """Whether it is changed in place: a container, or a module that is not made of modules of
        the job, by ``load_state_dict`` or by its parameters."""
        if isinstance(value, nn.Module):
            return any(id(p) not in self._saved for p in value.parameters())
        is_weight = isinstance(value, torch.Tensor) and value.requires_grad
        return isinstance(value, _MUTABLE) and not (is_weight or self._lists_weights(value))

    def _now(self, key: Any) -> object:
        """The value that a variable has now, as far as it is known."""
        if key in self._outside:
            return self._outside[key]
        call = self._real.get(key[0]) if isinstance(key, tuple) else None
        return call.value(key[1]) if call is not None else _UNKNOWN

    def _enter(self, frame: FrameType, tree: ast.AST, caller: _Call | None) -> _Call:
        """Begin with the function of the next frame."""
        line = frame.f_lineno
        attempt = max((loop.lineno for loop in attempts_around(tree, line)), default=0)
        loops = [loop for loop in loops_around(tree, line) if loop.lineno > attempt]
        is_in_a_loop = bool(self._loops)
        first = min((loop.lineno for loop in loops), default=line)
        self._loops += loops
        self.depth += 1
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        number = self._next()
        self._real[number] = _Call(
            number,
            frame.f_code,
            frame.f_globals,
            local_variables(frame) if is_function else {},
            caller=caller,
            frame=frame,
            first_line=0 if is_in_a_loop else first,
        )
        return self._real[number]

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    # -- statements ---------------------------------------------------------------------------

    def block(self, body: Iterable[ast.stmt], call: _Call) -> list[ast.stmt]:
        return [inner for statement in body for inner in self._statement(statement, call)]

    def _statement(self, node: Any, call: _Call) -> Iterator[ast.stmt]:
        node.code = call.code
        if isinstance(node, ast.If) and (is_true := self.decided(node, call)) is not None:
            yield from self.block(node.body if is_true else node.orelse, call)
            return
        if (plain := self._plain_form(node, call)) is not None:
            yield from self.block(plain, call)
            return
        if isinstance(node, ast.With) and (manager := self._manager(node, call)) is not None:
            yield from self._managed(node, manager, call)
            return
        if isinstance(node, ast.For) and (generator := self._generator(node, call)) is not None:
            yield from self._yielding(node, generator, call)
            return
        if isinstance(node, ast.For):
            node.body[:0] = self._next_elements(node, call)
        elements = self._elements(node, call) if isinstance(node, ast.For) else []
        index = self._index(node, call) if isinstance(node, ast.For) else []
        owner, created = self._created_by(node, call)
        expressions = _Expressions(self, call)
        expressions.is_inner = expressions.is_elsewhere = (node.end_lineno or 0) < call.first_line
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            expressions.is_inner = expressions.is_elsewhere = True
            yield expressions.visit(node)
            return
        loader = self._loader(node, call) if isinstance(node, ast.For) else None
        if loader is not None:
            self._read.append((node, loader))
        for name, value in ast.iter_fields(node):
            expressions.is_head = name == "iter"
            if isinstance(value, ast.expr):
                setattr(node, name, expressions.visit(value))
            elif isinstance(value, list):
                parts = (ast.expr, ast.withitem)
                visited = [expressions.visit(v) if isinstance(v, parts) else v for v in value]
                setattr(node, name, visited)
        yield from (*expressions.before, *index[:1])
        for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for name in ("body", "orelse", "finalbody"):
                if isinstance(inner := getattr(part, name, None), list):
                    block = self._for_each(elements, node, call) if name == "body" else None
                    setattr(part, name, block or self.block(inner, call))
        if isinstance(node, ast.While):
            node.body += [copied(each) for each in expressions.before]
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            node.body[:0] = [*index[1:], *expressions.advanced]
        yield node
        if self._is_plain(owner) or is_own_iterator(owner):
            again = ast.Assign([], ast.Tuple([copied(each) for each in created.args], ast.Load()))
            self._created.append((again, owner))
            yield ast.copy_location(again, node)

    def _plain_form(self, node: ast.stmt, call: _Call) -> list[ast.stmt] | None:
        """The calls that a statement makes of special methods of the script: ``bank[key] = value``,
        ``with scaled:``."""
        if isinstance(node, ast.With):
            first, *others = node.items
            if others:
                inner = _located(ast.With(others, node.body), node)
                return [_located(ast.With([first], [inner]), node)]
            enter = self.special_method(first.context_expr, "__enter__", call)
            leave = self.special_method(first.context_expr, "__exit__", call)
            if enter is None or leave is None:
                return None
            target = first.optional_vars or ast.Name(f"entered{_MARK}", ast.Store())
            nothing: list[ast.expr] = [ast.Constant(None) for _ in range(3)]
            begin = ast.Assign([target], ast.Call(enter, [], []))
            end = ast.Expr(ast.Call(leave, nothing, []))
            return [_all_located(begin, node), *node.body, _all_located(end, node)]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return self._assigned_by_name(node.value, call)
        is_set = isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign) and len(node.targets) == 1
        )
        target = (getattr(node, "targets", None) or [getattr(node, "target", None)])[0]
        if not is_set or not isinstance(target, ast.Subscript):
            return None
        method = self.special_method(target.value, "__setitem__", call)
        if method is None:
            return None
        value: Any = node.value  # type: ignore[attr-defined]
        if isinstance(node, ast.AugAssign):
            element = ast.Subscript(copied(target.value), copied(target.slice), ast.Load())
            value = ast.BinOp(element, node.op, value)
        plain = ast.Expr(ast.Call(method, [target.slice, value], []))
        return [_all_located(plain, node)]

    def _assigned_by_name(self, node: ast.Call, call: _Call) -> list[ast.stmt] | None:
        """``object.name = value`` for ``setattr(object, name, value)``."""
        if _name_of(node.func) != "setattr" or len(node.args) != 3:
            return None
        owner, name, value = node.args
        key = self.value(name, call)
        if not isinstance(key, str) or not key.isidentifier():
            return None
        target = ast.Attribute(owner, key, ast.Store())
        return [_all_located(ast.Assign([target], value), node)]

    def _manager(self, node: ast.With, call: _Call) -> tuple[ast.Call, _Called] | None:
        """The generator of the script that is used as a context manager."""
        head = node.items[0].context_expr
        if not isinstance(head, ast.Call) or (node.end_lineno or 0) < call.first_line:
            return None
        found, _, _ = self._method(head.func, call)
        is_generator = found is not None and bool(found.__code__.co_flags & inspect.CO_GENERATOR)
        if not is_generator:
            return None
        called = self.called(head, call, may_pause=True)
        return None if called is None else (head, called)

    def _managed(
        self, node: ast.With, manager: tuple[ast.Call, _Called], call: _Call
    ) -> Iterator[ast.stmt]:
        """The generator, with the body of the ``with`` in the place of ``yield``."""
        head, called = manager
        expressions = _Expressions(self, call)
        expressions.generic_visit(head)
        statements, _ = self.inline(head, called)
        target = node.items[0].optional_vars
        given = ast.Name(f"entered{_MARK}", ast.Store())
        target = given if target is None else expressions.visit(target)
        body = self.block(node.body, call)

        def replace(value: ast.expr) -> list[ast.stmt]:
            nonlocal body
            now, body = body, [copied(each) for each in body]
            return [_located(ast.Assign([copied(target)], value), node), *now]

        yield from expressions.before
        yield from _Yields(replace).block(statements)

    def _next_elements(self, node: ast.For, call: _Call) -> list[ast.stmt]:
        """Statements that read iterators of the script, where a loop does."""
        head, target = node.iter, node.target
        pairs = [(target, head)]
        if isinstance(head, ast.Call) and _name_of(head.func) == "zip":
            pairs = [*zip(getattr(target, "elts", ()), head.args, strict=False)]
        if any(node is loop for loop in self._loops) and self.depth < len(self._frames):
            return []  # the next frame may be that of the iterator, which reads the loader
        methods = [(each, self.special_method(source, "__next__", call)) for each, source in pairs]
        return [
            _all_located(ast.Assign([copied(each)], ast.Call(method, [], [])), node)
            for each, method in methods
            if method is not None
        ]

    def _loader(self, node: ast.For, call: _Call) -> ElasticLoader | None:
        """The job's loader that a loop reads."""
        head = node.iter
        while isinstance(head, ast.Call) and head.args:  # enumerate, tqdm
            head = head.args[0]
        value = self.value(head, call)
        return value if isinstance(value, ElasticLoader) else None

    def _read_data(self, stored: set[_Key]) -> None:
        """Let batches depend on what the script assigns and their dataset reads, and steps of a
        scheduler on what its functions read."""
        for node, loader in self._read:
            objects = {
                id(one): one for one in objects_of_data(loader.dataset, loader.collate_fn).values()
            }
            methods = (method for one in objects.values() for method in vars(type(one)).values())
            used = self._used_by([*objects.values(), *methods])
            used = used.union(*(_keys_of_objects(_attributes(one)) for one in objects.values()))
            reads = self._loads(
                key
                for key in stored
                if key in used or (isinstance(key, tuple) and self._is_lost_with(key, objects))
            )
            targets = [n for n in walk(node.target) if isinstance(n, ast.Name)] if reads else []
            node.body[:0] = [
                _assignment(t.id, ast.Tuple([ast.Name(t.id, ast.Load()), *reads], ast.Load()), node)
                for t in targets
            ]
        for call, functions in self._steps:
            call.args += self._loads(stored & self._used_by(functions))
        for read, layers in self._layers:
            ids = set(map(id, layers))
            used = set[_Key]().union(
                *(_keys_of_objects(_attributes_and_buffers(layer)) for layer in layers)
            )
            read.elts += self._loads(
                key
                for key in stored
                if key in used
                or (isinstance(key, tuple) and key[0] in ids and not self._is_of_module(key))
            )

    def note_step(self, node: ast.Call, call: _Call) -> None:
        """Note a step of a scheduler of torch that calls functions of the script."""
        if _name_of(node.func) != "step" or not isinstance(node.func, ast.Attribute):
            return
        values = _attributes(self.value(node.func.value, call)).values()
        lists = [each if isinstance(each, list) else [each] for each in values]
        if functions := [f for each in lists for f in each if isinstance(f, FunctionType)]:
            self._steps.append((node, functions))

    def _loads(self, keys: Iterable[_Key]) -> list[ast.expr]:
        return [ast.Name(name, ast.Load()) for name in sorted(self._names[key] for key in keys)]

    def _used_by(self, functions: Iterable[object]) -> set[_Key]:
        """The variables of others that functions of the script read."""
        used = set[_Key]()
        for function in functions:
            if isinstance(function, FunctionType) and is_of_script(code := function.__code__):
                variables = {n: v for n, v in function.__globals__.items() if n in code.co_names}
                used |= {("global", id(function.__globals__), name) for name in variables}
                for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                    used.add(("cell", id(cell), name))
                    around = [c for c in self._real.values() if code in _codes_in(c.code)]
                    used |= {(call.number, name) for call in around}
                    variables[name] = _content(cell)
                used |= _keys_of_objects(variables)
        return used

    def _is_of_module(self, key: Any) -> bool:
        """Whether it is a number or flag of a module of the job."""
        value = self._outside.get(key)
        return key[0] in self._saved and isinstance(value, (*_CONSTANTS, type(None)))

    def _is_lost_with(self, key: Any, objects: Mapping[int, object]) -> bool:
        """Whether it is an attribute of one of these objects that is no state: not a number or flag
        of the script's."""
        if key[0] not in objects:
            return False
        is_plain = isinstance(self._outside.get(key), (*_CONSTANTS, type(None)))
        return not (is_plain and has_state(objects[key[0]]))

    def _created_by(self, node: ast.stmt, call: _Call) -> tuple[object, Any]:
        """The object that a variable holds, and the call that gives it another one, if a statement
        does, such as a new object."""
        created: Any = getattr(node, "value", None)
        is_single = isinstance(node, ast.Assign) and len(node.targets) == 1
        if not (is_single and isinstance(created, ast.Call)):
            return _UNKNOWN, None
        owner = self.value(node.targets[0], call)  # type: ignore[attr-defined]
        is_passed = any(self.value(argument, call) is owner for argument in created.args)
        return (_UNKNOWN if is_passed else owner), created

    def _generator(self, node: ast.For, call: _Call) -> tuple[ast.Call, _Called] | None:
        """The generator of the script that a loop is reading, also in ``enumerate(…)``."""
        head = node.iter
        if isinstance(head, ast.Call) and _name_of(head.func) == "enumerate" and head.args:
            head = head.args[0]
        if not isinstance(head, ast.Call):
            return None
        called = self._following(head, call, is_generator=True)
        return None if called is None else (head, called)

    def _yielding(
        self, node: ast.For, generator: tuple[ast.Call, _Called], call: _Call
    ) -> Iterator[ast.stmt]:
        """The generator, with the loop's body in the place of each ``yield``."""
        head, called = generator
        index = self._index(node, call, is_generator=True)
        self._loops = [loop for loop in self._loops if loop is not node]
        expressions = _Expressions(self, call)
        expressions.generic_visit(head)
        statements, _ = self.inline(head, called)
        is_enumerated = head is not node.iter and isinstance(node.target, ast.Tuple)
        target = expressions.visit(node.target.elts[-1] if is_enumerated else node.target)  # type: ignore[attr-defined]
        body = self.block(node.body, call)

        def replace(value: ast.expr) -> list[ast.stmt]:
            given = _located(ast.Assign([copied(target)], value), node)
            return [given, *[copied(each) for each in (*index[1:], *body)]]

        yield from (*expressions.before, *index[:1])
        yield from _Yields(replace).block(statements)
        yield from self.block(node.orelse, call)

    def _elements(self, node: ast.For, call: _Call) -> list[object]:
        """The objects of a loop over a few of the script's: callbacks, hooks."""
        source = node.iter
        if isinstance(source, ast.Call) and _name_of(source.func) in ("list", "sorted", "reversed"):
            source = source.args[0]
        value = self.value(source, call)
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= _ELEMENTS:
            return []
        is_current = any(node is loop for loop in self._loops)
        if is_current or not isinstance(node.target, ast.Name) or not any(map(_has_source, value)):
            return []
        self._statements += len(value) * sum(isinstance(n, ast.stmt) for n in walk(node))
        return list(value) if self._statements <= _STATEMENTS else []

    def _for_each(self, elements: Iterable[object], node: ast.For, call: _Call) -> list[ast.stmt]:
        """A loop's body, for each of its objects."""
        statements = []
        for element in elements:
            call.values[node.target.id] = element  # type: ignore[attr-defined]
            statements += self.block([copied(each) for each in node.body], call)
        return statements

    # -- what is the same in all steps --------------------------------------------------------

    def decided(self, node: ast.If | ast.IfExp, call: _Call) -> bool | None:
        """Whether a condition is true in all steps; None if it may change: an option of the script
        that is off has no effect."""
        first = node.lineno
        is_here = call.frame is not None and first <= call.frame.f_lineno <= (node.end_lineno or 0)
        return None if is_here else self._truth(node.test, call)

    def _truth(self, test: ast.expr, call: _Call) -> bool | None:
        if isinstance(test, ast.BoolOp):
            parts = [self._truth(part, call) for part in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand, call)
            return None if inner is None else not inner
        values = [self.fixed(test, call)]
        if isinstance(test, ast.Compare):
            values = [self.fixed(part, call) for part in (test.left, *test.comparators)]
            if isinstance(test.ops[0], (ast.Is, ast.IsNot)) and values[1] is None:
                is_none = values[0] is None
                is_unknown = values[0] is _UNKNOWN
                return None if is_unknown else is_none == isinstance(test.ops[0], ast.Is)
        if not all(value is None or isinstance(value, _CONSTANTS) for value in values):
            return None
        names = [f"v{i}" for i in range(len(values))]
        loads: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
        compared = ast.Compare(loads[0], test.ops, loads[1:]) if len(values) > 1 else loads[0]  # type: ignore[attr-defined]
        code = compile(ast.fix_missing_locations(ast.Expression(compared)), "", "eval")
        return bool(eval(code, dict(zip(names, values, strict=True))))

    def fixed(self, expression: ast.expr, call: _Call) -> object:
        """The value of an expression, if it is the same in all steps."""
        if isinstance(expression, ast.Constant):
            return expression.value
        if isinstance(expression, ast.Name):
            is_fixed = call.is_fixed(expression.id)
            return call.value(expression.id) if is_fixed else _UNKNOWN
        if isinstance(expression, ast.Subscript):
            container = self.fixed(expression.value, call)
            is_layer = isinstance(container, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            return self.value(expression, call) if is_layer else _UNKNOWN
        if not isinstance(expression, ast.Attribute):
            return _UNKNOWN
        owner = self.fixed(expression.value, call)
        files = _files_of(owner if isinstance(owner, type) else type(owner))
        own = [*map(_rebound, files)]
        everywhere = [*own, *(_rebound(each.code.co_filename) for each in call.around)]
        name = expression.attr
        # Others may be changed by a library: module.training, scheduler.last_epoch.
        is_the_scripts = (
            isinstance(owner, (argparse.Namespace, SimpleNamespace))
            or name in getattr(owner, "__dataclass_fields__", ())
            or any(name in file.created for file in own)
            or (isinstance(owner, type) and files)
        )
        is_changed = any(name in file.attributes for file in everywhere)
        return self.value(expression, call) if is_the_scripts and not is_changed else _UNKNOWN

    # -- variables ----------------------------------------------------------------------------

    def name(self, key: _Key, name: str) -> str:
        """A variable's name in the new function."""
        if key not in self._names:
            is_taken = name in self._names.values()
            self._names[key] = f"{name}{_MARK}{len(self._names)}" if is_taken else name
        return self._names[key]

    def new_name(self, name: str) -> str:
        """The name of a variable that the source does not have."""
        return self.name(("new", self._next()), name)

    def variable(self, name: str, call: _Call) -> str:
        key, value = call.key(name), call.value(name)
        if self._is_object(name, call):
            key = _key_of_object(value)
            self._outside[key] = value
        elif isinstance(key, tuple) and isinstance(key[0], str):  # global, or of another function
            self._outside[key] = _UNKNOWN if id(value) in self._saved else value
        return self.name(key, name)

    def _is_object(self, name: str, call: _Call) -> bool:
        """Whether a variable always means the same object, which changes in place."""
        return self._is_shared(call.value(name)) and call.is_fixed(name)

    def _is_shared(self, value: object) -> bool:
        """Whether variables that hold an object are one: what changes in place."""
        is_changed = isinstance(value, _MUTABLE) and id(value) not in self._saved
        return is_changed and not (isinstance(value, torch.Tensor) and value.requires_grad)

    def value(self, expression: ast.AST | None, call: _Call) -> object:
        """The object of a variable, an attribute, or an entry."""
        if isinstance(expression, ast.Constant):
            return expression.value
        if isinstance(expression, ast.Name):
            return call.value(expression.id)
        if isinstance(expression, ast.Subscript):
            container = self.value(expression.value, call)
            return _entry(container, self.value(expression.slice, call))
        if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
            if expression.func.attr != "get" or not expression.args:
                return _UNKNOWN
            container = self.value(expression.func.value, call)
            return _entry(container, self.value(expression.args[0], call))
        if not isinstance(expression, ast.Attribute):
            return _UNKNOWN
        owner = self.value(expression.value, call)
        if isinstance(owner, ElasticLoader) and expression.attr == "dataset":
            return owner.dataset
        modules = dict(owner.named_children()) if isinstance(owner, nn.Module) else {}
        attributes = {**_attributes(owner), **modules}
        return attributes.get(expression.attr, _UNKNOWN)

    def _is_plain(self, owner: object) -> bool:
        """Whether nothing saves an object's attributes."""
        if isinstance(owner, nn.Module):
            has_own_state = type(owner).get_extra_state is not nn.Module.get_extra_state
            return not has_own_state
        if id(owner) in self._saved:
            return False
        if isinstance(owner, (type, ModuleType, FunctionType)):
            return is_defined_by_script(owner)
        has_attributes = hasattr(owner, "__dict__") or hasattr(type(owner), "__slots__")
        return has_attributes and not is_stateless(type(owner).__module__)

    def attribute_of(self, node: ast.Call, call: _Call) -> ast.expr:
        """``object.name`` for ``getattr(object, name)``."""
        if _name_of(node.func) != "getattr" or len(node.args) < 2:
            return node
        name = self.value(node.args[1], call)
        if not isinstance(name, str) or not name.isidentifier():
            return node
        return _located(ast.Attribute(node.args[0], name, ast.Load()), node)

    def attribute(self, node: Any, call: _Call) -> None:
        """Note that nothing saves an attribute, if so."""
        owner = self.value(node.value, call)
        if not self._is_plain(owner):
            return
        of_class = inspect.getattr_static(type(owner), node.attr, None)
        of_owner = of_class if isinstance(of_class, FunctionType) else _UNKNOWN
        value = _attributes(owner).get(node.attr, of_owner)
        buffers = {}
        if isinstance(owner, nn.Module):
            buffers = dict(owner.named_buffers(recurse=False))
            named = (owner.named_parameters(recurse=False), owner.named_children())
            own = {name for each in named for name, _ in each}
            is_saved = id(owner) in self._saved
            if node.attr in own | _OF_MODULES or (node.attr in buffers and is_saved):
                return
            value = buffers.get(node.attr, value)
        # Of the class: a method that is called, or a property that is set.
        method = "__get__" if isinstance(node.ctx, ast.Load) else "__set__"
        is_computed = hasattr(of_class, method) and not isinstance(of_class, MemberDescriptorType)
        if id(value) not in self._saved and not is_computed:
            is_one = self._is_shared(value) and self.fixed(node, call) is value
            node.variable = _key_of_object(value) if is_one else (id(owner), node.attr)
            self._outside[node.variable] = value
            node.spelled = ast.unparse(node)
            name = self.name(node.variable, f"{self._known_as(owner, node.value)}.{node.attr}")
            is_constant = isinstance(value, (*_CONSTANTS, type(None)))
            if isinstance(owner, nn.Module):
                if is_constant or node.attr in buffers:
                    self._of_modules.add(name)
                elif isinstance(value, torch.Tensor):
                    self._buffers.add(name)
            if is_constant and id(owner) in self._saved:
                self._attributes.add(name)

    def _known_as(self, owner: object, expression: ast.expr) -> str:
        """Its first name: that of the outermost function, not ``self`` of a method."""
        return self._owners.setdefault(id(owner), ast.unparse(expression))

    def iterator(self, node: ast.expr, call: _Call) -> ast.AugAssign | None:
        """A statement that advances an iterator of the script."""
        value = self.value(node, call)
        if not is_own_iterator(value):
            return None
        name = self.name((id(value), ""), ast.unparse(node))
        self._iterators.add(name)
        return _advance(name, f"next({ast.unparse(node)})", node)

    def draw(self, node: ast.Call, call: _Call) -> ast.stmt | None:
        """A statement that advances, or seeds, a generator of random numbers that nothing saves:
        one whose method a call executes, or that it passes to a library by keyword. The call then
        reads a variable in its place."""
        method = node.func if isinstance(node.func, ast.Attribute) else None
        places: list[Any] = [*node.keywords, *([method] if method is not None else [])]
        for place in places:
            generator = place.value
            if not self._is_generator(generator, call):
                continue
            if place is not method:
                function, _, _ = self._method(node.func, call)
                if function is not None and is_of_script(function.__code__):
                    continue  # what it draws is seen in its source
            text = ast.unparse(node)
            name = self.name((id(self.value(generator, call)), ""), ast.unparse(generator))
            position: Any = _located(ast.Name(name, ast.Load()), generator)
            position.is_renamed = True
            place.value = position
            if method is place and method.attr in _SEEDS:
                seeds = ast.Tuple([*node.args, *(k.value for k in node.keywords)], ast.Load())
                return _assignment(name, copied(seeds), node)
            self._generators.add(name)
            return _advance(name, text, node)
        return None

    def _is_generator(self, node: ast.expr, call: _Call) -> bool:
        value = self.value(node, call)
        return (
            isinstance(value, GENERATORS)
            and id(value) not in self._saved
            and value is not torch.default_generator
        )

    def cycle(self, node: ast.Call, call: _Call) -> tuple[ast.Assign, ast.AugAssign] | None:
        """Statements that create and advance ``cycle(…)`` in the head of a loop."""
        if _reads_a_loader(self.value(node.args[0], call) if node.args else None):
            return None
        name = self.name((call.number, node.lineno, node.col_offset), ast.unparse(node))
        self._iterators.add(name)
        advance = _advance(name, ast.unparse(node), node)
        return _assignment(name, ast.Constant(0), node), advance

    def _index(self, node: ast.For, call: _Call, *, is_generator: bool = False) -> list[ast.stmt]:
        """Statements that create, use and advance the count of ``enumerate(loader)``, which begins
        again where the loop resumes, if it cannot be continued, and unless it starts at
        ``loader.index``."""
        is_current = self._loops[-1:] == [node] or is_generator
        if self._counts_continue or not is_current or self.depth < len(self._frames):
            return []
        head, target = node.iter, node.target
        if isinstance(head, ast.Call) and _name_of(head.func) in _BARS and head.args:
            head = head.args[0]
        if not (isinstance(head, ast.Call) and _name_of(head.func) == "enumerate" and head.args):
            return []
        starts = [*head.args[1:], *(keyword.value for keyword in head.keywords)]
        read = self.value(head.args[0], call)
        is_restarted = all(isinstance(start, ast.Constant) for start in starts)
        is_own = isinstance(read, (Iterator, list, tuple, range))  # within a step
        first = target.elts[0] if isinstance(target, ast.Tuple) else None
        if not is_restarted or is_own or not isinstance(first, ast.Name):
            return []
        name = self.name((call.number, head.lineno, head.col_offset), ast.unparse(head))
        self._iterators.add(name)
        advance: Any = _advance(name, ast.unparse(head), node)
        advance.code = call.code
        count: Any = ast.Name(name, ast.Load())
        count.is_count = True
        used = _assignment(self.variable(first.id, call), count, node)
        return [_assignment(name, ast.Constant(0), node), used, advance]

    # -- calls --------------------------------------------------------------------------------

    def reads_weights(self, node: ast.Attribute | ast.Call, call: _Call) -> bool:
        """Whether an expression is a trained parameter, or a call by which values of a trained
        module are computed or read."""
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value, call)
            own = owner.named_parameters(recurse=False) if isinstance(owner, nn.Module) else ()
            value = dict(own).get(node.attr, self.value(node, call))
            return id(value) in self._weights
        method = node.func
        is_read = isinstance(method, ast.Attribute) and method.attr in _READS_WEIGHTS
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        owners = [method.value] if is_read else [method, *given]  # type: ignore[attr-defined]
        return any(self._is_trained(self.value(each, call)) for each in owners)

    def holds_weights(self, node: ast.Name, call: _Call) -> bool:
        """Whether a variable is a list of trained parameters."""
        return self._lists_weights(call.value(node.id))

    def _lists_weights(self, value: object) -> bool:
        elements = value[:_ELEMENTS] if isinstance(value, (list, tuple)) else ()
        return any(id(each) in self._weights for each in elements)

    def _is_trained(self, value: object) -> bool:
        return isinstance(value, nn.Module) and any(
            id(p) in self._weights for p in value.parameters()
        )

    def hooks(self, node: ast.Call, call: _Call) -> list[_Hook]:
        """The script's functions that torch calls in a call: hooks of a module and its layers, of a
        backward pass, of an optimizer's step."""
        function = node.func
        method = function.attr if isinstance(function, ast.Attribute) else ""
        owner = self.value(function, call)
        if isinstance(owner, nn.Module):
            return [*_hooks_of_modules(owner.modules(), "forward")]
        if method == "backward":
            layers = [layer for module in self._modules for layer in module.modules()]
            weights = [p for module in self._modules for p in module.parameters()]
            of_weights = (h for p in weights for t in torch_private.hooks_of(p) for h in t.values())
            tensors = (_Hook(hook, None) for hook in of_weights)
            return [*_hooks_of_modules(layers, "backward"), *filter(_is_of_script, tensors)]
        if method == "step":
            optimizer = self.value(function.value, call)  # type: ignore[attr-defined]
            if isinstance(optimizer, torch.optim.Optimizer):
                tables = torch_private.hooks_of(optimizer)
                hooks = [_Hook(hook, optimizer) for table in tables for hook in table.values()]
                return [*filter(_is_of_script, hooks)]
        return []

    def layers_read(self, node: ast.Call, call: _Call) -> ast.Tuple | None:
        """What a call of a module reads of what the script changes in it and its layers, such as
        another ``forward``."""
        owner = self.value(node.func, call)
        if not isinstance(owner, nn.Module):
            return None
        assigned = _rebound(call.code.co_filename).attributes
        layers = [*owner.modules()]
        if "forward" not in assigned:
            changed = (
                layer
                for layer in layers
                if id(layer) not in self._saved or not assigned.isdisjoint(vars(layer))
            )
            layers = [layer for layer in changed if not is_defined_by_script(type(layer))]
        if not layers:
            return None
        read = ast.Tuple([], ast.Load())
        self._layers.append((read, layers))
        return read

    def call_of_hook(self, hook: _Hook, data: ast.expr, call: _Call) -> ast.Call:
        """A call of a hook. ``data``: what torch passes to it besides the owner."""
        function = self.holding(hook.function, "hook", call)
        owner = self.holding(hook.owner, "owner", call)
        found, of, receiver = self._method(function, call)
        self._owners.setdefault(id(of), type(of).__name__)
        code = found.__code__ if found is not None else _WITHOUT_SOURCE
        number = code.co_argcount - (receiver is not None)
        args: list[ast.expr] = [owner] if hook.owner is not None else []
        args += [copied(data) for _ in range(number - len(args))]
        return _all_located(ast.Call(function, args, []), data)

    def changes_job(self, node: ast.Call, call: _Call) -> bool:
        """Whether a call updates an object of the job's state, such as an average of weights."""
        updates = ("update", "load_state_dict")
        if not isinstance(node.func, ast.Attribute) or not node.func.attr.startswith(updates):
            return False
        return id(self.value(node.func.value, call)) in self._saved

    def called(self, node: ast.Call, call: _Call, *, may_pause: bool = False) -> _Called | None:
        """The script's function that a call executes, if it is known. ``may_pause``: it may be a
        generator."""
        if (following := self._following(node, call)) is not None:
            return following
        found, owner, receiver = self._method(node.func, call)
        is_saved = id(owner) in self._saved and not isinstance(owner, nn.Module)
        if found is None or is_saved or _name_of(node.func) in KEEPERS:
            return None
        code, calls = found.__code__, [*call.around]
        is_endless = len(calls) > _DEPTH or any(each.code is code for each in calls)
        pauses = bool(code.co_flags & _PAUSES)
        if is_endless or pauses != may_pause or not is_of_script(code):
            return None
        function = _function_in(parsed(code, code.co_filename), code)
        if function is None:
            return None
        self._statements += sum(isinstance(n, ast.stmt) for n in walk(function))
        if self._statements > _STATEMENTS:
            return None
        passed = _passed(node, code, receiver)
        values = _defaults(found, node) | {n: self.value(each, call) for n, each in passed.items()}
        changing = {n for n, each in passed.items() if self.fixed(each, call) is _UNKNOWN}
        if receiver is not None:
            values[code.co_varnames[0]] = owner
            changing.discard(code.co_varnames[0])
            self._known_as(owner, receiver)
        cells = dict(zip(code.co_freevars, found.__closure__ or (), strict=False))
        fixed = values.keys() - changing
        inner = _Call(self._next(), code, found.__globals__, values, cells, call, fixed=fixed)
        return _Called(copied(function), inner, receiver)

    def _following(
        self, node: ast.Call, call: _Call, *, is_generator: bool = False
    ) -> _Called | None:
        """The function of the next frame, if a call is that one."""
        if self.depth == len(self._frames) or call.frame is not self._frames[self.depth - 1]:
            return None
        following = self._frames[self.depth]
        code = following.f_code
        is_here = node.lineno <= call.frame.f_lineno <= (node.end_lineno or 0)
        is_paused = bool(code.co_flags & _PAUSES)
        if not is_here or _name_of(node.func) != code.co_name or is_paused != is_generator:
            return None
        tree = copied(tree_of(following))
        function = _function_in(tree, code)
        if function is None:
            return None
        is_method = isinstance(node.func, ast.Attribute) and not isinstance(
            self.value(node.func.value, call), ModuleType
        )
        receiver = node.func.value if is_method else None  # type: ignore[attr-defined]
        return _Called(function, self._enter(following, tree, call), receiver)

    def _method(
        self, function: ast.expr, call: _Call
    ) -> tuple[FunctionType | None, object, ast.expr | None]:
        """The function, its first argument, and the expression for that."""
        value: Any = self.value(function, call)
        owner, receiver = _UNKNOWN, None
        if value is _UNKNOWN and isinstance(function, ast.Attribute):
            owner, receiver = self.value(function.value, call), function.value
            value = inspect.getattr_static(type(owner), function.attr, None)
            if _name_of(getattr(function.value, "func", function)) == "super":
                first = (*call.code.co_varnames, "")[0]
                owner, receiver = call.value(first), ast.Name(first, ast.Load())
                value = _inherited(owner, call.value("__class__"), function.attr)
            elif isinstance(owner, type):
                value, receiver = inspect.getattr_static(owner, function.attr, None), None
        elif isinstance(value, MethodType):
            value, owner, receiver = value.__func__, value.__self__, function
        elif not isinstance(value, (FunctionType, type, classmethod, staticmethod)):
            owner = _unwrapped(value)
            called = "forward" if isinstance(owner, nn.Module) else "__call__"
            value, receiver = inspect.getattr_static(type(owner), called, None), function
        if isinstance(value, classmethod) and isinstance(function, ast.Attribute):
            owner, receiver = self.value(function.value, call), function.value
            owner = owner if isinstance(owner, type) else type(owner)
        elif isinstance(value, staticmethod):
            receiver = None
        value = getattr(value, "__func__", value)
        found = inspect.unwrap(value) if isinstance(value, FunctionType) else None
        return (found if isinstance(found, FunctionType) else None), owner, receiver

    def holding(self, value: object, spelled: str, call: _Call) -> ast.Name:
        """A variable that holds an object."""
        name: Any = ast.Name(f"object{_MARK}{self._next()}", ast.Load())
        call.values[name.id] = value
        name.spelled = spelled
        return name  # type: ignore[no-any-return]

    def plain_call(self, node: ast.Call, call: _Call) -> ast.Call:
        """A call of what ``getattr``, ``next`` or ``functools.partial`` calls."""
        if isinstance(node.func, ast.Call):
            node.func = self.attribute_of(node.func, call)
        if _name_of(node.func) == "next" and node.args:
            method = self.special_method(node.args[0], "__next__", call)
            return node if method is None else _all_located(ast.Call(method, [], []), node)
        return self._without_partial(node, call)

    def _without_partial(self, node: ast.Call, call: _Call) -> ast.Call:
        """A call of a function of the script with what ``functools.partial`` binds."""
        value = self.value(node.func, call)
        if not isinstance(value, functools.partial) or not _has_source(value.func):
            return node
        text = ast.unparse(node.func)
        bound: list[ast.expr] = [self.holding(each, text, call) for each in value.args]
        given = {keyword.arg for keyword in node.keywords}
        keywords = [
            ast.keyword(name, self.holding(each, text, call))
            for name, each in value.keywords.items()
            if name not in given
        ]
        function = self.holding(value.func, text, call)
        plain = ast.Call(function, [*bound, *node.args], [*keywords, *node.keywords])
        return _all_located(plain, node)

    def special_method(self, owner: ast.expr, name: str, call: _Call) -> ast.Attribute | None:
        """A special method of an object, if the script defines it: ``__getitem__``."""
        value = self.value(owner, call)
        method = inspect.getattr_static(type(value), name, None)
        is_saved = id(value) in self._saved and not isinstance(value, nn.Module)
        if is_saved or not isinstance(method, FunctionType) or not _has_source(method):
            return None
        return _all_located(ast.Attribute(copied(owner), name, ast.Load()), owner)

    def getter(self, node: ast.Attribute, call: _Call) -> ast.Call | None:
        """The call by which an attribute is computed: of a property of the script."""
        owner = self.value(node.value, call)
        of_class = inspect.getattr_static(type(owner), node.attr, None)
        function = of_class.fget if isinstance(of_class, property) else None
        is_saved = id(owner) in self._saved and not isinstance(owner, nn.Module)
        if is_saved or not isinstance(function, FunctionType) or not _has_source(function):
            return None
        self._known_as(owner, node.value)
        name = self.holding(function, ast.unparse(node), call)
        return _all_located(ast.Call(name, [copied(node.value)], []), node)

    def callbacks(self, node: ast.Call, call: _Call) -> list[_Hook]:
        """The script's functions that a call passes to a library, which may call them."""
        function = self.value(node.func, call)
        owner = self.value(getattr(node.func, "value", None), call)
        if _has_source(function) or type(owner).__module__.startswith("elastic."):
            return []
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        values = [self.value(each, call) for each in given]
        functions = (FunctionType, MethodType, functools.partial)
        passed = [v for v in values if isinstance(v, functions) and _has_source(_plain(v))]
        running = {frame.f_code for frame in self._frames}
        codes = [getattr(_plain(v), "__code__", None) for v in passed]
        return [_Hook(v, None) for v, c in zip(passed, codes, strict=True) if c not in running]

    def inline(self, node: ast.Call, called: _Called) -> tuple[list[ast.stmt], ast.expr]:
        """The statements of a function that is called, and its result."""
        code = called.call.code
        passed = _passed(node, code, called.receiver)
        first = []
        for local in dict.fromkeys((*code.co_varnames, *code.co_cellvars)):
            given = copied(passed.get(local, ast.Constant(None)))
            if not self._is_object(local, called.call):
                name = self.name(called.call.key(local), local)
            else:
                name = self.variable(local, called.call)
                if local not in passed or getattr(given, "id", None) == name:
                    continue
            first.append(_assignment(name, given, node))
        name = self.name((called.call.number, "()"), f"{code.co_name}()")
        body = _without_returns(self.block(called.function.body, called.call), name)
        return [*first, *body], _located(ast.Name(name, ast.Load()), node)


class _Expressions(Transformer):
    """Replaces calls and names in the expressions of a statement."""

    def __init__(self, inliner: _Inliner, call: _Call) -> None:
        self._inliner = inliner
        self._call = call
        self.before: list[ast.stmt] = []
        self.advanced: list[ast.stmt] = []  # in each iteration of a loop
        self.is_inner = False  # it may be executed elsewhere, never, or several times
        self.is_elsewhere = False  # it may be executed elsewhere, or never
        self.is_head = False  # of a loop

    def _inner(self, node: Any) -> ast.expr:
        before, self.is_inner = self.is_inner, True
        for generator in getattr(node, "generators", ()) if not self.is_elsewhere else ():
            self._name_variables(node, generator)
        self.generic_visit(node)
        self.is_inner = before
        return node  # type: ignore[no-any-return]

    def _name_variables(self, node: Any, generator: ast.comprehension) -> None:
        """Give the variables of a comprehension names of their own, and values."""
        text = ast.unparse(generator.iter)
        source = self.visit(generator.iter)
        generator.iter = self._kept(source, generator.iter, text)
        targets = {n.id for n in walk(generator.target) if isinstance(n, ast.Name)}
        names = {target: self._inliner.new_name(target) for target in sorted(targets)}
        for inner in walk(node):
            if isinstance(inner, ast.Name) and inner.id in names:
                variable: Any = inner
                variable.is_renamed, variable.id = True, names[inner.id]
        first = ast.For(copied(generator.target), copied(source), [ast.Pass()], [])
        self.before.append(_located(first, node))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _inner

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        before, self.is_elsewhere = self.is_elsewhere, True
        self._inner(node)
        self.is_elsewhere = before
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        is_true = self._inliner.decided(node, self._call)
        if is_true is None:
            return self.generic_visit(node)
        return self.visit(node.body if is_true else node.orelse)  # type: ignore[no-any-return]

    def visit_arg(self, node: ast.arg) -> ast.AST:
        # Of a function that is defined here, or the outermost one: the caller has its object.
        node.arg = self._inliner.name(self._call.key(node.arg), node.arg)
        return node

    def visit_Name(self, node: Any) -> Any:
        if hasattr(node, "is_renamed"):
            return node
        if self.is_head and (position := self._position(node, self.advanced)):
            return position
        node.reads_weights = self._inliner.holds_weights(node, self._call)
        node.id = self._inliner.variable(node.id, self._call)
        return node

    def visit_Attribute(self, node: Any) -> Any:
        if self.is_head and (position := self._position(node, self.advanced)):
            return position
        is_read = isinstance(node.ctx, ast.Load) and not self.is_elsewhere
        if is_read and (computed := self._inliner.getter(node, self._call)) is not None:
            return self.visit(computed)
        self._inliner.attribute(node, self._call)
        node.reads_weights = self._inliner.reads_weights(node, self._call)
        return self.generic_visit(node)

    def visit_Subscript(self, node: Any) -> Any:
        if isinstance(node.ctx, ast.Load) and not self.is_elsewhere:
            method = self._inliner.special_method(node.value, "__getitem__", self._call)
            if method is not None:
                return self.visit(_all_located(ast.Call(method, [node.slice], []), node))
        key = self._inliner.fixed(node.slice, self._call)
        if isinstance(key, (str, int)):
            node.key = key
        elif isinstance(key, nn.Module):
            node.key = (id(key),)  # equal to no number
        return self.generic_visit(node)

    def visit_Call(self, node: Any) -> Any:
        is_next = _name_of(node.func) == "next" and node.args and not self.is_inner
        if is_next and (position := self._position(node.args[0], self.before)):
            node.args[0] = position
            return node
        is_cycle = self.is_head and self._inliner.value(node.func, self._call) is itertools.cycle
        if is_cycle and (cycle := self._inliner.cycle(node, self._call)) is not None:
            self.before.append(cycle[0])
            self.advanced.append(cycle[1])
            return _located(ast.Name(cycle[1].target.id, ast.Load()), node)  # type: ignore[union-attr]
        attribute = self._inliner.attribute_of(node, self._call)
        if isinstance(attribute, ast.Attribute):
            return self.visit(attribute)
        node = self._inliner.plain_call(node, self._call)
        if not self.is_elsewhere and (drawn := self._inliner.draw(node, self._call)) is not None:
            self.before.append(drawn)
        changes_job = self._inliner.changes_job(node, self._call)
        node.changes_job = changes_job
        node.reads_weights = self._inliner.reads_weights(node, self._call)
        self._inliner.note_step(node, self._call)
        if self.is_elsewhere:
            return self.generic_visit(node)
        called = self._inliner.called(node, self._call)
        hooks = self._inliner.hooks(node, self._call)
        if called is None:
            hooks += self._inliner.callbacks(node, self._call)
        read = self._inliner.layers_read(node, self._call)
        if hooks or read is not None:
            node.text = ast.unparse(node)  # of the script
        outer, self._inliner.hooks_called = self._inliner.hooks_called, set()
        self.generic_visit(node)
        result = node
        if called is not None:
            statements, result = self._inliner.inline(node, called)
            self.before += [_located(ast.Expr(node), node)] if changes_job else []
            self.before += statements
        inner = self._inliner.hooks_called
        hooks = [hook for hook in hooks if id(hook.function) not in inner]
        self._inliner.hooks_called = outer | inner | {id(hook.function) for hook in hooks}
        if read is not None:
            result = self._kept(ast.Set([result, read]), node)
        return self._with_hooks(node, result, hooks) if hooks else result

    def _with_hooks(self, node: ast.Call, result: ast.expr, hooks: Iterable[_Hook]) -> ast.expr:
        """The result of a call in which torch calls hooks. They may replace what they get."""
        is_pass = _name_of(node.func) == "backward"
        given = ast.Tuple([*node.args, node.func], ast.Load()) if is_pass else result
        data = self._kept(given, node)
        for hook in hooks:
            returned = self.visit(self._inliner.call_of_hook(hook, data, self._call))
            data = self._kept(ast.Set([data, returned]), node)
        if not is_pass:
            return data
        node.args = [*node.args, data]
        return node

    def _kept(self, value: ast.expr, of: Any, text: str = "") -> ast.Name:
        """A variable with a value of an expression, as which it is shown."""
        name = self._inliner.new_name("value")
        self.before.append(_assignment(name, _located(value, of), of))
        variable: Any = _located(ast.Name(name, ast.Load()), of)
        variable.is_renamed, variable.spelled = True, text or of.text
        return variable  # type: ignore[no-any-return]

    def _position(self, node: ast.expr, advances: list[ast.stmt]) -> ast.expr | None:
        """The position of an iterator of the script."""
        advance = self._inliner.iterator(node, self._call)
        if advance is None:
            return None
        advances.append(advance)
        return _located(ast.Name(advance.target.id, ast.Load()), node)  # type: ignore[union-attr]


class _Yields(Transformer):
    """Replaces the ``yield`` of a generator by the body of the loop that reads it."""

    def __init__(self, replace: Callable[[ast.expr], list[ast.stmt]]) -> None:
        self._replace = replace

    def block(self, statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in statements:
            new = self.visit(statement)
            yield from new if isinstance(new, list) else [new]

    def visit_Expr(self, node: ast.Expr) -> Any:
        if not isinstance(node.value, ast.Yield):
            return node
        return self._replace(node.value.value or ast.Constant(None))


class _Attributes(Transformer):
    """Replaces the attributes that change by variables."""

    def __init__(self, names: Mapping[_Key, str], changed: Collection[_Key]) -> None:
        self._names = names
        self._changed = changed

    def visit_Attribute(self, node: Any) -> ast.AST:
        if getattr(node, "variable", None) in self._changed:
            variable: Any = ast.Name(self._names[node.variable], node.ctx)
            variable.spelled = node.spelled
            return ast.copy_location(variable, node)  # type: ignore[no-any-return]
        return self.generic_visit(node)


# ----------------------------------------------------------------------------
# Parts of the source.


def _function_in(tree: ast.AST, code: CodeType) -> ast.FunctionDef | None:
    functions: Iterable[ast.FunctionDef]
    functions = (n for n in walk(tree) if isinstance(n, ast.FunctionDef))
    if code.co_name == "<lambda>":
        lambdas = (n for n in walk(tree) if isinstance(n, ast.Lambda))
        functions = (_as_function(n) for n in lambdas if _is_compiled_to(n, code))
    return next((f for f in functions if f.name == code.co_name), None)


def _is_compiled_to(function: ast.Lambda, code: CodeType) -> bool:
    """Whether it may be this function: several lambdas may begin in a line."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
    used = {n.id for n in walk(function.body) if isinstance(n, ast.Name)}
    known = {*code.co_varnames, *code.co_freevars, *code.co_names}
    is_here = function.body.lineno == code.co_firstlineno or function.lineno == code.co_firstlineno
    return is_here and [*code.co_varnames[: len(names)]] == names and used <= known


def _as_function(function: ast.Lambda) -> ast.FunctionDef:
    body: list[ast.stmt] = [_located(ast.Return(function.body), function.body)]
    return _located(ast.FunctionDef("<lambda>", function.args, body, []), function)


def _passed(node: ast.Call, code: CodeType, receiver: ast.expr | None) -> dict[str, ast.expr]:
    """What a call passes for each parameter of a function."""
    names = code.co_varnames[: code.co_argcount]
    given = [*([receiver] if receiver is not None else []), *node.args]
    everything = ast.Tuple([*given, *(k.value for k in node.keywords)], ast.Load())
    if any(isinstance(each, ast.Starred) for each in given):
        return dict.fromkeys(names, everything)
    passed = dict(zip(names, given, strict=False))
    passed |= {k.arg: k.value for k in node.keywords if k.arg is not None}
    last = code.co_argcount + code.co_kwonlyargcount
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return passed | dict.fromkeys(code.co_varnames[last : last + more], everything)


def _without_returns(body: Sequence[ast.stmt], name: str, *, in_loop: bool = False) -> list[Any]:
    """The statements of a function, with a variable for its result."""
    new: list[Any] = []
    for i, node in enumerate(body):
        rest = body[i + 1 :]
        if isinstance(node, ast.Return):
            result = _assignment(name, node.value or ast.Constant(None), node)
            result.code = getattr(node, "code", None)  # type: ignore[attr-defined]
            result.is_result = True  # type: ignore[attr-defined]
            return [*new, result, *([_located(ast.Break(), node)] if in_loop else [])]
        new.append(node)
        if isinstance(node, ast.If):
            ends = [_ends(branch) for branch in (node.body, node.orelse)]
            if any(ends):  # the rest belongs to the other branch
                node.body = [*node.body, *(() if ends[0] else rest)]
                node.orelse = [*node.orelse, *(() if ends[1] else rest)]
        is_loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                for field_ in ("body", "orelse", "finalbody"):
                    inner = getattr(part, field_, None)
                    if isinstance(inner, list):
                        within = in_loop or (is_loop and field_ == "body")
                        setattr(part, field_, _without_returns(inner, name, in_loop=within))
        if isinstance(node, ast.If) and any(ends):
            return new
    return new


def _ends(branch: Sequence[ast.stmt]) -> bool:
    return bool(branch) and isinstance(branch[-1], ast.Return)


def _assignment(name: str, value: ast.expr, where: ast.AST) -> ast.Assign:
    return _located(ast.Assign([_stored(name)], value), where)


def _advance(name: str, text: str, where: ast.AST) -> ast.AugAssign:
    advance: Any = ast.AugAssign(_stored(name), ast.Add(), ast.Constant(1))
    advance.text = text  # of the script
    return _located(advance, where)  # type: ignore[no-any-return]


def _stored(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _located(node: _Node, where: ast.AST) -> _Node:
    return ast.copy_location(node, where)  # _Inliner.result locates the nodes in it


def _all_located(node: _Node, where: ast.AST) -> _Node:
    """The same for a node that is yet to be visited."""
    return ast.fix_missing_locations(ast.copy_location(node, where))


def _name_of(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _display(container: object) -> ast.List:
    """A list in the place of a container, with a number if that holds only numbers."""
    elements: Any = container.values() if isinstance(container, dict) else container
    is_plain = isinstance(container, (list, dict, deque)) and all(
        isinstance(each, (int, float)) for each in elements
    )
    display: Any = ast.List([ast.Constant(0)] if is_plain and container else [], ast.Load())
    display.is_from_outside = True
    return display  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------
# Iterators that lose their position.


def is_own_iterator(value: object) -> bool:
    """Whether an iterator has a position, and reads no DataLoader: those are the concern of
    :mod:`elastic.train.reading`."""
    if not isinstance(value, Iterator) or is_stateless(type(value).__module__):
        return False
    if isinstance(value, GeneratorType):
        if not _has_position(value):
            return False
    elif is_of_script(getattr(type(value).__next__, "__code__", _WITHOUT_SOURCE)):
        return False  # what it changes is seen in its source
    return not _reads_a_loader(value)


def _reads_a_loader(value: object) -> bool:
    left, seen = deque[object]([value]), set[int]()
    while left and len(seen) < _SEARCHED:
        one = left.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, DataLoader) or type(one).__module__.startswith(("elastic.", "torch.")):
            return True
        if isinstance(one, GeneratorType):
            left += _used_by(one)
        elif isinstance(one, (Iterator, tuple)):
            left += gc.get_referents(one)
    return False


_WITHOUT_SOURCE = is_of_script.__code__


def _used_by(generator: GeneratorType[Any, Any, Any]) -> Iterator[object]:
    if (frame := generator.gi_frame) is not None:
        yield from local_variables(frame).values()
        yield from (v for n, v in [*frame.f_globals.items()] if n in generator.gi_code.co_names)


def _has_position(generator: GeneratorType[Any, Any, Any]) -> bool:
    """Whether what a generator yields next depends on how often it has been called."""
    code = generator.gi_code
    function = _function_in(parsed(code, code.co_filename), code)
    if function is None or not is_of_script(code):
        return False
    for node in walk(function):
        if isinstance(node, ast.AugAssign):
            return True
        if isinstance(node, ast.For) and any(isinstance(n, ast.Yield) for n in walk(node)):
            return True
        if isinstance(node, ast.Assign):
            names = [n for n in walk(node) if isinstance(n, ast.Name)]
            if {n.id for n in names if _is_stored(n)} & {n.id for n in names if not _is_stored(n)}:
                return True
    return False
