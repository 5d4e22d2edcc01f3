#include <immintrin.h>

// GCC 12 takes its own "undefined" operands for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "bits_codes.hpp"

namespace tersegrad::bits {
namespace {

using V = __m512i;

TERSEGRAD_INLINE V set64(u64 x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
TERSEGRAD_INLINE V select(u64 m, V x, V y) { return _mm512_ternarylogic_epi64(set64(m), x, y, 0xca); }
TERSEGRAD_INLINE V table(const std::array<u8, 64>& bytes) { return _mm512_loadu_si512(bytes.data()); }

// Lanes of S bytes whose first W bytes are put one after another, and the reverse.
template <unsigned W, unsigned S>
constexpr auto join_bytes() {
    std::array<u8, 64> index{};
    for (unsigned j = 0; j < 64; ++j) index[j] = static_cast<u8>((j / W * S + j % W) % 64);
    return index;
}
template <unsigned W, unsigned S>
constexpr auto split_bytes() {
    std::array<u8, 64> index{};
    for (unsigned j = 0; j < 64; ++j) index[j] = static_cast<u8>(j / S * W + j % S);
    return index;
}

// The hardware does not look far enough ahead of these loops by itself.
TERSEGRAD_INLINE void fetch(const void* p) { _mm_prefetch(reinterpret_cast<const char*>(p) + 8192, _MM_HINT_T0); }

TERSEGRAD_INLINE bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; }

template <bool Stream>
TERSEGRAD_INLINE void store(void* p, V x) {
    if constexpr (Stream)
        _mm512_stream_si512(reinterpret_cast<V*>(p), x);
    else
        _mm512_storeu_si512(p, x);
}

// 64 codes -> 8 W bytes.
template <unsigned W>
TERSEGRAD_INLINE void pack8_block(const u8* codes, u8* out, V join) {
    V x = _mm512_loadu_si512(codes);
    fetch(codes);
    if constexpr (W == 1) {
        store64(out, _mm512_test_epi8_mask(x, _mm512_set1_epi8(1)));
    } else {
        // What lies above the bits of interest is never selected.
        x = select(lanes(mask(W), 16), x, _mm512_srli_epi64(x, 8 - W));
        x = select(lanes(mask(2 * W), 32), x, _mm512_srli_epi64(x, 16 - 2 * W));
        x = select(mask(4 * W), x, _mm512_srli_epi64(x, 32 - 4 * W));
        x = _mm512_permutexvar_epi8(join, x);
        if constexpr (W == 4)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(x));
        else
            _mm512_mask_storeu_epi8(out, mask(8 * W), x);
    }
}

// 32 codes -> 4 W bytes.
template <unsigned W>
TERSEGRAD_INLINE void pack32_block(const i32* codes, u8* out, V join) {
    static constexpr auto low_halves = [] {
        std::array<std::uint16_t, 32> index{};
        for (unsigned j = 0; j < 32; ++j) index[j] = static_cast<std::uint16_t>(2 * j);
        return index;
    }();
    fetch(codes);
    fetch(codes + 16);
    V x = _mm512_permutex2var_epi16(_mm512_loadu_si512(codes), _mm512_loadu_si512(low_halves.data()), _mm512_loadu_si512(codes + 16));
    x = select(lanes(mask(W), 32), x, _mm512_srli_epi64(x, 16 - W));
    x = select(mask(2 * W), x, _mm512_srli_epi64(x, 32 - 2 * W));
    x = _mm512_and_si512(x, set64(mask(4 * W)));
    // The second word of each pair continues at bit 4 W of the first.
    const V second = _mm512_unpackhi_epi64(x, x);
    const V high = _mm512_maskz_srli_epi64(0xaa, second, 64 - 4 * W);
    x = _mm512_mask_or_epi64(high, 0x55, x, _mm512_slli_epi64(second, 4 * W));
    _mm512_mask_storeu_epi8(out, mask(4 * W), _mm512_permutexvar_epi8(join, x));
}

// Blocks of `Step` codes; far outputs are built in a small buffer and leave it in whole cache lines.
template <unsigned W, unsigned Step, class Code, class Block, class Rest>
TERSEGRAD_INLINE void pack_blocks(const Code* codes, std::size_t count, u8* out, bool far, Block block, Rest rest) {
    constexpr std::size_t bytes = Step * W / 8, buffered = 16;  // blocks: a whole number of cache lines
    std::size_t i = 0;
    if (far && aligned(out)) {
        alignas(64) u8 buffer[buffered * bytes];
        for (; i + buffered * Step <= count; i += buffered * Step) {
            for (std::size_t j = 0; j < buffered; ++j) block(codes + i + j * Step, buffer + j * bytes);
            for (std::size_t j = 0; j < buffered * bytes; j += 64, out += 64) store<true>(out, _mm512_load_si512(buffer + j));
        }
        _mm_sfence();
    }
    for (; i + Step <= count; i += Step, out += bytes) block(codes + i, out);
    rest(codes + i, count - i, out, false);
}

template <unsigned W>
void pack8_avx512(const u8* codes, std::size_t count, u8* out, bool far) {
    static constexpr auto index = join_bytes<W, 8>();
    const V join = table(index);
    auto block = [join](const u8* from, u8* to) __attribute__((always_inline)) { pack8_block<W>(from, to, join); };
    pack_blocks<W, 64>(codes, count, out, far, block, pack8<W>);
}

template <unsigned W>
void pack32_avx512(const i32* codes, std::size_t count, u8* out, bool far) {
    static constexpr auto index = join_bytes<W, 16>();
    const V join = table(index);
    auto block = [join](const i32* from, u8* to) __attribute__((always_inline)) { pack32_block<W>(from, to, join); };
    pack_blocks<W, 32>(codes, count, out, far, block, pack32<W>);
}

template <unsigned W, bool Stream>
TERSEGRAD_INLINE std::size_t unpack8_blocks(const u8* data, std::size_t count, u8* out) {
    static constexpr auto split = split_bytes<W, 8>();
    const V permutation = table(split);
    const V shifts = set64(u64{W} << 8 | u64{2 * W} << 16 | u64{3 * W} << 24 | u64{4 * W} << 32 | u64{5 * W} << 40 | u64{6 * W} << 48 |
                           u64{7 * W} << 56);
    const V low = _mm512_set1_epi8(static_cast<char>(mask(W)));
    std::size_t i = 0;
    for (; i + 64 <= count; i += 64, data += 8 * W) {
        fetch(data);
        const V x = _mm512_permutexvar_epi8(permutation, _mm512_maskz_loadu_epi8(mask(8 * W), data));
        store<Stream>(out + i, _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, x), low));
    }
    if constexpr (Stream) _mm_sfence();
    return i;
}

