"""Loops that count their own steps (``max_steps``, ``enumerate``, bars), and other loaders."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import (
    Job,
    dataset,
    job,
    network,
    parts_of,
    process,
    steps_of_job,
    undo_step,
)
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, WeightedRandomSampler

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.train import reading
from elastic.train.run import Run
from elastic.train.sampler import Position

STEPS = 6
TWICE = (0, 1)  # as a function that is called again


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    # caplog's handler is the root logger's. The first use in a process sets it to False.
    monkeypatch.setattr(get_logger(), "propagate", True)


def stopped(folder: Path, steps: int) -> None:
    """A process that is killed within a step, after ``steps`` committed and saved steps."""
    with process(folder, every_steps=1, clean=False) as run:
        script = job(run)
        run.untracked("done")
        done = 0
        for _ in run.epochs(3):
            for x, y in script.loader:
                if done == steps:
                    return
                script.update(x, y)
                done += 1


# -- max_steps ------------------------------------------------------------------------------------


def limited(run: Run, max_steps: int | None = 4) -> Job:
    script = job(run)
    data = DataLoader(dataset(), batch_size=10, shuffle=True)
    return Job(
        run, script.model, script.optimizer, run.loader(data, global_batch=10, max_steps=max_steps)
    )


def test_an_epoch_ends_at_max_steps_also_after_a_kill(tmp_path: Path) -> None:
    with process() as run:
        script = limited(run)
        assert (script.train(3), len(script.loader)) == (12, 4)
        expected = script.weights()
    for stop_after in (3, 2, 6):
        with process(tmp_path, every_steps=1, clean=False) as run:
            limited(run).train(3, stop_after)
    with process(tmp_path) as run:
        script = limited(run)
        assert script.train(3) == 12 - (2 + 1 + 5)
        assert torch.equal(script.weights(), expected)


def test_max_steps_are_the_first_steps_of_the_full_epoch() -> None:
    """As with ``islice``, which it replaces."""

    def weights(max_steps: int | None) -> torch.Tensor:
        with process() as run:
            script = limited(run, max_steps)
            for _ in run.epochs(2):
                for x, y in itertools.islice(script.loader, 4):
                    script.update(x, y)
            return script.weights()

    assert torch.equal(weights(4), weights(None))


def by_islice(loader: Any) -> Iterator[Any]:
    return itertools.islice(loader, 4)


def by_zip(loader: Any) -> Iterator[Any]:
    return (batch for _, batch in zip(range(4), loader, strict=False))


def by_zip_behind(loader: Any) -> Iterator[Any]:
    return (batch for batch, _ in zip(loader, range(4), strict=False))


@pytest.mark.parametrize("limited_by", [by_islice, by_zip, by_zip_behind])
def test_a_number_of_batches_that_a_resumed_loop_would_count_again_is_refused(
    tmp_path: Path, limited_by: Callable[[Any], Iterator[Any]]
) -> None:
    with process(tmp_path) as run:
        script = job(run)
        with pytest.raises(TrainingError, match=r"max_steps=n\)") as refused:
            for x, y in limited_by(script.loader):
                script.update(x, y)
    assert "would have more than n steps" in str(refused.value)


def by_enumerate(loader: Any) -> Iterator[Any]:
    return (batch for _, batch in itertools.islice(enumerate(loader), 4))


def by_progress_bar(loader: Any) -> Iterator[Any]:
    return itertools.islice(bar(loader), 4)


def by_tee(loader: Any) -> Iterator[Any]:
    return itertools.islice(itertools.tee(loader, 1)[0], 4)


LIMITS = [by_islice, by_zip, by_zip_behind, by_enumerate, by_progress_bar, by_tee]
knows_the_length = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="islice does not tell its length: it is refused"
)


@knows_the_length
@pytest.mark.parametrize("limited_by", LIMITS)
@pytest.mark.parametrize(
    "killed_after",
    [(3, 1), *(pytest.param(steps, marks=pytest.mark.slow) for steps in ((4,), (5, 6)))],
)
def test_an_epoch_limited_by_its_reader_ends_at_the_same_step_after_a_kill(
    tmp_path: Path, limited_by: Callable[[Any], Iterator[Any]], killed_after: tuple[int, ...]
) -> None:
    def train(folder: Path | None, stop_after: int | None) -> tuple[int, torch.Tensor]:
        steps = 0
        with process(folder, every_steps=1, clean=stop_after is None) as run:
            run.untracked("steps")
            script = job(run)
            for _ in run.epochs(3):
                for x, y in limited_by(script.loader):
                    script.update(x, y)
                    steps += 1
                    if steps == stop_after:
                        return steps, script.weights()
            return steps_of_job(run), script.weights()

    expected = train(None, None)
    assert expected[0] == 12
    for stop_after in killed_after:
        train(tmp_path, stop_after)
    steps, weights = train(tmp_path, None)
    assert steps == 12 and torch.equal(weights, expected[1])


@knows_the_length
def test_a_script_that_subtracts_the_batches_it_has_had_gets_the_rest(tmp_path: Path) -> None:
    """Its own count, in run.state: the loader must not subtract them again."""

    def train(stop_after: int | None) -> int:
        steps = 0
        with process(tmp_path, every_steps=1, clean=stop_after is None) as run:
            run.untracked("steps")
            script = job(run)
            for _ in run.epochs(2):
                for x, y in itertools.islice(script.loader, 4 - run.state.get("done", 0)):
                    script.update(x, y)
                    run.state["done"] = (run.state.get("done", 0) + 1) % 4
                    steps += 1
                    if steps == stop_after:
                        return steps
            return steps_of_job(run)

    train(3)
    assert train(None) == 8


def test_an_interrupted_epoch_with_another_limit_is_refused(tmp_path: Path) -> None:
    def train(limit: int) -> None:
        with process(tmp_path, every_steps=1, clean=False) as run:
            script = job(run)
            for _ in run.epochs(1):
                for i, (x, y) in zip(range(limit), script.loader, strict=False):
                    script.update(x, y)
                    if i == 2:
                        return

    train(4)
    with pytest.raises(TrainingError, match="counts from the step at which a loop resumes"):
        train(3)


@knows_the_length
def test_a_second_limited_loop_over_an_epoch_is_refused(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        with pytest.raises(TrainingError, match="max_steps=n"):
            for _ in run.epochs(1):
                for _ in range(2):
                    for x, y in itertools.islice(script.loader, 2):
                        script.update(x, y)


def test_a_number_of_batches_from_the_index_on_is_accepted(tmp_path: Path) -> None:
    stopped(tmp_path, 2)
    with process(tmp_path) as run:
        script = job(run)
        steps = 0
        for _ in run.epochs(1):
            for x, y in itertools.islice(script.loader, 4 - script.loader.index):
                script.update(x, y)
                steps += 1
            for (x, y), _ in zip(script.loader, range(100), strict=False):  # counts, and no more
                script.update(x, y)
                steps += 1
    assert steps == STEPS - 2


def from_the_index(script: Job) -> None:
    batches = iter(script.loader)
    for _ in range(script.loader.index, min(script.loader.index + 3, STEPS)):
        script.update(*next(batches))


def from_a_variable(script: Job) -> None:
    first, batches = script.loader.index, iter(script.loader)
    end = first + 3
    for _ in range(first, end):
        script.update(*next(batches))


def to_an_index(script: Job) -> None:
    batches = iter(script.loader)
    for i in range(script.loader.index, min(3, STEPS)):
        script.update(*next(batches))
        script.run.log(logged_as=i + 1)


def by_the_state(script: Job) -> None:
    first, batches = script.loader.index, iter(script.loader)
    for _ in range(first, first + script.run.state.setdefault("left", 3)):
        script.update(*next(batches))
        script.run.state["left"] -= 1


@pytest.mark.parametrize("train", [from_the_index, from_a_variable])
def test_a_range_that_counts_from_the_index_is_refused(train: Callable[[Job], None]) -> None:
    with process() as run:
        script = job(run)
        with pytest.raises(TrainingError, match=r"range\(loader.index, min\(n, len\(loader"):
            run.retry(lambda: train(script))
        assert steps_of_job(run) == 0


@pytest.mark.parametrize("train", [to_an_index, by_the_state])
def test_a_range_to_an_index_is_accepted(train: Callable[[Job], None]) -> None:
    with process() as run:
        script = job(run)
        run.retry(lambda: train(script))
        assert steps_of_job(run) == 3


def changed(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        yield x + 0.0, y


def taken_while(loader: Any) -> Iterator[Any]:
    count = itertools.count()
    return itertools.takewhile(lambda _: next(count) < 4, loader)


def taken_while_a_variable_is_small(loader: Any) -> Iterator[Any]:
    done = 0

    def is_wanted(_: Any) -> bool:
        nonlocal done
        done += 1
        return done <= 4

    return itertools.takewhile(is_wanted, loader)


def compressed(loader: Any) -> Iterator[Any]:
    return itertools.compress(loader, [True] * 4)


def beside_a_list(loader: Any) -> Iterator[Any]:
    return (batch for batch, _ in zip(loader, [0.1, 0.2, 0.3, 0.4], strict=False))


def slice_of_a_generator(loader: Any) -> Iterator[Any]:
    return itertools.islice(changed(loader), 4)


def slice_of_an_expression(loader: Any) -> Iterator[Any]:
    return itertools.islice(((x, y) for x, y in loader), 4)


def zip_with_a_generator(loader: Any) -> Iterator[Any]:
    return (batch for _, batch in zip(range(4), changed(loader), strict=False))


def some(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        if len(x) < 5:
            continue
        yield x, y


def break_in_front_of_a_generator(loader: Any) -> Iterator[Any]:
    for i, batch in enumerate(some(loader)):
        if i == 4:
            break
        yield batch


@pytest.mark.parametrize(
    "limited_by",
    [
        *(taken_while, taken_while_a_variable_is_small, compressed, beside_a_list),
        *(slice_of_a_generator, slice_of_an_expression, zip_with_a_generator),
        break_in_front_of_a_generator,
    ],
)
def test_a_reader_that_would_begin_again_is_refused(
    limited_by: Callable[[Any], Iterator[Any]],
) -> None:
    with process() as run:
        script = job(run)

        def train() -> None:
            for _ in run.epochs(2):
                for x, y in limited_by(script.loader):
                    script.update(x, y)

        with pytest.raises(TrainingError, match=r"begins again|counts from the step at which"):
            run.retry(train)
        assert steps_of_job(run) == 0


def test_readers_that_choose_by_the_batch_are_accepted() -> None:
    with process() as run:
        script = job(run)

        def train() -> None:
            for _ in run.epochs(1):
                known = itertools.takewhile(lambda batch: batch is not None, script.loader)
                for x, y in known:
                    script.update(x, y)
            for _ in run.epochs(2):
                for x, y in changed(filter(None, script.loader)):
                    script.update(x, y)

        run.retry(train)
        assert steps_of_job(run) == 2 * STEPS


@pytest.mark.parametrize("start", [0, 1])
def test_a_break_by_a_count_ends_a_resumed_pass_at_the_same_step(
    tmp_path: Path, start: int
) -> None:
    stopped(tmp_path, 2)
    with process(tmp_path) as run:
        script, seen = job(run), []
        for i, (x, y) in enumerate(script.loader, start):
            seen.append(script.loader.index)
            if i >= 4 + start:
                break
            script.update(x, y)
            run.state["passes"] = 1
    assert seen == [2, 3, 4]


# -- the index ------------------------------------------------------------------------------------


def test_the_index_in_a_loop_that_is_left_in_its_first_step_is_that_of_the_step() -> None:
    with process() as run:
        script, seen = job(run), []
        for _ in range(3):
            for i, (x, y) in enumerate(script.loader, start=script.loader.index):
                script.update(x, y)
                seen.append((i, script.loader.index))
                break
        assert seen == [(0, 0), (1, 1), (2, 2)]


def test_the_index_in_a_step_does_not_count_the_batches_of_a_slice(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script, seen = job(run), []
        for _ in run.epochs(2):
            for x, y in itertools.islice(script.loader, 3):
                seen.append(script.loader.index)
                script.update(x, y)
                seen.append(script.loader.index)
                run.commit()
        assert seen == [0, 0, 1, 1, 2, 2] * 2


def test_the_index_is_the_number_of_the_step() -> None:
    with process() as run:
        script = job(run)
        assert script.loader.index == 0
        for _ in run.epochs(2):
            assert script.loader.index == 0
            for i, (x, y) in enumerate(script.loader, start=script.loader.index):
                assert script.loader.index == i
                script.update(x, y)
            assert (i, script.loader.index) == (STEPS - 1, STEPS)
        assert script.loader.index == 0


def test_without_counted_epochs_the_next_pass_begins_at_0() -> None:
    with process() as run:
        script = job(run)
        for _ in range(2):
            assert script.loader.index == 0
            for i, (x, y) in enumerate(script.loader, start=script.loader.index):
                assert script.loader.index == i
                script.update(x, y)
                if i == 3:
                    break
            assert script.loader.index == 4
            for i, (x, y) in enumerate(script.loader, start=script.loader.index):
                assert script.loader.index == i
                script.update(x, y)
            assert i == STEPS - 1


LAST = 2  # the step in which the next loops are left


def left_by_break(script: Job) -> None:
    for i, (x, y) in enumerate(script.loader, start=script.loader.index):
        script.update(x, y)
        if i == LAST:
            break


@pytest.mark.parametrize("in_retry", [True, False])
def test_a_step_in_which_a_loop_is_left_ends_with_the_code_after_it(in_retry: bool) -> None:
    """Also with run.commit(): a fault in that code would resume the loop. Without a launcher, as
    in the next world."""
    called = []
    with process() as run:
        script = job(run)
        run.after_step(lambda step: called.append(step.number))

        def train() -> None:
            run.state["passes"] = 0
            left_by_break(script)
            run.commit()
            assert (steps_of_job(run), called) == (LAST, [0, 1])
            for _ in script.loader:
                assert called == [0, 1, 2]
                break

        run.retry(train) if in_retry else train()


def test_the_index_counts_a_left_step_that_has_only_gradients() -> None:
    """Of an accumulation: the step is committed when the next pass begins, which counts from it."""
    with process() as run:
        script = job(run)
        for i, (x, y) in enumerate(script.loader, start=script.loader.index):
            F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
            if i == LAST:
                break
        assert script.loader.index == LAST + 1


def test_the_last_step_is_committed_once_the_function_has_returned_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that fails before lets it be repeated, with the code after its loop."""
    asked: list[int] = []
    with process() as run:
        script = job(run)

        def function_returned(*, can_undo: bool) -> bool:
            asked.append(steps_of_job(run))
            return True

        strategy = parts_of(run).session.strategy
        monkeypatch.setattr(strategy, "function_returned", function_returned)
        run.retry(lambda: left_by_break(script))
        assert asked == [LAST]
        assert steps_of_job(run) == LAST + 1


