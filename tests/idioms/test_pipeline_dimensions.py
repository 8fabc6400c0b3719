"""Pipeline stages whose parts are distributed over other dimensions, in torch's schedules.

A rank of a replica dies, and is replaced or not. The final weights are those of one undisturbed
process with the whole model.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from idiom_runs import IdiomRuns

from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome, SmallWorld

SCRIPT = Path(__file__).parent / "scripts" / "replicas" / "pipeline.py"
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Layout:
    """A way of training, a schedule, the dimensions of a replica, and the number of replicas."""

    way: str
    schedule: str
    dims: tuple[str, ...]
    replicas: int = 2

    @property
    def replica(self) -> int:
        size = 1
        for dim in self.dims:
            size *= int(dim.partition("=")[2])
        return size

    @property
    def size(self) -> int:
        return self.replicas * self.replica


EXPERTS = Layout("", "Schedule1F1B", ("pp=2", "ep=2"))
TOGETHER = Layout("together", "ScheduleInterleavedZeroBubble", ("pp=2", "shard=1"))
LAYOUTS = {
    "experts": EXPERTS,
    "experts first": Layout("", "ScheduleGPipe", ("ep=2", "pp=2")),
    "experts in shards": Layout("nested", "Schedule1F1B", ("pp=2", "shard=2", "ep=2"), 1),
    "experts over data": Layout("", "Schedule1F1B", ("pp=2", "dp_mod=1", "dp_ep=2")),
    "experts and tensors": Layout("", "Schedule1F1B", ("pp=2", "ep=2", "tp=2"), 1),
    "tensors": Layout("", "ScheduleInterleaved1F1B", ("pp=2", "tp=2")),
    "tensors in shards": Layout("", "Schedule1F1B", ("pp=2", "shard=2", "tp=2"), 1),
    "shards": Layout("nested", "ScheduleInterleaved1F1B", ("pp=2", "shard=2")),
    "two data dimensions": Layout("nested", "Schedule1F1B", ("dp_a=2", "pp=2", "dp_b=1")),
    "zero bubble": Layout("", "ScheduleZBVZeroBubble", ("pp=2", "shard=2")),
    "wrapped together": TOGETHER,
}


@dataclass
class PipelineRuns:
    """Runs of the script."""

    world: SmallWorld
    folder: Path
    _alone: dict[str, torch.Tensor] = field(default_factory=dict)
    _undisturbed: dict[Layout, RunOutcome] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self, layout: Layout, *, death: Death | None = None, is_replaced: bool = False
    ) -> RunOutcome:
        return self.world.run(
            SCRIPT,
            self.folder / str(next(self._number)),
            size=layout.size,
            per_node=layout.replica,
            arguments=[layout.way, layout.schedule, *layout.dims],
            death=death,
            is_replaced=is_replaced,
            limit_s=400.0,  # it takes seconds; a shared machine may take a hundred times as long
        )

    def undisturbed(self, layout: Layout) -> RunOutcome:
        if layout not in self._undisturbed:
            outcome = self.run(layout)
            outcome.assert_success(workers=layout.size)
            self.assert_same(outcome)
            self._undisturbed[layout] = outcome
        return self._undisturbed[layout]

    def assert_same(self, outcome: RunOutcome) -> None:
        """Check the weights of all stages."""
        if not self._alone:
            alone = self.run(Layout("", "", (), 1))
            alone.assert_success(workers=1)
            self._alone = alone.workers[0].result
        found = {name for worker in outcome.survivors for name in worker.result}
        assert found == self._alone.keys(), outcome.describe()
        for worker in outcome.survivors:
            for name, value in worker.result.items():
                expected = self._alone[name]
                torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCE, msg=name)

    def with_death(self, layout: Layout, death: Death, *, is_replaced: bool) -> None:
        outcome = self.run(layout, death=death, is_replaced=is_replaced)
        assert outcome.died_at, outcome.describe()
        outcome.assert_success(workers=layout.size - (0 if is_replaced else layout.replica))
        self.assert_same(outcome)


@pytest.fixture(scope="module")
def pipelines(runs: IdiomRuns, tmp_path_factory: pytest.TempPathFactory) -> PipelineRuns:
    return PipelineRuns(runs.world, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rank"), [(EXPERTS, 6), pytest.param(TOGETHER, 1, marks=pytest.mark.soak)], ids=str
)
def test_a_death_does_not_change_the_result(
    pipelines: PipelineRuns, layout: Layout, rank: int
) -> None:
    lines = pipelines.undisturbed(layout).workers[rank].lines
    pipelines.with_death(layout, Death(rank=rank, event=lines // 2), is_replaced=True)


@pytest.mark.soak
@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_train_like_the_whole_model(pipelines: PipelineRuns, name: str) -> None:
    pipelines.undisturbed(LAYOUTS[name])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [n for n, layout in LAYOUTS.items() if layout.replicas > 1])
def test_a_death_anywhere_does_not_change_the_result(
    pipelines: PipelineRuns, name: str, seed: int
) -> None:
    layout, draw = LAYOUTS[name], random.Random(f"{name}/{seed}")
    rank, counted = draw.randrange(layout.size), draw.choice([LINES, CALLS])
    worker = pipelines.undisturbed(layout).workers[rank]
    last = worker.lines if counted == LINES else int(worker.calls * 0.9)
    death = Death(rank=rank, event=draw.randint(1, last), counted=counted)
    pipelines.with_death(layout, death, is_replaced=draw.random() < 0.5)


@pytest.mark.parametrize("schedule", ["ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble"])
def test_a_schedule_that_loses_gradients_of_inner_parts_is_refused(
    pipelines: PipelineRuns, schedule: str
) -> None:
    """torch leaves them None, or adds up those of some micro-batches."""
    outcome = pipelines.run(Layout("nested", schedule, ("pp=2", "shard=1"), 1))
    assert not outcome.survivors
    message = f"{schedule} with several fully_shard in the stage Sequential"
    assert any(message in worker.error for worker in outcome.workers), outcome.describe()
