#include "trellis_loops.hpp"

namespace tersegrad::trellis {
const Implementation portable = loops;
}
