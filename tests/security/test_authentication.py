"""A peer that does not know the run's secret learns nothing, and clients send it nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from listeners import AUTHENTICATED, BETWEEN_NODES, KEY, Listener, listening
from raw_peer import is_hung_up_on, prove, receive_frame

from elastic.errors import LinkError
from elastic.link.link import Heartbeat, LinkClient, key_path
from elastic.wire import base
from elastic.wire.base import AuthenticationError
from elastic.wire.handshake import MAX_FRAME, ClientHandshake, SecretKey, ServerHandshake, frame
from elastic.wire.hub import listen_on_path


@pytest.fixture(params=AUTHENTICATED)
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    with listening(request.param, tmp_path) as listener:
        yield listener
        listener.serve()


@pytest.fixture(params=BETWEEN_NODES)
def tcp_listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    with listening(request.param, tmp_path) as listener:
        yield listener
        listener.serve()


def key_of(listener: Listener) -> SecretKey:
    assert listener.port.key is not None
    return listener.port.key


@contextlib.contextmanager
def connected(listener: Listener) -> Iterator[socket.socket]:
    with listener.port.connect() as sock:
        sock.settimeout(30)
        yield sock


def test_a_client_with_another_secret_is_rejected(tcp_listener: Listener) -> None:
    assert tcp_listener.connect_with is not None
    with pytest.raises(Exception, match="has not proved that it has this run's secret"):
        tcp_listener.connect_with(SecretKey.generate())


def test_a_client_with_an_invalid_proof_receives_only_the_challenge(listener: Listener) -> None:
    with connected(listener) as sock:
        handshake = ClientHandshake(SecretKey.generate(), listener.port.identity)
        sock.sendall(frame(handshake.hello))
        assert len(receive_frame(sock)) <= MAX_FRAME
        sock.sendall(frame(bytes(32)) + frame(b'{"hello":"anyone"}') * 3)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_a_replayed_handshake_is_rejected(listener: Listener) -> None:
    """Replay of all frames, and of the proof alone."""
    with connected(listener) as good:
        handshake = ClientHandshake(key_of(listener), listener.port.identity)
        good.sendall(frame(handshake.hello))
        proof = handshake.answer(receive_frame(good))
        good.sendall(frame(proof))
    with connected(listener) as replayed:
        replayed.sendall(frame(handshake.hello))
        challenge = receive_frame(replayed)
        with pytest.raises(AuthenticationError):  # the server's nonce has changed
            stale = ClientHandshake(key_of(listener), listener.port.identity)
            stale.answer(challenge)
        replayed.sendall(frame(proof))
        assert is_hung_up_on(replayed)


def test_a_reflected_server_proof_is_rejected(listener: Listener) -> None:
    """Reflection: the server's proof is sent back on the same and on another connection."""
    with connected(listener) as one, connected(listener) as other:
        hello = ClientHandshake(SecretKey.generate(), listener.port.identity).hello
        for sock in (one, other):
            sock.sendall(frame(hello))
        challenges = receive_frame(one), receive_frame(other)
        one.sendall(frame(challenges[0][-32:]))
        other.sendall(frame(challenges[0][-32:]))
        assert is_hung_up_on(one) and is_hung_up_on(other)


def test_a_proof_obtained_on_a_second_connection_is_rejected(listener: Listener) -> None:
    """The challenge is sent as a client hello: the proof in the answer is for the server role."""
    with connected(listener) as one, connected(listener) as other:
        one.sendall(frame(ClientHandshake(SecretKey.generate()).hello))
        challenge = receive_frame(one)
        other.sendall(frame(challenge[:-32]))
        answer = receive_frame(other)
        one.sendall(frame(answer[-32:]))
        assert is_hung_up_on(one)


@pytest.mark.parametrize("purpose", ["liveness", "store", "memory"])
def test_a_key_for_another_purpose_is_rejected(tcp_listener: Listener, purpose: str) -> None:
    with connected(tcp_listener) as sock, pytest.raises(AuthenticationError):
        prove(sock, KEY.derive(purpose), tcp_listener.port.identity)


class Impostor:
    """Listens on its own port without the secret, and records what it receives."""

    def __init__(self, answers: str) -> None:
        self.received = bytearray()
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(30)
        self._thread = threading.Thread(target=self._run, name="impostor")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.settimeout(30)
            hello = receive_frame(connection)
            self.received += hello
            match self._answers:
                case "another secret":
                    answer = ServerHandshake(SecretKey.generate(), "node").challenge(hello)
                case "the hello":
                    answer = hello + bytes(32)
                case "its own proof":
                    answer = hello[:40] + hello[-32:]
                case _:
                    answer = b""
            connection.sendall(frame(answer))
            while chunk := connection.recv(1000):
                self.received += chunk


@pytest.mark.parametrize("answers", ["another secret", "the hello", "its own proof", "nothing"])
def test_a_client_sends_no_request_to_an_impostor(tcp_listener: Listener, answers: str) -> None:
    """On a port that was an agent's: no request, and no proof that could be used elsewhere."""
    assert tcp_listener.real_client is not None
    impostor = Impostor(answers)
    with pytest.raises(Exception, match=r"has not proved|does not speak"):
        tcp_listener.real_client(impostor.port)
    impostor.close()
    assert len(impostor.received) <= 8 + 32 + 128, "more than a hello"


def test_a_worker_sends_nothing_to_an_impostor_of_its_agent(tmp_path: Path) -> None:
    path = tmp_path / "link"
    base.write(key_path(str(path)), SecretKey.generate().text.encode())
    received = bytearray()

    def impostor() -> None:
        connection, _ = agents_place.accept()
        with connection, contextlib.suppress(ConnectionError):
            hello = receive_frame(connection)
            answer = ServerHandshake(SecretKey.generate(), "").challenge(hello)
            connection.sendall(frame(answer))
            while chunk := connection.recv(1000):
                received.extend(chunk)

    with listen_on_path(path, backlog=1) as agents_place:
        thread = threading.Thread(target=impostor, name="impostor")
        thread.start()
        with pytest.raises(LinkError, match="is not this worker's agent"):
            LinkClient.connect(
                str(path),
                local_rank=0,
                on_message=lambda message: None,
                on_agent_death=lambda: None,
                heartbeat=lambda: Heartbeat(generation=0, step=0, phase="", step_time_s=0.0),
            )
        thread.join()
    assert received == b""
