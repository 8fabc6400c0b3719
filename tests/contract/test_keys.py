"""The contract of keys on every store: reading, writing and swapping."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from elastic.errors import CoordinationError
from elastic.store.keyvalue import KeyValue


def test_a_missing_key_is_none_and_lists_empty(store: KeyValue, root: str) -> None:
    assert store.get(f"{root}a") is None
    assert store.list(root).entries == ()
    assert store.delete(f"{root}a") is False


def test_a_written_key_is_read_by_another_client(
    open_store: Callable[[], KeyValue], root: str
) -> None:
    writer, reader = open_store(), open_store()
    revision = writer.put(f"{root}a", b"\x00\xff")
    entry = reader.get(f"{root}a")
    assert entry is not None
    assert (entry.key, entry.value, entry.mod_revision, entry.lease_id) == (
        f"{root}a",
        b"\x00\xff",
        revision,
        0,
    )


def test_every_write_raises_the_revision_by_one(store: KeyValue, root: str) -> None:
    first = store.put(f"{root}a", b"1")
    assert store.put(f"{root}b", b"") == first + 1
    assert store.put(f"{root}a", b"1") == first + 2
    assert store.list(root).revision == first + 2
    assert store.delete(f"{root}b")
    assert store.list(root).revision == first + 3


def test_a_list_holds_the_prefix_in_key_order(store: KeyValue, root: str) -> None:
    for name in ("nodes/b", "nodes/a", "node", "nodesx", "nodes/ä", "nodes/"):
        store.put(root + name, name.encode())
    listed = store.list(f"{root}nodes/").entries
    assert [e.key.removeprefix(root) for e in listed] == ["nodes/", "nodes/a", "nodes/b", "nodes/ä"]
    assert listed[-1].value == "nodes/ä".encode()


def test_a_swap_succeeds_only_on_the_expected_revision(store: KeyValue, root: str) -> None:
    key = f"{root}world"
    first = store.compare_and_swap(key, b"1", expected_revision=0)
    assert first is not None
    assert store.compare_and_swap(key, b"2", expected_revision=0) is None
    second = store.compare_and_swap(key, b"2", expected_revision=first)
    assert second is not None and second > first
    assert store.compare_and_swap(key, b"3", expected_revision=first) is None
    entry = store.get(key)
    assert entry is not None and (entry.value, entry.mod_revision) == (b"2", second)


def test_a_swap_succeeds_only_while_its_basis_is_unchanged(store: KeyValue, root: str) -> None:
    key, world = f"{root}done", f"{root}world"
    assert store.compare_and_swap(key, b"1", expected_revision=0, basis=[(world, 1)]) is None
    absent = store.compare_and_swap(key, b"1", expected_revision=0, basis=[(world, 0)])
    assert absent is not None
    revision = store.put(world, b"8")
    assert store.compare_and_swap(key, b"2", expected_revision=None, basis=[(world, 0)]) is None
    second = store.compare_and_swap(key, b"2", expected_revision=None, basis=[(world, revision)])
    assert second is not None and second > absent


def test_one_of_two_swaps_with_the_same_bytes_succeeds(
    open_store: Callable[[], KeyValue], root: str
) -> None:
    one, other = open_store(), open_store()
    assert one.compare_and_swap(f"{root}leader", b"me", expected_revision=0) is not None
    assert other.compare_and_swap(f"{root}leader", b"me", expected_revision=0) is None


def test_concurrent_swaps_lose_no_update(open_store: Callable[[], KeyValue], root: str) -> None:
    key, rounds, clients = f"{root}counter", 5, [open_store() for _ in range(3)]
    clients[0].put(key, b"0")

    def count_up(client: KeyValue) -> None:
        for _ in range(rounds):
            swapped = None
            while swapped is None:
                entry = client.get(key)
                assert entry is not None
                swapped = client.compare_and_swap(
                    key, b"%d" % (int(entry.value) + 1), expected_revision=entry.mod_revision
                )

    threads = [threading.Thread(target=count_up, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entry = clients[0].get(key)
    assert entry is not None and int(entry.value) == rounds * len(clients)


def test_compare_and_delete_keeps_a_newer_version(store: KeyValue, root: str) -> None:
    key = f"{root}leader"
    old = store.put(key, b"old")
    new = store.put(key, b"new")
    assert store.compare_and_delete(key, expected_revision=old) is False
    assert store.get(key) is not None
    assert store.compare_and_delete(key, expected_revision=new) is True
    assert store.get(key) is None
    assert store.compare_and_delete(key, expected_revision=new) is False


def test_a_key_is_deleted_only_while_its_basis_is_unchanged(store: KeyValue, root: str) -> None:
    key, world = f"{root}nodes/a", f"{root}world"
    written, revision = store.put(key, b"left"), store.put(world, b"8")
    for expected in (written, None):
        assert not store.compare_and_delete(key, expected_revision=expected, basis=[(world, 0)])
    assert store.compare_and_delete(key, expected_revision=None, basis=[(world, revision)])
    assert store.get(key) is None


def test_keys_are_deleted_only_while_none_of_them_was_written(store: KeyValue, root: str) -> None:
    for name in ("a", "a/b", "nodes/b", "nodes2/b"):
        store.put(root + name, b"")
    keys, read = [f"{root}a", f"{root}nodes/"], store.list(root).revision
    joining = store.put(f"{root}nodes/c", b"")
    assert store.delete_unchanged(keys, revision=read) is False
    assert len(store.list(root).entries) == 5
    store.put(f"{root}nodes2/c", b"")  # another one
    assert store.delete_unchanged(keys, revision=joining) is True
    names = [entry.key.removeprefix(root) for entry in store.list(root).entries]
    assert names == ["a/b", "nodes2/b", "nodes2/c"]
    assert store.delete_unchanged(keys, revision=joining) is True, "nothing to delete"


def test_calls_on_a_closed_store_raise(store: KeyValue, root: str) -> None:
    store.close()
    with pytest.raises(CoordinationError, match="closed"):
        store.get(f"{root}a")
    with pytest.raises(CoordinationError, match="closed"):
        store.lease(5)
    with pytest.raises(CoordinationError, match="closed"):
        store.watch([root], lambda event: None, name="late")
    store.close()  # closing twice is allowed


def test_random_histories_match_a_plain_dictionary(store: KeyValue, root: str) -> None:
    chance, model = random.Random(7), dict[str, tuple[bytes, int]]()
    for step in range(150):
        key = root + chance.choice("abc")
        value, known = b"%d" % step, model.get(key, (b"", 0))[1]
        guess = known if chance.random() < 0.7 else max(0, known - 1)
        action = chance.choice(["put", "swap", "swap", "delete", "compare-delete"])
        if action == "put":
            model[key] = (value, store.put(key, value))
        elif action == "swap":
            revision = store.compare_and_swap(key, value, expected_revision=guess)
            assert (revision is not None) == (guess == known)
            if revision is not None:
                model[key] = (value, revision)
        elif action == "delete":
            assert store.delete(key) == (model.pop(key, None) is not None)
        elif known:
            assert store.compare_and_delete(key, expected_revision=guess) == (guess == known)
            if guess == known:
                del model[key]
        listed = {e.key: (e.value, e.mod_revision) for e in store.list(root).entries}
        assert listed == model


def test_a_long_prefix_is_read_in_pages(
    open_store: Callable[[], KeyValue], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply of etcd is limited in size, and a job's nodes are not."""
    monkeypatch.setattr("elastic.store.etcd.PAGE_KEYS", 2)
    store = open_store()
    for number in range(5):
        store.put(f"{root}nodes/{number}", b"%d" % number)
    last = store.put(f"{root}other", b"")
    snapshot = store.list(f"{root}nodes/")
    assert [e.value for e in snapshot.entries] == [b"0", b"1", b"2", b"3", b"4"]
    assert snapshot.revision >= last
    assert store.list(f"{root}nothing/").entries == ()
