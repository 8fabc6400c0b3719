"""A plain script in the style of nanoGPT: it resumes from its own checkpoint on request.

A file ``hold`` in its folder holds it between two steps, where it does not write.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

EVERY = 10

parser = argparse.ArgumentParser()
parser.add_argument("--out_dir", type=Path, default=Path("out"))
parser.add_argument("--init_from", choices=("scratch", "resume"), default="scratch")
options = parser.parse_args()

options.out_dir.mkdir(exist_ok=True)
checkpoint = options.out_dir / "ckpt.pt"
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
first = 0
if options.init_from == "resume" and checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["iter_num"]
for iteration in range(first, 1_000_000):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if iteration > first and iteration % EVERY == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iteration,
        }
        torch.save(state, checkpoint)
        with (options.out_dir / "saved").open("a") as file:
            print(iteration, file=file)
    time.sleep(0.02)
    while (options.out_dir / "hold").exists():
        (options.out_dir / "held").touch()
        time.sleep(0.02)
