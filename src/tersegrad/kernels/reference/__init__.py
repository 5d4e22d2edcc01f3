"""Plain torch: the definition of every operation, and the backend that runs anywhere."""

from tersegrad.kernels.reference.hadamard import rotate as rotate
from tersegrad.kernels.reference.hadamard import unrotate as unrotate
