// The CPU kernels, on every ISA and dtype, against the reference over random problems; and what must hold bit for bit:
// any number of threads, any run, any poison in the workspace. (tests/CMakeLists.txt gives the harness a fake GPU.)
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <ostream>

#include "core/registry.hpp"
#include "cpu/parallel.hpp"
#include "harness.hpp"

namespace tilewise::test {
namespace {

// TILEWISE_TEST_CASES scales the number of random problems; TILEWISE_TEST_SEED moves to other ones.
uint64_t setting(const char* name, uint64_t fallback) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : fallback;
}

struct Cell {
    std::string isa;
    DType dtype;
};

void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.isa << " " << core::name(cell.dtype); }

std::vector<Cell> cells() {
    std::vector<Cell> out;
    for (const std::string& isa : available_isas()) {
        for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) out.push_back({isa, dtype});
    }
    return out;
}

class Backends : public testing::TestWithParam<Cell> {
protected:
    void run(uint64_t count, const Space& space, uint64_t salt) {
        const ForcedIsa forced(GetParam().isa);
        const uint64_t first = setting("TILEWISE_TEST_SEED", 0);
        for (uint64_t n = 0; n < count; ++n) {
            const uint64_t seed = (first + n) * 8 + salt;
            Case problem(seed, space);
            ASSERT_EQ(problem.check("cpu_tiled"), "") << "seed " << seed << ": " << problem.describe();
        }
    }
};

TEST_P(Backends, SmallProblems) { run(setting("TILEWISE_TEST_CASES", 150), {GetParam().dtype, 90, 24, false}, 0); }
TEST_P(Backends, ManyTiles) { run(setting("TILEWISE_TEST_CASES", 150) / 10, {GetParam().dtype, 700, 70, true}, 1); }
TEST_P(Backends, LongKeys) { run(setting("TILEWISE_TEST_CASES", 150) / 30, {GetParam().dtype, 2600, 20, true}, 2); }
TEST_P(Backends, WideHeads) { run(setting("TILEWISE_TEST_CASES", 150) / 10, {GetParam().dtype, 60, 576, false}, 3); }

INSTANTIATE_TEST_SUITE_P(Cpu, Backends, testing::ValuesIn(cells()), [](const testing::TestParamInfo<Cell>& cell) {
    return cell.param.isa + "_" + core::name(cell.param.dtype);
});

// The reference in the dtype of the problem obeys the rule, too: its only error is the last rounding.
TEST(Reference, ObeysTheAccuracyRule) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        for (uint64_t seed = 0; seed < 40; ++seed) {
            Case problem(seed, {dtype, 60, 24, false});
            ASSERT_EQ(problem.check("reference"), "") << "seed " << seed << ": " << problem.describe();
        }
    }
}

std::vector<std::byte> bits(const Case::Results& results) {
    std::vector<std::byte> all;
    for (const Buffer& output : results.outputs) {
        for (int64_t n = 0; output.present() && n < output.size(); ++n) {
            const double value = output.get(n);
            const auto* bytes = reinterpret_cast<const std::byte*>(&value);
            all.insert(all.end(), bytes, bytes + sizeof value);
        }
    }
    return all;
}

TEST(Determinism, SameBitsForEveryNumberOfThreads) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        for (uint64_t seed = 0; seed < 40; ++seed) {
            Case problem(seed, {dtype, seed % 4 == 0 ? 2500 : 300, 40, seed % 4 == 0});
            cpu::set_num_threads(1);
            const auto one = bits(problem.run("cpu_tiled", false));
            for (const int threads : {2, 3, 16}) {
                cpu::set_num_threads(threads);
                ASSERT_EQ(bits(problem.run("cpu_tiled", false)), one)
                    << threads << " threads, seed " << seed << ": " << problem.describe();
            }
            cpu::set_num_threads(0);
        }
    }
}

}  // namespace
}  // namespace tilewise::test
