#include <immintrin.h>

#include "bits_codes.hpp"

namespace tersegrad::bits {
namespace {

using V = __m256i;

TERSEGRAD_INLINE V set64(u64 x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
TERSEGRAD_INLINE V select(u64 m, V x, V y) { return _mm256_or_si256(_mm256_and_si256(x, set64(m)), _mm256_andnot_si256(set64(m), y)); }
TERSEGRAD_INLINE V load2(const u8* a, const u8* b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a))),
                                   _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
}

// The hardware does not look far enough ahead of these loops by itself.
TERSEGRAD_INLINE void fetch(const void* p) { _mm_prefetch(reinterpret_cast<const char*>(p) + 8192, _MM_HINT_T0); }

TERSEGRAD_INLINE bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 32 == 0; }

template <bool Stream>
TERSEGRAD_INLINE void store(void* p, V x) {
    if constexpr (Stream)
        _mm256_stream_si256(reinterpret_cast<V*>(p), x);
    else
        _mm256_storeu_si256(reinterpret_cast<V*>(p), x);
}

// Shuffles of one 128-bit lane: two words of eight bytes <-> 2 W bytes one after another.
template <unsigned W>
constexpr auto join_bytes() {
    std::array<u8, 32> index{};
    for (unsigned j = 0; j < 16; ++j) index[j] = index[j + 16] = static_cast<u8>(j < 2 * W ? j / W * 8 + j % W : 0x80);
    return index;
}
template <unsigned W>
constexpr auto split_bytes() {
    std::array<u8, 32> index{};
    for (unsigned j = 0; j < 16; ++j) index[j] = index[j + 16] = static_cast<u8>(j % 8 < W ? j / 8 * W + j % 8 : 0x80);
    return index;
}

template <unsigned W>
void pack8_avx2(const u8* codes, std::size_t count, u8* out, bool) {
    static constexpr auto join = join_bytes<W>();
    const V shuffle = _mm256_loadu_si256(reinterpret_cast<const V*>(join.data()));
    const u8* const end = out + packed_bytes(count, W);
    std::size_t i = 0;
    for (; i + 32 <= count && end - out >= static_cast<std::ptrdiff_t>(2 * W + 16); i += 32, out += 4 * W) {
        V x = _mm256_loadu_si256(reinterpret_cast<const V*>(codes + i));
        fetch(codes + i);
        x = select(lanes(mask(W), 16), x, _mm256_srli_epi64(x, 8 - W));
        x = select(lanes(mask(2 * W), 32), x, _mm256_srli_epi64(x, 16 - 2 * W));
        x = select(mask(4 * W), x, _mm256_srli_epi64(x, 32 - 4 * W));
        x = _mm256_shuffle_epi8(x, shuffle);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(x));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * W), _mm256_extracti128_si256(x, 1));
    }
    pack8<W>(codes + i, count - i, out);
}

template <unsigned W, bool Stream>
TERSEGRAD_INLINE std::size_t unpack8_blocks(const u8* data, std::size_t count, u8* out) {
    static constexpr auto split = split_bytes<W>();
    const V shuffle = _mm256_loadu_si256(reinterpret_cast<const V*>(split.data()));
    const u8* const end = data + packed_bytes(count, W);
    std::size_t i = 0;
    for (; i + 32 <= count && end - data >= static_cast<std::ptrdiff_t>(2 * W + 16); i += 32, data += 4 * W) {
        fetch(data);
        V x = _mm256_shuffle_epi8(load2(data, data + 2 * W), shuffle);
        x = select(mask(32), x, _mm256_slli_epi64(x, 32 - 4 * W));
        x = _mm256_and_si256(x, set64(lanes(mask(4 * W), 32)));
        x = select(lanes(mask(16), 32), x, _mm256_slli_epi64(x, 16 - 2 * W));
        x = _mm256_and_si256(x, set64(lanes(mask(2 * W), 16)));
        x = select(lanes(mask(8), 16), x, _mm256_slli_epi64(x, 8 - W));
        x = _mm256_and_si256(x, set64(lanes(mask(W), 8)));
        store<Stream>(out + i, x);
    }
    if constexpr (Stream) _mm_sfence();
    return i;
}

