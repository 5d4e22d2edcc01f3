// The loops of powers.cpp, compiled once for each instruction set. Plain C++: compilers make vectors of it.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "tersegrad/powers.hpp"

namespace tersegrad::powers {
namespace {

using u32 = std::uint32_t;
using i32 = std::int32_t;

constexpr float huge = 3.4028234663852886e38f;
constexpr std::size_t batch = 128;  // codes that wait in the nearest cache

inline u32 largest_of(const float* __restrict x, std::size_t n) {
    i32 most = 0;
    for (std::size_t j = 0; j < n; ++j) {
        const auto key = static_cast<i32>(std::bit_cast<u32>(x[j]) & 0x7fffffffu);
        most = most > key ? most : key;
    }
    return static_cast<u32>(most);
}

inline i32 code_of(float x, float inverse) {
    const auto bits = std::bit_cast<i32>(x);
    const float size = std::bit_cast<float>(bits & 0x7fffffff) * inverse;
    i32 e = ((std::bit_cast<i32>(size) + 0x00400000) >> 23) - 120;
    e = e < 1 ? 1 : e;
    e = e > 7 ? 7 : e;
    e = size < 0.0078125f ? 0 : e;
    return e | (static_cast<i32>(static_cast<u32>(bits) >> 31) << 3);
}

inline void encode_pairs(const float* __restrict x, std::size_t pairs, float inverse, std::uint8_t* __restrict codes) {
    i32 one[2 * batch];
    for (std::size_t start = 0; start < pairs; start += batch) {
        const std::size_t here = pairs - start < batch ? pairs - start : batch;
        for (std::size_t j = 0; j < 2 * here; ++j) one[j] = code_of(x[2 * start + j], inverse);
        for (std::size_t j = 0; j < here; ++j) codes[start + j] = static_cast<std::uint8_t>(one[2 * j] | (one[2 * j + 1] << 4));
    }
}

inline float value_of(u32 code, float scale) {
    const u32 e = code & 7, power = (e + 120) << 23;
    float value = std::bit_cast<float>(e ? power : 0u) * scale;
    value = value > huge ? huge : value;
    value = value < -huge ? -huge : value;
    return std::bit_cast<float>(std::bit_cast<u32>(value) ^ ((code & 8) << 28));
}

template <class Put>
void each_value(const std::uint8_t* __restrict codes, std::size_t pairs, float scale, Put&& put) {
    u32 one[2 * batch];
    for (std::size_t start = 0; start < pairs; start += batch) {
        const std::size_t here = pairs - start < batch ? pairs - start : batch;
        for (std::size_t j = 0; j < here; ++j) {
            one[2 * j] = codes[start + j] & 15u;
            one[2 * j + 1] = codes[start + j] >> 4;
        }
        for (std::size_t j = 0; j < 2 * here; ++j) put(2 * start + j, value_of(one[j], scale));
    }
}

inline void decode_pairs(const std::uint8_t* __restrict codes, std::size_t pairs, float scale, float* __restrict out) {
    each_value(codes, pairs, scale, [&](std::size_t j, float value) { out[j] = value; });
}

inline void decode_add_pairs(const std::uint8_t* __restrict codes, std::size_t pairs, float scale, float weight, float* __restrict out) {
    each_value(codes, pairs, scale, [&](std::size_t j, float value) { out[j] += value * weight; });
}

constexpr Loops all_loops() { return {largest_of, encode_pairs, decode_pairs, decode_add_pairs}; }

}  // namespace
}  // namespace tersegrad::powers
