// Probability tables: from counts to eighths of a bit, to bytes, and back to frequencies; integers only.
#include <algorithm>
#include <bit>
#include <utility>

#include "tersegrad/rans.hpp"

namespace tersegrad::rans {
namespace {

// ceil(2^16 * 2^((k + 1/2) / 8)): ratios from here on round up to the next eighth of a bit.
constexpr std::uint64_t kThreshold[8] = {68438, 74632, 81387, 88753, 96786, 105546, 115098, 125515};
// round(2^24 * 2^(-k/8))
constexpr std::uint64_t kWeight[8] = {16777216, 15384775, 14107901, 12937002, 11863283, 10878679, 9975792, 9147842};
constexpr int kMaxRice = 5;

class BitWriter {
public:
    void put(std::uint32_t value, int bits) {
        for (int k = 0; k < bits; ++k) {
            if (used_ == 0) bytes.push_back(0);
            bytes.back() |= static_cast<std::uint8_t>((value >> k & 1) << used_);
            used_ = (used_ + 1) & 7;
        }
    }
    void gamma(std::uint32_t value) {
        const int extra = std::bit_width(value) - 1;
        put(0, extra);
        put(1, 1);
        put(value, extra);
    }
    void rice(std::uint32_t value, int k) {
        for (std::uint32_t q = value >> k; q; --q) put(1, 1);
        put(0, 1);
        put(value, k);
    }
    std::vector<std::uint8_t> bytes;

private:
    int used_ = 0;
};

class BitReader {
public:
    BitReader(const std::uint8_t* data, std::size_t size) : data_(data), bits_(size * 8) {}
    std::uint32_t get(int bits) {
        std::uint32_t value = 0;
        for (int k = 0; k < bits; ++k) value |= bit() << k;
        return value;
    }
    std::uint32_t gamma(std::uint32_t most) {  // 0 if larger than `most`
        int extra = 0;
        while (ok && extra <= 9 && !bit()) ++extra;
        if (!ok || extra > 9) return 0;
        const std::uint32_t value = 1u << extra | get(extra);
        return ok && value <= most ? value : 0;
    }
    std::uint32_t bit() {
        if (at_ >= bits_) {
            ok = false;
            return 0;
        }
        const std::uint32_t value = data_[at_ >> 3] >> (at_ & 7) & 1;
        ++at_;
        return value;
    }
    bool finish() {  // the padding must be zero
        while (at_ & 7)
            if (bit()) ok = false;
        return ok;
    }
    std::size_t bytes() const { return at_ / 8; }
    bool ok = true;

private:
    const std::uint8_t* data_;
    std::size_t bits_, at_ = 0;
};

int eighths(std::uint64_t count, std::uint64_t total) {
    const std::uint64_t ratio = (total << 16) / count;
    int q = 0;
    while (q < kMaxQ && kThreshold[q & 7] << (q >> 3) <= ratio) ++q;
    return q;
}

int predict(bool linear, const int* q, int k) {
    return linear && k > 1 ? std::clamp(2 * q[k - 1] - q[k - 2], 0, kMaxQ) : q[k - 1];
}

std::uint32_t zigzag(int d) { return d >= 0 ? 2u * static_cast<unsigned>(d) : 2u * static_cast<unsigned>(-d) - 1; }

void write_table(BitWriter& out, const std::uint64_t* counts, int alphabet) {
    int q[256], used = 0;
    std::uint64_t total = 0;
    for (int s = 0; s < alphabet; ++s) total += counts[s];
    for (int s = 0; s < alphabet; ++s)
        if (counts[s]) q[used++] = eighths(counts[s], total);
    out.put(used == alphabet, 1);
    if (used < alphabet) {
        bool present = false;
        for (int s = 0, first = 1; s < alphabet; first = 0, present = !present) {
            const int begin = s;
            while (s < alphabet && (counts[s] != 0) == present) ++s;
            out.gamma(static_cast<std::uint32_t>(s - begin + first));  // only the first run may be empty
        }
    }
    if (used < 2) return;
    std::size_t best = ~std::size_t{0};
    int best_linear = 0, best_k = 0;
    for (int linear = 0; linear < 2; ++linear)
        for (int k = 0; k <= kMaxRice; ++k) {
            std::size_t bits = 0;
            for (int i = 1; i < used; ++i) bits += (zigzag(q[i] - predict(linear, q, i)) >> k) + 1 + static_cast<unsigned>(k);
            if (bits < best) best = bits, best_linear = linear, best_k = k;
        }
    out.put(static_cast<std::uint32_t>(best_linear), 1);
    out.put(static_cast<std::uint32_t>(best_k), 3);
    out.put(static_cast<std::uint32_t>(q[0]), 7);
    for (int i = 1; i < used; ++i) out.rice(zigzag(q[i] - predict(best_linear, q, i)), best_k);
}

// Frequencies in proportion to the weights, at least 1 each, rounded to nearest and then moved to the exact sum
// one unit at a time where it costs least (the rule of Webster and Sainte-Lague).
void apportion(const std::uint64_t* w, int used, std::uint32_t* f) {
    std::uint64_t total = 0;
    for (int i = 0; i < used; ++i) total += w[i];
    std::int64_t sum = 0;
    for (int i = 0; i < used; ++i) {
        f[i] = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, (w[i] * 2 * kTotal + total) / (2 * total)));
        sum += f[i];
    }
    for (; sum > kTotal; --sum) {
        int best = -1;
        for (int i = 0; i < used; ++i)
            if (f[i] > 1 && (best < 0 || w[i] * (2 * f[best] - 1) < w[best] * (2 * f[i] - 1))) best = i;
        --f[best];
    }
    for (; sum < kTotal; ++sum) {
        int best = 0;
        for (int i = 1; i < used; ++i)
            if (w[i] * (2 * f[best] + 1) > w[best] * (2 * f[i] + 1)) best = i;
        ++f[best];
    }
}

