// Expressions as device text: rendered, compiled for the CPU against the fake CUDA of tests/fake_cuda, and compared
// with the evaluator and with enumeration. Where there is an NVRTC, also compiled for GPUs.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/tilewise/abi.h"
#include "core/expr.hpp"
#include "expr_cases.hpp"
#include "jit/nvrtc.hpp"
#include "jit/render_expr.hpp"
#include "jit/source.hpp"

namespace {

using namespace tilewise::core;
using namespace tilewise::core::expr_cases;
namespace abi = tilewise::abi;
namespace jit = tilewise::jit;
namespace fs = std::filesystem;

// ---------------------------------------------------------------------------------------------------------------------
// The compiled functions

constexpr size_t kArrays = 12, kScalars = 6;

struct Data {
    std::array<abi::Array, kArrays> arrays, sums;
    std::array<abi::GatherSummary, kArrays> gather_summaries;
    std::array<double, kScalars> scalars;
    abi::Int b, h, head_kv, q_len, kv_len, q_offset;
};

const char* const kBefore = R"(
namespace tilewise {
struct MaskData {
    abi::Array arrays[12];
    abi::GatherSummary gather_summaries[12];
    double scalars[6];
};
struct GradientArrays {
    abi::Array arrays[12];
};
)";

const char* const kHarness = R"(
struct Data {
    abi::Array arrays[12], sums[12];
    abi::GatherSummary gather_summaries[12];
    double scalars[6];
    Int b, h, head_kv, q_len, kv_len, q_offset;
};
struct Inside {
    Site site;
    MaskData data;
    GradientArrays out;
    Inside(const Data& d)
        : site{d.b, d.h, d.head_kv, 0, d.q_len, 0, d.kv_len, d.q_offset, 0, 0} {
        for (int k = 0; k < 12; ++k) data.arrays[k] = d.arrays[k], out.arrays[k] = d.sums[k];
        for (int k = 0; k < 12; ++k) data.gather_summaries[k] = d.gather_summaries[k];
        for (int k = 0; k < 6; ++k) data.scalars[k] = d.scalars[k];
    }
};
}  // namespace tilewise
using namespace tilewise;
#define VISIBLE extern "C" __attribute__((visibility("default")))
VISIBLE void mask_values(int k, const Data* d, Int i, Int j, Int n, unsigned char* out) {
    const Inside in(*d);
    for (Int m = 0; m < n; ++m) out[m] = kMaskValues[k](in.site, in.data, i, j + m);
}
VISIBLE int mask_truth(int k, const Data* d, Int i0, Int i1, Int j0, Int j1) {
    const Inside in(*d);
    return kMaskTruths[k](in.site, in.data, i0, i1, j0, j1);
}
VISIBLE void score_values(int k, const Data* d, Int i, Int j, Int n, const Real* x, Real* out, Real* gradient) {
    const Inside in(*d);
    for (Int m = 0; m < n; ++m) out[m] = kScoreValues[k](in.site, in.data, x[m], i, j + m);
    for (Int m = 0; m < n; ++m) gradient[m] = kGradients[k](in.site, in.data, x[m], i, j + m);
}
VISIBLE void score_sums(int k, const Data* d, Int i, Int j, Int n, const Real* g, const Real* x) {
    const Inside in(*d);
    for (Int m = 0; m < n; ++m) {
        if (kGradientArrays[k]) kGradientArrays[k](in.site, in.data, in.out, g[m], x[m], i, j + m);
    }
}
VISIBLE int score_hides(int k, const Data* d, Int i0, Int i1, Int j0, Int j1) {  // -1: it never does
    const Inside in(*d);
    return kHides[k] ? kHides[k](in.site, in.data, i0, i1, j0, j1) : -1;
}
VISIBLE void summarise(const abi::Array* array, Int dtype, Int rank, Int blocks, double* out) {
    for (Int block = 0; block < blocks; ++block) expr::summarise_block(*array, dtype, rank, block, out + 3 * block);
}
)";

