"""Whether the memory use of a node fits its limit (``ELASTIC_MEMORY_LIMIT_BYTES``).

In a container ``/dev/shm`` counts towards the limit, and so do staging buffers of checkpoints. A
process above the limit is killed without a message, so a warning is logged beforehand. Pure: sizes
in, sentences out.
"""

from __future__ import annotations

# Per process, each as large as its share of the state (checkpoints/saving/engine.py).
STAGING_BUFFERS = 2
# The default of container runtimes.
RUNTIME_SHM_BYTES = 64 << 20


def shm_shortages(limit_bytes: int, shm_bytes: int) -> tuple[str, ...]:
    """The problems of a ``/dev/shm`` of that size."""
    if shm_bytes >= limit_bytes:
        return (
            f"/dev/shm may grow to {human(shm_bytes)}, and this node's memory is limited to "
            f"{human(limit_bytes)}: full, it gets the workers killed. Mount an emptyDir of medium "
            "Memory there, with a sizeLimit well below the limit",
        )
    if shm_bytes <= RUNTIME_SHM_BYTES:
        return (
            f"/dev/shm has {human(shm_bytes)}, the container runtime's default: data workers and "
            "NCCL need more, and end with a bus error. Mount an emptyDir of medium Memory there",
        )
    return ()


def staging_shortage(
    limit_bytes: int, used_bytes: int, share_bytes: int, world_size: int, local_size: int
) -> str | None:
    """Why a node would exceed its limit as the only remaining node of its job, or None.

    ``used_bytes`` is the memory of one worker, including its staging buffers of ``share_bytes``
    each. With fewer ranks, each rank stages a larger share.
    """
    used = used_bytes * local_size
    alone = STAGING_BUFFERS * share_bytes * (world_size - local_size)
    if used + alone <= limit_bytes:
        return None
    return (
        f"this node's workers use {human(used)}, and its memory is limited to "
        f"{human(limit_bytes)}: left alone, it would stage checkpoints in {human(alone)} more and "
        f"be killed. Raise the limit to {human(used + alone)} or more, or the minimum of nodes"
    )


def human(size_bytes: int) -> str:
    """A size for users.

    >>> human(3 << 30), human(64 << 20), human(5000)
    ('3.0 GiB', '64 MiB', '5000 bytes')
    """
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.1f} GiB"
    if size_bytes >= 1 << 20:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes} bytes"
