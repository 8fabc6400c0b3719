"""Small files beside the checkpoints, for the program that saves them: whole or not there.

For notes of a few hundred bytes, such as who saves here. No power cut is survived on purpose:
a note is not a checkpoint, and costs no fsync.
"""

from __future__ import annotations

import secrets

from checkpoints.errors import ReadFailed
from checkpoints.storage.failures import writing
from checkpoints.storage.protocol import Storage

MAX_RECORD_BYTES = 64 << 10
_TEMPORARY = ".tmp-LATEST-record-"  # with LATEST's prefix: what is left over is swept


def write_record(storage: Storage, name: str, data: bytes) -> None:
    """Put ``data`` in place of the file ``name`` in the root. Raises :class:`SaveError`."""
    temporary = f"{_TEMPORARY}{secrets.token_hex(4)}"
    with writing(storage.place):
        sink = storage.create(temporary)
        try:
            sink.write(data)
        finally:
            sink.close()
        storage.rename(temporary, name)


def read_record(storage: Storage, name: str) -> bytes | None:
    """The content of a small file in the root; None if it is not there, or no small file.

    Raises :class:`ReadFailed` if the storage fails.
    """
    try:
        source = storage.open(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ReadFailed(f"{name} in {storage.place} cannot be read: {error}") from error
    try:
        size = source.size()
        if size > MAX_RECORD_BYTES:
            return None
        data = bytearray(size)
        return bytes(data[: source.read_at(0, memoryview(data))])
    except OSError as error:
        raise ReadFailed(f"{name} in {storage.place} cannot be read: {error}") from error
    finally:
        source.close()


def write_durably(storage: Storage, path: str, data: bytes) -> None:
    """Write a small file and make its content durable."""
    sink = storage.create(path)
    try:
        sink.write(data)
        sink.sync()
    finally:
        sink.close()
