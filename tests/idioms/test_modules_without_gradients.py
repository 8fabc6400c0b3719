"""Whole modules that get no gradients in some steps: on all ranks, or on some only.

Experts take turns, a head belongs to one task, a step is skipped. If all ranks do the same, the
result is that of one process. If only some do, their collectives would be summed with those of
another module, or wait indefinitely: all ranks that can know it raise an error that names the
module.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from idiom_runs import IdiomRuns, assert_results

from elastic.testing.small_world.world import Death, RunOutcome, SmallWorld

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
import elastic

way, begin, *dims = sys.argv[1:]
mesh = {name: int(size) for name, size in (dim.split("=") for dim in dims)}
WIDTH = 6


class Expert(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, 1)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None) if "buffers" in way else nn.Identity()

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Chooses(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(experts)

    def forward(self, x, chosen):
        return sum(self.experts[number](self.first(x)) for number in chosen)


def sharded(module):
    for part in module.modules():
        if isinstance(part, Expert) and "tp" in mesh:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(part, run.mesh["tp"], plan)
        if isinstance(part, Expert) and part is not module and "shard" in mesh:
            fully_shard(part, mesh=run.mesh["shard"])
    return fully_shard(module, mesh=run.mesh["shard"]) if "shard" in mesh else module


run = elastic.join(**({"mesh": mesh} if mesh else {}))
torch.manual_seed(3)
experts = [Expert(8).double(), Expert(9 if "other size" in way else 8).double()]
if "in one" in way:
    unused = {} if mesh else {"find_unused_parameters": True}
    whole = run.wrap(sharded(Chooses(experts).double()), **unused)
    modules = {"whole": whole}
else:
    experts = [run.wrap(sharded(expert)) for expert in experts]
    modules = {"first": experts[0], "second": experts[1]}
optimizers = {n: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False)
              for n, m in modules.items()}
run.track(**{f"optimizer_{name}": one for name, one in optimizers.items()})
x = torch.randn(48, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=8)
result = {}


def chosen_experts(step):
    if step < int(begin):
        return ([0], [0, 1], [0, 1], [1], [])[step % 5] if "in turn" in way else [0, 1]
    own = run.world.replica if mesh else run.world.rank
    if "skipped" in way:
        return [] if own else [0, 1]
    return [0, 1] if "lacking" in way and not own else [own]


def routed(x):
    # Each sample has its expert, and an expert without samples is not called.
    output, second = x.new_zeros(len(x), 1), x[:, 0] > 1.0
    for expert, own in zip(experts, (~second, second)):
        if own.any():
            output = output.index_put((own.nonzero().squeeze(1),), expert(x[own]))
    return output


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            chosen = chosen_experts(run.state.get("steps", 0))
            if "routed" in way:
                F.mse_loss(routed(inputs), targets).backward()
            elif chosen:
                output = whole(inputs, chosen) if "in one" in way else sum(
                    experts[number](inputs) for number in chosen)
                F.mse_loss(output, targets).backward()
            run.reduce_gradients()  # with pipeline stages
            for name, optimizer in optimizers.items():
                if any(p.grad is not None for p in modules[name].parameters()):
                    optimizer.step()
                    optimizer.zero_grad()
            run.state["steps"] = run.state.get("steps", 0) + 1
            if "means" in way:
                run.mean(1.0, loss=1.0)
    for place, module in modules.items():
        for name, value in module.state_dict().items():
            whole_value = getattr(value, "full_tensor", lambda value=value: value)()
            result[f"{place}.{name.removeprefix('module.')}"] = whole_value.detach().clone()


run.retry(train)
"""
NEVER = 1000
TOLERANCE = 1e-9


@dataclass
class TurnRuns:
    """Runs of the script."""

    world: SmallWorld
    script: Path
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self,
        way: str,
        begin: int,
        dims: tuple[str, ...] = (),
        *,
        size: int = 2,
        per_node: int = 1,
        death: Death | None = None,
    ) -> RunOutcome:
        return self.world.run(
            self.script,
            self.script.with_name(f"run-{next(self._number)}"),
            size=size,
            per_node=per_node,
            arguments=[way, str(begin), *dims],
            death=death,
            is_replaced=death is not None,
        )


