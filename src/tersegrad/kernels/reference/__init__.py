"""Plain torch: the definition of every operation, and the backend that runs anywhere."""

from tersegrad.kernels.reference.aims import *
from tersegrad.kernels.reference.align import *
from tersegrad.kernels.reference.bits import *
from tersegrad.kernels.reference.casts import *
from tersegrad.kernels.reference.chunks import *
from tersegrad.kernels.reference.class_tables import *
from tersegrad.kernels.reference.cosine import *
from tersegrad.kernels.reference.dither import *
from tersegrad.kernels.reference.drawn import *
from tersegrad.kernels.reference.hadamard import *
from tersegrad.kernels.reference.index import *
from tersegrad.kernels.reference.levels import *
from tersegrad.kernels.reference.modelled import *
from tersegrad.kernels.reference.planar import *
from tersegrad.kernels.reference.powers import *
from tersegrad.kernels.reference.rans import *
from tersegrad.kernels.reference.rans_tables import *
from tersegrad.kernels.reference.rounding import *
from tersegrad.kernels.reference.select import *
from tersegrad.kernels.reference.shares import *
from tersegrad.kernels.reference.sparse import *
from tersegrad.kernels.reference.trellis import *
from tersegrad.kernels.reference.trellis_read import *
from tersegrad.kernels.reference.trellis_write import *
from tersegrad.kernels.reference.tried import *
from tersegrad.kernels.reference.variance import *
