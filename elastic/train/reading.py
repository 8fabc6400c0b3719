"""How the script reads a loader: through ``enumerate`` or ``islice``, ahead of training, or by a
generator that is older than the call of the training function."""

from __future__ import annotations

import ast
import ctypes
import dis
import functools
import gc
import inspect
import itertools
import multiprocessing
import operator
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from elastic import torch_private
from elastic.errors import ConfigError, TrainingError
from elastic.telemetry.log import get_logger
from elastic.train.checks import loops_with, tree_of
from elastic.train.syntax import walk

# ----------------------------------------------------------------------------
# Detects the consumer of a loader's iterator: ``enumerate``, ``itertools.islice`` or ``cycle``.
#
# ``islice`` and ``zip(range(n), …)`` count from 0 even if a pass begins in the middle of an epoch,
# and ``cycle`` never starts a second pass. The iterator is not notified, but Python's garbage
# collector can list its referrers.
#
# ``enumerate`` continues its count, as if the pass had not been interrupted: its object is given
# that count before it numbers its first item (decision 41).
#
# Where the script limits an epoch by ``islice`` or ``zip``, the loader remembers the number of its
# batches, as part of the job's state. A pass that resumes ends where the interrupted one would
# have, unless the script has subtracted the batches that it has had. Readers whose number of
# batches is not known are refused: ``takewhile`` with a count, and an ``islice`` of a generator of
# the script, which need not pass on each batch.

# `enumerate(tqdm(loader))` reads the loader's generator through the progress bar's generator.
_PROGRESS_BARS = ("tqdm", "rich")

_RANGE_ITERATOR = type(iter(range(0)))
_VALUES: tuple[type, ...] = (type(iter([])), type(iter(())))  # iterators of lists and tuples
_CHOOSERS = (itertools.takewhile, itertools.dropwhile, filter, itertools.filterfalse)
# They pass each item on, if any.
_TEE: Iterator[Any] = itertools.tee(())[0]
_EACH = (
    *(zip, enumerate, map, itertools.starmap, itertools.islice),
    *(type(_TEE), *map(type, gc.get_referents(_TEE))),
)
_ONE_BY_ONE = (*_EACH, *_CHOOSERS)
_READERS = (*_ONE_BY_ONE, itertools.cycle, itertools.compress)
_NEXT = "__next__"
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.comprehension)
_NESTED = 3  # of these around each other: islice(enumerate(zip(loader, other)), n)


@dataclass(frozen=True, slots=True)
class Consumer:
    """The reader of a pass, as far as it is known."""

    # Objects of enumerate that number each of its batches. (Emptied in the first step: they refer
    # to the iterator, which would keep itself alive.)
    counters: list[Any] = field(default_factory=list)
    counts_apart: bool = False  # an enumerate numbers items that may be no batches of one pass
    is_cycle: bool = False
    # The number of batches after which it ends the pass: of islice(loader, n), or of a range in a
    # zip with the loader. None: it does not, or the number is not known.
    takes: int | None = None
    is_slice: bool = False
    begins_again: str = ""  # a call that ends the pass by a count of its own, or by other values

    def continue_counts(
        self, batches: int, *, knows_index: bool, from_constant: Callable[[], bool]
    ) -> None:
        """Let ``enumerate`` count as if the pass had not been interrupted after ``batches``, unless
        that is what it does, by ``start=loader.index``. Called before it numbers its first item.
        ``knows_index``: the script has read the index. ``from_constant``: whether its loop counts
        from a constant all the same.

        Raises TrainingError if this interpreter does not allow that.
        """
        counters, self.counters[:] = [*self.counters], []
        for counter in counters if batches else ():
            continues = knows_index and (_count_of(counter) >= batches or not from_constant())
            if not continues:
                _advance(counter, batches)

    def refuse_cycle(self) -> None:
        """Raise TrainingError for ``itertools.cycle``, which stores every batch and repeats them.

        After the first epoch no step would begin or commit.
        """
        if self.is_cycle:
            raise TrainingError(
                "itertools.cycle(loader) repeats the batches of the first epoch from memory, "
                "outside of any step",
                hint="def endless(loader):\n    while True:\n        yield from loader",
            )

    def refuse_restart(self) -> None:
        """Raise TrainingError if the consumer would begin its count again where a loop resumes, and
        the loader does not know the number."""
        if self.begins_again:
            raise TrainingError(
                f"{self.begins_again} begins again at the step at which a loop resumes: after a "
                "recovery or a restart, the epoch would have other steps",
                hint="itertools.islice(loader, n), around the loader itself, or what continues "
                "from the index:\n"
                "    for i, batch in enumerate(loader, start=loader.index):\n"
                "        if i == n:\n"
                "            break",
            )

    def refuse_limit(self, batches_left: int) -> None:
        """Raise TrainingError if the consumer ends the pass after a number of batches, which it
        would count again where a loop resumes. ``batches_left``: in the pass."""
        ends_early = self.takes is not None and self.takes < batches_left
        if self.is_slice or ends_early:
            call = "itertools.islice(loader, n)" if self.is_slice else "zip(range(n), loader)"
            raise TrainingError(
                f"{call} counts from the step at which a loop resumes: after a recovery or a "
                "restart, the epoch would have more than n steps",
                hint="run.loader(…, max_steps=n), whose epochs end at the same step, or "
                f"{call.replace('n)', 'n - loader.index)', 1)}",
            )


