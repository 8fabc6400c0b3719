"""What two runs of a checked script have in common. Pure: records in, differences out."""

from __future__ import annotations

import ast
import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.testing.ledger import RunLedger, read_ledger
from elastic.testing.small_world.recording import GENERATOR_STATE
from elastic.testing.small_world.world import RunOutcome, WorkerResult

Leaf = Sequence[Any]
State = Mapping[str, Leaf]

NOISE_FACTOR = 20.0
"""A difference is one if it is this many times the effect of rounding that was measured."""
_ROUNDINGS = 16.0  # in units of a number's precision, where no effect was measured
_UNMEASURED_ROUNDINGS = 2000.0  # of a script whose updates are no torch.optim.Optimizer's
_VALUE_ROUNDING = 1e-6  # of values, logged or kept, which scripts compute in float32
_METRIC_ROUNDING = 0.02  # of the script's values under autocast: a sample that changes its class
_STEADY = 1e-2  # the largest relative change of a script's own value that is one of rounding
_EPS, _NORM, _FIRST = 2, 3, 4  # places in the leaf of a tensor


@dataclass(frozen=True)
class Difference:
    """Something that differs between two runs from a step on."""

    name: str
    step: int  # the first boundary, by the number of committed steps
    got: Any  # of a tensor, the norm of the difference relative to that of the tensor
    wanted: Any = None
    is_tensor: bool = True
    is_weight: bool = False

    def describe(self) -> str:
        """``model.0.weight by 3.1e-03``, ``state.best 3 instead of 4``."""
        if self.is_tensor:
            return f"{self.name} by {self.got:.1e}"
        return f"{self.name} {_shown(self.got)} instead of {_shown(self.wanted)}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one run: of one job, or of several that continue each other."""

    steps: int = 0  # committed
    # By the number of committed steps, and the rank at that time: buffers may differ by rank.
    boundaries: Mapping[tuple[int, int], State] = field(default_factory=dict)
    variables: Mapping[int, Mapping[str, State]] = field(default_factory=dict)  # by rank
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # logged
    means: frozenset[str] = frozenset()  # names of values that are means over all ranks
    samples: Mapping[int, Counter[int]] = field(default_factory=dict)  # that took effect, by step
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def total_samples(self) -> int:
        """The number of samples that took effect."""
        return sum(sum(counts.values()) for counts in self.samples.values())


def record_of(outcome: RunOutcome, folder: Path) -> Record:
    """The record of a job whose workers have written to ``folder``."""
    workers = {w.record["facts"].get("rank", 0): w for w in outcome.survivors if w.record}
    if not workers:
        return Record()
    first = workers[min(workers)]
    values, means = _values_of(sorted(folder.glob("*.logged.jsonl"), key=_modified))
    return Record(
        steps=max(w.steps for w in workers.values()),
        boundaries=_boundaries(workers),
        variables={rank: w.record["variables"] for rank, w in workers.items()},
        values=values,
        means=means,
        samples=samples_of(read_ledger(folder / "ledger")),
        facts=first.record["facts"],
        warnings=tuple(dict.fromkeys(t for w in workers.values() for t in w.record["warnings"])),
        written=tuple(sorted({f for w in workers.values() for f in w.record["written"]})),
    )


def samples_of(ledger: RunLedger) -> dict[int, Counter[int]]:
    """The samples that took effect in each step."""
    samples: dict[int, Counter[int]] = defaultdict(Counter)
    for step in ledger.surviving:
        samples[step.step].update(step.samples)
    return dict(samples)


def continued(before: Mapping[int, Counter[int]], record: Record, resumed_at: int) -> Record:
    """The record of a job that continued another one from a step on."""
    kept = {step: samples for step, samples in before.items() if step < resumed_at}
    fields = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    return Record(**fields | {"samples": kept | dict(record.samples)})


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns


def _boundaries(workers: Mapping[int, WorkerResult]) -> dict[tuple[int, int], State]:
    """The states of all ranks; those of rank 0 have the sums of the parts that all ranks hold."""
    states: dict[tuple[int, int], dict[str, Leaf]] = {}
    for worker in workers.values():
        for step, rank, state in worker.record["boundaries"]:
            states[step, rank] = state
    for step, rank in list(states):
        if rank:
            continue
        parts = [states.get((step, other), {}) for other in workers]
        for name, leaf in list(states[step, 0].items()):
            if leaf[0] == "part":
                held = [part[name] for part in parts if name in part]
                del states[step, 0][name]
                if len(held) == len(workers):  # not before a rank has joined
                    sums = [sum(part[i] for part in held) for i in range(_NORM, len(leaf))]
                    states[step, 0][name] = ["tensor", *leaf[1:_NORM], *sums]
    return {
        key: {name: leaf for name, leaf in state.items() if leaf[0] != "part"}
        for key, state in states.items()
    }


