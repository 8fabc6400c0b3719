"""Workers of one start find each other in a store with keys of earlier, dead workers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from kit.manual_clock import ManualClock
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic.errors import JoinTimeout
from elastic.groups.store import agree_on_nonce

DEADLINE_S = 60.0


class Keys:
    """A store for threads: torch's HashStore holds the GIL while it waits."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self._keys[key] = value

    def get(self, key: str, /) -> bytes:
        with self._lock:
            return self._keys[key].encode()

    def check(self, keys: list[str], /) -> bool:
        with self._lock:
            return all(key in self._keys for key in keys)


def start(store: Keys, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as threads:
        ranks = reversed(range(size))  # rank 0 last: the others find leftovers of older starts
        tasks = [
            threads.submit(agree_on_nonce, store, r, size, timeout_s=DEADLINE_S) for r in ranks
        ]
        return {task.result() for task in tasks}


def test_each_start_agrees_on_its_own_nonce() -> None:
    store = Keys()
    nonces = [start(store, size) for size in (1, 3, 2, 4)]
    assert all(len(agreed) == 1 for agreed in nonces)
    assert len(set.union(*nonces)) == 4


def test_an_interrupted_start_is_not_joined() -> None:
    store = Keys()
    with pytest.raises(JoinTimeout, match=r"ranks \[1, 2\] have not arrived"):
        agree_on_nonce(store, 0, 3, timeout_s=5, clock=ManualClock())
    stale = store.get("elastic/offer").decode()
    with pytest.raises(JoinTimeout, match="rank 0 has not arrived"):
        agree_on_nonce(store, 1, 3, timeout_s=5, clock=ManualClock())
    (agreed,) = start(store, 3)
    assert agreed != stale


def test_workers_agree_through_a_real_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    peer = TCPStore("127.0.0.1", store.port, is_master=False)
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(agree_on_nonce, peer, 1, 2, timeout_s=DEADLINE_S)
        assert agree_on_nonce(store, 0, 2, timeout_s=DEADLINE_S) == other.result()
