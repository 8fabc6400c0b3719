"""The order of an epoch: a well-mixed permutation that never changes between versions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from elastic.errors import ConfigError
from elastic.train.sampler import MAX_N, ORDER_VERSION, Permutation


def full_order(n: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return [int(sample) for sample in Permutation(n, seed=seed, epoch=epoch).at(np.arange(n))]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1797, 65536, 65537, 100_003])
def test_every_sample_occurs_exactly_once(n: int) -> None:
    assert sorted(full_order(n)) == list(range(n))


@pytest.mark.parametrize("n", [1, 7, 1797, 10**6, 2**40 + 1, MAX_N])
def test_the_inverse_returns_the_position(n: int) -> None:
    order = Permutation(n, seed=3, epoch=1)
    positions = np.unique(np.linspace(0, n - 1, 2000).astype(np.uint64).clip(0, n - 1))
    samples = order.at(positions.astype(np.int64))
    assert samples.min() >= 0 and int(samples.max()) < n
    assert (order.position_of(samples) == positions.astype(np.int64)).all()


def test_single_positions_and_blocks_give_the_same_samples() -> None:
    order = Permutation(100_003, seed=1, epoch=2)
    block = order.at(np.arange(50_000))
    assert [int(order.at(p)) for p in (0, 8191, 8192, 49_999)] == block[
        [0, 8191, 8192, 49_999]
    ].tolist()
    assert order.at(np.arange(6).reshape(2, 3)).tolist() == block[:6].reshape(2, 3).tolist()
    assert order.at([]).tolist() == []


def test_the_order_of_version_1_never_changes() -> None:
    """Jobs resume in the middle of an epoch: another order would repeat and lose samples."""
    assert ORDER_VERSION == 1
    assert full_order(10) == [7, 3, 9, 8, 4, 5, 6, 2, 0, 1]
    golden = Permutation(1797, seed=0, epoch=0).at(np.arange(8)).tolist()
    assert golden == [1653, 1393, 658, 228, 4, 607, 1662, 1116]
    far = Permutation(2**40 + 1, seed=7, epoch=3).at([0, 1, 2**40]).tolist()
    assert far == [558201942537, 546917922766, 484449917896]
    largest = Permutation(MAX_N, seed=-1, epoch=10).at([0, MAX_N - 1]).tolist()
    assert largest == [9028227750139630942, 1947134715311466383]


def test_seed_epoch_and_size_each_change_the_order() -> None:
    orders = [
        full_order(1000),
        full_order(1000, seed=1),
        full_order(1000, epoch=1),
        [sample for sample in full_order(1001) if sample < 1000],
    ]
    for one, other in itertools.combinations(orders, 2):
        same_place = sum(a == b for a, b in zip(one, other, strict=True))
        assert same_place < 10  # 1 is expected of independent orders


def test_neighbours_in_the_order_are_not_neighbours_in_the_dataset() -> None:
    n = 100_000
    order = np.array(full_order(n))
    steps = np.diff(order) % n
    # Sixteen bins of the distance between consecutive samples, and the correlation of their sizes.
    counts = np.bincount(steps * 16 // n, minlength=16)
    assert deviation(counts, (n - 1) / 16, 15) < 4
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / math.sqrt(n)


def test_epochs_are_not_correlated() -> None:
    n = 100_000
    one, other = np.array(full_order(n, epoch=0)), np.array(full_order(n, epoch=1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(n)
    # Nor shifted against each other: a constant offset between epochs would be another weakness.
    counts = np.bincount(((one - other) % n) * 16 // n, minlength=16)
    assert deviation(counts, n / 16, 15) < 4


@pytest.mark.parametrize("n", [0, -1, MAX_N + 1])
def test_invalid_sizes_are_rejected(n: int) -> None:
    with pytest.raises(ConfigError, match=str(n)):
        Permutation(n, seed=0, epoch=0)


def test_an_unknown_version_is_rejected() -> None:
    with pytest.raises(ConfigError, match="version 2"):
        Permutation(10, seed=0, epoch=0, version=2)


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_epoch_is_rejected(position: int) -> None:
    with pytest.raises(ConfigError, match="10 samples"):
        Permutation(10, seed=0, epoch=0).at([0, position])


def deviation(counts: npt.NDArray[np.int64], expected: float, freedom: int) -> float:
    """How many standard deviations chi-squared lies above its mean."""
    chi_squared = float((((counts - expected) ** 2) / expected).sum())
    return (chi_squared - freedom) / math.sqrt(2 * freedom)
