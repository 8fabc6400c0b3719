"""``run.build``: ranks die and join; the others keep their processes and resume from shards.

No rank has the full state, and nothing is written to disk before the end: the state is restored
from the nodes' memory, with a save interval that limits the overhead. The final weights are those
of one undisturbed process.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from training_job import NEVER, SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode, worker_pids
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "paced_build.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_in_process.py"
CONTEXT, SAMPLES = 16, 192
OVERHEAD = 0.05  # so that saves occur every few steps, even on a busy machine, and the job is short
SEVERAL = 6  # steps


def workload(text: Path) -> Workload:
    text.write_bytes(bytes(i * i % 251 for i in range(CONTEXT * SAMPLES + 1)))
    return Workload(
        samples=SAMPLES,
        batch=20,  # three ranks get shares of 7, 7 and 6; the last step of an epoch is smaller
        epochs=16,
        step_s=0.3,
        save_every=NEVER,
        extra=(
            f"--example={EXAMPLE}",
            f"--text={text}",
            f"--context={CONTEXT}",
            "--width=16",
            "--layers=1",
            "--dtype=float64",
            f"--memory-overhead={OVERHEAD}",
        ),
    )


def order(job: TrainingJob, point: str, node: LocalNode) -> Path:
    staged = job.folder / f"order-{point}"
    staged.write_text(node.name)
    return staged.rename(job.folder / f"die-{point}")


def test_sharded_training_survives_deaths_a_join_and_a_shutdown(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    of = workload(tmp_path / "text")
    undisturbed = train_undisturbed(tmp_path / "alone", of, SCRIPT)
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=SCRIPT,
        workload=of,
        min_nodes=2,
        max_nodes=3,
    ) as job:
        job.bring_to(3)
        job.wait_event("memory-interval-changed")
        for points in (
            ("backward",),
            ("optimizer",),
            ("backward", "build"),
            ("optimizer", "restore"),
        ):
            job.wait_progress(SEVERAL)
            generation, before = job.generation(), worker_pids(job.running)
            victims = [job.node_of_rank(rank) for rank, _ in enumerate(points, start=1)]
            orders = zip(points, victims, strict=True)
            # The last order first: it waits for the world that follows the first one.
            job.wait_obeyed(*(order(job, *of) for of in reversed([*orders])))
            job.wait_training(nodes=3, after_generation=generation)
            after = worker_pids(job.running)
            changed = [name for name in before if after.get(name) != before[name]]
            assert len(changed) == len(points), (points, before, after)

        job.wait_progress(SEVERAL)
        generation, before = job.generation(), worker_pids(job.running)
        job.node_of_rank(0).kill()
        job.wait_training(nodes=2, after_generation=generation)
        after = worker_pids(job.running)
        assert all(after[name] == before[name] for name in after)

        job.wait_progress(SEVERAL)
        since_s, last = time.monotonic(), job.ledger().last_step
        job.bring_to(3)
        # A planned change: every rank has saved, so nothing is lost.
        went_on = [e["step"] for e in job.journaled("state-restored", since_s=since_s)][:3]
        assert went_on == [went_on[0]] * 3
        assert went_on[0] >= last
        after = worker_pids(job.running)
        assert all(after.get(name) == before[name] for name in before.keys() & after.keys())

        # Two nodes leave, the second while the next world forms without the first; then all at
        # once. Each time the nodes' memory is lost, but no step.
        for leaving in (2, 3):
            generation, nodes = job.generation(), [job.node_of_rank(r) for r in range(leaving)]
            job.wait_progress(1)
            for node in nodes:
                node.terminate()
                if leaving == 2:
                    assert node.wait(PATIENCE_S) == 75
            assert [node.wait(PATIENCE_S) for node in nodes] == [75] * leaving
            before_start = job.ledger()
            job.start_nodes(leaving)
            job.wait_training(nodes=3, after_generation=generation)
            starts = job.ledger().starts[len(before_start.starts) :]
            assert min(starts, key=lambda s: s.generation).step == before_start.last_step + 1

        job.assert_finishes_whole(undisturbed)
        intervals = chosen(job)
        assert intervals
        for generation, count in recomputed(job).items():
            # After a death during a save, the previous save remains; a step is in progress.
            inherited = [steps for number, steps in intervals if number < generation][-1:]
            most = max([*inherited, *(steps for n, steps in intervals if n == generation)])
            assert count <= 2 * most + 1, (generation, recomputed(job), intervals)


def chosen(job: TrainingJob) -> list[tuple[int, int]]:
    """The generations in which the ranks have chosen a save interval, and its number of steps."""
    found = job.journaled("memory-interval-changed")
    ranks: dict[tuple[int, int], set[int]] = {}
    for event in found:
        ranks.setdefault((event["generation"], event["step"]), set()).add(event["every_steps"])
    assert all(len(steps) == 1 for steps in ranks.values()), "the same one on all ranks"
    return [(0, 10), *((number, steps.pop()) for (number, _), steps in sorted(ranks.items()))]


def recomputed(job: TrainingJob) -> dict[int, int]:
    """By generation, the number of its committed steps that the next generation repeated."""
    ledger = job.ledger()
    first = {start.generation: start.step for start in ledger.starts}
    last: dict[int, int] = {}
    for step in ledger.steps:
        last[step.generation] = max(last.get(step.generation, 0), step.step + 1)
    generations = sorted(first)
    return {
        old: max(0, last.get(old, first[old]) - first[new])
        for old, new in itertools.pairwise(generations)
    }
