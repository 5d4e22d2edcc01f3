// Viterbi's algorithm for 8 states.
#include "trellis_viterbi.cuh"

extern "C" __global__ void __launch_bounds__(32) trellis_viterbi_8(
    const float* x, i64 n, i64 run, float step, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, u32* kept, u8* bytes, u8* contexts,
    signed char* levels, const u8* classes, const u32* info, const i64* scalars, int* known
) {
    __shared__ u32 own[GROUPS * 4 * 32];
    __shared__ u32 room[GROUP * 16];
    const Given of = given_of(x, n, run, step, drawn, step_word, who, k0, k1);
    viterbi_of<8>(of, own, (u16*)room, bytes, contexts, levels, {classes, info, scalars}, known);
}
