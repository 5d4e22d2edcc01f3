"""Named methods: functions that return compositions. Text forms know them; what is written is always the composition."""

from __future__ import annotations

from typing import Any

from tersegrad import compressors
from tersegrad.core.protocol import Compressor
from tersegrad.wrappers.aligned import Aligned
from tersegrad.wrappers.dct import DCT
from tersegrad.wrappers.error_feedback import ErrorFeedback
from tersegrad.wrappers.shortest import Shortest


def fewest_bits(alpha: float) -> Compressor[Any]:
    """The shortest message for an error that we know of: signs, classes and levels by their bits, scalar or on a trellis."""
    choices = (
        compressors.SparseDithering(alpha=alpha, chunk=18, rdo=True),
        compressors.Trellis(alpha=alpha, rdo=True),
        compressors.Trellis(alpha=alpha, states=32, chunk=18, rdo=True),
    )
    return Aligned(Shortest(choices))


def strom(tau: float) -> Compressor[Any]:
    """Send +-tau, keep the rest (Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015)."""
    return ErrorFeedback(compressors.Threshold(tau=tau, values="sign"), force=True)


def ef_sign() -> Compressor[Any]:
    """EF-SignSGD (Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019): scaled signs with error feedback."""
    return ErrorFeedback(compressors.Sign())


def mem_sgd(fraction: float) -> Compressor[Any]:
    """Mem-SGD (Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018): top-k with error feedback."""
    return ErrorFeedback(compressors.TopK(fraction=fraction))


def sparse_loco(chunk: int = 4096, k: int = 64, bins: int = 4, decay: float = 0.95, vector: int = 64) -> Compressor[Any]:
    """SparseLoCo (Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025): chunked top-k in a few bins."""
    inner = compressors.ChunkTopK(chunk, k, "bins", bins, vector)
    return ErrorFeedback(inner, force=True, decay=decay)


def demo(k: int = 32, block: int = 64, decay: float = 0.999) -> Compressor[Any]:
    """DeMo (Peng, Quesnelle, Kingma, "DeMo: decoupled momentum optimization", 2024): the largest cosine coefficients, exactly."""
    inner = compressors.ChunkTopK(block * block, k, vector=block)
    return ErrorFeedback(DCT(inner, block), decay=decay)


def distro(k: int = 4, block: int = 64, decay: float = 0.995) -> Compressor[Any]:
    """DisTrO (Nous Research, "A preliminary report on DisTrO", 2024, and its open code): signs of the largest cosine coefficients."""
    inner = compressors.ChunkTopK(block * block, k, "sign", vector=block)
    return ErrorFeedback(DCT(inner, block), decay=decay)


def streaming_diloco(block: int = 256) -> Compressor[Any]:
    """Streaming DiLoCo (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025): outer gradients in 4 bits."""
    return compressors.E3M0(block)
