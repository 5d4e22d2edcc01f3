// What all sources share. NVRTC has no standard headers; these types are those of the parameters in loader.py.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL 0xffffffffu

// Keeps the compiler from taking the sum apart that a pointer to global memory is: what is added to it then takes one instruction.
#ifdef CUDA_ON_CPU
#define KEEP_TOGETHER(pointer)
#define KEEP_NUMBER(number)
#else
// Keeps the compiler from finding out what a number is good for.
#define KEEP_NUMBER(number) asm("" : "+r"(number))
#define KEEP_TOGETHER(pointer)              \
    do {                                    \
        asm("" : "+l"(pointer));            \
        __builtin_assume(__isGlobal(pointer)); \
    } while (0)
// Shared memory whose size the launch tells.
#define SHARED_BY_LAUNCH(type, name) extern __shared__ type name[]
#endif

__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 larger(i64 a, i64 b) { return a > b ? a : b; }

__device__ __forceinline__ u32 load32(const u8* p) {
    return (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}
__device__ __forceinline__ void store32(u8* p, u32 v) {
    for (int k = 0; k < 4; ++k) p[k] = (u8)(v >> 8 * k);
}
__device__ __forceinline__ void store16(u8* p, u32 v) {
    p[0] = (u8)v;
    p[1] = (u8)(v >> 8);
}

// Sixteen bytes that are loaded and stored at once, at places that are multiples of sixteen.
struct alignas(16) Sixteen {
    u32 word[4];
    __device__ u32 byte(int k) const { return word[k >> 2] >> 8 * (k & 3) & 255; }
    // Whether all bytes are the same.
    __device__ bool even() const {
        return word[0] == word[0] % 256 * 0x01010101u && word[0] == word[1] && word[0] == word[2] && word[0] == word[3];
    }
};

// The number of binary digits of v.
__device__ __forceinline__ int bit_length(u64 v) { return 64 - __clzll((i64)v); }

// The sum over a warp, in all its threads.
__device__ __forceinline__ i64 warp_sum(i64 v) {
    for (int by = 16; by; by >>= 1) v += __shfl_xor_sync(FULL, v, by);
    return v;
}

// The running sum over a warp, this thread's included.
__device__ __forceinline__ i64 warp_scan(i64 v) {
    const int lane = threadIdx.x & 31;
    for (int by = 1; by < 32; by <<= 1) {
        const i64 before = __shfl_up_sync(FULL, v, by);
        if (lane >= by) v += before;
    }
    return v;
}

// The sum of v over the threads of a block before this one; `total` is that over all. Blocks have at most 1024 threads, whole warps.
__device__ __forceinline__ i64 block_scan(i64 v, i64* total) {
    __shared__ i64 sums[33];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const i64 upto = warp_scan(v);
    __syncthreads();
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        const i64 mine = lane < warps ? sums[lane] : 0;
        const i64 scanned = warp_scan(mine);
        if (lane < warps) sums[lane] = scanned - mine;
        if (lane == 31) sums[32] = scanned;
    }
    __syncthreads();
    *total = sums[32];
    return sums[warp] + upto - v;
}
