"""Ranges that count the epochs of a function that is called again in each world."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest

from elastic.errors import TrainingError
from elastic.train import checks

EPOCHS = 3
passes = 0
has_own_state = False


class Loader:
    """Calls the check when a pass begins, as the loop over steps does."""

    def __iter__(self) -> Iterator[int]:
        global passes
        passes += 1
        checks.refuse_range(passes, has_own_state=has_own_state)
        yield from range(4)


loader = Loader()


def two_loops() -> None:
    for _epoch in range(3):
        for _batch in loader:
            pass


def a_global_variable() -> None:
    for _epoch in range(EPOCHS):
        for _batch in loader:
            pass


def a_local_variable() -> None:
    n = 3
    for _epoch in range(n):
        for _batch in loader:
            pass


def train_one_epoch() -> None:
    for _batch in enumerate(loader):
        pass


def a_function() -> None:
    for _epoch in range(3):
        with contextlib.nullcontext():
            train_one_epoch()


class Trainer:
    """A method, whose source is indented."""

    def fit(self) -> None:
        for _epoch in range(3):
            train_one_epoch()


def tqdm(iterable: Iterable[int], **options: object) -> Iterable[int]:
    return iterable


def with_a_progress_bar() -> None:
    for _epoch in tqdm(range(3), desc="epochs"):
        train_one_epoch()


def with_inner_ways_out() -> None:
    for _epoch in range(3):
        for batch in loader:
            if batch == 1:
                continue
            if batch == 2:
                break


def names_of_phases() -> None:
    for _epoch in ("warm up", "train", "cool down"):
        train_one_epoch()


def numbered_phases() -> None:
    for _epoch in enumerate([1e-2, 1e-3]):
        train_one_epoch()


def a_while_loop() -> None:
    epoch = 0
    while epoch < 3:
        for _batch in loader:
            pass
        epoch += 1


@pytest.fixture(autouse=True)
def is_called_by_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take ``retry`` and the loader of this file for the package's."""
    global passes
    passes = 0
    own = {retry.__code__, begin.__code__, Loader.__iter__.__code__}
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))


def retry(train: Callable[[], object]) -> None:
    train()


@pytest.mark.parametrize(
    ("train", "at"),
    [
        (two_loops, 1),
        (a_global_variable, 1),
        (a_local_variable, 2),
        (a_function, 1),
        (Trainer().fit, 1),
        (with_a_progress_bar, 1),
        (with_inner_ways_out, 1),
        (names_of_phases, 1),
        (numbered_phases, 1),
        (a_while_loop, 1),
    ],
)
def test_a_range_of_epochs_is_refused(train: Callable[[], object], at: int) -> None:
    with pytest.raises(TrainingError, match=r"would count from 0") as refused:
        retry(train)
    assert passes == at
    assert re.match(r"for _?epoch in run\.epochs\(", refused.value.hint)


def begin() -> None:
    """As run.begin does."""
    global passes
    passes += 1
    checks.refuse_range(passes, is_over_loader=False)


def updates_of_a_policy() -> None:
    for _update in range(1, 7):
        for _epoch in range(2):
            begin()


def test_a_range_of_own_steps_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"`for _\w+ in range\(.*\)` around run.begin"):
        retry(updates_of_a_policy)
    assert passes == 1


def counted_from_one() -> None:
    for _epoch in range(1, 4):
        train_one_epoch()


def test_a_range_from_one_is_replaced_by_epochs_from_zero() -> None:
    with pytest.raises(TrainingError, match="would count from 1") as refused:
        retry(counted_from_one)
    assert refused.value.hint == "for _epoch in run.epochs(4 - 1):    # from 0, not 1"


class args:  # as the namespace of argparse
    start_epoch, epochs = 0, 3


def from_a_constant() -> None:
    start = 0
    step = start
    for _i in range(start, 9):
        step += 1
        begin()


def from_an_argument() -> None:
    for _epoch in range(args.start_epoch, args.epochs):
        begin()


def to_an_argument_and_one() -> None:
    for _epoch in range(1, args.epochs + 1):
        begin()


@pytest.mark.parametrize("train", [from_a_constant, from_an_argument, to_an_argument_and_one])
def test_a_range_that_begins_alike_in_each_call_is_refused(train: Callable[[], object]) -> None:
    with pytest.raises(TrainingError, match="and train too long"):
        retry(train)
    assert passes <= 2


