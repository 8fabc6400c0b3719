"""Resolves a checkpoint root (a path, a URL or a storage) to a storage."""

from __future__ import annotations

import os
import re

from checkpoints.storage.fsspec_store import open_url
from checkpoints.storage.local import LocalStorage
from checkpoints.storage.object_storage import ObjectStorage
from checkpoints.storage.protocol import Storage

Root = str | os.PathLike[str] | Storage
"""A checkpoint root: a local path, the URL of an object store, or a storage."""


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def storage_for(root: Root) -> Storage:
    """The storage of a root.

    A string that begins with a scheme is a URL: ``s3://bucket/prefix``, ``memory://jobs``;
    a ``file://`` URL is a path. Raises :class:`ArgumentError` if its driver is not installed.
    """
    if not isinstance(root, (str, os.PathLike)):
        return root
    scheme = _SCHEME.match(root) if isinstance(root, str) else None
    if scheme is None:
        return LocalStorage(root)
    if scheme[1].lower() in ("file", "local"):
        return LocalStorage(str(root)[scheme.end() :])
    return ObjectStorage(open_url(str(root)))
