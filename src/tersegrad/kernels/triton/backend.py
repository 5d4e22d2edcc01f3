"""The operations of the kernel schema that Triton implements for CUDA tensors; each writes the bytes of the reference.

None waits for the device.
"""

from __future__ import annotations

import torch

from tersegrad.kernels.triton.blocks import quantise_blocks, split_blocks
from tersegrad.kernels.triton.buckets import natural_levels_decode, natural_levels_encode, ternary_decode, ternary_encode
from tersegrad.kernels.triton.casts import (
    bf16_decode,
    bf16_encode,
    fp8_decode,
    fp8_encode,
    fp16_decode,
    fp16_encode,
    natural_decode,
    natural_encode,
    sum_casts,
)
from tersegrad.kernels.triton.dequantise import dequantise_blocks, dequantise_messages
from tersegrad.kernels.triton.hadamard import rotate, rotate_where, unrotate
from tersegrad.kernels.triton.philox import random_u16
from tersegrad.kernels.triton.signs import sign_decode, sign_encode, sign_split
from tersegrad.kernels.triton.sums import abs_max, block_abs_max, block_sum_abs, block_sum_squares, sum_abs, sum_squares
from tersegrad.kernels.triton.tiles import chunk_carry, chunk_choose, chunk_scatter, cosine_forward, cosine_inverse

__all__ = [
    "abs_max",
    "bf16_decode",
    "bf16_encode",
    "block_abs_max",
    "block_sum_abs",
    "block_sum_squares",
    "chunk_carry",
    "chunk_choose",
    "chunk_scatter",
    "cosine_forward",
    "cosine_inverse",
    "dequantise_blocks",
    "dequantise_messages",
    "fp8_decode",
    "fp8_encode",
    "fp16_decode",
    "fp16_encode",
    "natural_decode",
    "natural_encode",
    "natural_levels_decode",
    "natural_levels_encode",
    "quantise_blocks",
    "random_u16",
    "rotate",
    "rotate_where",
    "sign_decode",
    "sign_encode",
    "sign_split",
    "split_blocks",
    "sum_abs",
    "sum_casts",
    "sum_squares",
    "ternary_decode",
    "ternary_encode",
    "unrotate",
]

OPERATIONS = tuple(__all__)


def available() -> bool:
    """Whether there is a device to run them on; that this module could be imported means that Triton is there."""
    return torch.cuda.is_available()
