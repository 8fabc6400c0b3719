"""Pipeline parallelism of the script's own, in replicas: ranks along ``pp`` hold different stages.

The stages have different parameters, under different names. The result is that of one process with
the whole model, while ranks die, and after a resume with another number of replicas.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from idiom_runs import IdiomRuns

import checkpoints
from checkpoints.memory import MemoryHost
from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome, SmallWorld

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
import elastic

way, folder, memory, epochs, *dims = sys.argv[1:]
os.environ["ELASTIC_NODE_MEMORY"] = memory
mesh = {name: int(size) for name, size in (dim.split("=") for dim in dims)}
WIDTH, PIECES = 5, 2


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.inner(torch.tanh(self.embed(x))))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.head(self.norm(x))


saves = elastic.Checkpoints(folder, when=1000, memory=2 if memory else False) if folder else None
run = elastic.join(mesh=mesh, checkpoints=saves)
torch.manual_seed(5)
stages = [First().double(), Last().double()]
pp = run.mesh["pp"]
place, count = pp.get_local_rank(), pp.size()
# The double of NCCL's semantics cannot complete send and recv.
pipe = dist.new_group(backend="gloo") if way == "over gloo" else pp.get_group()
swapped = way == "swapped" and int(os.environ["RANK"]) // 2  # in the second replica
own = nn.Sequential(*stages) if count == 1 else stages[place - swapped]
if way.startswith("fsdp"):
    fully_shard(own, mesh=run.mesh["shard"])
if way == "tensor parallel" and place == 0 and count > 1:  # the other stage has two whole ones
    plan = {"embed": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(own, run.mesh["tp"], plan)
if way == "sharded over stages":
    fully_shard(own, mesh=pp)
# The first stage may be two modules, the last one is always one.
for module in own.children() if way == "several" and place == 0 and count > 1 else [own]:
    run.wrap(module)
optimizer = torch.optim.AdamW(own.parameters(), lr=0.02, foreach=False)
run.track(**{f"optimizer{place}" if way == "other names" else "optimizer": optimizer})
if way == "scaled":
    run.track(scaler=torch.amp.GradScaler("cpu"))
x = torch.randn(70, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
batch = 8 if way.endswith("schedule") else 10
loader = run.loader(DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True),
                    global_batch=batch)
result = {}


def loss_of(output, y, share):
    return F.mse_loss(output, y, reduction="sum") / share


def by_hand(x, y):
    # All forward passes, then all backward passes.
    pieces, targets, group = x.chunk(PIECES), y.chunk(PIECES), pipe
    if count == 1:
        for piece, target in zip(pieces, targets):
            loss_of(own(piece), target, len(x)).backward()
    elif place == 0:
        outputs = [own(piece) for piece in pieces]
        for output in outputs:
            dist.send(output.detach(), group=group, group_dst=1)
        for output in outputs:
            gradient = torch.empty_like(output)
            dist.recv(gradient, group=group, group_src=1)
            output.backward(gradient)
    else:
        received = [torch.empty(len(piece), WIDTH, dtype=torch.float64) for piece in pieces]
        for inputs in received:
            dist.recv(inputs, group=group, group_src=0)
        for inputs, target in zip(received, targets):
            loss_of(own(inputs.requires_grad_()), target, len(x)).backward()
            dist.send(inputs.grad, group=group, group_dst=0)


def scheduled():
    stage = PipelineStage(own, place, count, run.device, group=pipe)
    schedule = Schedule1F1B(stage, PIECES, loss_fn=F.mse_loss)
    return lambda x, y: schedule.step(x) if place == 0 else schedule.step(target=y)


def clip():
    # The norm of all stages, as with plain PyTorch.
    gradients = [p.grad for p in own.parameters()]
    total = sum(getattr(g, "full_tensor", lambda: g)().square().sum() for g in gradients)
    if count > 1:
        dist.all_reduce(total, group=pipe)
    nn.utils.clip_grads_with_norm_(own.parameters(), 0.5, total.sqrt(), foreach=False)


def train():
    backward = scheduled() if way.endswith("schedule") and count > 1 else by_hand
    result["resumed"] = torch.tensor(run.state.get("steps", 0))
    for _ in run.epochs(int(epochs)):
        for x, y in loader:
            optimizer.zero_grad()
            backward(x, y)
            if way != "unreduced":
                run.reduce_gradients()
            clip()
            optimizer.step()
            run.state["steps"] = run.state.get("steps", 0) + 1
    for name, value in own.state_dict().items():
        if name.endswith("seen"):
            continue
        whole = getattr(value, "full_tensor", lambda: value)()
        short = name if count == 1 else f"{place}.{name}"
        result[short] = whole.detach().clone()


run.retry(train)
"""
TOLERANCE = 1e-9
STAGES = ("0.", "1.")
# The dimensions of a replica, all ranks of two replicas, and of one.
TWO = (["pp=2"], 4, 2)
TWO_SHARDED = (["pp=2", "shard=2"], 8, 4)


