"""Object stores, accessed through fsspec's drivers.

fsspec has a maintained driver for every store (S3, GCS, Azure, …), each with its own credentials,
retries and multipart uploads. It is imported when the first URL is used.

An object appears atomically, and its name does not change:
:mod:`checkpoints.storage.object_storage` relies on these two properties only, not on folders or
renames.

A writer that is killed during a multipart upload leaves invisible parts that are billed: give the
bucket a lifecycle rule that aborts incomplete uploads.
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from checkpoints.errors import ArgumentError
from checkpoints.storage.object_store import ObjectInfo, Upload

# Smaller objects are sent in one request, larger ones in parts of this size (S3 allows 10,000).
PART_BYTES = 64 << 20
_CONFLICTS = 5  # attempts: S3 responds 409 during another conditional put of the same object


def open_url(url: str, **options: Any) -> FsspecObjects:
    """The store of a URL. ``options`` are passed to the fsspec driver.

    Raises :class:`ArgumentError` if there is no driver for its scheme.
    """
    scheme = url.partition("://")[0]
    try:
        import fsspec

        # A listings cache would hide the changes of other writers.
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        extra = "s3" if scheme in ("s3", "s3a") else "objects"
        raise ArgumentError(
            f"{url}: {error}", hint=f"pip install 'torch-elastic-harness[{extra}]'"
        ) from error
    except ValueError as error:
        raise ArgumentError(
            f"{url}: {error}", hint="Use a folder, or a URL such as s3://bucket/prefix."
        ) from error
    return FsspecObjects(fs, path, place=url)


class FsspecObjects:
    """Objects under a path of an fsspec file system."""

    def __init__(self, fs: Any, path: str, *, place: str | None = None) -> None:
        self._fs = fs
        self._path = path.rstrip("/")
        self.place = place if place is not None else f"{fs.protocol}:{path}"
        # Synchronous drivers share one file position among all readers.
        self._serialized = (
            contextlib.nullcontext() if getattr(fs, "async_impl", False) else threading.Lock()
        )

    def list(self, prefix: str) -> dict[str, ObjectInfo]:
        try:
            with self._request():
                found = self._fs.ls(self._key(prefix), detail=True)
        except FileNotFoundError:
            return {}
        entries = {}
        for info in found:
            name = info["name"].rstrip("/").rpartition("/")[2]
            # Some drivers list a prefix inside itself.
            if info["name"].rstrip("/") != self._key(prefix):
                entries[name] = _entry(info)
        return entries

    def stat(self, key: str) -> ObjectInfo:
        with self._request():
            entry = _entry(self._fs.info(self._key(key)))
        if entry.is_folder:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        return entry

    def get(self, key: str, begin: int, end: int) -> bytes:
        with self._request():
            return bytes(self._fs.cat_file(self._key(key), start=begin, end=end))

    def put(self, key: str, data: bytes, *, only_new: bool = False) -> None:
        path = self._key(key)
        with self._request():
            if not only_new:
                self._put(path, data)
            elif self._puts_in_one_request:
                self._put_new(path, data)
            elif self._fs.exists(path):
                raise FileExistsError(path)
            else:
                self._put(path, data)

    def _put(self, path: str, data: bytes) -> None:
        if self._puts_in_one_request:
            self._fs.pipe_file(path, data)
            return
        upload = self._fs.open(path, "wb", autocommit=False)
        upload.write(data)
        upload.close()
        upload.commit()

    def _put_new(self, path: str, data: bytes) -> None:
        """Conditional put; check-then-put for stores without it.

        Racing committers put identical bytes, so the fallback is safe: at worst, it reports
        success to both.
        """
        for _ in range(_CONFLICTS):
            try:
                self._fs.pipe_file(path, data, mode="create")
                return
            except Exception as error:
                self._fs.invalidate_cache()
                if self._fs.exists(path):
                    raise FileExistsError(path) from error
                if _lacks_conditional_put(error):
                    self._put(path, data)
                    return
                if "ConditionalRequestConflict" not in str(error):
                    raise
        raise OSError(
            errno.EAGAIN, "concurrent conditional puts of this object kept conflicting", path
        )

    def upload(self, key: str) -> Upload:
        return _Upload(self, key)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._request():
            self._fs.rm_file(self._key(key))

    def delete_prefix(self, prefix: str) -> None:
        if not getattr(self._fs, "async_impl", False):
            # Another writer may have put an object there.
            with contextlib.suppress(OSError), self._request():
                self._fs.rmdir(self._key(prefix))

    @property
    def _puts_in_one_request(self) -> bool:
        """Whether a put is a single request, unlike a file that is opened and written."""
        return getattr(self._fs, "async_impl", False) or _is_memory(self._fs)

    @property
    def supports_multipart(self) -> bool:
        """Whether an upload stays invisible until it finishes; not so in the memory driver."""
        return not _is_memory(self._fs)

    def begin_multipart(self, key: str) -> Any:
        with self._request():
            return self._fs.open(self._key(key), "wb", block_size=PART_BYTES, autocommit=False)

    def request(self) -> contextlib.AbstractContextManager[None]:
        return self._request()

    def _key(self, key: str) -> str:
        return f"{self._path}/{key}" if key else self._path

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        """Translate any exception of a driver into an ``OSError`` with an errno."""
        with self._serialized:
            try:
                yield
            except Exception as error:
                raise _as_os_error(error) from error


class _Upload:
    """Buffers small objects; sends larger ones in parts of :data:`PART_BYTES` while they are
    written."""

    def __init__(self, objects: FsspecObjects, key: str) -> None:
        self._objects = objects
        self._key = key
        self._small = bytearray()
        self._parts: Any = None

    def write(self, data: bytes | memoryview) -> None:
        if self._parts is None:
            self._small += data
            if len(self._small) < PART_BYTES or not self._objects.supports_multipart:
                return
            self._parts = self._objects.begin_multipart(self._key)
            data, self._small = bytes(self._small), bytearray()
        with self._objects.request():
            self._parts.write(data)

    def finish(self) -> None:
        if self._parts is None:
            self._objects.put(self._key, bytes(self._small))
            return
        with self._objects.request():
            self._parts.close()
            self._parts.commit()

    def abandon(self) -> None:
        if self._parts is not None:
            with self._objects.request():
                self._parts.discard()
                with contextlib.suppress(AttributeError):
                    self._parts.closed = True  # else its destructor would send the remainder


def _lacks_conditional_put(error: Exception) -> bool:
    """Whether the error means that the driver or the store lacks conditional puts."""
    return isinstance(error, (TypeError, NotImplementedError)) or "NotImplemented" in str(error)


def _is_memory(fs: Any) -> bool:
    protocol = fs.protocol
    return "memory" in ((protocol,) if isinstance(protocol, str) else protocol)


def _entry(info: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(
        size=int(info.get("size") or 0),
        modified_s=_modified_s(info),
        is_folder=info.get("type") == "directory",
    )


def _modified_s(info: Mapping[str, Any]) -> float:
    """Drivers differ in key and type. An unknown time counts as new."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return math.inf


def _as_os_error(error: Exception) -> OSError:
    text = f"{error}" or type(error).__name__
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, text)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, text)
    if "Credential" in type(error).__name__:
        return PermissionError(errno.EACCES, f"no usable credentials: {text}")
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, text)
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return OSError(errno.EIO, f"{type(error).__name__}: {text}")
