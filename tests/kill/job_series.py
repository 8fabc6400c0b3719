"""The jobs of a file whose tests share one: starting a job takes longer than most faults.

Each test takes the job as it is and starts or kills nodes as needed, so it may run alone, first or
last. A test that trains the job to its end requires a new job for the next test::

    @pytest.fixture(scope="module")
    def jobs(etcd: EmbeddedEtcd, start_series: StartSeries) -> JobSeries[TrainingJob]:
        return start_series(lambda folder: TrainingJob([etcd.endpoint], folder))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from training_job import TrainingJob

J = TypeVar("J", bound=TrainingJob)


class JobSeries(Generic[J]):
    """A sequence of jobs, each in a separate folder.

    Args:
        start: makes a job in the folder it is given.
        new_folder: makes a folder.
        reference: final weights of an undisturbed run, for :meth:`finish`.
    """

    def __init__(
        self,
        start: Callable[[Path], J],
        new_folder: Callable[[], Path],
        reference: Path | None = None,
    ) -> None:
        self._start = start
        self._new_folder = new_folder
        self._reference = reference
        self._job: J | None = None

    def current(self) -> J:
        """The job, unless it has been trained to its end: then a new one.

        On a slow machine it may be well into its second half: it is then finished, before its slow
        steps delay all tests, and before it ends during one.
        """
        job = self._job
        if job is not None and job.is_late:
            self.finish()
        return self.fresh() if job is None or job.is_ending or job.is_late else job

    def fresh(self) -> J:
        """A job without any started node."""
        if self._job is None or self._job.nodes:
            self.stop()
            job = self._start(self._new_folder())
            self._job = job.__enter__()
        return self._job

    def finish(self) -> None:
        """Train the job to its end and verify everything, unless a test has done so."""
        job = self._job
        if job is None or job.is_ending or self._reference is None:
            return
        if len(job.running) >= max(1, job.options.min_nodes):
            job.assert_finishes_whole(self._reference)

    def stop(self) -> None:
        """Kill what runs."""
        job, self._job = self._job, None
        if job is not None:
            job.__exit__(None, None, None)


class StartSeries(Protocol):
    """The fixture ``start_series``: makes a series, which ends with the file."""

    def __call__(
        self, start: Callable[[Path], J], reference: Path | None = None
    ) -> JobSeries[J]: ...
