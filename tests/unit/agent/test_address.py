"""The address that a node publishes, for every form of ``--local-addr``."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from kit.manual_clock import ManualClock

from elastic.agent.identity import own_address
from elastic.errors import ConfigError
from elastic.store.client import Endpoint
from elastic.tuning.network import configured_address
from elastic.tuning.options import AgentOptions

LOCAL_ETCD = Endpoint("127.0.0.1", 2379)


class Names:
    """A fake resolver with fixed entries, which counts its lookups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **known: list[str]) -> None:
        self.known = known
        self.asked = 0
        real = socket.getaddrinfo

        def look_up(host: str, port: Any, *args: Any, **more: Any) -> Any:
            if host not in self.known:
                return real(host, port, *args, **more)
            self.asked += 1
            if not self.known[host]:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (
                    socket.AF_INET6 if ":" in address else socket.AF_INET,
                    socket.SOCK_STREAM,
                    6,
                    "",
                    (address, 0),
                )
                for address in self.known[host]
            ]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)


def address(local_addr: str, endpoint: Endpoint | None = LOCAL_ETCD) -> str:
    return own_address(local_addr, endpoint, within_s=2.0, clock=ManualClock())


@pytest.mark.parametrize("local_addr", ["10.1.2.3", "fd00::7"])
def test_an_ip_address_stays_unchanged(local_addr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, **{local_addr: []})
    assert address(local_addr) == local_addr
    assert names.asked == 0


def test_a_host_name_resolves_to_its_ipv4_address_first(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, node7=["127.0.1.1", "fd00::7", "10.0.0.7"])
    assert address("node7") == "10.0.0.7"


def test_a_loopback_name_falls_back_to_the_route_to_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where a machine's own name is 127.0.1.1."""
    Names(monkeypatch, node7=["127.0.1.1"])
    assert address("node7") == "127.0.0.1", "the local address of the route to this etcd"
    assert address("node7", None) == "127.0.1.1"


def test_localhost_resolves_to_loopback() -> None:
    assert address("localhost") in ("127.0.0.1", "::1")


def test_the_default_is_the_local_address_of_the_route_to_etcd() -> None:
    assert address("") == "127.0.0.1"


def test_name_resolution_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, node7=[])

    class Later(ManualClock):
        def sleep(self, seconds: float) -> None:
            names.known["node7"] = ["10.0.0.7"]

    assert own_address("node7", None, within_s=2.0, clock=Later()) == "10.0.0.7"


def test_an_unresolvable_name_is_rejected_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, node7=[])
    with pytest.raises(ConfigError, match=r"local-addr=node7 .*not known") as rejected:
        address("node7")
    assert "IP address" in str(rejected.value.hint)
    assert names.asked > 1


# A network is one setting for all nodes -----------------------------------------------------------

ADDRESSES = {"eth0": ("10.1.0.5", "fd00:1::5"), "eth1": ("172.30.0.2",), "lo": ("127.0.0.1",)}


@pytest.mark.parametrize(
    ("local_addr", "network", "expected"),
    [
        ("", None, ""),
        ("node7", None, "node7"),
        (None, "172.30.0.0/24", "172.30.0.2"),
        (None, "172.30.0.2/24", "172.30.0.2"),
        (None, "fd00:1::/64", "fd00:1::5"),
        ("172.30.0.2", "172.30.0.0/24", "172.30.0.2"),
        ("node7", "172.30.0.0/24", "node7"),
    ],
)
def test_the_address_in_the_given_network_is_announced(
    local_addr: str | None, network: str | None, expected: str
) -> None:
    assert configured_address(local_addr, network, ADDRESSES) == expected


def test_a_network_without_a_local_address_lists_the_local_networks() -> None:
    with pytest.raises(ConfigError) as rejected:
        configured_address(None, "10.9.0.0/16", ADDRESSES)
    assert "network=10.9.0.0/16: this machine has no address" in str(rejected.value)
    assert "eth1 (172.30.0.2)" in str(rejected.value) and "127.0.0.1" not in str(rejected.value)


def test_an_address_outside_the_network_is_rejected_with_both() -> None:
    with pytest.raises(ConfigError, match=r"--local-addr=10\.1\.0\.5 and network=172\.30\.0\.0/24"):
        configured_address("10.1.0.5", "172.30.0.0/24", ADDRESSES)


@pytest.mark.parametrize("network", ["eth1", "10.1.0.0/33", "10.1"])
def test_an_invalid_network_is_rejected(network: str) -> None:
    with pytest.raises(ConfigError, match=f"network={network} is not a network"):
        AgentOptions(network=network)
