#include "reference.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "parallel.hpp"
#include "reference_row.hpp"

// Loops over the rows of reference_row.hpp, which is the formula.

namespace tilewise::cpu {
namespace {

using namespace reference;
using core::BoundMask;
using core::ForwardArgs;
using core::Pass;
using core::Range;
using core::Workspace;

// The problem without bands and score_mod: a BoundMask of it is the mask text alone, and Row applies the bands itself.
// (If both came from one BoundMask, a mistake in the merged band would be in the oracle too.)
Problem without_bands(Problem problem) {
    problem.causal = false;
    problem.window_left = problem.window_right = -1;
    problem.chunk = 0;
    problem.score_mod.clear();
    return problem;
}

std::unique_ptr<ScoreMod> make_mod(const Problem& problem) {
    return problem.score_mod.empty() ? nullptr : std::make_unique<ScoreMod>(problem);
}

std::vector<Row> make_rows(const Problem& problem, const BoundMask* mask, const ScoreMod* mod, Arena& arena,
                           int threads) {
    std::vector<Row> rows;
    for (int slot = 0; slot < threads; ++slot) rows.emplace_back(problem, mask, mod, arena);
    return rows;
}

// dk and dv of one KV head of one sequence, per thread.
struct KvGradients {
    std::span<double> dk, dv;
    KvGradients(const Problem& problem, Arena& arena)
        : dk(arena.take<double>(problem.kv_rows * problem.head_dim_qk)),
          dv(arena.take<double>(problem.kv_rows * problem.head_dim_v)) {}
};

SharedGradients make_shared(const Problem& problem, Arena& arena) {
    SharedGradients shared;
    const auto zeros = [&](int64_t count) {
        const auto sums = arena.take<double>(count);
        std::fill(sums.begin(), sums.end(), 0.0);
        return sums;
    };
    if (problem.bias) {
        const auto& shape = problem.bias.shape;
        shared.bias = zeros(shape[0] * shape[1] * shape[2] * shape[3]);
    }
    if (problem.alibi_slopes) shared.slopes = zeros(problem.alibi_slopes.size());
    if (problem.sinks) shared.sinks = zeros(problem.num_heads_q);
    for (const Array& array : problem.arrays) {
        Array sums = array;
        sums.data = core::is_float(array.dtype) ? zeros(array.size()).data() : nullptr;
        sums.dtype = core::is_float(array.dtype) ? DType::f64 : DType::none;
        int64_t stride = 1;
        for (int d = array.rank - 1; d >= 0; stride *= array.shape[d--]) sums.stride[d] = stride;
        shared.arrays.push_back(sums);
    }
    return shared;
}

size_t bytes_for(const Problem& problem, Pass pass, int threads) {
    Arena arena(nullptr);
    const auto mod = make_mod(problem);
    make_rows(problem, nullptr, mod.get(), arena, threads);
    if (pass == Pass::backward) {
        for (int slot = 0; slot < threads; ++slot) KvGradients(problem, arena);
        make_shared(problem, arena);
    }
    return arena.used();
}

size_t workspace_bytes(const Problem& problem, Pass pass) { return bytes_for(problem, pass, max_threads()); }

// The number may have been set anew since the workspace was made.
int threads_for(const Problem& problem, Pass pass, Workspace workspace) {
    const int threads = max_threads();
    if (const size_t needed = bytes_for(problem, pass, threads); workspace.bytes < needed) {
        core::refuse("workspace", std::to_string(workspace.bytes) + " bytes",
                     "at least " + std::to_string(needed) + " bytes",
                     "The number of threads must not grow between planning and running.");
    }
    return threads;
}

void forward(const Problem& problem, const ForwardArgs& args, Workspace workspace) {
    Arena arena(workspace.data);
    const Problem text_only = without_bands(problem);
    const BoundMask mask(text_only);
    const auto mod = make_mod(problem);
    auto rows = make_rows(problem, &mask, mod.get(), arena, threads_for(problem, Pass::forward, workspace));

    parallel_for(problem.batch * problem.num_heads_q, [&](int64_t item, int slot) {
        const int64_t b = item / problem.num_heads_q, h = item % problem.num_heads_q;
        const Sequence& sequence = problem.sequences[static_cast<size_t>(b)];
        Row& row = rows[static_cast<size_t>(slot)];
        for (int64_t i = 0; i < sequence.q_len; ++i) {
            row.select(b, h, i);
            row.scores();
            row.softmax();
            row.output();
            store(args.o, b, sequence.q_row0 + i, h, row.o);
            if (args.lse) store(args.lse, b, h, sequence.q_row0 + i, row.lse);
        }
    });

    Row& zero = rows[0];
    std::fill(zero.o.begin(), zero.o.end(), 0.0);
    for (int64_t b = 0; b < (problem.packed_q ? 1 : problem.batch); ++b) {
        for (const Range& range : core::unused_q_rows(problem, b)) {
            for (int64_t r = range.begin; r < range.end; ++r) {
                for (int64_t h = 0; h < problem.num_heads_q; ++h) {
                    store(args.o, b, r, h, zero.o);
                    if (args.lse) store(args.lse, b, h, r, -kInf);
                }
            }
        }
    }
}

// Rounds the shared sums into the caller's gradients.
void store_shared(const Problem& problem, const BackwardArgs& args, const SharedGradients& shared) {
    if (args.dbias) {
        size_t n = 0;
        const auto& shape = problem.bias.shape;
        for (int64_t b = 0; b < shape[0]; ++b)
            for (int64_t h = 0; h < shape[1]; ++h)
                for (int64_t i = 0; i < shape[2]; ++i)
                    for (int64_t j = 0; j < shape[3]; ++j)
                        core::store_float(args.dbias.data, args.dbias.dtype, args.dbias.offset(b, h, i, j),
                                          shared.bias[n++]);
    }
    const auto store_array = [](const Array& target, const double* sums) {
        for (int64_t n = 0; n < target.size(); ++n)
            core::store_float(target.data, target.dtype, target.offset(n), sums[n]);
    };
    if (args.dalibi_slopes) store_array(args.dalibi_slopes, shared.slopes.data());
    if (args.dsinks) store_array(args.dsinks, shared.sinks.data());
    for (size_t k = 0; k < args.darrays.size(); ++k) {
        if (args.darrays[k]) store_array(args.darrays[k], static_cast<const double*>(shared.arrays[k].data));
    }
}

void backward(const Problem& problem, const BackwardArgs& args, Workspace workspace) {
    Arena arena(workspace.data);
    const Problem text_only = without_bands(problem);
    const BoundMask mask(text_only);
    const auto mod = make_mod(problem);
    const int threads = threads_for(problem, Pass::backward, workspace);
    auto rows = make_rows(problem, &mask, mod.get(), arena, threads);
    std::vector<KvGradients> kv;
    for (int slot = 0; slot < threads; ++slot) kv.emplace_back(problem, arena);
    SharedGradients shared = make_shared(problem, arena);
    const bool any_shared = args.dbias || args.dalibi_slopes || args.dsinks || !args.darrays.empty();

    const auto one_kv_head = [&](int64_t item, int slot) {
        const int64_t b = item / problem.num_heads_kv, g = item % problem.num_heads_kv;
        const Sequence& sequence = problem.sequences[static_cast<size_t>(b)];
        Row& row = rows[static_cast<size_t>(slot)];
        const auto [dk, dv] = kv[static_cast<size_t>(slot)];
        std::fill_n(dk.begin(), sequence.kv_len * problem.head_dim_qk, 0.0);
        std::fill_n(dv.begin(), sequence.kv_len * problem.head_dim_v, 0.0);
        SharedGradients nothing;
        for (int64_t h = g * problem.group(); h < (g + 1) * problem.group(); ++h) {
            for (int64_t i = 0; i < sequence.q_len; ++i) {
                row.select(b, h, i);
                row.scores();
                row.softmax();
                row.output();
                row.gradients(args, dk, dv, any_shared ? shared : nothing);
                if (args.dq) store(args.dq, b, sequence.q_row0 + i, h, row.dq);
            }
        }
        for (int64_t j = 0; j < sequence.kv_len; ++j) {
            const auto at = [&](std::span<double> rows_of, int64_t dims) {
                return rows_of.subspan(static_cast<size_t>(j * dims), static_cast<size_t>(dims));
            };
            if (args.dk) store(args.dk, b, sequence.kv_row0 + j, g, at(dk, problem.head_dim_qk));
            if (args.dv) store(args.dv, b, sequence.kv_row0 + j, g, at(dv, problem.head_dim_v));
        }
    };
    const int64_t items = problem.batch * problem.num_heads_kv;
    if (any_shared) {
        for (int64_t item = 0; item < items; ++item) one_kv_head(item, 0);  // one thread: no sum is shared by two
        store_shared(problem, args, shared);
    } else {
        parallel_for(items, one_kv_head);
    }

    const auto clear = [&](const Tensor4& tensor, int64_t b, const std::vector<Range>& ranges, int64_t heads,
                           int64_t dims) {
        if (!tensor) return;
        for (const Range& range : ranges)
            for (int64_t r = range.begin; r < range.end; ++r)
                for (int64_t h = 0; h < heads; ++h)
                    for (int64_t d = 0; d < dims; ++d)
                        core::store_float(tensor.data, tensor.dtype, tensor.offset(b, r, h) + d * tensor.dim_stride,
                                          0.0);
    };
    for (int64_t b = 0; b < (problem.packed_q ? 1 : problem.batch); ++b) {
        clear(args.dq, b, core::unused_q_rows(problem, b), problem.num_heads_q, problem.head_dim_qk);
    }
    for (int64_t b = 0; b < (problem.packed_kv ? 1 : problem.batch); ++b) {
        const auto unused = core::unused_kv_rows(problem, b);
        clear(args.dk, b, unused, problem.num_heads_kv, problem.head_dim_qk);
        clear(args.dv, b, unused, problem.num_heads_kv, problem.head_dim_v);
    }
}

std::string supports(const Problem&, Pass) { return ""; }

std::string explain(const Problem&, Pass pass) {
    return std::string("the formula in fp64, one row of scores at a time; parallel over batch x ") +
           (pass == Pass::forward ? "query heads"
                                  : "KV heads (one thread if bias, slopes, sinks or arrays want gradients)");
}

}  // namespace

const core::Implementation kReference = {"reference", supports, workspace_bytes, explain, forward, backward};

void attn_probs(const Problem& problem, const Rows3& lse, std::span<const int64_t> rows, std::span<const int64_t> heads,
                const Array& out) {
    const auto mod = make_mod(problem);
    const int threads = max_threads();
    const std::unique_ptr<double[]> memory(new double[bytes_for(problem, Pass::forward, threads) / sizeof(double)]);
    Arena arena(memory.get());
    const Problem text_only = without_bands(problem);
    const BoundMask mask(text_only);
    auto slots = make_rows(problem, &mask, mod.get(), arena, threads);

    const auto num_rows = static_cast<int64_t>(rows.size()), num_heads = static_cast<int64_t>(heads.size());
    parallel_for(problem.batch * num_heads * num_rows, [&](int64_t item, int slot) {
        const int64_t r = item % num_rows, n = item / num_rows % num_heads, b = item / num_rows / num_heads;
        const Sequence& sequence = problem.sequences[static_cast<size_t>(b)];
        const int64_t offset = b * out.stride[0] + n * out.stride[1] + r * out.stride[2];
        const int64_t i = rows[static_cast<size_t>(r)], h = heads[static_cast<size_t>(n)];
        const bool exists = i < sequence.q_len;
        Row& row = slots[static_cast<size_t>(slot)];
        if (exists) {
            row.select(b, h, i);
            row.scores();
            row.softmax();
            const int64_t place = lse ? lse.offset(b, h, sequence.q_row0 + i) : 0;
            for (int64_t j = 0; lse && j < sequence.kv_len; ++j) {
                if (row.visible[j]) row.p[j] = std::exp(row.x[j] - core::load_float(lse.data, lse.dtype, place));
            }
        }
        for (int64_t j = 0; j < out.shape[3]; ++j) {
            const double p = exists && j < sequence.kv_len ? row.p[j] : 0;
            core::store_float(out.data, out.dtype, offset + j * out.stride[3], p);
        }
    });
}

}  // namespace tilewise::cpu
