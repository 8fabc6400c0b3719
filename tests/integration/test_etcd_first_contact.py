"""The first connection to etcd: the error messages when it fails."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest
from etcd_fixtures import PATIENCE_S, SmallEtcd, elastic_threads, fill_etcd, wait_alarm
from etcd_proxy import CuttingProxy

from elastic.errors import StoreFull, StoreTooOld, StoreUnreachable
from elastic.store.client import load_grpc, load_rpc
from elastic.store.embedded import EmbeddedEtcd, reserve_port
from elastic.store.etcd import EtcdStore

Connect = Callable[..., EtcdStore]


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address without a listener."""
    with reserve_port("127.0.0.1") as held:
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_every_failed_endpoint_is_named_with_its_reason(
    connect: Connect, nobody: str, black_hole: str
) -> None:
    begun_s, before = time.monotonic(), elastic_threads()
    with pytest.raises(StoreUnreachable) as caught:
        connect(f"{nobody},{black_hole},no-such-host.invalid:2379", connect_timeout_s=8)
    message = caught.value.message
    assert f"{nobody}: connection refused" in message
    assert f"{black_hole}: no answer within" in message
    assert "no-such-host.invalid:2379: " in message
    assert "not tried" not in message
    assert caught.value.hint
    assert caught.value.exit_code == 69
    assert time.monotonic() - begun_s < PATIENCE_S
    assert elastic_threads() <= before


def test_a_live_member_is_found_after_dead_endpoints(
    connect: Connect, nobody: str, black_hole: str, shared_etcd: EmbeddedEtcd, root: str
) -> None:
    store = connect(f"{nobody},{black_hole},{shared_etcd.endpoint}", connect_timeout_s=PATIENCE_S)
    assert store.put(f"{root}a", b"1") > 0
    assert store.endpoint is not None and store.endpoint.port == shared_etcd.port


def test_the_store_waits_for_an_etcd_that_is_starting(connect: Connect) -> None:
    with EmbeddedEtcd() as etcd:
        etcd.kill()
        etcd.launch()
        store = connect(etcd.endpoint, connect_timeout_s=PATIENCE_S)
        assert store.list("/").entries == ()


def test_an_etcd_whose_handshake_takes_longer_than_a_second_is_reached(
    connect: Connect, black_hole: str, shared_etcd: EmbeddedEtcd, root: str
) -> None:
    """With five round trips of 0.3 s, or on a busy machine: the attempt goes on while the other
    endpoints are tried, and is not begun again each time."""
    with CuttingProxy(shared_etcd.endpoint, handshake_s=1.5) as far:
        store = connect(f"{far.endpoint},{black_hole}", connect_timeout_s=PATIENCE_S)
        assert store.put(f"{root}a", b"1") > 0
        assert str(store.endpoint) == far.endpoint
        store.close()


@pytest.fixture
def etcd_of_version() -> Iterator[Callable[[str], str]]:
    """``start(version)``: a gRPC server that only answers Status, with that version."""
    grpc, rpc, servers = load_grpc(), load_rpc(), []

    def start(version: str) -> str:
        def status(request: object, context: object) -> object:
            return rpc.StatusResponse(version=version, leader=1)

        server = grpc.server(futures.ThreadPoolExecutor(1))
        handler = grpc.unary_unary_rpc_method_handler(
            status,
            request_deserializer=rpc.StatusRequest.FromString,
            response_serializer=rpc.StatusResponse.SerializeToString,
        )
        service = {"Status": handler}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("etcdserverpb.Maintenance", service),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


@pytest.mark.parametrize("version", ["3.3.27", "2.3.8", ""])
def test_an_etcd_before_3_4_is_refused(
    connect: Connect, etcd_of_version: Callable[[str], str], version: str
) -> None:
    endpoint = etcd_of_version(version)
    with pytest.raises(StoreTooOld) as caught:
        connect(endpoint, connect_timeout_s=PATIENCE_S)
    assert endpoint in caught.value.message
    assert version in caught.value.message
    assert "3.4" in caught.value.hint


def test_a_full_etcd_is_named_at_once_with_the_commands_that_free_it(connect: Connect) -> None:
    """It was retried for the whole limit of a call, and then "did not answer"."""
    with SmallEtcd() as etcd:
        store = connect(etcd.endpoint, connect_timeout_s=PATIENCE_S, request_timeout_s=PATIENCE_S)

        with pytest.raises(StoreFull, match=r"put /fill/.* etcd is full \(NOSPACE\)") as caught:
            fill_etcd(store)
        assert "etcdctl alarm disarm" in caught.value.hint

        wait_alarm(store)
        with pytest.raises(StoreFull, match="grant a lease: etcd is full"):
            store.lease(5)
        assert store.get("/fill/0") is not None
        store.close()