def consumer_of(iterator: object, *, everywhere: bool, is_resumed: bool = False) -> Consumer:
    """Find the reader that requested the first item of ``iterator``, a generator of the calling
    frame.

    ``everywhere`` scans all objects (22 ms at 290,000 objects; 110 ms behind a progress bar
    [measured]), else only the last few thousand allocations, which include the objects that a
    ``for`` statement has just created, unless all garbage was collected since. A pass that
    ``is_resumed`` must find an ``enumerate``.
    """
    frames = _readers_of(sys._getframe(1).f_back)
    if not everywhere:
        holders = objects_of(_READERS, (0, 1))
        if is_resumed and _names_enumerate(sys._getframe(1).f_back):
            counters = (held for held in holders if type(held) is enumerate)
            everywhere = not any(_reads(held, iterator, frames) for held in counters)
    if everywhere:
        holders = objects_of(_READERS, (None,)) if frames else _holders(iterator)
    bars = _frames_of_progress_bars(sys._getframe(1).f_back)
    each = [frame for frame in frames if frame in bars or _passes_each(frame)]
    begins_again = ""
    counted: list[Any] = []
    counts_apart = False
    is_cycle = is_slice = False
    takes: int | None = None
    for holder in holders:
        if type(holder) is enumerate:
            read, _ = cast(tuple[object, int], holder.__reduce__()[1])
            if _reads(read, iterator, each, kinds=_EACH):
                counted.append(holder)
            elif _reads(read, iterator, frames):
                counts_apart = True
        elif type(holder) is itertools.cycle:
            is_cycle = is_cycle or any(read is iterator for read in gc.get_referents(holder))
        elif type(holder) is itertools.islice:
            if any(_reads(read, iterator, frames) for read in gc.get_referents(holder)):
                is_slice, takes = True, _length_of(holder)
                if not any(_reads(read, iterator, bars) for read in gc.get_referents(holder)):
                    begins_again = "itertools.islice(…) of a generator of the script"
        elif type(holder) is zip:
            takes, other = _beside(holder, iterator, bars, takes)
            begins_again = begins_again or other
            if _beside(holder, iterator, frames, None)[0] not in (None, takes):
                begins_again = "zip(range(n), …) with a generator of the script"
        elif type(holder) in (*_CHOOSERS, itertools.compress):
            inner = gc.get_referents(holder)
            if any(_reads(read, iterator, frames) for read in inner) and _counts(holder, inner):
                begins_again = f"{type(holder).__name__}(…)"
    return Consumer(counted, counts_apart, is_cycle, takes, is_slice, begins_again)


# Where CPython keeps the count: behind the head of an object (Objects/enumobject.c, en_index; seen
# in 3.10 to 3.13).
_COUNT = object.__basicsize__


def _count_of(counter: Any) -> int:
    return counter.__reduce__()[1][1]  # type: ignore[no-any-return]


