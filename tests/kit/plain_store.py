"""The store at which ranks of a plain job meet, hosted by the test."""

from __future__ import annotations

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
