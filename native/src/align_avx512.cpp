#include "align_loops.hpp"

namespace tersegrad::align::detail {
const Implementation avx512 = {quantise_plain, dot_plain, add_plain};
}