def test_a_commit_after_next_at_the_end_of_a_pass_is_one_after_a_loop_that_was_left() -> None:
    """The code between them may count epochs: a fault must not run it with the end of this pass as
    the next one."""
    with process() as run:
        script = job(run)

        def train() -> None:
            for _ in range(2):
                batches = iter(script.loader)
                for _ in range(script.loader.index, STEPS):
                    script.update(*next(batches))
                run.commit()
                assert steps_of_job(run) % STEPS == STEPS - 1
                assert script.loader.index == 0

        run.retry(train)
        assert steps_of_job(run) == 2 * STEPS


def break_after_commit(script: Job) -> None:
    for i, (x, y) in enumerate(script.loader, start=script.loader.index):
        script.update(x, y)
        script.run.commit()
        if i == LAST:
            break


def commit_in_a_function(script: Job) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        script.update(x, y)
        script.run.commit()

    for i, (x, y) in enumerate(script.loader, start=script.loader.index):
        step(x, y)
        if i == LAST:
            return


def commit_after_next(script: Job) -> None:
    batches = iter(script.loader)
    for i in range(script.loader.index, STEPS):
        script.update(*next(batches))
        if i == LAST:
            break
    script.run.commit()


def pass_after_a_shorter_one(script: Job) -> None:
    for end in LAST, 2 * LAST:
        first, batches = script.loader.index, iter(script.loader)
        for _ in range(first, end):
            script.update(*next(batches))
            script.run.commit()


