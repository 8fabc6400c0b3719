"""The samples at the positions of an epoch: the index lists of torch's samplers.

torch's samplers draw an epoch from a generator whose state is not saved. Here, a draw is a function
of (seed, epoch, position): the same on every rank, in every world, and after a
restart. If an epoch reads each index once, it is the keyed permutation of ``permutation.py``;
if it draws with replacement, each position has its own random number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elastic.errors import ConfigError
from elastic.training.data.permutation import Int64s, Permutation
from elastic.training.data.randomness import derive_seed

Order = Callable[[Int64s], Int64s]
"""The order of one epoch: a function from global positions to dataset indices."""

_REPLACEMENT = 1  # part of the keys of random numbers, so that no two uses share numbers
_WITHOUT_REPLACEMENT = 2
_ROUND = 3
# The constants of SplitMix64 (Steele, Lea and Flood, 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


class Draw(Protocol):
    """The indices that one pass over a loader reads, and in which order."""

    @property
    def n(self) -> int:
        """The number of positions of an epoch."""

    @property
    def name(self) -> str | None:
        """What positions depend on, as text; None: all samples of the dataset, once each."""

    @property
    def repeats(self) -> bool:
        """Whether an epoch may read an index more than once."""

    def order(self, seed: int, epoch: int) -> Order:
        """The order of ``epoch``. Raises ConfigError if the user's sampler has changed."""

    def each_once(self) -> Sequence[int]:
        """The indices for evaluation, each once, in a fixed order."""


class WholeDataset:
    """``range(n)``, in order or shuffled: ``shuffle=True`` and ``shuffle=False``."""

    name = None
    repeats = False

    def __init__(self, n: int, *, shuffle: bool) -> None:
        self.n = n
        self._shuffle = shuffle

    def order(self, seed: int, epoch: int) -> Order:
        if not self._shuffle:
            return lambda positions: positions
        return Permutation(self.n, seed=seed, epoch=epoch).at

    def each_once(self) -> Sequence[int]:
        return range(self.n)


class FirstSamples(WholeDataset):
    """``SequentialSampler`` of fewer samples than the dataset has: the first ones, in order."""

    def __init__(self, n: int, samples: int) -> None:
        super().__init__(n, shuffle=False)
        _check_range("SequentialSampler", n, samples)
        self.name: str | None = f"SequentialSampler of {n}"  # type: ignore[assignment]


class IndexList:
    """A list of indices, in its order (``sampler=[3, 1, 2]``) or shuffled
    (``SubsetRandomSampler``)."""

    def __init__(self, given: Any, samples: int) -> None:
        self._given = given
        self._shuffle = isinstance(given, SubsetRandomSampler)
        self._kind = type(given).__name__
        self._indices = self._read()
        if not self._indices.size:
            raise ConfigError(
                f"{self._kind} is empty",
                hint="check the filter or split that produced its indices",
            )
        low, high = int(self._indices.min()), int(self._indices.max())
        if low < 0 or high >= samples:
            raise ConfigError(
                f"{self._kind} has index {low if low < 0 else high}, but the dataset has {samples} "
                "samples",
                hint="indices count from 0 in the DataLoader's dataset",
            )
        self.n = int(self._indices.size)
        self.repeats = int(np.unique(self._indices).size) < self.n
        self.name = self._name(self._indices)

    def _read(self) -> Int64s:
        indices = _array(self._given.indices if self._shuffle else self._given)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise ConfigError(
                f"{self._kind} does not contain sample indices, but {indices.dtype} values "
                f"of shape {indices.shape}",
                hint="pass a flat list of integers: indices into the dataset, from 0",
            )
        return indices.astype(np.int64)

    def _name(self, indices: Int64s) -> str:
        return f"{self._kind} of {indices.size}, {_digest(indices)}"

    def order(self, seed: int, epoch: int) -> Order:
        _check_unchanged(self.name, self._name(self._read()))
        if not self._shuffle:
            return lambda positions: self._indices[positions]
        shuffled = Permutation(self.n, seed=seed, epoch=epoch)
        return lambda positions: self._indices[shuffled.at(positions)]

    def each_once(self) -> Sequence[int]:
        return list(dict.fromkeys(self._indices.tolist()))


