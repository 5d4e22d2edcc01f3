"""Second moments: a training step with them against a plain one, on the VGG-like network for 32x32 images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.registry import Body, Work, benchmark, refuse_unless
from tersegrad.moments import Collector
