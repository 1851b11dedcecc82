// No kernel reads or writes a byte that is not its caller's. Random problems of the harness run with every array, text
// and workspace between pages that nobody may touch: once each begins right behind such a page, once each ends right
// before one. A touch ends the process with the name of the problem; inputs are read-only there, so a write to one does
// the same. (AddressSanitizer sees less: hand-written vector loads and the padding of a std::vector pass it by.)
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "harness.hpp"

namespace tilewise::test {
namespace {

struct Cell {
    std::string implementation, isa;
    DType dtype;
};
void PrintTo(const Cell& cell, std::ostream* out) {
    *out << cell.implementation << " " << cell.isa << " " << core::name(cell.dtype);
}

std::vector<Cell> cells() {
    std::vector<Cell> all;
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        for (const std::string& isa : available_isas()) all.push_back({"cpu_tiled", isa, dtype});
        all.push_back({"reference", "scalar", dtype});
    }
    return all;
}

std::string current;  // what to say when the process ends

void say_and_end(int signal) {
    const ssize_t written = write(STDERR_FILENO, current.data(), current.size());
    (void)written;
    std::signal(signal, SIG_DFL);
    raise(signal);
}

class GuardedPages : public testing::TestWithParam<Cell> {
protected:
    GuardedPages() : isa_(GetParam().isa), before_(std::signal(SIGSEGV, say_and_end)) {}
    ~GuardedPages() override { std::signal(SIGSEGV, before_); }

    void run(uint64_t first, uint64_t count, Space space) {
        space.dtype = GetParam().dtype;
        if (const char* scale = std::getenv("TILEWISE_TEST_CASES")) count = std::strtoull(scale, nullptr, 10);
        for (uint64_t seed = first; seed < first + count; ++seed) {
            Case problem(seed, space);
            const std::vector<uint64_t> expected = problem.run(GetParam().implementation, false).bits();
            for (const Guard guard : {Guard::begin, Guard::end}) {
                current = "touched what is not its own, with arrays at the " +
                          std::string(guard == Guard::begin ? "begin" : "end") + " of their pages: seed " +
                          std::to_string(seed) + ", " + problem.describe() + "\n";
                ASSERT_EQ(problem.run(GetParam().implementation, false, guard).bits(), expected) << current;
            }
        }
    }

private:
    ForcedIsa isa_;
    void (*before_)(int);
};

TEST_P(GuardedPages, SmallProblems) { run(0, 120, {DType::f32, 60, 40}); }
TEST_P(GuardedPages, WideHeads) { run(1000, 20, {DType::f32, 20, 300}); }
TEST_P(GuardedPages, FewRowsManyKeys) {
    run(2000, GetParam().implementation == "reference" ? 1 : 6, {DType::f32, 1300, 20, true});
}

INSTANTIATE_TEST_SUITE_P(Cpu, GuardedPages, testing::ValuesIn(cells()), [](const testing::TestParamInfo<Cell>& cell) {
    return cell.param.implementation + "_" + cell.param.isa + "_" + core::name(cell.param.dtype);
});

}  // namespace
}  // namespace tilewise::test
