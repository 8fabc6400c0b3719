"""What a worker records of a script that is being checked, and how its training is shortened.

Runs in the worker, around the components that ``elastic.join()`` starts in the script. At each
commit it takes a sketch of the job's state, so that :mod:`.comparison` can tell in which step two
runs have parted. The script's checkpoints and logged values go to the folder of the run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import checkpoints
import elastic
from checkpoints.tensors import is_dtensor, local_of, local_regions
from elastic.telemetry.log import get_logger
from elastic.train import run
from elastic.train.folder import Checkpoints
from elastic.train.loop import CallEnded
from elastic.train.optimizers import Registry
from elastic.train.origin import is_file_installed
from elastic.train.session import Session
from elastic.train.state import JobState
from elastic.train.step import Step

Leaf = list[Any]
"""``["value", v]``, or ``["tensor" | "part", size, eps, squared norm, projections…]``: parts, of a
tensor sharded over the ranks, are to be added."""

GLOBAL = 0
"""The place in the scope FILE:LINE of global variables; that of a function is its first line."""

GENERATOR_STATE = "generator_state"
_PROJECTIONS = 8
_PERIOD = 1 << 15
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PACKAGES = tuple(f"{p.__path__[0]}{os.sep}" for p in (checkpoints, elastic))
_MAX_DEPTH, _MAX_LEAVES = 6, 5000
_NOT_STATE = frozenset(
    ["types", "layouts", "transient", "seed", "loaders", "frozen", "attributes", "gradients"]
)
_NOISE_SEED = 0x6E6F697365
_LONGEST_ACCUMULATION = 2  # times the number of steps, after which an open one is not waited for


@dataclass(frozen=True, kw_only=True)
class RecordOrder:
    """How to run and to record a checked script."""

    steps: int  # after which training ends
    epoch_steps: int  # the maximum for an epoch of each loader
    save_every: int  # steps
    checkpoints: str  # the folder in place of the script's
    is_in_retry: bool | None = None  # count events within run.retry only; None: not known yet
    is_noisy: bool = False  # change the last bits of all gradients


class LimitReached(CallEnded):
    """Training ends after the given number of steps: on all ranks, between two steps."""


class Recording:
    """The record of one worker."""

    def __init__(self, order: RecordOrder, script: Path, folder: Path, name: str) -> None:
        self._order = order
        self._script = script
        self._folder = folder
        self._name = name
        self._logged = folder / f"{name}.logged.jsonl"
        self._boundaries: dict[int, tuple[int, dict[str, Leaf]]] = {}  # by step: rank, state
        self._variables: dict[str, dict[str, Leaf]] = {}  # by scope
        self._warnings: list[str] = []
        self._written: set[str] = set()
        self._session: Session | None = None
        self._generators: list[Any] | None = None  # states at the beginning of a micro-batch
        self._facts: dict[str, Any] = {"in_retry": False, "own_loop": False, "draws": False}
        self._precision = 0.0  # the coarsest relative rounding of a forward pass
        self._own_files: dict[str, bool] = {}
        self._watched: set[nn.Module] = set()
        self._noise_step = 0
        self._began_s = time.monotonic()

    @property
    def is_in_retry(self) -> bool | None:
        """Whether only events within ``run.retry`` count; None: not known yet."""
        return self._order.is_in_retry

    def is_of_the_script(self, file: str) -> bool:
        """Whether a source file is the script, or one of its modules: in its folder, and not in an
        environment of installed packages there."""
        if file not in self._own_files:
            is_beside = file.startswith(f"{self._script.parent}{os.sep}")
            is_installed = is_file_installed(file) or file.startswith(_PACKAGES)
            self._own_files[file] = is_beside and not is_installed
        return self._own_files[file]

    # -- before the script ---------------------------------------------------------------------

    def prepare(self) -> None:
        """Redirect what the script would write through this package, and note what it writes.

        Without a seed in the script, its runs are equal all the same: state is rank 0's at first.
        """
        number = int(self._name.rpartition("-")[2])
        random.seed(number)
        torch.manual_seed(number)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(number)
        names = vars(run)
        given = names["checkpoints_from"]
        names["checkpoints_from"] = lambda *args, **options: self._redirected(
            given(*args, **options)
        )
        leave = run.Attempt.__exit__

        def leave_recorded(
            attempt: run.Attempt,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> bool:
            if error is None or isinstance(error, LimitReached):
                frame: FrameType | None = sys._getframe(1)
                while frame is not None:
                    self.note_variables(frame)
                    frame = frame.f_back
            is_handled = leave(attempt, kind, error, trace)
            if attempt.succeeded and isinstance(error, LimitReached) and is_handled:
                raise SystemExit(0)  # without the code that follows training
            return is_handled

        run.Attempt.__exit__ = leave_recorded  # type: ignore[method-assign]
        get_logger().addHandler(_Warnings(self._warnings))
        sys.addaudithook(self._on_audit)

    def _redirected(self, policy: Checkpoints | None) -> Checkpoints | None:
        if policy is None:
            return None
        folder, when = self._order.checkpoints, self._order.save_every
        return dataclasses.replace(policy, folder=folder, when=when, required=False)

    def _on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event == "open" and isinstance(args[2], int) and args[2] & writing:
            self._note_file(args[0])

    def note_call(self, frame: FrameType) -> None:
        """Note a file that torch.save writes: in C++, which no audit hook sees."""
        if frame.f_code is torch.save.__code__:
            self._note_file(frame.f_locals["f"])

    def _note_file(self, path: object) -> None:
        if not isinstance(path, str | os.PathLike):
            return
        full = os.path.abspath(os.fspath(path))
        temporary = os.path.join(tempfile.gettempdir(), tempfile.gettempprefix())
        ignored = (str(self._folder), self._order.checkpoints, temporary, "/dev/", "/proc/")
        if not full.startswith(ignored) and "__pycache__" not in full:
            self._written.add(full)

    # -- the script's components ---------------------------------------------------------------

    def attach(self, parts: run.Components) -> None:
        """Record this job, whose components have just been created."""
        session = self._session = parts.session
        loop, commits, job = parts.loop, parts.loop._commits, session.job
        begin, commit, micro_batch = loop.begin, commits._commit, loop._begin_micro_batch

        def begin_limited(loader: Any, first: Any, rest: Any, **options: Any) -> Step:
            done, limit = job.progress.step, self._order.steps
            is_open = session.current.accumulation.since is not None
            if done >= limit and (not is_open or done >= _LONGEST_ACCUMULATION * limit):
                raise LimitReached
            self._facts["in_retry"] |= session.scope.in_retry
            self._facts["own_loop"] |= loader is None
            self._watch_precision(job.modules.values())
            return begin(loader, first, rest, **options)

        def begin_micro_batch(step: Step) -> None:
            micro_batch(step)
            self._generators = None if self._facts["draws"] else _generator_states()

        def commit_recorded(last: Step) -> None:
            if self._generators is not None:
                self._facts["draws"] |= not _same_states(self._generators, _generator_states())
            self._note_boundary(job.progress.step)
            commit(last)

        loop.begin = begin_limited  # type: ignore[method-assign]
        loop._begin_micro_batch = begin_micro_batch  # type: ignore[method-assign]
        commits._commit = commit_recorded  # type: ignore[method-assign]
        self._shorten_epochs(session.registry)
        self._redirect_logs(parts)
        if self._order.is_noisy:
            register_optimizer_step_pre_hook(self._add_noise)

    def _shorten_epochs(self, registry: Registry) -> None:
        add, most = registry.add_loader, self._order.epoch_steps

        def add_loader(loader: Any, *, max_steps: int | None = None, **options: Any) -> Any:
            steps = most if max_steps is None else min(most, max_steps)
            return add(loader, max_steps=steps, **options)

        registry.add_loader = add_loader  # type: ignore[method-assign]

    def _redirect_logs(self, parts: run.Components) -> None:
        metrics, manager = parts.metrics, parts.session.checkpoints
        amend = manager.amend

        def amend_redirected(
            given: Any, when: Any = None, keep: Any = None, **options: Any
        ) -> None:
            policy = given if isinstance(given, Checkpoints) else None
            if policy is None and given is not None:
                policy = Checkpoints(given)
            amend(self._redirected(policy), None, keep if policy is None else None, **options)

        manager.amend = amend_redirected  # type: ignore[method-assign]
        metrics.add_writer(_Values(self._logged))
        metrics.add_writer = lambda writer: None  # type: ignore[method-assign]

    def _watch_precision(self, modules: Iterable[object]) -> None:
        for module in modules:
            if isinstance(module, nn.Module) and module not in self._watched:
                self._watched.add(module)
                module.register_forward_pre_hook(lambda *_: self._note_precision())

    def _note_precision(self) -> None:
        if torch.is_autocast_enabled("cpu"):
            eps = torch.finfo(torch.get_autocast_dtype("cpu")).eps
            self._precision = max(self._precision, eps)

    def _add_noise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Change gradients as another order of their sums would: by a few units in the last place
        of the typical element of the largest tensor, which sums that cancel out may consist of.
        What autocast computes is rounded more coarsely, relative to the same tensor.

        Not before the first update, which shows whether two runs are equal without it."""
        self._noise_step += 1
        if self._noise_step == 1:
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        held = [g for g in grads if g is not None and not g.is_sparse]
        gradients = [local_of(g) if is_dtensor(g) else g for g in held]
        if not gradients:
            return
        generator = torch.Generator().manual_seed(_NOISE_SEED + self._noise_step)
        with torch.no_grad():
            sizes = [float(g.norm()) / math.sqrt(max(1, g.numel())) for g in gradients]
            if not math.isfinite(max(sizes)):
                return
            for gradient, own in zip(gradients, sizes, strict=True):
                eps = torch.finfo(gradient.dtype).eps
                signs = torch.randint(0, 2, gradient.shape, generator=generator) * 2.0 - 1.0
                gradient += signs.to(gradient.dtype) * (
                    2 * eps * max(sizes) + self._precision * own
                )

    # -- what is recorded ----------------------------------------------------------------------

    def _note_boundary(self, step: int) -> None:
        assert self._session is not None
        lifecycle = self._session.lifecycle
        if lifecycle.is_restored:
            tree = self._session.job.tree()
            kept = {key: part for key, part in tree.items() if key not in _NOT_STATE}
            # Not its epoch: the last step of a pass that is left by islice is committed when the
            # pass ends or when the next epoch begins. Later steps have the samples of their epoch.
            kept["progress"] = {"step": tree["progress"]["step"]}
            self._boundaries[step] = (lifecycle.world.rank, dict(leaves_of(kept)))

    def note_variables(self, frame: FrameType) -> None:
        """Record the variables of a function of the script, and its global ones."""
        code = frame.f_code
        if not self.is_of_the_script(code.co_filename):
            return
        # Of closures, too: f_locals has the variables of the enclosing function that it uses.
        if code.co_name != "<module>":
            self._note(f"{code.co_filename}:{code.co_firstlineno}", dict(frame.f_locals))
        self._note(f"{code.co_filename}:{GLOBAL}", dict(frame.f_globals))

    def _note(self, scope: str, variables: Mapping[str, Any]) -> None:
        job = self._session.job if self._session is not None else None
        files = {n: getattr(m, "__file__", None) for n, m in list(sys.modules.items())}
        modules = {n for n, file in files.items() if file and self.is_of_the_script(file)}
        own = _Own(job, frozenset(modules | {"__main__"}))
        self._variables[scope] = dict(own.leaves(variables))

    def finish(self, left: Mapping[str, Any] | None) -> dict[str, Any]:
        """The record, as JSON. ``left``: the script's global variables, if it ran to its end."""
        if left is not None and (scope := f"{self._script}:{GLOBAL}") not in self._variables:
            self._note(scope, left)
        facts = {**self._facts, "joined": self._session is not None}
        facts["updates_with_noise"] = max(0, self._noise_step - 1)
        facts["precision"] = self._precision
        facts["seconds"] = time.monotonic() - self._began_s
        if self._session is not None:
            job, lifecycle = self._session.job, self._session.lifecycle
            modules = [m for one in job.all_modules.values() for m in one.modules()]
            facts |= {
                "rank": lifecycle.world.rank if lifecycle.has_world else 0,
                "batch_norm": any(isinstance(m, _BATCH_NORMS) for m in modules),
                "saves": self._session.checkpoints.is_on,
                "sharded": job.built is not None or job.is_sharded,
            }
            self._note_boundary(job.progress.step)
        return {
            "facts": facts,
            "boundaries": [(step, *noted) for step, noted in self._boundaries.items()],
            "variables": self._variables,
            "warnings": self._warnings,
            "written": sorted(self._written),
        }

    def line_of(self, error: BaseException) -> int:
        """The last line of the script in an error's traceback; 0: none."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self._script)
        ]
        return (lines[-1] or 0) if lines else 0


# ----------------------------------------------------------------------------
# Sketches: a few numbers for each tensor, from which the norm of a difference is estimated.


@functools.cache
def _signs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (_PERIOD, _PROJECTIONS), generator=generator).double() * 2 - 1


def _row_signs(first: int, count: int) -> torch.Tensor:
    bits = [((row * 2654435761) >> 16) & 1 for row in range(first, first + count)]
    return torch.tensor(bits, dtype=torch.double) * 2 - 1


def sketch(tensor: torch.Tensor, offset: int = 0) -> list[float]:
    """The squared norm of a tensor, and its projections onto fixed vectors of random signs.

    The norm of the difference between two tensors is about that of the difference of their
    projections, over the square root of their number. ``offset``: of the first element in a larger
    tensor, of which the sketches of all parts add up to its own.
    """
    with torch.no_grad():
        flat = tensor.detach()
        flat = (flat.to_dense() if flat.is_sparse else flat).cpu()
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        flat = torch.nan_to_num(flat.reshape(-1).double(), nan=1e30, posinf=1e31, neginf=-1e31)
        norm = float(flat @ flat)
        row, pad = divmod(offset, _PERIOD)
        if pad:
            flat = torch.cat([torch.zeros(pad, dtype=torch.double), flat])
        rows = flat.numel() // _PERIOD
        total = torch.zeros(_PROJECTIONS, dtype=torch.double)
        if rows:
            total += _row_signs(row, rows) @ (flat[: rows * _PERIOD].view(rows, -1) @ _signs())
        rest = flat[rows * _PERIOD :]
        if rest.numel():
            total += (rest @ _signs()[: rest.numel()]) * _row_signs(row + rows, 1)
    return [norm, *total.tolist()]


def leaves_of(item: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Leaf]]:
    """The numbers, strings and tensors in a state, by path."""
    if isinstance(item, torch.Tensor):
        yield path, _leaf(item)
    elif isinstance(item, Mapping) and depth <= 20:
        for key, value in item.items():
            yield from leaves_of(value, f"{path}/{key}" if path else str(key), depth + 1)
    elif isinstance(item, list | tuple) and depth <= 20:
        for index, value in enumerate(item):
            yield from leaves_of(value, f"{path}/{index}", depth + 1)
    elif item is None or isinstance(item, bool | int | float | str):
        yield path, ["value", item]


def _leaf(tensor: torch.Tensor) -> Leaf:
    eps = torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0
    if not is_dtensor(tensor):
        return ["tensor", tensor.numel(), eps, *sketch(tensor)]
    shape, totals = tuple(tensor.shape), [0.0] * (_PROJECTIONS + 1)
    for region, part in local_regions(tensor):
        if region.shape[1:] != shape[1:]:
            return ["value", None]  # not contiguous in the whole tensor: not compared
        start = (region.offset[0] if shape else 0) * math.prod(shape[1:])
        totals = [a + b for a, b in zip(totals, sketch(part, start), strict=True)]
    return ["part", tensor.numel(), eps, *totals]


# ----------------------------------------------------------------------------
# The script's own variables, without objects of the job.


class _Own:
    """Finds what the script keeps and the job does not know."""

    def __init__(self, job: JobState | None, modules: frozenset[str]) -> None:
        self._own_modules = modules  # with classes of the script
        self._count = 0
        self._known: set[int] = set()
        self._memory: set[int] = set()
        if job is not None:
            objects: Iterable[Any] = (*job.modules.values(), *job.all_modules.values())
            tracked_too = (*job.all_tracked.values(), *job.local.values())
            self._known |= {id(each) for each in (*tracked_too, *job.loaders.values())}
            parts = [m for one in objects for m in one.modules()]
            tracked = [t for t in job.all_tracked.values() if isinstance(t, nn.Module)]
            self._known |= {id(m) for m in (*parts, *tracked)} | {id(job.user)}
            for module in (*parts, *tracked):
                tensors = (*module.parameters(), *module.buffers())
                self._memory |= {_address(t) for t in tensors} - {0}

    def leaves(self, variables: Mapping[str, Any]) -> Iterator[tuple[str, Leaf]]:
        """The script's variables, by path."""
        for name, value in variables.items():
            if not name.startswith("_"):
                yield from self._visit(value, name, 0)

    def _visit(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Leaf]]:
        if id(value) in self._known or depth > _MAX_DEPTH or self._count > _MAX_LEAVES:
            return
        if isinstance(value, torch.Tensor):
            if value.numel() and not is_dtensor(value) and _address(value) not in self._memory:
                self._count += 1
                yield path, _leaf(value)
        elif value is None or isinstance(value, bool | int | float | str):
            self._count += 1
            yield path, ["value", value]
        else:
            self._known.add(id(value))
            for key, part in self._parts_of(value):
                yield from self._visit(part, f"{path}.{key}", depth + 1)

    def _parts_of(self, value: Any) -> Iterable[tuple[Any, Any]]:
        if isinstance(value, Mapping):
            return list(value.items())
        if isinstance(value, list | tuple):
            return list(enumerate(value))
        if isinstance(value, torch.Generator):
            return [(GENERATOR_STATE, value.get_state())]
        if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            return [("array", torch.as_tensor(value))] if value.dtype.kind in "fiub" else []
        if isinstance(value, nn.Module | Optimizer | LRScheduler):
            return list(value.state_dict().items())
        if type(value).__module__ in self._own_modules and hasattr(value, "__dict__"):
            return list(vars(value).items())
        return []


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # without memory of its own
        return 0


# ----------------------------------------------------------------------------
# Smaller parts.


def _generator_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state()[1:3] if numpy is not None else None
    return [torch.get_rng_state(), random.getstate(), drawn]


def _same_states(one: Sequence[Any], other: Sequence[Any]) -> bool:
    is_same = torch.equal(one[0], other[0]) and one[1] == other[1]
    if one[2] is None or other[2] is None:
        return is_same
    return is_same and one[2][1] == other[2][1] and bool((one[2][0] == other[2][0]).all())


# Of saves that a death interrupts, as it is meant to.
_NOT_OF_THE_SCRIPT = ("checkpointing", "folder", "journal")


class _Warnings(logging.Handler):
    """Keeps this package's warnings about the script."""

    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        if record.module not in _NOT_OF_THE_SCRIPT:
            self._warnings.append(record.getMessage())


class _Values:
    """A writer of ``run.log``: one line of JSON for each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rewind(self, step: int) -> None:
        self._write({"rewind": step})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        means = [name for name, value in values.items() if type(value) is not float]
        plain = {name: float(value) for name, value in values.items()}
        self._write({"step": step, "values": plain, "means": means})

    def close(self) -> None:
        pass

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
