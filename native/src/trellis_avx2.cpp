#include "trellis_loops.hpp"

namespace tersegrad::trellis {
const Implementation avx2 = loops;
}
