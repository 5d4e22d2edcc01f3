"""tersegrad: distributed and federated training that sends few bits.

>>> import torch, tersegrad
>>> result = tersegrad.roundtrip("rotated(sign)", torch.ones(4096))
>>> result.nbytes, round(result.bits_per_coordinate, 2)
(517, 1.01)
"""

from tersegrad import theory
from tersegrad.compressors import *  # noqa: F403 - the register lists the classes once
from tersegrad.compressors import __all__ as _compressors
from tersegrad.core import frame, state
from tersegrad.core.errors import BadConfiguration, CorruptMessage, MissingExtra, MissingStatistics, TersegradError
from tersegrad.core.protocol import Accumulator, Compressor, Context, Guarantee, Message, Piece, Spec, Stats
from tersegrad.oneshot import RoundTrip, from_frame, roundtrip, to_frame
from tersegrad.recipes import names, parse
from tersegrad.wrappers import ByTensor, ErrorFeedback, Metered, Rotated

__version__ = "0.1.0"

__all__ = [
    "Accumulator",
    "BadConfiguration",
    "ByTensor",
    "Compressor",
    "Context",
    "CorruptMessage",
    "ErrorFeedback",
    "Guarantee",
    "Message",
    "Metered",
    "MissingExtra",
    "MissingStatistics",
    "Piece",
    "Rotated",
    "RoundTrip",
    "Spec",
    "Stats",
    "TersegradError",
    "frame",
    "from_frame",
    "names",
    "parse",
    "roundtrip",
    "state",
    "theory",
    "to_frame",
]
__all__ += _compressors
