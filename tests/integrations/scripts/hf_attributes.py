"""A script for Hugging Face Trainer whose loss, weights and settings depend on what it counts in
attributes of its own classes.

Arguments: ``plain`` or ``elastic``, whose Trainer it uses, and options as JSON.
"""

import json
import os
import sys

import torch
from transformers import TrainerCallback, TrainingArguments

if sys.argv[1] == "elastic":
    from elastic.integrations.transformers import ElasticTrainer as Trainer
else:
    from transformers import Trainer


class Head(torch.nn.Module):
    """Warms up over its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 2).double()
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        return self.linear(x) * min(1.0, 0.1 * self.passes)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(6, 6).double(), Head()
        self.temperature = 2.0

    def forward(self, x, labels):
        logits = self.head(self.body(x).tanh()) / self.temperature
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class OwnTrainer(Trainer):
    losses = 0

    def training_step(self, *args, **others):
        return super().training_step(*args, **others)  # A BATCH

    def compute_loss(self, model, inputs, return_outputs=False, **others):
        self.losses += 1
        outputs = model(**inputs)
        loss = outputs["loss"] / (1 + 0.1 * self.losses)
        return (loss, outputs) if return_outputs else loss


class Schedule(TrainerCallback):
    """Settings by its own count, and averaged weights."""

    def __init__(self) -> None:
        self.steps, self.average = 0, None

    def on_step_end(self, args, state, control, model=None, optimizer=None, **others):
        self.steps += 1
        net = getattr(model, "module", model)
        net.temperature *= 0.95
        if self.steps == 7:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.5
        if self.average is None:
            self.average = {name: value.clone() for name, value in net.state_dict().items()}
        for name, value in net.state_dict().items():
            self.average[name].lerp_(value, 0.1)


torch.manual_seed(7)
x = torch.randn(50, 6, dtype=torch.float64)
rows = [{"x": each, "labels": label} for each, label in zip(x, (x.sum(1) > 0).long(), strict=True)]
model = Net()
trainer = OwnTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=os.environ["OUT"],
        report_to=[],
        disable_tqdm=True,
        use_cpu=os.environ.get("SHARED_GPU") != "1",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=0.01,
        save_strategy="no",
    ),
    train_dataset=rows,
    callbacks=[schedule := Schedule()],
)
trainer.train()
with open(f"{os.environ['OUT']}.{os.getpid()}.json", "w") as file:
    json.dump({}, file)
result = model.state_dict() | {f"average {name}": v for name, v in schedule.average.items()}
