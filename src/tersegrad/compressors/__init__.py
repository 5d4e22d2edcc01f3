"""One file per algorithm; compressors never import one another. This list is the register that ``parse`` and ``names`` read."""

from tersegrad.compressors.bf16 import BF16
from tersegrad.compressors.chunk_top_k import ChunkTopK
from tersegrad.compressors.e3m0 import E3M0
from tersegrad.compressors.fp8 import FP8
from tersegrad.compressors.fp16 import FP16
from tersegrad.compressors.identity import Identity
from tersegrad.compressors.int_block import Int4, Int8
from tersegrad.compressors.natural import Natural
from tersegrad.compressors.natural_dithering import NaturalDithering
from tersegrad.compressors.qsgd import QSGD
from tersegrad.compressors.random_k import RandomK
from tersegrad.compressors.sign import Sign
from tersegrad.compressors.sparse_dithering import RandomSparseDithering, SparseDithering
from tersegrad.compressors.spherical import Spherical
from tersegrad.compressors.subtractive_dithering import SubtractiveDithering
from tersegrad.compressors.ternary import Ternary
from tersegrad.compressors.threshold import Threshold
from tersegrad.compressors.top_k import TopK
from tersegrad.compressors.trellis import DitheredTrellis, Trellis
from tersegrad.compressors.variance import VGC, Hybrid

__all__ = [
    "BF16",
    "E3M0",
    "FP8",
    "FP16",
    "QSGD",
    "VGC",
    "ChunkTopK",
    "DitheredTrellis",
    "Hybrid",
    "Identity",
    "Int4",
    "Int8",
    "Natural",
    "NaturalDithering",
    "RandomK",
    "RandomSparseDithering",
    "Sign",
    "SparseDithering",
    "Spherical",
    "SubtractiveDithering",
    "Ternary",
    "Threshold",
    "TopK",
    "Trellis",
]
