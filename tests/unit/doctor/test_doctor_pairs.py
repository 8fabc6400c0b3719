"""TCP between pairs of nodes: one row per node for successes, one per pair for failures."""

from __future__ import annotations

import socket
import threading
from dataclasses import asdict

from elastic.doctor import network
from elastic.doctor.checks import Status


def connection(to: int, error: str = "", port: int = 29500) -> dict[str, object]:
    return asdict(
        network.ConnectionAttempt(
            to=to, address=f"10.0.0.{to}", port=port, took_ms=1.0, error=error
        )
    )


def test_each_failing_pair_is_named_and_the_others_share_a_row() -> None:
    names = ["a", "b", "c"]
    attempts = {
        0: [connection(1), connection(2)],
        1: [connection(0), connection(2, "no answer within 3 s")],
        2: [
            connection(0, "Connection refused"),
            connection(1, "connects, but 64 KiB do not come back"),
        ],
    }
    found = {f.name: f for f in network.pair_findings(names, attempts)}
    assert found["TCP a → b, c"].status is Status.OK
    assert found["TCP b → a"].status is Status.OK
    assert found["TCP b → c"].measured == "10.0.0.2:29500: no answer within 3 s"
    assert "firewall drops" in found["TCP b → c"].remedy
    assert "--local-addr" in found["TCP c → a"].remedy
    assert "MTU" in found["TCP c → b"].remedy
    assert len(found) == 5


def test_sixty_nodes_that_reach_each_other_take_sixty_rows() -> None:
    names = [f"n{i}" for i in range(60)]
    attempts = {n: [connection(to) for to in range(60) if to != n] for n in range(60)}
    found = network.pair_findings(names, attempts)
    assert len(found) == 60 and found[0].name == "TCP n0 → 59 nodes"


def test_a_listener_echoes_and_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with network.listening_ports("127.0.0.1", [port]) as listeners:
            assert len(listeners.ports) == 1
            assert listeners.errors == (f"port {port}: Address already in use",)
            (tried,) = network.connect_to_all([(1, "127.0.0.1", listeners.ports[0])])
            assert tried.error == "" and tried.took_ms > 0
        (gone,) = network.connect_to_all([(1, "127.0.0.1", listeners.ports[0])])
    assert gone.error == "Connection refused"


def test_a_link_that_drops_large_payloads_fails() -> None:
    """The symptom of an MTU mismatch on the path: the handshake succeeds, data is lost."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        accepted: list[socket.socket] = []
        thread = threading.Thread(target=lambda: accepted.append(mute.accept()[0]), name="mute")
        thread.start()
        (tried,) = network.connect_to_all([(1, "127.0.0.1", mute.getsockname()[1])])
        thread.join()
        accepted[0].close()
    assert tried.error == "connects, but 64 KiB do not come back"
