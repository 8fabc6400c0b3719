"""The emulated network of the tests: only the packets of an injected fault are lost."""

from __future__ import annotations

import doctest
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kit.network import packets
from kit.network.emulated import EmulatedMachine, EmulatedNetwork, why_unavailable

WHY_NOT = why_unavailable()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
PATIENCE_S = 90.0
ECHO = """
import socket, threading
def echo(one):
    while data := one.recv(100):
        one.sendall(data)
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"""


@contextmanager
def echo_server(machine: EmulatedMachine) -> Iterator[tuple[str, int]]:
    command = [*machine.launcher, sys.executable, "-c", ECHO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield machine.address, int(server.stdout.readline())
        finally:
            server.kill()


def connect(address: tuple[str, int], timeout_s: float = PATIENCE_S) -> socket.socket:
    return socket.create_connection(address, timeout=timeout_s)


def echoes(connection: socket.socket) -> bool:
    connection.sendall(b"x")
    return connection.recv(1) == b"x"


def test_the_docstring_examples_pass() -> None:
    assert doctest.testmod(packets).failed == 0


def test_the_flow_is_read_from_a_packet() -> None:
    header = bytes([0x45, *[0] * 8, 6, *[0] * 2, 10, 0, 0, 1, 10, 0, 0, 2])
    tcp = header + b"\x12\x34\x56\x78" + bytes(16)
    assert packets.addresses_of(tcp) == (b"\x0a\0\0\x01", b"\x0a\0\0\x02")
    assert packets.flow_of(tcp) == packets.Flow(
        b"\x0a\0\0\x01", b"\x0a\0\0\x02", b"\x12\x34\x56\x78"
    )
    assert packets.flow_of(tcp[:9] + b"\x11" + tcp[10:]) is None, "UDP"
    assert packets.flow_of(tcp[:7] + b"\x08" + tcp[8:]) is None, "a later fragment has no ports"
    assert packets.addresses_of(b"\x60" + tcp[1:]) is None, "IPv6"


@needs_namespaces
def test_faults_take_effect_until_they_are_healed() -> None:
    with EmulatedNetwork(2) as network:
        one, other = network.machines
        with echo_server(one) as address, connect(address) as old:
            assert echoes(old)

            assert network.drop_established(one.address, network.host) == 2, "both directions"
            old.sendall(b"x")
            with connect(address) as new:
                assert echoes(new), "new connections work"
            old.setblocking(False)
            with pytest.raises(BlockingIOError):
                old.recv(1)
            network.heal()
            old.settimeout(PATIENCE_S)
            assert old.recv(1) == b"x", "the old connection is still open: TCP retransmits"

            network.degrade(one.address, network.host, delay_s=0.2)
            began_s = time.monotonic()
            assert echoes(old)
            assert time.monotonic() - began_s >= 0.4
            network.heal()

            for lost in (
                [(one.address, network.host), (network.host, one.address)],
                [(one.address, network.host)],
                [(network.host, one.address)],
            ):
                for source, target in lost:
                    network.drop(source, target)
                with pytest.raises(TimeoutError):
                    connect(address, timeout_s=0.5)
                network.heal()
                connect(address).close()

            network.cut(one.address, other.address)
            connect(address).close()  # that pair is not affected
            network.degrade(one.address, network.host, loss=0.3)
            assert all(echoes(old) for _ in range(5)), "late, but complete"
        assert network.others(one) == (other.address,)
    with pytest.raises(OSError):
        connect(address, timeout_s=0.5)


@needs_namespaces
def test_a_closed_network_leaves_no_namespace() -> None:
    with EmulatedNetwork(1) as network:
        namespace = network.machines[0].namespace
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert namespace not in listed


def test_networks_of_one_process_are_distinct() -> None:
    first, second = EmulatedNetwork(1), EmulatedNetwork(1)
    assert first.host != second.host
    assert first.machines[0].namespace != second.machines[0].namespace
    assert first.machines[0].address != second.machines[0].address
