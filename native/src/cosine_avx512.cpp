#include "cosine_loops.hpp"

namespace tersegrad::cosine {

void tile_avx512(const Job& job, const chunks::Region& r, std::size_t offset, double* scratch) { tile_of(job, r, offset, scratch); }

}  // namespace tersegrad::cosine
