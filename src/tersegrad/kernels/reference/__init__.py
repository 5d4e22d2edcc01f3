"""Plain torch: the definition of every operation, and the backend that runs anywhere."""

from tersegrad.kernels.reference.bits import elias_bits as elias_bits
from tersegrad.kernels.reference.bits import elias_decode as elias_decode
from tersegrad.kernels.reference.bits import elias_encode as elias_encode
from tersegrad.kernels.reference.bits import pack_bits as pack_bits
from tersegrad.kernels.reference.bits import pack_trits as pack_trits
from tersegrad.kernels.reference.bits import rice_best as rice_best
from tersegrad.kernels.reference.bits import rice_bits as rice_bits
from tersegrad.kernels.reference.bits import rice_decode as rice_decode
from tersegrad.kernels.reference.bits import rice_encode as rice_encode
from tersegrad.kernels.reference.bits import unpack_bits as unpack_bits
from tersegrad.kernels.reference.bits import unpack_trits as unpack_trits
from tersegrad.kernels.reference.rans import rans_decode as rans_decode
from tersegrad.kernels.reference.rans import rans_encode as rans_encode
from tersegrad.kernels.reference.rans import rans_histogram as rans_histogram
from tersegrad.kernels.reference.rans import rans_read_tables as rans_read_tables
from tersegrad.kernels.reference.rans import rans_write_tables as rans_write_tables
from tersegrad.kernels.reference.rounding import abs_max as abs_max
from tersegrad.kernels.reference.rounding import block_abs_max as block_abs_max
from tersegrad.kernels.reference.rounding import block_sum_abs as block_sum_abs
from tersegrad.kernels.reference.rounding import block_sum_squares as block_sum_squares
from tersegrad.kernels.reference.rounding import dequantise_blocks as dequantise_blocks
from tersegrad.kernels.reference.rounding import quantise_blocks as quantise_blocks
from tersegrad.kernels.reference.rounding import random_u16 as random_u16
from tersegrad.kernels.reference.rounding import sum_abs as sum_abs
from tersegrad.kernels.reference.rounding import sum_squares as sum_squares
