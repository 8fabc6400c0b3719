"""Numbers that follow gradients: exact in any dtype, in any order of ranks."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import job, process

from elastic.errors import ConfigError, TrainingError
from elastic.train.order import Room
from elastic.train.step import OwnBatch, Step, counts_values
from elastic.train.sums import StepSums, Sums

Values = dict[str, object]


def ranks(size: int) -> list[StepSums]:
    sums = [StepSums() for _ in range(size)]
    for rank, each in enumerate(sums):
        each.enter_world(rank, size, can_follow=True, wait=lambda: None)
    return sums


def reduce(sums: Sequence[StepSums], dtype: torch.dtype) -> None:
    """What a reduction does with the rooms of all ranks."""
    rooms = [torch.full((each.room(dtype),), math.nan, dtype=dtype) for each in sums]
    for each, room in zip(sums, rooms, strict=True):
        each.write(room)
    total = rooms[0].clone()
    for room in rooms[1:]:
        total += room
    for room in rooms:
        room.copy_(total)


def summed(size: int, values: Sequence[Values], dtype: torch.dtype) -> list[Sums]:
    sums = ranks(size)
    results = [each.give(own, counts=True) for each, own in zip(sums, values, strict=True)]
    reduce(sums, dtype)
    for each in sums:
        each.summed()
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_sums_are_those_of_float64_in_any_dtype(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    size = draw.randint(2, 9)
    numbers = [draw.uniform(-1, 1) * 10 ** draw.randint(-12, 12) for _ in range(size)]
    values: list[Values] = [{"loss": x, "samples": n} for n, x in enumerate(numbers)]
    for result in summed(size, values, dtype):
        assert dict(result) == {"loss": math.fsum(numbers), "samples": size * (size - 1) / 2}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_reach_every_rank(value: float) -> None:
    for result in summed(3, [{"loss": value}, {"loss": 1.0}, {"loss": 2.0}], torch.float32):
        assert result["loss"] == value or (math.isnan(value) and math.isnan(result["loss"]))


def test_a_tensor_counts_with_its_value_when_it_was_given() -> None:
    loss = torch.tensor([2.5], requires_grad=True)
    sums = ranks(2)
    results = [each.give({"loss": loss * 1.0}, counts=True) for each in sums]
    with torch.no_grad():
        loss += 1.0
    reduce(sums, torch.float64)
    sums[0].summed()
    assert results[0]["loss"] == 5.0


def test_values_of_one_name_add_up_until_they_are_sent() -> None:
    sums = ranks(2)
    for each in sums:
        first, second = each.give({"n": 1}, counts=True), each.give({"n": 2}, counts=True)
        assert first is second
    reduce(sums, torch.float32)
    third = [each.give({"n": 100}, counts=True) for each in sums]  # for the next reduction
    sums[0].summed()
    assert first._own == {"n": 3.0} and third[0] is not first
    assert sums[0].give({"n": 0}, counts=True) is third[0]
    with pytest.raises(TrainingError, match="the sum of n was read before it exists"):
        third[0]["n"]


def test_values_of_a_filler_are_ignored() -> None:
    sums = ranks(2)
    results = [each.give({"n": 7}, counts=rank == 0) for rank, each in enumerate(sums)]
    reduce(sums, torch.float64)
    sums[1].summed()
    assert results[1]["n"] == 7


@pytest.mark.parametrize("other", [{"b": 1.0, "a": 2.0}, {"a": 1.0}, {"a": 1.0, "c": 2.0}, {}])
def test_ranks_that_sum_different_names_end_with_an_error(other: Values) -> None:
    sums = ranks(2)
    sums[0].give({"a": 1.0, "b": 2.0}, counts=True)
    if other:
        sums[1].give(other, counts=True)
    sums[1].places = 3  # as many as were used before
    reduce(sums, torch.float32)
    for each, theirs in zip(sums, (1, 0), strict=True):
        with pytest.raises(TrainingError, match=f"but rank {theirs} sums other values"):
            each.summed()


def test_a_rank_without_gradients_is_no_rank_with_other_names() -> None:
    """It sends zeros: its control flags report it."""
    sums = ranks(2)
    result = sums[0].give({"a": 1.0}, counts=True)
    room = torch.zeros(sums[0].room(torch.float32))
    sums[0].write(room)
    sums[0].summed()
    with pytest.raises(TrainingError, match="read before"):
        result["a"]


def test_the_room_of_a_bucket_grows_and_keeps_its_gradients() -> None:
    gradients = torch.arange(6.0)
    first = Room.behind(gradients)
    assert first is not None
    second = Room.behind(gradients, 12, first)
    assert second is not None
    second.numbers.fill_(7.0)
    second.end.fill_(8.0)
    assert gradients.tolist() == [0, 1, 2, 3, 4, 5]
    assert second.both[:6].tolist() == gradients.tolist()
    assert second.numbers.numel() == 12
    assert Room.behind(gradients, 13) is None  # the memory behind them may be another one's


def test_float16_has_no_room() -> None:
    (sums, _) = ranks(2)
    sums.give({"a": 1.0}, counts=True)
    assert sums.room(torch.float16) == 0


def test_a_rank_alone_can_read_its_sums_at_once() -> None:
    with process() as run:
        one = job(run)
        seen = []
        for _ in run.epochs(1):
            for x, y in one.loader:
                one.optimizer.zero_grad()
                loss = F.mse_loss(one.model(x), y)
                sums = run.sum_with_gradients(loss=loss, samples=len(x))
                loss.backward()  # type: ignore[no-untyped-call]
                seen.append((sums["loss"], sums["samples"], loss.item()))
                one.optimizer.step()
        assert all(total == own for total, _, own in seen)
        assert sum(samples for _, samples, _ in seen) == 52


@pytest.mark.parametrize("value", ["1", torch.ones(2), None, 1j])
def test_a_value_that_is_no_number_is_refused(value: object) -> None:
    with process() as run:
        one = job(run)
        for _ in run.epochs(1):
            for _ in one.loader:
                with pytest.raises(ConfigError, match=r"run.sum_with_gradients\(loss=…\)"):
                    run.sum_with_gradients(loss=value)  # type: ignore[arg-type]
                break


def test_outside_of_a_step_nothing_is_summed() -> None:
    with process() as run:
        job(run)
        with pytest.raises(TrainingError, match="outside of a step"):
            run.sum_with_gradients(loss=1.0)


def test_nothing_is_left_of_a_step_that_is_dropped() -> None:
    (sums, _) = ranks(2)
    dropped = sums.give({"a": 1.0}, counts=True)
    sums.drop()
    assert sums.give({"a": 2.0}, counts=True) is not dropped
    sums.drop()
    sums.sum_rest(contextlib.nullcontext)  # would be a collective


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_values_of_micro_batches_that_are_read_ahead_count_unless_they_are_fillers(
    reads_ahead: bool,
) -> None:
    """The last of three micro-batches is one."""
    infos = [replace(OwnBatch(0, 0, 2), micro_batches=3, weight=w) for w in (0.5, 0.5, 0.0)]
    batches = iter([(info, None) for info in infos])
    step = Step(0, next(batches), batches, lambda step: None)
    read = list(step) if reads_ahead else step
    assert [counts_values(step, ("loss", "samples")) for _ in read] == [True, True, False]


def test_a_total_of_the_micro_batches_counts_although_the_last_one_is_a_filler() -> None:
    infos = [replace(OwnBatch(0, 0, 2), micro_batches=2, weight=w) for w in (1.0, 0.0)]
    batches = iter([(info, None) for info in infos])
    step = Step(0, next(batches), batches, lambda step: None)
    list(step)
    assert counts_values(step, ("samples",))