template <unsigned W>
void unpack8_avx512(const u8* data, std::size_t count, u8* out, bool far) {
    const std::size_t done = far && aligned(out) ? unpack8_blocks<W, true>(data, count, out) : unpack8_blocks<W, false>(data, count, out);
    unpack8<W>(data + done / 8 * W, count - done, out + done);
}

// Code i of sixteen lies within the four bytes from byte i W / 8 on.
template <unsigned W, bool Stream>
TERSEGRAD_INLINE std::size_t unpack32_blocks(const u8* data, std::size_t count, i32* out) {
    static constexpr auto index = [] {
        std::array<u8, 64> all{};
        for (unsigned j = 0; j < 64; ++j) all[j] = static_cast<u8>(j / 4 * W / 8 + j % 4);
        return all;
    }();
    static constexpr auto shift = [] {
        std::array<i32, 16> all{};
        for (unsigned i = 0; i < 16; ++i) all[i] = i * W % 8;
        return all;
    }();
    const V permutation = table(index), shifts = _mm512_loadu_si512(shift.data()), low = _mm512_set1_epi32(static_cast<int>(mask(W)));
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16, data += 2 * W) {
        fetch(data);
        const V x = _mm512_permutexvar_epi8(permutation, _mm512_maskz_loadu_epi8(mask(2 * W), data));
        store<Stream>(out + i, _mm512_and_si512(_mm512_srlv_epi32(x, shifts), low));
    }
    if constexpr (Stream) _mm_sfence();
    return i;
}

template <unsigned W>
void unpack32_avx512(const u8* data, std::size_t count, i32* out, bool far) {
    const std::size_t done = far && aligned(out) ? unpack32_blocks<W, true>(data, count, out) : unpack32_blocks<W, false>(data, count, out);
    unpack32<W>(data + done / 8 * W, count - done, out + done);
}

