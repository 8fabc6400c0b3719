"""Watches, leases and calls while etcd is killed, frozen or wiped."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from etcd_fixtures import PATIENCE_S, Recorder
from etcd_proxy import CuttingProxy

from elastic.errors import LeaseGone, StoreUnreachable
from elastic.store.client import load_grpc, load_rpc
from elastic.store.embedded import EmbeddedCluster, EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.store.keyvalue import Disconnected, Reconnected, Reset
from elastic.testing.waiting import eventually

Connect = Callable[..., EtcdStore]


@pytest.fixture
def proxy(own_etcd: EmbeddedEtcd) -> Iterator[CuttingProxy]:
    with CuttingProxy(own_etcd.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as cluster:
        yield cluster


def follow(store: EtcdStore, *prefixes: str) -> Recorder:
    recorder = Recorder()
    store.watch(prefixes, recorder, name="test")
    recorder.wait_for(lambda r: r.resets)
    return recorder


def member_of(cluster: EmbeddedCluster, store: EtcdStore) -> EmbeddedEtcd:
    """The member that the store uses now."""
    used = eventually(lambda: store.endpoint, "the store is connected")
    return next(m for m in cluster.members if used is not None and m.port == used.port)


def contact_since(store: EtcdStore, when_s: float) -> Callable[[], bool]:
    return lambda: store.last_contact_s > when_s


def reached(items: list[bytes], count: int) -> bool:
    return len(items) >= count


# -- watches across an outage --------------------------------------------------


def test_changes_during_an_outage_are_delivered_in_order_exactly_once(
    connect: Connect, own_etcd: EmbeddedEtcd, proxy: CuttingProxy
) -> None:
    direct, behind = connect(own_etcd.endpoint), connect(proxy.endpoint)
    direct.put("/a/gone", b"")
    recorder = follow(behind, "/a/", "/b/")
    proxy.cut()
    recorder.wait_for(lambda r: r.disconnections)
    expected: list[tuple[str, bytes | None]] = []
    for n in range(30):
        key = ("/a/k", "/b/k")[n % 2]
        direct.put(key, b"%d" % n)
        direct.put("/elsewhere", b"")
        expected.append((key, b"%d" % n))
    direct.delete("/a/gone")
    expected.append(("/a/gone", None))
    proxy.restore()
    recorder.wait_for(lambda r: len(r.changes) >= len(expected))
    direct.put("/b/last", b"")
    recorder.wait_for(lambda r: ("/b/last", b"") in r.changes)
    assert recorder.changes == [*expected, ("/b/last", b"")]
    kinds = [type(e) for e in recorder.events if isinstance(e, Reset | Disconnected | Reconnected)]
    assert kinds == [Reset, Disconnected, Reconnected]


def test_a_compaction_during_an_outage_resets_the_watch(
    connect: Connect, own_etcd: EmbeddedEtcd, proxy: CuttingProxy
) -> None:
    direct, behind = connect(own_etcd.endpoint), connect(proxy.endpoint)
    direct.put("/a/old", b"1")
    recorder = follow(behind, "/a/")
    proxy.cut()
    recorder.wait_for(lambda r: r.disconnections)
    direct.delete("/a/old")
    newest = direct.put("/a/new", b"2")
    with load_grpc().insecure_channel(own_etcd.endpoint) as channel:
        request = load_rpc().CompactionRequest(revision=newest, physical=True)
        load_rpc().KVStub(channel).Compact(request, timeout=PATIENCE_S)
    proxy.restore()
    recorder.wait_for(lambda r: len(r.resets) == 2)
    assert recorder.resets[1].reason == "compacted"
    assert [e.key for e in recorder.resets[1].snapshot.entries] == ["/a/new"]
    direct.put("/a/new", b"3")
    recorder.wait_for(lambda r: ("/a/new", b"3") in r.changes)
    assert recorder.changes == [("/a/new", b"3")]


def test_a_wiped_etcd_is_detected_and_watched_again(
    connect: Connect, own_etcd: EmbeddedEtcd
) -> None:
    store = connect(own_etcd.endpoint, request_timeout_s=PATIENCE_S)
    for n in range(30):
        store.put("/a/k", b"%d" % n)
    recorder = follow(store, "/a/", "/b")
    own_etcd.wipe()
    own_etcd.start()
    recorder.wait_for(lambda r: len(r.resets) == 2)
    assert recorder.resets[1].reason == "wiped"
    assert recorder.resets[1].snapshot.entries == ()
    assert recorder.resets[1].snapshot.revision < recorder.resets[0].snapshot.revision
    store.put("/a/k", b"again")
    recorder.wait_for(lambda r: r.changes == [("/a/k", b"again")])


def test_a_wiped_etcd_beyond_the_old_revision_is_detected(
    connect: Connect, own_etcd: EmbeddedEtcd, proxy: CuttingProxy
) -> None:
    # Same name and addresses: etcd computes the same cluster id, so only the history differs.
    behind = connect(proxy.endpoint)
    for n in range(5):
        behind.put("/a/k", b"%d" % n)
    recorder = follow(behind, "/a/")
    proxy.cut()
    recorder.wait_for(lambda r: r.disconnections)
    own_etcd.wipe()
    own_etcd.start()
    direct = connect(own_etcd.endpoint)
    for n in range(20):
        direct.put("/a/k", b"new %d" % n)
    assert direct.list("/").revision > recorder.resets[0].snapshot.revision
    proxy.restore()
    recorder.wait_for(lambda r: len(r.resets) == 2)
    assert recorder.resets[1].reason == "wiped"
    assert recorder.resets[1].snapshot.entries[0].value == b"new 19"
    assert recorder.changes == []


def test_a_wiped_and_compacted_etcd_is_reported_as_wiped(
    connect: Connect, own_etcd: EmbeddedEtcd, proxy: CuttingProxy
) -> None:
    behind = connect(proxy.endpoint)
    behind.put("/a/k", b"before")
    behind.put("/a/k", b"before")
    recorder = follow(behind, "/a/")
    proxy.cut()
    recorder.wait_for(lambda r: r.disconnections)
    own_etcd.wipe()
    own_etcd.start()
    direct = connect(own_etcd.endpoint)
    direct.put("/a/other", b"after")
    newest = [direct.put("/b", b"") for _ in range(10)][-1]
    with load_grpc().insecure_channel(own_etcd.endpoint) as channel:
        request = load_rpc().CompactionRequest(revision=newest, physical=True)
        load_rpc().KVStub(channel).Compact(request, timeout=PATIENCE_S)
    proxy.restore()
    recorder.wait_for(lambda r: len(r.resets) == 2)
    assert recorder.resets[1].reason == "wiped"


# -- leases ---------------------------------------------------------------------------------


def test_a_lease_outlives_an_outage_longer_than_its_ttl(
    connect: Connect, own_etcd: EmbeddedEtcd
) -> None:
    store, lost = connect(own_etcd.endpoint, request_timeout_s=PATIENCE_S), threading.Event()
    lease = store.lease(2, on_lost=lost.set)
    store.put("/node", b"", lease=lease)
    recorder = follow(store, "/node")
    own_etcd.kill()
    assert not lost.wait(lease.ttl_s * 1.5)  # the outage itself
    own_etcd.start()
    recorder.wait_for(lambda r: r.reconnections)
    # It would expire now if renewal had stopped at the first error.
    assert not lost.wait(lease.ttl_s * 1.5)
    assert store.get("/node") is not None
    assert recorder.changes == []


def test_a_lease_on_a_wiped_etcd_is_lost(connect: Connect, own_etcd: EmbeddedEtcd) -> None:
    store, lost = connect(own_etcd.endpoint, request_timeout_s=PATIENCE_S), threading.Event()
    lease = store.lease(2, on_lost=lost.set)
    own_etcd.wipe()
    own_etcd.start()
    assert lost.wait(PATIENCE_S)
    with pytest.raises(LeaseGone):
        store.put("/node", b"", lease=lease)


def test_a_lease_that_is_not_renewed_expires(connect: Connect, own_etcd: EmbeddedEtcd) -> None:
    leaving, staying = connect(own_etcd.endpoint), connect(own_etcd.endpoint)
    lease = leaving.lease(2)
    leaving.put("/node", b"", lease=lease)
    recorder = follow(staying, "/node")
    lease.close(revoke=False)
    recorder.wait_for(lambda r: r.changes == [("/node", None)])


# -- calls ----------------------------------------------------------------------------------


def test_calls_fail_while_etcd_is_down_and_succeed_once_it_is_back(
    connect: Connect, own_etcd: EmbeddedEtcd
) -> None:
    store = connect(own_etcd.endpoint, request_timeout_s=1)
    store.put("/a", b"1")
    own_etcd.kill()
    contact_s = store.last_contact_s
    with pytest.raises(StoreUnreachable, match=f"{own_etcd.endpoint}: connection refused"):
        store.get("/a")
    assert store.last_contact_s == contact_s
    own_etcd.start()
    entry = connect(own_etcd.endpoint).get("/a")
    assert entry is not None and entry.value == b"1"

    def back() -> bool:
        try:
            return store.get("/a") == entry
        except StoreUnreachable:
            return False

    eventually(back, "the store works again")
    assert store.last_contact_s > contact_s


def test_a_call_outlasts_a_short_outage(connect: Connect, own_etcd: EmbeddedEtcd) -> None:
    store = connect(own_etcd.endpoint, request_timeout_s=PATIENCE_S)
    own_etcd.kill()
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(store.put("/a", b"1")))
    thread.start()
    own_etcd.start()
    thread.join(PATIENCE_S)
    assert len(results) == 1


def test_an_idle_store_keeps_probing_etcd(connect: Connect, own_etcd: EmbeddedEtcd) -> None:
    store = connect(own_etcd.endpoint)
    for _ in range(2):
        eventually(contact_since(store, store.last_contact_s), "etcd is asked")


# -- three members --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_the_store_fails_over_from_a_dead_member(
    connect: Connect, cluster: EmbeddedCluster, root: str, how: str
) -> None:
    cluster.start()
    store = connect(cluster.endpoint, request_timeout_s=PATIENCE_S)
    other = connect(cluster.endpoint, request_timeout_s=PATIENCE_S)
    lost = threading.Event()
    store.put(f"{root}node", b"", lease=store.lease(6, on_lost=lost.set))
    recorder = follow(store, root)
    victim = member_of(cluster, store)
    (victim.kill if how == "kill" else victim.pause)()
    try:
        # No calls are made through the store: its watch must detect the failure on its own.
        recorder.wait_for(lambda r: r.reconnections)
        assert member_of(cluster, store) is not victim
        other.put(f"{root}a", b"1")
        recorder.wait_for(lambda r: r.changes == [(f"{root}a", b"1")])
        assert store.put(f"{root}b", b"2") > 0
        assert not lost.is_set()
    finally:
        if how == "pause":
            victim.resume()
        cluster.start()


def test_a_call_to_a_frozen_member_fails_over_to_another_one(
    connect: Connect, cluster: EmbeddedCluster, root: str
) -> None:
    cluster.start()
    store = connect(cluster.endpoint, request_timeout_s=PATIENCE_S)
    victim = member_of(cluster, store)
    victim.pause()
    try:
        assert store.put(f"{root}a", b"1") > 0
        assert member_of(cluster, store) is not victim
    finally:
        victim.resume()


def test_a_watch_on_a_member_without_quorum_is_disconnected(
    connect: Connect, cluster: EmbeddedCluster, root: str
) -> None:
    cluster.start()
    store = connect(cluster.endpoint, request_timeout_s=1)
    recorder = follow(store, root)
    left = member_of(cluster, store)
    others = [member for member in cluster.members if member is not left]
    for member in others:
        member.kill()
    recorder.wait_for(lambda r: r.disconnections)
    with pytest.raises(StoreUnreachable) as caught:
        store.get(f"{root}a")
    assert all(endpoint in caught.value.message for endpoint in cluster.endpoints)
    cluster.start()
    recorder.wait_for(lambda r: r.reconnections)
    patient = connect(cluster.endpoint, request_timeout_s=PATIENCE_S)
    patient.put(f"{root}a", b"1")
    recorder.wait_for(lambda r: r.changes == [(f"{root}a", b"1")])


def test_killing_each_member_in_turn_loses_no_event(
    connect: Connect, cluster: EmbeddedCluster, root: str
) -> None:
    cluster.start()
    writing = connect(cluster.endpoint, request_timeout_s=PATIENCE_S)
    watching = connect(cluster.endpoint, request_timeout_s=PATIENCE_S)
    recorder = follow(watching, root)
    stop, written = threading.Event(), list[bytes]()

    def write() -> None:
        while not stop.is_set():
            value = b"%d" % len(written)
            writing.put(f"{root}k", value)
            written.append(value)
            time.sleep(0.005)  # paces the writes; not a synchronisation

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for member in cluster.members:
            member.kill()
            goal = len(written) + 5
            eventually(functools.partial(reached, written, goal), "writes go on")
            member.start()
    finally:
        stop.set()
        thread.join()
    recorder.wait_for(lambda r: (f"{root}k", written[-1]) in r.changes)
    revisions = [e.entry.mod_revision for e in recorder.events if hasattr(e, "entry")]
    assert revisions == sorted(set(revisions))
    # A retried write may appear twice in etcd's history, at two revisions.
    values = [int(value) for _, value in recorder.changes if value is not None]
    assert list(dict.fromkeys(values)) == list(range(len(written)))
