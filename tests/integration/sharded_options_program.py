"""Four ranks: common modifications of a sharded model, compared with an unsharded one.

Started by ``test_sharded_options.py``; it forks the ranks. Each option is tried in two replicas of
two ranks (``run.wrap``), and with each of these pairs as a separate world (``run.build``): three
steps of an optimizer with norm clipping, with other share sizes in each step. Each rank writes one
JSON object into ``RANK.log``: for each mode and option, the largest difference of a weight or the
error.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import functools
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from replica_gradients_program import SIZE, Rank, full
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

from elastic.errors import ConfigError, ElasticError
from elastic.groups.world import ReplicaMesh
from elastic.testing.forks.child import fork
from elastic.train.rebuilding import Built
from elastic.train.sharded import ShardedModule

TOKENS, WIDTH = 11, 6
# torch.compile's own compiler needs a C++ compiler on CPUs; graphs and guards are Dynamo's.
BACKEND = "aot_eager"
# In replicas, and as a single world: the samples per rank and step.
SHARES = {"wrap": ((5, 2, 1, 4), (1, 1, 2, 3), (4, 1, 3, 1)), "build": ((5, 2), (1, 4), (3, 2))}


class Block(nn.Module):
    """Preserves the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Tokens in, scores of tokens out."""

    def __init__(self, *, tied: bool = False, recompute: str = "", loss: str = "") -> None:
        super().__init__()
        self.recompute, self.loss = recompute, loss
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        scores: torch.Tensor = self.head(x)
        if self.loss == "beside":
            self.penalty = (x**2).mean()  # as in mixtures of experts: not in the output
        return (scores, scores.sin()) if self.loss == "twice" else scores

    def score(self, tokens: torch.Tensor) -> Any:
        """Called instead of the module."""
        return self.forward(tokens)


@dataclass
class Option:
    """A modification of the model, its shards, and the loop."""

    model: dict[str, Any] = field(default_factory=dict)  # Net's arguments
    shard: dict[str, Any] = field(default_factory=dict)  # fully_shard's arguments
    root: dict[str, Any] = field(default_factory=dict)  # of the outermost module instead
    dtype: torch.dtype = torch.float64
    before: Callable[[Net], object] = lambda model: None  # it is sharded
    blocks: bool = True  # sharded each by itself
    together: bool = False  # the embedding and the head are sharded in one call
    after: Callable[[Any], object] = lambda model: None
    passes: int = 1
    sync: Callable[[Any, bool], object] = lambda model, is_last: None  # before each pass
    between: Callable[[nn.Module, int], object] = lambda model, step: None  # of both models
    steps: int = 3  # 1 with bf16 weights, whose rounding turns 1e-8 into 1e-3 in the next step
    tolerance: float = 1e-11
    is_frozen: bool = False  # by ``before``, which is also applied to the unsharded model
    refused: str = ""  # prefix of the error, after the call


def freeze(*names: str) -> Callable[[nn.Module], None]:
    def act(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(False)

    return act


def freeze_meanwhile(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.0"):
            parameter.requires_grad_(step != 1)
            parameter.grad = None


def compile_blocks(model: Net) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND)


def shard_head(model: Net) -> None:
    fully_shard(model.head)


def sync_at_the_end(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def all_reduce_at_the_end(model: Any, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def wrap_blocks(model: Net) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)


MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OPTIONS = {
    "plain": Option(),
    "several modules in one call": Option(together=True),
    "bf16 parameters": Option(
        shard={"mp_policy": MIXED},
        dtype=torch.float32,
        steps=1,
        tolerance=1e-7,
    ),
    "bf16 gradients": Option(
        shard={"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        dtype=torch.float32,
        steps=1,
        tolerance=0.002,  # sums in bf16
    ),
    "output in fp32": Option(
        shard={"mp_policy": MIXED},
        root={
            "mp_policy": MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, output_dtype=torch.float32
            )
        },
        dtype=torch.float32,
        steps=1,
        tolerance=1e-7,
    ),
    "recomputed": Option(model={"recompute": "not reentrant"}),
    "recomputed, reentrant": Option(model={"recompute": "reentrant"}),
    "checkpoint_wrapper": Option(before=wrap_blocks),
    "compiled blocks": Option(before=compile_blocks),
    "compiled sharded blocks": Option(after=compile_blocks),
    "compiled model": Option(after=lambda model: model.compile(backend=BACKEND)),
    "offloaded": Option(shard={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "two passes": Option(passes=2),
    "two passes, one reduction": Option(passes=2, sync=sync_at_the_end),
    "two passes in bf16, one reduction": Option(
        shard={"mp_policy": MIXED},
        dtype=torch.float32,
        passes=2,
        sync=sync_at_the_end,
        steps=1,
        tolerance=1e-7,
    ),
    "two passes, one all-reduce": Option(passes=2, sync=all_reduce_at_the_end),
    "frozen group": Option(before=freeze("blocks.0", "embed"), is_frozen=True),
    "frozen in a group": Option(
        before=freeze("blocks.1.norm", "blocks.0.inner.bias"), is_frozen=True
    ),
    "frozen for a step": Option(between=freeze_meanwhile),
    "tied": Option(model={"tied": True}),
    "tied, in two groups": Option(
        model={"tied": True}, before=shard_head, refused="of a sharded module: 'head.weight' and"
    ),
    "not resharded": Option(shard={"reshard_after_forward": False}),
    "root alone": Option(blocks=False),
    "outputs of each other": Option(model={"loss": "twice"}),
    "a loss in an attribute": Option(model={"loss": "beside"}),
    "another method": Option(
        model={"loss": "method"},
        after=lambda model: register_fsdp_forward_method(model, "score"),
    ),
    "divided otherwise": Option(
        after=lambda model: model.set_gradient_divide_factor(1.0),
        refused="of a module with set_gradient_divide_factor() is not possible",
    ),
}
REFUSED_LATER = {
    "wrap": ("set_gradient_divide_factor", "set_all_reduce_hook", "set_custom_reduce_scatter"),
    "build": ("set_gradient_divide_factor", "set_custom_reduce_scatter"),
}


def build_net(option: Option) -> Net:
    torch.manual_seed(3)
    return Net(**option.model).to(option.dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # As torch does by default on GPUs, for half of the CPU time.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=True)


def samples(step: int, number: int, part: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * number + part)
    return torch.randint(0, TOKENS, (count, 4), generator=generator)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    output = (model.score if model.loss == "method" else model)(tokens[:, :-1])
    scores = output[1] if isinstance(output, tuple) else output
    loss: torch.Tensor = nn.functional.cross_entropy(
        scores.flatten(0, 1).float() if scores.dtype == torch.bfloat16 else scores.flatten(0, 1),
        tokens[:, 1:].flatten(),
    )
    return loss + model.penalty if model.loss == "beside" else loss


def add_gradients(model: Net, option: Option, way: str, step: int, part: int, share: float) -> None:
    """Add the gradients of one rank's samples, rounded as by FSDP."""
    policy = option.shard.get("mp_policy", MixedPrecisionPolicy())
    for number in range(option.passes):
        low = copy.deepcopy(model).to(policy.param_dtype or option.dtype)
        low.zero_grad()
        loss_of(low, samples(step, number, part, SHARES[way][step][part])).backward()  # type: ignore[no-untyped-call]
        for own, theirs in zip(model.parameters(), low.parameters(), strict=True):
            if theirs.grad is not None:
                more = theirs.grad.to(own.dtype) * share
                own.grad = more if own.grad is None else own.grad + more


