"""The memory of another node over TCP: reads, copies, and rejected requests and clients."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.checkpoint_states import odd_state, same, small_state

import checkpoints
from checkpoints.memory import MAX_REQUEST, NodeMemory, PeerAddress, PeerServer, PeerStorage
from checkpoints.storage import LocalStorage, Storage
from checkpoints.tiers import TieredStorage
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.base import AuthenticationError, ProtocolError
from elastic.wire.channel import Channel
from elastic.wire.handshake import Credentials, SecretKey, ServerHandshake, frame

KEY = SecretKey.generate()
FOLDER = ".tmp-step-000000003.g0.aa"
TENSORS = f"{FOLDER}/00000-of-00002.safetensors"
PART = f"{FOLDER}/part-00000-of-00002.json"


class Node:
    """One node's memory and its server."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.own = NodeMemory(folder / "own")
        self.copies = NodeMemory(folder / "copies", limit_bytes=limit_bytes)
        for storage in (self.own, self.copies):
            storage.make_folder("")
        self.errors: list[BaseException] = []
        self.server = PeerServer(
            self.own,
            self.copies,
            credentials=Credentials(key=lambda: KEY, identity="a"),
            host="127.0.0.1",
            on_error=self.errors.append,
        )
        self.clients: list[PeerStorage] = []

    def client(
        self, key: SecretKey = KEY, identity: str = "a", timeout_s: float = 10.0
    ) -> PeerStorage:
        at = PeerAddress("a", "127.0.0.1", self.server.port, identity)
        self.clients.append(PeerStorage(at, key=lambda: key, timeout_s=timeout_s))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        assert self.errors == []


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    new_node = Node(tmp_path / "a")
    yield new_node
    new_node.close()


def save(storage: Storage, rank: int, step: int = 3, world_size: int = 2) -> None:
    checkpoints.save(
        storage, small_state(step), step=step, nonce="aa", rank=rank, world_size=world_size
    )


def put(client: PeerStorage, storage: LocalStorage, path: str) -> None:
    source = storage.open(path)
    try:
        client.put(path, source)
    finally:
        source.close()


def content(storage: Storage, path: str) -> bytes:
    source = storage.open(path)
    data = bytearray(source.size())
    source.read_at(0, memoryview(data))
    source.close()
    return bytes(data)


def test_remote_files_are_read_like_local_ones(node: Node) -> None:
    save(node.own, 0)
    peer = node.client()
    assert peer.list("") == [FOLDER]
    assert peer.list(FOLDER) == sorted(node.own.list(FOLDER))
    for path in (TENSORS, PART):
        assert content(peer, path) == content(node.own, path)
        assert peer.size(path) == node.own.size(path)
        assert peer.modified_s(path) == node.own.modified_s(path)
    buffer = bytearray(8)
    assert peer.open(TENSORS).read_at(peer.size(TENSORS) - 3, memoryview(buffer)) == 3
    assert peer.open(TENSORS).read_at(peer.size(TENSORS) + 3, memoryview(buffer)) == 0
    with pytest.raises(FileNotFoundError):
        peer.open(f"{FOLDER}/00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError):
        peer.list(".tmp-step-000000004.g0.aa")


def test_a_copy_on_a_peer_replaces_a_lost_node(node: Node, tmp_path: Path) -> None:
    gone = NodeMemory(tmp_path / "gone")
    for rank in (0, 1):
        checkpoints.save(
            (node.own, gone)[rank], odd_state(), step=3, nonce="aa", rank=rank, world_size=2
        )
    peer = node.client()
    put(peer, gone, f"{FOLDER}/00001-of-00002.safetensors")
    assert checkpoints.list_checkpoints(TieredStorage([peer])) == ()  # its part record is missing
    put(peer, gone, f"{FOLDER}/part-00001-of-00002.json")
    found = checkpoints.latest(TieredStorage([peer])).checkpoint
    assert found is not None
    assert same(checkpoints.load(TieredStorage([peer]), found.name).state, odd_state())
    assert sorted(node.copies.list(FOLDER)) == [
        "00001-of-00002.safetensors",
        "part-00001-of-00002.json",
    ]


def test_a_peer_keeps_the_newest_copies(node: Node, tmp_path: Path) -> None:
    other = NodeMemory(tmp_path / "other")
    for step in range(1, 6):
        checkpoints.save(
            other, small_state(step), step=step, nonce="aa", rank=1, world_size=2, keep=None
        )
        for file in sorted(other.list(f".tmp-step-{step:09d}.g0.aa")):
            put(node.client(), other, f".tmp-step-{step:09d}.g0.aa/{file}")
    assert [name.step for name in node.copies.names()] == [5, 4, 3]


def test_a_file_that_does_not_fit_is_rejected_before_it_is_sent(tmp_path: Path) -> None:
    full = Node(tmp_path / "full", limit_bytes=100)
    other = NodeMemory(tmp_path / "other")
    save(other, 0)
    peer = full.client()
    with pytest.raises(OSError, match="the limit of 100 bytes allows 100 of") as caught:
        put(peer, other, TENSORS)
    assert caught.value.errno == errno.ENOSPC
    assert peer.list("") == []  # the connection is still usable
    full.close()


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "/etc/passwd",
        f"{FOLDER}/../../secret",
        f"{FOLDER}/secret",
        f"{FOLDER}/.00000-of-00002.safetensors.abcd",
        "secret",
        f"{FOLDER}\0",
        ".tmp-mine",
    ],
)
def test_other_paths_are_not_served_or_accepted(node: Node, tmp_path: Path, path: str) -> None:
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "own"):
        (folder / "secret").write_text("secret")
    save(node.own, 0)
    (tmp_path / "a" / "own" / FOLDER / "secret").write_text("secret")
    peer = node.client()
    for ask in (peer.list, peer.size, peer.open):
        with pytest.raises(OSError, match="invalid path"):
            ask(path)
    with pytest.raises(OSError, match=r"invalid path|only parts of attempts"):
        peer.put(path, node.own.open(TENSORS))
    assert "secret" not in peer.list("") + peer.list(FOLDER)
    assert node.copies.list("") == []


