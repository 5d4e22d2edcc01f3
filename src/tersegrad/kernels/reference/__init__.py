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
from tersegrad.kernels.reference.casts import bf16_decode as bf16_decode
from tersegrad.kernels.reference.casts import bf16_encode as bf16_encode
from tersegrad.kernels.reference.casts import dithering_decode as dithering_decode
from tersegrad.kernels.reference.casts import dithering_encode as dithering_encode
from tersegrad.kernels.reference.casts import fp8_decode as fp8_decode
from tersegrad.kernels.reference.casts import fp8_encode as fp8_encode
from tersegrad.kernels.reference.casts import fp16_decode as fp16_decode
from tersegrad.kernels.reference.casts import fp16_encode as fp16_encode
from tersegrad.kernels.reference.casts import natural_decode as natural_decode
from tersegrad.kernels.reference.casts import natural_encode as natural_encode
from tersegrad.kernels.reference.casts import sign_decode as sign_decode
from tersegrad.kernels.reference.casts import sign_encode as sign_encode
from tersegrad.kernels.reference.casts import ternary_decode as ternary_decode
from tersegrad.kernels.reference.casts import ternary_encode as ternary_encode
