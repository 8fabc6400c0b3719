"""Trains a small GPT on characters, in the style of nanoGPT: the training loop is at module level.

    python train.py
    torchrun --standalone --nproc-per-node=2 train.py

The model is in model.py. Evaluates, logs and saves ckpt.pt on rank 0.
"""

import math
import os
import time
from contextlib import nullcontext

import torch
from model import GPT, GPTConfig, sums
from torch.utils.data import DataLoader

import elastic

# I/O
out_dir = "out"
eval_interval = 10
log_interval = 5
eval_iters = 4
always_save_checkpoint = False  # True: after each evaluation, False: if the loss is the best so far
init_from = "scratch"  # or "resume"
# data
global_batch = 24  # sequences of one optimizer step, over all processes
batch_size = 4  # sequences of one micro-batch of one process
block_size = 16
# model
n_layer = 1
n_head = 2
n_embd = 32
# optimizer
learning_rate = 1e-2
max_iters = 30
weight_decay = 1e-1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0
warmup_iters = 5
lr_decay_iters = 30
min_lr = 1e-3
# system
backend = "gloo"
dtype = "float32"  # or "bfloat16", "float16"

run = elastic.join(backend=backend, checkpoints=f"{out_dir}/elastic", when=eval_interval)
torch.manual_seed(1337)  # initial weights; each micro-batch has its own seed
os.makedirs(out_dir, exist_ok=True)
ctx = nullcontext() if dtype == "float32" else torch.autocast("cpu", getattr(torch, dtype))

# in place of np.memmap(train.bin) and np.memmap(val.bin)
train_data, val_data = sums().split([18000, 3445])


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


iter_num = 0
best_val_loss = 1e9
model_args = {"block_size": block_size, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
model = raw_model = GPT(GPTConfig(**model_args))
scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay
)
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    best_val_loss = checkpoint["best_val_loss"]
model = run.wrap(model)  # DDP in every world
run.track(optimizer=optimizer, scaler=scaler)  # saved and restored, too
run.state.update(iter_num=iter_num, best_val_loss=best_val_loss)  # a checkpoint overrides these
windows = DataLoader(train_data.unfold(0, block_size + 1, 1), batch_size, shuffle=True)
loader = run.loader(windows, global_batch=global_batch, micro_batch=batch_size, max_steps=max_iters)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


def train_iteration(step):
    iter_num, best_val_loss = run.state["iter_num"], run.state["best_val_loss"]
    master_process = run.is_main  # rank 0 of the current world
    t0 = time.time()
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    # evaluate the loss and write a checkpoint
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "model_args": model_args,
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                print(f"saving checkpoint to {out_dir}")
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    if iter_num % eval_interval == 0:  # every rank needs the best loss: it may become rank 0
        best_val_loss = run.mean(master_process, best=best_val_loss)["best"]

    # forward, backward, update, with gradient accumulation and a GradScaler for float16
    for window in step:  # this rank's micro-batches
        X, Y = window[:, :-1], window[:, 1:].contiguous()  # nanoGPT takes a view of them
        with ctx:
            _, loss = model(X, Y)
        step.backward(scaler.scale(loss))  # weighted; reduced in the last one
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0 and master_process:
        dt = time.time() - t0
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {dt * 1000:.2f}ms")
    run.state.update(iter_num=iter_num + 1, best_val_loss=best_val_loss)


def train():
    for _ in run.epochs(1):
        for step in run.steps(loader):  # remaining steps
            train_iteration(step)


run.retry(train)
