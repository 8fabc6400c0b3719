"""Common hangs in user code: the right rank is named, with the reason and the location."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

WORKLOAD = Workload(samples=480, epochs=100, step_s=0.2)
CONF = {"hang_timeout_s": 2.0, "hang_script_timeout_s": 6.0}
WARM_UP_STEPS = 6
LOCK = "it waits for a lock, or for another thread"
# The reason in the verdict for each mistake, and the script's function that makes it.
KILLED = {
    "fork-lock": ("perhaps a lock that was held when they were forked", "fork_with_a_lock_held"),
    "tokenizers": ("perhaps a lock that was held when they were forked", "fork_with_tokenizers"),
    "file": ("nobody has opened the other end of a named pipe", "read_a_file_that_nobody_writes"),
    "input": ("on its standard input: it waits for input", "ask_a_person"),
    "pipe": ("nobody reads the pipe it writes to", "save_onto_a_stuck_pipe"),
    "callback": ("it sleeps (time.sleep)", "sleep_in_a_callback"),
    "thread-in-c": (LOCK, "wait_for_a_thread_in_c"),
}
# The others are similar to one of these.
SHORT = ("fork-lock", "input", "pipe", "thread-in-c")


@pytest.fixture(scope="module")
def job(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJob]:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path_factory.mktemp("everyday-hangs"),
        script=SCRIPTS / "everyday_hangs.py",
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf=CONF,
    ) as job:
        yield job


def hang(job: TrainingJob, mistake: str) -> tuple[dict[str, Any], int]:
    """Order the second node to make the mistake; returns the only verdict, and the rank of that
    node.
    """
    job.bring_to(3)
    job.wait_progress(WARM_UP_STEPS)
    victim, generation = job.running[1], job.generation()
    events = len(read_journal(job.folder / "journal"))
    rank = next(
        s.rank for s in job.ledger().steps if (s.generation, s.node) == (generation, victim.name)
    )
    staged = job.folder / "order"
    staged.write_text(victim.name)
    staged.rename(job.folder / f"hang-{mistake}")
    job.wait_for(
        lambda: job.training_nodes()[0] > generation, PATIENCE_S, f"training after {mistake}"
    )
    later = read_journal(job.folder / "journal")[events:]
    (verdict,) = [e for e in later if e["event"] == "hang-found"]
    return verdict, rank


@pytest.mark.parametrize(
    "mistake",
    [m if m in SHORT else pytest.param(m, marks=pytest.mark.soak) for m in KILLED],
)
def test_the_verdict_names_the_hung_rank_and_the_function(job: TrainingJob, mistake: str) -> None:
    verdict, rank = hang(job, mistake)
    said, function = KILLED[mistake]
    assert (verdict["kind"], verdict["action"]) == ("absent", "kill")
    assert verdict["ranks"] == [rank]
    assert said in verdict["reason"]
    assert verdict["where"].startswith(f"{function} (")
    assert "everyday_hangs.py:" in verdict["where"]
    assert f"in {function}" in Path(verdict["report"]).read_text()


def test_a_barrier_called_by_one_rank_is_a_mismatch(job: TrainingJob) -> None:
    verdict, rank = hang(job, "barrier")
    assert (verdict["kind"], verdict["action"]) == ("mismatch", "abort-and-reform")
    assert verdict["ranks"] == [rank]
    assert "waits in barrier number" in verdict["reason"]
    assert "(called in the script's own code)" in verdict["reason"]
