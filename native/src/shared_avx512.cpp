#include "shared_loops.hpp"

namespace tersegrad::shared::detail {
const Implementation avx512 = {largest_plain, quantise_plain, bins_plain, octaves_plain, restore_plain, first_plain};
}