@pytest.fixture(scope="module")
def turns(runs: IdiomRuns, tmp_path_factory: pytest.TempPathFactory) -> TurnRuns:
    script = tmp_path_factory.mktemp("turns") / "script.py"
    script.write_text(SCRIPT)
    return TurnRuns(runs.world, script)


REPLICAS = ("shard=1",)
FIRST, SECOND = "model (Expert)", "model1 (Expert)"


@pytest.mark.parametrize(
    ("way", "dims", "name"),
    [
        pytest.param("two", (), SECOND, id="modules in turn"),
        pytest.param(
            "two other size means", (), SECOND, id="modules of other sizes", marks=pytest.mark.slow
        ),
        pytest.param("two lacking", (), FIRST, id="a module on one rank"),
        pytest.param("two buffers", (), FIRST, id="modules with buffers", marks=pytest.mark.slow),
        pytest.param("two skipped", (), SECOND, id="a skipped step"),
        pytest.param("in one skipped means", (), "model (Chooses)", id="a skipped model"),
        pytest.param("two", REPLICAS, SECOND, id="sharded modules in turn"),
        pytest.param(
            "in one",
            REPLICAS,
            "model.experts.1 (Expert)",
            id="parts of a module",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "in one other size lacking",
            REPLICAS,
            "model.experts.0 (Expert)",
            id="sizes",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "two skipped means", REPLICAS, SECOND, id="a step of a replica", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize("begin", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_gradients_on_some_ranks_only_are_refused_at_once(
    turns: TurnRuns, way: str, dims: tuple[str, ...], name: str, begin: int
) -> None:
    assert_refused(turns.run(way, begin, dims), begin, name)


@pytest.mark.soak
@pytest.mark.parametrize("begin", [0, 1, 3, 11])
@pytest.mark.parametrize("dims", [("shard=2",), ("tp=2",)], ids=str)
@pytest.mark.parametrize("way", ["two", "two in turn", "two lacking", "two skipped"])
def test_gradients_of_some_replicas_only_are_refused_at_once(
    turns: TurnRuns, way: str, dims: tuple[str, ...], begin: int
) -> None:
    assert_refused(turns.run(way, begin, dims, size=4, per_node=2), begin, "model")


def assert_refused(outcome: RunOutcome, begin: int, name: str) -> None:
    """``name``: the module that some ranks reduce and others do not. The first error ends the run,
    so any rank's may be the only one."""
    assert not outcome.survivors
    errors = [worker.error for worker in outcome.workers if worker.error]
    assert any(f"at step {begin}, " in e and name in e for e in errors), outcome.describe()
    others = ("ReplicaLost", "GroupAborted")  # on ranks that first detect a dead peer
    is_named = ["0.0 * other(x).sum()" in e or e.startswith(others) for e in errors]
    assert all(is_named), (errors, outcome.describe())


@pytest.mark.parametrize(
    ("way", "dims", "size", "per_node"),
    [
        pytest.param("two in turn", (), 2, 1, id="modules", marks=pytest.mark.slow),
        pytest.param(
            "two in turn means", REPLICAS, 2, 1, id="sharded modules", marks=pytest.mark.slow
        ),
        pytest.param(
            "in one in turn", REPLICAS, 2, 1, id="parts of a module", marks=pytest.mark.slow
        ),
        pytest.param(
            "two routed", ("pp=1",), 3, 1, id="stages of several modules", marks=pytest.mark.slow
        ),
        pytest.param("two in turn", ("tp=2",), 4, 2, id="tensor parallel", marks=pytest.mark.soak),
    ],
)
def test_modules_that_take_turns_on_all_ranks_train_like_one_process(
    turns: TurnRuns, way: str, dims: tuple[str, ...], size: int, per_node: int
) -> None:
    """Also after a death, in a world that has seen no step."""
    alone = turns.run(way, NEVER, size=1)
    alone.assert_success(workers=1)
    undisturbed = turns.run(way, NEVER, dims, size=size, per_node=per_node)
    undisturbed.assert_success(workers=size)
    assert_results(undisturbed, alone.workers[0].result, tolerance=TOLERANCE)
    death = Death(rank=1, event=undisturbed.workers[1].lines // 2)
    killed = turns.run(way, NEVER, dims, size=size, per_node=per_node, death=death)
    assert killed.died_at, killed.describe()
    killed.assert_success(workers=size)
    assert_results(killed, alone.workers[0].result, tolerance=TOLERANCE)
