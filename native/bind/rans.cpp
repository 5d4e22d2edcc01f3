#include <optional>

#include <nanobind/stl/optional.h>

#include "bind.hpp"
#include "tersegrad/rans.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

using Bytes = Array<const std::uint8_t>;
using Room = Array<std::uint8_t>;

void check_sizes(int alphabet, int contexts) {
    expect(alphabet >= 1 && alphabet <= 256, "alphabets have 1 to 256 symbols");
    expect(contexts >= 1 && contexts <= 256, "there are 1 to 256 contexts");
}

rans::Contexts check_contexts(const std::optional<Bytes>& contexts, std::size_t n, int count) {
    if (!contexts) return {};
    const bool per_step = contexts->size() != n;
    expect(!per_step || contexts->size() == (n + rans::kLanes - 1) / rans::kLanes,
           "give one context per symbol or one per step of 64 symbols");
    expect(n == 0 || rans::largest(contexts->data(), contexts->size()) < count, "a context is not below the number of contexts");
    return {contexts->data(), per_step};
}

void check_room(std::size_t have, std::size_t need) {
    expect(have >= need, "the array is too small");
}

constexpr const char* kOutside = "a symbol lies outside the alphabet";

void histogram(Bytes symbols, int alphabet, std::optional<Bytes> contexts, int num_contexts, bool sample, Array<std::int64_t> counts) {
    check_sizes(alphabet, num_contexts);
    apart(counts, symbols);
    if (contexts) apart(counts, *contexts);
    check_room(counts.size(), static_cast<std::size_t>(alphabet) * static_cast<std::size_t>(num_contexts));
    const Work work;
    const auto ctx = check_contexts(contexts, symbols.size(), num_contexts);
    const bool sampled = sample && rans::worth_sampling(symbols.size(), alphabet, num_contexts);
    if (!rans::histogram(symbols.data(), symbols.size(), alphabet, ctx, num_contexts, sampled, reinterpret_cast<std::uint64_t*>(counts.data())))
        throw std::invalid_argument(kOutside);
}

nb::bytes write_tables(Array<const std::int64_t> counts, int alphabet, int num_contexts) {
    check_sizes(alphabet, num_contexts);
    check_room(counts.size(), static_cast<std::size_t>(alphabet) * static_cast<std::size_t>(num_contexts));
    std::uint64_t total = 0;
    for (std::size_t k = 0; k < counts.size(); ++k) {
        const std::int64_t count = counts.data()[k];
        expect(count >= 0 && count >> 47 == 0 && (total += static_cast<std::uint64_t>(count)) >> 47 == 0,
               "counts must be at least 0 and sum to less than 2^47");
    }
    const auto bytes = rans::write_tables(reinterpret_cast<const std::uint64_t*>(counts.data()), alphabet, num_contexts);
    return nb::bytes(bytes.data(), bytes.size());
}

std::int64_t read_tables(Bytes data, int alphabet, int num_contexts, Array<std::int16_t> frequencies) {
    check_sizes(alphabet, num_contexts);
    apart(frequencies, data);
    check_room(frequencies.size(), static_cast<std::size_t>(alphabet) * static_cast<std::size_t>(num_contexts));
    const Work work;
    const auto used = rans::read_tables(data.data(), data.size(), alphabet, num_contexts, reinterpret_cast<std::uint16_t*>(frequencies.data()));
    return used == rans::kBad ? -1 : static_cast<std::int64_t>(used);
}

std::int64_t encode(Bytes symbols, int alphabet, std::optional<Bytes> contexts, int num_contexts, bool sample, int chunk, Room out) {
    check_sizes(alphabet, num_contexts);
    expect(rans::is_chunk(chunk), "chunks have 2^14 to 2^18 symbols");
    apart(out, symbols);
    if (contexts) apart(out, *contexts);
    check_room(out.size(), rans::max_message(symbols.size(), alphabet));
    const Work work;
    const auto ctx = check_contexts(contexts, symbols.size(), num_contexts);
    const auto used = rans::encode_message(symbols.data(), symbols.size(), alphabet, ctx, num_contexts, sample, chunk, out.data());
    if (used == rans::kBad) throw std::invalid_argument(kOutside);
    return static_cast<std::int64_t>(used);
}

std::int64_t decode(Bytes data, int alphabet, std::optional<Bytes> contexts, int num_contexts, Room symbols) {
    check_sizes(alphabet, num_contexts);
    apart(symbols, data);
    if (contexts) apart(symbols, *contexts);
    const Work work;
    const auto ctx = check_contexts(contexts, symbols.size(), num_contexts);
    const auto used = rans::decode_message(data.data(), data.size(), symbols.size(), alphabet, ctx, num_contexts, symbols.data());
    return used == rans::kBad ? -1 : static_cast<std::int64_t>(used);
}

}  // namespace

static const bind::Registrar rans_functions([](nb::module_& m) {
    m.def("rans_histogram", &histogram, nb::arg("symbols"), nb::arg("alphabet"), nb::arg("contexts").none(), nb::arg("num_contexts"),
          nb::arg("sample"), nb::arg("counts"));
    m.def("rans_write_tables", &write_tables);
    m.def("rans_read_tables", &read_tables);
    m.def("rans_encode", &encode, nb::arg("symbols"), nb::arg("alphabet"), nb::arg("contexts").none(), nb::arg("num_contexts"),
          nb::arg("sample"), nb::arg("chunk"), nb::arg("out"));
    m.def("rans_decode", &decode, nb::arg("data"), nb::arg("alphabet"), nb::arg("contexts").none(), nb::arg("num_contexts"), nb::arg("symbols"));
});