// One shared object for many expressions: a compiler start costs more than a function.
template <class T>
class Compiled {
public:
    Compiled(const World& w, const std::vector<std::string>& mask_texts, const std::vector<std::string>& score_texts) {
        for (const std::string& text : mask_texts) masks.push_back(parse_mask(text, w));
        for (const std::string& text : score_texts) {
            scores.push_back(parse_score(text, w));
            adjoints.push_back(differentiate(scores.back()));
        }
        const fs::path folder = fs::path(testing::TempDir()) / ("tilewise_render_" + std::to_string(::getpid()));
        const fs::path here = fs::path(__FILE__).parent_path();
        fs::create_directories(folder);
        const std::string source = (folder / "expr.cpp").string(), object = (folder / "expr.so").string();
        std::ofstream(source) << source_text(w);
        const std::string command =
            std::string(TILEWISE_TEST_CXX) +
            " -std=c++17 -O1 -fPIC -shared -ffp-contract=off -w -DTILEWISE_FAKE_CUDA -include '" +
            (here / "fake_cuda/device.hpp").string() + "' -I'" + (here / "../kernels/tilewise").string() + "' -o '" +
            object + "' '" + source + "' > '" + (folder / "log").string() + "' 2>&1";
        if (std::system(command.c_str()) != 0) {
            std::ifstream log(folder / "log");
            ADD_FAILURE() << command << "\n" << std::string(std::istreambuf_iterator<char>(log), {}).substr(0, 4000);
            return;  // with the text left there to look at
        }
        handle_ = ::dlopen(object.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!handle_) {
            ADD_FAILURE() << ::dlerror();
            return;
        }
        find(mask_values, "mask_values"), find(mask_truth, "mask_truth"), find(score_values, "score_values");
        find(score_sums, "score_sums"), find(score_hides, "score_hides"), find(summarise, "summarise");
        fs::remove_all(folder);

        summaries_.resize(w.arrays.size());
        for (size_t k = 0; k < w.arrays.size(); ++k) {
            const Array& a = w.arrays[k];
            base_.arrays[k] = device(a);
            const int64_t blocks = (a.size() + 63) / 64;
            summaries_[k].resize(static_cast<size_t>(blocks) * 3);
            summarise(&base_.arrays[k], static_cast<int>(a.dtype), a.rank, blocks, summaries_[k].data());
            base_.gather_summaries[k].data = summaries_[k].data();
        }
        std::copy(w.scalars.begin(), w.scalars.end(), base_.scalars.begin());
    }
    Compiled(const Compiled&) = delete;
    Compiled& operator=(const Compiled&) = delete;
    ~Compiled() {
        if (handle_) ::dlclose(handle_);
    }

    explicit operator bool() const { return handle_ != nullptr; }
    [[nodiscard]] Data data(const ExprContext& c) const {
        Data d = base_;
        d.b = c.b, d.h = c.h, d.head_kv = c.head_kv, d.q_len = c.seqlen_q, d.kv_len = c.seqlen_kv;
        d.q_offset = c.q_offset;
        return d;
    }
    static abi::Array device(const Array& a) {
        abi::Array to{a.data, {}, {}};
        std::copy(a.shape.begin(), a.shape.end(), to.shape);
        std::copy(a.stride.begin(), a.stride.end(), to.stride);
        return to;
    }

    std::vector<Expr> masks, scores;
    std::vector<Adjoint> adjoints;

    using Int = abi::Int;
    void (*mask_values)(int, const Data*, Int, Int, Int, uint8_t*) = nullptr;
    int (*mask_truth)(int, const Data*, Int, Int, Int, Int) = nullptr;
    void (*score_values)(int, const Data*, Int, Int, Int, const T*, T*, T*) = nullptr;
    void (*score_sums)(int, const Data*, Int, Int, Int, const T*, const T*) = nullptr;
    int (*score_hides)(int, const Data*, Int, Int, Int, Int) = nullptr;
    void (*summarise)(const abi::Array*, Int, Int, Int, double*) = nullptr;

private:
    template <class F>
    void find(F& f, const char* name) {
        f = reinterpret_cast<F>(::dlsym(handle_, name));
        ASSERT_NE(f, nullptr) << name;
    }

    [[nodiscard]] std::string source_text(const World& w) const {
        std::string text = std::string("#include \"abi.h\"\nnamespace tilewise { using Real = ") +
                           (sizeof(T) == 8 ? "double" : "float") + "; }\n#include \"expr.cuh\"\n" + kBefore;
        std::string values, truths, score_values_, hides, gradients, sums;
        for (size_t k = 0; k < masks.size(); ++k) {
            const std::string n = std::to_string(k);
            text += jit::render_mask_value(masks[k], w.arrays, "mask" + n);
            text += jit::render_mask_truth(masks[k], w.arrays, "truth" + n);
            values += "mask" + n + ", ", truths += "truth" + n + ", ";
        }
        for (size_t k = 0; k < scores.size(); ++k) {
            const std::string n = std::to_string(k);
            text += jit::render_score_value(scores[k], w.arrays, "score" + n);
            text += jit::render_score_gradient(adjoints[k], w.arrays, "gradient" + n);
            const std::string hiding = jit::render_score_hides(scores[k], w.arrays, "hides" + n);
            text += hiding;
            score_values_ += "score" + n + ", ", gradients += "gradient" + n + ", ";
            hides += (hiding.empty() ? "nullptr" : "hides" + n) + ", ";
            sums += (adjoints[k].gathers.empty() ? "nullptr" : "gradient" + n + "_arrays") + ", ";
        }
        const auto table = [](const std::string& type, const std::string& name, const std::string& entries) {
            return "using " + name + "Type = " + type + ";\nstatic " + name + "Type* const " + name + "[] = {" +
                   entries + "nullptr};\n";
        };
        text += table("bool(const Site&, const MaskData&, Int, Int)", "kMaskValues", values);
        text += table("int(const Site&, const MaskData&, Int, Int, Int, Int)", "kMaskTruths", truths);
        text += table("Real(const Site&, const MaskData&, Real, Int, Int)", "kScoreValues", score_values_);
        text += table("Real(const Site&, const MaskData&, Real, Int, Int)", "kGradients", gradients);
        text += table("void(const Site&, const MaskData&, const GradientArrays&, Real, Real, Int, Int)",
                      "kGradientArrays", sums);
        text += table("bool(const Site&, const MaskData&, Int, Int, Int, Int)", "kHides", hides);
        return text + kHarness;
    }

