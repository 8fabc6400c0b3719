"""Ranks of replicas die at every point of a step, a save and a recovery; the others continue.

Replicas without a dead rank keep their processes. If none is left, the job resumes from its newest
checkpoint. The final weights must be those of one undisturbed process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "phases_of_replicas.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
SHARDS = 2
# Float64, and uneven shares: 22 samples are not divisible by the number of ranks. Few and long
# steps: a step of six ranks takes 0.1 s of CPU time per rank.
WORKLOAD = Workload(
    samples=110,
    batch=22,
    epochs=12,
    step_s=1.0,
    save_every=5,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1", "--precision=fp64"),
)


@dataclass(frozen=True)
class Layout:
    """The number of workers per node, and the number of replicas of two ranks."""

    nodes: int
    nproc: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.nproc

    @property
    def nodes_per_replica(self) -> int:
        return max(1, SHARDS // self.nproc)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.nproc}"


@dataclass(frozen=True)
class Fault:
    """Ranks that die: the point of each (any rank that reaches it, or that rank of the world), and
    the number of broken replicas.
    """

    deaths: tuple[tuple[str, int | None], ...]
    harmed: int = 1

    def __str__(self) -> str:
        return ", then ".join(
            f"{at}" if rank is None else f"{rank} {at}" for at, rank in self.deaths
        )


def in_a_step(*points: str) -> list[Fault]:
    return [Fault(((point, None),)) for point in points]


def of_a_replacement(*points: str) -> list[Fault]:
    """One of the processes that replace a replica dies, too."""
    return [Fault((("reduce-scattered", None), (point, None))) for point in points]


def of_a_survivor(*points: str) -> list[Fault]:
    """A rank of another replica dies when it builds the next world, or sends its state."""
    return [replace(fault, harmed=2) for fault in of_a_replacement(*points)]


def of_a_survivor_on_its_node(*points: str) -> list[Fault]:
    """The same if the next world includes all ranks of the node, including the replacements."""
    return [Fault((("reduce-scattered", 0), (point, 3)), harmed=2) for point in points]


def of_two_replicas(first: int, second: int, *points: str) -> list[Fault]:
    """A rank of each, in the same step."""
    return [Fault(((point, first), (point, second)), harmed=2) for point in points]


IN_A_STEP = in_a_step(
    "all-gather",
    "forward",
    "backward",
    "reduce-scattered",
    "all-reduced",
    "agreeing",
    "clipping",
    "optimizer",
    "optimizer-done",
    "committed",
    "mean",
    "writing",
    "committing",
)
OF_A_REPLACEMENT = of_a_replacement("meeting", "met", "receiving", "received")
OF_A_SURVIVOR = of_a_survivor("building", "built", "sending", "sent")
OF_A_SURVIVOR_ON_ITS_NODE = of_a_survivor_on_its_node("building", "built", "sending", "sent")
OF_THE_LAST_ONE = of_two_replicas(0, 3, "all-gather", "reduce-scattered", "optimizer")
# At both positions, so that both are equally affected.
OF_TWO_AT_ONCE = of_two_replicas(2, 5, "all-gather", "reduce-scattered", "all-reduced", "optimizer")
# One per kind of recovery; the soak covers every point.
ON_A_NODE_IN_SHORT = [
    *(
        pytest.param(fault, marks=pytest.mark.slow)
        for fault in (
            *in_a_step("reduce-scattered", "all-gather", "optimizer", "committing"),
            *of_a_replacement("received"),
        )
    ),
]
OVER_NODES_IN_SHORT = [
    *in_a_step("all-gather", "committing"),
    *of_a_replacement("received"),
    *of_two_replicas(0, 3, "reduce-scattered"),
]


def of(layout: Layout, faults: Sequence[object]) -> Callable[[Any], Any]:
    """Each fault, or parameter with a fault, in one job of that layout."""
    layouts = pytest.mark.parametrize("layout", [layout], indirect=True, scope="module", ids=str)
    each = pytest.mark.parametrize("fault", faults, ids=str)
    return lambda test: layouts(each(test))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alone = replace(WORKLOAD, extra=(*WORKLOAD.extra, "--shard=1"))
    return train_undisturbed(tmp_path_factory.mktemp("alone"), alone, SCRIPT)


@pytest.fixture(scope="module")
def layout(request: pytest.FixtureRequest) -> Layout:
    given: Layout = request.param
    return given


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest,
    etcd: EmbeddedEtcd,
    start_series: StartSeries,
    reference: Path,
    layout: Layout,
) -> Iterator[JobSeries[TrainingJob]]:
    conf = {"replica_size": SHARDS} if layout.nodes_per_replica > 1 else {}
    series = start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPT,
            workload=WORKLOAD,
            nproc=layout.nproc,
            min_nodes=layout.nodes_per_replica,
            max_nodes=layout.nodes,
            conf=conf,
        ),
        reference,
    )
    failed_before = request.session.testsfailed
    yield series
    if request.session.testsfailed == failed_before:
        series.finish()
    series.stop()


@dataclass(frozen=True)
class Before:
    """The state of the job before the fault."""

    generation: int
    replicas: list[set[int]]  # their pids
    loads: int  # of checkpoints, by ranks


@pytest.fixture
def before(job: TrainingJob, layout: Layout) -> Before:
    job.start_nodes(layout.nodes - len(job.running))
    job.wait_for(lambda: saves(job) or None, PATIENCE_S, "a checkpoint")
    replicas = all_train(job, layout)
    return Before(job.training_nodes()[0], replicas, loads(job))


def events(job: TrainingJob, name: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(job.folder / "journal") if event["event"] == name]


def saves(job: TrainingJob) -> int:
    return len(events(job, "checkpoint-saved"))


def loads(job: TrainingJob) -> int:
    return sum(event["source"] != "initial" for event in events(job, "state-restored"))


def all_train(job: TrainingJob, layout: Layout, after_generation: int = 0) -> list[set[int]]:
    """Wait until all ranks train in a later generation; returns the pids of each replica."""

    def together() -> list[set[int]] | None:
        steps = job.ledger().steps
        newest = max((s.generation for s in steps), default=0)
        if newest <= after_generation:
            return None
        if len({s.rank for s in steps if s.generation == newest}) < layout.ranks:
            return None
        pids = pids_by_rank(job)
        if len(pids) < layout.ranks:
            return None
        return [set(pids[first : first + SHARDS]) for first in range(0, len(pids), SHARDS)]

    return job.wait_for(together, PATIENCE_S, f"{layout.ranks} ranks in one world")


def pids_by_rank(job: TrainingJob) -> list[int]:
    world = job.world()
    assert world is not None
    workers = [job.node(member.name).workers() for member in world.members]
    return [node[local_rank].pid for node in workers for local_rank in sorted(node)]


def order(job: TrainingJob, point: str, rank: int | None, together: int) -> Path:
    """Order a rank to die at ``point``, in the same step as the given number of ranks."""
    name = f"die-{point}" if rank is None else f"die-{point}-{rank}"
    path = job.folder / name
    staged = job.folder / f"staged-{name}"
    staged.write_text(f"{together}" if together > 1 else "")
    return staged.rename(path)


def wait_carried_out(job: TrainingJob, orders: Sequence[Path]) -> None:
    def dead() -> bool:
        return not any(order.exists() for order in orders)

    job.wait_for(lambda: dead() or None, PATIENCE_S, f"{orders}")


def all_agreed(job: TrainingJob, point: str) -> None:
    agreed = job.folder / f"agreed-{point}"
    job.wait_for(lambda: agreed.exists() or None, PATIENCE_S, f"{agreed}")


def forget_orders(job: TrainingJob) -> None:
    """Remove the orders of the previous test, which were carried out."""
    for trace in (*job.folder.glob("ready-*"), *job.folder.glob("agreed-*")):
        trace.unlink()


def goes_on(job: TrainingJob, layout: Layout, before: Before, *, harmed: int) -> None:
    """All ranks train again: ``harmed`` replicas in new processes, the others in their own. A
    checkpoint was read if, and only if, no replica was left.
    """
    now = set().union(*all_train(job, layout, before.generation))
    kept = [replica for replica in before.replicas if replica <= now]
    replaced = [replica for replica in before.replicas if not replica & now]
    assert len(kept) == len(before.replicas) - harmed, (before, now)
    assert len(replaced) == harmed, (before, now)
    assert (loads(job) > before.loads) == (not kept)


def check(job: TrainingJob, layout: Layout, before: Before, fault: Fault) -> None:
    forget_orders(job)
    points = [point for point, _ in fault.deaths]
    together = {point: points.count(point) for point in points}
    # The last one first: no rank reaches its point before the others are dead.
    orders = [order(job, point, rank, together[point]) for point, rank in reversed(fault.deaths)]
    for point, ranks in together.items():
        if ranks > 1:
            all_agreed(job, point)
    wait_carried_out(job, orders)
    goes_on(job, layout, before, harmed=fault.harmed)


@of(Layout(1, 4), ON_A_NODE_IN_SHORT)
def test_replicas_within_one_node_survive_deaths(
    job: TrainingJob, layout: Layout, before: Before, fault: Fault
) -> None:
    check(job, layout, before, fault)


@pytest.mark.slow
@of(Layout(3, 2), [*of_a_survivor("sending"), *of_two_replicas(2, 5, "reduce-scattered")])
def test_replicas_on_separate_nodes_survive_deaths(
    job: TrainingJob, layout: Layout, before: Before, fault: Fault
) -> None:
    check(job, layout, before, fault)


@pytest.mark.slow
@of(Layout(4, 1), OVER_NODES_IN_SHORT)
def test_replicas_over_two_nodes_survive_deaths(
    job: TrainingJob, layout: Layout, before: Before, fault: Fault
) -> None:
    check(job, layout, before, fault)


@pytest.mark.soak
@of(
    Layout(1, 4),
    [*IN_A_STEP, *OF_A_REPLACEMENT, *OF_A_SURVIVOR_ON_ITS_NODE, *OF_THE_LAST_ONE],
)
def test_replicas_within_one_node_survive_deaths_at_every_point(
    job: TrainingJob, layout: Layout, before: Before, fault: Fault
) -> None:
    check(job, layout, before, fault)


@pytest.mark.soak
@of(Layout(3, 2), [*OF_A_REPLACEMENT, *OF_A_SURVIVOR, *OF_TWO_AT_ONCE])
def test_replicas_on_separate_nodes_survive_deaths_at_every_point(
    job: TrainingJob, layout: Layout, before: Before, fault: Fault
) -> None:
    check(job, layout, before, fault)


@pytest.mark.soak
@of(Layout(4, 1), [*IN_A_STEP, *OF_A_REPLACEMENT, *OF_A_SURVIVOR, *OF_THE_LAST_ONE])
def test_replicas_over_two_nodes_survive_deaths_at_every_point(
    job: TrainingJob, layout: Layout, before: Before, fault: Fault
) -> None:
    check(job, layout, before, fault)
