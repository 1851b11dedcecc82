// Few query rows against many keys on the CPU (direct.inl), for every instruction set: layouts whose KV heads are read
// together and those whose are not, groups on both sides of kDirectRows, hidden data that is not finite, and bits that
// do not depend on who did what. Also the workspace that a thread keeps for its next call.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/registry.hpp"
#include "cpu/cpu_tiled.hpp"
#include "cpu/parallel.hpp"
#include "harness.hpp"

namespace tilewise::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

// Axes of [batch, seqlen, heads, dim] from outermost to innermost in memory.
const std::vector<int> kInterleaved{0, 1, 2, 3}, kApart{0, 2, 1, 3}, kBatchInside{1, 0, 2, 3}, kDimOutside{0, 1, 3, 2};

struct Decode {
    DType dtype = DType::f32;
    int64_t batch = 1, group = 1, heads_kv = 1, seqlen_q = 1, seqlen_kv = 1, dim_qk = 8, dim_v = 8;
    std::vector<int> order = kInterleaved;
    int64_t gap = 0, step = 1;
    int64_t window_left = -1;
    double softcap = 0, dropout = 0;
    bool slopes = false, sinks = false, padding = false, used = false, batch_invariant = false;
};

struct Trial {
    Decode c;
    Buffer q, k, v, slopes, sinks, padding, used;
    tilewise_problem raw{};

    explicit Trial(const Decode& wanted, uint64_t seed = 1) : c(wanted) {
        std::mt19937_64 random(seed);
        std::normal_distribution<double> normal;
        const auto fill = [&](int64_t rows, int64_t heads, int64_t dim) {
            Buffer x(c.dtype, {c.batch, rows, heads, dim}, c.order, c.gap, c.step);
            for (int64_t n = 0; n < x.size(); ++n) x.set(n, normal(random));
            return x;
        };
        const int64_t heads = c.heads_kv * c.group;
        q = fill(c.seqlen_q, heads, c.dim_qk);
        k = fill(c.seqlen_kv, c.heads_kv, c.dim_qk), v = fill(c.seqlen_kv, c.heads_kv, c.dim_v);
        tilewise_problem_init(&raw);
        raw.q = q.view(), raw.k = k.view(), raw.v = v.view();
        raw.window_left = c.window_left, raw.softcap = c.softcap, raw.batch_invariant = c.batch_invariant;
        raw.dropout_p = c.dropout, raw.seed = 42;
        if (c.slopes) {
            slopes = Buffer(DType::f32, {heads});
            for (int64_t h = 0; h < heads; ++h) slopes.set(h, 0.01 * static_cast<double>(h % 7));
            raw.alibi_slopes = slopes.view();
        }
        if (c.sinks) {
            sinks = Buffer(DType::f32, {heads});
            for (int64_t h = 0; h < heads; ++h) sinks.set(h, normal(random));
            raw.sinks = sinks.view();
        }
        if (c.used) {
            used = Buffer(DType::i32, {c.batch});
            for (int64_t b = 0; b < c.batch; ++b) {
                const int64_t rows = c.seqlen_kv * (b + 1) / (c.batch + 1);
                used.set(b, static_cast<double>(rows));
            }
            raw.seqused_kv = used.view();
        }
        if (c.padding) {
            padding = Buffer(DType::boolean, {c.seqlen_kv});
            for (int64_t j = 0; j < c.seqlen_kv; ++j) padding.set(j, random() % 3 != 0);
            raw.mask = "key_padding(@0)";
            raw.num_arrays = 1, raw.arrays = &padding.view();
        }
    }
    Trial(const Trial&) = delete;
    Trial& operator=(const Trial&) = delete;

