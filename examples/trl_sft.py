"""Supervised fine-tuning of LoRA adapters with TRL that survives the death of its nodes.

    python examples/trl_sft.py
    elastic run --nodes-local 3 --embedded-etcd --nnodes=2:3 examples/trl_sft.py /tmp/sft

A model and a tokenizer of a few thousand parameters, made here, take the place of those of a hub.
The lines that differ from plain TRL are marked. DPOTrainer and others work in the same way.
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from elastic.integrations.transformers import ElasticTrainerMixin  # elastic

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class ElasticSFTTrainer(ElasticTrainerMixin, SFTTrainer):  # elastic
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = {
        word: number
        for number, word in enumerate(["[PAD]", "[EOS]", "[UNK]", "plus", "equals", *WORDS])
    }
    tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def sums() -> Dataset:
    """All sums up to nine, in words."""
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    texts = [f"{WORDS[a]} plus {WORDS[b]} equals {WORDS[a + b]}" for a, b in pairs]
    return Dataset.from_list([{"text": text} for text in texts * 4])


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    trainer = ElasticSFTTrainer(  # elastic
        model=model,
        args=SFTConfig(
            output_dir=sys.argv[1] if len(sys.argv) > 1 else "trl_sft",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=False,
            num_train_epochs=5,
            learning_rate=1e-2,
            logging_steps=10,
            bf16=False,
            report_to=[],
        ),
        train_dataset=sums(),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trained = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{trained.global_step} updates, loss {trained.training_loss:.4f}")


if __name__ == "__main__":
    main()