@pytest.mark.parametrize(
    ("train", "message", "steps"),
    [
        (break_after_commit, r"`if i == LAST: break` after run\.commit", 0),
        (commit_in_a_function, r"`if i == LAST: return` after run\.commit", 0),
        (commit_after_next, r"ends step 2, but its loop is left there", LAST),
        (pass_after_a_shorter_one, r"ends step 1, but its loop is left there", LAST),
    ],
)
def test_a_commit_after_which_a_fault_would_resume_a_left_loop_is_refused(
    train: Callable[[Job], None], message: str, steps: int
) -> None:
    with process() as run:
        script = job(run)
        with pytest.raises(TrainingError, match=message):
            run.retry(train, script)
        assert steps_of_job(run) == steps


def decided_before_the_update(script: Job) -> None:
    for x, y in script.loader:
        if script.run.state.get("done", 0) == LAST:
            break
        script.update(x, y)
        script.run.state["done"] = script.run.state.get("done", 0) + 1
        script.run.commit()


def counted_in_the_state(script: Job) -> None:
    batches = iter(script.loader)
    while script.run.state.get("done", 0) < LAST:
        script.update(*next(batches))
        script.run.state["done"] = script.run.state.get("done", 0) + 1
        script.run.commit()


def accumulated(script: Job) -> None:
    batches = iter(script.loader)
    while script.run.state.get("done", 0) < LAST:
        for _ in range(2):
            x, y = next(batches)
            F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
        script.optimizer.step()
        script.optimizer.zero_grad()
        script.run.state["done"] = script.run.state.get("done", 0) + 1
        script.run.commit()


