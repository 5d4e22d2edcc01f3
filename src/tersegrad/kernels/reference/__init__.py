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
