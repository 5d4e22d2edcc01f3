// Sequential codes for small integer levels: the published Sparse Dithering code and an adaptive arithmetic code.
// Both are bit streams, least significant bit of a byte first; readers see zeros beyond the end of the data.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tersegrad {

// Appends single bits to a byte vector.
class BitSink {
  public:
    explicit BitSink(std::vector<std::uint8_t>& bytes) : bytes_(bytes) {}
    void put(bool bit) {
        if ((count_ & 7) == 0) bytes_.push_back(0);
        if (bit) bytes_.back() |= static_cast<std::uint8_t>(1u << (count_ & 7));
        ++count_;
    }
    void put(std::uint64_t value, int width) {
        for (int k = 0; k < width; ++k) put((value >> k) & 1);
    }
    std::size_t count() const { return count_; }

  private:
    std::vector<std::uint8_t>& bytes_;
    std::size_t count_ = 0;
};

// Reads single bits; beyond the end it returns zeros, and `overrun` tells how many.
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
    bool exhausted() const { return next_ > bits_; }
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
// 1, adaptive: zero flag, sign and unary magnitude bits, arithmetic-coded with Krichevsky-Trofimov estimates, no tables.
enum class LevelForm : int { paper = 0, adaptive = 1 };
std::vector<std::uint8_t> levels_encode(const std::int32_t* levels, std::size_t count, LevelForm form);
bool levels_decode(const std::uint8_t* data, std::size_t size, std::int32_t* levels, std::size_t count);

}  // namespace tersegrad
