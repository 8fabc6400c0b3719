"""nanoGPT's `train.py`

Batches start at random offsets, drawn within the step that trains on them, so a repeated step draws
the same offsets. (nanoGPT itself prefetches the next batch between the forward and the backward
pass.)

Compared: among ranks only, because each rank draws its own batches
Group: The loop
"""

import math
import os
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

out = os.path.join(tempfile.mkdtemp(), "train.bin")
(np.random.RandomState(0).randint(0, 11, 2000)).astype(np.uint16).tofile(out)
batch_size, block_size, grad_accum, max_iters, eval_interval = 4, 8, 3, 10, 4


def get_batch(split):
    data = np.memmap(out, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    X = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    Y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix]
    )
    return X, Y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.h, self.head = (
            nn.Embedding(11, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 11, bias=False),
        )
        self.wte.weight = self.head.weight

    def forward(self, X, Y):
        logits = self.head(self.h(self.wte(X)).tanh())
        return logits, F.cross_entropy(logits.view(-1, 11), Y.view(-1))

    def configure_optimizers(self):
        params = dict(self.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=0.01,
            betas=(0.9, 0.95),
        )


def get_lr(it):
    return 0.01 * min(1, (it + 1) / 4) * 0.5 * (1 + math.cos(math.pi * it / 20))


run = elastic.join()
model = GPT()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
optimizer = model.configure_optimizers()
model = run.wrap(model)
run.track(optimizer=optimizer, scaler=scaler)
run.state.update(iter_num=0, best_val_loss=1e9)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {
        split: torch.stack([model(*get_batch(split))[1] for _ in range(3)]).mean()
        for split in ("train", "val")
    }
    model.train()
    return losses


def train():
    raw_model = model.module
    while True:
        iter_num = run.state["iter_num"]
        run.begin()
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0 and run.is_main:
            losses = estimate_loss()
            if losses["val"] < run.state["best_val_loss"]:
                torch.save({"model": raw_model.state_dict(), "iter_num": iter_num}, out + ".pt")
        for micro_step in range(grad_accum):
            model.require_backward_grad_sync = micro_step == grad_accum - 1
            _, loss = model(*get_batch("train"))
            scaler.scale(loss / grad_accum).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.state["iter_num"] = iter_num + 1
        run.commit()
        if iter_num + 1 == max_iters:
            break


run.retry(train)
result = model.state_dict()
