"""Scripts with tensor, sequence and context parallelism, in the style of their tutorials.

A rank dies at any line or call; the ranks of its replica are replaced, or the other replica
continues alone. The final weights are those of the unsharded model in one undisturbed process,
which also loads the checkpoints. ``test_trainer_scripts.py`` has FSDP2 in the style of torchtitan.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from idiom_runs import IdiomRuns

from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome, WorkerResult

SCRIPT = """
import contextlib, sys
kind, layout, disk, epochs = sys.argv[1:]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor, Replicate, Shard, distribute_module, distribute_tensor)
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module)
from torch.utils.data import DataLoader, TensorDataset
import elastic

MESHES = {"llama": {"shard": 1, "tp": 2}, "deep llama": {"shard": 2, "tp": 2}, "context": {"cp": 2}}
TOKENS, WIDTH, HEADS, LENGTH = 11, 8, 2, 6  # the vocabulary is uneven over two ranks
torch.set_default_dtype(torch.float64)
is_whole = layout == "whole"
mesh = {} if is_whole else {"mesh": MESHES.get(kind, {"tp": 2})}
run = elastic.join(checkpoints=elastic.Checkpoints(disk, when=1000), **mesh)
torch.manual_seed(0)
loss_context = contextlib.nullcontext


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkvo")

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        first, length = 0, x.shape[1]
        if kind == "context" and not is_whole:  # keys and values of the whole sequence
            first = run.mesh["cp"].get_local_rank() * length
            k, v = (all_gather_tensor_autograd(t.contiguous(), 2, run.mesh["cp"]) for t in (k, v))
        seen = torch.arange(k.shape[2]) <= torch.arange(first, first + length)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.w2 = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(TOKENS, WIDTH), nn.RMSNorm(WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList([Block()])
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)
        if kind in ("tied", "untied"):
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        if kind == "context":
            x = x + part_of(self.positions, 0)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelize_llama(model, tp_mesh):
    # The first and last layer, as in torchtitan; the loss is computed over parts of the vocabulary.
    parallelize_module(model, tp_mesh, {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    })
    for block in model.layers:
        parallelize_module(block, tp_mesh, {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        })
    if kind == "tied":
        model.output.weight = model.tok_embeddings.weight


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.in_proj, self.out_proj = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.out_proj(torch.relu(self.in_proj(self.norm(x))))


def shard_projections(name, module, mesh):
    if name == "in_proj":
        for key, parameter in list(module.named_parameters()):
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    elif name == "out_proj":
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(1)]))


class ToRegion(torch.autograd.Function):  # Megatron's f: identity, and all-reduce
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=run.mesh["tp"].get_group())
        return gradient


class FromRegion(torch.autograd.Function):  # Megatron's g: all-reduce, and identity
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=run.mesh["tp"].get_group())
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Megatron(ToyModel):
    def __init__(self):
        super().__init__()
        if is_whole:
            return
        tp, own = run.mesh["tp"], run.mesh["tp"].get_local_rank()
        for layer, name, dim in (
            (self.in_proj, "weight", 0), (self.in_proj, "bias", 0), (self.out_proj, "weight", 1)):
            part = getattr(layer, name).detach().chunk(tp.size(), dim)[own].clone()
            if kind == "megatron":
                part = DTensor.from_local(part, tp, [Shard(dim)])
            setattr(layer, name, nn.Parameter(part))

    def forward(self, x):
        if is_whole:
            return super().forward(x)
        x = ToRegion.apply(self.norm(x))
        first, second = self.in_proj, self.out_proj
        locals_ = [getattr(p, "to_local", lambda p=p: p)()
                   for p in (first.weight, first.bias, second.weight)]
        x = torch.relu(F.linear(x, *locals_[:2]))
        return FromRegion.apply(F.linear(x, locals_[2])) + second.bias


def part_of(tensor, dim):  # this rank's part of the sequence, or of the samples
    if is_whole or kind not in ("context", "sequence"):
        return tensor
    over = run.mesh["cp" if kind == "context" else "tp"]
    return tensor.chunk(over.size(), dim)[over.get_local_rank()]


