"""Reserved ports: not assigned to others, but available to the store."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic.agent.identity import PortReserve


@pytest.fixture
def reserve() -> Iterator[PortReserve]:
    ports = PortReserve()
    yield ports
    ports.close()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torchs_store_can_listen_on_a_reserved_port_repeatedly(
    reserve: PortReserve, use_libuv: bool
) -> None:
    for _ in range(3):
        store = TCPStore(
            "127.0.0.1",
            reserve.ports[0],
            1,
            True,
            timeout=timedelta(seconds=5),
            use_libuv=use_libuv,
        )
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store


def test_a_reserved_port_is_not_assigned_to_others(reserve: PortReserve) -> None:
    given = set()
    for option in (0, 1) * 3000:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, option)
            other.bind(("", 0))
            given.add(other.getsockname()[1])
    assert not given & set(reserve.ports)


def test_ports_are_distinct_and_free_after_close() -> None:
    reserve = PortReserve(8)
    ports = reserve.ports
    assert len(set(ports)) == 8
    reserve.close()
    for port in ports:
        with socket.socket() as other:
            other.bind(("", port))
