"""A second loader read inside the steps of the first, as in scripts with two datasets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.run_kit import Job, dataset, job, process, steps_of_job, undo_step
from torch.utils.data import DataLoader, TensorDataset

from elastic.errors import TrainingError
from elastic.train.loader import ElasticLoader, same_shares
from elastic.train.run import Run
from elastic.train.sampler import ElasticSampler, Position, rank_samples

EPOCHS = 3
STEPS = 6  # of an epoch of the first loader


class Killed(Exception):
    pass


class Fault(Exception):
    pass


@dataclass
class Script:
    """Two loaders and a model, and what each step read from both."""

    run: Run
    first: Job
    second: ElasticLoader
    seen: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    stop_at: set[int] = field(default_factory=set)  # 2 * step: before its update; plus 1: after it
    error: type[Exception] = Fault

    def stop(self, at: int) -> None:
        if at in self.stop_at:
            self.stop_at.remove(at)
            raise self.error

    def train(self, x: torch.Tensor, y: torch.Tensor, *others: tuple[torch.Tensor]) -> None:
        at = self.first.loader.position
        step = steps_of_job(self.run)
        self.stop(2 * step)
        self.first.update(x, y)
        read = [u.tolist() for (u,) in others]
        self.seen[at.epoch, at.step] = [[int(value * 1e6) for value in x[:, 0]], *read]
        self.stop(2 * step + 1)


def zipped(script: Script) -> None:
    for _ in script.run.epochs(EPOCHS):
        for (x, y), u in zip(script.first.loader, script.second, strict=False):
            script.train(x, y, u)


def zipped_and_kept(script: Script) -> None:
    for _ in script.run.epochs(EPOCHS):
        pairs = zip(script.first.loader, script.second, strict=False)  # keeps the last one alive
        for (x, y), u in pairs:
            script.train(x, y, u)


def one_after_the_other(script: Script) -> None:
    others = iter(script.second)
    for _ in script.run.epochs(EPOCHS):
        for x, y in script.first.loader:
            try:
                u = next(others)
            except StopIteration:
                others = iter(script.second)
                u = next(others)
            script.train(x, y, u)


def endless(script: Script) -> None:
    def cycled(loader: ElasticLoader) -> Iterator[Any]:
        while True:
            yield from loader

    others = cycled(script.second)
    for _ in script.run.epochs(EPOCHS):
        for x, y in script.first.loader:
            script.train(x, y, next(others))


def first_of_a_new_epoch(script: Script) -> None:
    for _ in script.run.epochs(EPOCHS):
        for x, y in script.first.loader:
            script.train(x, y, next(iter(script.second)))


def several_in_a_step(script: Script) -> None:
    def cycled() -> Iterator[Any]:
        while True:
            yield from script.second

    others = cycled()
    for _ in script.run.epochs(EPOCHS):
        for x, y in script.first.loader:
            script.train(x, y, next(others), next(others), next(others))


def all_in_each_step(script: Script) -> None:
    for _ in script.run.epochs(EPOCHS):
        for x, y in script.first.loader:
            script.train(x, y, *script.second)


def without_counted_epochs(script: Script) -> None:
    script.run.state.setdefault("pass", 0)  # in a script that counts its passes
    for _ in [None] * EPOCHS:  # a range would be refused
        for (x, y), u in zip(script.first.loader, script.second, strict=False):
            script.train(x, y, u)


# Each style, and the steps of an epoch of its second loader: fewer or more than of the first.
STYLES = pytest.mark.parametrize(
    ("style", "steps"),
    [
        (zipped, 4),
        (zipped, STEPS),
        (zipped, 9),
        (zipped_and_kept, 4),
        (one_after_the_other, 4),
        (endless, 9),
        (first_of_a_new_epoch, 4),
        (several_in_a_step, 9),
        (all_in_each_step, 4),
    ],
)


def script(run: Run, steps: int = STEPS, **options: Any) -> Script:
    first = job(run)
    data = DataLoader(TensorDataset(torch.arange(4 * steps)), batch_size=4, shuffle=True)
    return Script(run, first, run.loader(data, global_batch=4), **options)


@functools.cache
def without_faults(style: Callable[[Script], None], steps: int = STEPS) -> Script:
    """What the style reads without faults: trained once for all tests."""
    with process() as run:
        done = script(run, steps)
        style(done)
        return done


# -- what is read ---------------------------------------------------------------------------------


def test_zip_reads_both_loaders_once_per_epoch() -> None:
    done = without_faults(zipped)
    assert len(done.seen) == EPOCHS * STEPS
    epochs = [
        [index for step in range(STEPS) for index in done.seen[epoch, step][1]]
        for epoch in range(EPOCHS)
    ]
    assert all(sorted(read) == list(range(4 * STEPS)) for read in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("steps", [4, 9])
def test_zip_ends_with_the_shorter_loader_and_restarts_both(steps: int) -> None:
    done = without_faults(zipped, steps)
    length = min(steps, STEPS)
    assert done.seen.keys() == set(itertools.product(range(EPOCHS), range(length)))
    for epoch in range(EPOCHS):
        read = [index for step in range(length) for index in done.seen[epoch, step][1]]
        assert len(set(read)) == len(read) == 4 * length
    assert done.second.position in (Position(EPOCHS, 0), Position(EPOCHS - 1, length))


def test_a_kept_iterator_continues_across_epochs_of_the_first_loader() -> None:
    for style in (one_after_the_other, endless):
        done = without_faults(style, 4)
        read = [index for batches in done.seen.values() for index in batches[1]]
        assert len(done.seen) == EPOCHS * STEPS
        for begin in range(0, len(read) - 15, 16):
            assert sorted(read[begin : begin + 16]) == list(range(16))


def test_a_new_iterator_in_each_step_begins_a_new_epoch() -> None:
    done = without_faults(first_of_a_new_epoch)
    assert len({tuple(batches[1]) for batches in done.seen.values()}) > EPOCHS * STEPS // 2


# -- after a fault, and after a restart -----------------------------------------------------------


@STYLES
def test_a_repeated_step_reads_the_same_from_both_loaders(
    style: Callable[[Script], None], steps: int, tmp_path: Path
) -> None:
    expected = without_faults(style, steps).seen
    # Before the weights change, because no update is masked in this test. First at every step,
    # then at every fifth.
    count = len(expected)
    faults = {*range(0, count, 2), *range(count // 2 * 2, 2 * count, 10)}
    with process(tmp_path, every_steps=1000) as run:
        done = script(run, steps, stop_at=faults)
        while done.stop_at:
            try:
                style(done)
            except Fault as fault:
                undo_step(run)
                held = fault  # keeps the frames of this attempt alive during the next
        style(done)
        del held
    assert done.seen == expected


@pytest.mark.parametrize(
    ("style", "steps"),
    [(zipped, 4), (zipped, 9), (one_after_the_other, 4), (endless, 9), (all_in_each_step, 4)],
)
def test_a_killed_job_reads_the_same_from_both_loaders(
    style: Callable[[Script], None], steps: int, tmp_path: Path
) -> None:
    expected = without_faults(style, steps).seen
    seen: dict[tuple[int, int], list[list[int]]] = {}
    for kill_at in (5, 13):  # the latter where an epoch has just begun
        if kill_at >= 2 * len(expected):
            break
        with process(tmp_path, every_steps=1, clean=False) as run:
            done = script(run, steps, stop_at={kill_at}, error=Killed)
            with pytest.raises(Killed):
                style(done)
        assert done.seen.items() <= expected.items()
        seen |= done.seen
    with process(tmp_path) as run:
        done = script(run, steps)
        style(done)
    assert seen | done.seen == expected


def test_a_fault_between_epochs_does_not_advance_the_second_loader(tmp_path: Path) -> None:
    """The fault is in code after the loop: the code is repeated, and the loop is not."""

    def train(done: Script, faults: list[int]) -> None:
        for epoch in done.run.epochs(EPOCHS):
            for (x, y), u in zip(done.first.loader, done.second, strict=False):
                done.train(x, y, u)
            if epoch in faults:
                faults.remove(epoch)
                raise Fault

    for steps in (4, STEPS, 9):
        with process(tmp_path / str(steps), every_steps=1) as run:
            done = script(run, steps)
            faults = [0, 1, 2]
            while faults:
                with pytest.raises(Fault):
                    train(done, faults)
                undo_step(run)
            train(done, faults)
        assert done.seen == without_faults(zipped, steps).seen


def test_without_counted_epochs_both_loaders_continue(tmp_path: Path) -> None:
    expected = without_faults(without_counted_epochs).seen
    with process(tmp_path, every_steps=1, clean=False) as run:
        before = script(run, stop_at={17}, error=Killed)
        with pytest.raises(Killed):
            without_counted_epochs(before)
    with process(tmp_path) as run:
        after = script(run)
        without_counted_epochs(after)
    both = {**before.seen, **after.seen}
    assert {at: both[at] for at in expected} == expected


def test_a_complete_job_can_continue_with_more_epochs(tmp_path: Path) -> None:
    def train(done: Script, epochs: int) -> None:
        for _ in done.run.epochs(epochs):
            for (x, y), u in zip(done.first.loader, done.second, strict=False):
                done.train(x, y, u)

    for steps in (4, 9):
        seen: dict[tuple[int, int], list[list[int]]] = {}
        for epochs in (1, EPOCHS):
            with process(tmp_path / str(steps)) as run:
                done = script(run, steps)
                train(done, epochs)
                seen |= done.seen
        assert seen == without_faults(zipped, steps).seen


def test_the_second_loader_may_use_data_workers(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        done = script(run)
        given = DataLoader(
            TensorDataset(torch.arange(4 * STEPS)), batch_size=4, shuffle=True, num_workers=1
        )
        done.second = run.loader(given, global_batch=4)
        zipped(done)
    assert done.seen == without_faults(zipped).seen


def test_three_loaders_can_be_read_together() -> None:
    with process() as run:
        done = script(run)
        third = run.loader(DataLoader(TensorDataset(torch.arange(24)), batch_size=4))
        for x, y in done.first.loader:
            done.train(x, y, *next(zip(done.second, third, strict=True)))
        assert third.position == Position(STEPS, 0)
    with process() as run:
        done = script(run)
        third = run.loader(DataLoader(TensorDataset(torch.arange(24)), batch_size=4))
        for (x, y), u, v in zip(done.first.loader, done.second, third, strict=True):
            done.train(x, y, u, v)
        assert [batches[2] for batches in done.seen.values()] == [
            list(range(at, at + 4)) for at in range(0, 24, 4)
        ]


# -- when it commits ------------------------------------------------------------------------------


def test_the_second_loader_advances_when_the_step_commits() -> None:
    with process() as run:
        done = script(run)
        pairs = zip(done.first.loader, done.second, strict=False)
        (x, y), u = next(pairs)
        done.train(x, y, u)
        assert done.second.position == Position(0, 0)
        assert steps_of_job(run) == 0
        (x, y), v = next(pairs)
        assert done.second.position == done.first.loader.position == Position(0, 1)
        assert not torch.equal(u[0], v[0])


def test_an_uncommitted_step_does_not_advance_the_second_loader() -> None:
    with process() as run:
        done = script(run)
        run.state["pass"] = 0  # in a script that counts its passes
        others = iter(done.second)
        read = []
        for _ in done.first.loader:
            read.append(next(others)[0].tolist())
            break  # no optimizer has stepped
        for x, y in done.first.loader:
            read.append(next(others)[0].tolist())
            done.first.update(x, y)
            break
        assert read[0] == read[1]


def test_checkpoints_contain_both_positions(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:
        done = script(run, stop_at={15}, error=Killed)
        with pytest.raises(Killed):
            zipped(done)
    with process(tmp_path) as run:
        done = script(run)
        next(run.epochs(EPOCHS))
        assert done.first.loader.position == done.second.position == Position(1, 0)
        assert done.second.state_dict()["follows"] and not done.first.loader.state_dict()["follows"]


# -- rejected -------------------------------------------------------------------------------------


def test_shares_of_both_loaders_must_match_on_all_ranks() -> None:
    def shares(samples: int, step: int, world: int, **options: Any) -> tuple[int, ...]:
        sampler = ElasticSampler(range(100), 1, 0, global_batch=samples, **options)  # type: ignore[arg-type]
        return rank_samples(sampler, Position(0, step), world)

    assert same_shares(shares(8, 0, 3), shares(8, 1, 3))
    assert same_shares(shares(12, 0, 4), shares(8, 0, 4))
    assert not same_shares(shares(12, 0, 3), shares(8, 0, 3))
    assert not same_shares(shares(8, 0, 2), shares(5, 0, 2))
    assert same_shares(shares(8, 0, 1), shares(5, 0, 1))
    assert shares(11, 9, 2) == (1, 0)  # the last step
    assert not same_shares(shares(7, 0, 3, shards=4), shares(7, 0, 3))


def test_batches_with_different_weights_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.train.loop.same_shares", lambda *given: False)
    with process() as run, pytest.raises(TrainingError, match=r"10 samples .* 4 of the sec") as no:
        zipped(script(run))
    assert "drop_last=True" in no.value.hint and "global_batch=…" in no.value.hint


def test_micro_batches_of_two_loaders_are_rejected() -> None:
    with process() as run:
        done = script(run)
        cut = run.loader(DataLoader(dataset(), batch_size=10), micro_batch=3)
        others = iter(done.second)
        with pytest.raises(TrainingError, match="step 0 is divided into micro-batches: 4 of") as no:
            for step in run.steps(cut):
                for _ in step:
                    next(others)
        assert "StackDataset" in no.value.hint


def test_a_following_loader_cannot_be_read_outside_of_steps() -> None:
    with process() as run:
        done = script(run)
        others = iter(done.second)
        for x, y in done.first.loader:
            done.train(x, y, next(others))
            break
        with pytest.raises(TrainingError, match="outside of a step") as no:
            next(others)
        assert "run.shard(loader)" in no.value.hint
        with pytest.raises(TrainingError, match="outside of a step"):
            next(iter(done.second))


def test_a_loader_with_its_own_steps_cannot_follow() -> None:
    with process() as run:
        done = script(run)
        other = run.loader(DataLoader(dataset(), batch_size=10))
        for x, y in other:
            done.first.update(x, y)
        with pytest.raises(TrainingError, match="has defined steps") as no:
            for _ in done.first.loader:
                next(iter(other))
        assert "run.loader(DataLoader(…))" in no.value.hint


def test_reading_a_batch_before_training_has_no_effect() -> None:
    with process() as run:
        done = script(run)
        next(iter(done.second))
        next(iter(done.first.loader))
        zipped(done)
    assert done.seen == without_faults(zipped).seen


def test_an_older_iterator_over_the_second_loader_is_rejected() -> None:
    with process() as run:
        done = script(run)
        old = iter(done.second)
        with pytest.raises(TrainingError, match="after a newer loop has begun"):
            for _ in done.first.loader:
                next(old)
                next(iter(done.second))
                next(old)


def test_two_loops_over_one_loader_are_rejected() -> None:
    with process() as run:
        done = script(run)
        with pytest.raises(TrainingError, match="while step 0 is not committed"):
            for _ in done.first.loader:
                next(iter(done.first.loader))


def test_itertools_cycle_is_rejected_with_an_alternative() -> None:
    with process() as run:
        done = script(run)
        others = itertools.cycle(done.second)
        with pytest.raises(TrainingError, match=r"itertools.cycle\(loader\)") as no:
            for _ in done.first.loader:
                next(others)
        assert "yield from loader" in no.value.hint
    with process() as run:
        done = script(run)
        with pytest.raises(TrainingError, match=r"itertools.cycle\(loader\)"):
            next(itertools.cycle(done.first.loader))


PLAIN = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=2)
BESIDE: dict[str, Callable[[Script], Iterator[Any]]] = {
    "an iterator": lambda _: iter(PLAIN),
    "cycle": lambda _: itertools.cycle(PLAIN),
    "a shard": lambda it: iter(it.run.shard(PLAIN)),
}


def train_beside(script: Script, beside: str) -> None:
    others = BESIDE[beside](script)
    for batch in script.first.loader:
        script.train(*batch, next(others))


@pytest.mark.parametrize("beside", BESIDE)
def test_a_loader_that_is_not_part_of_the_job_is_not_read_across_steps(
    beside: str, tmp_path: Path
) -> None:
    with process(tmp_path) as run:
        with pytest.raises(TrainingError, match="is read in step 0 and in step 1") as no:
            train_beside(script(run), beside)
        assert "run.loader(DataLoader(…))" in no.value.hint
    with process() as run:
        train_beside(script(run), beside)  # without checkpoints, no loop resumes


def test_a_loader_that_is_not_part_of_the_job_may_be_read_within_a_step(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        done = script(run)
        for x, y in done.first.loader:
            done.train(x, y, *PLAIN)
    with process(tmp_path / "other") as run:
        run.untracked("DataLoader")
        train_beside(script(run), "an iterator")
