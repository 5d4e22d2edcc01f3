"""CUDA C++ kernels, compiled by NVRTC at first use, for what Triton cannot say: entropy coding, index sets, selection."""

from __future__ import annotations

from tersegrad.kernels.cuda import (
    aims,
    chunks,
    coded,
    dither,
    index,
    rans,
    select,
    sphere,
    subtractive,
    tiles,
    trellis,
    values,
    vectors,
)
from tersegrad.kernels.cuda.aims import *
from tersegrad.kernels.cuda.chunks import *
from tersegrad.kernels.cuda.coded import *
from tersegrad.kernels.cuda.dither import *
from tersegrad.kernels.cuda.index import *
from tersegrad.kernels.cuda.loader import why_missing as why_missing
from tersegrad.kernels.cuda.rans import *
from tersegrad.kernels.cuda.select import *
from tersegrad.kernels.cuda.sphere import *
from tersegrad.kernels.cuda.subtractive import *
from tersegrad.kernels.cuda.tiles import *
from tersegrad.kernels.cuda.trellis import *
from tersegrad.kernels.cuda.values import *
from tersegrad.kernels.cuda.vectors import *

OPERATIONS = (
    *aims.__all__,
    *chunks.__all__,
    *coded.__all__,
    *dither.__all__,
    *index.__all__,
    *rans.__all__,
    *select.__all__,
    *sphere.__all__,
    *tiles.__all__,
    *subtractive.__all__,
    *trellis.__all__,
    *values.__all__,
    *vectors.__all__,
)


def available() -> bool:
    """Whether the kernels can be compiled and run here."""
    return why_missing() is None
