"""Expert parallelism of the script's own, in replicas: ranks hold different experts of a layer.

The result is that of one process with the whole model, while ranks die, with experts that get no
tokens, and after a resume with another number of ranks to a replica. Experts that would be mixed or
lost are refused.
"""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from idiom_runs import IdiomRuns

import checkpoints
from checkpoints.memory import MemoryHost
from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome, SmallWorld

SCRIPT = Path(__file__).parent / "scripts" / "replicas" / "experts.py"
TOLERANCE = 1e-9
STEPS = 5  # of an epoch, with the batch of the saved checkpoint


@dataclass(frozen=True)
class Layout:
    """A way of training, the dimensions of a replica, and the ranks of one and of all."""

    way: str
    dims: tuple[str, ...]
    replica: int
    size: int
    batch: int = 10


MASKED = Layout("masked", ("ep=2",), 2, 4)
STARVED = Layout("exchanged same samples", ("ep=2",), 2, 4, batch=2)
LOOP = Layout("loop", ("tp=2",), 2, 4, batch=4)
IN_SHARDS = Layout("masked distributed in parts", ("shard=2", "ep=2"), 4, 8)
REST_EVERYWHERE = Layout("masked rest everywhere", ("shard=2", "ep=2"), 4, 8)
WITH_TENSOR = Layout("masked", ("ep=2", "tp=2"), 4, 4)
# Experts on the ranks that split the batch: their gradients are sums over several ranks' samples.
ON_DATA = Layout("exchanged sgd even", ("dp_mod=2", "dp_ep=2"), 4, 8, batch=8)
ON_ALL_DATA = Layout("exchanged sgd even", ("dp_mod=1", "dp_ep=2"), 2, 4, batch=8)
LAYOUTS = {
    "experts on two ranks": MASKED,
    "experts without tokens": STARVED,
    "a loop over experts": LOOP,
    "with FSDP": IN_SHARDS,
    "the rest over all ranks": REST_EVERYWHERE,
    "with tensor parallelism": WITH_TENSOR,
    "over a part of the batch's ranks": ON_DATA,
    "over all of the batch's ranks": ON_ALL_DATA,
}
IN_SHORT = ("experts on two ranks", "a loop over experts", "over a part of the batch's ranks")


