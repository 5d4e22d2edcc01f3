"""What is compared. A further method is one line here."""

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
    Method("rotation + 1 bit (EDEN-like)", fed_back("rotated(sign)")),
    Method("top 1 % + feedback", fed_back("top_k(fraction=0.01)")),
    Method("subtractive dithering, omega 1", "subtractive_dithering(omega=1)"),
    Method("Sparse Dithering, alpha 0.1", fed_back("sparse_dithering(alpha=0.1)")),
    Method("Sparse Dithering, alpha 0.25", fed_back("sparse_dithering(alpha=0.25)")),
    Method("Sparse Dithering, alpha 0.5", fed_back("sparse_dithering(alpha=0.5)")),
    Method("Sparse Dithering, alpha 0.7", fed_back("sparse_dithering(alpha=0.7)")),
    Method("Sparse Dithering, alpha 0.8", fed_back("sparse_dithering(alpha=0.8)")),
    Method("Spherical, alpha 0.5", fed_back("spherical(alpha=0.5, block=16)")),
)
SMALL = 20_000  # Spherical takes time exponential in its block, so it is for models with fewer parameters
