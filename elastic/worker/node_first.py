"""Run an operation in one worker of a node first, such as a download or filling a cache.

A file lock instead of a barrier: it needs no world, the next worker tries after a crash or an
exception of the first one, and no worker can block the others.
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
    """Run the body on one worker of this node first and, once it has succeeded, on the others
    concurrently.

    ``turn`` numbers the uses within a script, equally on all workers. An exception propagates in
    the worker that raised it, and the next worker then runs first.
    """
    path = _lock_path(env)
    token = _token(turn, env)
    descriptor = private_files.open_lock(path)  # other users can predict its name
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
    """Wait while a worker runs first. Returns whether one has succeeded."""
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
    """Identifies this use among all of this job on this machine, which agents may share."""
    agent = env.get("ELASTIC_NODE_ID", env.get("GROUP_RANK", ""))
    attempt = env.get(WORLD_VARIABLE, env.get("TORCHELASTIC_RESTART_COUNT", ""))
    return f"{agent} {attempt} {env.get('MASTER_PORT', '')} {turn}".encode()
