"""What is compared: family, then strength. A further method is one line here."""

from __future__ import annotations

from experiments.federated.simulate import Method


def fed_back(text: str) -> str:
    """A compressor with error feedback."""
    return f"error_feedback({text})"


METHODS = (
    Method("none (Flower's default)", None),
    Method("fp16", "fp16"),
    Method("int8", "int8"),
    Method("QSGD, 4 bits", "qsgd(bits=4)"),
    Method("rotation + sign (EDEN-like), 1 bit", fed_back("rotated(sign)")),
    Method("top-k + feedback, 1 %", fed_back("top_k(fraction=0.01)")),
    Method("top-k + feedback, 0.3 % in bf16", fed_back('top_k(fraction=0.003, values="bf16")')),
    Method("Sparse Dithering + feedback, alpha 0.1", fed_back("sparse_dithering(alpha=0.1)")),
    Method("Sparse Dithering + feedback, alpha 0.25", fed_back("sparse_dithering(alpha=0.25)")),
    Method("Sparse Dithering + feedback, alpha 0.5", fed_back("sparse_dithering(alpha=0.5)")),
    Method("Sparse Dithering + feedback, alpha 0.75", fed_back("sparse_dithering(alpha=0.75)")),
    Method("Sparse Dithering + feedback, alpha 0.8", fed_back("sparse_dithering(alpha=0.8)")),
    Method("subtractive dithering, omega 1", "subtractive_dithering(omega=1)"),
    Method("subtractive dithering, omega 8", "subtractive_dithering(omega=8)"),
    Method("subtractive dithering, omega 32", "subtractive_dithering(omega=32)"),
    Method("subtractive dithering, omega 128", "subtractive_dithering(omega=128)"),
    Method("Spherical + feedback, alpha 0.5", fed_back("spherical(alpha=0.5, block=16)")),
)
SMALL = 20_000  # Spherical takes time exponential in its block, so it is for models with fewer parameters
