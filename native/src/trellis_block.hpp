// The rANS block of a segment without dither.
#pragma once
#include "trellis_parts.hpp"

namespace tersegrad::trellis {
namespace {

using Bytes = std::vector<std::uint8_t>;

void fit(Bytes& bytes, std::size_t n) {
    if (bytes.size() < n) bytes.resize(n);
}

// A rANS block of symbols that are stored as n + 2 window, so that the lowest bit names the table. They are changed.
class Coder {
public:
    Coder(std::uint8_t* u, std::size_t n, int window, int chunk) : u_(u), n_(n), alphabet_(2 * window), chunk_(chunk), layout_(n, alphabet_, chunk) {}

    void write(Bytes& out, Bytes& words) {
        const std::size_t most = rans::max_message(n_, alphabet_), begin = out.size();
        const auto cells = static_cast<std::size_t>(2 * alphabet_);
        std::vector<std::uint64_t> found(cells), counts(cells);
        rans::histogram(u_, n_, 2 * alphabet_, {}, 1, rans::worth_sampling(n_, alphabet_, 2), found.data());
        for (std::size_t k = 0; k < cells; ++k) counts[k % 2 * cells / 2 + k / 2] = found[k];
        const Bytes tables = rans::write_tables(counts.data(), alphabet_, 2);
        if (1 + tables.size() < most) {
            out.push_back(static_cast<std::uint8_t>(chunk_));
            out.insert(out.end(), tables.begin(), tables.end());
            std::vector<std::uint16_t> frequencies(cells);
            rans::read_tables(tables.data(), tables.size(), alphabet_, 2, frequencies.data());
            if (std::none_of(frequencies.begin(), frequencies.end(), [](auto f) { return f && f < rans::kTotal; })) return;
            chunks(frequencies, out, words);
            if (out.size() - begin < most) return;
        }
        out.resize(begin);
        store_raw(out);
    }

private:
    // Entry n + 2 window of one table is entry (n >> 1) + window of the table of its parity.
    rans::EncodeModel model(const std::vector<std::uint16_t>& frequencies) const {
        const std::size_t half = frequencies.size() / 2;
        std::vector<std::uint16_t> joined(frequencies.size());
        for (std::size_t k = 0; k < joined.size(); ++k) joined[k] = frequencies[k % 2 * half + k / 2];
        rans::EncodeModel model(joined.data(), static_cast<int>(joined.size()), 1);
        rans::EncodeTable& table = model.tables[0];
        std::uint32_t start[2] = {0, 0};
        for (std::size_t k = 0; k < joined.size(); ++k) {
            if (joined[k]) table.packed[k] = joined[k] | start[k % 2] << 16;
            start[k % 2] += joined[k];
            if (k < 64)
                for (int plane = 0; plane < 4; ++plane) table.planes[plane][k] = static_cast<std::uint8_t>(table.packed[k] >> 8 * plane);
        }
        return model;
    }

    void chunks(const std::vector<std::uint16_t>& frequencies, Bytes& out, Bytes& words) {
        const rans::EncodeModel coder = model(frequencies);
        const rans::Pieces& pieces = layout_.chunks;
        const std::size_t count = pieces.count(), table = out.size(), room = rans::scratch_bytes(n_);
        out.resize(table + 4 * count);
        fit(words, room);
        // The last chunk first, each in front of those before: so they stand in order and next to each other.
        std::uint8_t *const end = words.data() + room, *at = end;
        for (std::size_t c = count; c-- > 0;) {
            std::uint32_t states[rans::kLanes];
            const std::size_t length = pieces.length(c);
            std::uint8_t* const symbols = u_ + pieces.start(c);
            for (std::size_t i = layout_.coded(length); i < length; ++i) symbols[i] >>= 1;  // these are not coded, and have no tables
            std::uint8_t* const first = rans::encode_chunk(coder, layout_, symbols, length, 0, {}, at, states);
            const auto number = static_cast<std::uint32_t>((at - first) / 2);
            std::memcpy(out.data() + table + 4 * c, &number, 4);
            at = first - 4 * layout_.lanes;
            std::memcpy(at, states, 4 * layout_.lanes);
        }
        out.insert(out.end(), at, end);
        done_ = true;
    }

    // The symbols themselves; some are without their lowest bit already.
    void store_raw(Bytes& out) {
        Bytes symbols(n_);
        for (std::size_t c = 0; c < layout_.chunks.count(); ++c) {
            const std::size_t from = layout_.chunks.start(c), coded = layout_.coded(layout_.chunks.length(c));
            for (std::size_t i = 0; i < layout_.chunks.length(c); ++i) symbols[from + i] = done_ && i >= coded ? u_[from + i] : u_[from + i] >> 1;
        }
        const auto bits = rans::raw_bits(alphabet_);
        out.push_back(rans::kRaw);
        std::uint64_t held = 0;
        std::size_t have = 0;
        for (const std::uint8_t s : symbols) {
            held |= static_cast<std::uint64_t>(s) << have;
            for (have += bits; have >= 8; have -= 8, held >>= 8) out.push_back(static_cast<std::uint8_t>(held));
        }
        if (have) out.push_back(static_cast<std::uint8_t>(held));
    }

    std::uint8_t* u_;
    std::size_t n_;
    int alphabet_, chunk_;
    rans::Layout layout_;
    bool done_ = false;
};

}  // namespace
}  // namespace tersegrad::trellis
