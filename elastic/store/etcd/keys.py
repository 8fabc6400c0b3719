"""Converts keys, ranges and entries to and from etcd's messages."""

from __future__ import annotations

from typing import Any

from elastic.store.keyvalue import Entry

_CODEC = ("utf-8", "surrogateescape")  # other keys need not be UTF-8, and are returned unchanged


def bytes_of(key: str) -> bytes:
    """The key as etcd stores it."""
    return key.encode(*_CODEC)


def key_of(key: bytes) -> str:
    """The key as this package names it."""
    return key.decode(*_CODEC)


def range_of(prefix: str) -> tuple[bytes, bytes]:
    """``key`` and ``range_end`` that cover every key starting with ``prefix``.

    >>> range_of("/elastic/")
    (b'/elastic/', b'/elastic0')
    >>> range_of("")
    (b'\\x00', b'\\x00')
    """
    start = bytes_of(prefix)
    if not start:
        return b"\0", b"\0"  # in etcd: from the first key, to the last
    end = start.rstrip(b"\xff")
    return start, end[:-1] + bytes((end[-1] + 1,)) if end else b"\0"


PAGE_KEYS = 500  # a reply is limited to 64 MiB, and a record to 1.5


def key_after(key: bytes) -> bytes:
    """The start of the page after the one that ends with ``key``."""
    return key + b"\0"


def entry_of(kv: Any) -> Entry:
    """An ``mvccpb.KeyValue`` as an Entry."""
    return Entry(key_of(kv.key), kv.value, kv.mod_revision, kv.lease)
