#include "tersegrad/classes.hpp"

#include <bit>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>

#include "bind.hpp"
#include "layout.hpp"
#include "tersegrad/rans.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

using Bytes = Array<const std::uint8_t>;
using Numbers = Array<const std::int64_t>;

// Sums of magnitudes, times lengths, stay within 64 bits.
constexpr std::int64_t kLongestPart = (std::int64_t{1} << 18) + (std::int64_t{1} << 17);

// The regions of n coordinates, which are these parts of the vector.
std::vector<classes::Region> regions_of(const Numbers& layout, const Numbers& parts, std::size_t n) {
    std::size_t numel = 0;
    for (std::size_t k = 0; k < layout.size(); k += 4) {
        const std::int64_t size = layout.data()[k];
        expect(size >= 0 && static_cast<std::size_t>(size) <= (std::size_t{1} << 62) - numel, "the layout does not belong to this vector");
        numel += static_cast<std::size_t>(size);
    }
    const classes::Rows rows = bind::rows_of(layout, numel);
    expect(parts.size() % 2 == 0, "a part has a start and a stop");
    std::vector<classes::Region> regions;
    std::int64_t at = 0;
    std::size_t total = 0;
    for (std::size_t k = 0; k < parts.size(); k += 2) {
        const std::int64_t start = parts.data()[k], stop = parts.data()[k + 1];
        expect(at <= start && start <= stop && stop - start <= kLongestPart && static_cast<std::uint64_t>(stop) <= numel, "the parts do not belong to this vector");
        const std::vector<classes::Region> more = classes::cut(rows, static_cast<std::size_t>(start), static_cast<std::size_t>(stop));
        regions.insert(regions.end(), more.begin(), more.end());
        total += static_cast<std::size_t>(stop - start);
        at = stop;
    }
    expect(total == n, "one context per coordinate of the parts");
    return regions;
}

// Classes to numbers of tables.
void number(std::uint8_t* contexts, std::size_t n, unsigned mask) {
    std::uint8_t names[classes::kClasses];
    for (unsigned c = 0; c < classes::kClasses; ++c) names[c] = static_cast<std::uint8_t>(std::popcount(mask & ((1u << c) - 1)));
    for (std::size_t i = 0; i < n; ++i) contexts[i] = names[contexts[i]];
}

nb::bytes choose(Bytes symbols, int window, Numbers layout, Numbers parts, Array<std::uint8_t> contexts) {
    expect(window >= 1 && window <= 127, "windows are 1 to 127");
    expect(contexts.size() == symbols.size(), "one context per symbol");
    apart(contexts, symbols, layout, parts);
    const std::vector<classes::Region> regions = regions_of(layout, parts, symbols.size());
    classes::Chosen chosen;
    bool good, found = false;
    {
        const Work work;
        good = symbols.size() == 0 || rans::largest(symbols.data(), symbols.size()) <= 2 * window;
        if (good) found = classes::choose(symbols.data(), symbols.size(), window, window, regions, contexts.data(), chosen);
        if (found) number(contexts.data(), contexts.size(), chosen.mask);
    }
    expect(good, "a symbol lies outside the window");
    return found ? nb::bytes(chosen.bytes.data(), chosen.bytes.size()) : nb::bytes("", 0);
}

std::pair<int, std::int64_t> read(Bytes data, Numbers layout, Numbers parts, Array<std::uint8_t> contexts) {
    apart(contexts, data, layout, parts);
    const std::vector<classes::Region> regions = regions_of(layout, parts, contexts.size());
    const Work work;
    int tables = 0;
    const std::size_t used = classes::read(data.data(), data.size(), regions, contexts.data(), tables);
    return {tables, used == rans::kBad ? -1 : static_cast<std::int64_t>(used)};
}

const bind::Registrar registrar([](nb::module_& m) {
    m.def("classes_choose", &choose);
    m.def("classes_read", &read);
});

}  // namespace
