#include "trellis_rated_loops.hpp"

namespace tersegrad::trellis::rated {
const Loops avx512 = loops;
}