def shape_of(way: str) -> tuple[list[str], int, int]:
    return TWO_SHARDED if way.startswith("fsdp") else TWO


@dataclass
class StageRuns:
    """Runs of the script."""

    world: SmallWorld
    script: Path
    _alone: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    _undisturbed: dict[str, RunOutcome] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self,
        way: str,
        *dims: str,
        size: int,
        per_node: int,
        folder: Path | str = "",
        memory: Path | str = "",
        epochs: int = 2,
        death: Death | None = None,
        is_replaced: bool = False,
    ) -> RunOutcome:
        return self.world.run(
            self.script,
            self.script.with_name(f"{way}-{next(self._number)}"),
            size=size,
            per_node=per_node,
            arguments=[way, str(folder), str(memory), str(epochs), *dims],
            death=death,
            is_replaced=is_replaced,
            limit_s=400.0,  # it takes seconds; a shared machine may take a hundred times as long
        )

    def alone(self, way: str) -> dict[str, torch.Tensor]:
        """The result of one process with all stages."""
        key = "schedule" if way.endswith("schedule") else "by hand"
        if key not in self._alone:
            outcome = self.run(key, "pp=1", size=1, per_node=1)
            outcome.assert_success(workers=1)
            self._alone[key] = outcome.workers[0].result
        return self._alone[key]

    def undisturbed(self, way: str) -> RunOutcome:
        """Two replicas, none of whose ranks dies."""
        if way not in self._undisturbed:
            dims, size, per_node = shape_of(way)
            outcome = self.run(way, *dims, size=size, per_node=per_node)
            outcome.assert_success(workers=size)
            self._undisturbed[way] = outcome
        return self._undisturbed[way]

    def assert_same(self, outcome: RunOutcome, way: str) -> None:
        expected = self.alone(way)
        found = [tuple(sorted({name[:2] for name in w.result})) for w in outcome.survivors]
        assert {stage for stages in found for stage in stages} >= set(STAGES), outcome.describe()
        for worker in outcome.survivors:
            assert len(worker.result) > 3
            for name, value in worker.result.items():
                if name == "resumed":
                    continue
                torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.fixture(scope="module")
