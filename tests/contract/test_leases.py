"""The contract of leases on every store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from etcd_fixtures import PATIENCE_S, Recorder
from store_kinds import Backend

from elastic.errors import SYSTEM_CLOCK, CoordinationError, LeaseGone
from elastic.store.keyvalue import KeyValue
from elastic.testing.waiting import eventually


def test_a_key_has_the_id_of_its_lease(store: KeyValue, root: str) -> None:
    lease = store.lease(5)
    store.put(f"{root}put", b"", lease=lease)
    store.compare_and_swap(f"{root}swapped", b"", expected_revision=0, lease=lease)
    assert {e.lease_id for e in store.list(root).entries} == {lease.id}
    assert lease.ttl_s >= 5
    assert not lease.lost


def test_closing_a_lease_deletes_its_keys(store: KeyValue, root: str) -> None:
    lease = store.lease(60)
    store.put(f"{root}leased", b"", lease=lease)
    store.put(f"{root}free", b"")
    lease.close()
    assert [e.key for e in store.list(root).entries] == [f"{root}free"]
    lease.close()  # closing twice is allowed


def test_a_lease_closed_without_revoking_leaves_its_keys(store: KeyValue, root: str) -> None:
    lease = store.lease(60)
    store.put(f"{root}leased", b"", lease=lease)
    lease.close(revoke=False)
    assert store.get(f"{root}leased") is not None


def test_a_key_written_without_the_lease_outlives_it(store: KeyValue, root: str) -> None:
    lease = store.lease(60)
    store.put(f"{root}a", b"leased", lease=lease)
    store.put(f"{root}a", b"free")
    lease.close()
    entry = store.get(f"{root}a")
    assert entry is not None and entry.value == b"free"


def test_the_loss_of_a_lease_is_reported_once_on_its_own_thread(
    backend: Backend, store: KeyValue, root: str
) -> None:
    callback_threads: list[str] = []
    lease = store.lease(2, on_lost=lambda: callback_threads.append(threading.current_thread().name))
    store.put(f"{root}a", b"", lease=lease)
    backend.expire(lease)
    eventually(lambda: callback_threads, "on_lost is called")
    assert lease.lost
    assert store.get(f"{root}a") is None
    lease.close()
    assert callback_threads == [f"elastic-lease-{lease.id:x}"]


def test_a_lease_may_be_closed_from_its_own_callback(backend: Backend, store: KeyValue) -> None:
    ready, done = threading.Event(), threading.Event()

    def on_lost() -> None:
        ready.wait(PATIENCE_S)
        lease.close()
        done.set()

    lease = store.lease(2, on_lost=on_lost)
    backend.expire(lease)
    ready.set()
    assert done.wait(PATIENCE_S)


def test_writing_with_a_lost_lease_raises_lease_gone(
    backend: Backend, store: KeyValue, root: str
) -> None:
    lease = store.lease(60)
    backend.expire(lease)
    with pytest.raises(LeaseGone):
        store.put(f"{root}a", b"", lease=lease)
    with pytest.raises(LeaseGone):
        store.compare_and_swap(f"{root}a", b"", expected_revision=0, lease=lease)
    assert store.get(f"{root}a") is None


def test_a_write_with_a_lost_lease_notifies_its_owner(
    backend: Backend, store: KeyValue, root: str
) -> None:
    lost = threading.Event()
    lease = store.lease(3600, on_lost=lost.set)  # the next renewal would be in 20 minutes
    backend.expire(lease)
    with pytest.raises(CoordinationError):
        store.put(f"{root}a", b"", lease=lease)
    assert lost.wait(PATIENCE_S)


def test_a_lease_records_its_last_renewal(backend: Backend, store: KeyValue, root: str) -> None:
    asked_s = SYSTEM_CLOCK.boottime()
    lease = store.lease(2)
    granted_s = lease.renewed_s
    assert asked_s <= granted_s <= SYSTEM_CLOCK.boottime()
    eventually(lambda: lease.renewed_s > granted_s, "it is renewed")
    backend.expire(lease)
    eventually(lambda: lease.lost, "it is lost")
    last_s = lease.renewed_s
    assert last_s <= SYSTEM_CLOCK.boottime()
    store.get(root)  # other answers of the store do not renew it
    assert lease.renewed_s == last_s


def test_a_lease_survives_an_interruption(backend: Backend, store: KeyValue, root: str) -> None:
    lost = threading.Event()
    # Longer than an interruption takes on a busy machine.
    lease = store.lease(30, on_lost=lost.set)
    recorder = Recorder()
    store.put(f"{root}a", b"", lease=lease)
    store.watch([root], recorder, name="leased")
    recorder.wait_for(lambda r: r.resets)
    backend.interrupt(store)
    recorder.wait_for(lambda r: r.reconnections)
    store.put(f"{root}b", b"", lease=lease)
    recorder.wait_for(lambda r: (f"{root}b", b"") in r.changes)
    assert not lost.is_set() and not lease.lost
    assert [e.key for e in store.list(root).entries] == [f"{root}a", f"{root}b"]


def test_closing_the_store_revokes_its_leases(
    open_store: Callable[[], KeyValue], root: str
) -> None:
    leaving, staying = open_store(), open_store()
    leaving.put(f"{root}node", b"", lease=leaving.lease(60))
    assert staying.get(f"{root}node") is not None
    leaving.close()
    assert staying.get(f"{root}node") is None