def _values_of(files: Sequence[Path]) -> tuple[dict[str, dict[int, float]], frozenset[str]]:
    values: dict[str, dict[int, float]] = defaultdict(dict)
    means: set[str] = set()
    for line in (json.loads(text) for file in files for text in file.read_text().splitlines()):
        if "rewind" in line:
            continue
        means.update(line["means"])
        for name, value in line["values"].items():
            values[name][line["step"]] = value
    return dict(values), frozenset(means)


# ----------------------------------------------------------------------------
# Differences, as multiples of the effect of rounding.


@dataclass(frozen=True)
class Rounding:
    """How much an undisturbed run changes if the last bits of its gradients do."""

    undisturbed: Record
    noisy: Record | None

    @property
    def roundings(self) -> float:
        """What is tolerated without a measured effect, in units of a number's precision."""
        is_measured = self.noisy is not None and self.noisy.facts.get("updates_with_noise", 1)
        return _ROUNDINGS if is_measured else _UNMEASURED_ROUNDINGS

    def irreproducible(self) -> list[Difference]:
        """What differs between two undisturbed runs in the first step, before the noise."""
        if self.noisy is None:
            return []
        boundaries = self.undisturbed.boundaries
        first = min((at for at in boundaries if at[1] == 0), default=None)
        if first is None:
            return []
        once = Record(boundaries={first: boundaries[first]})
        return differing_state(self.noisy, once, Rounding(once, None))

    def of_metrics(self, otherwise: float) -> float:
        """The relative tolerance for numbers that the script computes from the model's outputs."""
        return _METRIC_ROUNDING if self.undisturbed.facts.get("precision") else otherwise

    def of_state(self, name: str, step: int) -> float:
        """The largest effect on a part of the state, until about a step."""
        if self.noisy is None:
            return 0.0
        pairs = (
            (self.undisturbed.boundaries[at].get(name), self.noisy.boundaries[at].get(name))
            for at in self.undisturbed.boundaries.keys() & self.noisy.boundaries.keys()
            if at[0] <= 2 * step + 2  # the first update has no noise: the second's counts
        )
        return max((_apart(a, b) for a, b in pairs if a and b), default=0.0)

    def of_value(self, name: str) -> float:
        """The largest effect on a logged value."""
        if self.noisy is None:
            return 0.0
        one, other = self.undisturbed.values.get(name, {}), self.noisy.values.get(name, {})
        gaps = [abs(one[s] - other[s]) for s in one.keys() & other.keys()]
        return max((gap for gap in gaps if math.isfinite(gap)), default=0.0)


def differing_state(
    got: Record, wanted: Record, rounding: Rounding, *, only: frozenset[str] | None = None
) -> list[Difference]:
    """What differs in the state, with the first boundary at which it does; by that, and plain
    values, which are often the cause, before tensors. ``only``: these names."""
    differing: dict[str, Difference] = {}
    for at in sorted(got.boundaries.keys() & wanted.boundaries.keys()):
        step, mine, theirs = at[0], got.boundaries[at], wanted.boundaries[at]
        for name in theirs:
            if name in differing or (only is not None and name not in only) or name not in mine:
                continue
            if not (gap := _apart(mine[name], theirs[name])):
                continue
            tolerance = _tolerance(theirs[name], rounding.of_state(name, step), rounding.roundings)
            if name.startswith("state/") and isinstance(value := theirs[name][1], float):
                tolerance = max(tolerance, rounding.of_metrics(0.0) * abs(value))
            if gap > tolerance:
                differing[name] = _difference(name, step, mine[name], theirs[name], gap)
    return sorted(
        differing.values(), key=lambda d: (d.step, d.is_tensor, not d.is_weight, -_size(d))
    )


def names_by_rank(record: Record, rounding: Rounding) -> frozenset[str]:
    """The parts of the state that ranks do not share, such as BatchNorm's statistics. After the
    death of a rank, those of another one are used."""
    names: set[str] = set()
    for (step, rank), state in record.boundaries.items():
        first = record.boundaries.get((step, 0), {})
        for name in state.keys() & first.keys() if rank else ():
            gap = 0.0 if name in names else _apart(state[name], first[name])
            effect = rounding.of_state(name, step) if gap else 0.0
            if gap and gap > _tolerance(first[name], effect, rounding.roundings):
                names.add(name)
    return frozenset(names)


def names_of_state(record: Record) -> frozenset[str]:
    """The names of all parts of the state."""
    return frozenset(name for state in record.boundaries.values() for name in state)


