// Sequential codes for small integer levels: the published Sparse Dithering code and an adaptive arithmetic code.
// Both are bit streams, least significant bit of a byte first; readers see zeros beyond the end, and zero bytes there are dropped.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tersegrad {

inline constexpr std::size_t kMostLevels = std::size_t{1} << 30;  // the arithmetic coder counts below that

// Appends bits to a byte vector.
class BitSink {
  public:
    explicit BitSink(std::vector<std::uint8_t>& bytes) : bytes_(bytes) {}
    void put(bool bit) {
        held_ |= static_cast<std::uint64_t>(bit) << fill_;
        if (++fill_ == 64) flush();
    }
    void put(std::uint64_t value, int width) {
        for (int k = 0; k < width; ++k) put((value >> k) & 1);
    }
    void ones(std::size_t count) {
        if (count >= 64) {
            for (; fill_ & 7; --count) put(true);
            flush();
            bytes_.insert(bytes_.end(), count / 8, 0xff);
            count %= 8;
        }
        for (; count; --count) put(true);
    }
    void finish() {  // the last byte is padded with zeros
        fill_ = (fill_ + 7) & ~7u;
        flush();
    }

  private:
    void flush() {
        for (unsigned k = 0; k < fill_; k += 8) bytes_.push_back(static_cast<std::uint8_t>(held_ >> k));
        held_ = 0;
        fill_ = 0;
    }
    std::vector<std::uint8_t>& bytes_;
    std::uint64_t held_ = 0;
    unsigned fill_ = 0;
};

// Reads bits; zeros beyond the end.
class BitSource {
  public:
    BitSource(const std::uint8_t* bytes, std::size_t size) : bytes_(bytes), bits_(size * 8) {}
    bool get() {
        const std::size_t k = next_++;
        return k < bits_ && ((bytes_[k >> 3] >> (k & 7)) & 1);
    }
    std::uint64_t get(int width) {
        std::uint64_t value = 0;
        for (int k = 0; k < width; ++k) value |= static_cast<std::uint64_t>(get()) << k;
        return value;
    }
    std::size_t position() const { return next_; }

  private:
    const std::uint8_t* bytes_;
    std::size_t bits_, next_ = 0;
};

// Binary arithmetic coder with 32-bit registers (Witten, Neal, Cleary 1987). A symbol has probability zeros / total of being 0;
// total < 2^30. Certain symbols (zeros == 0 or zeros == total) cost nothing and touch nothing.
class ArithmeticEncoder {
  public:
    explicit ArithmeticEncoder(BitSink& sink) : sink_(sink) {}
    void put(bool bit, std::uint32_t zeros, std::uint32_t total);
    void finish();

  private:
    void emit(bool bit);
    BitSink& sink_;
    std::uint32_t low_ = 0, high_ = 0xffffffffu;
    std::uint64_t pending_ = 0;
};

class ArithmeticDecoder {
  public:
    explicit ArithmeticDecoder(BitSource& source);
    bool get(std::uint32_t zeros, std::uint32_t total);

  private:
    BitSource& source_;
    std::uint32_t low_ = 0, high_ = 0xffffffffu, value_ = 0;
};

// Levels as one bit stream. Bit 0 is the form:
// 0, the published code: count of zeros, unary magnitudes, signs, enumerated zero positions (arithmetic-coded, within 2 bits);
// 1, adaptive: zero flag, sign and unary magnitude bits, arithmetic-coded with counts so far, no tables.
enum class LevelForm : int { paper = 0, adaptive = 1 };
// Bits of the magnitudes in the published form.
std::uint64_t unary_bits(const std::int32_t* levels, std::size_t count);

std::vector<std::uint8_t> levels_encode(const std::int32_t* levels, std::size_t count, LevelForm form);
bool levels_decode(const std::uint8_t* data, std::size_t size, std::int32_t* levels, std::size_t count);

}  // namespace tersegrad
