"""Groups of accumulated batches: one that a fault interrupted may not become shorter."""

from __future__ import annotations

from elastic.train.current import Accumulation
from elastic.train.step import Step

EPOCH = 101


def step(number: int) -> Step:
    return Step.past(number, epoch=number // EPOCH, index=number % EPOCH, size=1)


def after_groups_of(accumulation: Accumulation, *lengths: int) -> int:
    """Complete these groups. Returns the number of the next step."""
    number = 0
    for length in lengths:
        for _ in range(length - 1):
            accumulation.add(step(number))
            number += 1
        accumulation.end(step(number))
        number += 1
    return number


def interrupted_group(
    accumulation: Accumulation, first: int, length: int
) -> tuple[int, int] | None:
    """A fault interrupts the group that begins at step ``first``; the repeated one has
    ``length`` batches."""
    accumulation.add(step(first))
    accumulation.interrupt(step(first + 1))
    for number in range(first, first + length - 1):
        accumulation.add(step(number))
    return accumulation.shorter_length(step(first + length - 1))


def test_a_repeated_group_that_is_shorter_is_found() -> None:
    accumulation = Accumulation()
    first = after_groups_of(accumulation, 4, 4)
    assert interrupted_group(accumulation, first, 3) == (3, 4)


def test_a_repeated_group_of_the_usual_length_is_correct() -> None:
    accumulation = Accumulation()
    first = after_groups_of(accumulation, 4, 4)
    assert interrupted_group(accumulation, first, 4) is None


def test_groups_may_grow_during_training() -> None:
    """A batch-size ramp: the death of a node must not end the job."""
    accumulation = Accumulation()
    first = after_groups_of(accumulation, 1, 1, 2, 2)
    assert interrupted_group(accumulation, first, 3) is None


def test_groups_that_differed_before_may_become_shorter() -> None:
    accumulation = Accumulation()
    first = after_groups_of(accumulation, 3, 2)
    assert interrupted_group(accumulation, first, 1) is None


def test_the_first_group_of_an_epoch_may_be_that_of_earlier_ones() -> None:
    """``if step % 2 == 0: optimizer.step()``: of one batch in each epoch."""
    accumulation = Accumulation()
    first = after_groups_of(accumulation, 1, *[2] * 50)
    assert first == EPOCH
    assert interrupted_group(accumulation, first, 1) is None
    accumulation = Accumulation()
    first = after_groups_of(accumulation, 3, *[2] * 49)
    assert interrupted_group(accumulation, first, 1) == (1, 2)
