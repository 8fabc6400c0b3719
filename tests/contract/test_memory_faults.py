"""Faults of the in-memory store: its watches report the same as those of etcd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from etcd_fixtures import Recorder
from kit.memory_store import MemoryServer, MemoryStore

from elastic.errors import LeaseGone, StoreUnreachable
from elastic.store.keyvalue import Disconnected, Reconnected, Reset
from elastic.testing.waiting import eventually


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def store(server: MemoryServer) -> Iterator[MemoryStore]:
    store = MemoryStore(server)
    yield store
    store.close()


def follow(store: MemoryStore) -> Recorder:
    recorder = Recorder()
    store.watch(["/"], recorder, name="test")
    recorder.wait_for(lambda r: r.resets)
    return recorder


def kinds(recorder: Recorder) -> list[str]:
    named = (Reset, Disconnected, Reconnected)
    return [
        e.reason if isinstance(e, Reset) else type(e).__name__
        for e in recorder.events
        if isinstance(e, named)
    ]


def test_while_disconnected_calls_fail_and_watches_report_it(
    server: MemoryServer, store: MemoryStore
) -> None:
    recorder = follow(store)
    server.disconnect()
    recorder.wait_for(lambda r: r.disconnections)
    with pytest.raises(StoreUnreachable):
        store.put("/a", b"")
    server.put("/a", b"meanwhile", 0)
    server.reconnect()
    recorder.wait_for(lambda r: r.changes)
    assert recorder.changes == [("/a", b"meanwhile")]
    assert kinds(recorder) == ["started", "Disconnected", "Reconnected"]


def test_a_compaction_affects_only_disconnected_watches(
    server: MemoryServer, store: MemoryStore
) -> None:
    recorder = follow(store)
    store.put("/a", b"1")
    server.compact()
    store.put("/a", b"2")
    recorder.wait_for(lambda r: len(r.changes) == 2)
    server.disconnect()
    server.put("/a", b"3", 0)
    server.compact()
    server.reconnect()
    recorder.wait_for(lambda r: len(r.resets) == 2)
    assert kinds(recorder) == ["started", "Disconnected", "compacted"]
    assert recorder.resets[1].snapshot.entries[0].value == b"3"


def test_a_wipe_removes_keys_leases_and_revisions(server: MemoryServer, store: MemoryStore) -> None:
    lease = store.lease(5)
    for _ in range(10):
        store.put("/a", b"", lease=lease)
    recorder = follow(store)
    server.wipe()
    recorder.wait_for(lambda r: len(r.resets) == 2)
    assert kinds(recorder) == ["started", "Disconnected", "wiped"]
    assert recorder.resets[1].snapshot.revision < recorder.resets[0].snapshot.revision
    eventually(lambda: lease.lost, "the lease is lost")
    with pytest.raises(LeaseGone):
        store.put("/a", b"", lease=lease)


def test_a_lease_is_not_lost_while_disconnected(server: MemoryServer, store: MemoryStore) -> None:
    lease, witness = store.lease(5), follow(store)
    server.disconnect()
    server.expire(lease.id)
    witness.wait_for(lambda r: r.disconnections)
    assert not lease.lost
    server.reconnect()
    eventually(lambda: lease.lost, "the lease is lost")