    // Values of o, then lse. The workspace arrives full of NaN bits, with a margin that must stay.
    std::vector<double> run(const char* implementation) {
        raw.backend = implementation;
        const core::Problem p = core::make_problem(raw);
        Buffer o(c.dtype, {c.batch, c.seqlen_q, p.num_heads_q, c.dim_v});
        Buffer lse(p.accumulator(), {c.batch, p.num_heads_q, c.seqlen_q});
        tilewise_forward_args args;
        tilewise_forward_args_init(&args);
        args.o = o.view(), args.lse = lse.view();
        const core::Implementation& chosen = *core::choose(p, core::Pass::forward).implementation;
        const size_t bytes = chosen.workspace_bytes(p, core::Pass::forward);
        std::vector<std::byte> memory(bytes + 192, std::byte{0xff});
        std::byte* const base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        chosen.forward(p, core::make_forward_args(p, raw, args), {base, bytes});
        for (size_t n = 0; n < 64; ++n) EXPECT_EQ(base[bytes + n], std::byte{0xff}) << "wrote past the workspace";
        EXPECT_TRUE(o.margins_intact() && lse.margins_intact());
        std::vector<double> all;
        for (const Buffer* x : {&o, &lse}) {
            for (int64_t n = 0; n < x->size(); ++n) all.push_back(x->get(n));
        }
        return all;
    }

    // What no query may see becomes `value` in K and V.
    void spoil(double value) {
        const core::Problem p = core::make_problem(raw);
        for (Buffer* x : {&k, &v}) {
            const int64_t dim = x->view().shape[3];
            for (int64_t n = 0; n < x->size(); ++n) {
                const int64_t b = n / dim / c.heads_kv / c.seqlen_kv, j = n / dim / c.heads_kv % c.seqlen_kv;
                const int64_t kv_len = p.sequences[static_cast<size_t>(b)].kv_len;
                const bool seen = j < kv_len && !(c.padding && padding.get(j) == 0) &&
                                  !(c.window_left >= 0 && j < kv_len - c.seqlen_q - c.window_left);
                if (!seen) x->set(n, value);
            }
        }
    }

    [[nodiscard]] std::string describe() const { return core::describe(core::make_problem(raw)); }
};

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

// Sums of normal numbers: an error of a few roundings of the accumulator, and one of the result.
std::string compare(Trial& trial) {
    const std::vector<double> want = trial.run("reference"), got = trial.run("cpu_tiled");
    const double unit = trial.c.dtype == DType::bf16  ? 0x1p-8
                        : trial.c.dtype == DType::f16 ? 0x1p-11
                        : trial.c.dtype == DType::f32 ? 0x1p-24
                                                      : 0x1p-53;
    const double accumulator = trial.c.dtype == DType::f64 ? 1e-14 : 4e-6;
    for (size_t n = 0; n < want.size(); ++n) {
        if (std::isnan(want[n]) ? std::isnan(got[n]) : want[n] == got[n]) continue;
        const double error = std::fabs(want[n] - got[n]), size = std::max(std::fabs(want[n]), 1.0);
        if (!(error <= 2 * unit * std::fabs(want[n]) + accumulator * size)) {
            return "[" + std::to_string(n) + "]: " + std::to_string(got[n]) + " instead of " + std::to_string(want[n]) +
                   ", " + trial.describe();
        }
    }
    return "";
}

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

class Direct : public testing::TestWithParam<std::string> {
protected:
    void TearDown() override { cpu::set_num_threads(0); }

private:
    ForcedIsa forced_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Cpu, Direct, testing::ValuesIn(available_isas()), [](const auto& test) { return test.param; });

TEST_P(Direct, MatchesReference) {
    const int64_t lengths[] = {1, 15, 17, 128, 255, 257, 530, 0, 900};
    const std::vector<int> orders[] = {kInterleaved, kApart, kBatchInside, kDimOutside};
    std::mt19937_64 random(3);
    const auto pick = [&](int64_t low, int64_t high) {
        return low + static_cast<int64_t>(random() % (high - low + 1));
    };
    for (const DType dtype : kDTypes) {
        for (int n = 0; n < 45; ++n) {
            Decode c;
            c.dtype = dtype;
            c.batch = pick(1, 2), c.group = 1 + n % 8, c.heads_kv = pick(1, 11);
            c.seqlen_q = n % 5 == 0 ? pick(1, 4) : 1, c.seqlen_kv = lengths[n % 9];
            c.dim_qk = pick(1, 70), c.dim_v = n % 3 == 0 ? c.dim_qk : pick(1, 140);
            c.order = orders[n % 4], c.gap = n % 6 == 0 ? pick(1, 5) : 0, c.step = n % 10 == 3 ? 2 : 1;
            if (pick(0, 3) == 0) c.window_left = pick(0, 300);
            if (pick(0, 4) == 0) c.softcap = 3;
            if (pick(0, 4) == 0) c.dropout = 0.3;
            c.slopes = pick(0, 4) == 0, c.sinks = pick(0, 4) == 0, c.padding = pick(0, 2) == 0,
            c.used = pick(0, 3) == 0;
            cpu::set_num_threads(1 + n % 2);  // with one, heads are read together in small problems, too
            Trial trial(c, random());
            ASSERT_EQ(compare(trial), "") << "case " << n;
        }
    }
}

