"""Loops that count the batches which they request by ``next()``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.run_kit import STEPS_PER_EPOCH, Job, job, process, steps_of_job

from elastic.errors import TrainingError


def by_a_range(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        for _ in range(3):
            script.update(*next(batches))


def by_a_list(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        for _ in ["a", "b", "c"]:
            script.update(*next(batches))


def by_the_length(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        for _ in range(len(script.loader)):
            script.update(*next(batches))


def by_a_variable(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches, done = iter(script.loader), 0
        while done < 3:
            script.update(*next(batches))
            done += 1


def by_a_variable_and_break(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        done = 0
        while True:
            script.update(*next(batches))
            done += 1
            if done == 3:
                break


def by_groups(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        for _ in range(2):
            for _ in range(2):
                script.update(*next(batches))


def by_a_comprehension(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        for x, y in (next(batches) for _ in range(3)):
            script.update(x, y)


def first(loader: Any, number: int) -> Iterator[Any]:
    batches = iter(loader)
    for _ in range(number):
        yield next(batches)


def by_a_generator(script: Job) -> None:
    for _ in script.run.epochs(2):
        for x, y in first(script.loader, 3):
            script.update(x, y)


def one_by_one(loader: Any) -> Iterator[Any]:
    yield from loader


def of_a_generator(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = one_by_one(script.loader)
        for _ in range(3):
            script.update(*next(batches))


def three(script: Job, batches: Iterator[Any]) -> None:
    for _ in range(3):
        script.update(*next(batches))


def of_an_argument(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        three(script, batches)


def of_a_new_argument(script: Job) -> None:
    for _ in script.run.epochs(2):
        three(script, iter(script.loader))


def in_a_function(script: Job) -> None:
    for _ in script.run.epochs(2):
        batches = iter(script.loader)
        for _ in range(3):
            (lambda: script.update(*next(batches)))()


COUNTED = [
    *(by_a_range, by_a_list, by_the_length, by_a_variable, by_a_variable_and_break, by_groups),
    *(by_a_comprehension, by_a_generator, of_a_generator),
    *(of_an_argument, of_a_new_argument, in_a_function),
]


@pytest.mark.parametrize("train", COUNTED)
@pytest.mark.parametrize("in_retry", [True, False])
def test_a_count_of_requests_that_a_resumed_loop_would_repeat_is_refused(
    tmp_path: Path, train: Callable[[Job], None], in_retry: bool
) -> None:
    with process(tmp_path) as run:
        script = job(run)
        with pytest.raises(TrainingError, match=r"begins again, and the job would train too long"):
            if in_retry:
                run.retry(lambda: train(script))
            else:
                train(script)
        assert steps_of_job(run) == 0


def test_a_count_of_all_requests_is_refused_without_epochs() -> None:
    def train(script: Job) -> None:
        batches = iter(script.loader)
        for _ in range(3):
            script.update(*next(batches))

    with process() as run:
        script = job(run)
        with pytest.raises(TrainingError, match=r'run.state.setdefault\("done", 0\) < 3'):
            run.retry(lambda: train(script))


def test_the_line_that_replaces_a_count_is_named() -> None:
    with process() as run:
        script = job(run)
        with pytest.raises(TrainingError, match=r"in itertools.islice\(loader, 3\):"):
            run.retry(lambda: by_a_range(script))


# -- what is exact --------------------------------------------------------------------------------


def to_an_index(script: Job) -> None:
    for _ in script.run.epochs(1):
        batches = iter(script.loader)
        for _ in range(script.loader.index, 4):
            script.update(*next(batches))


def to_the_end(script: Job) -> None:
    for _ in script.run.epochs(1):
        batches = iter(script.loader)
        while (batch := next(batches, None)) is not None:
            script.update(*batch)
            if script.loader.index == 3:
                break


def in_groups_of_all(script: Job) -> None:
    for _ in script.run.epochs(1):
        batches = iter(script.loader)
        while script.run.state.setdefault("groups", 0) < 2:
            for _ in range(2):
                script.update(*next(batches))
            script.run.state["groups"] += 1


def by_the_state(script: Job) -> None:
    batches = iter(script.loader)
    for number in range(script.run.state.setdefault("done", 0), 4):
        script.update(*next(batches))
        script.run.state["done"] = number + 1


def in_turns(script: Job) -> None:
    batches = iter(script.loader)
    while script.run.state.setdefault("done", 0) < 4:
        for _ in range(2):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(script.loader)
                batch = next(batches)
            script.update(*batch)
            script.run.state["done"] += 1


def after_a_look(script: Job) -> None:
    next(iter(script.loader))
    for _ in script.run.epochs(1):
        for x, y in itertools.islice(script.loader, 4):
            script.update(x, y)


@pytest.mark.parametrize(
    "train", [to_an_index, to_the_end, in_groups_of_all, by_the_state, in_turns, after_a_look]
)
def test_a_loop_whose_end_does_not_depend_on_where_it_resumes_is_accepted(
    tmp_path: Path, train: Callable[[Job], None]
) -> None:
    with process(tmp_path) as run:
        script = job(run)
        run.retry(lambda: train(script))
        assert steps_of_job(run) == 4 < STEPS_PER_EPOCH
