"""A decoder-only transformer: pre-norm, rotary positions, no biases, GELU of four times the width, untied head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def rotations(length: int, size: int, device: torch.device) -> Tensor:
    """Cosines and sines (2, length, size / 2) by which pairs of coordinates are turned at each position."""
    # Made in every pass: a table kept as a buffer would be sent around by DistributedDataParallel.
    half = torch.arange(size // 2, device=device) / (size // 2)
    angles = torch.outer(torch.arange(length, device=device).float(), 10_000.0**-half)
    return torch.stack((angles.cos(), angles.sin()))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Every position of x (batch, heads, length, size) turned by its angles."""
    cos, sin = turns.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(turned(q, turns), turned(k, turns), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a two-layer network, each added to what it got."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        added: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return added


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, deviation: float = 0.02) -> None:
        super().__init__()
        self.size = width // heads  # of a head
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream starts smaller, as in GPT-2.
                narrow = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=deviation / math.sqrt(2 * layers) if narrow else deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        turns = rotations(tokens.shape[1], self.size, tokens.device)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits
