"""Seq2SeqTrainer, whose evaluations generate. Arguments: ``plain`` or ``elastic``, and options."""

import json
import os
import sys

import numpy as np
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

whose, options = sys.argv[1], json.loads(sys.argv[2])
if whose == "elastic":
    from elastic.integrations.transformers import ElasticTrainerMixin

    class Seq2SeqTrainer(ElasticTrainerMixin, Seq2SeqTrainer):
        pass


def pad(features):
    longest = max(len(each["input_ids"]) for each in features)
    padded = {"input_ids": [], "attention_mask": [], "labels": []}
    for each in features:
        ids = list(each["input_ids"])
        rest = longest - len(ids)
        padded["input_ids"].append(ids + [0] * rest)
        padded["attention_mask"].append([1] * len(ids) + [0] * rest)
        padded["labels"].append(list(each["labels"]))
    return {name: torch.tensor(rows) for name, rows in padded.items()}


def pairs(count, seed):
    """Reverse a sequence of numbers."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = generator.integers(3, 30, generator.integers(3, 7)).tolist()
        labels = [*ids[::-1], 1]
        rows.append({"input_ids": [*ids, 1], "labels": labels + [-100] * (8 - len(labels))})
    return rows


torch.manual_seed(3)
model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
).double()


def metrics(prediction):
    predicted, labels = prediction
    width = min(predicted.shape[1] - 1, labels.shape[1])  # after the start token
    is_same = predicted[:, 1 : 1 + width] == labels[:, :width]
    return {"exact": float(is_same[labels[:, :width] != -100].mean())}


trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir=os.environ["OUT"],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options["accumulation"],
        per_device_eval_batch_size=3,
        num_train_epochs=3,
        learning_rate=0.02,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        predict_with_generate=True,
        generation_max_length=9,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    data_collator=pad,
    train_dataset=pairs(60, 1),
    eval_dataset=pairs(18, 2),
    compute_metrics=metrics,
)
trainer.train()
tested = trainer.predict(pairs(13, 4))
facts = {
    "state": {n: getattr(trainer.state, n) for n in ("global_step", "epoch", "max_steps")},
    "log": [
        {k: v for k, v in entry.items() if k in ("loss", "eval_loss", "eval_exact", "step")}
        for entry in trainer.state.log_history
    ],
    "predicted": tested.predictions.tolist(),
    "test": tested.metrics["test_exact"],
    "checkpoints": sorted(n for n in os.listdir(os.environ["OUT"]) if n.startswith("checkpoint-")),
}
with open(f"{os.environ['OUT']}.{os.getpid()}.json", "w") as file:
    json.dump(facts, file)
result = {
    name: value.clone().contiguous()
    for name, value in trainer.model.state_dict().items()
    if value.is_floating_point()
}