def differing_values(
    got: Record, wanted: Record, rounding: Rounding, *, only: frozenset[str] | None = None
) -> list[Difference]:
    """Logged values that differ, each with its first step."""
    differences = []
    for name, steps in wanted.values.items():
        if only is not None and name not in only:
            continue
        tolerance = NOISE_FACTOR * rounding.of_value(name)
        relative = rounding.of_metrics(_VALUE_ROUNDING)
        for step in sorted(steps.keys() & got.values.get(name, {}).keys()):
            one, other = got.values[name][step], steps[step]
            is_same = one == other or (math.isnan(one) and math.isnan(other))
            if not is_same and not abs(one - other) <= tolerance + relative * abs(other):
                differences.append(Difference(f"run.log {name}", step, one, other, is_tensor=False))
                break
    return sorted(differences, key=lambda d: d.step)


def matching_samples(got: Record, wanted: Record) -> int:
    """The number of samples that took effect in the same step as in another run."""
    steps = wanted.samples.keys() & got.samples.keys()
    return sum(sum((wanted.samples[s] & got.samples[s]).values()) for s in steps)


def additional_samples(got: Record, wanted: Record) -> int:
    """The number of samples that took effect beyond those of another run."""
    none: Counter[int] = Counter()
    return sum(sum((c - wanted.samples.get(s, none)).values()) for s, c in got.samples.items())


def _apart(one: Leaf, other: Leaf) -> float:
    """The norm of a difference; infinite for values that have none."""
    if one[0] != other[0] or (one[0] == "tensor" and one[1] != other[1]):
        return math.inf
    if one[0] != "value":
        squares = ((a - b) ** 2 for a, b in zip(one[_FIRST:], other[_FIRST:], strict=True))
        return math.sqrt(sum(squares) / (len(one) - _FIRST))
    a, b = one[1], other[1]
    if a == b or (a != a and b != b):
        return 0.0
    is_number = isinstance(a, float | int) and isinstance(b, float | int)
    is_float = is_number and (isinstance(a, float) or isinstance(b, float))
    return abs(a - b) if is_float else math.inf


def _tolerance(leaf: Leaf, effect: float, roundings: float = _ROUNDINGS) -> float:
    if leaf[0] == "value":
        base = _VALUE_ROUNDING * abs(leaf[1]) if isinstance(leaf[1], float) else 0.0
    else:
        base = roundings * leaf[_EPS] * math.sqrt(leaf[_NORM])
    return base + (NOISE_FACTOR * effect if math.isfinite(effect) else math.inf)


def _difference(path: str, step: int, got: Leaf, wanted: Leaf, gap: float) -> Difference:
    name, is_weight = _display(path), path.startswith("model/")
    if wanted[0] == "value":
        return Difference(name, step, got[1], wanted[1], is_tensor=False)
    norm = math.sqrt(wanted[_NORM])
    return Difference(name, step, gap / norm if norm else gap, is_weight=is_weight)


def _size(difference: Difference) -> float:
    return float(difference.got) if difference.is_tensor else 0.0


def _display(name: str) -> str:
    """``optimizer.param_groups.0.lr`` for ``tracked/optimizer/param_groups/0/lr``; values of
    ``run.state`` and the progress with their owner."""
    owner, _, rest = name.partition("/")
    shown = rest if owner in ("model", "tracked") else f"run.{name}"
    return shown.replace("/", ".")


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


# ----------------------------------------------------------------------------
# The script's own variables, and the lines that assign them.


@dataclass(frozen=True)
class Variable:
    """A variable that the script keeps from step to step, and that differs between two runs."""

    name: str  # of an attribute of an object: ``self.ema``
    file: str
    line: int  # that assigns it first
    has_tensors: bool
    got: Any
    wanted: Any
    is_generator: bool = False

    def describe(self, source: Sources) -> str:
        """``best (line 12: best = 0.0): 3 instead of 4``."""
        text = source.line(self.file, self.line)
        values = (
            "" if self.has_tensors else f": {_shown(self.got)} instead of {_shown(self.wanted)}"
        )
        return f"{self.name} (line {self.line}: {text}){values}"


def differing_variables(
    got: Record, wanted: Record, noisy: Record | None, sources: Sources
) -> list[Variable]:
    """Variables that the script assigns outside its loops, and that differ on some rank.

    Not those that differ without a fault: times, for example.
    """
    differing: dict[str, Variable] = {}
    for rank in sorted(got.variables.keys() & wanted.variables.keys()):
        mine, theirs = got.variables[rank], wanted.variables[rank]
        other = noisy.variables.get(rank, {}) if noisy is not None else {}
        for scope in mine.keys() & theirs.keys():
            file, _, line = scope.rpartition(":")
            kept = {n: (file, at) for n, at in sources.kept(file).of(int(line)).items()}
            for variable in _differing(mine[scope], theirs[scope], other.get(scope), kept):
                known = differing.get(variable.name)
                if known is None or (variable.has_tensors and not known.has_tensors):
                    differing[variable.name] = variable
    return sorted(differing.values(), key=lambda v: (not v.has_tensors, v.line))


