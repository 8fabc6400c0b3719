"""Loops over a loader that are left by a count of their steps, which begins again where a loop
resumes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest

from elastic.errors import TrainingError
from elastic.train import checks


class Loader:
    """Calls the check when a pass begins, as the loop over steps does."""

    index = 0
    is_enumerated = True  # which the package learns from the enumerate

    def __iter__(self) -> Iterator[int]:
        checks.refuse_break(is_enumerated=Loader.is_enumerated)
        yield from range(4)


loader = Loader()
LAST = 2


def by_enumerate() -> None:
    for i, _batch in enumerate(loader):
        if i == LAST:
            break


def by_enumerate_from_one() -> None:
    for i, _batch in enumerate(loader, 1):
        if i >= LAST:
            return


def by_zip() -> None:
    for i, _batch in zip(itertools.count(), loader, strict=False):
        if i == LAST:
            break


def by_a_variable() -> None:
    taken = 0
    for _batch in loader:
        taken += 1  # noqa: SIM113  the case
        if taken == LAST:
            break


def first(n: int, iterable: Iterable[int]) -> Iterator[int]:
    for i, each in enumerate(iterable):
        if i >= n:
            return
        yield each


def in_a_generator() -> None:
    for _batch in first(LAST, loader):
        pass


class accelerator:
    sync_gradients = True


def by_a_variable_of_updates() -> None:
    completed_steps = 0
    for _batch in loader:
        if accelerator.sync_gradients:
            completed_steps += 1
        if completed_steps >= LAST:
            break


def by_a_variable_of_every_second_batch() -> None:
    updates = 0
    for i, _batch in enumerate(loader, start=loader.index):
        if (i + 1) % 2 == 0:
            updates += 1
        if updates == LAST:
            break


def by_enumerate_from_the_index() -> None:
    for i, _batch in enumerate(loader, start=loader.index):
        if i == LAST:
            break


def by_zip_from_the_index() -> None:
    for i, _batch in zip(itertools.count(loader.index), loader, strict=False):
        if i == LAST:
            break


def by_a_variable_from_the_index() -> None:
    taken = loader.index
    for _batch in loader:
        taken += 1
        if taken == LAST:
            break


def by_events() -> None:
    bad = 0
    for batch in loader:
        if batch % 2:
            bad += 1
        if bad == LAST:
            break


def by_the_batch() -> None:
    for _i, batch in enumerate(loader):
        if batch == LAST:
            break


def with_a_log_entry() -> None:
    for i, _batch in enumerate(loader):
        if i == LAST:
            print("a log entry")


@pytest.fixture(autouse=True)
def is_called_by_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take ``retry`` and the loader of this file for the package's."""
    own = {retry.__code__, Loader.__iter__.__code__}
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))


def retry(train: Callable[[], object]) -> None:
    train()


@pytest.mark.parametrize(
    "train",
    [
        by_enumerate,
        by_enumerate_from_one,
        by_zip,
        by_a_variable,
        by_a_variable_of_updates,
        by_a_variable_of_every_second_batch,
        in_a_generator,
    ],
)
def test_a_loop_that_is_left_by_a_count_of_its_steps_is_refused(
    train: Callable[[], object],
) -> None:
    with pytest.raises(TrainingError, match=r"`if .*: (break|return)` counts from the step"):
        retry(train)


@pytest.mark.parametrize(
    "train",
    [
        by_enumerate_from_the_index,
        by_zip_from_the_index,
        by_a_variable_from_the_index,
        by_events,
        by_the_batch,
        with_a_log_entry,
    ],
)
def test_nothing_else_is_refused(
    train: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loader, "is_enumerated", train is not by_enumerate_from_the_index)
    retry(train)


def of_this_process() -> None:
    """Not called again, and perhaps not the number of the job's steps."""
    taken = 0
    for _batch in WithoutRetry():
        taken += 1  # noqa: SIM113  the case
        if taken == LAST:
            break


class WithoutRetry(Loader):
    def __iter__(self) -> Iterator[int]:
        checks.refuse_break(is_in_retry=False)
        yield from range(4)


def test_the_steps_of_a_process_may_be_counted_without_run_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = vars(checks)["is_own"]
    own = WithoutRetry.__iter__.__code__
    monkeypatch.setattr(checks, "is_own", lambda code: code is own or original(code))
    of_this_process()
