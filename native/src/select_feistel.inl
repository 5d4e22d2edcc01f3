// The network, written once and compiled for each instruction set; `static`, so that no linker mixes them up.
#include <cstddef>
#include <cstdint>

static inline std::uint32_t mix(std::uint32_t h) {
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    h ^= h >> 16;
    return h;
}

// Each round swaps the halves and masks the new right half by the hash of the old one. An odd width alternates between the two
// half widths; after an even number of rounds both are where they began.
static void feistel_network(const std::uint32_t* keys, int left_bits, int right_bits, std::uint32_t* left, std::uint32_t* right,
                            std::size_t n) {
    const std::uint32_t left_mask = static_cast<std::uint32_t>((std::uint64_t{1} << left_bits) - 1);
    const std::uint32_t right_mask = static_cast<std::uint32_t>((std::uint64_t{1} << right_bits) - 1);
    for (std::size_t i = 0; i < n; ++i) {
        std::uint32_t a = left[i], b = right[i];
        for (int r = 0; r < 6; r += 2) {
            a ^= mix(b + keys[r]) & left_mask;
            b ^= mix(a + keys[r + 1]) & right_mask;
        }
        left[i] = a;
        right[i] = b;
    }
}
