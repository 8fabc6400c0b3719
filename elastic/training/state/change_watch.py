"""Detects weights that were changed by other means than ``optimizer.step()``.

torch counts in-place changes of each tensor (``Tensor._version``). The count is cheap to compare,
but misses changes through ``.data`` and through NumPy. Comparing contents finds these, but reads
all memory: it is done only in a few steps, because a script that changes weights does so in every
step, or in the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash

from elastic import torch_private

_FIRST_STEPS = 3  # steps of a process with compared contents; then at each power of two
_CHUNK = 1 << 22  # elements of a device's tensor that are converted at a time
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
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

    @property
    def knows_content(self) -> bool:
        """Whether contents are compared, so that no change remains undetected."""
        return self._content is not None

    def forget(self) -> None:
        """Stop expecting values."""
        self._version = self._content = None

    @property
    def has_counted_changes(self) -> bool:
        """Whether torch has counted changes: cheap, for each step."""
        return self._version is not None and versions(self._counted()) != self._version

    @property
    def has_changed(self) -> bool:
        """Whether the values differ from the expected ones."""
        if self._version is None:
            return False
        if self._content is not None:  # equal contents after a change, too: it was undone
            return contents(self._tensors()) != self._content
        return versions(self._counted()) != self._version


def versions(tensors: Iterable[torch.Tensor]) -> int:
    """A number that grows with every counted change of any tensor."""
    return torch_private.count_of_changes(tensors)


def contents(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """A digest of each tensor's bits, in which their positions count."""
    with torch.no_grad():
        plain = [t.detach() for t in tensors if t.numel() and not t.is_sparse]
        plain = [torch.view_as_real(t) if t.is_complex() else t for t in plain]
        if any(t.device.type != "cpu" for t in plain):
            return tuple(torch.stack([digest_on_device(t) for t in plain]).tolist())
        flat = (t.contiguous().view(-1).view(torch.uint8) for t in plain)
        return tuple(xxhash.xxh3_64_intdigest(t.numpy().data) for t in flat)


def digest_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor without a copy on the host: a scalar of 64 bits."""
    flat = tensor.contiguous().view(-1)
    # At most 32 bits: factors cannot move the sign of a 64-bit number within the digest.
    flat = flat.view(_INTEGERS[min(4, tensor.element_size())])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=flat.device)
        total += (part * (places * _MIX + 1)).sum()
    return total
