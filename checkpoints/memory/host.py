"""Hosts the memory tier of a node: the folder, the server for peers, and the replication.

For a process that outlives the workers, such as an agent. Workers receive only the path of the
folder. A file in it, readable by this user only and updated with the world, holds the addresses of
the other nodes and the key to their memory (:func:`memory_roots`)::

    host = MemoryHost(
        folder,
        host="10.0.0.7",
        credentials=Credentials(key=job_key, identity="node-7"),
        neighbours=lambda: Neighbours(others, next_one),
    )
    …
    host.close()
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from checkpoints.intervals import PEER_REQUEST_S
from checkpoints.memory.node_memory import COPIES, OWN, NodeMemory
from checkpoints.memory.peer_server import PeerServer
from checkpoints.memory.peer_storage import PeerAddress, PeerStorage
from checkpoints.memory.replication import ReplicationOutcome, Replicator
from checkpoints.policies.retention import LatestN, RetentionFunction
from checkpoints.storage.roots import Root
from elastic.secure_channel import private_files
from elastic.secure_channel.handshake import Credentials
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.limits import Report
from elastic.secure_channel.tls import Tls, TlsFiles

NODE_FILE = "node.json"
KEEP: RetentionFunction = LatestN(3)  # the ranks may be two saves apart


@dataclass(frozen=True)
class Neighbours:
    """The other nodes of the current world, and which of them receives this node's replicas.

    ``further`` are the nodes after the successor, which receive any additional replicas.
    """

    peers: tuple[PeerAddress, ...] = ()
    successor: PeerAddress | None = None
    further: tuple[PeerAddress, ...] = ()

    def receiver(self, number: int) -> PeerAddress | None:
        """The node that receives replica ``number``, from 0; None if there is none."""
        if number == 0:
            return self.successor
        return self.further[number - 1] if number <= len(self.further) else None


def _unshared_credentials() -> Credentials:
    """Credentials with which no peer can connect."""
    key = SecretKey.generate()
    return Credentials(key=lambda: key)


class MemoryHost:
    """Creates ``folder`` (mode 0700); :meth:`close` removes it. Raises ``OSError``.

    ``limit_bytes`` limits this node's own parts, and the replicas of each other node. ``replicas``
    is the number of nodes that receive this node's parts; that many adjacent nodes may be lost at
    once. ``neighbours`` and the key of ``credentials`` are called periodically and by
    :meth:`refresh`. All hosts of a job share one key, and each has its own identity. Without
    credentials no peer can connect. TLS, if configured, protects all connections to and from other
    hosts, including those of this node's workers.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        host: str = "",
        credentials: Credentials | None = None,
        limit_bytes: int | None = None,
        replicas: int = 1,
        neighbours: Callable[[], Neighbours] = Neighbours,
        report: Report = lambda line: None,
        on_outcome: Callable[[ReplicationOutcome], object] = lambda outcome: None,
        on_error: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        self._neighbours = neighbours
        credentials = credentials or _unshared_credentials()
        self._key = credentials.key
        self._tls = credentials.tls
        self._known = Neighbours()
        self._known_key = self._key()
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700)
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            own = NodeMemory(self._folder / OWN, limit_bytes=limit_bytes)
            most = limit_bytes * replicas if limit_bytes is not None else None
            copies = NodeMemory(self._folder / COPIES, limit_bytes=most)
            for memory in (own, copies):
                memory.make_folder("")
            self._write()
            self._server = PeerServer(
                own,
                copies,
                credentials=credentials,
                host=host,
                keep=KEEP,
                report=report,
                on_error=on_error,
            )
            undo.callback(self._server.close)
            self._replicators: list[Replicator] = []
            for number in range(replicas):
                replicator = Replicator(
                    own,
                    partial(self._receiver, number),
                    key=self._key,
                    tls=self._tls,
                    on_outcome=on_outcome,
                    on_error=on_error,
                )
                undo.callback(replicator.close)
                self._replicators.append(replicator)
            undo.pop_all()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def port(self) -> int:
        return self._server.port

    def refresh(self) -> PeerAddress | None:
        """Refresh the neighbours and publish them to the workers; returns the first replication
        target."""
        return self._receiver(0)

    def _receiver(self, number: int) -> PeerAddress | None:
        with self._lock:
            found, key = self._neighbours(), self._key()
            if (found, key) != (self._known, self._known_key):
                self._known, self._known_key = found, key
                self._write()
            return found.receiver(number)

    def close(self) -> None:
        """Stop the server and the replication, join their threads and free the memory."""
        for replicator in self._replicators:
            replicator.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        peers = [asdict(peer) for peer in self._known.peers]
        content = {
            "limit_bytes": self._limit_bytes,
            "key": self._known_key.text,
            "tls": asdict(self._tls.files) if self._tls is not None else None,
            "peers": peers,
        }
        text = json.dumps(content)
        descriptor, name = tempfile.mkstemp(dir=self._folder)  # mode 0600: it holds the key
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(name, self._folder / NODE_FILE)


def own_memory(folder: str | os.PathLike[str]) -> NodeMemory:
    """The storage to which this node's ranks write. Raises ``OSError`` if the folder has no
    host."""
    return NodeMemory(Path(folder) / OWN, limit_bytes=_read(folder).limit_bytes)


def memory_roots(
    folder: str | os.PathLike[str], *, timeout_s: float = PEER_REQUEST_S
) -> list[Root]:
    """For :class:`~checkpoints.TieredStorage`: this node's parts, the replicas it holds, then
    the memory of all other nodes.

    Raises ``OSError`` if the folder has no host.
    """
    content = _read(folder)
    tls = Tls(content.tls) if content.tls is not None else None
    return [
        NodeMemory(Path(folder) / OWN),
        NodeMemory(Path(folder) / COPIES),
        *(
            PeerStorage(peer, key=lambda: content.key, tls=tls, timeout_s=timeout_s)
            for peer in content.peers
        ),
    ]


@dataclass(frozen=True)
class _HostState:
    """The content of the host's file."""

    limit_bytes: int | None
    key: SecretKey
    tls: TlsFiles | None
    peers: tuple[PeerAddress, ...]


def _read(folder: str | os.PathLike[str]) -> _HostState:
    text = private_files.read(Path(folder) / NODE_FILE).decode()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        data = json.loads(text)
        names = [field.name for field in fields(PeerAddress)]
        peers = (PeerAddress(**{name: peer[name] for name in names}) for peer in data["peers"])
        tls = TlsFiles(**data["tls"]) if data["tls"] is not None else None
        return _HostState(data["limit_bytes"], SecretKey.parse(data["key"]), tls, tuple(peers))
    raise OSError(f"{folder}/{NODE_FILE} is not a valid memory host file")