def _advance(counter: Any, batches: int) -> None:
    """Add ``batches`` to the count of an ``enumerate`` object."""
    count = _count_of(counter)
    place = ctypes.c_ssize_t.from_address(id(counter) + _COUNT)
    is_known = sys.implementation.name == "cpython" and place.value == count
    if is_known:
        place.value = count + batches
    if _count_of(counter) != count + batches:
        raise TrainingError(
            f"this loop resumes at step {batches} of its epoch, but enumerate(loader) counts from "
            f"{count}, which cannot be changed in Python {sys.version.split()[0]}",
            hint="for i, batch in enumerate(loader, start=loader.index):",
        )


def _is_request(called: ast.expr) -> bool:
    return getattr(called, "attr", getattr(called, "id", "")) in ("next", _NEXT)


def _names_enumerate(frame: FrameType | None) -> bool:
    """Whether the script's loop, or a generator that it reads, may call ``enumerate``."""
    while frame is not None:
        if "enumerate" in frame.f_code.co_names:
            return True
        frame = frame.f_back if _is_reader(frame) else None
    return False


def _passes_each(frame: FrameType) -> bool:
    """Whether a generator of the script yields one item for each batch, of one pass: by ``yield
    from``, or by the only ``yield`` in its loop. Or whether a ``__next__`` requests one batch."""
    tree, line = tree_of(frame), frame.f_lineno
    if frame.f_code.co_name == _NEXT:
        functions = (n for n in walk(tree) if isinstance(n, ast.FunctionDef))
        nodes = [n for function in functions for n in walk(function)]
        requests = [n for n in nodes if isinstance(n, ast.Call) and _is_request(n.func)]
        return len(requests) == 1 and not any(isinstance(n, _BRANCHES) for n in nodes)
    yields = [n for n in walk(tree) if isinstance(n, (ast.Yield, ast.YieldFrom))]
    if len(yields) != 1 or loops_with(tree, line):
        return False
    if isinstance(yields[0], ast.YieldFrom):
        return yields[0].lineno <= line <= (yields[0].end_lineno or 0)
    heads = [
        node
        for node in walk(tree)
        if isinstance(node, ast.For) and node.lineno <= line < node.body[0].lineno
    ]
    return any(
        isinstance(part, (ast.Expr, ast.Assign)) and part.value is yields[0]
        for head in heads
        for part in head.body
    ) and not any(isinstance(n, ast.Continue) for head in heads for n in walk(head))


def objects_of(types: Collection[type], generations: Sequence[int | None]) -> list[Any]:
    """The objects of these types in generations of the garbage collector; None: in all.

    It also knows tuples that another thread is still building: ``tuple(…)`` fails with a
    SystemError if anything else refers to its result meanwhile, such as a list of all objects. So
    that list is filtered while no thread can be switched: the interpreter may do so after a call
    and in a loop, but not between the operators below.
    """
    lists: list[list[Any]] = []
    chosen = map(frozenset(types).__contains__, map(type, itertools.chain.from_iterable(lists)))
    selected = itertools.compress(itertools.chain.from_iterable(lists), chosen)
    listed = map(gc.get_objects, generations)
    found: list[Any] = []
    rest: list[bool] = []
    is_enabled = gc.isenabled()
    gc.disable()  # finalizers are calls
    lists += listed
    found += selected
    rest += chosen  # or its iterator would keep the last list
    lists *= 0
    if is_enabled:
        gc.enable()
    return found


def _counts(holder: object, parts: list[Any]) -> bool:
    """Whether a reader that chooses items does so by their number: ``takewhile(lambda batch:
    next(count) < 9, loader)``, or a function that changes a variable around it."""
    if type(holder) is itertools.compress:
        return True
    codes = [part.__code__ for part in parts if isinstance(part, FunctionType)]
    stores = ("STORE_DEREF", "STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR")
    return any(
        "next" in code.co_names or any(i.opname in stores for i in dis.get_instructions(code))
        for code in codes
    )