// Several heads together, in dimensions that reach every width of the loops.
TEST_P(Direct, EveryWidth) {
    cpu::set_num_threads(1);
    for (const DType dtype : kDTypes) {
        for (const int64_t dim : {16, 40, 72, 100, 136}) {
            for (const int64_t group : {1, 2, 3, 4}) {
                Trial trial({dtype, 1, group, 9, 1, 270, dim, dim + 3});
                ASSERT_EQ(compare(trial), "");
            }
        }
    }
}

TEST_P(Direct, HiddenDataThatIsNotFinite) {
    for (const DType dtype : kDTypes) {
        for (const bool padding : {false, true}) {
            for (const std::vector<int>& order : {kInterleaved, kApart}) {
                Decode c{dtype, 3, 2, 8, 1, 600, 20, 27, order};
                c.padding = padding, c.used = true, c.window_left = 133;
                Trial trial(c);
                const std::vector<double> clean = trial.run("cpu_tiled");
                for (const double value : {kNaN, kInf, -kInf}) {
                    trial.spoil(value);
                    ASSERT_TRUE(same_bits(trial.run("cpu_tiled"), clean)) << value << ": " << trial.describe();
                }
            }
        }
    }
}

// A value that is seen does show, in its own dimension of the rows that see it and nowhere else.
TEST_P(Direct, VisibleDataThatIsNotFinite) {
    for (const double value : {kNaN, kInf}) {
        Decode c{DType::f32, 2, 4, 8, 1, 700, 20, 27};
        c.padding = true;
        Trial trial(c);
        const std::vector<double> clean = trial.run("cpu_tiled");
        const int64_t j = 400, head_kv = 3, d = 11;  // of sequence 0
        trial.padding.set(j, 1), trial.padding.set(j + 1, 0);
        const std::vector<double> before = trial.run("cpu_tiled");
        trial.v.set((j * c.heads_kv + head_kv) * c.dim_v + d, value);
        trial.v.set(((j + 1) * c.heads_kv + head_kv) * c.dim_v + d + 1, value);
        const std::vector<double> after = trial.run("cpu_tiled");
        for (size_t n = 0; n < after.size(); ++n) {
            const int64_t h = static_cast<int64_t>(n) / c.dim_v, at = static_cast<int64_t>(n) % c.dim_v;
            if (h / c.group == head_kv && at == d) {  // rows of o are [sequence, query, head]
                ASSERT_TRUE(std::isnan(value) ? std::isnan(after[n]) : after[n] == value) << n;
            } else {
                ASSERT_EQ(after[n], before[n]) << n;
            }
        }
    }
}

// Neither threads nor neighbours change bits: each head alone, at a distance, gives what all of them give.
TEST_P(Direct, SameBitsForThreadsAndNeighbours) {
    for (const DType dtype : kDTypes) {
        for (const int64_t keys : {100, 1024, 1600}) {
            Decode c{dtype, 2, 4, 8, 1, keys, 33, 40};
            Trial all(c);
            cpu::set_num_threads(1);
            const std::vector<double> one = all.run("cpu_tiled");
            for (const int threads : {2, 3, 16}) {
                cpu::set_num_threads(threads);
                ASSERT_TRUE(same_bits(all.run("cpu_tiled"), one)) << threads << " threads, " << all.describe();
            }
            c.order = kApart;
            Trial apart(c);  // the same values: they are drawn in the order of the view
            ASSERT_TRUE(same_bits(apart.run("cpu_tiled"), one)) << all.describe();
            for (int64_t h = 0; h < c.heads_kv; ++h) {
                tilewise_problem raw = all.raw;
                const int64_t width = core::size_of(dtype);
                const auto shift = [&](tilewise_tensor& t, int64_t heads) {
                    t.data = static_cast<std::byte*>(t.data) + h * heads * t.strides[2] * width;
                    t.shape[2] = heads;
                };
                shift(raw.q, c.group), shift(raw.k, 1), shift(raw.v, 1);
                raw.backend = "cpu_tiled";
                Buffer o(dtype, {c.batch, 1, c.group, c.dim_v});
                tilewise_forward_args args;
                tilewise_forward_args_init(&args);
                args.o = o.view();
                ASSERT_EQ(tilewise_forward(&raw, &args), TILEWISE_OK) << tilewise_last_error();
                for (int64_t n = 0; n < o.size(); ++n) {
                    const int64_t b = n / c.dim_v / c.group, r = n / c.dim_v % c.group;
                    const int64_t at = ((b * c.heads_kv + h) * c.group + r) * c.dim_v + n % c.dim_v;
                    ASSERT_EQ(o.get(n), one[static_cast<size_t>(at)]) << "head " << h << ", " << all.describe();
                }
            }
        }
    }
}

