#include "dither_loops.hpp"

namespace tersegrad::dither::detail {
const Implementation avx2 = {norm_plain, quantise_plain, shift_plain, scale_plain, scale_add_plain};
}
