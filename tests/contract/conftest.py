"""The three stores that must behave alike: memory, one etcd, three members of which one is down."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from store_kinds import Backend, ClusterBackend, MemoryBackend, SingleBackend

from elastic.store.embedded import EmbeddedCluster
from elastic.store.keyvalue import KeyValue


@pytest.fixture(scope="session")
def cluster_backend() -> Iterator[ClusterBackend]:
    with EmbeddedCluster() as cluster:
        yield ClusterBackend(cluster)


@pytest.fixture(params=["memory", "etcd", pytest.param("three members", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "memory":
        return MemoryBackend()
    if request.param == "etcd":
        return SingleBackend(request.getfixturevalue("shared_etcd"))
    cluster = request.getfixturevalue("cluster_backend")
    assert isinstance(cluster, ClusterBackend)
    cluster.next_test()
    return cluster


@pytest.fixture
def open_store(backend: Backend) -> Iterator[Callable[[], KeyValue]]:
    """Opens clients of the same store; all are closed after the test."""
    clients: list[KeyValue] = []

    def open_one() -> KeyValue:
        clients.append(backend.open())
        return clients[-1]

    yield open_one
    for client in clients:
        client.close()


@pytest.fixture
def store(open_store: Callable[[], KeyValue]) -> KeyValue:
    return open_store()
