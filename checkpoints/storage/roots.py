"""Resolves a checkpoint root (a path, a URL or a storage) to a storage."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from checkpoints.errors import ArgumentError
from checkpoints.storage.fsspec_store import open_url
from checkpoints.storage.local import LocalStorage
from checkpoints.storage.object_storage import ObjectStorage
from checkpoints.storage.protocol import Storage

Root = str | os.PathLike[str] | Storage
"""A checkpoint root: a local path, the URL of an object store, or a storage."""


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):(/+)")


def storage_for(root: Root) -> Storage:
    """The storage of a root.

    A string that begins with a scheme is a URL: ``s3://bucket/prefix``, ``memory://jobs``;
    a ``file://`` URL is a path. In a path, ``~`` is expanded. Raises :class:`ArgumentError` if the
    driver of a URL is not installed, and for a URL that was turned into a path.
    """
    if not isinstance(root, (str, os.PathLike)):
        return root
    text = os.fspath(root)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return LocalStorage(os.path.expanduser(text))
    is_url = isinstance(root, str) and len(scheme[2]) > 1
    if scheme[1].lower() in ("file", "local"):
        return LocalStorage(_path_of(text) if is_url else text)
    if not is_url:
        raise ArgumentError(
            f"{root!r} is a path, but looks like a URL",
            hint=f"Pass the URL as a str: {scheme[1]}://… (pathlib.Path removes a slash); for a "
            f"folder of this name, ./{text}.",
        )
    return ObjectStorage(open_url(text))


def _path_of(url: str) -> str:
    """The path of a ``file://`` URL. Raises :class:`ArgumentError` for one on another host."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "local":
        return rest
    host, slash, path = rest.partition("/")
    if slash and host.lower() not in ("", "localhost"):
        raise ArgumentError(
            f"{url} names a folder on the host {host!r}",
            hint=f"Mount it, and pass its path; for a relative path, {rest!r}.",
        )
    return unquote(slash + path if slash else rest)
