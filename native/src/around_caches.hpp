// Stores that go around the caches, for outputs that the caches could not hold.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tersegrad::select {
namespace {

constexpr std::size_t cache_bytes = 16 << 20;  // outputs above this go around the caches
constexpr std::size_t window = 1024;

// Stores a window of floats to 16-byte aligned memory around the caches.
inline void stream(float* out, const float* from) {
#if defined(__SSE2__)
    for (std::size_t i = 0; i < window; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(from + i));
#else
    std::memcpy(out, from, window * 4);
#endif
}

inline void stream_done() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Floats from `at` to the next cache line.
inline std::size_t to_line(const float* at) { return (64 - reinterpret_cast<std::uintptr_t>(at) % 64) % 64 / 4; }

}  // namespace
}  // namespace tersegrad::select
