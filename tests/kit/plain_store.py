"""Ranks of a plain job: forked by its script, in one start of Python and one import of torch, and
the store at which they meet, hosted by the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import TCPStore  # type: ignore[attr-defined]


@contextmanager
def plain_store() -> Iterator[dict[str, str]]:
    """The environment in which ranks find the store.

    The port is bound all the time, as that of torchrun's agent: one that is only looked up may
    belong to another process once rank 0 has imported torch and listens on it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def fork_ranks(size: int) -> int:
    """Become one of ``size`` ranks; returns which. The others than rank 0 must end with
    ``os._exit(0)``."""
    os.environ.update(
        WORLD_SIZE=str(size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        TORCHELASTIC_RUN_ID="plain",
        GLOO_SOCKET_IFNAME="lo",
    )
    rank = next((rank for rank in range(1, size) if os.fork() == 0), 0)
    os.environ["RANK"] = os.environ["GROUP_RANK"] = str(rank)
    os.environ["NCCL_HOSTID"] = str(rank)  # for ranks that share a GPU
    return rank
