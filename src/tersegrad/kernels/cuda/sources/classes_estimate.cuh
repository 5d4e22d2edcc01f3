// Which scales a region tells (spec/wire.md, 4.11, "Encoder"): estimates in float64, added up in the order of the document.
#include "common.cuh"
#include "classes.cuh"

#define TOP_BASE 31
#define FEW_ROWS 4
#define WORTH_COLUMNS 0.97

// log2(a / b) to the nearest integer, nearly. Both are below 2^45.
__device__ __forceinline__ int log2_near(u64 a, u64 b) {
    a *= 92682;
    b <<= 16;
    const int e = bit_length(a) - bit_length(b);
    return e - ((e < 0 ? a << -e : a) < (e > 0 ? b << e : b));
}

__device__ __forceinline__ int within(int value, int least, int most) { return value < least ? least : value > most ? most : value; }

// About the bits of `count` levels with that sum of magnitudes: those of a discrete Laplace distribution.
__device__ double bits_of(i64 count, i64 total) {
    if (count <= 0 || total <= 0) return 0.0;
    const double n = (double)count, m = (double)total / n, root = sqrt(1.0 + m * m);
    return n * (log2(root + m) + m * log2((root + 1.0) / m));
}

// The bits of a symbol that occurs `count` times among `total`, all of them together.
__device__ __forceinline__ double shares_of(i64 count, i64 total) {
    return count ? (double)count * log2((double)total / (double)count) : 0.0;
}

__device__ double added(const double* terms, int number) {
    double sum = 0.0;
#pragma unroll 8
    for (int k = 0; k < number; ++k) sum += terms[k];
    return sum;
}

// Rows, columns or blocks by octave: how many, their coordinates, their magnitudes.
struct Axis {
    int numbers[OCTAVES], counts[OCTAVES], totals[OCTAVES];
    double side;
};

// What a team shares while it describes a region.
struct Work {
    Axis lines, across;
    double terms[OCTAVES * OCTAVES];
    int total, mode;
};

// Octaves of an axis, all but few of whose lines have `usual` coordinates: `length(k)` is that of line k.
template <class Length>
__device__ void tell(const Team& team, Axis& axis, const int* sums, int number, i64 usual, i64 n, i64 total, u8* octaves, Length length) {
    for (int k = team.rank; k < number; k += team.size) {
        const i64 sum = sums[k], held = length(k);
        const int octave = sum ? within(MIDDLE + log2_near((u64)(sum * n), (u64)(total * held)), 1, OCTAVES - 1) : 0;
        octaves[k] = (u8)octave;
        atomicAdd(&axis.numbers[octave], 1);
        if (sum) atomicAdd(&axis.totals[octave], (int)sum);
        if (held != usual) atomicAdd(&axis.counts[octave], (int)(held - usual));
    }
}

// The coordinates among 0 .. count that lie in positions from .. to of rows, of which the first starts at `phase`.
__device__ __forceinline__ int held_in(const Region& g, int from, int to) {
    const int end = g.phase + g.count - (g.rows - 1) * g.columns;
    return g.rows * (to - from) - (int)(larger(smaller(to, g.phase) - from, 0) + larger(to - larger(from, end), 0));
}

// A team finds mode and base of a region, and the octaves of its lines and columns; returns mode << 5 | base, and the estimated bits. `sums`
// has the magnitudes of rows and columns, or of blocks where there are few rows.
__device__ int describe(const Team& team, const Region& g, const int* sums, u8* octaves, Work& work, double* bits) {
    const bool by_rows = g.rows >= FEW_ROWS;
    const int lines = by_rows ? g.rows : g.blocks(), across = by_rows ? g.columns / g.group : 0;
    const i64 n = g.count;
    team.sync();
    if (team.rank < 2 * OCTAVES) {
        Axis& axis = team.rank < OCTAVES ? work.lines : work.across;
        const int o = team.rank % OCTAVES;
        axis.numbers[o] = axis.counts[o] = axis.totals[o] = 0;
    }
    if (team.rank == 0) work.total = 0;
    team.sync();
    i64 part = 0;
    for (int k = team.rank; k < lines; k += team.size) part += sums[k];
    part = warp_sum(part);
    if ((threadIdx.x & 31) == 0) atomicAdd(&work.total, (int)part);
    team.sync();
    const i64 total = work.total;
    *bits = 0.0;
    if (!total) return 0;
    const int base = within(MEAN + log2_near((u64)total, (u64)n), 1, TOP_BASE);
    const i64 usual = by_rows ? g.columns : BLOCK;
    tell(team, work.lines, sums, lines, usual, n, total, octaves, [=](int k) {
        const i64 phase = by_rows ? g.phase : 0;
        return smaller((k + 1) * usual - phase, n) - larger(k * usual - phase, 0);
    });
    const i64 deep = (i64)g.rows * g.group;
    tell(team, work.across, sums + lines, across, deep, n, total, octaves + lines, [=](int k) {
        return (i64)held_in(g, k * g.group, (k + 1) * g.group);
    });
    team.sync();
    double* const terms = work.terms;
    if (team.rank < OCTAVES) {
        const int o = team.rank;
        Axis &a = work.lines, &b = work.across;
        a.counts[o] += a.numbers[o] * (int)usual;
        b.counts[o] += b.numbers[o] * (int)deep;
        terms[o] = a.numbers[o] ? 4.0 + shares_of(a.numbers[o], lines) : 0.0;
        terms[OCTAVES + o] = bits_of(a.counts[o], a.totals[o]);
        terms[2 * OCTAVES + o] = b.numbers[o] ? 4.0 + shares_of(b.numbers[o], across) : 0.0;
    }
    team.sync();
    double best = bits_of(n, total), cost = 0.0;
    if (team.rank == 0) {
        work.lines.side = added(terms, OCTAVES);
        work.across.side = added(terms + 2 * OCTAVES, OCTAVES);
        cost = work.lines.side + added(terms + OCTAVES, OCTAVES);
    }
    team.sync();
    for (int k = team.rank; by_rows && k < OCTAVES * OCTAVES; k += team.size) {
        const Axis &a = work.lines, &b = work.across;
        const int i = k / OCTAVES, j = k % OCTAVES;
        terms[k] = bits_of((i64)a.counts[i] * b.counts[j] / n, (i64)a.totals[i] * b.totals[j] / total);
    }
    team.sync();
    if (team.rank == 0) {
        int mode = ONE_SCALE;
        if (cost < best) best = cost, mode = by_rows ? BY_ROWS : BY_BLOCKS;
        if (by_rows) {
            cost = work.lines.side + work.across.side + added(terms, OCTAVES * OCTAVES);
            if (cost < WORTH_COLUMNS * best) best = cost, mode = BY_GRID;
        }
        work.mode = mode;
        *bits = best;
    }
    team.sync();
    return work.mode << 5 | base;
}
