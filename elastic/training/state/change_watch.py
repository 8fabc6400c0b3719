"""Detects weights that were changed by other means than ``optimizer.step()``.

torch counts in-place changes of each tensor (``Tensor._version``). The count is cheap to compare,
but misses changes through ``.data`` and through NumPy. Comparing contents finds these, but reads
all memory: it is done only in a few steps, because a script that changes weights does so in every
step, or in the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from elastic import torch_private

_FIRST_STEPS = 3  # steps of a process with compared contents; then at each power of two
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = Callable[[], Sequence[torch.Tensor]]


def compares_content(step: int) -> bool:
    """Whether contents are compared in step number ``step`` of this process, counted from 0.

    >>> [step for step in range(70) if compares_content(step)]
    [0, 1, 2, 4, 8, 16, 32, 64]
    """
    return step < _FIRST_STEPS or step & (step - 1) == 0


class ChangeWatch:
    """Detects changes of tensors since :meth:`expect`; none before its first call.

    ``counted``: the tensors whose changes torch counts, if they differ: torch counts operations on
    a DTensor there, and operations on its local tensor at the local tensor [measured, torch 2.13].
    """

    def __init__(self, tensors: Tensors, counted: Tensors | None = None) -> None:
        self._tensors = tensors
        self._counted = counted or tensors
        self._version: int | None = None
        self._content: tuple[int, ...] | None = None

    def expect(self, *, by_content: bool) -> None:
        """Expect the current values."""
        self._version = versions(self._counted())
        self._content = contents(self._tensors()) if by_content else None

    def forget(self) -> None:
        """Stop expecting values."""
        self._version = self._content = None

    @property
    def has_changed(self) -> bool:
        """Whether the values differ from the expected ones."""
        if self._version is None:
            return False
        if versions(self._counted()) != self._version:
            return True
        return self._content is not None and contents(self._tensors()) != self._content


def versions(tensors: Iterable[torch.Tensor]) -> int:
    """A number that grows with every counted change of any tensor."""
    return torch_private.count_of_changes(tensors)


def contents(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The sum of each tensor's bits, read as integers: in practice, other values change it."""
    with torch.no_grad():
        sums = [_bits(t).sum(dtype=torch.int64) for t in tensors if t.numel() and not t.is_sparse]
        if not sums:
            return ()
        return tuple(torch.stack([s.to(sums[0].device) for s in sums]).tolist())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of eight-byte integers if possible: summing it takes a quarter of the time."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach()
    if flat.is_contiguous() and not flat.storage_offset() and not flat.nbytes % 8:
        return flat.view(-1).view(torch.int64)
    return flat.view(_INTEGERS[plain.element_size()])