def resumed() -> int:
    return 1


def from_a_checkpoint() -> None:
    start = 0
    if args.epochs:
        start = resumed()
    for _epoch in range(start, args.epochs):
        begin()


def from_a_call() -> None:
    start = resumed()
    for _epoch in range(start, args.epochs):
        begin()


@pytest.mark.parametrize("train", [from_a_checkpoint, from_a_call])
def test_a_range_that_may_begin_elsewhere_is_not_refused(train: Callable[[], object]) -> None:
    retry(train)
    assert passes == 2


def updates_counted_elsewhere() -> None:
    while passes < 8:
        for _epoch in range(2):
            begin()


def test_a_range_within_a_while_loop_is_not_refused() -> None:
    retry(updates_counted_elsewhere)


def test_a_range_without_run_retry_is_not_refused() -> None:
    updates_of_a_policy()


def what_remains() -> None:
    for _epoch in range(3 - min(passes, 1)):
        train_one_epoch()


def left_early() -> None:
    for _epoch in range(3):
        for _batch in loader:
            pass
        if passes == 3:
            break


def left_in_an_else() -> None:
    for _epoch in range(3):
        for batch in loader:
            if batch == 3:
                break
        else:
            break


def left_by_return() -> None:
    for _epoch in range(3):
        for batch in loader:
            if batch == 3:
                return


def with_a_start() -> None:
    for _epoch in range(passes, 3):
        for _batch in loader:
            pass


def skips_epochs() -> None:
    for epoch in range(3):
        if epoch < passes:
            continue
        train_one_epoch()


def steps_of_an_epoch() -> None:
    while passes < 2:
        batches = iter(loader)
        for _step in range(4):
            next(batches)


def until_converged() -> None:
    loss = 0
    while loss < 3:
        for _batch in loader:
            pass
        loss = passes


def while_counted_elsewhere() -> None:
    count = passes
    while count < 2:
        train_one_epoch()
        count += 1


def while_left_early() -> None:
    epoch = 0
    while epoch < 3:
        train_one_epoch()
        if passes == 2:
            break
        epoch += 1


def two_loaders() -> None:
    for each in (loader, loader):
        for _batch in each:
            pass


def a_single_epoch() -> None:
    for _epoch in range(1):
        for _batch in loader:
            pass


def a_range_behind_the_loader() -> None:
    for _batch in loader:
        for _ in range(2):
            pass
    for _batch in loader:
        pass


@pytest.mark.parametrize(
    "train",
    [
        what_remains,
        left_early,
        left_in_an_else,
        left_by_return,
        with_a_start,
        skips_epochs,
        steps_of_an_epoch,
        until_converged,
        while_counted_elsewhere,
        while_left_early,
        two_loaders,
        a_single_epoch,
        a_range_behind_the_loader,
    ],
)
def test_nothing_else_is_refused(train: Callable[[], object]) -> None:
    retry(train)


def test_a_count_that_may_depend_on_the_jobs_state_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "has_own_state", True)
    retry(a_local_variable)


class Run:
    def attempts(self) -> Iterator[int]:
        yield 0


def test_a_range_around_attempts_is_not_refused() -> None:
    run = Run()
    for _fold in range(2):
        for _attempt in run.attempts():
            for _batch in loader:
                pass


def test_a_range_within_attempts_is_refused() -> None:
    run = Run()
    with pytest.raises(TrainingError, match="would count from 0"):
        for _attempt in run.attempts():
            for _epoch in range(2):
                train_one_epoch()


def test_a_range_around_run_retry_is_not_refused() -> None:
    for _fold in range(2):
        retry(train_one_epoch)


def test_a_range_in_a_script_that_a_restarted_job_runs_again_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without run.retry."""

    class Resuming(Loader):
        def __iter__(self) -> Iterator[int]:
            checks.refuse_range(1, is_in_retry=False)
            yield from range(4)

    own = Resuming.__iter__.__code__
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code is own or original(code))
    monkeypatch.setattr(sys.modules[__name__], "loader", Resuming())
    with pytest.raises(TrainingError, match=r"a restarted job resumes .* would count from 0"):
        two_loops()


class Passes:
    """A loader's second check, with a frame of this library between it and the script."""

    def __init__(self, *, is_in_retry: bool = False) -> None:
        self.begun, self._is_in_retry = 0, is_in_retry
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        if self.begun > 1:
            checks.refuse_uncounted_passes(is_in_retry=self._is_in_retry)
        yield from range(4)


