"""BERT with labels of samples or of tokens. Arguments: ``plain`` or ``elastic``, and options."""

import json
import os
import sys

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    TrainingArguments,
)

whose, options = sys.argv[1], json.loads(sys.argv[2])
if whose == "elastic":
    from elastic.integrations.transformers import ElasticTrainer as Trainer
else:
    from transformers import Trainer


class Own(Trainer):
    if options["labels"] == "own":

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            """The mean over a batch, which Trainer takes for a normalised one."""
            logits = model(input_ids=inputs["input_ids"]).logits
            rates = torch.tensor([1.0, 3.0], dtype=logits.dtype)
            return torch.nn.functional.cross_entropy(logits, inputs["labels"], weight=rates)

    def training_step(self, model, inputs, items=None):
        assert len(inputs["input_ids"]) <= 4  # as without elastic
        return super().training_step(model, inputs, items)  # STEP


by_tokens = options["labels"] == "tokens"
torch.manual_seed(3)
config = BertConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = (BertForTokenClassification if by_tokens else BertForSequenceClassification)(
    config
).double()


def sample(i):
    ids = [(i * 7 + j * j) % 32 for j in range(6)]
    masked = [each % 2 if j < 2 + i % 5 else -100 for j, each in enumerate(ids)]
    return {"input_ids": ids, "labels": masked if by_tokens else sum(ids) % 2}


trainer = Own(
    model=model,
    args=TrainingArguments(
        output_dir=os.environ["OUT"],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.02,
        optim="sgd",
        include_num_input_tokens_seen="all",
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=[sample(i) for i in range(60)],
)
trainer.train()
state = trainer.state
with open(f"{os.environ['OUT']}.{os.getpid()}.json", "w") as file:
    json.dump({"seen": state.num_input_tokens_seen, "log": state.log_history}, file)
result = {
    name: value.clone().contiguous()
    for name, value in trainer.model.state_dict().items()
    if value.is_floating_point()
}