def _length_of(sliced: Any) -> int | None:
    """``n`` of an ``islice(iterable, n)``, of which the first is being read; None for another
    start or step, and from Python 3.14 on, which does not tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copying it, in Python 3.12
        try:
            _, (_, start, stop, step), *_ = sliced.__reduce__()
        except (TypeError, ValueError):
            return None
    return stop if (start, step) == (0, 1) else None


def _beside(
    zipped: object, iterator: object, frames: list[Any], takes: int | None
) -> tuple[int | None, str]:
    """The length of a range in a ``zip`` with the iterator, of which the first is being read, and
    the ``zip``, if it has other values that begin again."""
    for parts in gc.get_referents(zipped):
        at = [_reads(part, iterator, frames) for part in parts] if type(parts) is tuple else []
        if not any(at):
            continue
        for place, part in enumerate(parts):
            if type(part) is _RANGE_ITERATOR:
                return operator.length_hint(part) + (place < at.index(True)), ""
            if (counted := _range_of_bar(part)) is not None:
                return len(counted), ""
            if type(part) in _VALUES:
                return takes, f"the {type(part).__name__.partition('_')[0]} in zip(…)"
    return takes, ""


def _range_of_bar(part: object) -> range | None:
    """The range in the iterator of a progress bar: of ``trange(9)``."""
    frame = part.gi_frame if isinstance(part, GeneratorType) else None
    is_bar = frame is not None and _frames_of_progress_bars(frame)
    counted = getattr(frame.f_locals.get("self"), "iterable", None) if frame and is_bar else None
    return counted if isinstance(counted, range) else None


def _holders(iterator: object) -> list[Any]:
    """Objects that refer to the iterator, directly or through others that pass its items on.

    The collector finds them much faster than a loop over all objects, and all ranks of a world wait
    for a joining process meanwhile.
    """
    known: list[Any] = []
    readers: list[Any] = [iterator]
    for _ in range(_NESTED):
        # Only these types: the lists of this function refer to the iterator, too, and in a list
        # of their own they would be a cycle that keeps it alive.
        holders = [held for held in gc.get_referrers(*readers) if type(held) in _READERS]
        parts = [held for held in gc.get_referrers(*readers) if type(held) is tuple]  # of a zip
        holders += [held for held in gc.get_referrers(*parts) if type(held) is zip]
        known += holders
        readers = [held for held in holders if type(held) in _ONE_BY_ONE]
        if not readers:
            break
    return known


def _reads(
    reader: object,
    iterator: object,
    frames: list[Any],
    depth: int = _NESTED,
    kinds: tuple[type, ...] = _ONE_BY_ONE,
) -> bool:
    """Whether ``reader`` is the iterator, the generator or the object with ``__next__`` of one of
    ``frames``, or an object of ``kinds`` that passes their items on."""
    if type(reader) in kinds and depth:
        inner = gc.get_referents(reader)
        parts = [part for parts in inner if type(parts) is tuple for part in parts]
        return any(_reads(read, iterator, frames, depth - 1, kinds) for read in (*inner, *parts))
    if isinstance(reader, GeneratorType):
        return reader is iterator or reader.gi_frame in frames
    own = getattr(getattr(type(reader), "__next__", None), "__code__", None)
    return own is not None and any(frame.f_code is own for frame in frames)


def _frames_of_progress_bars(frame: FrameType | None) -> list[Any]:
    """The generators that are no one else's than a progress bar's or a prepared loader's, which
    pass each batch on."""
    frames = []
    while frame and (_is_of_progress_bar(frame) or _is_of_prepared_loader(frame)):
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_of_progress_bar(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).split(".")[0] in _PROGRESS_BARS


def _is_of_prepared_loader(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.startswith("elastic.integrations.") and _passes_each(frame)


# ----------------------------------------------------------------------------
# Detects a script that requests a batch before it has trained on the previous one (prefetching).
#
# A step ends when the script requests the next batch. A script that reads ahead trains on the
# previous step's batch, so a fault loses or repeats a batch, and its last update comes after the
# loop. The first steps of a process reveal it: nothing is trained in the first step, and the
# forward pass in the second step gets the first step's tensors.

HINT = (
    "iterate over the loader itself: DataLoader(num_workers=4, pin_memory=True) reads ahead, and\n"
    "for inputs, targets in loader:\n"
    "    inputs = inputs.to(run.device, non_blocking=True)"
)


class _Stage(Enum):
    FIRST_STEP = "first step"
    SECOND_STEP = "second step"  # nothing was trained in the first
    OVER = "over"


class ReadingAhead:
    """Checks the first two steps of a process."""

    def __init__(self) -> None:
        self._stage = _Stage.FIRST_STEP
        self._first_batch: list[weakref.ref[torch.Tensor]] = []
        self._hooks: list[RemovableHandle] = []

    def step_began(self, batch: Any) -> None:
        """Called with the batch of a step that begins."""
        if self._stage is _Stage.FIRST_STEP:
            self._first_batch = [weakref.ref(tensor) for tensor in _tensors(batch)]

    def step_ended(self, number: int, modules: Collection[nn.Module], *, trained: bool) -> None:
        """Called when the script requests the batch after step ``number``."""
        if self._stage is _Stage.FIRST_STEP and modules and not trained:
            get_logger().warning(
                "step %d ended without a forward pass of a wrapped model. If the script reads "
                "batches ahead (a prefetcher), it trains on the previous step's batch, and its "
                "last update comes after the loop, where it is refused: %s",
                number,
                HINT,
            )
            self._stage = _Stage.SECOND_STEP
            self._hooks = [
                module.register_forward_pre_hook(self._check, with_kwargs=True)
                for module in modules
            ]
        elif self._stage is not _Stage.OVER:
            self._stage = _Stage.OVER
            self._first_batch.clear()
            for hook in self._hooks:
                hook.remove()

    def _check(self, module: nn.Module, inputs: Any, named: Any) -> None:
        first = [ref() for ref in self._first_batch]
        if any(tensor is one for tensor in _tensors([inputs, named]) for one in first):
            raise TrainingError(
                "the script requests the next batch before it trains on the last one, as a "
                "prefetcher does: a fault would lose or repeat a batch",
                hint=HINT,
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# ----------------------------------------------------------------------------
# Detects generators that the script created before ``run.retry`` called its function.
#
# ``self.batches = cycle(loader)`` in ``__init__`` outlives the function: after a change of the
# world, ``next(self.batches)`` would yield batches of the ended world, or stop.


class EarlierGenerators:
    """The generators older than the first attempt. One per process."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[GeneratorType[Any, Any, Any]] = weakref.WeakSet()

    def note(self) -> None:
        """Record all generators at the start of the first attempt.

        A generator that is running now has called ``run.retry``, and is not recorded. Takes about
        50 ms of CPU time at 366,000 objects [measured on a busy machine].
        """
        generators = objects_of((GeneratorType,), (None,))
        self._known.update(one for one in generators if not one.gi_running)

    def refuse(self) -> None:
        """Raise TrainingError if a recorded generator requested an item from the calling one."""
        callers = _generators(sys._getframe(1))
        if any(one.gi_frame in callers for one in self._known):
            raise created_too_early()