def two_calls() -> None:
    train_one_epoch()
    train_one_epoch()


def train_nth_epoch(_epoch: int) -> None:
    train_one_epoch()


def mapped() -> None:
    list(map(train_nth_epoch, range(3)))


def listed() -> None:
    [train_one_epoch() for _ in range(3)]  # type: ignore[func-returns-value]


def recursive(left: int = 3) -> None:
    train_one_epoch()
    if left:
        recursive(left - 1)


def until_it_breaks() -> None:
    for epoch in itertools.count():
        if epoch == 3:
            break
        train_one_epoch()


def by_steps() -> None:
    batches = iter(loader)
    for _ in range(12):
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
            next(batches)


def while_a_variable() -> None:
    epoch = 0
    while epoch < 3:
        train_one_epoch()
        epoch += 1


def while_it_improves() -> None:
    while cast(Passes, loader).begun < 3:
        train_one_epoch()


def from_the_epoch_of_the_loader() -> None:
    for _epoch in range(cast(Passes, loader).position, 3):
        train_one_epoch()


def from_a_computed_epoch() -> None:
    first = len(os.listdir("/proc/self/task")) - 1
    for _epoch in range(first, first + 3):
        train_one_epoch()


@pytest.fixture
def passes_over_loader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    own = Passes.__iter__.__code__
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code is own or original(code))

    def use(*, is_in_retry: bool) -> None:
        monkeypatch.setattr(sys.modules[__name__], "loader", Passes(is_in_retry=is_in_retry))

    return use


@pytest.mark.parametrize("is_in_retry", [False, True])
@pytest.mark.parametrize(
    "function",
    [two_calls, mapped, listed, recursive, until_it_breaks, by_steps, while_a_variable],
)
def test_passes_that_nothing_counts_are_refused(
    passes_over_loader: Callable[..., None], function: Callable[[], None], is_in_retry: bool
) -> None:
    """Called again, the script begins with its first pass, and the loader resumes in another."""
    passes_over_loader(is_in_retry=is_in_retry)
    again = "in the next world" if is_in_retry else "a restarted job"
    with pytest.raises(TrainingError, match=f"second pass .*{again}"):
        retry(function) if is_in_retry else function()


@pytest.mark.parametrize(
    "function", [while_it_improves, from_the_epoch_of_the_loader, from_a_computed_epoch]
)
def test_passes_that_may_be_counted_are_not_refused(
    passes_over_loader: Callable[..., None], function: Callable[[], None]
) -> None:
    passes_over_loader(is_in_retry=False)
    function()
    assert cast(Passes, loader).begun == 3


class StateOfRun:
    """``run`` with its state."""

    def __init__(self) -> None:
        self.state: dict[str, int] = {}


StateOfRun.__module__ = "elastic.train.run"
run = StateOfRun()


class First:
    """A loader's check of the first pass outside of run.retry."""

    def __iter__(self) -> Iterator[int]:
        checks.refuse_counts_before_restore()
        yield from range(4)


def while_the_state_counts() -> None:
    while run.state.setdefault("epoch", 0) < 3:
        train_one_epoch()
        run.state["epoch"] += 1


def from_the_state() -> None:
    for _epoch in range(run.state.setdefault("epoch", 0), 3):
        train_one_epoch()


def from_a_variable_of_the_state() -> None:
    first = run.state.setdefault("epoch", 0)
    for _epoch in range(first, 3):
        train_one_epoch()


def with_other_state() -> None:
    run.state.setdefault("best", 0)
    for _epoch in range(3):
        train_one_epoch()
        run.state["best"] += 1


@pytest.fixture
def first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    own = First.__iter__.__code__
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code is own or original(code))
    monkeypatch.setattr(sys.modules[__name__], "loader", First())
    run.state.clear()


@pytest.mark.parametrize(
    "function", [while_the_state_counts, from_the_state, from_a_variable_of_the_state]
)
def test_counts_of_a_state_that_is_restored_later_are_refused(
    first_pass: None, function: Callable[[], None]
) -> None:
    with pytest.raises(TrainingError, match=r"reads the job's state outside of run\.retry"):
        function()


def test_other_uses_of_the_state_are_not_refused(first_pass: None) -> None:
    with_other_state()