@pytest.mark.parametrize("train", [decided_before_the_update, counted_in_the_state, accumulated])
def test_a_commit_before_the_next_decision_to_leave_is_not_refused(
    train: Callable[[Job], None],
) -> None:
    with process() as run:
        script = job(run)
        run.retry(train, script)
        assert run.state["done"] == LAST
        assert steps_of_job(run) == (2 * LAST if train is accumulated else LAST)


def test_an_iterator_that_is_still_held_does_not_shorten_the_next_pass() -> None:
    """Its last step ends with the next pass, which begins at 0."""
    with process() as run:
        script = job(run)
        for number in range(3):
            first = script.loader.index
            batches = iter(script.loader)
            for i in range(first, STEPS):
                script.update(*next(batches))
                assert script.loader.index == i, "a log of the current step"
            assert steps_of_job(run) == (number + 1) * STEPS - 1, "the last one is not committed"


def test_a_step_is_counted_by_the_index_that_is_read_for_a_shorter_pass() -> None:
    with process() as run:
        script = job(run)
        read = []
        for _ in range(4):
            read.append(first := script.loader.index)
            batches = iter(script.loader)
            for _ in range(first, min(first + 4, STEPS)):
                script.update(*next(batches))
    assert read == [0, 4, 0, 4]


def test_the_index_of_a_step_that_has_not_ended_is_refused_for_another_loop() -> None:
    with process() as run:
        script = job(run)
        batches = iter(script.loader)
        for _ in range(STEPS):
            script.update(*next(batches))
        assert script.loader.index == STEPS - 1
        with pytest.raises(TrainingError, match=r"(?s)index 5.*run\.commit\(\)"):
            iter(script.loader)
        run.commit()
        assert script.loader.index == 0
        assert len(list(iter(script.loader))) == STEPS


