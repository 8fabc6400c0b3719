"""TLS between nodes: which files are accepted, when they are reloaded, and data over the hub."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from etcd_certificates import Authority

from elastic.wire import tls as module
from elastic.wire.base import CertificateError, Limits, TlsError
from elastic.wire.channel import Channel
from elastic.wire.handshake import Credentials, SecretKey, frame
from elastic.wire.hub import Connection, Handler, Hub, listen
from elastic.wire.tls import Tls, TlsFiles

DEADLINE_S = 30.0
KEY = SecretKey.generate()
LARGEST = 8 << 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "nodes")


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return files_of(authority)


def files_of(authority: Authority, name: str = "node", **issue: Any) -> TlsFiles:
    pair = authority.issue(name, **issue)
    return TlsFiles(authority.cacert, pair.cert, pair.key)


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cacert", "cert", "key"])
@pytest.mark.parametrize("content", [None, b"", b"not PEM"], ids=["missing", "empty", "noise"])
def test_invalid_certificate_files_are_named(
    files: TlsFiles, tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / "other.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CertificateError) as caught:
        Tls(replace(files, **{name: str(path)}))
    assert f"node_{name}={path}" in caught.value.message and caught.value.remedy


def test_a_key_of_another_certificate_is_rejected(authority: Authority, files: TlsFiles) -> None:
    other = authority.issue("other")
    with pytest.raises(CertificateError, match="is not the key of node_cert") as caught:
        Tls(replace(files, key=other.key))
    assert other.key in caught.value.message and files.cert in caught.value.message


def test_an_encrypted_key_is_rejected_without_a_prompt(files: TlsFiles, tmp_path: Path) -> None:
    path = tmp_path / "encrypted.key"
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"password")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(*form, encryption))
    with pytest.raises(CertificateError, match="is encrypted"):
        Tls(replace(files, key=str(path)))


@pytest.mark.parametrize(
    ("issue", "reason", "remedy"),
    [
        ({"hours": (-2, -1)}, "expired", "renew"),
        ({"hours": (1, 2)}, "not yet valid", "clock"),
        ({"uses": [ExtendedKeyUsageOID.SERVER_AUTH]}, "purpose", "server auth and client auth"),
        ({"uses": [ExtendedKeyUsageOID.CLIENT_AUTH]}, "purpose", "server auth and client auth"),
    ],
)
def test_a_certificate_that_peers_would_reject_is_rejected(
    authority: Authority, issue: dict[str, Any], reason: str, remedy: str
) -> None:
    files = files_of(authority, **issue)
    with pytest.raises(CertificateError) as caught:
        Tls(files)
    assert files.cert in caught.value.message and reason in caught.value.message
    assert remedy in caught.value.remedy


def test_a_certificate_of_another_authority_is_rejected(files: TlsFiles, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(CertificateError, match="node_cacert") as caught:
        Tls(replace(files, cacert=other.cacert))
    assert other.cacert in caught.value.message and "authority" in caught.value.remedy


# -- connections --------------------------------------------------------------------------------


class Echo(Handler):
    """Echoes messages; a connection whose first message is ``detach`` is detached."""

    def __init__(self, tls: Tls | None, *, unsent_bytes: int = 2 * LARGEST) -> None:
        self.lines: list[str] = []
        self.detached: queue.Queue[tuple[socket.socket, bytes]] = queue.Queue()
        self.closed_ones: queue.Queue[Connection] = queue.Queue()
        self.opened_ones: queue.Queue[Connection] = queue.Queue()
        self.errors: list[BaseException] = []
        self.hub = Hub(
            "echo",
            listener := listen("127.0.0.1", backlog=16),
            self,
            credentials=Credentials(key=lambda: KEY, identity="echo", tls=tls),
            limits=Limits(
                frame_bytes=LARGEST, server_frame_bytes=LARGEST, unsent_bytes=unsent_bytes
            ),
            report=self.lines.append,
            on_error=self.errors.append,
        )
        self.port = int(listener.getsockname()[1])
        self.hub.start()

    def opened(self, connection: Connection) -> None:
        self.opened_ones.put(connection)

    def received(self, connection: Connection, payload: bytes) -> None:
        if connection.is_outgoing:
            return
        if payload == b"detach":
            self.detached.put(self.hub.detach(connection))
        else:
            self.hub.send(connection, payload)

    def closed(self, connection: Connection) -> None:
        self.closed_ones.put(connection)


@pytest.fixture
def tls(files: TlsFiles) -> Tls:
    return Tls(files)


@pytest.fixture
def echo(tls: Tls) -> Iterator[Echo]:
    echo_server = Echo(tls)
    yield echo_server
    echo_server.hub.close()
    assert echo_server.errors == []


def connect(echo: Echo, tls: Tls | None) -> Channel:
    sock = socket.create_connection(("127.0.0.1", echo.port), DEADLINE_S)
    channel = Channel(sock, timeout_s=DEADLINE_S, tls=tls)
    try:
        assert channel.authenticate(KEY, "me", expected="echo") == "echo"
    except BaseException:
        channel.close()
        raise
    return channel


def test_messages_of_all_sizes_are_echoed(echo: Echo, tls: Tls) -> None:
    """Even larger than a TLS record or the socket buffers: the hub waits, and continues."""
    channel = connect(echo, tls)
    for size in (0, 1, 16_383, 16_384, 16_385, 100_000, LARGEST):
        payload = os.urandom(size)
        channel.send_frame(payload)
        assert channel.receive_frame(LARGEST) == payload
    channel.close()


def test_a_slow_reader_receives_everything_in_order(echo: Echo, tls: Tls) -> None:
    channel, parts = connect(echo, tls), [os.urandom(size) for size in (500_000, 3, 70_000) * 3]
    everything = b"".join(frame(part) for part in parts)
    sender = threading.Thread(target=channel.send_bytes, args=(everything,), name="sender")
    sender.start()
    sender.join()  # nothing is read yet: the data waits in the hub
    assert [channel.receive_frame(LARGEST) for _ in parts] == parts
    channel.close()


def test_a_client_that_never_reads_is_disconnected(tls: Tls) -> None:
    echo = Echo(tls, unsent_bytes=1 << 20)
    channel = connect(echo, tls)
    with pytest.raises(OSError):
        for _ in range(64):
            channel.send_frame(bytes(1 << 20))
    channel.close()
    echo.hub.close()
    assert any("unread" in line for line in echo.lines)


def test_a_detached_connection_continues_in_another_thread(echo: Echo, tls: Tls) -> None:
    """With the data that was sent after the detaching message, decrypted or not."""
    channel, bulk = connect(echo, tls), os.urandom(300_000)
    channel.send_frame(b"detach")
    channel.send({"behind": 1})
    sock, received = echo.detached.get(timeout=DEADLINE_S)
    server = Channel(sock, timeout_s=DEADLINE_S, received=received)
    assert server.receive(1000) == {"behind": 1}
    sender = threading.Thread(target=server.send_bytes, args=(bulk,), name="sender")
    sender.start()
    into = bytearray(len(bulk))
    channel.fill(memoryview(into))
    sender.join()
    assert bytes(into) == bulk
    server.close()
    assert channel.receive_frame(10) is None
    channel.close()


def test_cut_from_another_thread_ends_a_wait(echo: Echo, tls: Tls) -> None:
    channel = connect(echo, tls)
    threading.Timer(0.05, channel.cut).start()
    assert channel.receive_frame(10) is None
    with pytest.raises(ConnectionError):
        channel.send_frame(b"more")
    channel.close()


def test_a_wait_interrupted_by_its_callback_can_be_repeated(echo: Echo, tls: Tls) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if is_waiting and len(looks) == 3:
            raise KeyboardInterrupt

    sock = socket.create_connection(("127.0.0.1", echo.port), DEADLINE_S)
    channel = Channel(sock, timeout_s=DEADLINE_S, tls=tls, slice_s=0.01, look=look)
    is_waiting = False
    channel.authenticate(KEY, expected="echo")
    looks.clear()
    is_waiting = True
    with pytest.raises(KeyboardInterrupt):
        channel.receive_frame(10)
    channel.send_frame(b"x" * 10)
    assert channel.receive_frame(10) == b"x" * 10
    channel.close()


def test_hubs_connect_to_each_other(echo: Echo, tls: Tls) -> None:
    other = Echo(tls)
    other.hub.post(
        lambda: other.hub.connect("127.0.0.1", echo.port, expected="echo", within_s=DEADLINE_S)
    )
    opened = other.opened_ones.get(timeout=DEADLINE_S)
    assert opened.identity == "echo" and opened.is_outgoing
    assert echo.opened_ones.get(timeout=DEADLINE_S).identity == "echo"
    other.hub.close()
    assert echo.closed_ones.get(timeout=DEADLINE_S)


# -- TLS at one end only ------------------------------------------------------------------------


def log_of(echo: Echo) -> str:
    echo.hub.close()
    return "\n".join(echo.lines)


def test_a_client_without_tls_is_reported_by_both_ends(tls: Tls) -> None:
    echo = Echo(tls)
    with pytest.raises(TlsError, match="it speaks TLS, and this node does not: set node_cacert"):
        connect(echo, None)
    assert "does not speak TLS" in log_of(echo) and "node_key" in log_of(echo)


def test_a_server_without_tls_is_reported_by_both_ends(tls: Tls) -> None:
    echo = Echo(None)
    with pytest.raises(ConnectionResetError) as caught:
        connect(echo, tls)
    assert "it speaks TLS, and this node does not: set node_cacert" in log_of(echo)
    assert caught.value.errno is not None or "node without TLS" in str(caught.value)


@pytest.mark.parametrize("outer_has_tls", [True, False])
def test_a_tls_mismatch_between_hubs_is_reported_by_both(tls: Tls, outer_has_tls: bool) -> None:
    outer, inner = Echo(tls if outer_has_tls else None), Echo(None if outer_has_tls else tls)
    outer.hub.post(
        lambda: outer.hub.connect("127.0.0.1", inner.port, expected="echo", within_s=DEADLINE_S)
    )
    assert not outer.closed_ones.get(timeout=DEADLINE_S).was_open
    assert not inner.closed_ones.get(timeout=DEADLINE_S).was_open
    assert "TLS" in log_of(inner) and "node_cacert" in log_of(inner)
    if not outer_has_tls:
        assert "it speaks TLS" in log_of(outer) and "node_cacert" in log_of(outer)
    outer.hub.close()


# -- rotation -----------------------------------------------------------------------------------


def point_at(link: Path, target: str) -> None:
    """Replace a symlink as Kubernetes does: create a new one, and rename it over the old one."""
    fresh = link.with_suffix(".new")
    fresh.symlink_to(target)
    fresh.replace(link)


def test_changed_certificate_files_apply_to_new_connections(tmp_path: Path) -> None:
    """A new authority and pair: a peer with the old ones is rejected, without a restart."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    old, new = (
        files_of(Authority(tmp_path / "a", "old")),
        files_of(Authority(tmp_path / "b", "new")),
    )
    mounted = TlsFiles(*(str(tmp_path / name) for name in ("ca.crt", "tls.crt", "tls.key")))
    for name in ("cacert", "cert", "key"):
        point_at(Path(getattr(mounted, name)), getattr(old, name))
    lines: list[str] = []
    tls = Tls(mounted, report=lines.append, monotonic=lambda: 100.0)
    echo = Echo(tls)
    first = connect(echo, Tls(old))

    # One after the other: an incomplete pair is not used, and is not fatal.
    point_at(Path(mounted.cert), new.cert)
    connect(echo, Tls(old)).close()
    assert len(lines) == 1 and "node_key" in lines[0] and "previous ones" in lines[0]
    point_at(Path(mounted.key), new.key)
    connect(echo, Tls(old)).close()
    Path(mounted.cacert).unlink()
    connect(echo, Tls(old)).close()
    point_at(Path(mounted.cacert), new.cacert)

    connect(echo, Tls(new)).close()
    with pytest.raises(TlsError, match="certificate"):
        connect(echo, Tls(old))
    first.send_frame(b"still there")
    assert first.receive_frame(100) == b"still there"
    first.close()
    echo.hub.close()


def test_unchanged_files_are_loaded_once(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.wire.tls.load_contexts", lambda files: pytest.fail("again"))
    echo = Echo(tls)
    connect(echo, tls).close()
    echo.hub.close()


def test_invalid_files_are_not_reloaded_for_every_connection(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, lines, loads = [0.0], list[str](), list[TlsFiles]()
    tls, load = Tls(files, report=lines.append, monotonic=lambda: now_s[0]), module.load_contexts
    copies = TlsFiles(*(f"{path}.copy" for path in (files.cacert, files.cert, files.key)))
    for path in (files.cacert, files.cert, files.key):
        shutil.copy(path, f"{path}.copy")
    echo, client = Echo(tls), Tls(copies)

    def counted(given: TlsFiles) -> object:
        loads.append(given)
        return load(given)

    monkeypatch.setattr(module, "load_contexts", counted)
    Path(files.key).write_bytes(b"half")
    for _ in range(3):
        connect(echo, client).close()
    assert len(loads) == len(lines) == 1
    now_s[0] += 10.0
    shutil.copy(copies.key, files.key)
    connect(echo, client).close()
    assert len(loads) == 2 and len(lines) == 1
    echo.hub.close()
