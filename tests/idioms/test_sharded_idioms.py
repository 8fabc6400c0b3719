"""Common training loops of sharded models, in replicas and with ``run.build``, while ranks die.

Each way of training is written as in tutorials of FSDP2. A worker dies at any line or call; the
others continue, alone or with another one. The final weights are those of one undisturbed process.
``tests/integration/test_sharded_options.py`` compares more options, without deaths.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from idiom_runs import IdiomRuns, assert_results

from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome

SCRIPT = """
import os, sys
way, idiom, memory, disk, shard = sys.argv[1:]
os.environ["ELASTIC_NODE_MEMORY"] = memory
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
import elastic

TOKENS, WIDTH = 11, 8
policy, dtype = {}, torch.float64
if idiom == "mixed precision":
    policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    dtype = torch.float32
if idiom == "offloaded":
    policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
if idiom == "scaled":
    dtype = torch.float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)
        self.outer = nn.Linear(9, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        if idiom == "accumulated":
            self.head.weight = self.embed.weight  # tied, too

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if idiom == "averaged" else block(x)
        return self.head(x)


def sharded(mesh):
    torch.manual_seed(5)
    model = Net().to(dtype)
    if idiom == "everyday":
        model.embed.requires_grad_(False)
    for number, block in enumerate(model.blocks):
        if idiom == "compiled":
            block.compile(backend="aot_eager")
        if idiom == "offloaded":
            block = model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def created(mesh):
    model = sharded(mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.05 * n))
    average = None
    if idiom == "averaged":
        average = sharded(mesh).requires_grad_(False)
        average.load_state_dict(model.state_dict())
    # The first updates are skipped: their gradients overflow.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler,
            **({"average": average} if average is not None else {}),
            **({"scaler": scaler} if idiom == "scaled" else {})}


tokens = torch.randint(0, TOKENS, (64, 5), generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
mesh = {} if way == "build" else {"mesh": {"shard": int(shard)}}
run = elastic.join(checkpoints=elastic.Checkpoints(disk, when=1000, memory=2), **mesh)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=8)
held_out = run.shard(DataLoader(dataset, batch_size=4))
result = {}
if way == "replicas":
    made = created(run.mesh["shard"])
    for one in made.values():
        if isinstance(one, nn.Module):
            run.wrap(one)
    run.track(**{name: one for name, one in made.items() if not isinstance(one, nn.Module)})


def loss_of(model, x, y):
    scores = model(x)
    return F.cross_entropy(scores.flatten(0, 1).to(dtype), y.flatten())


def evaluate(model):
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, x, y).item() for x, y in held_out]
    model.train()
    return run.mean(len(losses), loss=sum(losses) / max(1, len(losses)))