    void* handle_ = nullptr;
    Data base_{};
    std::vector<std::vector<double>> summaries_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Cases

const std::vector<std::string>& corner_masks() {
    static const std::vector<std::string> texts{
        "true",
        "not(false)",
        "eq(floordiv(i,sub(j,j)),0)",
        "eq(floordiv(-2147483648,sub(j,i)),mod(-2147483648,sub(i,j)))",
        "lt(mul(i,1000003),mul(j,-2147483648))",
        "lt(add(i,2147483647),sub(j,-2147483648))",
        "eq(abs(sub(-2147483648,0)),neg(-2147483648))",
        "eq(mod(sub(i,j),-7),floordiv(sub(i,j),-7))",
        "ge(floordiv(sub(i,j),64),mod(sub(j,i),64))",
        "eq(floordiv(sub(i,j),1),mod(j,1))",
        "lt(floordiv(sub(i,100),1073741824),mod(sub(j,100),1073741824))",
        "ne($4,$4)",
        "eq($4i,0)",
        "eq($3i,2147483647)",
        "lt(gather(@5,sub(i,j)),gather(@5,sub(j,i)))",
        "and(gather(@2,sub(j,3)),not(gather(@2,add(i,60))))",
        "lt(gather(@4),gather(@10,j))",
        "eq(gather(@9,j),gather(@6,b,sub(j,i)))",
        "gt(gather(@8,b,1,1,mod(i,3),mod(j,4)),gather(@8,b,mod(j,4),h,2,i))",
        "ge(gather(@7,j),gather(@3,b,b,mod(i,40)))",
        "le(gather(@1,mod(h,3),j),gather(@11,i,1))",
        "lt(mod(sub(float(j),50.5),-3.25),floordiv(float(i),-2.5))",
        "lt(add(mul(0.1,float(i)),mul(0.1,float(j))),mul(0.1,float(add(i,j))))",
        "lt(sqrt(sub(float(i),20.0)),log(float(j)))",
        "ge(exp(div(float(sub(i,j)),30.0)),tanh(div(float(j),100.0)))",
        "lt(1e+300,mul(1e+30,float(j)))",
        "eq(div(float(i),-0.0),-inf)",
        "lt(mul(5e-324,float(i)),1.7976931348623157e+308)",
        "le(max(gather(@5,i),gather(@5,j)),min(gather(@5,j),gather(@5,i)))",
        "where(gather(@2,i),lt(i,j),gather(@2,j))",
    };
    return texts;
}

const std::vector<std::string>& corner_scores() {
    static const std::vector<std::string> texts{
        "x",
        "where(ge(i,j),x,-inf)",
        "add(x,where(ge(i,j),0.0,-inf))",
        "where(eq(gather(@0,b,i),gather(@0,b,j)),x,-inf)",
        "add(mul(x,0.5),mul(-0.25,abs(sub(i,j))))",
        "mul(20.0,tanh(div(x,20.0)))",
        "add(x,gather(@5,sub(i,j)))",
        "add(mul(x,gather(@1,mod(h,3),j)),gather(@11,i,1))",
        "max(min(x,gather(@7,j)),gather(@3,b,b,i))",
        "max(x,0.0)",
        "min(0.0,neg(x))",
        "where(lt(j,9),div(-1.0,0.0),x)",
        "where(lt(j,9),log(mul(x,0.0)),log(0.0))",
        "add(mul(gather(@5,j),gather(@5,j)),mul(gather(@5,i),x))",
        "mod(x,-0.75)",
        "where(gather(@2,j),gather(@5,gather(@6,b,1)),exp(x))",
        "mul(1e+30,mul(-1e+30,1.0))",
        "sqrt(abs(mul(x,$4)))",
        "$0",
        "-0.0",
    };
    return texts;
}

std::vector<std::string> random_texts(const World& w, bool masks, int count, uint32_t seed) {
    std::vector<std::string> texts = masks ? corner_masks() : corner_scores();
    for (int k = 0; k < count; ++k) {
        Generator g(seed + static_cast<uint32_t>(k), w);
        g.allow_x = !masks;
        if (masks && k % 3 == 0) texts.push_back("le(" + print(g.real(4)) + "," + print(g.real(1)) + ")");
        else texts.push_back(print(masks ? g.boolean(4) : g.real(4)));
    }
    return texts;
}

// Sizes of tiles from one element to many blocks of summaries; positions on both sides of every array's ends.
Range random_tile(Generator& g) {
    const int64_t begin = g.roll(30) == 0 ? int64_t{INT32_MAX} - 5 : g.roll(210) - 5;
    return {begin, begin + 1 + g.roll(g.roll(4) == 0 ? 90 : 12)};
}

template <class T>
std::vector<T> random_reals(Generator& g, int64_t n) {
    std::vector<T> x(static_cast<size_t>(n));
    for (T& v : x) {
        v = static_cast<T>(4 * g.normal());
        if (g.roll(6) == 0) v = static_cast<T>(kSpecials[static_cast<size_t>(g.roll(4))]);
    }
    return x;
}

template <class T>
void check_masks(int count, uint32_t seed) {
    const World w = make_world(seed, true);
    const Compiled<T> compiled(w, random_texts(w, true, count, seed), {});
    if (!compiled) return;
    const std::vector<ArraySummary> all = summaries(w);
    int values = 0, decided = 0, decided_by_core = 0;
    for (size_t k = 0; k < compiled.masks.size(); ++k) {
        const Expr& e = compiled.masks[k];
        RowEvaluator<T> evaluator(e, 128);
        for (uint32_t round = 0; round < 24; ++round) {
            Generator g(seed + 1000 * static_cast<uint32_t>(k) + round, w);
            const ExprContext c = random_context(g, w);
            Data data = compiled.data(c);
            const bool summarised = round % 6 != 0;
            if (!summarised) data.gather_summaries = {};
            const Range i = random_tile(g), j = random_tile(g);
            const int truth_there = compiled.mask_truth(static_cast<int>(k), &data, i.begin, i.end, j.begin, j.end);
            const Truth truth_here = truth<T>(e, c, i, j, summarised ? all : std::vector<ArraySummary>{});
            decided += truth_there != 1;
            decided_by_core += truth_here != Truth::unknown;
            for (int64_t row = i.begin; row < i.end; ++row) {
                std::array<uint8_t, 128> want, got;
                evaluator.boolean(c, row, j, want.data());
                compiled.mask_values(static_cast<int>(k), &data, row, j.begin, j.size(), got.data());
                for (int64_t n = 0; n < j.size(); ++n) {
                    const size_t at = static_cast<size_t>(n);
                    ASSERT_EQ(got[at], want[at]) << e.text() << " i " << row << " j " << j.begin + n;
                    ASSERT_TRUE(truth_there == 1 || truth_there == 2 * want[at])
                        << e.text() << " i " << row << " of " << i.begin << ".." << i.end << " j " << j.begin + n
                        << " of " << j.begin << ".." << j.end << ": " << truth_there;
                    ++values;
                }
            }
        }
    }
    EXPECT_GT(values, 100000);
    // Blocks are read as a whole, so a tile that straddles them is decided less often than by the exact summaries.
    EXPECT_GT(decided, decided_by_core * 85 / 100) << decided_by_core;
}
TEST(RenderExpr, MasksInFloat) { check_masks<float>(130, 100); }
TEST(RenderExpr, MasksInDouble) { check_masks<double>(30, 5000); }

template <class T>
void check_scores(int count, uint32_t seed) {
    const World w = make_world(seed, true);
    const Compiled<T> compiled(w, {}, random_texts(w, false, count, seed));
    if (!compiled) return;
    int values = 0, hidden = 0, hidden_by_core = 0, sums = 0;
    const std::vector<ArraySummary> all = summaries(w);
    for (size_t k = 0; k < compiled.scores.size(); ++k) {
        const Expr& e = compiled.scores[k];
        const Adjoint& adjoint = compiled.adjoints[k];
        constexpr int64_t kMost = 128;
        const RowProgram program(adjoint.expr, adjoint.outputs());
        std::vector<std::byte> scratch(static_cast<size_t>(program.scratch_bytes(kMost, sizeof(T))) + 64);
        void* base = scratch.data();
        size_t room = scratch.size();
        RowEvaluator<T> evaluator(program, kMost, std::align(64, 1, base, room));
        for (uint32_t round = 0; round < 12; ++round) {
            Generator g(seed + 1000 * static_cast<uint32_t>(k) + round, w);
            const ExprContext c = random_context(g, w);
            Data data = compiled.data(c);
            const Range i = random_tile(g), j = random_tile(g);
            const int hides = compiled.score_hides(static_cast<int>(k), &data, i.begin, i.end, j.begin, j.end);
            const bool hides_here = hides_all<T>(e, c, i, j, all);
            hidden += hides == 1, hidden_by_core += hides_here;

            std::array<std::vector<T>, kArrays> got_sums, want_sums;
            for (const Adjoint::Gather& gather : adjoint.gathers) {
                const size_t n = static_cast<size_t>(gather.array);
                if (!got_sums[n].empty() || g.roll(5) == 0) continue;  // unwanted now and then
                Array target = w.arrays[n];
                got_sums[n].assign(static_cast<size_t>(target.size()), T{0});
                want_sums[n] = got_sums[n];
                target.data = got_sums[n].data();
                int64_t step = 1;
                for (size_t d = static_cast<size_t>(target.rank); d-- > 0;) {
                    target.stride[d] = step;
                    step *= target.shape[d];
                }
                data.sums[n] = Compiled<T>::device(target);
            }

            for (int64_t row = i.begin; row < i.end; ++row) {
                const int64_t n = j.size();
                const std::vector<T> x = random_reals<T>(g, n), upstream = random_reals<T>(g, n);
                std::vector<T> got(x.size()), got_dx(x.size());
                evaluator.evaluate_nodes(c, row, j, x.data());
                compiled.score_values(static_cast<int>(k), &data, row, j.begin, n, x.data(), got.data(), got_dx.data());
                compiled.score_sums(static_cast<int>(k), &data, row, j.begin, n, upstream.data(), x.data());
                const auto result = evaluator.value(e.result());
                const auto dx = evaluator.value(adjoint.dx_node);
                for (int64_t m = 0; m < n; ++m) {
                    const size_t at = static_cast<size_t>(m);
                    const auto where = [&] {
                        return e.text() + " i " + std::to_string(row) + " j " + std::to_string(j.begin + m) + " x " +
                               std::to_string(x[at]);
                    };
                    ASSERT_TRUE(same(got[at], result.real_at(m)))
                        << where() << ": " << got[at] << " and not " << result.real_at(m);
                    ASSERT_TRUE(same(got_dx[at], dx.real_at(m)))
                        << where() << ": derivative " << got_dx[at] << " and not " << dx.real_at(m);
                    if (hides == 1) {
                        ASSERT_EQ(got[at], static_cast<T>(-kInf)) << where();
                    }
                    ++values;
                    for (const Adjoint::Gather& gather : adjoint.gathers) {
                        std::vector<T>& want = want_sums[static_cast<size_t>(gather.array)];
                        Array target = w.arrays[static_cast<size_t>(gather.array)];
                        int64_t offset = 0;
                        bool inside = !want.empty();
                        for (size_t d = 0; d < static_cast<size_t>(target.rank); ++d) {
                            const int64_t index = evaluator.value(gather.index_nodes[d]).integer_at(m);
                            inside = inside && index >= 0 && index < target.shape[d];
                            offset = offset * target.shape[d] + index;
                        }
                        const T share = upstream[at] * evaluator.value(gather.adjoint_node).real_at(m);
                        if (inside && share != 0) want[static_cast<size_t>(offset)] += share, ++sums;
                    }
                }
            }
            for (size_t a = 0; a < kArrays; ++a) {
                for (size_t element = 0; element < want_sums[a].size(); ++element) {
                    ASSERT_TRUE(same(got_sums[a][element], want_sums[a][element]))
                        << e.text() << " @" << a << "[" << element << "]: " << got_sums[a][element] << " and not "
                        << want_sums[a][element];
                }
            }
        }
    }
    EXPECT_GT(values, 50000);
    EXPECT_GT(sums, 10000);
    EXPECT_GT(hidden, hidden_by_core / 2) << hidden_by_core;
}
TEST(RenderExpr, ScoresInFloat) { check_scores<float>(80, 200); }
TEST(RenderExpr, ScoresInDouble) { check_scores<double>(30, 6000); }

TEST(RenderExpr, UsualMasksAreDecidedLikeOnTheCpu) {
    const World w = make_world(12, false);
    const std::vector<std::string> texts{
        "ge(i,j)",
        "ge(add(i,q_offset),j)",
        "lt(sub(i,j),128)",
        "le(abs(sub(i,j)),17)",
        "and(ge(i,j),lt(sub(i,j),100))",
        "eq(floordiv(i,64),floordiv(j,64))",
        "lt(mod(j,64),16)",
        "lt(j,div(seqlen_kv,2))",
        "lt(mul(0.5,sub(i,j)),10.25)",
        "where(lt(h,4),ge(i,j),le(i,j))",
    };
    const Compiled<float> compiled(w, texts, {});
    if (!compiled) return;
    for (size_t k = 0; k < texts.size(); ++k) {
        int no = 0, yes = 0;
        for (uint32_t seed = 0; seed < 400; ++seed) {
            Generator g(seed, w);
            const ExprContext c = random_context(g, w);
            const Data data = compiled.data(c);
            const int64_t size = 1 << g.roll(7), i0 = g.roll(400 / static_cast<int>(size)) * size,
                          j0 = g.roll(400 / static_cast<int>(size)) * size;
            const Range i{i0, i0 + size}, j{j0, j0 + size};
            const int got = compiled.mask_truth(static_cast<int>(k), &data, i.begin, i.end, j.begin, j.end);
            const Truth want = truth<float>(compiled.masks[k], c, i, j, {});
            ASSERT_EQ(got, want == Truth::no ? 0 : want == Truth::yes ? 2 : 1) << texts[k] << " " << i0 << " " << j0;
            no += got == 0, yes += got == 2;
        }
        EXPECT_GT(no, 10) << texts[k];
        EXPECT_GT(yes, 10) << texts[k];
    }
}

TEST(RenderExpr, DocumentsAreDecidedThroughSummaries) {
    World w;
    constexpr int64_t kTokens = 4096, kDocument = 320;
    const Array ids = make_array(w, DType::i64, {kTokens}, false, false);
    const Array keep = make_array(w, DType::boolean, {3, kTokens}, true, true);
    for (int64_t k = 0; k < kTokens; ++k) {
        store_int(ids, k, k / kDocument);
        for (int64_t b = 0; b < 3; ++b) {
            store_int(keep, b * keep.stride[0] + k * keep.stride[1], k < 1000 * (b + 1) ? 4 : 0);
        }
    }
    const Compiled<float> compiled(w, {"eq(gather(@0,i),gather(@0,j))", "gather(@1,b,j)"}, {});
    if (!compiled) return;
    int decided = 0;
    for (int64_t i = 0; i < kTokens; i += 64) {
        for (int64_t j = 0; j < kTokens; j += 64) {
            const Data data = compiled.data({});
            const bool same = i / kDocument == j / kDocument;  // a document is five tiles long
            ASSERT_EQ(compiled.mask_truth(0, &data, i, i + 64, j, j + 64), same ? 2 : 0) << i << " " << j;
            ++decided;
        }
    }
    EXPECT_EQ(decided, 4096);
    for (int64_t b = 0; b < 3; ++b) {
        for (int64_t j = 0; j < kTokens; j += 128) {
            ExprContext c;
            c.b = b;
            const Data data = compiled.data(c);
            const int64_t end = 1000 * (b + 1), first = end / 64 * 64;
            const int want = j + 128 <= first ? 2 : j >= end ? 0 : 1;
            ASSERT_EQ(compiled.mask_truth(1, &data, 0, 64, j, j + 128), want) << b << " " << j;
        }
    }
}

TEST(RenderExpr, SummariesHoldEveryElement) {
    World w = make_world(7, true);
    const Array& reals = w.arrays[5];  // 200 elements: with a block of nothing but NaN, and extremes at its edges
    for (int64_t k = 64; k < 128; ++k) store_float(reals.data, reals.dtype, k, kNan);
    store_float(reals.data, reals.dtype, 0, -1e30), store_float(reals.data, reals.dtype, 63, 1e30);
    store_float(reals.data, reals.dtype, 128, kInf), store_float(reals.data, reals.dtype, 199, -kInf);
    const Compiled<float> compiled(w, {"true"}, {});
    if (!compiled) return;
    for (const Array& a : w.arrays) {
        std::vector<std::array<double, 3>> want(static_cast<size_t>((a.size() + 63) / 64), {kInf, -kInf, 0});
        std::vector<std::array<double, 3>> got(want.size());
        size_t element = 0;
        for_each_element(a, [&](const auto&, int64_t offset) {
            std::array<double, 3>& block = want[element++ / 64];
            const double v = is_float(a.dtype) ? load_float(a.data, a.dtype, offset)
                                               : static_cast<int32_t>(load_int(a.data, a.dtype, offset));
            if (std::isnan(v)) block[2] = 1;
            else block[0] = std::min(block[0], v), block[1] = std::max(block[1], v);
        });
        const abi::Array on_device = Compiled<float>::device(a);
        compiled.summarise(&on_device, static_cast<int>(a.dtype), a.rank, static_cast<abi::Int>(got.size()),
                           got.empty() ? nullptr : got[0].data());
        EXPECT_EQ(got, want) << describe(a);
    }
}

TEST(RenderExpr, OnlyWhatCanHideAsks) {
    const World w = make_world(1, false);
    const auto asks = [&](const std::string& text) {
        return !jit::render_score_hides(parse_score(text, w), w.arrays, "hides").empty();
    };
    EXPECT_FALSE(asks("add(x,mul(0.1,sub(j,i)))"));
    EXPECT_FALSE(asks("mul(20.0,tanh(mul(x,0.05)))"));
    EXPECT_FALSE(asks("add(x,float(gather(@0,b,j)))"));
    EXPECT_TRUE(asks("where(ge(i,j),x,-inf)"));
    EXPECT_TRUE(asks("add(x,gather(@5,j))"));
    EXPECT_TRUE(asks("add(x,$0)"));
    EXPECT_TRUE(asks("log(x)"));
    EXPECT_TRUE(asks("div(x,2.0)"));
}

// What decides is never fused; a product on its way to the result may be.
TEST(RenderExpr, ProductsThatDecideAreExact) {
    const auto value = [&](const char* text) {
        return jit::render_score_value(Expr::parse(text, Role::score_mod), {}, "f");
    };
    const auto exact = [&](const char* text) { return value(text).find("expr::mul(") != std::string::npos; };
    EXPECT_FALSE(exact("add(x,mul(0.1,sub(j,i)))"));
    EXPECT_FALSE(exact("where(ge(i,j),sub(x,neg(mul(x,x))),-inf)"));
    EXPECT_TRUE(exact("where(lt(mul(x,0.1),1.0),x,-inf)"));
    EXPECT_TRUE(exact("where(lt(mul(x,0.1),1.0),add(mul(x,0.1),x),-inf)"));
    EXPECT_TRUE(exact("log(add(1.0,mul(x,x)))"));
}

TEST(RenderExpr, CompilesForGpus) {
    std::string searched;
    const jit::Nvrtc* nvrtc = jit::find_nvrtc(0, nullptr, &searched);
    if (!nvrtc) GTEST_SKIP() << searched;
    const World w = make_world(3, true);
    // A kernel for every expression: compilers take their time over very large functions.
    std::string text;
    int number = 0;
    const auto kernel = [&](const std::string& functions, const std::string& calls) {
        text += functions + "TW_KERNEL(k" + std::to_string(number++) +
                ", Params, p) {\n"
                "    const Site site = make_site(p.problem, 0, blockIdx.x);\n"
                "    const Int i = blockIdx.y, j = threadIdx.x;\n"
                "    const Real x = p.x[j];\n"
                "    p.x[j] = " +
                calls + ";\n}\n";
    };
    const std::string on_tile = "(site, p.data, i, i + 64, j, j + 64)";
    for (const std::string& mask : corner_masks()) {
        const Expr e = parse_mask(mask, w);
        const std::string n = std::to_string(number);
        kernel(jit::render_mask_value(e, w.arrays, "value" + n) + jit::render_mask_truth(e, w.arrays, "truth" + n),
               "value" + n + "(site, p.data, i, j) + truth" + n + on_tile);
    }
    for (const std::string& score : corner_scores()) {
        const Expr e = parse_score(score, w);
        const Adjoint adjoint = differentiate(e);
        const std::string n = std::to_string(number), hides = jit::render_score_hides(e, w.arrays, "hides" + n);
        kernel(jit::render_score_value(e, w.arrays, "value" + n) + hides +
                   jit::render_score_gradient(adjoint, w.arrays, "gradient" + n),
               "value" + n + "(site, p.data, x, i, j) + gradient" + n + "(site, p.data, x, i, j)" +
                   (hides.empty() ? "" : " + hides" + n + on_tile) +
                   (adjoint.gathers.empty() ? "" : ", gradient" + n + "_arrays(site, p.data, p.out, x, x, i, j)"));
    }
    kernel("", "0, expr::summarise_block(p.data.arrays[0], p.dtype, p.rank, j, p.summary + 3 * j)");

    const auto compile = [&](const std::string& real, int arch) {
        if (std::find(nvrtc->archs().begin(), nvrtc->archs().end(), arch) == nvrtc->archs().end()) return;
        jit::Source source;
        source.name = "expr_" + real + ".cu";
        source.text = "#include \"abi.h\"\nnamespace tilewise { using Real = " + real + "; }\n#include \"expr.cuh\"\n" +
                      kBefore +
                      "constexpr int kThreads = 64, kBlocks = 1;\n"
                      "struct Params {\n"
                      "    abi::Problem problem;\n"
                      "    MaskData data;\n"
                      "    GradientArrays out;\n"
                      "    Real* x;\n"
                      "    double* summary;\n"
                      "    Int dtype, rank;\n"
                      "};\n" +
                      text + "}  // namespace tilewise\n";
        for (const char* header : {"abi.h", "base.cuh", "expr.cuh"}) {
            source.headers.push_back({header, std::string(jit::kernel_text(header))});
        }
        EXPECT_NO_THROW((void)nvrtc->compile(source, {jit::Arch{arch / 10, arch % 10}})) << real << " " << arch;
    };
    compile("float", 75);
    compile("double", 90);
}

}  // namespace