bool read_table(BitReader& in, int alphabet, std::uint16_t* frequencies) {
    std::uint8_t symbols[256];
    int used = 0;
    if (in.bit()) {
        for (; used < alphabet; ++used) symbols[used] = static_cast<std::uint8_t>(used);
    } else {
        bool present = false;
        for (int s = 0, first = 1; s < alphabet; first = 0, present = !present) {
            const std::uint32_t run = in.gamma(static_cast<std::uint32_t>(alphabet - s + first));
            if (run == 0) return false;
            for (int end = s + static_cast<int>(run) - first; s < end; ++s)
                if (present) symbols[used++] = static_cast<std::uint8_t>(s);
        }
    }
    std::fill_n(frequencies, alphabet, std::uint16_t{0});
    if (used < 2) {
        if (!in.ok) return false;
        frequencies[used ? symbols[0] : 0] = kTotal;
        return true;
    }
    const bool linear = in.bit();
    const int k = static_cast<int>(in.get(3));
    if (k > kMaxRice) return false;
    int q[256];
    q[0] = static_cast<int>(in.get(7));
    for (int i = 0;;) {
        if (!in.ok || q[i] < 0 || q[i] > kMaxQ) return false;
        if (++i == used) break;
        std::uint32_t quotient = 0;
        while (quotient <= 2 * kMaxQ && in.bit()) ++quotient;
        const std::uint32_t z = quotient << k | in.get(k);
        const int half = static_cast<int>(z >> 1);
        q[i] = predict(linear, q, i) + (z & 1 ? -half - 1 : half);
    }
    std::uint64_t w[256];
    std::uint32_t f[256];
    for (int i = 0; i < used; ++i) w[i] = kWeight[q[i] & 7] >> (q[i] >> 3);
    apportion(w, used, f);
    for (int i = 0; i < used; ++i) frequencies[symbols[i]] = static_cast<std::uint16_t>(f[i]);
    return true;
}

}  // namespace

std::vector<std::uint8_t> write_tables(const std::uint64_t* counts, int alphabet, int contexts) {
    BitWriter out;
    if (alphabet > 1)
        for (int c = 0; c < contexts; ++c) write_table(out, counts + static_cast<std::size_t>(c) * alphabet, alphabet);
    return std::move(out.bytes);
}

std::size_t read_tables(const std::uint8_t* data, std::size_t size, int alphabet, int contexts, std::uint16_t* frequencies) {
    if (alphabet == 1) {
        std::fill_n(frequencies, contexts, static_cast<std::uint16_t>(kTotal));
        return 0;
    }
    BitReader in(data, size);
    for (int c = 0; c < contexts; ++c)
        if (!read_table(in, alphabet, frequencies + static_cast<std::size_t>(c) * alphabet)) return kBad;
    return in.finish() ? in.bytes() : kBad;
}

}  // namespace tersegrad::rans
