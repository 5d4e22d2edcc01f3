#include "chunks_loops.hpp"

namespace tersegrad::chunks {

const Loops loops_avx2 = {maxima_of, kth_of, pick_of, sum_of, sum_and_scan};

}  // namespace tersegrad::chunks
