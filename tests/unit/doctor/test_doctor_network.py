"""TCP between nodes: connections of each pair, and the bandwidth of each path to the next node."""

from __future__ import annotations

import socket
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest

from elastic.doctor import network
from elastic.doctor.checks import Status
from elastic.doctor.network import MeasuredPath
from elastic.tuning.network import Interface, Network

NAMES, ADDRESSES = ("a", "b", "c"), ("10.1.0.1", "10.1.0.2", "10.1.0.3")
SLOW = MeasuredPath(
    to=1, address="10.1.0.2", interface="eth0", their_interface="eth0", bytes_per_s=0.1e9
)
FAST = replace(SLOW, address="10.2.0.2", interface="eth1", their_interface="eth1", bytes_per_s=10e9)
HERE = Network(interfaces=(Interface(name="dummy0", addresses=("127.0.0.1",)),))


def test_a_faster_path_than_the_one_in_use_is_reported_with_its_setting() -> None:
    (found,) = network.bandwidth_findings(NAMES, ADDRESSES, {0: [SLOW, FAST], 1: [], 2: []})
    assert (found.name, found.status) == ("bandwidth a → b", Status.WARNING)
    assert found.measured == (
        "10.1.0.2 (eth0, which a job uses) 0.100 GB/s; 10.2.0.2 (eth1) 10.000 GB/s"
    )
    assert "--local-addr=ADDRESS" in found.remedy and "NCCL_SOCKET_IFNAME=eth1" in found.remedy


def test_a_network_that_is_fast_for_all_nodes_yields_one_setting_for_all() -> None:
    fast = replace(FAST, networks=("10.2.0.0/24", "fd00::/64"))
    of_b = replace(fast, to=2, address="10.2.0.3", networks=("10.2.0.0/24",))
    slow_of_b = replace(SLOW, to=2, address="10.1.0.3")
    found = network.bandwidth_findings(
        NAMES, ADDRESSES, {0: [SLOW, fast], 1: [slow_of_b, of_b], 2: []}
    )
    assert [f.status for f in found] == [Status.WARNING] * 2
    assert all("start all nodes with --rdzv-conf network=10.2.0.0/24" in f.remedy for f in found)
    cable = replace(of_b, address="10.3.0.3", networks=("10.3.0.0/30",))
    found = network.bandwidth_findings(
        NAMES, ADDRESSES, {0: [SLOW, fast], 1: [slow_of_b, cable], 2: []}
    )
    assert all("--local-addr=ADDRESS" in f.remedy for f in found), "no network has all of them"


@pytest.mark.parametrize("rate", [0.0, 0.05e9, 0.19e9])
def test_a_slightly_faster_path_causes_no_warning(rate: float) -> None:
    (found,) = network.bandwidth_findings(
        NAMES, ADDRESSES, {0: [SLOW, replace(FAST, bytes_per_s=rate)]}
    )
    assert found.status is Status.OK
    assert ("10.2.0.2" in found.measured) is (rate > 0), "only addresses that answer are listed"


def test_nodes_of_one_machine_are_not_measured() -> None:
    (found,) = network.bandwidth_findings(NAMES, ADDRESSES, {0: [], 1: []})
    assert found.status is Status.SKIPPED
    assert (
        network._measure(HERE, 1, [network.Sink(interface="x", address="127.0.0.1", port=9)]) == []
    )


def test_sent_data_is_counted_by_the_receiver() -> None:
    with network.listening_sinks(HERE) as (sink,):
        assert (sink.interface, sink.address) == ("dummy0", "127.0.0.1")
        assert network.measure_bandwidth(sink.address, sink.port) > 0
    assert network.measure_bandwidth(sink.address, sink.port) == 0.0, "the listener is closed"
    assert not any("elastic-doctor-sink" in thread.name for thread in threading.enumerate())


def test_a_node_that_reads_nothing_blocks_no_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "DOCTOR_PAIR_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert network.measure_bandwidth("127.0.0.1", int(mute.getsockname()[1])) == 0.0


def test_each_node_sends_to_the_next_without_simultaneous_senders() -> None:
    """Three nodes on one machine, with networks that do not contain each other's address."""
    exchanged: list[dict[int, Any]] = [{} for _ in range(4)]
    barrier = threading.Barrier(3)
    results: dict[int, Any] = {}

    def by_node_of(number: int) -> Any:
        phases = iter(exchanged)

        def by_node(value: Any) -> dict[int, Any]:
            phase = next(phases)
            phase[number] = value
            barrier.wait(60)
            return phase

        return by_node

    def run(number: int) -> None:
        own = Network(interfaces=(Interface(name="eth0", addresses=(addresses[number],)),))
        results[number] = network.between_nodes(by_node_of(number), NAMES, addresses, number, own)

    addresses = [f"127.0.{n}.1" for n in range(3)]
    threads = [threading.Thread(target=run, args=(n,), name=f"node-{n}") for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == results[2]
    assert [(f.name, f.status) for f in results[0]] == [
        ("bandwidth a → b", Status.OK),
        ("bandwidth b → c", Status.OK),
    ]


# Pairs ------------------------------------------------------------------------------------------


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
            (clock,) = network.clock_findings(["here", "there"], {0: [asdict(tried)]})
            assert clock.status is Status.OK and "±" in clock.measured
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
