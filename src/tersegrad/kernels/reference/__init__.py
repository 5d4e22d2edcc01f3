"""Plain torch: the definition of every operation, and the backend that runs anywhere."""

from tersegrad.kernels.reference.rans import rans_decode as rans_decode
from tersegrad.kernels.reference.rans import rans_encode as rans_encode
from tersegrad.kernels.reference.rans import rans_histogram as rans_histogram
from tersegrad.kernels.reference.rans import rans_read_tables as rans_read_tables
from tersegrad.kernels.reference.rans import rans_write_tables as rans_write_tables
