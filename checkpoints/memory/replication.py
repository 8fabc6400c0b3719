"""Replicates the newest parts of this node's memory to a peer, so that they survive this node.

Runs on one thread of the process that owns the memory; workers never wait for a peer. The newest
parts are replicated first, and superseded ones are skipped: a slow network means older replicas,
not a growing queue. A failing peer is retried with exponential backoff.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from checkpoints.format.names import CheckpointName, parse_part_file, part_file, writer_file
from checkpoints.intervals import (
    PEER_REQUEST_S,
    REPLICATION_FIRST_BACKOFF_S,
    REPLICATION_MAX_BACKOFF_S,
    REPLICATION_POLL_S,
    UNUSED_MEMORY_POLL_S,
)
from checkpoints.memory.node_memory import NodeMemory
from checkpoints.memory.peer_storage import PeerAddress, PeerStorage
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.tls import Tls

# The newest checkpoint may lack the parts of other ranks; the one before it rarely does.
_NEWEST = 2


@dataclass(frozen=True, kw_only=True)
class ReplicationOutcome:
    """The outcome of replicating one part."""

    name: str
    rank: int
    peer: str  # a node
    size_bytes: int
    duration_s: float
    reason: str = ""  # why it failed; empty on success


class Replicator:
    """Copies parts to the node that ``peer`` returns before each copy; None pauses replication.

    ``on_outcome`` is called for every copy, ``on_error`` if the thread dies; both on its thread.
    """

    def __init__(
        self,
        own: NodeMemory,
        peer: Callable[[], PeerAddress | None],
        *,
        key: Callable[[], SecretKey],
        tls: Tls | None = None,
        on_outcome: Callable[[ReplicationOutcome], object] = lambda outcome: None,
        on_error: Callable[[BaseException], object] = lambda error: None,
        timeout_s: float = PEER_REQUEST_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._peer = peer
        self._key = key
        self._tls = tls
        self._on_outcome = on_outcome
        self._on_error = on_error
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._done: set[tuple[CheckpointName, int]] = set()
        self._address: PeerAddress | None = None
        self._client: PeerStorage | None = None
        self._failures = 0
        self._not_before_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-copier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and join the thread; a copy in flight is interrupted."""
        self._closing.set()
        client = self._client
        if client is not None:
            client.close()
        self._thread.join()

    def _run(self) -> None:
        is_used = False
        try:
            while not self._closing.wait(REPLICATION_POLL_S if is_used else UNUSED_MEMORY_POLL_S):
                is_used = bool(self._own.names())
                self._follow(self._peer())
                while self._may_copy() and self._copy_one():
                    pass
        except BaseException as error:  # noqa: BLE001  reported to the owner
            self._on_error(error)
        finally:
            self._follow(None)

    def _may_copy(self) -> bool:
        return not self._closing.is_set() and self._monotonic() >= self._not_before_s

    def _backoff_s(self) -> float:
        return min(
            REPLICATION_FIRST_BACKOFF_S * 2.0 ** min(self._failures - 1, 10),
            REPLICATION_MAX_BACKOFF_S,
        )

    def _follow(self, address: PeerAddress | None) -> None:
        """Switch to another peer, which holds no replicas yet."""
        if address == self._address:
            return
        if self._client is not None:
            self._client.close()
        self._address, self._failures, self._not_before_s = address, 0, 0.0
        self._client = (
            PeerStorage(
                address,
                key=self._key,
                tls=self._tls,
                timeout_s=self._timeout_s,
                monotonic=self._monotonic,
            )
            if address is not None
            else None
        )
        self._done.clear()

    def _copy_one(self) -> bool:
        """Replicate the newest missing part; False if there is none, or if it failed."""
        client = self._client
        if client is None or self._peer() != self._address:
            return False
        for name, rank, world_size in self._missing_parts():
            return self._copy(client, name, rank, world_size)
        return False

    def _missing_parts(self) -> Iterator[tuple[CheckpointName, int, int]]:
        names = self._own.names()[:_NEWEST]
        self._done = {(name, rank) for name, rank in self._done if name in names}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # superseded and removed
                for ranks in map(parse_part_file, self._own.list(name.attempt)):
                    if ranks is not None and (name, ranks[0]) not in self._done:
                        yield name, *ranks

    def _copy(self, client: PeerStorage, name: CheckpointName, rank: int, world_size: int) -> bool:
        began_s = self._monotonic()
        size, reason = 0, ""
        try:
            # The part file last: it declares the other file complete.
            for file in (writer_file(rank, world_size), part_file(rank, world_size)):
                path = f"{name.attempt}/{file}"
                with contextlib.closing(self._own.open(path)) as source:
                    client.put(path, source)
                    size += source.size()
        except FileNotFoundError:
            self._done.add((name, rank))  # superseded and removed
            return True
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
        if reason:
            self._failures += 1
            self._not_before_s = self._monotonic() + self._backoff_s()
        else:
            self._failures = 0
            self._done.add((name, rank))
        if not self._closing.is_set():
            self._report(name, rank, size, began_s, reason)
        return not reason

    def _report(
        self, name: CheckpointName, rank: int, size: int, began_s: float, reason: str
    ) -> None:
        assert self._address is not None
        self._on_outcome(
            ReplicationOutcome(
                name=str(name),
                rank=rank,
                peer=self._address.node,
                size_bytes=size,
                duration_s=self._monotonic() - began_s,
                reason=reason,
            )
        )