class RandomSamples:
    """``RandomSampler`` with ``replacement`` or ``num_samples``.

    Without replacement, an epoch longer than the dataset consists of rounds, each of which reads
    every sample once, as in torch.
    """

    def __init__(self, sampler: RandomSampler, samples: int) -> None:
        self._range = len(sampler.data_source)
        _check_range("RandomSampler", self._range, samples)
        self._replacement = sampler.replacement
        self.n = sampler.num_samples
        self.repeats = self._replacement or self.n > self._range
        how = "with" if self._replacement else "without"
        self.name = f"RandomSampler, {self.n} of {self._range} {how} replacement"
        self._samples = samples

    def order(self, seed: int, epoch: int) -> Order:
        if self._replacement:
            key = derive_seed(seed, epoch, _REPLACEMENT)
            return lambda positions: np.minimum(
                (_uniform(positions, key) * self._range).astype(np.int64), self._range - 1
            )
        rounds = {0: Permutation(self._range, seed=seed, epoch=epoch)}

        def at(positions: Int64s) -> Int64s:
            result = np.empty_like(positions)
            numbers = positions // self._range
            for number in np.unique(numbers).tolist():
                if number not in rounds:
                    of_round = derive_seed(seed, number, _ROUND)
                    rounds[number] = Permutation(self._range, seed=of_round, epoch=epoch)
                here = numbers == number
                result[here] = rounds[number].at(positions[here] % self._range)
            return result

        return at

    def each_once(self) -> Sequence[int]:
        return range(self._samples)


class WeightedSamples:
    """``WeightedRandomSampler``: its number of samples by its weights, drawn again in each
    epoch."""

    def __init__(self, sampler: WeightedRandomSampler, samples: int) -> None:
        self._sampler = sampler
        self._weights = weights = self._read()
        self.n = sampler.num_samples
        self._replacement = self.repeats = sampler.replacement
        self._samples = samples
        _check_range("WeightedRandomSampler", weights.size, samples)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
            raise ConfigError(
                "WeightedRandomSampler: the weights are invalid",
                hint="each weight must be finite and at least 0, and one must be above 0",
            )
        drawable = int(np.count_nonzero(weights))
        if not self._replacement and self.n > drawable:
            raise ConfigError(
                f"WeightedRandomSampler draws {self.n} samples without replacement, but only "
                f"{drawable} have a weight above 0",
                hint=f"use num_samples={drawable} or fewer, or replacement=True",
            )
        self.name = self._name(weights)

    def _read(self) -> npt.NDArray[np.float64]:
        weights = torch.as_tensor(self._sampler.weights, dtype=torch.double, device="cpu")
        return np.array(weights.detach().cpu().numpy())

    def _name(self, weights: npt.NDArray[np.float64]) -> str:
        how = "with" if self._replacement else "without"
        return f"WeightedRandomSampler, {self.n} {how} replacement, {_digest(weights)}"

    def order(self, seed: int, epoch: int) -> Order:
        _check_unchanged(self.name, self._name(self._read()))
        if self._replacement:
            return self._by_inversion(derive_seed(seed, epoch, _REPLACEMENT))
        drawn = self._by_exponentials(derive_seed(seed, epoch, _WITHOUT_REPLACEMENT))
        return lambda positions: drawn[positions]

    def _by_inversion(self, key: int) -> Order:
        sums = np.cumsum(self._weights)
        last = int(np.flatnonzero(self._weights)[-1])

        def at(positions: Int64s) -> Int64s:
            # side="right": a weight of 0 adds nothing to the cumulative sums, so it is never drawn.
            found = np.searchsorted(sums, _uniform(positions, key) * sums[-1], side="right")
            drawn: Int64s = np.minimum(found, last).astype(np.int64)
            return drawn

        return at

    def _by_exponentials(self, key: int) -> Int64s:
        """The samples with the smallest exponential variates, one per sample, of rate ``weight``.

        Equivalent to drawing one after the other (Efraimidis and Spirakis, 2006), as torch does.
        """
        candidates = np.flatnonzero(self._weights)
        arrivals = -np.log1p(-_uniform(candidates, key)) / self._weights[candidates]
        first = np.argsort(arrivals, kind="stable")[: self.n]
        drawn: Int64s = candidates[first].astype(np.int64)
        return drawn

    def each_once(self) -> Sequence[int]:
        return range(self._samples)


