"""Real etcd for the kill tests, and the final weights of undisturbed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_series import J, JobSeries, StartSeries
from training_job import PLAIN, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedCluster, EmbeddedEtcd
from elastic.testing.node import LocalNode


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


@pytest.fixture(scope="module")
def start_series(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartSeries]:
    """``start_series(start, reference)`` makes a JobSeries that ends with the file."""
    made: list[JobSeries[TrainingJob]] = []
    failed_before = request.session.testsfailed

    def make(start: Callable[[Path], J], reference: Path | None = None) -> JobSeries[J]:
        series = JobSeries(start, lambda: tmp_path_factory.mktemp("job"), reference)
        made.append(series)  # type: ignore[arg-type]
        return series

    yield make
    try:
        for series in made:
            if request.session.testsfailed == failed_before:
                series.finish()
    finally:
        for series in made:
            series.stop()


@pytest.fixture
def job(jobs: JobSeries[TrainingJob]) -> TrainingJob:
    """The job shared by the tests of a file: see job_series.py."""
    return jobs.current()


@pytest.fixture
def nodes(job: TrainingJob) -> list[LocalNode]:
    """The maximum number of nodes, which train together."""
    return job.bring_to(job.options.max_nodes)


@pytest.fixture(scope="session")
def workload() -> Workload:
    """The workload of most jobs."""
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