def stages(runs: IdiomRuns, tmp_path_factory: pytest.TempPathFactory) -> StageRuns:
    script = tmp_path_factory.mktemp("stages") / "script.py"
    script.write_text(SCRIPT)
    return StageRuns(runs.world, script)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dims", "size", "per_node"),
    [
        pytest.param("by hand", ["pp=2"], 4, 2, id="two replicas of two stages"),
        pytest.param("schedule", ["pp=2"], 4, 2, id="a schedule of torch"),
        pytest.param("several", ["pp=2"], 4, 2, id="stages of one and of two modules"),
        pytest.param("fsdp schedule", ["pp=2", "shard=2"], 4, 4, id="a schedule of sharded stages"),
        pytest.param("by hand", ["pp=2", "shard=2"], 4, 4, id="stages held whole by two ranks"),
        pytest.param("tensor parallel", ["pp=2", "tp=2"], 8, 4, id="a stage split over two ranks"),
        pytest.param("fsdp", ["shard=2", "pp=2"], 8, 4, id="stages sharded over two ranks"),
    ],
)
def test_stages_train_like_the_whole_model(
    stages: StageRuns, way: str, dims: list[str], size: int, per_node: int
) -> None:
    outcome = stages.run(way, *dims, size=size, per_node=per_node)
    outcome.assert_success(workers=size)
    stages.assert_same(outcome, way)


@pytest.mark.parametrize(
    ("way", "rank", "share", "is_replaced"),
    [
        pytest.param("by hand", 1, 0.4, True, id="the last stage of the first replica"),
        pytest.param(
            "by hand",
            2,
            0.7,
            False,
            id="the first stage of the second replica",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "schedule", 3, 0.55, True, id="in a schedule of torch", marks=pytest.mark.slow
        ),
        pytest.param(
            "fsdp schedule",
            5,
            0.8,
            False,
            id="in a schedule of sharded stages",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_death_does_not_change_the_result(
    stages: StageRuns, way: str, rank: int, share: float, is_replaced: bool
) -> None:
    undisturbed = stages.undisturbed(way)
    death = Death(rank=rank, event=int(undisturbed.workers[rank].lines * share))
    dims, size, per_node = shape_of(way)
    outcome = stages.run(
        way, *dims, size=size, per_node=per_node, death=death, is_replaced=is_replaced
    )
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=size if is_replaced else per_node)
    stages.assert_same(outcome, way)


@pytest.mark.slow
def test_a_death_on_streams_does_not_change_the_result(stages: StageRuns) -> None:
    """Gradients are summed by collectives that are queued and aborted like NCCL's."""
    way = "over gloo"
    with SmallWorld(prepare="kit.nccl_semantics:use_by_default") as world:
        on_stream = StageRuns(world, stages.script)
        undisturbed = on_stream.undisturbed(way)
        stages.assert_same(undisturbed, way)
        death = Death(rank=2, event=undisturbed.workers[2].lines // 2)
        outcome = on_stream.run(way, "pp=2", size=4, per_node=2, death=death, is_replaced=True)
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=4)
    stages.assert_same(outcome, way)


@pytest.mark.soak
@pytest.mark.parametrize("way", ["by hand", "schedule", "fsdp schedule"])
@pytest.mark.parametrize("seed", range(10))
def test_a_death_anywhere_does_not_change_the_result(
    stages: StageRuns, way: str, seed: int
) -> None:
    draw = random.Random(f"{way}/{seed}")
    rank, counted = draw.randrange(shape_of(way)[1]), draw.choice([LINES, CALLS])
    worker = stages.undisturbed(way).workers[rank]
    last = worker.lines if counted == LINES else int(worker.calls * 0.9)
    death = Death(rank=rank, event=draw.randint(1, last), counted=counted)
    is_replaced = draw.random() < 0.5
    dims, size, per_node = shape_of(way)
    outcome = stages.run(
        way, *dims, size=size, per_node=per_node, death=death, is_replaced=is_replaced
    )
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=size if is_replaced else per_node)
    stages.assert_same(outcome, way)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("unreduced", "AdamW.step() at step 0 with gradients that were not reduced over the world"),
        ("sharded over stages", "which spans the dimension 'pp': its ranks hold different stages"),
        ("swapped", "has a different model from rank"),
        ("scaled", "run.track(scaler=…): with a dimension 'pp', a GradScaler skips the update"),
        ("other names", "rank 1 has tracked the optimizers optimizer1, and rank 0 optimizer0"),
    ],
)
def test_a_misuse_is_refused_with_the_remedy(stages: StageRuns, way: str, message: str) -> None:
    outcome = stages.run(way, "pp=2", size=4, per_node=2)
    assert not outcome.survivors
    errors = [worker.error for worker in outcome.workers if message in worker.error]
    assert errors, outcome.describe()


