"""A closed store leaves nothing behind; a broken callback is not silent."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import psutil
from etcd_fixtures import PATIENCE_S, Recorder, elastic_threads

from elastic.store.client import EtcdConfig, parse_endpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.store.keyvalue import WatchEvent
from elastic.testing.waiting import eventually

Connect = Callable[..., EtcdStore]


def use_and_close(endpoint: str, root: str) -> None:
    store = EtcdStore(EtcdConfig(endpoints=parse_endpoints(endpoint), connect_timeout_s=PATIENCE_S))
    recorder = Recorder()
    store.watch([root, f"{root}x"], recorder, name="leak")
    store.put(f"{root}a", b"", lease=store.lease(5))
    recorder.wait_for(lambda r: r.resets)
    store.close()


def test_a_closed_store_releases_its_threads_and_descriptors(
    shared_etcd: EmbeddedEtcd, root: str
) -> None:
    process, before = psutil.Process(), elastic_threads()
    for _ in range(3):  # gRPC keeps some of its own after the first use
        use_and_close(shared_etcd.endpoint, root)
    descriptors, threads = process.num_fds(), threading.active_count()
    for _ in range(10):
        use_and_close(shared_etcd.endpoint, root)
    eventually(lambda: process.num_fds() <= descriptors + 2, "descriptors are closed")
    eventually(lambda: threading.active_count() <= threads, "threads have ended")
    assert elastic_threads() <= before


def test_closed_watches_and_leases_are_not_kept(shared_etcd: EmbeddedEtcd, root: str) -> None:
    """Each term of leadership has a watch of all nodes, and each lost lease a successor."""
    store = EtcdStore(
        EtcdConfig(endpoints=parse_endpoints(shared_etcd.endpoint), connect_timeout_s=PATIENCE_S)
    )
    closed: list[weakref.ref[object]] = []
    for _ in range(5):
        recorder = Recorder()
        watch, lease = store.watch([root], recorder, name="term"), store.lease(5)
        recorder.wait_for(lambda r: r.resets)
        watch.close()
        lease.close(revoke=False)
        closed += [weakref.ref(watch), weakref.ref(lease)]
        del watch, lease
    store.watch([root], Recorder(), name="last")
    store.lease(5)

    def released() -> bool:
        gc.collect()
        return not any(reference() is not None for reference in closed)

    eventually(released)
    store.close()


def test_a_store_closes_while_etcd_is_frozen(own_etcd: EmbeddedEtcd) -> None:
    before = elastic_threads()
    store = EtcdStore(EtcdConfig(endpoints=parse_endpoints(own_etcd.endpoint)))
    recorder = Recorder()
    store.watch(["/"], recorder, name="frozen")
    store.lease(5)
    recorder.wait_for(lambda r: r.resets)
    own_etcd.pause()
    thread = threading.Thread(target=store.close)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert elastic_threads() <= before


def test_a_callback_that_raises_is_reported_to_the_owner(
    shared_etcd: EmbeddedEtcd, root: str
) -> None:
    crashes: list[tuple[str, BaseException]] = []
    before = elastic_threads()
    store = EtcdStore(
        EtcdConfig(endpoints=parse_endpoints(shared_etcd.endpoint)),
        on_crash=lambda name, error: crashes.append((name, error)),
    )
    mistake = ValueError("a bug in the callback")

    def callback(event: WatchEvent) -> None:
        raise mistake

    watch = store.watch([root], callback, name="broken")
    eventually(lambda: crashes, "the crash is reported")
    assert crashes == [("elastic-watch-broken", mistake)]
    assert store.put(f"{root}a", b"") > 0  # the other watches continue
    watch.close()
    store.close()
    assert elastic_threads() <= before
