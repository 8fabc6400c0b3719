"""Real etcd for the kill tests, and what their jobs would end with undisturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_job import PLAIN, Workload, train_undisturbed

from elastic.store.embedded.etcd import EmbeddedCluster, EmbeddedEtcd


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    """A single etcd member."""
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture(scope="module")
def etcd_of_three() -> Iterator[EmbeddedCluster]:
    """Three etcd members."""
    with EmbeddedCluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def workload() -> Workload:
    """What most jobs train."""
    return Workload()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, workload: Workload) -> Path:
    """Final weights of the session script, trained in one process."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), workload)


@pytest.fixture(scope="session")
def undisturbed_plain(tmp_path_factory: pytest.TempPathFactory, workload: Workload) -> Path:
    """Final weights of the unmodified script, trained in one process."""
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return train_undisturbed(tmp_path_factory.mktemp("plain"), workload, PLAIN, alone)
