// Mutated index sets: the decoders must throw std::invalid_argument or return indices that increase within [0, n).
//   fuzz_select [iterations] [seed]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <vector>

#include "tersegrad/select.hpp"

using namespace tersegrad;

int main(int argc, char** argv) {
    const long iterations = argc > 1 ? std::atol(argv[1]) : 20000;
    std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    long refused = 0;
    for (long trial = 0; trial < iterations; ++trial) {
        const std::uint64_t n = 1 + random() % (trial % 3 == 0 ? 40 : trial % 3 == 1 ? 5000 : std::uint64_t{1} << 45);
        std::vector<std::int64_t> set;
        const std::uint64_t step = 1 + random() % (n / (1 + random() % 300) + 1);
        for (std::uint64_t at = random() % step; at < n && set.size() < 300; at += 1 + random() % (2 * step)) set.push_back(static_cast<std::int64_t>(at));
        const std::size_t k = set.size();
        const std::uint64_t m = 1 + random() % (2 * step);
        for (int form = 0; form < 4; ++form) {
            std::vector<std::uint8_t> bytes, classes(k);
            if (form == 0) {
                bytes.resize(select::golomb_size(set.data(), k, m));
                select::golomb_encode(set.data(), k, m, bytes.data(), bytes.size());
            } else if (form == 1) {
                bytes.resize(64 + 128 * k);
                bytes.resize(select::digits_encode(set.data(), k, n, bytes.data(), bytes.size()));
            } else if (form == 2) {
                if (n > 100000) continue;
                bytes.resize((n + 7) / 8);
                select::bitmap_encode(set.data(), k, n, bytes.data());
            } else {
                select::gap_classes(set.data(), k, classes.data());
                bytes.resize(8 * k + 8);
                bytes.resize(select::gap_rests_encode(set.data(), k, bytes.data(), bytes.size()));
                if (k && random() % 2) classes[random() % k] = static_cast<std::uint8_t>(random());
            }
            for (std::uint64_t change = random() % 4; change; --change)
                if (!bytes.empty()) bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
            if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
            bytes.shrink_to_fit();  // so that the sanitizer sees the very end
            const std::size_t count = random() % 8 ? k : random() % (k + 2);
            if (count > n) continue;
            std::vector<std::int64_t> out(count);
            classes.resize(count);
            try {
                std::size_t used = 0;
                if (form == 0) {
                    used = select::golomb_decode(bytes.data(), bytes.size(), count, n, m, out.data());
                    std::vector<std::uint8_t> again(select::golomb_size(out.data(), count, m));
                    select::golomb_encode(out.data(), count, m, again.data(), again.size());
                    if (again.size() != used || !std::equal(again.begin(), again.end(), bytes.begin())) {
                        std::printf("fuzz_select: an accepted Golomb code is not canonical at iteration %ld\n", trial);
                        return 1;
                    }
                }
                else if (form == 1) used = select::digits_decode(bytes.data(), bytes.size(), count, n, out.data());
                else if (form == 2) select::bitmap_decode(bytes.data(), bytes.size(), count, n, out.data());
                else used = select::gap_rests_decode(bytes.data(), bytes.size(), classes.data(), count, n, out.data());
                if (used > bytes.size() || !select::increasing(out.data(), count, n)) {
                    std::printf("fuzz_select: form %d returned nonsense at iteration %ld\n", form, trial);
                    return 1;
                }
            } catch (const std::invalid_argument&) {
                ++refused;
            }
        }
    }
    std::printf("fuzz_select: ok, %ld iterations, %ld refused\n", iterations, refused);
}
