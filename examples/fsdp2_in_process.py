"""Trains a small transformer with FSDP2, and keeps its processes when ranks die or join.

    python examples/fsdp2_in_process.py
    elastic run --nodes-local 3 --embedded-etcd --nnodes=1:3 \\
        examples/fsdp2_in_process.py --checkpoints /tmp/fsdp2

The shards of all ranks form one copy of the model, so a rank's state cannot be copied from another
rank. ``build`` is called in each world, with a DeviceMesh of its ranks; the state is loaded from
the nodes' memory, where every rank's shards are saved every few steps and copied to the next node:
as often as costs 1 % of the time, or every ``--memory-every`` steps. Kill a worker or a node: the
others continue within milliseconds to seconds, and repeat the steps since the last save, with the
same samples. Rank 0 prints JSON lines.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import elastic


class Text(Dataset):
    """Windows of a text, and the same windows one byte further."""

    def __init__(self, text, context):
        self.bytes = torch.tensor(list(text), dtype=torch.int64)
        self.context = context

    def __len__(self):
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        window = self.bytes[start : start + self.context + 1]
        return window[:-1], window[1:]


class CharLM(nn.Module):
    def __init__(self, width, layers, context):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=self.token.weight.dtype
        )
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="file; default: the source of argparse")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=24, help="windows of one step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--checkpoints", default=None, help="folder; default: a temporary one")
    parser.add_argument("--save-every", type=int, default=100, help="steps between saves to disk")
    parser.add_argument(
        "--memory-every", type=int, help="steps between saves to memory; default: from their cost"
    )
    args = parser.parse_args()
    torch.set_default_dtype(getattr(torch, args.dtype))

    run = elastic.join(
        checkpoints=elastic.Checkpoints(
            args.checkpoints or tempfile.mkdtemp(), when=args.save_every, memory=args.memory_every
        )
    )
    text = Text((args.text or Path(argparse.__file__)).read_bytes(), args.context)
    loader = run.loader(
        DataLoader(text, batch_size=8, shuffle=True), global_batch=args.global_batch
    )

    def build(mesh):
        model = CharLM(args.width, args.layers, args.context).to(run.device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def train():
        model, optimizer = run.build(build)  # in each world; the last one's are invalid
        for epoch in run.epochs(args.epochs):
            samples, total = 0, 0.0
            for x, y in loader:
                x, y = x.to(run.device), y.to(run.device)
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                samples, total = samples + len(x), total + len(x) * loss.item()
            mean = run.mean(samples, loss=total / max(1, samples))  # since this world began
            if run.is_main:
                told = {"epoch": epoch, "world_size": run.world.size, **mean}
                print(json.dumps(told), flush=True)

    run.retry(train)
    if run.is_main:
        print(json.dumps({"done": True, "world_size": run.world.size}), flush=True)


if __name__ == "__main__":
    main()
