"""TLS listeners: a peer without a valid certificate is rejected with a reason, at bounded cost."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_certificates import Authority
from hostile import client_hello
from listeners import (
    KEY,
    WITH_TLS,
    Cost,
    Listener,
    assert_flat,
    listening,
    parameters,
    patient,
    tight,
)
from raw_peer import is_hung_up_on, prove

from elastic.telemetry.log import get_logger
from elastic.testing.waiting import eventually
from elastic.wire.handshake import ClientHandshake, SecretKey, frame


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda *words: logged.append(str(words)))
    return logged


@pytest.fixture(params=parameters(*WITH_TLS))
def listener(
    request: pytest.FixtureRequest, tmp_path: Path, lines: list[str]
) -> Iterator[Listener]:
    with listening(request.param, tmp_path, patient) as made:
        yield from at_no_cost(made)


@pytest.fixture(params=parameters(*WITH_TLS))
def tight_listener(
    request: pytest.FixtureRequest, tmp_path: Path, lines: list[str]
) -> Iterator[Listener]:
    with listening(request.param, tmp_path, tight) as made:
        yield from at_no_cost(made)


def at_no_cost(made: Listener) -> Iterator[Listener]:
    made.serve()
    before = Cost.now()
    yield made
    made.serve()
    assert_flat(before)


@contextlib.contextmanager
def stranger(listener: Listener) -> Iterator[socket.socket]:
    with listener.port.stranger() as sock:
        sock.settimeout(30)
        yield sock


def context(authority: Authority | None = None, name: str = "x") -> ssl.SSLContext:
    """A client context that accepts any server, with a certificate of this authority if given."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    if authority is not None:
        pair = authority.issue(name)
        made.load_cert_chain(pair.cert, pair.key)
    return made


def old(made: ssl.SSLContext) -> ssl.SSLContext:
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    return made


def with_own_pair(folder: Path) -> ssl.SSLContext:
    (folder / "theirs").mkdir()
    return context(Authority(folder / "theirs", "other"))


def with_expired_pair(folder: Path) -> ssl.SSLContext:
    # The authority that `listening` has created in this folder.
    made = context()
    pair = _the_jobs(folder).issue("late", hours=(-2, -1))
    made.load_cert_chain(pair.cert, pair.key)
    return made


_authorities: dict[Path, Authority] = {}


def _the_jobs(folder: Path) -> Authority:
    return _authorities[folder]


@pytest.fixture(autouse=True)
def remembered_authorities(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps the authority that ``listening`` creates."""

    def make(folder: Path, name: str) -> Authority:
        return _authorities.setdefault(folder, Authority(folder, name))

    monkeypatch.setattr("listeners.Authority", make)
    yield
    _authorities.clear()


@pytest.mark.parametrize(
    ("make", "logged"),
    [
        (lambda folder: context(), "presents no certificate"),
        (with_own_pair, "its certificate is refused"),
        (with_expired_pair, "its certificate is refused: certificate has expired"),
        (lambda folder: old(context()), "does not speak TLS 1.3"),
    ],
    ids=["none", "another authority's", "expired", "TLS 1.2"],
)
def test_a_peer_with_the_secret_but_no_valid_certificate_is_rejected(
    listener: Listener,
    tmp_path: Path,
    lines: list[str],
    make: Callable[[Path], ssl.SSLContext],
    logged: str,
) -> None:
    tls = make(tmp_path)
    with stranger(listener) as plain, pytest.raises(OSError):
        sock = tls.wrap_socket(plain)
        with sock:
            prove(sock, KEY, listener.port.identity)
            raise AssertionError("it was let in")
    eventually(lambda: any(logged in line for line in lines), logged)  # logged after the close


def test_a_peer_with_a_certificate_but_not_the_secret_is_rejected(listener: Listener) -> None:
    with listener.port.connect() as sock:
        sock.settimeout(30)
        with pytest.raises(OSError, match="has not proved"):
            prove(sock, SecretKey.generate(), listener.port.identity)


def test_a_peer_without_tls_receives_only_an_alert(listener: Listener, lines: list[str]) -> None:
    """The port speaks only TLS; the alert lets a node without TLS report the mismatch."""
    with stranger(listener) as sock:
        sock.sendall(frame(ClientHandshake(KEY, listener.port.identity).hello))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := sock.recv(100):
                answer += chunk
    assert answer == b"\x15\x03\x03\x00\x02\x02\x46"
    eventually(lambda: lines, "a line")
    assert "does not speak TLS 1.3" in lines[0] and "node_cacert" in lines[0]


@pytest.mark.parametrize("begins", [b"", b"\x16\x03\x01", "half a hello", "a hello"])
def test_a_stalled_tls_handshake_is_closed_at_its_deadline(
    tight_listener: Listener, begins: bytes | str
) -> None:
    hello = client_hello()
    sent = {"half a hello": hello[: len(hello) // 2], "a hello": hello}.get(str(begins), b"")
    with stranger(tight_listener) as sock:
        sock.sendall(begins if isinstance(begins, bytes) else sent)
        assert is_hung_up_on(sock)


def test_a_trickling_tls_handshake_is_closed_at_its_deadline(
    tight_listener: Listener,
) -> None:
    with stranger(tight_listener) as sock:
        sock.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            for byte in client_hello():
                sock.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        break
            else:
                raise AssertionError("the handshake did not time out")


def test_clients_are_served_during_a_flood_of_client_hellos(
    tight_listener: Listener,
) -> None:
    """Each makes the listener compute a signature: the extra cost of TLS per unknown client."""
    hello = client_hello()
    with contextlib.ExitStack() as held:
        for number in range(150):
            sock = held.enter_context(tight_listener.port.stranger())
            with contextlib.suppress(ConnectionError):
                sock.sendall(hello)
            if number % 50 == 0:
                tight_listener.serve()
        tight_listener.serve()


class Impostor:
    """Listens with its own TLS on a port that was a node's, and records what it receives."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.received = b""
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="impostor")
        self._thread.start()

    def close(self) -> None:
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(30)
            with self._tls.wrap_socket(connection, server_side=True) as sock:
                self.received += sock.recv(1000)


@pytest.mark.parametrize("kind", ["another authority's", "expired"])
def test_a_client_sends_nothing_to_a_server_with_a_bad_certificate(
    listener: Listener, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "impostor").mkdir()
    if kind == "expired":
        pair = _the_jobs(tmp_path).issue("late", hours=(-2, -1))
    else:
        pair = Authority(tmp_path / "impostor", "other").issue("x")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pair.cert, pair.key)
    impostor = Impostor(server)
    assert listener.real_client is not None
    with pytest.raises(Exception, match="its certificate is refused"):
        listener.real_client(impostor.port)
    impostor.close()
    assert impostor.received == b""
