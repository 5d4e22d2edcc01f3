#include "tersegrad/cosine.hpp"

#include "cosine_loops.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::cosine {

void tile_portable(const Job& job, const chunks::Region& r, std::size_t offset, double* scratch) { tile_of(job, r, offset, scratch); }

void transform(const Job& job, const chunks::Region& r) {
    Tile tile = tile_portable;
#if defined(__x86_64__)
    if (isa() == Isa::avx512)
        tile = tile_avx512;
    else if (isa() == Isa::avx2)
        tile = tile_avx2;
#endif
    parallel_for(r.count(), 1, std::max<std::size_t>(1, 8192 / r.size()), [&](std::size_t begin, std::size_t end) {
        std::vector<double> scratch(2 * r.size() + r.width);
        for (std::size_t chunk = begin; chunk < end; ++chunk) tile(job, r, r.offset(chunk), scratch.data());
    });
}

}  // namespace tersegrad::cosine
