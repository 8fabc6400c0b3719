"""FSDP2 in the style of pytorch/examples: torch alone, checkpoints by torch.distributed.checkpoint.

It has no notion of worlds: it shards over the processes that torchrun has started, and resumes from
the newest checkpoint with metadata, which DCP writes last.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class AppState(Stateful):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    app = AppState(model, optimizer)
    complete = [path.parent for path in args.checkpoint_dir.glob("step-*/.metadata")]
    if complete:
        newest = max(complete, key=lambda path: int(path.name.removeprefix("step-")))
        dcp.load({"app": app}, checkpoint_id=newest)  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        print(f"start at step {app.step} over {dist.get_world_size()} ranks", flush=True)

    while app.step < args.steps:
        torch.manual_seed(app.step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(4, 8, 32)
        (model(x).float() - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        app.step += 1
        time.sleep(args.step_s)
        if app.step % args.save_every == 0:
            folder = args.checkpoint_dir / f"step-{app.step}"
            dcp.save({"app": app}, checkpoint_id=folder)  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
