"""Checksummed JSON: a document that contains its own hash. Used for manifests and parts.

The file begins with ``{"xxh3_128": "<32 hex>",`` and a newline; the hash covers every byte after
that, so any flipped or missing byte is detected. It is strict JSON: no NaN, no duplicate
keys; one top-level field per line, for grep and diff.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from checkpoints.errors import CorruptCheckpoint

MAX_DOCUMENT_BYTES = 512 << 20  # about three million chunks: 48 TB of tensors

_BEFORE = b'{"xxh3_128": "'
_AFTER = b'",\n'
_PREFIX_BYTES = len(_BEFORE) + 32 + len(_AFTER)


Hasher = xxhash.xxh3_128
"""Incremental xxh3-128."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 as 32 hex digits. Releases the GIL for large inputs."""
    hashed = Hasher()
    hashed.update(data)  # unlike xxhash's functions, update() releases the GIL in every version
    return str(hashed.hexdigest())


def encode(fields: Mapping[str, object]) -> bytes:
    """The bytes of a document. Deterministic: equal fields give equal bytes."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, separators=(',', ':'))}"
        for key, value in fields.items()
    ]
    body = (",\n".join(lines) + "\n}\n").encode("ascii")
    return _BEFORE + digest(body).encode("ascii") + _AFTER + body


def decode(data: bytes, file: str) -> dict[str, Any]:
    """The fields of a document, without its hash. Raises :class:`CorruptCheckpoint`."""
    body = memoryview(data)[_PREFIX_BYTES:]
    if data[:_PREFIX_BYTES] != _BEFORE + digest(body).encode("ascii") + _AFTER:
        raise CorruptCheckpoint("its checksum does not match its content", file=file)
    try:
        fields = json.loads(
            data, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant
        )
    except (ValueError, RecursionError) as error:
        # The hash matches, so it was crafted: deep nesting, NaN, duplicate keys.
        raise CorruptCheckpoint(f"not strict JSON: {str(error)[:200]}", file=file) from error
    assert isinstance(fields, dict)  # it begins with a brace
    del fields["xxh3_128"]
    return fields


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("duplicate key in an object")
    return fields


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