def test_an_index_that_a_loop_reports_in_its_step_is_not_refused_for_the_next_one() -> None:
    with process() as run:
        script = job(run)
        batches = iter(script.loader)
        for _ in range(script.loader.index, 1):
            script.update(*next(batches))
            assert script.loader.index == 0
        iter(script.loader)


@pytest.mark.parametrize("counted", [True, False])
def test_the_index_of_a_resumed_pass_is_known_before_it_begins(
    tmp_path: Path, counted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path, STEPS + 2)
    with process(tmp_path) as run:
        script = job(run)
        assert script.loader.index == 2  # which restores the position
        epochs = run.epochs(3) if counted else range(script.loader.position.epoch, 3)
        seen = []
        for epoch in epochs:
            for i, (x, y) in enumerate(script.loader, start=script.loader.index):
                seen.append((epoch, i))
                script.update(x, y)
    assert seen == [(1, i) for i in range(2, STEPS)] + [(2, i) for i in range(STEPS)]
    assert "counts from" not in caplog.text


def test_a_completed_pass_has_the_index_of_its_end(tmp_path: Path) -> None:
    """The epoch was interrupted after the loader's last batch, so that its progress bar is full."""
    with process(tmp_path, every_steps=1) as run:
        script = job(run)
        for _ in run.epochs(2):
            for x, y in script.loader:
                script.update(x, y)
            break
        for _ in run.epochs(2):
            assert script.loader.index == STEPS
            assert list(script.loader) == []
            break


