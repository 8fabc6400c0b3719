"""The owner of a node's memory tier: its folder, permissions, and copies on the next node."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from kit.checkpoint_states import same, small_state

import checkpoints
from checkpoints.memory import (
    MemoryHost,
    Neighbours,
    NodeMemory,
    PeerAddress,
    ReplicationOutcome,
    Replicator,
    memory_roots,
    own_memory,
)
from checkpoints.tiers import TieredStorage
from elastic.testing.waiting import eventually
from elastic.wire.handshake import Credentials, SecretKey

LONG_S = 90.0
KEY = SecretKey.generate()


class Ring:
    """Nodes, each of which copies to the next."""

    def __init__(self, folder: Path, size: int, replicas: int = 1) -> None:
        self.outcomes: list[ReplicationOutcome] = []
        self.errors: list[BaseException] = []
        self.neighbours = [Neighbours() for _ in range(size)]
        self.hosts = [
            MemoryHost(
                folder / f"node-{index}",
                host="127.0.0.1",
                credentials=Credentials(key=lambda: KEY, identity=f"node-{index}"),
                replicas=replicas,
                neighbours=partial(self.neighbours.__getitem__, index),
                on_outcome=self.outcomes.append,
                on_error=self.errors.append,
            )
            for index in range(size)
        ]
        self.form(self.hosts)

    def form(self, hosts: list[MemoryHost]) -> None:
        at = [PeerAddress(h.folder.name, "127.0.0.1", h.port, h.folder.name) for h in hosts]
        for index, host in enumerate(hosts):
            others = at[index + 1 :] + at[:index]
            after = (others[0] if others else None, tuple(others[1:]))
            self._set_neighbours(host, Neighbours(tuple(others), *after))

    def alone(self) -> None:
        for host in self.hosts:
            self._set_neighbours(host, Neighbours())

    def _set_neighbours(self, host: MemoryHost, neighbours: Neighbours) -> None:
        self.neighbours[self.hosts.index(host)] = neighbours
        host.refresh()

    def save(self, step: int) -> None:
        for rank, host in enumerate(self.hosts):
            checkpoints.save(
                own_memory(host.folder),
                small_state(step),
                step=step,
                nonce="aa",
                rank=rank,
                world_size=len(self.hosts),
            )

    def copied(self, step: int) -> int:
        return sum(f"-{step:09d}." in o.name and not o.reason for o in list(self.outcomes))

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        assert self.errors == []


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    new_ring = Ring(tmp_path, 3)
    yield new_ring
    new_ring.close()


def test_any_single_node_can_be_lost(ring: Ring) -> None:
    ring.save(7)
    eventually(lambda: ring.copied(7) == 3)
    for lost in range(3):
        rest = [host for host in ring.hosts if host is not ring.hosts[lost]]
        ring.form(rest)
        for host in rest:
            tiers = TieredStorage(memory_roots(host.folder))
            found = checkpoints.latest(tiers).checkpoint
            assert found is not None and found.step == 7
            assert same(checkpoints.load(tiers, found.name).state, small_state(7))


def test_with_two_copies_two_adjacent_nodes_can_be_lost_at_once(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 4, replicas=2)
    ring.save(7)
    eventually(lambda: ring.copied(7) == 8)
    for first in range(4):
        lost = (ring.hosts[first], ring.hosts[(first + 1) % 4])
        rest = [host for host in ring.hosts if host not in lost]
        ring.form(rest)
        tiers = TieredStorage(memory_roots(rest[0].folder))
        found = checkpoints.latest(tiers).checkpoint
        assert found is not None and found.step == 7
        assert same(checkpoints.load(tiers, found.name).state, small_state(7))
    ring.close()


def test_without_copies_the_parts_of_a_lost_node_are_lost(ring: Ring) -> None:
    ring.alone()
    ring.save(7)
    assert checkpoints.list_checkpoints(TieredStorage(memory_roots(ring.hosts[0].folder))) == ()


def test_the_folder_is_private_and_removed_on_close(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 1)
    folder = ring.hosts[0].folder
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(folder / "node.json").st_mode) == 0o600
    ring.save(1)
    ring.close()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-")]


def test_an_existing_folder_is_not_reused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(FileExistsError):
        MemoryHost(tmp_path / "mine", host="127.0.0.1")
    assert (tmp_path / "mine" / "file").exists()


def test_a_host_that_fails_to_start_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThread:
        def __init__(self, *args: object, **options: object) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("checkpoints.memory.Replicator", NoThread)
    with pytest.raises(RuntimeError, match="new thread"):
        MemoryHost(tmp_path / "node", host="127.0.0.1")
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-")]


def test_workers_read_the_limit(tmp_path: Path) -> None:
    host = MemoryHost(tmp_path / "node", host="127.0.0.1", limit_bytes=1234)
    assert own_memory(host.folder).room()[1] == "the limit of 1234 bytes"
    host.close()
    with pytest.raises(OSError):
        own_memory(host.folder)


def test_a_new_successor_receives_all_current_parts(ring: Ring) -> None:
    ring.save(7)
    eventually(lambda: ring.copied(7) == 3)
    first, _, third = ring.hosts
    ring.outcomes.clear()
    ring.form([first, third])
    eventually(lambda: any(o.peer == third.folder.name and not o.reason for o in ring.outcomes))
    assert "part-00000-of-00003.json" in os.listdir(
        third.folder / "copies" / ".tmp-step-000000007.g0.aa"
    )


def test_a_dead_peer_is_reported_and_retried_with_a_delay(tmp_path: Path) -> None:
    now_s = [0.0]
    own, outcomes = NodeMemory(tmp_path), list[ReplicationOutcome]()
    checkpoints.save(own, small_state(1), step=1, nonce="aa", rank=0, world_size=2)
    gone = PeerAddress("gone", "127.0.0.1", _unused_port(), "token")
    looked = threading.Semaphore(0)

    def peer() -> PeerAddress:
        looked.release()
        return gone

    copier = Replicator(
        own, peer, key=lambda: KEY, on_outcome=outcomes.append, monotonic=lambda: now_s[0]
    )
    eventually(lambda: len(outcomes) == 1)
    for _ in range(4):
        looked.acquire()
    assert len(outcomes) == 1  # it checked, and did not retry yet
    now_s[0] = 1.1
    eventually(lambda: len(outcomes) == 2)
    copier.close()
    assert {o.peer for o in outcomes} == {"gone"}
    assert all("refused" in o.reason for o in outcomes)


def _unused_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_closing_does_not_wait_for_a_peer_that_hangs(tmp_path: Path) -> None:
    """The peer accepts the connection and never answers."""
    import socket

    own = NodeMemory(tmp_path)
    checkpoints.save(own, small_state(1), step=1, nonce="aa", rank=0, world_size=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = PeerAddress("hangs", "127.0.0.1", listener.getsockname()[1], "token")
        copier = Replicator(own, lambda: address, key=lambda: KEY, timeout_s=3600.0)
        connection, _ = listener.accept()
        closer = threading.Thread(target=copier.close)
        closer.start()
        closer.join(LONG_S)
        assert not closer.is_alive()
        connection.close()
