"""The stores that must behave alike, and the faults that tests inject into each.

In a cluster of three, one member at a time is killed and restarted between tests.
"""

from __future__ import annotations

from typing import Protocol

from kit.memory_store import MemoryServer, MemoryStore

from elastic.store.client import EtcdConfig, parse_endpoints
from elastic.store.embedded import EmbeddedCluster, EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.store.keyvalue import KeyValue, Lease
from elastic.testing.waiting import eventually


class Backend(Protocol):
    """A kind of store, and the faults that tests inject."""

    def open(self) -> KeyValue:
        """A new client."""
        ...

    def interrupt(self, client: KeyValue) -> None:
        """Cut all connections of ``client``; it can reconnect when this returns."""
        ...

    def expire(self, lease: Lease) -> None:
        """Expire a lease regardless of renewals."""
        ...


class MemoryBackend:
    def __init__(self) -> None:
        self._server = MemoryServer()

    def open(self) -> KeyValue:
        return MemoryStore(self._server)

    def interrupt(self, client: KeyValue) -> None:
        self._server.disconnect()
        self._server.reconnect()

    def expire(self, lease: Lease) -> None:
        self._server.expire(lease.id)


def open_etcd(endpoint: str) -> EtcdStore:
    return EtcdStore(
        EtcdConfig(endpoints=parse_endpoints(endpoint), connect_timeout_s=90, request_timeout_s=90)
    )


def revoke(endpoint: str, lease: Lease) -> None:
    """Revoke a lease, which has the effect of an expiry without the wait."""
    from elastic.store.client import load_grpc, load_rpc

    def attempt() -> bool:
        for address in endpoint.split(","):
            with load_grpc().insecure_channel(address) as channel:
                try:
                    request = load_rpc().LeaseRevokeRequest(ID=lease.id)
                    load_rpc().LeaseStub(channel).LeaseRevoke(request, timeout=30)
                    return True
                except load_grpc().RpcError:
                    continue
        return False

    eventually(attempt, "the lease is revoked")


class SingleBackend:
    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._etcd = etcd

    def open(self) -> KeyValue:
        return open_etcd(self._etcd.endpoint)

    def interrupt(self, client: KeyValue) -> None:
        self._etcd.restart()

    def expire(self, lease: Lease) -> None:
        revoke(self._etcd.endpoint, lease)


class ClusterBackend:
    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._cluster = cluster
        self._tests = 0

    def next_test(self) -> None:
        """Stop a member before every fourth test, and start it again two tests later."""
        turn, phase = divmod(self._tests, 4)
        victim = self._cluster.members[turn % 3]
        if phase == 1:
            victim.stop()
        elif phase == 3:
            victim.start()
        self._tests += 1

    def open(self) -> KeyValue:
        return open_etcd(self._cluster.endpoint)

    def interrupt(self, client: KeyValue) -> None:
        """Restart the member that the client uses, with all members up again afterwards."""
        assert isinstance(client, EtcdStore)
        self._cluster.start()
        used = eventually(lambda: client.endpoint, "the client is connected")
        assert used is not None
        next(m for m in self._cluster.members if m.port == used.port).restart()

    def expire(self, lease: Lease) -> None:
        revoke(self._cluster.endpoint, lease)
