// The rANS block of a segment without dither.
#pragma once
#include "trellis_parts.hpp"

namespace tersegrad::trellis {
namespace {

using Bytes = std::vector<std::uint8_t>;

void fit(Bytes& bytes, std::size_t n) {
    if (bytes.size() < n) bytes.resize(n);
}

// Which classes code a block: of each symbol the number of its class; and which of them are still, and have one table instead of two.
struct Classes {
    const std::uint8_t* numbers = nullptr;  // null: there is one class
    std::vector<std::uint8_t> still = {0};
};

// A rANS block of symbols that are stored as n + 2 window, so that the lowest bit names the table within a class. They are changed.
class Coder {
public:
    Coder(std::uint8_t* u, std::size_t n, int window, int chunk, const Classes& classes)
        : u_(u), n_(n), alphabet_(2 * window), chunk_(chunk), layout_(n, alphabet_, chunk), classes_(classes) {
        for (std::size_t c = 0; c < classes.still.size(); ++c)
            for (int z0 = 0; z0 < 2 - classes.still[c]; ++z0) rows_.push_back(c * static_cast<std::size_t>(2 * alphabet_) + static_cast<std::size_t>(z0));
    }

    // Appends the block to `out`; what is left of it at the end of `words` follows, and its length is returned.
    std::size_t write(Bytes& out, Bytes& words) {
        const std::size_t most = rans::max_message(n_, alphabet_), begin = out.size();
        const auto width = static_cast<std::size_t>(alphabet_), cells = 2 * width * classes_.still.size();
        const int number = static_cast<int>(rows_.size());
        std::vector<std::uint64_t> found(cells), counts(rows_.size() * width);
        const bool sampled = !classes_.numbers && rans::worth_sampling(n_, alphabet_, 2);
        rans::histogram(u_, n_, 2 * alphabet_, contexts(0), static_cast<int>(classes_.still.size()), sampled, found.data());
        for (std::size_t k = 0; k < counts.size(); ++k) counts[k] = found[rows_[k / width] + 2 * (k % width)];
        const Bytes tables = rans::write_tables(counts.data(), alphabet_, number);
        if (1 + tables.size() < most) {
            out.push_back(static_cast<std::uint8_t>(chunk_));
            out.insert(out.end(), tables.begin(), tables.end());
            std::vector<std::uint16_t> frequencies(counts.size());
            rans::read_tables(tables.data(), tables.size(), alphabet_, number, frequencies.data());
            if (std::none_of(frequencies.begin(), frequencies.end(), [](auto f) { return f && f < rans::kTotal; })) return 0;
            const std::size_t left = chunks(frequencies, out, words);
            if (out.size() - begin + left < most) return left;
        }
        out.resize(begin);
        store_raw(out);
        return 0;
    }

private:
    rans::Contexts contexts(std::size_t at) const { return {classes_.numbers ? classes_.numbers + at : nullptr, false}; }

    // Entry n + 2 window of a class is entry (n >> 1) + window of its table for that parity.
    rans::EncodeModel model(const std::vector<std::uint16_t>& frequencies) const {
        const auto width = static_cast<std::size_t>(alphabet_);
        std::vector<std::uint16_t> joined(2 * width * classes_.still.size());
        for (std::size_t k = 0; k < frequencies.size(); ++k) joined[rows_[k / width] + 2 * (k % width)] = frequencies[k];
        return {joined.data(), 2 * alphabet_, static_cast<int>(classes_.still.size()), true};
    }

    std::size_t chunks(const std::vector<std::uint16_t>& frequencies, Bytes& out, Bytes& words) {
        const rans::EncodeModel coder = model(frequencies);
        const rans::Pieces& pieces = layout_.chunks;
        const std::size_t count = pieces.count(), table = out.size();
        out.resize(table + 4 * count);
        fit(words, rans::scratch_bytes(n_));
        for (std::size_t c = 0; c < count; ++c) {
            std::uint8_t* const symbols = u_ + pieces.start(c);
            const std::size_t length = pieces.length(c);
            for (std::size_t i = layout_.coded(length); i < length; ++i) symbols[i] >>= 1;  // these are not coded, and have no tables
        }
        std::uint8_t* const end = words.data() + words.size();
        const std::uint8_t* const at = rans::encode_backwards(coder, layout_, u_, 0, contexts(0), out.data() + table, end);
        done_ = true;
        return static_cast<std::size_t>(end - at);
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
    const Classes& classes_;
    std::vector<std::size_t> rows_;  // where each table begins among the entries of all classes, every other one of which is its own
    bool done_ = false;
};

}  // namespace
}  // namespace tersegrad::trellis
