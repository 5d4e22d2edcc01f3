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
from tersegrad.kernels.reference.select import (
    all_finite as all_finite,
)
from tersegrad.kernels.reference.select import (
    bitmap_decode as bitmap_decode,
)
from tersegrad.kernels.reference.select import (
    bitmap_encode as bitmap_encode,
)
from tersegrad.kernels.reference.select import (
    digits_decode as digits_decode,
)
from tersegrad.kernels.reference.select import (
    digits_encode as digits_encode,
)
from tersegrad.kernels.reference.select import (
    gap_classes as gap_classes,
)
from tersegrad.kernels.reference.select import (
    gap_rests_decode as gap_rests_decode,
)
from tersegrad.kernels.reference.select import (
    gap_rests_encode as gap_rests_encode,
)
from tersegrad.kernels.reference.select import (
    golomb_decode as golomb_decode,
)
from tersegrad.kernels.reference.select import (
    golomb_encode as golomb_encode,
)
from tersegrad.kernels.reference.select import (
    golomb_size as golomb_size,
)
from tersegrad.kernels.reference.select import (
    index_complement as index_complement,
)
from tersegrad.kernels.reference.select import (
    index_increasing as index_increasing,
)
from tersegrad.kernels.reference.select import (
    permuted_gather as permuted_gather,
)
from tersegrad.kernels.reference.select import (
    permuted_indices as permuted_indices,
)
from tersegrad.kernels.reference.select import (
    permuted_scatter as permuted_scatter,
)
from tersegrad.kernels.reference.select import (
    permuted_scatter_add as permuted_scatter_add,
)
from tersegrad.kernels.reference.select import (
    select_compact as select_compact,
)
from tersegrad.kernels.reference.select import (
    select_sample_key as select_sample_key,
)
from tersegrad.kernels.reference.select import (
    select_top_k as select_top_k,
)
from tersegrad.kernels.reference.select import (
    sparse_scatter as sparse_scatter,
)
from tersegrad.kernels.reference.select import (
    sparse_scatter_add as sparse_scatter_add,
)
