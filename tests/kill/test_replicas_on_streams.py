"""Ranks of replicas die while gradients are summed on a stream, as on GPUs; the others continue.

Some of the faults of test_deaths_in_replicas.py, on the backend of
:mod:`kit.nccl_semantics`: only the communicator across replicas is aborted, and
its partial gradients must not reach the optimizer. ``make streams`` runs all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from kit import nccl_semantics
from test_deaths_in_replicas import (
    Before,
    Fault,
    Layout,
    before,
    check,
    in_a_step,
    jobs,
    layout,
    of,
    of_a_replacement,
    reference,
)
from training_job import TrainingJob

__all__ = ["before", "jobs", "layout", "reference"]  # fixtures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def on_a_stream() -> Iterator[None]:
    """The nodes of this module, and the undisturbed reference run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRAINING_BACKEND", nccl_semantics.NAME)
        yield


@of(Layout(1, 4), [*in_a_step("reduce-scattered", "all-reduced"), *of_a_replacement("received")])
def test_replicas_within_one_node_survive_deaths(
    job: TrainingJob, layout: Layout, before: Before, fault: Fault
) -> None:
    check(job, layout, before, fault)
    assert f"trains on {nccl_semantics.NAME}" in job.running[0].log_text()