@dataclass
class ExpertRuns:
    """Runs of the script."""

    world: SmallWorld
    folder: Path
    _alone: dict[tuple[str, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    _undisturbed: dict[Layout, RunOutcome] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self,
        layout: Layout,
        *,
        folder: Path | str = "",
        epochs: int = 2,
        death: Death | None = None,
        is_replaced: bool = False,
    ) -> RunOutcome:
        return self.world.run(
            SCRIPT,
            self.folder / str(next(self._number)),
            size=layout.size,
            per_node=layout.replica,
            arguments=[layout.way, str(folder), str(epochs), str(layout.batch), *layout.dims],
            death=death,
            is_replaced=is_replaced,
            limit_s=400.0,  # it takes seconds; a shared machine may take a hundred times as long
        )

    def alone(self, layout: Layout) -> dict[str, torch.Tensor]:
        """The result of one process with the whole model."""
        kinds = [word for word in layout.way.split() if word in ("loop", "sgd", "even")]
        key = " ".join(kinds), layout.batch
        if key not in self._alone:
            outcome = self.run(Layout(key[0], (), 1, 1, layout.batch))
            outcome.assert_success(workers=1)
            self._alone[key] = outcome.workers[0].result
        return self._alone[key]

    def undisturbed(self, layout: Layout) -> RunOutcome:
        """A run in which no rank dies."""
        if layout not in self._undisturbed:
            outcome = self.run(layout)
            outcome.assert_success(workers=layout.size)
            self._undisturbed[layout] = outcome
        return self._undisturbed[layout]

    def with_death(self, layout: Layout, death: Death, *, is_replaced: bool) -> None:
        """Check the result of a run in which a replica dies, and is perhaps replaced."""
        outcome = self.run(layout, death=death, is_replaced=is_replaced)
        assert outcome.died_at, outcome.describe()
        left = layout.size if is_replaced else layout.size - layout.replica
        outcome.assert_success(workers=left)
        self.assert_same(outcome, layout)

    def assert_same(self, outcome: RunOutcome, layout: Layout) -> None:
        expected = self.alone(layout)
        assert outcome.survivors
        for worker in outcome.survivors:
            assert worker.result.keys() == expected.keys()
            for name in expected.keys() - {"resumed"}:
                torch.testing.assert_close(
                    worker.result[name], expected[name], rtol=0, atol=TOLERANCE, msg=name
                )


@pytest.fixture(scope="module")
def experts(runs: IdiomRuns, tmp_path_factory: pytest.TempPathFactory) -> ExpertRuns:
    return ExpertRuns(runs.world, tmp_path_factory.mktemp("experts"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_train_like_the_whole_model(experts: ExpertRuns, name: str) -> None:
    layout = LAYOUTS[name]
    experts.assert_same(experts.undisturbed(layout), layout)


@pytest.mark.parametrize(
    ("name", "rank", "share", "is_replaced"),
    [
        (IN_SHORT[0], 1, 0.4, True),
        pytest.param(IN_SHORT[1], 2, 0.7, False, marks=pytest.mark.slow),
        pytest.param(IN_SHORT[2], 5, 0.6, True, marks=pytest.mark.slow),
    ],
)
def test_a_death_does_not_change_the_result(
    experts: ExpertRuns, name: str, rank: int, share: float, is_replaced: bool
) -> None:
    layout = LAYOUTS[name]
    lines = experts.undisturbed(layout).workers[rank].lines
    death = Death(rank=rank, event=int(lines * share))
    experts.with_death(layout, death, is_replaced=is_replaced)


@pytest.mark.soak
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", range(10))
def test_a_death_anywhere_does_not_change_the_result(
    experts: ExpertRuns, name: str, seed: int
) -> None:
    layout, draw = LAYOUTS[name], random.Random(f"{name}/{seed}")
    if layout.size == layout.replica:
        layout = Layout(layout.way, layout.dims, layout.replica, 2 * layout.size, layout.batch)
    rank, counted = draw.randrange(layout.size), draw.choice([LINES, CALLS])
    worker = experts.undisturbed(layout).workers[rank]
    last = worker.lines if counted == LINES else int(worker.calls * 0.9)
    death = Death(rank=rank, event=draw.randint(1, last), counted=counted)
    experts.with_death(layout, death, is_replaced=draw.random() < 0.5)


@pytest.mark.slow
def test_a_death_on_streams_does_not_change_the_result(tmp_path: Path, experts: ExpertRuns) -> None:
    """Gradients are summed by collectives that are queued and aborted like NCCL's."""
    with SmallWorld(prepare="kit.nccl_semantics:use_by_default") as world:
        on_stream = ExpertRuns(world, tmp_path)
        death = Death(rank=2, event=experts.undisturbed(LOOP).workers[2].lines // 2)
        on_stream.with_death(LOOP, death, is_replaced=True)


@pytest.mark.slow
def test_a_checkpoint_resumes_with_other_ranks_and_unsharded(
    experts: ExpertRuns, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    experts.run(MASKED, folder=disk, epochs=1).assert_success(workers=MASKED.size)
    info = checkpoints.latest(disk).checkpoint
    assert info is not None
    weights = checkpoints.load(disk, info.name).state["model"]["model"]
    assert weights["mixture.experts.up"].shape[0] == 4  # all experts
    others = (
        Layout("masked", ("ep=4",), 4, 4),
        Layout("masked", ("ep=1",), 1, 2),
        Layout("masked", ("shard=2", "ep=2"), 4, 4),
        Layout("", (), 1, 2),
    )
    for number, layout in enumerate(others):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(disk, copy)
        outcome = experts.run(layout, folder=copy)
        outcome.assert_success(workers=layout.size)
        assert {int(worker.result["resumed"]) for worker in outcome.survivors} == {STEPS}
        experts.assert_same(outcome, layout)


@pytest.mark.slow
def test_an_unsharded_checkpoint_resumes_with_experts(experts: ExpertRuns, tmp_path: Path) -> None:
    disk, unsharded = tmp_path / "disk", Layout("", (), 1, 1)
    experts.run(unsharded, folder=disk, epochs=1).assert_success(workers=1)
    outcome = experts.run(MASKED, folder=disk)
    outcome.assert_success(workers=MASKED.size)
    assert {int(worker.result["resumed"]) for worker in outcome.survivors} == {STEPS}
    experts.assert_same(outcome, MASKED)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(MASKED, MASKED, id="two replicas", marks=pytest.mark.slow),
        pytest.param(
            Layout("masked", ("ep=2",), 2, 2), MASKED, id="one replica", marks=pytest.mark.slow
        ),
        pytest.param(IN_SHARDS, IN_SHARDS, id="with FSDP", marks=pytest.mark.soak),
        pytest.param(ON_DATA, ON_DATA, id="over data", marks=pytest.mark.soak),
        pytest.param(WITH_TENSOR, WITH_TENSOR, id="with tensors", marks=pytest.mark.soak),
    ],
)
def test_the_nodes_memory_holds_all_experts(
    experts: ExpertRuns, tmp_path: Path, before: Layout, after: Layout
) -> None:
    """All processes end, and nothing is on disk: the job resumes from the last save to memory."""
    disk = tmp_path / "disk"
    host = MemoryHost(tmp_path / "disk-memory")
    try:
        saved = replace(before, way=f"{before.way} memory")
        experts.run(saved, folder=disk, epochs=1).assert_success(workers=before.size)
        for info in checkpoints.list_checkpoints(disk):
            shutil.rmtree(disk / info.name)
        outcome = experts.run(replace(after, way=f"{after.way} memory"), folder=disk)
    finally:
        host.close()
    outcome.assert_success(workers=after.size)
    resumed = {int(worker.result["resumed"]) for worker in outcome.survivors}
    assert resumed <= {STEPS - 1, STEPS, STEPS + 1} and len(resumed) == 1, resumed
    experts.assert_same(outcome, after)


ALONG_EP = ("ep=2",)
SAME_PART = "but both must hold the same part of it: their gradients differ, too"


@pytest.mark.parametrize(
    ("way", "dims", "message", "remedy"),
    [
        (
            "masked own experts",
            ALONG_EP,
            "'ep', of a module without a parameter that is sharded over it",
            'DTensor.from_local(own, run.mesh["ep"], [Shard(0)])',
        ),
        pytest.param(
            "masked slow own down",
            ALONG_EP,
            f"rank 0 in model (parameter 6, 'mixture.experts.down'), {SAME_PART}",
            'DTensor.from_local(own, run.mesh["ep"], [Shard(0)])',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "masked slow partial gradients",
            ALONG_EP,
            f"rank 0 in model (parameter 0, 'embed.weight'), {SAME_PART}",
            'must sum gradients of the other parameters over run.mesh["ep"]',
            marks=pytest.mark.slow,
        ),
        (
            "exchanged whole batch",
            ("shard=2",),
            "'mixture.experts.up' is on DeviceMesh((shard=2), 'cpu', stride=(1,)), but "
            "fully_shard does not manage it",
            'elastic.join(mesh={"dp_mod": 1, "dp_ep": 2})',
        ),
        (
            "exchanged",
            ("dp_mod=1", "dp_ep=2"),
            "experts are sharded over a dimension that splits the batch",
            "a global_batch that every size of the world divides",
        ),
    ],
)
def test_a_misuse_is_refused_with_the_remedy(
    experts: ExpertRuns, way: str, dims: tuple[str, ...], message: str, remedy: str
) -> None:
    outcome = experts.run(Layout(way, dims, 2, 4))
    assert not outcome.survivors
    errors = [worker for worker in outcome.workers if message in worker.error]
    assert errors, outcome.describe()
    assert all(remedy in worker.error + worker.log for worker in errors), outcome.describe()
