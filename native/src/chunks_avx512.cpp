#include "chunks_loops.hpp"

namespace tersegrad::chunks {

const Loops loops_avx512 = {maxima_of, kth_of, sum_of};

}  // namespace tersegrad::chunks
