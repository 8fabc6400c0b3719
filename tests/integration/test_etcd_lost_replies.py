"""etcd has applied a request whose reply is lost: the retry must not report a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from etcd_fixtures import PATIENCE_S
from etcd_proxy import CuttingProxy

from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.waiting import eventually

T = TypeVar("T")
Connect = Callable[..., EtcdStore]


@pytest.fixture
def proxy(shared_etcd: EmbeddedEtcd) -> Iterator[CuttingProxy]:
    with CuttingProxy(shared_etcd.endpoint) as proxy:
        yield proxy


@pytest.fixture
def direct(connect: Connect, shared_etcd: EmbeddedEtcd) -> EtcdStore:
    return connect(shared_etcd.endpoint)


@pytest.fixture
def behind(connect: Connect, proxy: CuttingProxy) -> EtcdStore:
    return connect(proxy.endpoint, request_timeout_s=PATIENCE_S)


def lose_reply_of(
    proxy: CuttingProxy, call: Callable[[], T], carried_out: Callable[[], object]
) -> T:
    """Run ``call`` such that etcd applies it once and the reply never arrives."""
    results: list[T] = []
    proxy.lose_replies()
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    eventually(carried_out, "etcd carries the request out")
    proxy.restore()
    thread.join(PATIENCE_S)
    return results[0]


def test_a_swap_with_a_lost_reply_reports_success(
    behind: EtcdStore, direct: EtcdStore, proxy: CuttingProxy, root: str
) -> None:
    key = f"{root}leader"
    revision = lose_reply_of(
        proxy,
        lambda: behind.compare_and_swap(key, b"me", expected_revision=0),
        lambda: direct.get(key),
    )
    entry = direct.get(key)
    assert entry is not None and entry.mod_revision == revision
    assert direct.compare_and_swap(key, b"next", expected_revision=revision) is not None


def test_a_swap_overwritten_by_another_client_reports_failure(
    behind: EtcdStore, direct: EtcdStore, proxy: CuttingProxy, root: str
) -> None:
    key = f"{root}leader"

    def overwritten() -> bool:
        return direct.get(key) is not None and direct.put(key, b"other") > 0

    result = lose_reply_of(
        proxy, lambda: behind.compare_and_swap(key, b"me", expected_revision=0), overwritten
    )
    assert result is None


def test_a_swap_under_a_lease_with_a_lost_reply_reports_success(
    behind: EtcdStore, direct: EtcdStore, proxy: CuttingProxy, root: str
) -> None:
    key, lease = f"{root}leader", behind.lease(60)
    revision = lose_reply_of(
        proxy,
        lambda: behind.compare_and_swap(key, b"me", expected_revision=0, lease=lease),
        lambda: direct.get(key),
    )
    assert revision is not None


def test_a_deletion_with_a_lost_reply_reports_success(
    behind: EtcdStore, direct: EtcdStore, proxy: CuttingProxy, root: str
) -> None:
    plain, compared = f"{root}plain", f"{root}compared"
    direct.put(plain, b"")
    revision = direct.put(compared, b"")
    assert lose_reply_of(proxy, lambda: behind.delete(plain), lambda: not direct.get(plain))
    assert lose_reply_of(
        proxy,
        lambda: behind.compare_and_delete(compared, expected_revision=revision),
        lambda: not direct.get(compared),
    )


def test_a_lease_with_a_lost_grant_reply_is_granted_once(
    behind: EtcdStore, direct: EtcdStore, proxy: CuttingProxy, root: str, shared_etcd: EmbeddedEtcd
) -> None:
    from elastic.store.client import load_grpc, load_rpc

    rpc = load_rpc()
    with load_grpc().insecure_channel(shared_etcd.endpoint) as channel:
        stub = rpc.LeaseStub(channel)

        def leases() -> set[int]:
            return {one.ID for one in stub.LeaseLeases(rpc.LeaseLeasesRequest()).leases}

        before = leases()
        lease = lose_reply_of(proxy, lambda: behind.lease(7), lambda: leases() - before)
        assert leases() - before == {lease.id}
    assert lease.ttl_s == 7
    assert direct.put(f"{root}a", b"", lease=lease) > 0