def train():
    objects = run.build(created) if way == "build" else made
    model, optimizer = objects["model"], objects["optimizer"]
    average, scaler = objects.get("average"), objects.get("scaler")
    for epoch in run.epochs(2):
        for number, (x, y) in enumerate(loader):
            if idiom == "accumulated":
                model.set_requires_gradient_sync(number % 2 == 1)
                (loss_of(model, x, y) / 2).backward()
                if number % 2 == 0:
                    continue
            elif scaler is not None:
                scaler.scale(loss_of(model, x, y)).backward()
                scaler.unscale_(optimizer)
            else:
                loss_of(model, x, y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            objects["scheduler"].step()
            optimizer.zero_grad()
            if average is not None:
                with torch.no_grad():
                    for mean, value in zip(average.parameters(), model.parameters()):
                        mean.lerp_(value, 0.1)
            if idiom == "everyday" and number % 4 == 3:
                if dist.get_rank() == 0:
                    print("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
                place = f"{disk}-dcp/{epoch}-{number}-{run.world.replica if mesh else 0}"
                dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=place)
        if idiom == "everyday":
            evaluate(model)
    state = model if average is None else average
    for name, value in state.state_dict().items():
        short = name.replace("_checkpoint_wrapped_module.", "")
        result[short] = value.full_tensor().detach().clone()
    if scaler is not None:
        result["scale"] = torch.tensor(scaler.get_scale())


run.retry(train)
"""
SIZES = {"replicas": 4, "build": 3}
LOST = {"replicas": 2, "build": 1}  # ranks, including one that dies
IDIOMS = (
    "everyday",  # a frozen embedding, a schedule, clipping, printing, DCP in the loop, evaluation
    "averaged",  # the weights, in a second model; and recomputed activations
    "accumulated",  # over two batches, with one reduction; and tied weights
    "offloaded",  # and checkpoint_wrapper
    "scaled",  # by GradScaler, in float32
    "compiled",
)
# Each in one of the ways. Compiling takes longest; test_sharded_options.py compares its results.
IN_SHORT = (
    ("everyday", "build"),
    ("averaged", "replicas"),
    ("accumulated", "build"),
    ("offloaded", "replicas"),
    ("scaled", "build"),
)
TOLERANCE = 1e-6


@dataclass
class ShardedRuns:
    """Runs of the script, and their shared settings."""

    runs: IdiomRuns
    _known: dict[tuple[str, str, int], RunOutcome] = field(default_factory=dict)

    def undisturbed(self, way: str, idiom: str, size: int) -> RunOutcome:
        key = way, idiom, size
        if key not in self._known:
            self._known[key] = self.run(way, idiom, size)
            self._known[key].assert_success(workers=size)
        return self._known[key]

    def run(
        self,
        way: str,
        idiom: str,
        size: int,
        death: Death | None = None,
        *,
        is_replaced: bool = False,
    ) -> RunOutcome:
        return self.runs.sharded(SCRIPT, way, idiom, size, death, is_replaced=is_replaced)


@pytest.fixture(scope="module")
def sharded(runs: IdiomRuns) -> ShardedRuns:
    return ShardedRuns(runs)


def check(sharded: ShardedRuns, way: str, idiom: str, seed: int) -> None:
    draw = random.Random(f"{way}/{idiom}/{seed}")
    size, is_replaced = SIZES[way], draw.random() < 0.5
    alone = sharded.undisturbed("replicas", idiom, 1).survivors[0]
    counted = draw.choice([LINES, CALLS])
    last = alone.lines if counted == LINES else int(alone.calls * 0.9)
    rank = draw.randrange(size)
    death = Death(rank=rank, event=draw.randint(1, last), counted=counted)
    outcome = sharded.run(way, idiom, size, death, is_replaced=is_replaced)
    if not outcome.died_at and outcome.survivors:  # one process evaluates on more samples
        outcome.assert_success(workers=size)
        own = sharded.undisturbed(way, idiom, size).workers[rank]
        death = Death(rank=rank, event=draw.randint(1, own.lines))
        outcome = sharded.run(way, idiom, size, death, is_replaced=is_replaced)
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=size if is_replaced else size - LOST[way])
    assert_results(outcome, alone.result, tolerance=TOLERANCE)


# In `make test`: test_trainer_scripts.py and test_mixed_precision.py in replicas,
# test_optimizer_states.py and generated scripts with run.build.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("idiom", "way"),
    IN_SHORT,
)
def test_a_death_does_not_change_the_result(sharded: ShardedRuns, way: str, idiom: str) -> None:
    check(sharded, way, idiom, 0)


# All of them in both ways, and at more lines.
@pytest.mark.soak
@pytest.mark.parametrize("way", SIZES)
@pytest.mark.parametrize("idiom", IDIOMS)
@pytest.mark.parametrize("seed", range(10))
def test_a_death_anywhere_does_not_change_the_result(
    sharded: ShardedRuns, way: str, idiom: str, seed: int
) -> None:
    check(sharded, way, idiom, seed)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("replicas", marks=pytest.mark.slow),
        pytest.param("build", marks=pytest.mark.soak),
    ],
)
def test_a_death_does_not_change_the_result_of_mixed_precision(
    sharded: ShardedRuns, way: str
) -> None:
    """The same ranks see the same samples and so round equally in bf16; on fewer ranks Adam turns a
    rounding difference of a gradient into 0.01, as it does without a death.
    """
    idiom, size = "mixed precision", SIZES[way]
    undisturbed = sharded.undisturbed(way, idiom, size)
    death = Death(rank=1, event=undisturbed.workers[1].calls // 2, counted=CALLS)
    outcome = sharded.run(way, idiom, size, death, is_replaced=True)
    outcome.assert_success(workers=size)
    assert_results(outcome, undisturbed.survivors[0].result, tolerance=TOLERANCE)
