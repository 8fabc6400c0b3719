"""Randomness as a function of (seed, step, rank, micro-batch), set before each micro-batch.

A step that is redone or resumed draws the same numbers, whatever was drawn before it: no
generator's state has to be saved or restored.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys

import torch


def derive_seed(*parts: int) -> int:
    """A well-mixed 64-bit seed from whole numbers.

    >>> derive_seed(0, 1) == derive_seed(0, 1) != derive_seed(1, 0)
    True
    """
    data = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def seed_all(seed: int) -> None:
    """Seed torch (CPU and this process's GPU), Python and, if the script imported it, NumPy.

    Not ``torch.manual_seed``: it asks every kind of device, and formats a stack trace for each
    that is not initialised, 0.6 ms in all [measured].
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
