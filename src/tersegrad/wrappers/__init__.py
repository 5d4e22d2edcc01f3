"""Compressors made of compressors: what is true of any inner compressor is written here once."""

from tersegrad.wrappers.aligned import Aligned as Aligned
from tersegrad.wrappers.by_tensor import ByTensor as ByTensor
from tersegrad.wrappers.dct import DCT as DCT
from tersegrad.wrappers.error_feedback import ErrorFeedback as ErrorFeedback
from tersegrad.wrappers.error_feedback import ErrorFeedbackState as ErrorFeedbackState
from tersegrad.wrappers.metered import Metered as Metered
from tersegrad.wrappers.metered import MeterState as MeterState
from tersegrad.wrappers.rotated import Rotated as Rotated
from tersegrad.wrappers.shortest import Shortest as Shortest