def unsharded(option: Option, way: str) -> dict[str, torch.Tensor]:
    """The final weights of one model on all samples; FSDP's mixed precision is emulated."""
    model = build_net(option)
    if option.is_frozen:
        option.before(model)
    optimizer = optimizer_of(model)
    for step, shares in enumerate(SHARES[way][: option.steps]):
        option.between(model, step)
        optimizer.zero_grad()
        for part, count in enumerate(shares):
            add_gradients(model, option, way, step, part, count / sum(shares))
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sharded(at: Rank, option: Option) -> Any:
    mesh = at.replica.device_mesh["shard"]
    model = build_net(option)
    option.before(model)
    if option.together:
        fully_shard([model.embed, model.head], mesh=mesh, **option.shard)
    for block in model.blocks if option.blocks else ():
        fully_shard(block, mesh=mesh, **option.shard)
    module = fully_shard(model, mesh=mesh, **(option.root or option.shard))
    option.after(module)
    return module


def train(
    option: Option, way: str, model: Any, part: int, begin: Callable[[float, int], object]
) -> float:
    """The largest difference of a weight from the unsharded model's."""
    optimizer = optimizer_of(model)
    for step, shares in enumerate(SHARES[way][: option.steps]):
        option.between(model, step)
        begin(shares[part] / sum(shares), len(shares))
        optimizer.zero_grad()
        for number in range(option.passes):
            option.sync(model, number == option.passes - 1)
            loss_of(model, samples(step, number, part, shares[part])).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    expected = unsharded(option, way)
    names = {
        name.replace("_checkpoint_wrapped_module.", ""): name
        for name in dict(model.named_parameters())
    }
    found = {short: full(model.get_parameter(name)) for short, name in names.items()}
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    return max(float((found[name] - expected[name]).abs().max().detach()) for name in expected)