def test_the_index_is_correct_after_a_recovery(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        for i, (x, y) in enumerate(script.loader, start=script.loader.index):
            if i == 2:
                break
            script.update(x, y)
        undo_step(run)
        assert script.loader.index == 2


def test_a_loader_without_a_run_has_an_index() -> None:
    from elastic.train.loader import ElasticLoader

    one = ElasticLoader(DataLoader(dataset(), batch_size=10))
    for i, _ in enumerate(one):
        assert one.index == i
    assert one.index == 0


# -- enumerate ------------------------------------------------------------------------------------


def bar(loader: Any) -> Iterator[Any]:
    """A progress bar as its iterable sees it: a generator of the module ``tqdm.std``."""
    module = types.ModuleType("tqdm.std")
    exec("def over(loader):\n    for batch in loader:\n        yield batch", vars(module))
    return module.over(loader)  # type: ignore[no-any-return]


def doubled(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        yield x * 2, y


class Passed:
    """Passes batches on from its own generator, as a prefetcher does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Next:
    """The same, by ``__next__``."""

    def __init__(self, loader: Any) -> None:
        self.batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        x, y = next(self.batches)
        return x * 2, y


class Pairs(Next):
    def __next__(self) -> Any:
        return next(self.batches), next(self.batches)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("wrap", [iter, bar, zip, doubled, Passed, Next])
def test_enumerate_continues_in_a_restarted_job(tmp_path: Path, wrap: Any, start: int) -> None:
    stopped(tmp_path, 2)
    with process(tmp_path) as run:
        script = job(run)
        counts = []
        for i, _batch in enumerate(wrap(script.loader), start):
            counts.append((i - start, script.loader.index))
            run.state["passes"] = 1
        assert counts[0] == (2, 2) and all(count == index for count, index in counts)
        gc.collect()
        assert next(enumerate(script.loader))[0] == 0, "of the next epoch"


def pairs(loader: Any) -> Iterator[Any]:
    pair = []
    for batch in loader:
        pair.append(batch)
        if len(pair) == 2:
            yield pair
            pair = []


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@pytest.mark.parametrize("wrap", [pairs, endless, some, Pairs, lambda loader: filter(None, loader)])
def test_other_items_than_batches_are_not_numbered_as_batches(
    tmp_path: Path, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where such a count trains, it is refused in the first step of the job."""
    stopped(tmp_path, 2)
    with process(tmp_path) as run:
        script = job(run)
        run.state["passes"] = 1
        count, _ = next(enumerate(wrap(script.loader)))
        assert count == 0 and not script.loader.counts_continue
    assert "resumes at step 2 of its epoch, but its enumerate" in caplog.text


def test_enumerate_continues_after_a_recovery(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        run.state["passes"] = 0
        counts = []
        for attempt in TWICE:
            for i, (x, y) in enumerate(script.loader):
                counts.append((i, script.loader.index))
                if attempt == 0 and script.loader.index == 2:
                    break
                script.update(x, y)
            if attempt == 0:
                undo_step(run)
                script.loader.resume()  # as run.retry does
                gc.collect()
    assert counts[3] == (2, 2) and all(count == index for count, index in counts)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_script_may_continue_its_count_itself(tmp_path: Path, offset: int) -> None:
    stopped(tmp_path, 2)
    with process(tmp_path) as run:
        script = job(run)
        run.state["passes"] = 1
        for i, _batch in enumerate(script.loader, start=script.loader.index + offset):
            assert i == script.loader.index + offset


def test_a_count_continues_if_the_script_only_reads_the_index(tmp_path: Path) -> None:
    stopped(tmp_path, 2)
    with process(tmp_path) as run:
        script = job(run)
        run.state["passes"] = script.loader.index
        for i, _batch in enumerate(script.loader):
            assert i == script.loader.index


def test_an_interpreter_that_keeps_its_counts_elsewhere_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_COUNT", 0)  # the reference count
    stopped(tmp_path, 2)
    with process(tmp_path) as run:
        script = job(run)
        run.state["passes"] = 1
        with pytest.raises(TrainingError, match="counts from 0, which cannot be changed in Python"):
            next(enumerate(script.loader))


def test_an_iterator_is_released_when_the_loop_drops_it() -> None:
    with process() as run:
        script = job(run)
        passed = iter(script.loader)
        next(passed)
        assert sys.getrefcount(passed) == 2
        released = weakref.ref(passed)
        del passed
        assert released() is None


# -- samplers in a job ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(range(3, 40)), WeightedRandomSampler(range(1, 53), 37)]
)
def test_a_killed_job_with_a_sampler_resumes_exactly(tmp_path: Path, sampler: Any) -> None:
    def script_of(run: Run) -> Job:
        given = job(run)
        data = DataLoader(dataset(), batch_size=10, sampler=sampler)
        return Job(run, given.model, given.optimizer, run.loader(data, global_batch=10))

    with process() as run:
        script = script_of(run)
        assert script.train(3) == 12
        expected = script.weights()
    for stop_after in (3, 4):
        with process(tmp_path, every_steps=1, clean=False) as run:
            script_of(run).train(3, stop_after)
    with process(tmp_path) as run:
        script = script_of(run)
        assert script.train(3) == 12 - (2 + 3)
        assert torch.equal(script.weights(), expected)


# -- items that are batches -----------------------------------------------------------------------


class Batches(Dataset[Any]):
    """A dataset whose items are batches."""

    def __init__(self) -> None:
        self.x, self.y = dataset().tensors

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return self.x[5 * index : 5 * index + 5], self.y[5 * index : 5 * index + 5]


def test_items_that_are_batches_in_the_plain_loop_of_one_rank() -> None:
    with process() as run:
        script = job(run)
        loader = run.loader(DataLoader(Batches(), batch_size=None, shuffle=True))
        for x, y in loader:
            assert x.shape == (5, 4)
            script.update(x, y)
        assert loader.position == Position(0, 9)


def test_items_that_are_batches_are_weighted_in_run_steps() -> None:
    """Like one batch of all their samples."""
    with process() as run:
        model = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        loader = run.loader(DataLoader(Batches(), batch_size=None), global_batch=3)
        with pytest.raises(TrainingError, match="3 batches of the dataset") as no:
            next(iter(loader))
        assert "for step in run.steps(loader):" in no.value.hint
        for step in run.steps(loader):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.mse_loss(model(x), y))
            optimizer.step()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = dataset().tensors
    for at in range(0, 45, 15):
        optimizer.zero_grad()
        F.mse_loss(plain(x[at : at + 15]), y[at : at + 15]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    assert torch.allclose(weights, expected, rtol=0, atol=1e-12)


def test_numbers_drawn_after_a_break_do_not_depend_on_those_of_its_step() -> None:
    """Ranks may draw different numbers of them in a step."""

    def drawn(extra: int) -> float:
        with process() as run:
            script = job(run)

            def train() -> float:
                for x, y in script.loader:
                    script.update(x, y)
                    torch.rand(extra)
                    break
                return torch.rand(1).item()

            return run.retry(train)

    assert drawn(0) == drawn(3)


def test_a_search_for_readers_disturbs_no_thread_that_builds_a_tuple() -> None:
    """``tuple(…)`` fails if anything else refers to its result before it is complete."""
    is_over, errors = threading.Event(), list[SystemError]()

    def build() -> None:
        while not is_over.is_set():
            try:
                tuple(i for i in range(1000))
            except SystemError as error:
                errors.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    builder = threading.Thread(target=build, name="builder")
    builder.start()
    try:
        own = (i for i in range(9))
        for _ in range(20):
            assert own in reading.objects_of((types.GeneratorType,), (None,))
    finally:
        is_over.set()
        builder.join()
        sys.setswitchinterval(interval_s)
    assert errors == []
