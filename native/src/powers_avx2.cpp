#include "powers_loops.hpp"

namespace tersegrad::powers {

const Loops loops_avx2 = all_loops();

}  // namespace tersegrad::powers
