"""One worker of a node goes first: for downloads and caches.

A file lock instead of a barrier: it needs no world, a crash or an exception of the first one
lets the next one try, and no worker can block the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from elastic.messages.environment import WORLD_VARIABLE
from elastic.secure_channel import private_files


@contextmanager
def node_first(turn: int, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """The body runs on one worker of this node first; once it succeeded, on the others
    concurrently.

    ``turn`` numbers the uses within a script, the same on all workers. An exception is raised where
    it happened, and the next worker is then the first.
    """
    path = _lock_path(env)
    token = _token(turn, env)
    descriptor = private_files.open_lock(path)  # a name that others can foresee
    try:
        while not _may_follow(descriptor, token):
            if _try_first(descriptor):
                if _is_done(descriptor, token):
                    continue
                yield
                _mark_done(descriptor, token)
                return
        yield
    finally:
        os.close(descriptor)  # releases the lock, too


def _may_follow(descriptor: int, token: bytes) -> bool:
    """Wait until no worker is first; True once one has succeeded."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return _is_done(descriptor, token)


def _try_first(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_done(descriptor: int, token: bytes) -> bool:
    size = os.fstat(descriptor).st_size
    return token in os.pread(descriptor, size, 0).splitlines()


def _mark_done(descriptor: int, token: bytes) -> None:
    os.lseek(descriptor, 0, os.SEEK_END)
    os.write(descriptor, token + b"\n")


def _lock_path(env: Mapping[str, str]) -> Path:
    job = f"{env.get('TORCHELASTIC_RUN_ID', os.getpid())}-{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"elastic-{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def _token(turn: int, env: Mapping[str, str]) -> bytes:
    """Names this use among all of this job on this machine: several agents may share it."""
    agent = env.get("ELASTIC_NODE_ID", env.get("GROUP_RANK", ""))
    attempt = env.get(WORLD_VARIABLE, env.get("TORCHELASTIC_RESTART_COUNT", ""))
    return f"{agent} {attempt} {env.get('MASTER_PORT', '')} {turn}".encode()
