"""Memory for tensors that a rank receives: in huge pages, and touched before they arrive.

A joining rank has its weights in memory, but no optimizer state yet, which is twice as large with
Adam. The first touch of new memory costs more than hashing the received data, and on a virtual
machine that gets the memory from its host, more than the transfer over the network
(docs/benchmarks.md). So a rank touches it before it is ready to join, while the others train:
later, all of them would wait.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import optim

from elastic.training.gradients.sharding import local_value

# From this size on, two copies of a tensor cost more than an additional collective.
IN_PLACE_BYTES = 4 << 20
PAGE_BYTES, HUGE_PAGE_BYTES = 4 << 10, 2 << 20

Spec: TypeAlias = list[Any]
"""``[dtype, shape, device type]`` of a tensor."""


def spec_of(tensor: torch.Tensor) -> Spec:
    """The spec of a tensor."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]


def new_memory(spec: Spec, device: torch.device) -> torch.Tensor:
    """A new tensor, in huge pages; on ``device`` if the spec has its type, else on the CPU."""
    on = device if spec[2] == device.type else torch.device("cpu")
    tensor = torch.empty(spec[1], dtype=getattr(torch, spec[0]), device=on)
    if on.type == "cpu":
        _use_huge_pages(tensor)
    return tensor


def _use_huge_pages(tensor: torch.Tensor) -> None:
    """Let the kernel map and zero new memory 2 MiB at a time, if it can.

    4 KiB at a time takes longer than all other work of a receiver: for 195 MiB, 0.45 s instead of
    0.14 s with two receivers on two cores [measured].
    """
    first = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    size = (end - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size > 0:  # without huge pages the call fails, without effect
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


class Reserve:
    """Memory for the state of optimizers that have none yet. One per process."""

    def __init__(self) -> None:
        self._free: dict[str, list[torch.Tensor]] = defaultdict(list)  # by spec

    def fill(self, optimizers: Iterable[optim.Optimizer]) -> None:
        """Allocate and touch the state that torch's own optimizers will create in their first
        step. Others get none."""
        for optimizer in optimizers:
            for spec in expected_state(optimizer):
                tensor = new_memory(spec, torch.device("cpu"))
                tensor.view(-1).view(torch.uint8)[::PAGE_BYTES].zero_()
                self._free[str(spec)].append(tensor)

    def take(self, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
        """A reserved tensor for each of these names, if one has its spec."""
        return {
            name: free.pop() for name, spec in specs.items() if (free := self._free.get(str(spec)))
        }

    def clear(self) -> None:
        """Free the remaining tensors."""
        self._free.clear()


def expected_state(optimizer: optim.Optimizer) -> list[Spec]:
    """The specs of large tensors on the CPU that the optimizer will create in its first step."""
    if optimizer.state:
        return []
    return [
        spec_of(local)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        for local in [local_value(parameter.detach())] * _copies(optimizer, group)
        if local.device.type == "cpu" and local.nbytes >= IN_PLACE_BYTES
    ]


def _copies(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's shape an optimizer keeps for it."""
    if isinstance(optimizer, optim.SGD):
        return int(bool(group["momentum"]))
    if isinstance(optimizer, optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    pairs = (
        *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adadelta, optim.Rprop),
    )
    if isinstance(optimizer, pairs):
        return 2 + bool(group.get("amsgrad"))
    return 0