def _differing(
    mine: State, theirs: State, noisy: State | None, kept: Mapping[str, tuple[str, int]]
) -> Iterator[Variable]:
    others = noisy if noisy is not None else theirs
    unsteady = {
        _root(path)
        for path, leaf in theirs.items()
        if leaf[0] == "value" and _is_unsteady(others.get(path), leaf)
    }
    for path, leaf in theirs.items():
        root = _root(path)
        if root not in kept or root in unsteady:
            continue
        own = mine.get(path)
        effect = _apart(noisy[path], leaf) if noisy is not None and path in noisy else 0.0
        if own is None:
            yield Variable(root, *kept[root], False, None, leaf[1] if leaf[0] == "value" else None)
        elif _apart(own, leaf) > _tolerance(leaf, effect):
            has_tensors = leaf[0] == "tensor" and leaf[1] > 1 and own[0] == "tensor"
            is_generator = path.endswith(f".{GENERATOR_STATE}")
            yield Variable(root, *kept[root], has_tensors, own[1], leaf[1], is_generator)


def _is_unsteady(other: Leaf | None, leaf: Leaf) -> bool:
    """Whether a value differs without a fault, and not by rounding."""
    if other is None:
        return True
    gap = _apart(other, leaf)
    return gap > (_STEADY * abs(leaf[1]) if isinstance(leaf[1], float) else 0.0)


def _root(path: str) -> str:
    """``self.ema`` of ``self.ema.0.weight``, ``ema`` of ``ema.0.weight``."""
    first, _, rest = path.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "self" else first


class Sources:
    """The files of a script. ``read``: the text of one."""

    def __init__(self, read: Callable[[str], str]) -> None:
        self._read = functools.cache(read)
        self.kept = functools.cache(lambda file: KeptVariables(self._read(file)))

    def line(self, file: str, number: int) -> str:
        """A line without indentation; "" for number 0."""
        return self._read(file).splitlines()[number - 1].strip() if number else ""


class KeptVariables:
    """The lines that assign variables, and attributes of ``self``, outside of loops: what a script
    keeps longer than a step.

    >>> KeptVariables("best = 0\\nfor i in range(3):\\n    x = best\\n    best += x").of(0)
    {'best': 1}
    """

    def __init__(self, source: str) -> None:
        # By the first line of a function: its own names, with a line or 0, and where it is.
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._outer: dict[int, int] = {}
        self._attributes: dict[str, int] = {}
        self._declared: set[tuple[int, str]] = set()  # by `nonlocal` and `global`
        self._visit(ast.parse(source), 0, in_loop=False)

    def of(self, scope: int) -> dict[str, int]:
        """The kept variables that a function sees, with the first line that assigns each."""
        own = self._names.get(scope, {})
        outer = self.of(self._outer[scope]) if scope in self._outer else self._attributes
        return {name: line for name, line in {**outer, **own}.items() if line}

    def _visit(self, node: ast.AST, scope: int, *, in_loop: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._names[scope].setdefault(node.name, 0)
            line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            self._outer[line], scope, in_loop = scope, line, False
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            self._names[scope] = {argument.arg: argument.lineno for argument in arguments}
        elif isinstance(node, ast.For | ast.AsyncFor):
            for name in _names(node.target):
                self._names[scope].setdefault(name, 0)
        if isinstance(node, ast.Nonlocal | ast.Global):
            self._declared |= {(scope, name) for name in node.names}
        for target in _targets(node):
            for name in _names(target):
                if (scope, name) in self._declared:
                    continue  # assigned first where it is defined
                names = self._attributes if name.startswith("self.") else self._names[scope]
                line = 0 if in_loop else target.lineno
                names[name] = names.get(name) or line
        is_loop = isinstance(node, ast.For | ast.While | ast.AsyncFor)
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope, in_loop=in_loop or is_loop)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return [node.target]
    return []


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        if target.value.id == "self":
            yield f"self.{target.attr}"
    elif isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _names(part)


def line_that_sets(source: str, key: str) -> int:
    """The first line that assigns ``group[key]``, as in ``group["lr"] = rate``; 0: none."""
    for node in ast.walk(ast.parse(source)):
        for target in _targets(node):
            index = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(index, ast.Constant) and index.value == key:
                return target.lineno
    return 0