def test_only_parts_of_attempts_are_accepted(node: Node) -> None:
    save(node.own, 0)
    with pytest.raises(OSError, match="only parts of attempts"):
        node.client().put(TENSORS.removeprefix(".tmp-"), node.own.open(TENSORS))


def test_a_client_without_the_key_is_rejected(node: Node) -> None:
    with pytest.raises(AuthenticationError):
        node.client(key=SecretKey.generate()).list("")
    assert node.client().list("") == []


def test_a_different_node_on_a_reused_port_is_rejected(node: Node) -> None:
    with pytest.raises(ProtocolError, match="now 'a', not 'b'"):
        node.client(identity="b").list("")


def test_a_server_without_the_key_receives_no_request() -> None:
    """An impostor on a reused port gets a handshake that it cannot use, and no request."""
    received = bytearray()
    with _listening() as (port, accepted):

        def impostor() -> None:
            with accepted() as connection, contextlib.suppress(ConnectionResetError):
                received.extend(connection.recv(1000))
                handshake = ServerHandshake(SecretKey.generate(), "x")
                connection.sendall(frame(handshake.challenge(bytes(received[4:]))))
                while chunk := connection.recv(1000):
                    received.extend(chunk)

        thread = threading.Thread(target=impostor)
        thread.start()
        storage = PeerStorage(PeerAddress("x", "127.0.0.1", port, "x"), key=lambda: KEY)
        with pytest.raises(AuthenticationError):
            storage.list("")
        thread.join()
    assert len(received) == 4 + 8 + 32


@contextmanager
def _listening() -> Iterator[tuple[int, Callable[[], socket.socket]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1], lambda: listener.accept()[0]


@pytest.mark.parametrize("payload", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 200])
def test_invalid_data_of_a_stranger_is_harmless(node: Node, payload: bytes) -> None:
    with socket.create_connection(("127.0.0.1", node.server.port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(payload)
        with contextlib.suppress(ConnectionResetError):
            while payload and stranger.recv(1000):  # until the server closes it
                pass
    assert node.client().list("") == []


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_REQUEST + 1).to_bytes(4, "big"),
        b"\0\0\0\x02[]",
        b"\0\0\0\x01{",
        b"\0\0\x10\0" + b"[" * 4096,
    ],
)
def test_a_malformed_request_ends_the_connection(node: Node, sent: bytes) -> None:
    wire = _wire(node)
    wire.send_bytes(sent)
    with pytest.raises((ConnectionError, AssertionError)):
        assert wire.receive(1000) is not None
    wire.close()
    assert node.client().list("") == []


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"do": "run", "path": ""},
        {"do": "list", "path": 3},
        {"do": "read", "path": TENSORS, "begin": -1, "count": 3},
        {"do": "read", "path": TENSORS, "begin": 0, "count": 1 << 62},
        {"do": "read", "path": TENSORS, "begin": 0.5, "count": True},
        {"do": "put", "path": TENSORS, "size": "all"},
        {"do": "put", "path": PART, "size": 1 << 40},
    ],
)
def test_an_invalid_request_is_answered_with_an_error(
    node: Node, request_: dict[str, object]
) -> None:
    save(node.own, 0)
    wire = _wire(node)
    wire.send(request_)
    answer = wire.receive(1000)
    assert answer is not None and "error" in answer
    wire.send({"do": "list", "path": ""})
    assert wire.receive(1000) == {"names": [FOLDER]}
    wire.close()


