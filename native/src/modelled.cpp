#include "tersegrad/modelled.hpp"

#include "tersegrad/levels.hpp"

namespace tersegrad::modelled {
namespace {

constexpr std::uint32_t whole = 65536, even = 32768;
constexpr int widest = 30;

struct Writer {
    ArithmeticEncoder& coder;
    bool operator()(bool bit, std::uint32_t ones) {
        coder.put(bit, whole - ones, whole);
        return bit;
    }
};

struct Reader {
    ArithmeticDecoder& coder;
    bool operator()(bool, std::uint32_t ones) { return coder.get(whole - ones, whole); }
};

// Elias gamma with even odds; 0 where it is too wide.
template <class Decide>
std::int64_t escape(Decide& decide, std::int64_t value) {
    int width = 0;
    while (decide((value >> (width + 1)) > 0, even))
        if (++width > widest) return 0;
    std::int64_t result = 1;
    for (int b = width - 1; b >= 0; --b) result = result << 1 | static_cast<std::int64_t>(decide((value >> b) & 1, even));
    return result;
}

// A writer passes the level and gets it back; a reader passes anything and gets the true one, or a value beyond `kLargest`.
template <class Decide>
std::int64_t walk(Decide& decide, const std::int32_t* row, std::int64_t reach, int shift, std::int64_t level) {
    const std::int64_t high = level >> shift;
    std::int64_t result;
    if (decide(high >= 1, static_cast<std::uint32_t>(row[0]))) {
        std::int64_t k = 1;
        while (k <= reach && decide(high > k, static_cast<std::uint32_t>(row[k]))) ++k;
        result = k;
        if (k > reach) {
            const std::int64_t more = escape(decide, high - reach);
            if (!more) return 2 * kLargest;
            result = reach + more;
        }
    } else {
        std::int64_t k = 0;
        while (k < reach && decide(high < -k, static_cast<std::uint32_t>(row[1 + reach + k]))) ++k;
        result = -k;
        if (k == reach) {
            const std::int64_t more = escape(decide, 1 - reach - high);
            if (!more) return 2 * kLargest;
            result = 1 - reach - more;
        }
    }
    std::int64_t low = 0;
    for (int b = 0; b < shift; ++b) low |= static_cast<std::int64_t>(decide((level >> b) & 1, even)) << b;
    return result * (std::int64_t{1} << shift) + low;
}

}  // namespace

std::vector<std::uint8_t> encode(const std::int32_t* levels, const std::uint8_t* classes, std::size_t n, const Table& table) {
    std::vector<std::uint8_t> bytes;
    BitSink sink(bytes);
    sink.put(false);
    ArithmeticEncoder coder(sink);
    Writer decide{coder};
    for (std::size_t i = 0; i < n; ++i) walk(decide, table.row(classes[i]), table.reach(), table.shift, levels[i]);
    coder.finish();
    sink.finish();
    return bytes;
}

bool decode(const std::uint8_t* data, std::size_t size, const std::uint8_t* classes, std::size_t n, const Table& table, std::int32_t* levels) {
    BitSource source(data, size);
    if (source.get()) return false;
    ArithmeticDecoder coder(source);
    Reader decide{coder};
    for (std::size_t i = 0; i < n; ++i) {
        const std::int64_t level = walk(decide, table.row(classes[i]), table.reach(), table.shift, 0);
        if (source.position() > size * 8 + 64 || level > kLargest || level < -kLargest) return false;
        levels[i] = static_cast<std::int32_t>(level);
    }
    return true;
}

}  // namespace tersegrad::modelled
