"""Trains a small transformer on characters, sharded with FSDP2, through changes of the world.

    python examples/fsdp2_char_lm.py
    torchrun --nproc-per-node=2 examples/fsdp2_char_lm.py --checkpoints /tmp/char-lm
    elastic run --nodes-local 2 --embedded-etcd --nnodes=1:2 --nproc-per-node=2 \\
        examples/fsdp2_char_lm.py --checkpoints /tmp/char-lm

``fully_shard`` with bf16 parameters and fp32 reduction, gradient accumulation, and clipping by the
norm of all shards. Kill a worker or a node: the workers restart with the remaining nodes and
resume from the newest checkpoint. Each rank reads its own shards, whatever the size of the world
that saved them, and each window of the text counts once per epoch. Rank 0 prints JSON lines.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import Dataset

import checkpoints
from elastic import ElasticSampler


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text, and the same windows one byte further."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.tensor(list(text), dtype=torch.int64)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.bytes[start : start + self.context + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="file; default: the source of argparse")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=24, help="windows of one step")
    parser.add_argument("--micro-batch", type=int, default=4, help="windows of a rank at once")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", choices=("bf16", "fp32", "fp64"), default="bf16")
    parser.add_argument("--checkpoints", help="folder; default: none are written")
    parser.add_argument("--every-steps", type=int, default=10, help="steps between two checkpoints")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group()
    else:  # python examples/fsdp2_char_lm.py
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.precision == "fp64":
        torch.set_default_dtype(torch.float64)

    # The model is sharded first: that replaces its parameters, and the optimizer must be created
    # from the new ones.
    torch.manual_seed(0)
    model = CharLM(args.width, args.layers, heads=4, context=args.context).to(device)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy()
    if args.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    # Each rank of the mesh is a position in the data. The global batch is constant, so the order
    # and the number of steps are the same at any size.
    dataset = Text((args.text or Path(argparse.__file__)).read_bytes(), args.context)
    sampler = ElasticSampler(
        dataset, num_replicas=size, rank=rank, shuffle=True, global_batch=args.global_batch
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
        for share in sampler.steps(args.micro_batch):
            loss = torch.zeros((), device=device)
            for number, micro in enumerate(share.micro_batches):
                model.set_requires_gradient_sync(number == len(share.micro_batches) - 1)
                # Every rank makes the same number of passes, since they contain collectives; a
                # pass without samples has weight 0.
                rows = [dataset[index] for index in micro.indices or (micro.filler,)]
                x, y = (torch.stack(parts).to(device) for parts in zip(*rows, strict=True))
                logits = model(x).flatten(0, 1)
                # FSDP averages over ranks, whose shares may differ: the loss is weighted so that
                # all windows have the same weight.
                part = F.cross_entropy(logits, y.flatten(), reduction="sum")
                part = part / (share.global_samples * args.context) * bool(micro.indices)
                (part * size).backward()
                loss += part.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
                dist.all_reduce(loss)
                values = {"loss": float(loss), "norm": float(norm.full_tensor())}
                if rank == 0:
                    print(json.dumps({"epoch": epoch, "step": step, **values}), flush=True)
    if engine:
        engine.close()  # waits for the last save
    if rank == 0:
        print(json.dumps({"done": True, "step": step, "world_size": size}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
