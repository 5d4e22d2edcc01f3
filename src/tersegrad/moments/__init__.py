"""Second moments: the sum over samples of the squared per-sample shares of the gradient, during an ordinary backward pass."""

from tersegrad.moments.collector import Collector as Collector
from tersegrad.moments.worker_norm import worker_batch_norm as worker_batch_norm
