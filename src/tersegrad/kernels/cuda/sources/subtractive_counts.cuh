// Subtractive dithering: what was counted, as the rows of tables.
#include "common.cuh"
#include "subtractive.cuh"

// Rows that may be tables: of 1, 2, 4, ... bins; then of each class the first octaves alone, and from each octave on together.
#define BIN_ROWS 31

// Whether a sample is counted of symbols with so many tables.
__device__ __forceinline__ bool samples(i64 symbols, i64 cells) { return symbols >= larger((i64)1 << 16, 4096 * cells); }

struct Counted {
    const u64* counts;
    const int* present;
    const u64* fine;
    const i64* state;
    __device__ int alphabet() const { return 2 * (int)state[WINDOW_WORD] + 1; }
    // Counts of symbol a in row `row` of 2^level: as they are added up of the finest ones (`finest`), or as they are counted for themselves.
    __device__ i64 bins(int level, int row, int a, bool finest) const {
        const bool sampled = samples(state[SYMBOLS], (i64)(finest ? BINS : 1 << level) * alphabet());
        const int width = BINS >> level;
        i64 sum = 0, here = 0;
        for (int bin = row * width; bin < (row + 1) * width; ++bin) {
            sum += (i64)counts[bin * 256 + a];
            if (sampled) here += present[bin * 256 + a];
            else sum += (i64)counts[BINS * 256 + bin * 256 + a];
        }
        return sum + (finest ? here : here > 0);
    }
    // Those of octaves from .. to of a class.
    __device__ i64 octaves(int c, int from, int to, int a) const {
        i64 sum = 0;
        for (int o = from; o < to; ++o) sum += (i64)fine[(c * DEEPEST + o) * 256 + a];
        return sum;
    }
};
