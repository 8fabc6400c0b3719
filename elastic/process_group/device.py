"""The device that a worker trains on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from elastic.errors import ConfigError

# A launcher or container runtime that gives each worker one GPU sets one of these.
_MASKS = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)


def choose_device() -> torch.device:
    """This worker's device: ``cuda:LOCAL_RANK`` if CUDA is available, else the CPU.

    A worker that sees only one GPU because of a mask uses it, whatever its local rank.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_index(os.environ, torch.cuda.device_count()))


def device_index(environ: Mapping[str, str], visible: int) -> int:
    """The index of the GPU that a worker uses, out of ``visible`` GPUs.

    >>> device_index({"LOCAL_RANK": "3"}, 8)
    3
    >>> device_index({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, 1)
    0
    """
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    if local_rank < visible:
        return local_rank
    if visible == 1 and any(environ.get(mask) not in (None, "", "all") for mask in _MASKS):
        return 0
    raise ConfigError(
        f"local rank {local_rank} has no GPU: this node has {visible}",
        hint="lower --nproc-per-node, or hide the GPUs with CUDA_VISIBLE_DEVICES= to use CPUs",
    )
