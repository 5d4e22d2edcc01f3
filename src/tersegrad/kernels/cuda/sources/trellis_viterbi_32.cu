// Viterbi's algorithm for 32 states, whose decisions lie in global memory.
#include "trellis_viterbi.cuh"
#include "trellis_aim.cuh"

extern "C" __global__ void __launch_bounds__(32) trellis_viterbi_32(
    const float* x, i64 n, i64 run, float step, const double* there, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, u32* kept, u8* bytes, u8* contexts,
    signed char* levels, const u8* classes, const u32* info, const i64* scalars, int* known
) {
    if (ended(there)) return;
    __shared__ u32 room[GROUP * 16];
    u32* own = kept + ((i64)blockIdx.x << run >> 1) * 16 / GROUP;
    const Given of = given_of(x, n, run, step, there, drawn, step_word, who, k0, k1);
    viterbi_of<32>(of, own, (u16*)room, bytes, contexts, levels, {classes, info, scalars}, known);
}

extern "C" __global__ void __launch_bounds__(256) trellis_aim_32(
    const float* x, i64 n, i64 run, double aim, double tight, double near_tight, double factor, double divisor, double norm, u32* kept, u8* bytes,
    Search* search, double* told
) {
    aim_coarse<32>(x, n, run, Target{aim, tight, near_tight, factor, divisor, norm}, kept, bytes, search, told);
}
