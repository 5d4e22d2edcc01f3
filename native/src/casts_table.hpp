// What each instruction set provides to casts.cpp: loops over one contiguous range, without threads.
#pragma once
#include "tersegrad/casts.hpp"

namespace tersegrad::casts {

constexpr std::size_t chunk = 4096;  // coordinates whose magnitudes are summed before anything else joins the sum

enum class Emit : int { store, add, stream };  // stream: store past the caches, for outputs that exceed them

struct Out {
    float* at;
    Emit how;
    float weight;
};

struct Table {
    std::uint32_t (*largest)(const float* x, std::size_t n);  // bits of max |x|; at least 0x7f800000 if anything is not finite
    void (*sums)(const float* x, std::size_t n, double* chunks);  // of squares, one for each chunk
    void (*bf16_encode)(const float* x, std::size_t n, bool stream, std::uint8_t* out);
    void (*bf16_decode)(const std::uint8_t* data, std::size_t n, Out out);
    void (*fp16_encode)(const float* x, std::size_t n, float factor, std::uint8_t* out);
    void (*fp16_decode)(const std::uint8_t* data, std::size_t n, float scale, Out out);
    std::uint32_t (*fp8_encode)(const float* x, std::size_t n, std::size_t block, std::uint8_t* scales, std::uint8_t* out);
    void (*fp8_decode)(const std::uint8_t* scales, const std::uint8_t* data, std::size_t n, std::size_t block, Out out);
    void (*sign_encode)(const float* x, std::size_t n, double* chunks, std::uint8_t* out);  // chunks: sums of magnitudes
    void (*sign_decode)(const std::uint8_t* data, std::size_t n, float scale, Out out);
    std::uint32_t (*natural_encode)(const float* x, std::size_t n, std::uint64_t first, const Stream& stream, std::uint8_t* signs,
                                    std::uint8_t* exponents);
    void (*natural_decode)(const std::uint8_t* signs, const std::uint8_t* exponents, std::size_t n, Out out);
    void (*ternary_codes)(const float* x, std::size_t n, std::uint64_t first, float inverse, const Stream& stream,
                          std::uint8_t* codes);
    void (*ternary_values)(const std::uint8_t* codes, std::size_t n, float scale, Out out);
    std::size_t (*trits_pack)(const std::uint8_t* codes, std::size_t n, std::uint8_t* out);
    std::uint8_t (*trits_largest)(const std::uint8_t* data, std::size_t bytes);
    std::size_t (*trits_unpack)(const std::uint8_t* data, std::size_t n, std::uint8_t* codes, std::uint32_t& largest_byte);
    void (*natural_levels_codes)(const float* x, std::size_t n, std::uint64_t first, float inverse, int levels, const Stream& stream,
                                 std::uint8_t* codes);
    void (*natural_levels_values)(const std::uint8_t* codes, std::size_t n, float scale, int levels, Out out);
};

extern const Table portable_table;
#if defined(__x86_64__)
extern const Table avx2_table, avx512_table;
#endif

}  // namespace tersegrad::casts
