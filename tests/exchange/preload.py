"""What worker processes of tests share: imported here once, by the process that they are forked from.

The first compilation imports seconds' worth of modules, so one is done here. It starts no thread, which a fork would lose.
"""

from __future__ import annotations

import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

import tersegrad.integrations.ddp
import tersegrad.integrations.fsdp
import tersegrad.integrations.local_sgd
import tersegrad.train  # noqa: F401

torch.set_num_threads(1)
torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
