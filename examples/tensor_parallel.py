"""Checks tensor-parallel layers one by one, then trains them, through changes of the world.

    torchrun --nproc-per-node=2 examples/tensor_parallel.py --checkpoints /tmp/tensor-parallel
    elastic run --nodes-local 2 --embedded-etcd --nnodes=1:2 --nproc-per-node=2 \\
        examples/tensor_parallel.py --checkpoints /tmp/tensor-parallel

A column-wise and a row-wise linear layer, an MLP and a transformer layer are sharded over the ranks
of a node, and their outputs and gradients compared with those of the unsharded layers. Then a stack
of such layers learns to reverse sequences: tensor-parallel within a node, FSDP2 across nodes. The
ranks of a node train on the same samples, and different nodes on different ones. Kill a worker or a
node: the workers restart with the remaining nodes, and resume from the newest checkpoint. Rank 0
prints JSON lines.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import checkpoints
from elastic import ElasticSampler

WIDTH, HEADS, LENGTH, TOKENS = 32, 4, 8, 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class TransformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        # -1: all heads of an unsharded layer, this rank's heads of a sharded one.
        q, k, v = (
            f(h).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Reverser(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MLP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
LAYER_PLAN = {
    **{name: ColwiseParallel() for name in "qkv"},
    "out": RowwiseParallel(),
    **{f"mlp.{name}": style for name, style in MLP_PLAN.items()},
}


def compare(mesh: DeviceMesh) -> dict[str, float]:
    """The largest difference between each sharded piece and the same in one piece."""
    pieces = {
        "column": (nn.Linear(WIDTH, WIDTH), ColwiseParallel(output_layouts=Replicate())),
        "row": (nn.Linear(WIDTH, WIDTH), RowwiseParallel(input_layouts=Replicate())),
        "mlp": (MLP(), MLP_PLAN),
        "layer": (TransformerLayer(), LAYER_PLAN),
    }
    found = {}
    for name, (module, plan) in pieces.items():
        module = module.to(mesh.device_type)
        x = torch.randn(3, LENGTH, WIDTH, device=mesh.device_type)
        expected = results(module, x)
        sharded = results(parallelize_module(module, mesh, plan), x)
        found[name] = max(
            float((one - other).abs().max()) for one, other in zip(expected, sharded, strict=True)
        )
    return found


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients, in one piece."""
    module.zero_grad()
    output = module(x)
    output.square().mean().backward()
    gradients = [p.grad for p in module.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return [output.detach(), *(g.clone() for g in whole)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a layer")
    parser.add_argument("--sequences", type=int, default=960)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoints", help="folder; default: none are written")
    parser.add_argument("--every-steps", type=int, default=10, help="steps between two checkpoints")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group()
    else:  # python examples/tensor_parallel.py
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_default_dtype(torch.float64)  # so that rounding does not hide errors of the method
    rank, size = dist.get_rank(), dist.get_world_size()
    # Ranks of a node are consecutive: if the number of workers per node is a multiple of --tensor,
    # any number of nodes forms complete groups, and no layer is sharded across machines.
    tensor = min(args.tensor, size)
    if size % tensor:
        raise SystemExit(f"{size} ranks are not a multiple of --tensor={tensor}")
    mesh = init_device_mesh(
        device.type, (size // tensor, tensor), mesh_dim_names=("data", "tensor")
    )

    torch.manual_seed(0)
    differences = compare(mesh["tensor"])
    if rank == 0:
        print(json.dumps({"differences": differences}), flush=True)

    model = Reverser(args.layers).to(device)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], LAYER_PLAN)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    # Parameters are on two meshes, so no single kernel can update all of them.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)

    # The position in the data is that in the data dimension: the ranks of a tensor-parallel group
    # train on the same samples.
    inputs = torch.randint(
        TOKENS, (args.sequences, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    data = mesh["data"]
    sampler = ElasticSampler(
        torch.utils.data.TensorDataset(inputs),
        num_replicas=data.size(),
        rank=data.get_local_rank(),
        global_batch=args.global_batch,
        drop_last=True,
    )

    def state() -> dict[str, object]:
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "data": sampler.state_dict(),
            "step": step,
        }

    # One rank chooses the checkpoint, all load it: each reads only its own shards.
    step = 0
    found = checkpoints.latest(args.checkpoints).checkpoint if args.checkpoints else None
    chosen = [found.name if found else None, checkpoints.new_nonce()]
    dist.broadcast_object_list(chosen)
    name, nonce = chosen
    if name is not None:
        into = state()
        loaded = checkpoints.load(args.checkpoints, name, into=into, group=dist.group.WORLD).state
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        sampler.load_state_dict(loaded["data"])
        step = loaded["step"]
    if rank == 0:
        print(json.dumps({"start": step, "world_size": size, "checkpoint": name}), flush=True)

    # busy="wait": if one rank skips a save, the checkpoint is never complete.
    generation = json.loads(os.environ.get("ELASTIC_WORLD", "{}")).get("generation", 0)
    writers = checkpoints.WriterGroup(nonce=nonce, generation=generation, rank=rank, size=size)
    engine = checkpoints.Engine(args.checkpoints, busy="wait") if args.checkpoints else None

    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for share in sampler.steps():
            x = inputs[list(share.indices)].to(device)
            logits = model(x).flatten(0, 1)
            # FSDP averages over the data dimension, whose shares may differ by one sample.
            loss = F.cross_entropy(logits, x.flip(1).flatten(), reduction="sum")
            loss = loss / (share.global_samples * LENGTH)
            (loss * data.size()).backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            step += 1
            is_last = epoch == args.epochs - 1 and sampler.step == sampler.plan.steps
            if engine and (step % args.every_steps == 0 or is_last):
                engine.save_async(state(), step=step, world=writers)
            for outcome in engine.outcomes() if engine else ():
                if outcome.status is not checkpoints.SaveStatus.COMMITTED:
                    print(f"checkpoint {outcome.name}: {outcome.reason}", flush=True)
            if sampler.step == sampler.plan.steps:
                whole = loss.detach()
                dist.all_reduce(whole, group=data.get_group())
                if rank == 0:
                    line = {"epoch": epoch, "step": step, "loss": float(whole)}
                    print(json.dumps(line), flush=True)
    if engine:
        engine.close()  # waits for the last save
    if rank == 0:
        print(json.dumps({"done": True, "step": step, "world_size": size}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
