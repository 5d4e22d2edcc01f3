// Philox-4x32-10 (Salmon et al., SC 2011): the scalar definition and the counter layout of spec/wire.md.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tersegrad {

// One stream of 16-bit draws: key = the seed, counter = (i >> 3, purpose << 24 | i >> 35, step, buffer << 16 | sender).
struct Stream {
    std::uint64_t key = 0;
    std::uint32_t purpose = 0, step = 0, salt = 0;  // salt = buffer << 16 | sender
};

struct PhiloxWords {
    std::uint32_t w[4];
};

constexpr std::uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

// `static`: every translation unit keeps its own copy, built for its own instruction set.
[[maybe_unused]] static inline PhiloxWords philox(std::uint64_t key, std::uint32_t c0, std::uint32_t c1, std::uint32_t c2,
                                                  std::uint32_t c3) {
    std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = std::uint64_t{kMultiplier0} * c0, p1 = std::uint64_t{kMultiplier1} * c2;
        c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<std::uint32_t>(p1);
        c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<std::uint32_t>(p0);
        k0 += kWeyl0;
        k1 += kWeyl1;
    }
    return {{c0, c1, c2, c3}};
}

// The block that serves coordinates 8 * index .. 8 * index + 7.
[[maybe_unused]] static inline PhiloxWords philox_block(const Stream& s, std::uint64_t index) {
    return philox(s.key, static_cast<std::uint32_t>(index), s.purpose << 24 | static_cast<std::uint32_t>(index >> 32), s.step,
                  s.salt);
}

// Draws of coordinates start .. start + count.
void random_u16(const Stream& stream, std::uint64_t start, std::size_t count, std::uint16_t* out);
void random_u16(const Stream& stream, std::uint64_t start, std::size_t count, std::int32_t* out);

}  // namespace tersegrad