def _wire(node: Node) -> Channel:
    wire = Channel(
        socket.create_connection(("127.0.0.1", node.server.port), timeout=PATIENCE_S),
        timeout_s=PATIENCE_S,
    )
    wire.authenticate(KEY, expected="a")
    return wire


@pytest.mark.parametrize("trailer", [bytes(16), b""])
def test_truncated_or_altered_transfers_are_discarded(node: Node, trailer: bytes) -> None:
    wire = _wire(node)
    wire.send({"do": "put", "path": TENSORS, "size": 5})
    assert wire.receive(1000) == {"go": True}
    wire.send_bytes(b"hello" + trailer)
    if trailer:
        answer = wire.receive(1000)
        assert answer is not None and "checksum mismatch in transit" in answer["error"]
    wire.close()
    peer = node.client()
    node.server.close()
    assert node.copies.list(FOLDER) == []
    del peer


def test_a_peer_that_does_not_answer_in_time_is_skipped(tmp_path: Path) -> None:
    """The peer accepts the connection and never answers: the wait is bounded."""
    save(NodeMemory(tmp_path), 0, world_size=1)
    with _listening() as (port, _):
        silent = PeerStorage(
            PeerAddress("b", "127.0.0.1", port, "b"), key=lambda: KEY, timeout_s=0.2
        )
        tiers = TieredStorage([silent, NodeMemory(tmp_path)])
        assert checkpoints.latest(tiers).checkpoint is not None
        assert [t.place for t in tiers.failures] == [silent.place]


def test_a_deadline_grows_with_the_size_and_ends_a_slow_transfer(node: Node) -> None:
    now_s = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    wire = Channel(ours, timeout_s=5.0, monotonic=lambda: now_s[0])
    wire.expect(20 << 20)
    theirs.sendall(b"x")
    now_s[0] = 14.0
    wire.fill(memoryview(bytearray(1)))
    now_s[0] = 16.0
    with pytest.raises(TimeoutError):
        wire.fill(memoryview(bytearray(1)))
    for end in (ours, theirs):
        end.close()


def test_a_connection_closed_by_the_server_is_reopened(node: Node) -> None:
    peer = node.client()
    assert peer.list("") == []
    for wire in list(node.server._threads):
        wire.cut()
    assert peer.list("") == []


def test_a_server_with_a_nonlocal_address_listens_on_all_interfaces(tmp_path: Path) -> None:
    """Behind NAT, peers connect through another address."""
    memory = NodeMemory(tmp_path)
    credentials = Credentials(key=lambda: KEY, identity="a")
    server = PeerServer(memory, memory, credentials=credentials, host="192.0.2.1")
    client = PeerStorage(PeerAddress("a", "127.0.0.1", server.port, "a"), key=lambda: KEY)
    memory.make_folder("")
    assert client.list("") == []
    client.close()
    server.close()


def test_clients_of_a_closed_server_get_a_connection_error(tmp_path: Path) -> None:
    node = Node(tmp_path / "b")
    peer = node.client()
    assert peer.list("") == []
    node.close()
    with pytest.raises(ConnectionError):
        peer.list("")
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-peer")]


def test_the_memory_of_a_peer_is_read_only_except_for_puts(node: Node) -> None:
    with pytest.raises(checkpoints.NotWritable, match="is read-only"):
        checkpoints.save(node.client(), small_state(1), step=1, nonce="aa")
