"""Random seeds as a function of (seed, step, rank, micro-batch), set before each micro-batch.

A repeated or resumed step draws the same numbers, whatever was drawn before, so no generator state
must be saved or restored.
"""

from __future__ import annotations

import random
import sys

import torch

_MASK = (1 << 64) - 1
_BETWEEN = _MASK  # in place of a step's number


def derive_seed(*parts: int) -> int:
    """A well-mixed 64-bit seed from integers: SplitMix64's finalizer over each of them.

    A cryptographic hash took 24 µs in each step, with cold caches [measured].
    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.

    >>> derive_seed(0, 1) == derive_seed(0, 1) != derive_seed(1, 0)
    True
    """
    mixed = 0
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        mixed ^= mixed >> 31
    return mixed


def seed_between_steps(seed: int, epoch: int, after: int) -> None:
    """Seed the code of the script between two steps: at an epoch's beginning (``after`` is 0), and
    after a pass. All ranks draw the same numbers there, whenever they resume, as in a script that
    seeds torch on all ranks alike."""
    seed_all(derive_seed(seed, _BETWEEN, epoch, after))


def seed_all(seed: int) -> None:
    """Seed torch (CPU and this process's GPU), Python and, if the script imported it, NumPy.

    ``torch.manual_seed`` is not used: it seeds every kind of device, and formats a stack trace for
    each that is not initialized, 0.6 ms in total [measured].
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