@dataclass(frozen=True)
class Saved:
    """The checkpoints of the first epoch."""

    disk: Path
    memory: Path


@pytest.fixture(scope="module")
def saved(stages: StageRuns, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """Of two stages, each sharded over two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    host = MemoryHost(folder / "host")
    disk = folder / "disk"
    dims = ["pp=2", "shard=2"]
    outcome = stages.run(
        "fsdp", *dims, size=4, per_node=4, folder=disk, memory=host.folder, epochs=1
    )
    outcome.assert_success(workers=4)
    yield Saved(disk, host.folder)
    host.close()


def copy_of(saved: Saved, folder: Path) -> Path:
    shutil.copytree(saved.disk, folder)
    return folder


def resumed(outcome: RunOutcome) -> set[int]:
    return {int(worker.result["resumed"]) for worker in outcome.survivors}


@pytest.mark.slow
def test_a_checkpoint_has_each_stage_once(saved: Saved) -> None:
    info = checkpoints.latest(saved.disk).checkpoint
    assert info is not None and info.world_size == 4
    state = checkpoints.load(saved.disk, info.name).state
    weights = {key: set(stage["model"]["model"]) for key, stage in state.items()}
    assert weights == {
        "pp=0": {"embed.weight", "embed.bias", "inner.weight", "inner.bias"},
        "pp=1": {"norm.weight", "norm.bias", "head.weight", "head.bias", "seen"},
    }
    first = checkpoints.load(saved.disk, info.name, only="pp=0")
    assert first.state.keys() == {"pp=0"}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_checkpoint_resumes_with_another_number_of_replicas_and_of_shards(
    stages: StageRuns, saved: Saved, tmp_path: Path, replicas: int
) -> None:
    disk = copy_of(saved, tmp_path / "disk")
    outcome = stages.run("by hand", "pp=2", size=2 * replicas, per_node=2, folder=disk)
    outcome.assert_success(workers=2 * replicas)
    assert resumed(outcome) == {7}
    stages.assert_same(outcome, "by hand")


@pytest.mark.slow
def test_the_nodes_memory_holds_all_stages(stages: StageRuns, saved: Saved, tmp_path: Path) -> None:
    disk = copy_of(saved, tmp_path / "disk")
    for info in checkpoints.list_checkpoints(disk):
        shutil.rmtree(disk / info.name)
    outcome = stages.run("by hand", "pp=2", size=4, per_node=2, folder=disk, memory=saved.memory)
    outcome.assert_success(workers=4)
    assert resumed(outcome) == {6}, outcome.describe()
    stages.assert_same(outcome, "by hand")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("pp=2", "pp=1", "has 2 pipeline stages, and this job no pipeline stages"),
        ("pp=1", "pp=2", "has no pipeline stages, and this job 2 pipeline stages"),
    ],
)
def test_a_checkpoint_of_another_number_of_stages_is_refused(
    stages: StageRuns, saved: Saved, tmp_path: Path, before: str, after: str, reason: str
) -> None:
    disk = tmp_path / "disk"
    if before == "pp=2":
        copy_of(saved, disk)
    else:
        stages.run("by hand", before, size=1, per_node=1, folder=disk, epochs=1)
    count = int(after[-1])
    outcome = stages.run("by hand", after, size=count, per_node=count, folder=disk)
    assert not outcome.survivors
    # The host ends the others once one has failed, perhaps while they write the same.
    ended = [worker for worker in outcome.workers if worker.exit_code == 2]  # permanent
    assert ended, outcome.describe()
    for worker in ended:
        assert reason in worker.error + worker.log, outcome.describe()
        assert "elastic.join(mesh=" in worker.log
