// Viterbi's algorithm for 16 states.
#include "trellis_viterbi.cuh"
#include "trellis_aim.cuh"

extern "C" __global__ void __launch_bounds__(32) trellis_viterbi_16(
    const float* x, i64 n, i64 run, float step, const double* there, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, u32* kept, u8* bytes, u8* contexts,
    signed char* levels, const u8* classes, const u32* info, const i64* scalars, int* known
) {
    if (ended(there)) return;
    __shared__ u32 own[GROUPS * 8 * 32];
    __shared__ u32 room[GROUP * 16];
    const Given of = given_of(x, n, run, step, there, drawn, step_word, who, k0, k1);
    viterbi_of<16>(of, own, (u16*)room, bytes, contexts, levels, {classes, info, scalars}, known);
}

extern "C" __global__ void __launch_bounds__(256) trellis_aim_16(
    const float* x, i64 n, i64 run, double aim, double tight, double near_tight, double factor, double divisor, double norm, u32* kept, u8* bytes,
    Search* search, double* told
) {
    aim_coarse<16>(x, n, run, Target{aim, tight, near_tight, factor, divisor, norm}, kept, bytes, search, told);
}