def created_too_early() -> TrainingError:
    """The error for an iterator that was created before the call of the function that reads it."""
    return TrainingError(
        "an iterator over the loader was created before run.retry called the function that reads "
        "it: after a change of the world it would yield batches of the ended world",
        hint="create it in that function, as a local variable: batches = cycle(loader), "
        "batches = iter(loader)",
    )


def _readers_of(frame: FrameType | None) -> list[FrameType]:
    """The frame and its callers, for as long as they are generators, or ``__next__`` of classes."""
    frames = []
    while frame is not None and _is_reader(frame):
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_reader(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR) or frame.f_code.co_name == _NEXT


def _generators(frame: FrameType | None) -> list[FrameType]:
    """The frame and its callers, for as long as they are generators."""
    frames = []
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frames.append(frame)
        frame = frame.f_back
    return frames


# ----------------------------------------------------------------------------
# Refuses other DataLoaders that the script reads beside the one of the job.
#
# ``zip(loader, unlabelled)`` and ``next(others)``, with ``others = itertools.cycle(unlabelled)``:
# where the loop resumes, the other DataLoader begins again, and the next steps train on batches of
# others. One that begins and ends within a step, as an evaluation does, has no position to lose.

OTHER_LOADER = "DataLoader"  # for run.untracked


class OtherLoaders:
    """Watches the iterators of all DataLoaders of this process. One per process.

    ``step``: the number of the current or next step; None where no loop can resume.
    """

    def __init__(self, step: Callable[[], int | None]) -> None:
        self._step = step
        self._read_in: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_off = False
        _WATCHING.add(self)
        _watch()

    def ignore(self, names: Collection[str]) -> None:
        """The script keeps their positions itself, or does not need them."""
        self._is_off = self._is_off or OTHER_LOADER in names

    def begins_again(self, iterator: object) -> None:
        """Called before another pass of an iterator, whose workers are kept for it."""
        self._read_in.pop(iterator, None)

    def requested(self, iterator: object) -> None:
        """Called before each batch of any DataLoader. Raises TrainingError if the script has read
        batches of this iterator in an earlier step."""
        step = None if self._is_off or not torch.is_grad_enabled() else self._step()
        if step is None or threading.current_thread() is not threading.main_thread():
            return
        first = self._read_in.setdefault(iterator, step)
        if first != step and not _is_read_by_job(sys._getframe(1)):
            raise TrainingError(
                f"a DataLoader that is not part of the job is read in step {first} and in step "
                f"{step}: where the loop resumes after a fault, it begins again, and the next "
                "steps would train on other batches",
                hint="other = run.loader(DataLoader(…)), which advances with the first loader:\n"
                "    for batch, more in zip(loader, other):\n"
                "  or, if it begins again at its end, more = next(others), with\n"
                "    def endless(loader):\n        while True:\n            yield from loader\n"
                "    others = endless(other)\n"
                "  or, if it is only evaluated, with torch.no_grad(): around next(others)\n"
                f"  or run.untracked({OTHER_LOADER!r}) before training, if it need not be exact",
            )