// Forty trits: five in each word, times 1, 3, 9, 27, 81, summed over the word.
bool pack_trits_avx512(const u8* trits, std::size_t count, u8* out) {
    static constexpr auto split = split_bytes<5, 8>();
    const V groups = table(split), powers = set64(0x511b090301);
    V largest = _mm512_setzero_si512();
    const auto forty = [&](const u8* from, u8* to) {
        V x = _mm512_loadu_si512(from);
        largest = _mm512_max_epu8(largest, x);
        x = _mm512_maddubs_epi16(_mm512_permutexvar_epi8(groups, x), powers);
        x = _mm512_sad_epu8(x, _mm512_setzero_si512());
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(x));
    };
    std::size_t i = 0;
    // Two at a time: a loop of one is so short that its speed would depend on where the linker lays it.
    for (; i + 104 <= count; i += 80, out += 16) {
        fetch(trits + i);
        fetch(trits + i + 40);
        forty(trits + i, out);
        forty(trits + i + 40, out + 8);
    }
    if (i + 64 <= count) forty(trits + i, out), i += 40, out += 8;
    const bool good = _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(2)) == 0;
    return pack_trits_loop(trits + i, count - i, out) && good;
}

// Twelve bytes, each in five lanes. With f = ceil(256 byte / 243), a fraction of 256, trit j is the whole part of 3 frac(3^(4-j) f).
bool unpack_trits_avx512(const u8* data, std::size_t count, u8* out) {
    static constexpr auto index = [] {
        std::array<u8, 64> all{};
        for (unsigned j = 0; j < 60; ++j) all[j] = static_cast<u8>(2 * (j / 5));
        return all;
    }();
    // Powers modulo 256, for bytes at even and at odd places: the multiplier of a 16-bit lane is one byte wide.
    static constexpr auto powers = [] {
        std::array<std::array<std::uint16_t, 32>, 2> all{};
        constexpr std::uint16_t by_place[] = {81, 27, 9, 3, 1};
        for (unsigned j = 0; j < 60; ++j) all[j % 2][j / 2] = by_place[j % 5];
        return all;
    }();
    const V repeat = table(index), even = _mm512_loadu_si512(powers[0].data()), odd = _mm512_loadu_si512(powers[1].data());
    const V high = _mm512_set1_epi16(static_cast<short>(0xff00)), one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2);
    const V third = _mm512_set1_epi8(86), two_thirds = _mm512_set1_epi8(static_cast<char>(171));
    __m128i largest = _mm_setzero_si128();
    std::size_t i = 0;
    for (; i + 80 <= count; i += 60, data += 12) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
        fetch(data);
        largest = _mm_max_epu8(largest, raw);
        const __m256i b = _mm256_cvtepu8_epi16(_mm_min_epu8(raw, _mm_set1_epi8(static_cast<char>(242))));
        // ceil(13 b / 243) by a multiplication that is exact for b <= 242.
        const __m256i scaled = _mm256_add_epi16(_mm256_mullo_epi16(b, _mm256_set1_epi16(13)), _mm256_set1_epi16(242));
        const __m256i f = _mm256_add_epi16(b, _mm256_mulhi_epu16(scaled, _mm256_set1_epi16(270)));
        const V x = _mm512_permutexvar_epi8(repeat, _mm512_castsi256_si512(f));
        const V low_part = _mm512_mullo_epi16(x, even), high_part = _mm512_mullo_epi16(_mm512_and_si512(x, high), odd);
        const V fraction = _mm512_ternarylogic_epi64(high, high_part, low_part, 0xca);
        const V digits = _mm512_maskz_mov_epi8(_mm512_cmpge_epu8_mask(fraction, third), one);
        _mm512_storeu_si512(out + i, _mm512_mask_mov_epi8(digits, _mm512_cmpge_epu8_mask(fraction, two_thirds), two));
    }
    const bool good = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(largest, _mm_set1_epi8(static_cast<char>(242))),
                                                       _mm_set1_epi8(static_cast<char>(242)))) == 0xffff;
    return unpack_trits_loop(data, count - i, out + i) && good;
}

template <unsigned... W>
constexpr void vectors8(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.pack8[W + 1] = pack8_avx512<W + 1>, t.unpack8[W + 1] = unpack8_avx512<W + 1>), ...);
}
template <unsigned... W>
constexpr void vectors32(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.pack32[W + 9] = pack32_avx512<W + 9>, t.unpack32[W + 9] = unpack32_avx512<W + 9>), ...);
}

constexpr Implementation implementation() {
    Implementation t = scalar_implementation();
    vectors8(t, std::make_integer_sequence<unsigned, 7>{});
    vectors32(t, std::make_integer_sequence<unsigned, 8>{});
    t.pack_trits = pack_trits_avx512;
    t.unpack_trits = unpack_trits_avx512;
    return t;
}

}  // namespace

const Implementation avx512 = implementation();

}  // namespace tersegrad::bits