def wrapped(at: Rank, option: Option) -> float:
    module = sharded(at, option)
    own = ShardedModule(module, at.group)
    own.enter_world()
    try:
        return train(option, "wrap", module, at.part, lambda share, size: own.begin_step(share))
    finally:
        own.leave_world()


def built(at: Rank, option: Option) -> float:
    module = sharded(at, option)
    own = Built((module,), at.replica.device_mesh["shard"], generation=1)
    return train(option, "build", module, at.replica.position, own.begin_step)


def one_update_of_several_steps(at: Rank) -> float:
    """The difference of a gradient accumulated over steps with other shares."""
    option, shares = OPTIONS["plain"], SHARES["build"]
    module, part = sharded(at, option), at.replica.position
    own = Built((module,), at.replica.device_mesh["shard"], generation=1)
    expected = build_net(option)
    for step, counts in enumerate(shares):
        own.begin_step(counts[part] / sum(counts), len(counts))
        sync_at_the_end(module, step == len(shares) - 1)
        loss_of(module, samples(step, 0, part, counts[part])).backward()  # type: ignore[no-untyped-call]
        for other, count in enumerate(counts):
            add_gradients(expected, option, "build", step, other, count / sum(counts))
    return max(
        float((full(own.grad) - cast(torch.Tensor, theirs.grad)).abs().max())
        for own, theirs in zip(module.parameters(), expected.parameters(), strict=True)
    )


def settings_after(at: Rank, way: str) -> list[str]:
    """The errors of calls after run.wrap or run.build that would change the mean."""
    module, reasons = sharded(at, OPTIONS["plain"]), []
    if way == "wrap":
        ShardedModule(module, at.group)
    else:
        Built((module,), at.replica.device_mesh["shard"], generation=1)
    for name in REFUSED_LATER[way]:
        for part in (module, module.blocks[0]):
            try:
                getattr(part, name)(None)
            except ConfigError as error:
                reasons.append(str(error).partition("(")[0])
    return reasons


@contextmanager
def told(results: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except ElasticError as error:
        results[name] = str(error)
    except Exception:  # noqa: BLE001  reported to the test
        results[name] = traceback.format_exc()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    importlib.import_module("torch._inductor.compile_fx")  # what torch.compile needs, for seconds
    ranks = [
        fork(functools.partial(be_rank, rank, options.ports, options.folder))
        for rank in range(SIZE)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    sys.exit(f"exit codes of the ranks: {codes}" if any(codes) else 0)


def be_rank(rank: int, ports: list[int], folder: Path) -> None:
    with (folder / f"{rank}.log").open("w") as log:
        faulthandler.enable(log)  # a crash in native code would leave no output
        try:
            print(json.dumps(try_options(rank, ports, folder)), file=log)
        except BaseException:
            traceback.print_exc(file=log)
            raise


def try_options(rank: int, ports: list[int], folder: Path) -> dict[str, dict[str, Any]]:
    at = Rank(rank, ports, folder, ReplicaMesh.parse({"shard": 2}))
    assert at.parts == SIZE
    at.build()
    results: dict[str, dict[str, Any]] = {"wrap": {}, "build": {}}
    for name, option in OPTIONS.items():
        for way, act in (("wrap", wrapped), ("build", built)):
            with told(results[way], name):
                results[way][name] = act(at, option)
    for way, known in results.items():
        known["later"] = settings_after(at, way)
    with told(results["build"], "over several steps"):
        results["build"]["over several steps"] = one_update_of_several_steps(at)
    at.group.destroy()
    return results


if __name__ == "__main__":
    main()
