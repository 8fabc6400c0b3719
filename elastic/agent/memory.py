"""This node's memory for checkpoints: created by the agent, so that it outlives all its workers.

A folder below ``/dev/shm`` whose name identifies the agent's process. It is removed when the agent
ends or, if the agent was killed, by the next agent on this machine that can prove its death.
Workers receive it as ``ELASTIC_NODE_MEMORY``. It is served to the other agents of the job, and
copied into the memory of the next node in rank order. :mod:`checkpoints.memory` does all of
that; the agent imports it (and nothing else of checkpoints) because a tier that ends with the
workers would be useless.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpoints.memory import MemoryHost, Neighbours, PeerAddress, ReplicationOutcome
from elastic.agent.identity import proved_gone
from elastic.membership.records import Member, Node, ProcessIdentity, WorldRecord
from elastic.telemetry.log import get_logger
from elastic.tuning.environment import shm_shortages
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import Credentials, SecretKey
from elastic.wire.tls import Tls

PARENT = Path("/dev/shm")
SHM_SHARE = 0.4
_NAME = re.compile(r"elastic-memory-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


class AgentMemory:
    """The agent's handle on the memory. Without ``/dev/shm``, or with a share of 0, there is
    none."""

    def __init__(self, host: MemoryHost | None) -> None:
        self._host = host
        if host is not None:
            atexit.register(host.close)

    @property
    def folder(self) -> str:
        """Its path: ``ELASTIC_NODE_MEMORY`` of the workers; empty if there is none."""
        return str(self._host.folder) if self._host is not None else ""

    def published(self, node: Node) -> Node:
        """The node's record, with the port of its memory."""
        if self._host is None:
            return node
        return replace(node, memory_port=self._host.port)

    def refresh(self) -> None:
        """Publish the other nodes of the world that the workers are about to run."""
        try:
            if self._host is not None:
                self._host.refresh()
        except OSError as error:
            get_logger().warning("workers cannot find the memory of other nodes: %s", error)

    def close(self) -> None:
        """Release it. Idempotent."""
        host, self._host = self._host, None
        if host is not None:
            atexit.unregister(host.close)
            host.close()


def host_memory(
    node: Node,
    options: AgentOptions,
    running: Callable[[], WorldRecord | None],
    *,
    key: Callable[[], SecretKey],
    tls: Tls | None = None,
    on_error: Callable[[BaseException], object],
    parent: Path = PARENT,
) -> AgentMemory:
    """Create this node's memory. ``running`` returns the world that its workers run, ``key`` the
    key to the memories of this run."""
    sweep(node.process, parent)
    reporter = _ReplicationReporter()
    try:
        shm_bytes = _shm_bytes(parent)
        if options.memory_limit_bytes is not None:
            for shortage in shm_shortages(options.memory_limit_bytes, shm_bytes):
                get_logger().warning("%s", shortage)
        if options.node_memory_share == 0:
            return AgentMemory(None)
        host = MemoryHost(
            parent / _name(node),
            host=node.address,
            credentials=Credentials(key=key, identity=node.node_id, tls=tls),
            limit_bytes=_limit_bytes(options, shm_bytes),
            replicas=options.node_memory_copies,
            neighbours=lambda: neighbours(running(), node.node_id),
            on_outcome=reporter.outcome,
            report=get_logger().warning,
            on_error=on_error,
        )
    except OSError as error:
        get_logger().warning(
            "no memory tier for checkpoints: %s: %s", error.filename or parent, error.strerror
        )
        return AgentMemory(None)
    return AgentMemory(host)


def neighbours(world: WorldRecord | None, node_id: str) -> Neighbours:
    """The other nodes that serve their memory, and the next one in rank order.

    Nodes outside of the world follow its members: a node that restarts its workers, or lacks the
    other nodes of its replica, may hold the parts of the last world.
    """
    if world is None or node_id not in world.node_ids:
        return Neighbours()
    at = world.node_ids.index(node_id)
    others = (*world.members[at + 1 :], *world.members[:at])
    peers = tuple(_address(member) for member in others if member.memory_port)
    peers += tuple(
        PeerAddress(node=other.name, host=other.host, port=other.port, identity=other.node_id)
        for other in world.outside
    )
    return Neighbours(peers, peers[0] if peers else None, peers[1:])


def _address(member: Member) -> PeerAddress:
    return PeerAddress(
        node=member.name,
        host=member.liveness_host,
        port=member.memory_port,
        identity=member.node_id,
    )


def sweep(me: ProcessIdentity, parent: Path = PARENT) -> None:
    """Remove the folders of this user's agents that have provably ended."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            namespace, pid, start_ticks = map(int, match.groups())
            # (A tmpfs belongs to one boot of one host.)
            owner = replace(me, pid_namespace=namespace, pid=pid, start_ticks=start_ticks)
            if proved_gone(owner.digest, me):
                shutil.rmtree(entry.path, ignore_errors=True)


def _name(node: Node) -> str:
    p = node.process
    return f"elastic-memory-{p.pid_namespace}-{p.pid}-{p.start_ticks}-{node.node_id}"


def _limit_bytes(options: AgentOptions, shm_bytes: int) -> int:
    """The limit for own parts, and for the copies of each other node. Data workers share batches in
    the same file system, and end with a bus error if it is full: a fifth is reserved for them."""
    share = SHM_SHARE * 2 / (1 + options.node_memory_copies)
    return int(min(options.node_memory_share * memory_bytes(options), share * shm_bytes))


def _shm_bytes(parent: Path) -> int:
    usage = os.statvfs(parent)
    return usage.f_frsize * usage.f_blocks


def memory_bytes(options: AgentOptions) -> int:
    """This node's memory: as configured, else the machine's."""
    if options.memory_limit_bytes is not None:
        return options.memory_limit_bytes
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _ReplicationReporter:
    """Warns of copies that fail: once for each reason, until one succeeds."""

    def __init__(self) -> None:
        self._last: tuple[str, str] | None = None

    def outcome(self, outcome: ReplicationOutcome) -> None:
        last, self._last = self._last, (outcome.peer, outcome.reason) if outcome.reason else None
        if self._last is not None and self._last != last:
            get_logger().warning(
                "%s has no copy on %s: %s", outcome.name, outcome.peer, outcome.reason
            )
