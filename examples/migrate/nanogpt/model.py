"""A small GPT and characters for it to learn. Both scripts use them unchanged."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def sums() -> torch.Tensor:
    """All sums of two numbers below 50, in a random order: one tensor of character codes."""
    pairs = torch.randperm(2500, generator=torch.Generator().manual_seed(0)).tolist()
    text = "".join(f"{p // 50}+{p % 50}={p // 50 + p % 50}\n" for p in pairs)
    return torch.tensor(["0123456789+=\n".index(character) for character in text])


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 13
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 32


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=False)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.n_head, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(x.shape[1])
        logits = self.lm_head(self.ln_f(self.h(self.wte(x) + self.wpe(positions))))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
