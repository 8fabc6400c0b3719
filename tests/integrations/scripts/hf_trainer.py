"""A script for Hugging Face Trainer, as its users write it, that leaves what it has trained.

Arguments: ``plain`` or ``elastic``, whose Trainer it uses, and options as JSON.
"""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

whose, options = sys.argv[1], json.loads(sys.argv[2])
if whose == "elastic":
    import elastic
    from elastic.integrations.transformers import ElasticTrainer as Trainer

    if "join" in options:
        elastic.join(checkpoints=os.environ["OUT"] + "-job", **options["join"])
else:
    from transformers import Trainer

WORDS = 32


class Text(torch.utils.data.Dataset):
    """Sequences of several lengths."""

    def __init__(self, samples: int, seed: int) -> None:
        self.seed, self.samples = seed, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict:
        if index >= self.samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        length = int(torch.randint(4, 9, (), generator=generator))
        ids = torch.randint(0, WORDS, (length,), generator=generator)
        return {"input_ids": ids, "labels": ids, "index": torch.tensor(index)}


class Numbers(torch.utils.data.Dataset):
    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict:
        return {"x": self.x[index], "labels": self.y[index], "index": torch.tensor(index)}


class Classifier(torch.nn.Module):
    """Its loss is a mean over a batch, and it takes no count of items."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
        self.net = torch.nn.Sequential(*layers).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(rows: list) -> dict:
    """Pads sequences."""
    longest = max(len(value) for row in rows for value in row.values() if value.dim())

    def padded(name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return value
        missing = (0, longest - len(value))
        return torch.nn.functional.pad(value, missing, value=-100 if name == "labels" else 0)

    return {name: torch.stack([padded(name, row[name]) for row in rows]) for name in rows[0]}


class Recorder(TrainerCallback):
    """What happens in training, in its order."""

    def __init__(self) -> None:
        self.events = []

    def on_train_begin(self, args, state, control, **others):
        self.events.append("train")

    def on_epoch_begin(self, args, state, control, **others):
        self.events.append(f"epoch begins {state.global_step}")

    def on_step_end(self, args, state, control, **others):
        self.events.append(f"step {state.global_step} {state.epoch:.6f}")  # STEP ENDS

    def on_evaluate(self, args, state, control, **others):
        self.events.append(f"evaluate {state.global_step}")  # EVALUATED

    def on_save(self, args, state, control, **others):
        self.events.append(f"save {state.global_step}")  # SAVED

    def on_epoch_end(self, args, state, control, **others):
        self.events.append(f"epoch ends {state.global_step}")  # EPOCH ENDS

    def on_train_end(self, args, state, control, **others):
        self.events.append("end")


class OwnTrainer(Trainer):
    """Overrides what users override."""

    def __init__(self, *args, **others):
        super().__init__(*args, **others)
        self.updates = {}

    def note(self, inputs):
        indices = inputs.pop("index").tolist()  # A BATCH
        self.updates.setdefault(self.state.global_step + 1, []).extend(indices)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.note(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def get_train_dataloader(self):
        if not options.get("loader"):
            return super().get_train_dataloader()
        generator = torch.Generator().manual_seed(5)
        weights = [1.0 + i for i in range(len(data))]
        sampler = WeightedRandomSampler(weights, len(data), generator=generator)
        return self.accelerator.prepare(DataLoader(data, 4, sampler=sampler, collate_fn=collate))

    def prediction_step(self, model, inputs, *args, **others):
        inputs.pop("index")  # AN EVALUATED BATCH
        return super().prediction_step(model, inputs, *args, **others)

    def save_model(self, *args, **others):
        super().save_model(*args, **others)
        self.saved = args  # A WRITTEN MODEL


class Adversarial(OwnTrainer):
    """Perturbs inputs, as FGM does: two backward passes, of which the first's loss is logged."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        self.note(inputs)
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        perturbed = {**inputs, "x": inputs["x"] + 0.1 * inputs["x"].sign()}
        self.accelerator.backward(self.compute_loss(model, perturbed) / 2)
        return loss.detach()


def accuracy(predicted) -> dict:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


torch.manual_seed(7)
if options.get("model") == "gpt2":
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model, data = GPT2LMHeadModel(config), Text(50, 1)
    held_out = Text(options.get("held_out", 18), 2)
    model = model.double() if options.get("double", True) else model
else:
    model, data, held_out = Classifier(), Numbers(50, 1), Numbers(18, 2)

callbacks = [recorder := Recorder()]
if "patience" in options:
    callbacks.append(EarlyStoppingCallback(early_stopping_patience=options["patience"]))
args = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "num_train_epochs": 2,
    "learning_rate": 0.01,
    "logging_steps": 3,
    "save_strategy": "no",
} | options.get("args", {})
trainer = (Adversarial if options.get("adversarial") else OwnTrainer)(
    model=model,
    args=TrainingArguments(
        output_dir=os.environ["OUT"],
        report_to=[],
        disable_tqdm=True,
        use_cpu=os.environ.get("SHARED_GPU") != "1",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        **args,
    ),
    train_dataset=data,
    eval_dataset=held_out,
    data_collator=collate,
    callbacks=callbacks,
    compute_metrics=accuracy if options.get("metrics") else None,
)
# Plain Trainer trains without DDP after it: Accelerate takes the model for prepared.
before = trainer.evaluate() if options.get("evaluates") and whose == "elastic" else {}
recorder.events.clear()
if "seed" in options:
    torch.manual_seed(options["seed"])
resumes = options.get("resumes") and os.path.isdir(os.environ["OUT"])
last = get_last_checkpoint(os.environ["OUT"]) if resumes else None
for _ in range(options.get("trainings", 1)):
    trained = trainer.train(resume_from_checkpoint=last)
    if options.get("other_data"):
        trainer.train_dataset = Numbers(50, 3)
after = trainer.evaluate() if options.get("evaluates") else {}
predictions = [trainer.predict(Numbers(n, n)) for n in options.get("predicts", ())]

state = trainer.state
TIMES = ("runtime", "per_second", "preparation_time")
facts = {
    "updates": trainer.updates,
    "events": recorder.events,
    "state": {
        name: getattr(state, name)
        for name in ("global_step", "epoch", "max_steps", "best_metric", "best_global_step")
    },
    "log": [
        {name: value for name, value in entry.items() if not name.endswith(TIMES)}
        for entry in [*state.log_history, after]
    ],
    "before": before.get("eval_loss"),
    "predictions": [
        [each.predictions.tolist(), each.label_ids.tolist(), each.metrics["test_loss"]]
        for each in predictions
    ],
    "rates": trainer.lr_scheduler.get_last_lr(),
    "flos": state.total_flos,
    "result": [trained.global_step, trained.training_loss],
    "checkpoints": sorted(
        name for name in os.listdir(os.environ["OUT"]) if name.startswith("checkpoint-")
    )
    if os.path.isdir(os.environ["OUT"])
    else [],
}
with open(f"{os.environ['OUT']}.{os.getpid()}.json", "w") as file:
    json.dump(facts, file, default=float)
result = {
    name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()
}
