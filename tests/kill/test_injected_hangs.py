"""Hangs of every kind in every place: the right worker, and no other, is named and killed."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
from hang_injection import (
    LONG_WORKLOAD,
    SCRIPT,
    WORKLOAD,
    Outcome,
    draw,
    inject,
    inject_while_a_world_forms,
    one_of_each,
    start,
    table,
)
from training_job import train_undisturbed

from elastic.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.slow

SEED = 17
RUNS = int(os.environ.get("INJECTED_HANGS", "200"))
RUNS_OF_A_JOB = 20  # a ledger of hours is slow to read


@pytest.mark.timeout(1200)
def test_every_kind_of_hang_is_attributed_to_the_right_worker(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    undisturbed = train_undisturbed(tmp_path / "alone", WORKLOAD, SCRIPT)
    with start(etcd.endpoint, tmp_path, WORKLOAD) as job:
        outcomes = [inject(job, injection) for injection in one_of_each(random.Random(SEED))]
        assert not any(outcome.wrong for outcome in outcomes), table(outcomes)
        job.assert_finishes_whole(undisturbed)


def test_a_worker_that_hangs_while_a_world_forms_is_identified(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Its peers wait for it before the first step of that world."""
    with start(etcd.endpoint, tmp_path, WORKLOAD) as job:
        outcomes = [inject_while_a_world_forms(job, action) for action in ("stop", "sleep")]
        assert not any(outcome.wrong for outcome in outcomes), table(outcomes)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_random_hangs_are_attributed_correctly(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    undisturbed = train_undisturbed(tmp_path / "alone", LONG_WORKLOAD, SCRIPT)
    seed = int(os.environ.get("INJECTED_HANGS_SEED", SEED))
    injections = draw(random.Random(seed))
    outcomes: list[Outcome] = []
    for number in range(0, RUNS, RUNS_OF_A_JOB):
        folder = tmp_path / str(number)
        folder.mkdir()
        with start(etcd.endpoint, folder, LONG_WORKLOAD) as job:
            for injection in itertools.islice(injections, min(RUNS_OF_A_JOB, RUNS - number)):
                outcomes.append(inject(job, injection))
                print(f"{len(outcomes)}: {outcomes[-1]}", flush=True)
                if "no recovery" in outcomes[-1].wrong:
                    break  # the next one cannot be judged
            else:
                job.assert_finishes_whole(undisturbed)
    print(f"seed {seed}\n{table(outcomes)}")
    assert not any(outcome.wrong for outcome in outcomes), table(outcomes)
