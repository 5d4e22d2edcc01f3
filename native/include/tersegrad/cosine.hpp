// The orthonormal discrete cosine transform of tiles (spec/wire.md, "dct"): float64 sums in ascending order, rounded to float32 after
// each of two passes. The basis comes from the caller.
#pragma once
#include <cstddef>
#include <vector>

#include "tersegrad/chunks.hpp"

namespace tersegrad::cosine {

struct Job {
    const float* x;
    float* out;             // another vector than x
    const double *down, *along;  // the bases of a tile's height and width, row by row
    bool forward;
};

// All tiles of a region.
void transform(const Job& job, const chunks::Region& region);

using Tile = void (*)(const Job&, const chunks::Region&, std::size_t offset, double* scratch);
void tile_portable(const Job&, const chunks::Region&, std::size_t, double*);
void tile_avx2(const Job&, const chunks::Region&, std::size_t, double*);
void tile_avx512(const Job&, const chunks::Region&, std::size_t, double*);

}  // namespace tersegrad::cosine