_WATCHING: weakref.WeakSet[OtherLoaders] = weakref.WeakSet()


@functools.cache
def _watch() -> None:
    def enter(iterator: object) -> None:
        for each in _WATCHING:
            each.requested(iterator)

    def enter_reset(iterator: object) -> None:
        for each in _WATCHING:
            each.begins_again(iterator)

    torch_private.watch_batches(enter, lambda _: None, enter_reset=enter_reset)
    torch_private.watch_loaders(_refuse_spawned_workers)


# Refused before they start: the refusal of elastic.join() would be on a data worker's stderr, and
# this worker would fail with "DataLoader worker exited unexpectedly", a transient failure.


def _refuse_spawned_workers(loader: DataLoader[Any]) -> None:
    if _runs_the_script(loader) and not _is_guarded(sys._getframe()):
        raise ConfigError(
            "the data workers of this loader are not forked: each would run the script from its "
            "beginning, and call elastic.join() again",
            hint='if __name__ == "__main__":\n    main()    # everything that only the worker does',
        )


def _runs_the_script(loader: DataLoader[Any]) -> bool:
    """Whether the data workers of a loader import the script, as spawned processes do."""
    context: Any = loader.multiprocessing_context
    if context is None:
        # (Named first: the default, which asking for it would fix for the whole process.)
        default = multiprocessing.get_all_start_methods()[0]
        method = multiprocessing.get_start_method(allow_none=True) or default
    else:
        method = context.get_start_method()
    return loader.num_workers > 0 and method != "fork"


def _is_guarded(frame: FrameType | None) -> bool:
    """Whether the statement of the script that runs now is inside an ``if``, as far as its source
    says: ``if __name__ == "__main__"`` keeps it from running in processes that import the script.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    if frame is None:
        return True
    try:
        script = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    line = frame.f_lineno
    return any(
        isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line)
        for node in walk(script)
    )


def _is_read_by_job(frame: FrameType | None) -> bool:
    """Whether a loader of the job requests the batch, maybe through a wrapper."""
    while frame is not None and frame.f_globals.get("__name__") != "elastic.train.loader":
        frame = frame.f_back
    return frame is not None
