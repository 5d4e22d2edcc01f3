"""What an exchange will cost, before it is run."""

from tersegrad.planner.costs import (
    ETHERNET,
    Coding,
    Link,
    Prediction,
    all_gather_naive,
    all_gather_pipelined,
    direct_all_gather,
    moments_operations,
    predict,
    ring_all_reduce,
    two_shot,
)

__all__ = [
    "ETHERNET",
    "Coding",
    "Link",
    "Prediction",
    "all_gather_naive",
    "all_gather_pipelined",
    "direct_all_gather",
    "moments_operations",
    "predict",
    "ring_all_reduce",
    "two_shot",
]
