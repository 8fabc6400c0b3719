"""The contract of watches on every store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from etcd_fixtures import PATIENCE_S, Recorder, elastic_threads
from store_kinds import Backend

from elastic.store.keyvalue import Deleted, KeyValue, Put, Reset, WatchEvent


def follow(store: KeyValue, *prefixes: str, name: str = "test") -> Recorder:
    recorder = Recorder()
    store.watch(prefixes, recorder, name=name)
    recorder.wait_for(lambda r: r.resets)
    return recorder


def test_a_watch_begins_with_the_existing_keys(store: KeyValue, root: str) -> None:
    store.put(f"{root}b/2", b"2")
    revision = store.put(f"{root}a/1", b"1")
    store.put(f"{root}c/3", b"3")
    recorder = follow(store, f"{root}b/", f"{root}a/")
    first = recorder.events[0]
    assert isinstance(first, Reset)
    assert first.reason == "started"
    assert [e.key for e in first.snapshot.entries] == [f"{root}a/1", f"{root}b/2"]
    assert first.snapshot.entries[0].mod_revision == revision
    assert first.snapshot.revision >= revision


def test_every_change_is_reported_once_and_in_order(
    open_store: Callable[[], KeyValue], root: str
) -> None:
    watching, writing = open_store(), open_store()
    recorder = follow(watching, f"{root}nodes/", f"{root}world")
    expected: list[tuple[str, bytes | None]] = []
    for n in range(20):
        key = f"{root}nodes/{n % 3}"
        writing.put(key, b"%d" % n)
        expected.append((key, b"%d" % n))
        writing.put(f"{root}elsewhere", b"")
        if n % 5 == 0:
            writing.put(f"{root}world", b"%d" % n)
            writing.delete(key)
            expected += [(f"{root}world", b"%d" % n), (key, None)]
    recorder.wait_for(lambda r: len(r.changes) >= len(expected))
    assert recorder.changes == expected


def test_events_carry_the_revisions_that_swaps_need(store: KeyValue, root: str) -> None:
    recorder = follow(store, root)
    written = store.put(f"{root}a", b"1")
    assert store.compare_and_delete(f"{root}a", expected_revision=written)
    recorder.wait_for(lambda r: len(r.changes) == 2)
    put, deleted = recorder.events[1:]
    assert isinstance(put, Put) and put.entry == (put.entry.__class__)(f"{root}a", b"1", written)
    assert deleted == Deleted(f"{root}a", written + 1)


def test_a_key_under_two_prefixes_is_reported_once(store: KeyValue, root: str) -> None:
    recorder = follow(store, root, f"{root}nodes/", root)
    store.put(f"{root}nodes/1", b"1")
    store.put(f"{root}last", b"")
    recorder.wait_for(lambda r: (f"{root}last", b"") in r.changes)
    assert recorder.changes == [(f"{root}nodes/1", b"1"), (f"{root}last", b"")]


def test_the_end_of_a_lease_is_a_deletion(backend: Backend, store: KeyValue, root: str) -> None:
    lease = store.lease(60)
    store.put(f"{root}a", b"", lease=lease)
    recorder = follow(store, root)
    assert recorder.resets[0].snapshot.entries[0].lease_id == lease.id
    backend.expire(lease)
    recorder.wait_for(lambda r: r.changes)
    assert recorder.changes == [(f"{root}a", None)]


def test_a_watch_resumes_after_an_interruption(
    backend: Backend, open_store: Callable[[], KeyValue], root: str
) -> None:
    watching, writing = open_store(), open_store()
    recorder = follow(watching, f"{root}a/", f"{root}b/")
    expected: list[tuple[str, bytes | None]] = []
    for n in range(3):
        for key in (f"{root}a/k", f"{root}b/k"):
            writing.put(key, b"%d" % n)
            expected.append((key, b"%d" % n))
        if n == 1:
            backend.interrupt(watching)
            recorder.wait_for(lambda r: r.reconnections)
    recorder.wait_for(lambda r: len(r.changes) >= len(expected))
    assert sorted(recorder.changes) == sorted(expected)
    for prefix in (f"{root}a/", f"{root}b/"):
        assert [c for c in recorder.changes if c[0].startswith(prefix)] == [
            c for c in expected if c[0].startswith(prefix)
        ]
    assert [r.reason for r in recorder.resets] == ["started"]
    assert recorder.disconnections == recorder.reconnections


def test_nothing_is_called_after_a_watch_is_closed(store: KeyValue, root: str) -> None:
    recorder, witness = Recorder(), follow(store, root, name="witness")
    watch = store.watch([root], recorder, name="closed")
    recorder.wait_for(lambda r: r.resets)
    watch.close()
    watch.close()
    store.put(f"{root}a", b"")
    witness.wait_for(lambda r: r.changes)
    assert recorder.changes == []
    assert "elastic-watch-closed" not in elastic_threads()


def test_a_watch_may_be_closed_from_its_own_callback(store: KeyValue, root: str) -> None:
    seen: list[WatchEvent] = []
    ready, done = threading.Event(), threading.Event()

    def callback(event: WatchEvent) -> None:
        ready.wait(PATIENCE_S)
        seen.append(event)
        watch.close()
        done.set()

    watch = store.watch([root], callback, name="self-closing")
    witness = follow(store, root, name="witness")
    store.put(f"{root}a", b"")
    ready.set()
    assert done.wait(PATIENCE_S)
    witness.wait_for(lambda r: r.changes)
    watch.close()
    assert len(seen) == 1


def test_callbacks_run_on_the_watch_s_own_named_thread(store: KeyValue, root: str) -> None:
    names: list[str] = []
    called = threading.Event()

    def callback(event: WatchEvent) -> None:
        names.append(threading.current_thread().name)
        called.set()

    store.watch([root], callback, name="named")
    assert called.wait(PATIENCE_S)
    assert names[0] == "elastic-watch-named"


def test_a_closed_store_leaves_no_thread_behind(backend: Backend, root: str) -> None:
    before = elastic_threads()
    store = backend.open()
    store.lease(60)
    follow(store, root, name="left-behind")
    assert elastic_threads() > before
    store.close()
    assert elastic_threads() == before


def test_a_watch_begins_and_resumes_with_more_keys_than_a_page_holds(
    backend: Backend,
    open_store: Callable[[], KeyValue],
    root: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.store.etcd.PAGE_KEYS", 2)
    writing, watching = open_store(), open_store()
    for number in range(5):
        writing.put(f"{root}a/{number}", b"")
    writing.put(f"{root}b/1", b"")
    recorder = follow(watching, f"{root}a/", f"{root}b/")
    first = recorder.events[0]
    assert isinstance(first, Reset)
    assert len(first.snapshot.entries) == 6
    backend.interrupt(watching)
    writing.put(f"{root}a/5", b"")
    recorder.wait_for(lambda r: r.changes)
    assert [reset.reason for reset in recorder.resets] == ["started"]
    assert recorder.changes == [(f"{root}a/5", b"")]