if kind in ("llama", "deep llama", "tied", "untied", "context"):
    model = Transformer()
    data = torch.randint(TOKENS, (16, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    dataset, dim = TensorDataset(data[:, :-1], data[:, 1:]), 1
else:
    model = Megatron() if "megatron" in kind else ToyModel()
    data = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    dataset, dim = TensorDataset(data, data[:, :2].sin()), 0
if not is_whole and kind in ("llama", "deep llama", "tied", "untied"):
    parallelize_llama(model, run.mesh["tp"])
    loss_context = loss_parallel
elif not is_whole and kind == "sequence":  # each rank has a part of the samples
    parallelize_module(model, run.mesh["tp"], {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "in_proj": ColwiseParallel(input_layouts=Shard(0)),
        "out_proj": RowwiseParallel(output_layouts=Shard(0)),
    })
elif not is_whole and kind == "distributed":  # it splits the samples
    model = distribute_module(
        model, run.mesh["tp"], shard_projections,
        input_fn=lambda _, inputs, mesh: distribute_tensor(inputs[0], mesh, [Shard(0)]),
        output_fn=lambda _, output, mesh: output.full_tensor(),
    )
if "llama" in kind:
    model.layers = nn.ModuleList(checkpoint_wrapper(block) for block in model.layers)
if not is_whole and ("llama" in kind or kind == "context"):
    over = run.mesh["cp" if kind == "context" else "shard"]
    for block in model.layers:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
model = run.wrap(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
run.track(optimizer=optimizer)
batch = 3 if kind == "distributed" else 8  # a replica with one sample, and last without any
loader = run.loader(DataLoader(dataset, batch_size=batch, shuffle=True), global_batch=batch)
result = {}


def train():
    passes = 2 if "llama" in kind else 1
    for _ in run.epochs(int(epochs)):
        for x, y in loader:
            for _ in range(passes):
                with loss_context():
                    scores, target = model(part_of(x, dim)), part_of(y, dim)
                    if y.dtype == torch.int64:
                        loss = F.cross_entropy(scores.flatten(0, 1), target.flatten())
                    else:
                        loss = F.mse_loss(scores, target)
                    parts = run.mesh["tp"].size() if kind == "sequence" and not is_whole else 1
                    (loss / passes / parts).backward()
            if "megatron" not in kind:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        short = name.replace("module.", "").replace("_checkpoint_wrapped_module.", "")
        whole = getattr(parameter, "full_tensor", lambda p=parameter: p)()
        result[short] = whole.detach().clone()


run.retry(train)
"""
SCRIPTS = (
    "llama",  # tensor and loss parallelism under FSDP2, recomputed, clipped, two passes per step
    "tied",  # embedding and head
    "sequence",
    "distributed",
    "megatron",
    "context",
)
REFUSED = {
    "untied": (
        "'tok_embeddings.weight' and 'output.weight' were one tied weight",
        "model.output.weight = model.tok_embeddings.weight",
    ),
    "plain megatron": (
        "in model (parameter 2, 'in_proj.weight'), but both must hold the same part of it",
        'DTensor.from_local(own, run.mesh["tp"], [Shard(0)])',
    ),
}


@dataclass
class ScriptRuns:
    """Runs of the script; those of the unsharded model are shared."""

    runs: IdiomRuns
    _whole: dict[tuple[str, int], RunOutcome] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def whole(self, kind: str, epochs: int = 2) -> WorkerResult:
        """One undisturbed process with the unsharded model."""
        if (kind, epochs) not in self._whole:
            self._whole[kind, epochs] = self.run(kind, epochs=epochs, layout="whole")
            self._whole[kind, epochs].assert_success(workers=1)
        return self._whole[kind, epochs].survivors[0]

    def run(
        self,
        kind: str,
        death: Death | None = None,
        *,
        is_replaced: bool = False,
        epochs: int = 2,
        layout: str = "replicas",
        disk: Path | None = None,
    ) -> RunOutcome:
        """Two replicas, or one process."""
        folder = self.runs.folder / f"tensor-parallel-{next(self._number)}"
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(SCRIPT)
        return self.runs.world.run(
            script,
            folder,
            size=1 if layout == "whole" else 2 * ranks_of(kind),
            per_node=1 if layout == "whole" else ranks_of(kind),
            arguments=[kind, layout, str(disk or folder / "disk"), str(epochs)],
            death=death,
            is_replaced=is_replaced,
        )


@pytest.fixture(scope="module")
def scripts(runs: IdiomRuns) -> ScriptRuns:
    return ScriptRuns(runs)


def ranks_of(kind: str) -> int:
    return 4 if kind == "deep llama" else 2


def check(scripts: ScriptRuns, kind: str, seed: int) -> None:
    draw = random.Random(f"{kind}/{seed}")
    whole, ranks = scripts.whole(kind), ranks_of(kind)
    counted, rank = draw.choice([LINES, CALLS]), draw.randrange(2 * ranks)
    is_replaced = draw.random() < 0.5
    outcome = scripts.run(kind, death_within(whole, rank, counted, draw), is_replaced=is_replaced)
    if not outcome.died_at:  # one process executes more than each rank of two replicas
        outcome.assert_success(workers=2 * ranks)
        death = death_within(outcome.workers[rank], rank, counted, draw)
        outcome = scripts.run(kind, death, is_replaced=is_replaced)
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=2 * ranks if is_replaced else ranks)
    assert_same(outcome, whole)


def death_within(worker: WorkerResult, rank: int, counted: str, draw: random.Random) -> Death:
    """A death of ``rank`` at any event of the run that ``worker`` has counted."""
    # The number of calls varies slightly between runs, so the last ones may not be reached.
    last = worker.lines if counted == LINES else int(worker.calls * 0.9)
    return Death(rank=rank, event=draw.randint(1, last), counted=counted)


def assert_same(outcome: RunOutcome, whole: WorkerResult) -> None:
    assert whole.result
    for worker in outcome.survivors:
        assert worker.steps == whole.steps, outcome.describe()
        assert worker.result.keys() == whole.result.keys()
        for name, value in whole.result.items():
            torch.testing.assert_close(worker.result[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "kind",
    [SCRIPTS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in SCRIPTS[1:])],
)
def test_a_death_does_not_change_the_result(scripts: ScriptRuns, kind: str) -> None:
    check(scripts, kind, 0)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*SCRIPTS, "deep llama"])
@pytest.mark.parametrize("seed", range(20))
def test_a_death_anywhere_does_not_change_the_result(
    scripts: ScriptRuns, kind: str, seed: int
) -> None:
    check(scripts, kind, seed)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("tied", marks=pytest.mark.slow),
        pytest.param("megatron", marks=pytest.mark.soak),
    ],
)
def test_a_checkpoint_is_loaded_by_the_unsharded_model_and_back(
    scripts: ScriptRuns, kind: str, tmp_path: Path
) -> None:
    for epochs, layout in ((1, "replicas"), (2, "whole"), (3, "replicas")):
        outcome = scripts.run(kind, epochs=epochs, layout=layout, disk=tmp_path)
        outcome.assert_success(workers=1 if layout == "whole" else 2 * ranks_of(kind))
    assert_same(outcome, scripts.whole(kind, 3))


@pytest.mark.parametrize("kind", REFUSED)
def test_scripts_that_would_train_other_weights_are_refused(scripts: ScriptRuns, kind: str) -> None:
    message, hint = REFUSED[kind]
    workers = scripts.run(kind).workers
    ended = [w for w in workers if message in w.error]
    assert ended
    for worker in ended:
        assert hint in worker.log
    # A rank that is slower may lose its peers in the collective before the refused call.
    for worker in workers:
        assert worker in ended or worker.exit_code is None or "by peer" in worker.error
