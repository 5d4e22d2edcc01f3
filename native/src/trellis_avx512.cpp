#include "trellis_loops.hpp"

namespace tersegrad::trellis {
const Implementation avx512 = loops;
}
