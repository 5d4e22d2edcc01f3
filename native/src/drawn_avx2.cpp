#include "drawn_loops.hpp"

namespace tersegrad::drawn::detail {
const Implementation avx2 = {largest_plain, quantise_plain, bins_plain, octaves_plain, restore_plain, first_plain};
}
