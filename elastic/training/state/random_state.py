"""The states of the random generators where the function of ``run.retry`` begins.

Steps, and the code between them, are seeded by their place:
:mod:`elastic.training.data.randomness`.
What the function draws before them must be the same whenever it is called again.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """This rank's states before the first call of the function."""

    def __init__(self) -> None:
        self._torch: torch.Tensor | None = None
        self._cuda: torch.Tensor | None = None
        self._python: tuple[Any, ...] = ()
        self._numpy: Any = None

    def take(self) -> None:
        """Copy the current states."""
        self._torch = torch.default_generator.get_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()
        self._python = random.getstate()
        if "numpy" in sys.modules:
            self._numpy = sys.modules["numpy"].random.get_state()

    def restore(self) -> None:
        """Restore the states that were taken, if any."""
        if self._torch is None:
            return
        torch.default_generator.set_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
