"""The GPU that a worker uses."""

from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.groups.group import device_index


def test_a_worker_uses_its_only_gpu_regardless_of_its_local_rank() -> None:
    """SLURM's --gpus-per-task=1, a wrapper that sets a mask, a container with one GPU."""
    for mask in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        assert device_index({"LOCAL_RANK": "2", mask: "GPU-8f6c"}, 1) == 0


@pytest.mark.parametrize("environ", [{}, {"NVIDIA_VISIBLE_DEVICES": "all"}])
def test_too_many_workers_are_rejected(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="local rank 2 has no GPU: this node has 1"):
        device_index({"LOCAL_RANK": "2", **environ}, 1)
    with pytest.raises(ConfigError):
        device_index({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, 2)
