#include "dropout.hpp"

#include <cmath>

namespace tilewise::core {
namespace {

struct Philox {
    uint32_t key0, key1, counter0, counter1;  // the parts that do not depend on (i, j)

    Philox(int64_t seed, int64_t offset, int64_t bh)
        : key0(static_cast<uint32_t>(seed)),
          key1(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32) ^
               static_cast<uint32_t>(static_cast<uint64_t>(offset) >> 32)),
          counter0(static_cast<uint32_t>(offset)),
          counter1(static_cast<uint32_t>(bh)) {}

    // Four words = eight 16-bit lanes for the eight elements that share (i without bit 3, j without bits 3 and 4).
    void operator()(uint32_t i, uint32_t j, uint32_t (&c)[4]) const {
        c[0] = counter0, c[1] = counter1, c[2] = i & ~8u, c[3] = j & ~24u;
        uint32_t k0 = key0, k1 = key1;
        for (int round = 0; round < 7; ++round) {
            const uint64_t product0 = uint64_t{0xD2511F53u} * c[0];
            const uint64_t product1 = uint64_t{0xCD9E8D57u} * c[2];
            const uint32_t high0 = static_cast<uint32_t>(product0 >> 32), low0 = static_cast<uint32_t>(product0);
            const uint32_t high1 = static_cast<uint32_t>(product1 >> 32), low1 = static_cast<uint32_t>(product1);
            c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
    }
};

uint32_t lane(const uint32_t (&words)[4], uint32_t e) { return (words[e / 2] >> (16 * (e % 2))) & 0xffffu; }

}  // namespace

uint32_t dropout_threshold(double dropout_p) { return static_cast<uint32_t>(std::lround(65536.0 * dropout_p)); }

bool dropout_keep(int64_t seed, int64_t offset, int64_t bh, int64_t i, int64_t j, uint32_t threshold) {
    uint32_t words[4];
    const uint32_t row = static_cast<uint32_t>(i), key = static_cast<uint32_t>(j);
    Philox(seed, offset, bh)(row, key, words);
    return lane(words, 4 * (row >> 3 & 1) + 2 * (key >> 4 & 1) + (key >> 3 & 1)) >= threshold;
}

void dropout_row(int64_t seed, int64_t offset, int64_t bh, int64_t i, Range j, uint32_t threshold, uint8_t* out) {
    const Philox philox(seed, offset, bh);
    const uint32_t row = static_cast<uint32_t>(i);
    const uint32_t first_lane = 4 * (row >> 3 & 1);
    // Keys 32n + r + {0, 8, 16, 24} share one Philox call.
    for (int64_t block = j.begin & ~int64_t{31}; block < j.end; block += 32) {
        for (int64_t r = 0; r < 8; ++r) {
            uint32_t words[4];
            philox(row, static_cast<uint32_t>(block + r), words);
            for (uint32_t quarter = 0; quarter < 4; ++quarter) {
                const int64_t key = block + r + 8 * quarter;
                if (key < j.begin || key >= j.end) continue;
                out[key - j.begin] = lane(words, first_lane + 2 * (quarter >> 1) + (quarter & 1)) >= threshold;
            }
        }
    }
}

}  // namespace tilewise::core
