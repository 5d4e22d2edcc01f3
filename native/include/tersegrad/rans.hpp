// Interleaved rANS: static tables of 12 bits, 64 lanes (fewer in small blocks), 32-bit states in [2^16, 2^32), 16-bit words.
//
// Symbol i of a chunk belongs to lane i mod lanes and step i div lanes. The last symbols of a chunk, as many per lane as fit into 16 bits,
// are not coded: first states are 2^16 plus these symbols. Encoding runs backwards from there, decoding forwards:
//   encode (f, start):  if X >> 20 >= f: emit X & 0xffff, X >>= 16;   X = (X div f << 12) + X mod f + start
//   decode:             slot = X & 4095; X = f * (X >> 12) + slot - start;   if X < 2^16: X = X << 16 | next word
// The words of a step are in ascending order of lanes. A symbol with f = 4096 leaves the state alone and costs nothing.
// Every instruction set writes the same bytes. Wire format: spec, "rANS".
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tersegrad::rans {

inline constexpr int kLanes = 64;
inline constexpr int kPrecision = 12;
inline constexpr std::uint32_t kTotal = 1u << kPrecision;
inline constexpr std::uint32_t kFirst = 1u << 16;        // the smallest state
inline constexpr int kShortestChunk = 14, kLongestChunk = 18;  // log2
inline constexpr std::size_t kBlock = 4096;              // histograms sample whole blocks,
inline constexpr std::size_t kStride = 8;                // one in eight
inline constexpr int kMaxQ = 96;                         // probabilities travel as eighths of a bit, at most 12 bits

inline constexpr std::size_t kBad = ~std::size_t{0};     // no such length

// ---- chunks ----
// Pieces of one size, except the last, which takes the rest: from half a piece to one and a half.
struct Pieces {
    std::size_t n, size;
    std::size_t count() const { return n < size ? (n ? 1 : 0) : (n + size / 2) / size; }
    std::size_t start(std::size_t k) const { return k * size; }
    std::size_t length(std::size_t k) const { return k + 1 == count() ? n - k * size : size; }
    std::size_t longest() const { return n < size + size / 2 ? n : size + size / 2; }
};

std::size_t raw_bits(int alphabet);  // ceil(log2 alphabet)

// How the n symbols of a block lie in chunks and lanes.
struct Layout {
    Layout(std::size_t n, int alphabet, int chunk);
    Pieces chunks;
    std::size_t lanes;  // a power of two
    std::size_t rows;   // symbols of every lane that are not coded, the same number in all chunks
    int width;          // bits of such a symbol
    int alphabet;
    std::size_t coded(std::size_t length) const { return length - rows * lanes; }
};

// Which table codes which symbol: one number per symbol, one per step of 64 symbols, or table 0 throughout.
struct Contexts {
    const std::uint8_t* data = nullptr;
    bool per_step = false;
    [[gnu::always_inline]] Contexts at(std::size_t symbol) const {  // symbol: a multiple of 64
        return data ? Contexts{data + (per_step ? symbol / kLanes : symbol), per_step} : *this;
    }
    [[gnu::always_inline]] int of(std::size_t symbol) const { return data ? data[per_step ? symbol / kLanes : symbol] : 0; }
};

std::uint8_t largest(const std::uint8_t* values, std::size_t n);  // 0 if there are none

// ---- histograms: counts[context * alphabet + symbol]. False if a symbol lies outside the alphabet. ----
bool worth_sampling(std::size_t n, int alphabet, int contexts);
bool histogram(const std::uint8_t* symbols, std::size_t n, int alphabet, Contexts, int contexts, bool sample, std::uint64_t* counts);
// As a sampled histogram of the symbols from `first` on (those below do not occur), but where the sampled blocks show at least half of the
// alphabet, every symbol is taken to occur: that spares a look at all the others. Exact where sampling is not worth it.
void histogram_dense(const std::uint8_t* symbols, std::size_t n, int first, int alphabet, std::uint64_t* counts);

// ---- tables: frequencies[context * alphabet + symbol], each table sums to 4096 (an unused one: symbol 0 alone) ----
std::vector<std::uint8_t> write_tables(const std::uint64_t* counts, int alphabet, int contexts);
// Returns the bytes read, or kBad if they are malformed.
std::size_t read_tables(const std::uint8_t* data, std::size_t size, int alphabet, int contexts, std::uint16_t* frequencies);

// ---- coding one chunk ----
struct alignas(64) EncodeTable {
    std::uint32_t packed[256];  // f | start << 16
    float reciprocal[256];      // a little below 1/f, so that the estimated quotient is right or one too small
    std::uint8_t planes[4][64]; // the bytes of the first 64 entries of `packed`, for byte shuffles
};

struct EncodeModel {
    // `paired`: even and odd symbols have a table each, with frequencies that sum to 4096 or to nothing.
    EncodeModel(const std::uint16_t* frequencies, int alphabet, int contexts, bool paired = false);
    int alphabet, contexts;
    int shift;                        // where 2^shift >= alphabet and contexts << shift <= 64, else -1
    std::vector<EncodeTable> tables;  // one per context
    EncodeTable flat;                 // shift >= 0: all tables in one, at index context << shift | symbol
    std::vector<std::uint32_t> packed; // alphabet <= 32: those entries of all tables, at index context << 5 | symbol
    std::vector<std::uint8_t> silent;  // by context: 1 where the table leaves no choice, so that its symbols cost nothing
};

// Byte tables for the permutes of AVX-512.
struct alignas(64) Images {
    std::uint8_t coarse[64];                  // lower bound of the symbol, by slot >> 6
    std::uint8_t start_low[64], start_high[64];
    std::uint8_t scaled_low[64], scaled_high[64];  // f << 4; 0 for f = 4096
};

struct DecodeModel {
    DecodeModel(const std::uint16_t* frequencies, int alphabet, int contexts, bool per_symbol, const Layout&);
    int alphabet, contexts;
    bool slots_needed;                 // by the instruction set that was in use at construction
    std::vector<std::uint16_t> starts; // contexts * 257
    std::vector<std::uint32_t> slots;  // contexts * 4096: symbol | (f-1) << 8 | (slot - start) << 20
    std::vector<std::int16_t> only;    // by context: the symbol of a table that leaves no choice, else -1
    int shift;                         // as in EncodeModel
    int levels;                        // probes of the binary search that follows the coarse table
    bool full;                         // some table holds a symbol with f = 4096
    std::vector<Images> images;        // one per context, or one flat for contexts per symbol
};

// Memory that the caller will need soon, to be fetched into the second-level cache meanwhile. A hint, at most 2 lines per step.
struct Ahead {
    const void *begin = nullptr, *end = nullptr;
};

// Codes a chunk of n symbols, which are stored with `first` added; the words end at `end` and the first is returned. Needs 2n bytes of
// room below `end`, plus 64.
std::uint8_t* encode_chunk(const EncodeModel&, const Layout&, const std::uint8_t* symbols, std::size_t n, int first, Contexts, std::uint8_t* end,
                           std::uint32_t states[kLanes], Ahead ahead = {});
inline constexpr std::size_t kSlack = 64;

// Two chunks of one block at once, so that they hide each other's latency. `words`: where they end, then where they begin.
struct EncodeJob {
    const std::uint8_t* symbols;
    std::size_t n;
    Contexts contexts;
    std::uint8_t* words;
    std::uint32_t* states;  // kLanes of them
};
void encode_two_chunks(const EncodeModel&, const Layout&, int first, EncodeJob&, EncodeJob&, Ahead ahead = {});

struct DecodeJob {
    const Layout* layout;
    const std::uint8_t* states;  // one uint32 per lane, little-endian, any alignment
    const std::uint8_t* words;   // any alignment
    std::size_t word_count;
    std::uint8_t* symbols;
    std::size_t n;  // symbols, those included that are not coded
    Contexts contexts;
    std::size_t beyond = 0;  // bytes behind the words that may be read too
    bool stream = false;     // symbols are written around the caches
};

// False if the words do not lead every lane back to a first state. Two chunks at once hide each other's latency.
bool decode_chunk(const DecodeModel&, const DecodeJob&);
bool decode_two_chunks(const DecodeModel&, const DecodeJob&, const DecodeJob&);

// ---- messages ----
std::size_t max_message(std::size_t n, int alphabet);
// Returns the length (at most max_message), or kBad if a symbol lies outside the alphabet.
std::size_t encode_message(const std::uint8_t* symbols, std::size_t n, int alphabet, Contexts, int contexts, bool sample, int chunk, std::uint8_t* out);
// The same message in two pieces, with given counts, on one thread, and without a copy of its words: `head` bytes in `head`, which has room
// for most_head, then `size` bytes at `body`, within scratch of scratch_bytes. Symbols are stored with `first` added. `Counts` has rows for the
// contexts in `mask` only, in ascending order.
struct TwoPieces {
    std::size_t head = 0;
    const std::uint8_t* body = nullptr;
    std::size_t size = 0;
};
std::size_t most_head(std::size_t n, int contexts);
std::size_t scratch_bytes(std::size_t n);
// All chunks, words and states, in front of `end`, within scratch of scratch_bytes; how many words each has at `numbers`. Where they begin.
std::uint8_t* encode_backwards(const EncodeModel&, const Layout&, const std::uint8_t* symbols, int first, Contexts, std::uint8_t* numbers,
                               std::uint8_t* end, Ahead ahead = {});
TwoPieces encode_in_pieces(const std::uint8_t* symbols, std::size_t n, int first, int alphabet, Contexts, unsigned mask, const std::uint64_t* counts,
                           int chunk, std::uint8_t* head, std::uint8_t* scratch, std::size_t room, Ahead ahead = {});
// A coded message taken apart; `jobs`, which refer to `layout`, are empty where the tables leave no choice. nullptr: malformed.

struct Opened {
    explicit Opened(const Layout& l) : layout(l) {}
    Layout layout;
    std::vector<std::uint16_t> frequencies;
    std::vector<DecodeJob> jobs;
    std::size_t size = 0;
};
inline constexpr std::uint8_t kRaw = 1;  // the first byte of a raw message; that of a coded one is its chunk's log2
inline bool is_chunk(int chunk) { return chunk >= kShortestChunk && chunk <= kLongestChunk; }
std::unique_ptr<Opened> open_message(const std::uint8_t* data, std::size_t size, std::size_t n, int alphabet, Contexts, int contexts,
                                     std::uint8_t* symbols);
// Returns the bytes read, or kBad if they are malformed. Contexts must be below `contexts`. `stream`: around the caches where that is possible.
std::size_t decode_message(const std::uint8_t* data, std::size_t size, std::size_t n, int alphabet, Contexts, int contexts,
                           std::uint8_t* symbols, bool stream = false);

// ---- between the files of this topic ----
namespace detail {

struct EncodeRun {  // an encoder in flight
    const std::uint8_t* symbols;
    std::size_t steps;          // whole steps that are left, the last of which is next
    Contexts contexts;
    std::uint8_t* words;        // the first one so far
    std::uint32_t* states;
};

struct Cursor {  // a decoder in flight
    std::uint32_t states[kLanes];
    const std::uint8_t* words;
    const std::uint8_t* limit;  // a step may start only while words <= limit: 64 words and a full load then stay in bounds
    std::uint8_t* symbols;
    std::size_t step, steps;    // whole steps only
    Contexts contexts;
    bool stream;                // write symbols around the caches; they are aligned to 64 bytes
};
inline constexpr std::size_t kReach = 2 * (kLanes + 32);  // bytes that a step may touch beyond its first word

bool valid_states(const DecodeJob&);

// A chunk being decoded. Near the end of the memory that holds its words it moves to a padded copy of them, so that the fast steps never look beyond.
class Chunk {
public:
    explicit Chunk(const DecodeJob& job);
    Chunk(const Chunk&) = delete;
    bool extend();  // to be called when fast steps stop at the limit; false if the words are used up
    // Decodes the steps that are left and the symbols after them; false if the words do not lead every lane back to a first state.
    bool finish(const DecodeModel& model);

    Cursor cursor;

private:
    bool finish_raw();

    DecodeJob job_;
    const std::uint8_t* end_;
    bool padded_ = false;
    std::uint8_t tail_[3 * kReach];
};

// Table entries of one step by plain loads, for alphabets beyond the registers: a hardware gather takes twice as long.
// Done some steps ahead of their use, so that the stores have landed.
[[gnu::always_inline]] inline void look_up(const EncodeModel& model, const std::uint8_t* symbols, Contexts ctx, std::uint32_t* entries) {
    const EncodeTable* tables = model.tables.data();
    if (!ctx.data || ctx.per_step) {
        const std::uint32_t* packed = tables[ctx.data ? ctx.data[0] : 0].packed;
#pragma GCC unroll 8
        for (int k = 0; k < kLanes; ++k) {
            std::size_t s = symbols[k];
            asm("" : "+r"(s));  // keeps the compiler from making gathers of the loop
            entries[k] = packed[s];
        }
    } else {
#pragma GCC unroll 8
        for (int k = 0; k < kLanes; ++k) {
            std::size_t s = symbols[k];
            asm("" : "+r"(s));
            entries[k] = tables[ctx.data[k]].packed[s];
        }
    }
}
inline constexpr std::size_t kAhead = 8;  // steps


std::uint8_t* encode_steps_avx2(const EncodeModel&, const std::uint8_t*, std::size_t, Contexts, std::uint8_t*, std::uint32_t*);
// Of one run all steps that are left; of two as many as the shorter one has, or none where it would be no faster.
void encode_steps_avx512(const EncodeModel&, EncodeRun&, EncodeRun*, Ahead);
void decode_steps_avx2(const DecodeModel&, Cursor&);
void decode_steps_avx512(const DecodeModel&, Cursor&);
void decode_two_avx512(const DecodeModel&, Cursor&, Cursor&);
// Marks present[s] for every s in symbols; fast if the caller has marked most already.
void mark_present_avx2(const std::uint8_t*, std::size_t, std::uint8_t*);
void mark_present_avx512(const std::uint8_t*, std::size_t, std::uint8_t*);
// Adds to counts of up to 32 symbols, and to those of larger ones that occur; returns how many symbols it went through.
std::size_t count_avx512(const std::uint8_t*, std::size_t, int alphabet, std::uint64_t* counts);
// The same with one context per step: present[context * 256 + s].
void mark_present_steps_avx512(const std::uint8_t*, std::size_t, const std::uint8_t* contexts, std::uint8_t* present);

}  // namespace detail
}  // namespace tersegrad::rans
