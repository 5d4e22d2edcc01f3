// Index sets as planar Golomb codes of their gaps.
#include <memory>
#include <utility>
#include <vector>

#include "index_bits.hpp"
#include "index_parts.hpp"
#include "tersegrad/planar.hpp"

namespace tersegrad::select {
using namespace index;
namespace {

using planar::Golomb;
using planar::Sums;

std::size_t bytes_of(std::uint64_t bits) { return static_cast<std::size_t>((bits + 7) / 8); }

Sums measure(const Golomb& code, const std::int32_t* indices, std::size_t begin, std::size_t end) {
    return planar::table().measure32(code, indices, begin, end);
}
Sums measure(const Golomb& code, const std::int64_t* indices, std::size_t begin, std::size_t end) {
    return planar::table().measure64(code, indices, begin, end);
}
Sums write(const Golomb& code, const std::int32_t* indices, std::size_t begin, std::size_t end, const planar::Planes& planes) {
    return planar::table().write32(code, indices, begin, end, planes);
}
Sums write(const Golomb& code, const std::int64_t* indices, std::size_t begin, std::size_t end, const planar::Planes& planes) {
    return planar::table().write64(code, indices, begin, end, planes);
}
std::int64_t read(const Golomb& code, const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, std::int32_t* indices) {
    return planar::table().read32(code, data, size, count, n, indices);
}
std::int64_t read(const Golomb& code, const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, std::int64_t* indices) {
    return planar::table().read64(code, data, size, count, n, indices);
}

// How a set is cut for the threads, and where each part begins in the first and in the last plane.
struct Cut {
    std::vector<Sums> starts;  // one more than there are parts
    std::size_t parts() const { return starts.size() - 1; }
    std::size_t bytes(std::size_t count, const Golomb& code) const {
        return bytes_of(starts.back().unary) + bytes_of(std::uint64_t{count} * code.width) + bytes_of(starts.back().last);
    }
};

template <class I>
Cut cut(const Golomb& code, const I* indices, std::size_t count) {
    Cut c{std::vector<Sums>(parts_of(count) + 1)};
    each_part(count, c.parts(), [&](std::size_t p, std::size_t begin, std::size_t end) { c.starts[p + 1] = measure(code, indices, begin, end); });
    for (std::size_t p = 0; p < c.parts(); ++p) {
        c.starts[p + 1].unary += c.starts[p].unary;
        c.starts[p + 1].last += c.starts[p].last;
    }
    return c;
}

// A part of a plane, written apart from the others because two parts may share a byte.
struct Strip {
    std::uint64_t begin = 0, end = 0;  // bits of the plane
    std::unique_ptr<std::uint8_t[]> data;
    Strip() = default;
    Strip(std::uint64_t from, std::uint64_t to) : begin(from), end(to), data(new std::uint8_t[bytes_of(to) - from / 8 + 8]) { data[0] = 0; }
    unsigned bit() const { return static_cast<unsigned>(begin % 8); }
    // All bytes but the first.
    void place(std::uint8_t* plane) const {
        const std::size_t at = begin / 8, size = bytes_of(end) - at;
        if (size > 1) std::memcpy(plane + at + 1, data.get() + 1, size - 1);
    }
    // The first byte, which belongs to the strip before as well unless this one begins it.
    void join(std::uint8_t* plane) const {
        if (begin == end) return;
        std::uint8_t& shared = plane[begin / 8];
        shared = begin % 8 ? static_cast<std::uint8_t>(shared | data[0]) : data[0];
    }
};

// One part needs no measuring beforehand: its planes are written apart, and then laid one after another.
template <class I>
std::size_t encode_alone(const Golomb& code, const I* indices, std::size_t count, std::uint8_t* out, std::size_t capacity) {
    const std::uint64_t gaps = count ? static_cast<std::uint64_t>(indices[count - 1]) + 1 - count : 0;
    // Rounding down every quotient takes less than one from each: the first plane is at most `count` bits shorter than this.
    const std::uint64_t most = count + gaps / code.m;
    if (most / 8 > std::uint64_t{capacity} + count / 8 + 1) no_room();
    const Strip unary(0, most), rests(0, std::uint64_t{count} * code.width), last(0, count);
    const Sums sums = write(code, indices, 0, count, {unary.data.get(), rests.data.get(), last.data.get(), 0, 0, 0});
    const std::size_t sizes[3] = {bytes_of(sums.unary), bytes_of(rests.end), bytes_of(sums.last)};
    if (sizes[0] + sizes[1] + sizes[2] > capacity) no_room();
    std::uint8_t* at = out;
    for (const auto& [strip, size] : {std::pair(&unary, sizes[0]), std::pair(&rests, sizes[1]), std::pair(&last, sizes[2])}) {
        if (size) std::memcpy(at, strip->data.get(), size);
        at += size;
    }
    return static_cast<std::size_t>(at - out);
}

}  // namespace

template <class I>
std::size_t golomb_encode(const I* indices, std::size_t count, std::uint64_t m, std::uint8_t* out, std::size_t capacity) {
    expect_increasing(indices, count);
    const Golomb code(m);
    if (parts_of(count) == 1) return encode_alone(code, indices, count, out, capacity);
    const Cut c = cut(code, indices, count);
    const std::size_t total = c.bytes(count, code);
    if (total > capacity) no_room();
    std::uint8_t* planes[3] = {out, out + bytes_of(c.starts.back().unary), nullptr};
    planes[2] = planes[1] + bytes_of(std::uint64_t{count} * code.width);
    std::vector<Strip> strips[3];
    for (auto& list : strips) list.resize(c.parts());
    each_part(count, c.parts(), [&](std::size_t p, std::size_t begin, std::size_t end) {
        const Sums from = c.starts[p], to = c.starts[p + 1];
        strips[0][p] = Strip(from.unary, to.unary);
        strips[1][p] = Strip(std::uint64_t{begin} * code.width, std::uint64_t{end} * code.width);
        strips[2][p] = Strip(from.last, to.last);
        write(code, indices, begin, end,
              {strips[0][p].data.get(), strips[1][p].data.get(), strips[2][p].data.get(), strips[0][p].bit(), strips[1][p].bit(), strips[2][p].bit()});
        for (int k = 0; k < 3; ++k) strips[k][p].place(planes[k]);
    });
    for (int k = 0; k < 3; ++k)
        for (const Strip& strip : strips[k]) strip.join(planes[k]);
    return total;
}

template <class I>
std::size_t golomb_size(const I* indices, std::size_t count, std::uint64_t m) {
    expect_increasing(indices, count);
    const Golomb code(m);
    return cut(code, indices, count).bytes(count, code);
}

template <class I>
std::size_t golomb_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, std::uint64_t m, I* indices) {
    const std::int64_t used = read(Golomb(m), data, size, count, n, indices);
    if (used == planar::ended) ended();
    if (used == planar::outside) outside();
    if (used == planar::unpadded) throw std::invalid_argument("the padding of the index set is not zero");
    return static_cast<std::size_t>(used);
}

#define INSTANTIATE(I) \
    template std::size_t golomb_encode<I>(const I*, std::size_t, std::uint64_t, std::uint8_t*, std::size_t); \
    template std::size_t golomb_size<I>(const I*, std::size_t, std::uint64_t); \
    template std::size_t golomb_decode<I>(const std::uint8_t*, std::size_t, std::size_t, std::uint64_t, std::uint64_t, I*);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
