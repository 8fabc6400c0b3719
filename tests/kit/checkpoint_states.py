"""States to save, what it means that two are the same, bit for bit, and a node's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import checkpoints
from checkpoints.names import CheckpointName
from checkpoints.objects import Root
from checkpoints.testing import MemoryStorage


def small_state(step: int) -> dict[str, Any]:
    """A state in which every tensor and value tells the step, so that a mixture is seen."""
    return {
        "model": {
            "weight": torch.full((7, 3), float(step)),
            "bias": torch.full((5,), step, dtype=torch.int64),
            "scale": torch.tensor(float(step), dtype=torch.bfloat16),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(step)}}, "lr": step / 10},
    }


def odd_state() -> dict[str, Any]:
    """Everything that a checkpoint has to hold."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(12, 10, generator=generator)
    tied = torch.randn(4, 4, generator=generator)
    return {
        "float64": base.double(),
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float8": base.to(torch.float8_e4m3fn),
        "float8_e5m2": base.to(torch.float8_e5m2),
        "bool": base > 0,
        "int8": torch.arange(-5, 5, dtype=torch.int8),
        "uint8": torch.arange(9, dtype=torch.uint8),
        "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
        "int64": torch.tensor([2**63 - 1, -(2**63)]),
        "complex64": torch.complex(base, base + 1),
        "complex128": torch.complex(base.double(), base.double() + 1),
        "conjugate": torch.complex(base, base).conj(),
        "zero_d": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "permuted": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(base.clone()),
        "not_a_number": torch.tensor([float("nan"), float("inf"), -0.0]),
        "embedding": tied,
        "head": tied,
        "a/b~c": torch.ones(1),
        "": torch.ones(2),
        "__metadata__": torch.ones(3),
        "values": [None, True, 1, -(2**80), 0.1, 1e-310, "text \ud800 ü", (), {}, []],
        "numbers": (float("inf"), float("-inf"), -0.0),
        "optimizer": {0: {"betas": (0.9, 0.999)}, "0": 1, 7: torch.ones(2)},
    }


def same(a: object, b: object) -> bool:
    """Equal in structure, types and bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def bits(tensor: torch.Tensor) -> bytes:
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().data)


def save_all(
    root: Root, state: object, *, step: int, world_size: int = 1, nonce: str = "aa", **more: Any
) -> str:
    """Save with every rank of a world, one after the other; the name."""
    for rank in range(world_size):
        saved = checkpoints.save(
            root, state, step=step, nonce=nonce, rank=rank, world_size=world_size, **more
        )
    assert saved.committed, saved.notes
    return saved.name


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class PartsInMemory(MemoryStorage):
    """Uncommitted parts in the memory of a node, which is never full."""

    is_volatile = True

    def make_room(self, name: CheckpointName, size_bytes: int) -> None:
        pass

    def remove_if_empty(self, name: CheckpointName) -> None:
        pass

    def part_written(
        self, name: CheckpointName, keep: checkpoints.RetentionFunction | None
    ) -> tuple[str, ...]:
        return ()
