#include "tersegrad/chunks.hpp"

#include <algorithm>

#include "bind.hpp"

using namespace tersegrad;
using namespace tersegrad::bind;

namespace {

using Numbers = Array<const std::int64_t>;

// Six numbers for each region: start, rows, cols, height, width, kept. Regions follow one another and cover [0, numel).
std::vector<chunks::Region> regions_of(const Numbers& numbers, std::size_t places, std::size_t numel) {
    expect(numbers.size() % 6 == 0, "a region has six numbers");
    std::vector<chunks::Region> regions;
    std::size_t at = 0, kept = 0;
    for (std::size_t j = 0; j < numbers.size(); j += 6) {
        std::size_t n[6];
        for (std::size_t i = 0; i < 6; ++i) {
            expect(numbers.data()[j + i] >= 0, "a region has no negative numbers");
            n[i] = static_cast<std::size_t>(numbers.data()[j + i]);
        }
        const chunks::Region r{n[0], n[1], n[2], n[3], n[4], n[5]};
        expect(r.height && r.width && r.rows && r.cols && r.rows % r.height == 0 && r.cols % r.width == 0, "chunks must fill their region");
        expect(product(r.height, r.width) <= chunks::largest_chunk, "a chunk has at most 65536 coordinates");
        expect(r.kept >= 1 && r.kept <= r.size() && (r.kept <= chunks::most_kept || r.kept == r.size()), "a chunk keeps 1 to 256 of its coordinates, or all");
        expect(r.start == at, "regions follow one another");
        at += product(r.rows, r.cols);
        expect(at <= numel, "a region reaches beyond the vector");
        kept += r.places();
        regions.push_back(r);
    }
    expect(at == numel, "the regions must cover the vector");
    expect(kept == places, "as many places as the chunks keep");
    return regions;
}

const Registrar registrar([](nb::module_& m) {
    m.def("chunk_choose", [](Array<const float> x, Numbers regions, Array<std::int32_t> places, Array<float> values) {
        expect(values.size() == places.size(), "as many values as places");
        const auto all = regions_of(regions, places.size(), x.size());
        apart(places, x, values);
        apart(values, x);
        const Work work;
        return chunks::choose(x.data(), all, places.data(), values.data());
    });
    m.def("chunk_carry", [](Array<const float> x, Array<const float> carry, float decay, Array<float> sum, Numbers regions,
                            Array<std::int32_t> places, Array<float> values) {
        expect(values.size() == places.size(), "as many values as places");
        expect(carry.size() == x.size() && sum.size() == x.size(), "vectors of one length");
        const auto all = regions_of(regions, places.size(), x.size());
        apart(sum, x, carry);
        apart(places, x, carry, sum, values);
        apart(values, x, carry, sum);
        const Work work;
        return chunks::carry_and_choose(x.data(), carry.data(), decay, sum.data(), all, places.data(), values.data());
    });
    m.def("chunk_encode", [](Array<const std::int32_t> places, Numbers regions, std::size_t numel, Array<std::uint8_t> out) {
        const auto all = regions_of(regions, places.size(), numel);
        apart(out, places);
        const Work work;
        expect(out.size() >= chunks::capacity(all), "the output is too small");
        return chunks::encode(places.data(), all, out.data());
    });
    m.def("chunk_decode", [](Array<const std::uint8_t> data, Numbers regions, std::size_t numel, Array<std::int32_t> places) {
        const auto all = regions_of(regions, places.size(), numel);
        apart(places, data);
        const Work work;
        chunks::decode(data.data(), data.size(), all, places.data());
    });
    m.def("chunk_bins", [](Array<const float> values, Numbers counts, std::size_t bins, Array<std::uint8_t> chosen, Array<float> stands,
                           Array<std::int64_t> filled) {
        expect(bins >= 1 && bins <= 16, "there are at most 16 bins");
        std::size_t left = values.size();
        for (std::size_t j = 0; j < counts.size(); ++j) {
            expect(counts.data()[j] >= 1 && static_cast<std::size_t>(counts.data()[j]) <= left, "the counts must add up to the values");
            left -= static_cast<std::size_t>(counts.data()[j]);
        }
        expect(left == 0 && chosen.size() == values.size(), "the counts must add up to the values");
        expect(stands.size() == product(counts.size(), bins) && filled.size() == stands.size(), "a tensor has as many numbers as bins");
        apart(chosen, values, counts, stands, filled);
        apart(stands, values, counts, filled);
        apart(filled, values, counts);
        std::fill(filled.data(), filled.data() + filled.size(), 0);
        const Work work;
        chunks::to_bins(values.data(), counts.data(), counts.size(), bins, chosen.data(), stands.data(), filled.data());
    });
    m.def("chunk_scatter", [](Array<const std::int32_t> places, Array<const float> values, Numbers regions, Array<float> out) {
        expect(values.size() == places.size(), "as many values as places");
        const auto all = regions_of(regions, places.size(), out.size());
        apart(out, places, values);
        const Work work;
        chunks::scatter(places.data(), values.data(), all, out.data());
    });
    m.def("chunk_scatter_add",
          [](Array<const std::int32_t> places, Array<const float> values, Numbers regions, float weight, Array<float> out) {
              expect(values.size() == places.size(), "as many values as places");
              const auto all = regions_of(regions, places.size(), out.size());
              apart(out, places, values);
              const Work work;
              chunks::scatter_add(places.data(), values.data(), all, weight, out.data());
          });
});

}  // namespace
