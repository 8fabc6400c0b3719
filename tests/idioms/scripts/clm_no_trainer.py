"""Hugging Face's `run_clm_no_trainer`

`completed_steps` is in `run.state`: a local variable would count from 0 again after a death, and
the job would train too long. `resume_step` and `skip_first_batches` have no counterpart, because
loops resume by themselves. An evaluation may be interrupted before its `model.train()`.

Group: The loop
"""

import math
import os
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
args = SimpleNamespace(
    num_train_epochs=3, gradient_accumulation_steps=2, max_train_steps=10, eval_steps=3,
    checkpointing_steps=4, learning_rate=0.02, weight_decay=0.1, output_dir=tempfile.mkdtemp(),
)  # fmt: skip
texts = torch.randint(0, 11, (48, 7))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, input_ids, labels):
        lengths = torch.arange(1, input_ids.shape[1] + 1)[:, None]
        hidden = self.norm(self.embedding(input_ids).cumsum(1) / lengths)
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels[:, 1:].flatten()))


def collate(examples):
    input_ids = torch.stack(examples)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


run = elastic.join()
train_dataloader = run.loader(
    DataLoader(texts, batch_size=4, shuffle=True, collate_fn=collate), global_batch=6
)
eval_dataloader = run.shard(DataLoader(texts[:10], batch_size=4, collate_fn=collate))
model = CausalLM()
no_decay = [p for n, p in model.named_parameters() if "norm" in n]
decay = [p for n, p in model.named_parameters() if "norm" not in n]
optimizer = torch.optim.AdamW(
    [
        {"params": decay, "weight_decay": args.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ],
    lr=args.learning_rate,
)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: max(0.0, 1 - step / args.max_train_steps)
)
model = run.wrap(model)
run.track(optimizer=optimizer, lr_scheduler=lr_scheduler)


def evaluate():
    model.eval()
    total, count = torch.zeros(2)
    for batch in eval_dataloader:
        with torch.no_grad():
            total += model(**batch).loss * len(batch["input_ids"])
        count += len(batch["input_ids"])
    dist.all_reduce(total)
    dist.all_reduce(count)
    model.train()
    return math.exp(total / count)


def train():
    run.state.setdefault("completed_steps", 0)
    for epoch in run.epochs(args.num_train_epochs):
        for step, batch in enumerate(train_dataloader, start=train_dataloader.index):
            is_last = step + 1 == len(train_dataloader)
            model.require_backward_grad_sync = is_update = (
                step + 1
            ) % args.gradient_accumulation_steps == 0 or is_last
            (model(**batch).loss / args.gradient_accumulation_steps).backward()
            if not is_update:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            run.state["completed_steps"] += 1
            if run.state["completed_steps"] % args.checkpointing_steps == 0 and run.is_main:
                torch.save(model.module.state_dict(), os.path.join(args.output_dir, "step.pt"))
            if run.state["completed_steps"] % args.eval_steps == 0:
                run.state["perplexity"] = evaluate()
            if run.state["completed_steps"] >= args.max_train_steps:
                return


run.retry(train)
result = {
    **model.state_dict(),
    "perplexity": torch.tensor(run.state["perplexity"]),
    "completed_steps": torch.tensor(run.state["completed_steps"]),
}