template <unsigned W>
void unpack8_avx2(const u8* data, std::size_t count, u8* out, bool far) {
    const std::size_t done = far && aligned(out) ? unpack8_blocks<W, true>(data, count, out) : unpack8_blocks<W, false>(data, count, out);
    unpack8<W>(data + done / 8 * W, count - done, out + done);
}

// Code i of eight lies within the four bytes from byte i W / 8 on.
template <unsigned W, bool Stream>
TERSEGRAD_INLINE std::size_t unpack32_blocks(const u8* data, std::size_t count, i32* out) {
    static constexpr auto index = [] {
        std::array<u8, 32> all{};
        for (unsigned i = 0; i < 8; ++i)
            for (unsigned b = 0; b < 4; ++b) all[4 * i + b] = static_cast<u8>(i * W / 8 + b < 16 ? i * W / 8 + b : 0x80);
        return all;
    }();
    static constexpr auto shift = [] {
        std::array<i32, 8> all{};
        for (unsigned i = 0; i < 8; ++i) all[i] = i * W % 8;
        return all;
    }();
    const V shuffle = _mm256_loadu_si256(reinterpret_cast<const V*>(index.data()));
    const V shifts = _mm256_loadu_si256(reinterpret_cast<const V*>(shift.data()));
    const V low = _mm256_set1_epi32(static_cast<int>(mask(W)));
    const u8* const end = data + packed_bytes(count, W);
    std::size_t i = 0;
    for (; i + 8 <= count && end - data >= 16; i += 8, data += W) {
        fetch(data);
        V x = _mm256_shuffle_epi8(load2(data, data), shuffle);
        x = _mm256_and_si256(_mm256_srlv_epi32(x, shifts), low);
        store<Stream>(out + i, x);
    }
    if constexpr (Stream) _mm_sfence();
    return i;
}

template <unsigned W>
void unpack32_avx2(const u8* data, std::size_t count, i32* out, bool far) {
    const std::size_t done = far && aligned(out) ? unpack32_blocks<W, true>(data, count, out) : unpack32_blocks<W, false>(data, count, out);
    unpack32<W>(data + done / 8 * W, count - done, out + done);
}

// Ten trits per lane: five in each half, times 1, 3, 9, 27, 81, summed over the half.
bool pack_trits_avx2(const u8* trits, std::size_t count, u8* out) {
    const V groups = _mm256_setr_epi8(0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, 8, 9, -1, -1, -1, 0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, 8, 9, -1, -1, -1);
    const V powers = set64(0x511b090301);
    V largest = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 26 <= count; i += 20, out += 4) {
        V x = load2(trits + i, trits + i + 10);
        largest = _mm256_max_epu8(largest, x);
        x = _mm256_maddubs_epi16(_mm256_shuffle_epi8(x, groups), powers);
        x = _mm256_sad_epu8(x, _mm256_setzero_si256());
        const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
        const __m128i pairs = _mm_packus_epi32(low, high);  // 16-bit sums at 0, 2, 4, 6
        const __m128i four = _mm_shuffle_epi8(pairs, _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
        const int word = _mm_cvtsi128_si32(four);
        std::memcpy(out, &word, 4);
    }
    const V two = _mm256_set1_epi8(2);
    const bool good = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(largest, two), two)) == -1;
    return pack_trits_loop(trits + i, count - i, out) && good;
}

template <unsigned... W>
constexpr void vectors8(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.pack8[W + 1] = pack8_avx2<W + 1>, t.unpack8[W + 1] = unpack8_avx2<W + 1>), ...);
}
template <unsigned... W>
constexpr void vectors32(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.unpack32[W + 9] = unpack32_avx2<W + 9>), ...);
}

constexpr Implementation implementation() {
    Implementation t = scalar_implementation();
    vectors8(t, std::make_integer_sequence<unsigned, 7>{});
    vectors32(t, std::make_integer_sequence<unsigned, 8>{});
    t.pack_trits = pack_trits_avx2;
    return t;
}

}  // namespace

const Implementation avx2 = implementation();

}  // namespace tersegrad::bits
