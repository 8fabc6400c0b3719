"""Scripts for TRL's trainers. Arguments: ``plain`` or ``elastic``, and options as JSON."""

import copy
import json
import os
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

whose, options = sys.argv[1], json.loads(sys.argv[2])
if whose == "elastic":
    from elastic.integrations.transformers import ElasticTrainerMixin

    class SFTTrainer(ElasticTrainerMixin, SFTTrainer):
        pass

    class DPOTrainer(ElasticTrainerMixin, DPOTrainer):
        pass

    class RewardTrainer(ElasticTrainerMixin, RewardTrainer):
        pass

    class GRPOTrainer(ElasticTrainerMixin, GRPOTrainer):
        pass


words = [f"w{number}" for number in range(40)]
vocabulary = {word: number for number, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *words])}
tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def text(seed: int, length: int) -> str:
    return " ".join(words[(seed * 7 + i * i) % 40] for i in range(length))


torch.manual_seed(3)
kind = LlamaForSequenceClassification if options["trainer"] == "reward" else LlamaForCausalLM
model = kind(
    LlamaConfig(
        num_labels=1,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
).double()
args = {
    "output_dir": os.environ["OUT"],
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": options.get("accumulation", 1),
    "gradient_checkpointing": False,
    "num_train_epochs": 2,
    "learning_rate": 0.01,
    "logging_steps": 2,
    "save_strategy": "epoch",
    "bf16": False,
    "use_cpu": True,
    "max_length": 32,
    "report_to": [],
    "disable_tqdm": True,
}
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
lora = lora if options.get("lora") else None
if options["trainer"] == "dpo":
    rows = [
        {"prompt": text(i, 4), "chosen": " " + text(i + 1, 3 + i % 3), "rejected": text(i + 2, 4)}
        for i in range(24)
    ]
    trainer = DPOTrainer(
        model=model,
        ref_model=None if lora else copy.deepcopy(model),
        args=DPOConfig(**args),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
elif options["trainer"] == "reward":
    rows = [{"chosen": text(i, 4 + i % 3), "rejected": text(i + 2, 4)} for i in range(24)]
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**args),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
elif options["trainer"] == "grpo":
    del args["max_length"]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **others: [1.0 for _ in completions],
        args=GRPOConfig(**args, num_generations=2, max_completion_length=4),
        train_dataset=Dataset.from_list([{"prompt": text(i, 4)} for i in range(12)]),
        processing_class=tokenizer,
    )
else:
    rows = [{"text": text(i, 5 + i % 4)} for i in range(28)]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**args, packing=options.get("packing", False)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
trained = trainer.train()  # TRAINING
state, is_packed = trainer.state, options.get("packing", False)
facts = {
    "state": {name: getattr(state, name) for name in ("global_step", "epoch", "max_steps")},
    # Packed batches are padded, and so counted, together.
    "log": [
        [entry["loss"], entry["learning_rate"], 0 if is_packed else entry.get("num_tokens", 0)]
        for entry in state.log_history
        if "loss" in entry
    ],
    "checkpoints": sorted(n for n in os.listdir(os.environ["OUT"]) if n.startswith("checkpoint-")),
}
with open(f"{os.environ['OUT']}.{os.getpid()}.json", "w") as file:
    json.dump(facts, file)
result = {
    name: value.clone().contiguous()
    for name, value in trainer.model.state_dict().items()
    if value.is_floating_point()
}
