"""A small GPT-2 with Hugging Face Trainer that survives the death of its nodes.

    python examples/hf_trainer.py
    elastic run --nodes-local 3 --embedded-etcd --nnodes=2:3 examples/hf_trainer.py /tmp/hf

Kill a node while it trains: the others go on within a second, with the same samples, learning
rates and number of updates. The line that differs from plain Trainer is marked.
"""

import sys

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
    default_data_collator,
)

from elastic.integrations.transformers import ElasticTrainer as Trainer  # elastic

WORDS, LENGTH = 64, 32


def sequences(samples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Numbers that go up in steps of 1 to 5, from anywhere."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, WORDS, (samples, 1), generator=generator)
    steps = torch.randint(1, 6, (samples, 1), generator=generator)
    ids = (starts + steps * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": each, "labels": each} for each in ids]


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=sys.argv[1] if len(sys.argv) > 1 else "hf_trainer",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=4,
            learning_rate=3e-3,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=2,
            load_best_model_at_end=True,
            logging_steps=10,
            report_to=[],
        ),
        train_dataset=sequences(960, seed=1),
        eval_dataset=sequences(120, seed=2),
        data_collator=default_data_collator,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} updates, loss {metrics['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
