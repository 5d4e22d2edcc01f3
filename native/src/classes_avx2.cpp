#include "classes_loops.hpp"

namespace tersegrad::classes::detail {
const Implementation avx2 = {sum_plain, block_sums_plain, add_plain, raise_plain, extent_plain, from_plain};
}
