#include "tersegrad/levels.hpp"

#include <bit>
#include <limits>

namespace tersegrad {
namespace {

constexpr std::uint32_t half = 0x80000000u, quarter = 0x40000000u;
constexpr int unary_bins = 14;           // magnitudes above this escape to an Exp-Golomb code
constexpr std::uint32_t count_limit = 1u << 20;  // counts are halved there, so that totals stay small

std::uint32_t split(std::uint32_t low, std::uint32_t high, std::uint32_t zeros, std::uint32_t total) {
    const std::uint64_t range = static_cast<std::uint64_t>(high) - low + 1;
    return low + static_cast<std::uint32_t>(range * zeros / total) - 1;  // last value that means 0
}

std::uint32_t magnitude(std::int32_t level) {
    return level < 0 ? 0u - static_cast<std::uint32_t>(level) : static_cast<std::uint32_t>(level);
}

int width_of(std::size_t count) { return static_cast<int>(std::bit_width(count)); }

// One adaptive binary context: probability of 0 is (n0 + 1) / (n + Prior).
template <std::uint32_t Prior>
struct Adaptive {
    std::uint32_t n0 = 0, n = 0;
    std::uint32_t zeros() const { return n0 + 1; }
    std::uint32_t total() const { return n + Prior; }
    void update(bool bit) {
        n0 += !bit;
        if (++n >= count_limit) n = (n + 1) / 2, n0 = (n0 + 1) / 2;
    }
};

struct Model {
    Adaptive<3> zero;  // zeros are the rarer case before anything is known
    Adaptive<2> more[unary_bins];
};

}  // namespace

void ArithmeticEncoder::emit(bool bit) {
    sink_.put(bit);
    for (; pending_; --pending_) sink_.put(!bit);
}

void ArithmeticEncoder::put(bool bit, std::uint32_t zeros, std::uint32_t total) {
    if (zeros == 0 || zeros == total) return;
    const std::uint32_t mid = split(low_, high_, zeros, total);
    if (bit) low_ = mid + 1;
    else high_ = mid;
    for (;;) {
        if (high_ < half) emit(false);
        else if (low_ >= half) emit(true), low_ -= half, high_ -= half;
        else if (low_ >= quarter && high_ < half + quarter) ++pending_, low_ -= quarter, high_ -= quarter;
        else break;
        low_ <<= 1, high_ = high_ << 1 | 1;
    }
}

// Readers see zeros beyond the end: a one, whose zeros need not be written, lies in every interval that zeros alone do not.
void ArithmeticEncoder::finish() {
    if (low_ > 0 || pending_) emit(true);
}

ArithmeticDecoder::ArithmeticDecoder(BitSource& source) : source_(source) {
    for (int k = 0; k < 32; ++k) value_ = value_ << 1 | static_cast<std::uint32_t>(source_.get());
}

bool ArithmeticDecoder::get(std::uint32_t zeros, std::uint32_t total) {
    if (zeros == 0) return true;
    if (zeros == total) return false;
    const std::uint32_t mid = split(low_, high_, zeros, total);
    const bool bit = value_ > mid;
    if (bit) low_ = mid + 1;
    else high_ = mid;
    for (;;) {
        if (high_ < half) {
        } else if (low_ >= half) low_ -= half, high_ -= half, value_ -= half;
        else if (low_ >= quarter && high_ < half + quarter) low_ -= quarter, high_ -= quarter, value_ -= quarter;
        else break;
        low_ <<= 1, high_ = high_ << 1 | 1, value_ = value_ << 1 | static_cast<std::uint32_t>(source_.get());
    }
    return bit;
}

static void paper_encode(BitSink& sink, const std::int32_t* levels, std::size_t count) {
    std::uint32_t zeros = 0;
    for (std::size_t i = 0; i < count; ++i) zeros += levels[i] == 0;
    sink.put(zeros, width_of(count));
    for (std::size_t i = 0; i < count; ++i)
        if (levels[i]) {
            sink.ones(magnitude(levels[i]) - 1);
            sink.put(false);
        }
    for (std::size_t i = 0; i < count; ++i)
        if (levels[i]) sink.put(levels[i] < 0);
    ArithmeticEncoder coder(sink);
    std::uint32_t left = zeros;
    for (std::size_t i = 0; i < count; ++i) {
        coder.put(levels[i] != 0, left, static_cast<std::uint32_t>(count - i));
        left -= levels[i] == 0;
    }
    if (zeros && zeros < count) coder.finish();
}

static bool paper_decode(BitSource& source, std::int32_t* levels, std::size_t count) {
    const std::uint64_t zeros = source.get(width_of(count));
    if (zeros > count) return false;
    const std::size_t filled = count - zeros;
    // Magnitudes wait at the end of the output: the i-th of them is read before position i is written.
    std::int32_t* waiting = levels + zeros;
    for (std::size_t i = 0; i < filled; ++i) {
        std::int32_t k = 1;
        while (source.get()) {
            if (k == std::numeric_limits<std::int32_t>::max()) return false;
            ++k;
        }
        waiting[i] = k;
    }
    for (std::size_t i = 0; i < filled; ++i)
        if (source.get()) waiting[i] = -waiting[i];
    ArithmeticDecoder coder(source);
    std::uint32_t left = static_cast<std::uint32_t>(zeros);
    for (std::size_t i = 0, next = 0; i < count; ++i) {
        const bool filled_here = coder.get(left, static_cast<std::uint32_t>(count - i));
        if (filled_here) levels[i] = waiting[next++];
        else levels[i] = 0, --left;
    }
    return true;
}

static void adaptive_encode(BitSink& sink, const std::int32_t* levels, std::size_t count) {
    ArithmeticEncoder coder(sink);
    Model model;
    for (std::size_t i = 0; i < count; ++i) {
        const bool filled = levels[i] != 0;
        coder.put(filled, model.zero.zeros(), model.zero.total());
        model.zero.update(filled);
        if (!filled) continue;
        coder.put(levels[i] < 0, 1, 2);
        const std::uint32_t k = magnitude(levels[i]);
        for (std::uint32_t j = 1; j <= unary_bins; ++j) {
            const bool more = k > j;
            auto& context = model.more[j - 1];
            coder.put(more, context.zeros(), context.total());
            context.update(more);
            if (!more) break;
        }
        if (k > unary_bins) {
            const std::uint32_t rest = k - unary_bins;  // >= 1, Elias gamma with even odds
            const int bits = static_cast<int>(std::bit_width(rest)) - 1;
            for (int b = 0; b < bits; ++b) coder.put(true, 1, 2);
            coder.put(false, 1, 2);
            for (int b = bits - 1; b >= 0; --b) coder.put((rest >> b) & 1, 1, 2);
        }
    }
    if (count) coder.finish();
}

static bool adaptive_decode(BitSource& source, std::int32_t* levels, std::size_t count) {
    if (!count) return true;
    ArithmeticDecoder coder(source);
    Model model;
    for (std::size_t i = 0; i < count; ++i) {
        const bool filled = coder.get(model.zero.zeros(), model.zero.total());
        model.zero.update(filled);
        levels[i] = 0;
        if (!filled) continue;
        const bool negative = coder.get(1, 2);
        std::uint32_t k = 1;
        for (std::uint32_t j = 1; j <= unary_bins; ++j) {
            auto& context = model.more[j - 1];
            const bool more = coder.get(context.zeros(), context.total());
            context.update(more);
            if (!more) break;
            k = j + 1;
        }
        if (k > unary_bins) {
            int bits = 0;
            while (coder.get(1, 2))
                if (++bits > 30) return false;
            std::uint32_t rest = 1;
            for (int b = 0; b < bits; ++b) rest = rest << 1 | static_cast<std::uint32_t>(coder.get(1, 2));
            k = unary_bins + rest;
            if (k > 0x7fffffffu) return false;
        }
        levels[i] = negative ? -static_cast<std::int32_t>(k) : static_cast<std::int32_t>(k);
    }
    return true;
}

std::uint64_t unary_bits(const std::int32_t* levels, std::size_t count) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += magnitude(levels[i]);
    return sum;
}

std::vector<std::uint8_t> levels_encode(const std::int32_t* levels, std::size_t count, LevelForm form) {
    std::vector<std::uint8_t> bytes;
    BitSink sink(bytes);
    sink.put(form == LevelForm::adaptive);
    form == LevelForm::adaptive ? adaptive_encode(sink, levels, count) : paper_encode(sink, levels, count);
    sink.finish();
    while (!bytes.empty() && bytes.back() == 0) bytes.pop_back();
    return bytes;
}

bool levels_decode(const std::uint8_t* data, std::size_t size, std::int32_t* levels, std::size_t count) {
    BitSource source(data, size);
    return source.get() ? adaptive_decode(source, levels, count) : paper_decode(source, levels, count);
}

}  // namespace tersegrad
