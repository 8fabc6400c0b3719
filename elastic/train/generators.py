"""Generators of random numbers as state of the job: ``run.track(rng=rng)``.

The default generators of torch, NumPy and random have a seed for each step and rank, and nobody
tracks them. A generator that a script creates continues from draw to draw: it has to be where it
was at a boundary to which the job returns, on a joining rank, and after a restart.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class GeneratorState:
    """A generator as an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """The generator's state, from which it draws the same numbers again."""
        return {"state": state_of(self.generator)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generator's state. Raises ValueError or TypeError for that of another kind."""
        generator, state = self.generator, state_dict["state"]
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = _with_arrays(state)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(_with_arrays(state))
        else:
            version, numbers, second = state
            generator.setstate((version, tuple(numbers), second))


def state_of(generator: Generator) -> Any:
    """The state of a generator: a tensor, or plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _with_lists(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _with_lists(generator.get_state(legacy=False))
    version, numbers, second = generator.getstate()
    return [version, list(numbers), second]


def _with_lists(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _with_lists(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _with_arrays(value) for key, value in state.items()}
    return np.array(state, dtype=np.uint64) if isinstance(state, list) else state