// With batch_invariant a row has the bits that it has as the last of many.
TEST_P(Direct, BatchInvariantHasTheBitsOfPrefill) {
    for (const DType dtype : kDTypes) {
        Decode c{dtype, 1, 2, 8, 60, 1100, 24, 40};
        c.batch_invariant = true;
        Trial many(c);
        many.raw.causal = 1;
        const std::vector<double> all = many.run("cpu_tiled");
        tilewise_problem raw = many.raw;
        raw.q.data = static_cast<std::byte*>(raw.q.data) + 59 * raw.q.strides[1] * core::size_of(dtype);
        raw.q.shape[1] = 1;
        Buffer o(dtype, {1, 1, 16, 40});
        tilewise_forward_args args;
        tilewise_forward_args_init(&args);
        args.o = o.view();
        ASSERT_EQ(tilewise_forward(&raw, &args), TILEWISE_OK) << tilewise_last_error();
        for (int64_t n = 0; n < o.size(); ++n) ASSERT_EQ(o.get(n), all[static_cast<size_t>(59 * o.size() + n)]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The kept workspace

void call(Trial& trial) {
    Buffer o(trial.c.dtype, {trial.c.batch, trial.c.seqlen_q, trial.c.heads_kv * trial.c.group, trial.c.dim_v});
    tilewise_forward_args args;
    tilewise_forward_args_init(&args);
    args.o = o.view(), trial.raw.backend = "cpu_tiled";
    ASSERT_EQ(tilewise_forward(&trial.raw, &args), TILEWISE_OK) << tilewise_last_error();
}

TEST(KeptWorkspace, LaterCallsTouchNoNewPages) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "sanitizers touch pages of their own";
#endif
    Trial trial({DType::f32, 1, 4, 8, 1, 1024, 128, 128});
    const auto faults = [&](int calls) {
        rusage before, after;
        getrusage(RUSAGE_SELF, &before);
        for (int n = 0; n < calls; ++n) call(trial);
        getrusage(RUSAGE_SELF, &after);
        return after.ru_minflt - before.ru_minflt;
    };
    faults(50);  // every thread has had its turn
    EXPECT_LT(faults(100), 100);
}

// Sizes up and down, threads that come and go: for AddressSanitizer.
TEST(KeptWorkspace, GrowsAndGoesWithItsThread) {
    for (int round = 0; round < 3; ++round) {
        std::thread([] {
            for (const int64_t keys : {10, 3000, 200, 5000, 1}) {
                Trial trial({DType::f32, 1, 2, 2, 1, keys, 16, 16});
                call(trial);
            }
        }).join();
    }
    // Larger than what is kept.
    core::DeviceMemory large = core::allocate({}, size_t{65} << 20, nullptr), small = core::allocate({}, 100, nullptr);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(large.data) % 64, 0u);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(small.data) % 64, 0u);
    EXPECT_NE(large.data, small.data);
    std::memset(small.data, 1, 100);
    large.release({}, large.data, nullptr), small.release({}, small.data, nullptr);
    core::DeviceMemory again = core::allocate({}, 100, nullptr);
    EXPECT_EQ(again.data, small.data);
    again.release({}, again.data, nullptr);
}

}  // namespace
}  // namespace tilewise::test
