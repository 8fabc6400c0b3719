"""Several ranks of a job on one GPU, over NCCL: for tests on a machine with a single one.

NCCL refuses two ranks with the same GPU and the same host ("Duplicate GPU detected",
src/init.cc, ``initTransportsRank``). It compares hosts by a hash, and ``NCCL_HOSTID`` replaces what
is hashed (src/misc/utils.cc, ``getHostHash``). Ranks with different ones are on different hosts to
NCCL: they exchange data over sockets, and their kernels take turns on the GPU, in slices of about
two milliseconds. Recovery is the same as with a GPU for each rank; durations are not.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SWITCH = "SHARED_GPU"  # "1": the scripts of the kill tests call share_if_told()


def share(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make this process use the first GPU, as another host than all other processes.

    Call this before CUDA is initialised, and after the last fork.
    """
    environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    environ.setdefault("NCCL_IB_DISABLE", "1")


def share_if_told() -> None:
    """:func:`share`, if ``SHARED_GPU`` is 1."""
    if os.environ.get(SWITCH) == "1":
        share()


def train_there() -> None:
    """:func:`share`, and create tensors there unless a script says otherwise."""
    import torch  # not in the process of pytest that only distributes tests: it takes seconds

    share()
    torch.set_default_device("cuda")
