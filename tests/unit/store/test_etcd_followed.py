"""The state that a watch has followed, and whether a store still agrees with it."""

from __future__ import annotations

import pytest

from elastic.store.client import (
    CallFailure,
    Remedy,
    bytes_of,
    check_version,
    classify_text,
    key_of,
    range_of,
)
from elastic.store.etcd import Followed, without_covered
from elastic.store.keyvalue import Deleted, Entry, Put


def entry(key: str, revision: int, value: bytes = b"") -> Entry:
    return Entry(key, value, revision)


def by_key(*entries: Entry) -> dict[str, Entry]:
    return {one.key: one for one in entries}


def test_changes_are_complete_when_they_lead_to_the_state() -> None:
    followed = Followed("/", 5, by_key(entry("/a", 3), entry("/b", 5)))
    changes: list[Put | Deleted] = [Put(entry("/c", 6)), Deleted("/a", 7)]
    assert followed.would_be(changes, by_key(entry("/b", 5), entry("/c", 6)))
    assert not followed.would_be(changes[:1], by_key(entry("/b", 5), entry("/c", 6)))
    assert not followed.would_be(changes, by_key(entry("/b", 8), entry("/c", 6)))


def test_a_reported_change_is_applied() -> None:
    followed = Followed("/", 5, by_key(entry("/a", 3)))
    followed.apply(Put(entry("/b", 6)))
    followed.apply(Deleted("/a", 7))
    followed.apply(Deleted("/never-there", 8))
    assert (followed.revision, followed.entries) == (8, by_key(entry("/b", 6)))


@pytest.mark.parametrize(
    ("entries", "contradicts"),
    [
        ([entry("/a", 3)], False),
        ([], False),  # deleted since
        ([entry("/a", 9), entry("/b", 6)], False),  # written since
        ([entry("/a", 3, b"other")], True),
        ([entry("/a", 4)], True),
        ([entry("/b", 2)], True),  # existed before, but was never reported
    ],
)
def test_a_different_history_is_detected(entries: list[Entry], contradicts: bool) -> None:
    followed = Followed("/", 5, by_key(entry("/a", 3)))
    assert followed.contradicts(by_key(*entries)) is contradicts


def test_nested_prefixes_are_dropped() -> None:
    assert without_covered(["/a/b", "/c", "/a", "/a"]) == ["/a", "/c"]
    assert without_covered(["/x", ""]) == [""]


@pytest.mark.parametrize(
    ("prefix", "inside", "outside"),
    [
        ("/a/", ["/a/", "/a/b", "/a/ü"], ["/a", "/a0", "/b"]),
        ("ü", ["ü", "üa"], ["u", "ý"]),
        ("\udcff", ["\udcff", "\udcffa"], ["a"]),
    ],
)
def test_a_range_covers_its_prefix(prefix: str, inside: list[str], outside: list[str]) -> None:
    start, end = range_of(prefix)

    def covered(key: str) -> bool:
        return start <= bytes_of(key) and (end == b"\0" or bytes_of(key) < end)

    assert [key for key in inside + outside if covered(key)] == inside
    assert all(key_of(bytes_of(key)) == key for key in inside + outside)


@pytest.mark.parametrize("version", ["3.4.0", "3.5.1", "3.6.0-rc.1", "3.10.2", "4.0.0", "v3.5.9"])
def test_etcd_since_3_4_is_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["3.3.27", "2.3.8", "0.4.9", "", "unknown"])
def test_older_etcd_is_rejected(version: str) -> None:
    with pytest.raises(CallFailure) as caught:
        check_version(version)
    assert caught.value.remedy is Remedy.NOT_ETCD


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("etcdserver: invalid auth token", Remedy.LOGIN),
        ("etcdserver: revision of auth store is old", Remedy.LOGIN),
        ("etcdserver: authentication failed, invalid user ID or password", Remedy.REFUSED),
        ("etcdserver: user name is empty", Remedy.REFUSED),
        ("etcdserver: requested lease not found", Remedy.LEASE_GONE),
        ("etcdserver: mvcc: required revision has been compacted", Remedy.COMPACTED),
        ("etcdserver: mvcc: required revision is a future revision", Remedy.FUTURE),
        ("etcdserver: no leader", Remedy.MOVE),
        ("etcdserver: leader changed", Remedy.RETRY),
        ("etcdserver: request timed out", Remedy.RETRY),
        ("etcdserver: request timed out, possibly due to previous leader failure", Remedy.RETRY),
    ],
)
def test_error_messages_of_etcd_are_classified(text: str, remedy: Remedy) -> None:
    assert classify_text(text, otherwise=Remedy.FATAL).remedy is remedy