def draw_of(sampler: object, samples: int) -> Draw | None:
    """The draw of a sampler for a dataset of ``samples`` samples; None for an unknown sampler.

    Subclasses are unknown: they may draw differently. Raises ConfigError for one of torch's
    samplers, or a list, with indices outside the dataset.
    """
    if type(sampler) is SequentialSampler:
        n = len(sampler)
        return WholeDataset(n, shuffle=False) if n == samples else FirstSamples(n, samples)
    if type(sampler) is RandomSampler:
        is_plain = not sampler.replacement and len(sampler) == len(sampler.data_source) == samples
        return WholeDataset(samples, shuffle=True) if is_plain else RandomSamples(sampler, samples)
    if type(sampler) is WeightedRandomSampler:
        return WeightedSamples(sampler, samples)
    if type(sampler) is SubsetRandomSampler or isinstance(
        sampler, (list, tuple, range, np.ndarray, torch.Tensor)
    ):
        return IndexList(sampler, samples)
    return None


def subset_of(dataset: object) -> str | None:
    """A name for the samples of a ``Subset``, or of subsets inside one; None for another dataset.

    >>> from torch.utils.data import Subset
    >>> subset_of(Subset(range(9), [1, 2])) == subset_of(Subset(range(9), [1, 2]))
    True
    >>> subset_of(range(9)) is None
    True
    """
    names = []
    while isinstance(dataset, Subset):
        indices = _array(dataset.indices)
        is_plain = indices.dtype.kind in "iu"
        names.append(f"{len(indices)}, {_digest(indices.astype(np.int64)) if is_plain else ''}")
        dataset = dataset.dataset
    return "; ".join(names) or None


def _check_range(kind: str, named: int, samples: int) -> None:
    if named > samples:
        raise ConfigError(
            f"{kind} draws from {named} samples, but the dataset has {samples}",
            hint="use the same dataset for the sampler and the DataLoader",
        )


def _check_unchanged(before: str, now: str) -> None:
    if before != now:
        raise ConfigError(
            f"the loader's sampler has changed since run.loader was called: it was {before}, "
            f"and now is {now}",
            hint="a resumed job could not reproduce its order: keep the sampler unchanged; if the "
            "weights of samples change during training, weight the losses instead",
        )


def _array(given: Any) -> npt.NDArray[Any]:
    """A copy as an array, of a tensor or a list of tensors (``list(torch.randperm(n))``), too."""
    if isinstance(given, torch.Tensor):
        return np.array(given.detach().cpu().numpy())
    if isinstance(given, (np.ndarray, range)):
        return np.array(given)
    return np.array([item.item() if isinstance(item, torch.Tensor) else item for item in given])


def _digest(values: npt.NDArray[Any]) -> str:
    return "sha256 " + hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def _uniform(numbers: Int64s, key: int) -> npt.NDArray[np.float64]:
    """A random number in [0, 1) of 53 bits for each of ``numbers``: SplitMix64 in counter mode."""
    mixed = numbers.astype(np.uint64)
    mixed += np.uint64(1)
    mixed *= _GAMMA
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLY_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLY_2
    mixed ^= mixed >> np.uint64(31)
    numerators: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64)
    return numerators * 2.0**-53
