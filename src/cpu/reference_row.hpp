// The formula in fp64, line by line; the oracle of all tests. reference.cpp loops over it.
//
// `Row` below is query i of head h of sequence b with all its keys, in fp64 whatever the dtype of the tensors, and has
// one member function per step of the formula, in its order:
//
//   scores()      x_j and visible_j     positions, scale, softcap, bias, ALiBi, score_mod, mask
//   softmax()     p_j and lse           with the sink
//   output()      o                     with dropout
//   gradients()   what this row adds to dq, dk, dv, dbias, dslope, dsink and the gradients of captured arrays
//
// Three rules hold throughout. A hidden key is skipped, not multiplied by zero, so what its k and v hold is never read.
// Whether a key is visible is decided element by element: positions by in_band(), lengths by the loop bounds, the mask
// text by BoundMask::visible; no tile, no summary. And gradients use nothing that an earlier pass rounded: P, lse, o
// and D = sum o * do are computed anew from q, k and v.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "core/dropout.hpp"
#include "core/error.hpp"
#include "core/expr.hpp"
#include "core/mask.hpp"
#include "core/problem.hpp"

namespace tilewise::cpu::reference {

using core::Array;
using core::BackwardArgs;
using core::DType;
using core::Problem;
using core::Rows3;
using core::Sequence;
using core::Tensor4;

inline constexpr double kInf = std::numeric_limits<double>::infinity();

// Hands out pieces of the workspace. With a null base it only counts, so that one piece of code both measures and
// carves.
class Arena {
public:
    explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}
    template <class T>
    std::span<T> take(int64_t count) {
        T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return {piece, base_ ? static_cast<size_t>(count) : 0};
    }
    [[nodiscard]] size_t used() const { return used_; }
    [[nodiscard]] bool only_counts() const { return base_ == nullptr; }

private:
    std::byte* base_;
    size_t used_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// Small arithmetic

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0); }

// causal, window and chunk for a query at position t and a key at position j.
inline bool in_band(const Problem& problem, int64_t t, int64_t j) {
    if (problem.causal && j > t) return false;
    if (problem.window_left >= 0 && t - j > problem.window_left) return false;
    if (problem.window_right >= 0 && j - t > problem.window_right) return false;
    if (problem.chunk > 0 && floor_div(j, problem.chunk) != floor_div(t, problem.chunk)) return false;
    return true;
}

// out[d] = element (b, row, h, d) of a tensor, widened.
inline void load(const Tensor4& tensor, int64_t b, int64_t row, int64_t h, std::span<double> out) {
    const int64_t offset = tensor.offset(b, row, h);
    const auto widen = [&](const auto* data, auto&& convert) {
        for (size_t d = 0; d < out.size(); ++d) {
            out[d] = convert(data[offset + static_cast<int64_t>(d) * tensor.dim_stride]);
        }
    };
    switch (tensor.dtype) {
        case DType::f64: return widen(static_cast<const double*>(tensor.data), [](double x) { return x; });
        case DType::f32: return widen(static_cast<const float*>(tensor.data), [](float x) { return double{x}; });
        case DType::f16: return widen(static_cast<const uint16_t*>(tensor.data), core::half_to_float);
        case DType::bf16: return widen(static_cast<const uint16_t*>(tensor.data), core::bfloat_to_float);
        default: throw core::Error(core::Status::internal, "reference: not a float tensor");
    }
}

// The one place where results are rounded to the dtype of the tensor.
inline void store(const Tensor4& tensor, int64_t b, int64_t row, int64_t h, std::span<const double> values) {
    const int64_t offset = tensor.offset(b, row, h);
    for (size_t d = 0; d < values.size(); ++d) {
        core::store_float(tensor.data, tensor.dtype, offset + static_cast<int64_t>(d) * tensor.dim_stride, values[d]);
    }
}

inline void store(const Rows3& rows, int64_t b, int64_t h, int64_t row, double value) {
    core::store_float(rows.data, rows.dtype, rows.offset(b, h, row), value);
}

// Eight sums, so that the compiler can use vectors; the order of an fp64 sum does not matter here.
inline double dot(std::span<const double> a, std::span<const double> b) {
    double sums[8] = {};
    size_t d = 0;
    for (; d + 8 <= a.size(); d += 8) {
        for (size_t lane = 0; lane < 8; ++lane) sums[lane] += a[d + lane] * b[d + lane];
    }
    double sum = 0;
    for (double s : sums) sum += s;
    for (; d < a.size(); ++d) sum += a[d] * b[d];
    return sum;
}

inline void add_scaled(std::span<double> sum, double factor, std::span<const double> x) {
    for (size_t d = 0; d < sum.size(); ++d) sum[d] += factor * x[d];
}

// ---------------------------------------------------------------------------------------------------------------------
// The formula

// score_mod and its derivative, made once and shared by all threads.
struct ScoreMod {
    core::Expr expr;
    core::Adjoint adjoint;
    core::RowProgram value_program, adjoint_program;

    explicit ScoreMod(const Problem& problem)
        : expr(core::Expr::parse(problem.score_mod, core::Role::score_mod, problem.arrays,
                                 static_cast<int>(problem.scalars.size()))),
          adjoint(core::differentiate(expr)),
          value_program(expr),
          adjoint_program(adjoint.expr, adjoint.outputs()) {}
};

// Gradients that many heads and sequences share, summed in fp64; a span is empty where the caller wants none.
struct SharedGradients {
    std::span<double> bias;     // contiguous, shape of bias
    std::span<double> slopes;   // contiguous, shape of the slopes
    std::span<double> sinks;    // [num_heads_q]
    std::vector<Array> arrays;  // contiguous fp64, shapes of the captured arrays; absent for integer arrays
};

class Row {
public:
    // Per key.
    std::span<double> capped;     // score after softcap
    std::span<double> mod_input;  // score before score_mod
    std::span<double> x, p, dx;
    std::span<uint8_t> visible, keep;
    // Per dimension.
    std::span<double> q, key, value, o, d_o, dq;
    // Of the whole row.
    bool empty = true;  // nothing visible
    double sink = -kInf, lse = -kInf;

    // The mask knows lengths and the mask text only.
    Row(const Problem& problem, const core::BoundMask* mask, const ScoreMod* mod, Arena& arena)
        : problem_(problem), mask_(mask), mod_(mod) {
        const int64_t keys = problem.kv_rows;
        for (auto* row : {&capped, &mod_input, &x, &p, &dx}) *row = arena.take<double>(keys);
        for (auto* row : {&visible, &keep}) *row = arena.take<uint8_t>(keys);
        for (auto* dims : {&q, &key, &dq}) *dims = arena.take<double>(problem.head_dim_qk);
        for (auto* dims : {&value, &o, &d_o}) *dims = arena.take<double>(problem.head_dim_v);
        if (!mod) return;
        offsets_ = arena.take<int64_t>(keys);
        const int64_t max_n = std::max<int64_t>(keys, 1);
        const auto values = arena.take<std::byte>(mod->value_program.scratch_bytes(max_n, sizeof(double)));
        const auto adjoints = arena.take<std::byte>(mod->adjoint_program.scratch_bytes(max_n, sizeof(double)));
        if (arena.only_counts()) return;
        mod_values_.emplace(mod->value_program, max_n, values.data());
        mod_adjoints_.emplace(mod->adjoint_program, max_n, adjoints.data());
    }

    void select(int64_t b, int64_t h, int64_t i) {
        b_ = b, h_ = h, i_ = i;
        g_ = h / problem_.group();
        sequence_ = &problem_.sequences[static_cast<size_t>(b)];
        keys_ = sequence_->kv_len;
        t_ = i + sequence_->q_offset;
        context_ = {
            b, h, g_, sequence_->q_len, sequence_->kv_len, sequence_->q_offset, problem_.arrays, problem_.scalars};
    }

    void scores() {
        mask_->visible(b_, h_, i_, {0, keys_}, visible.data());
        load(problem_.q, b_, sequence_->q_row0 + i_, h_, q);
        for (int64_t j = 0; j < keys_; ++j) {
            mod_input[j] = 0;
            visible[j] = visible[j] && in_band(problem_, t_, j);
            if (!visible[j]) continue;

            load(problem_.k, b_, sequence_->kv_row0 + j, g_, key);
            double score = problem_.head_dim_qk == 0 ? 0 : problem_.softmax_scale * dot(q, key);
            if (problem_.softcap > 0) score = problem_.softcap * std::tanh(score / problem_.softcap);
            capped[j] = score;
            const core::Grid4& bias = problem_.bias;
            if (bias) score += core::load_float(bias.data, bias.dtype, bias.offset(b_, h_, i_, j));
            if (problem_.alibi_slopes) score -= problem_.slope(b_, h_) * distance(j);
            mod_input[j] = score;
        }
        if (mod_) {
            mod_values_->real(context_, i_, {0, keys_}, mod_input.data(), x.data());
        } else {
            std::copy_n(mod_input.begin(), keys_, x.begin());
        }
        empty = true;
        for (int64_t j = 0; j < keys_; ++j) {
            visible[j] = visible[j] && x[j] != -kInf;  // NaN stays visible
            if (visible[j]) empty = false;
            else x[j] = -kInf;
        }
    }

    void softmax() {
        sink = problem_.sinks ? problem_.sink(h_) : -kInf;
        lse = sink;
        std::fill_n(p.begin(), keys_, 0.0);
        if (empty) return;

        double m = sink;
        for (int64_t j = 0; j < keys_; ++j) {
            if (x[j] > m || std::isnan(x[j])) m = x[j];
        }
        double l = std::exp(sink - m);
        for (int64_t j = 0; j < keys_; ++j) {
            if (visible[j]) l += std::exp(x[j] - m);
        }
        for (int64_t j = 0; j < keys_; ++j) {
            if (visible[j]) p[j] = std::exp(x[j] - m) / l;
        }
        lse = m + std::log(l);
    }

    void output() {
        for (int64_t j = 0; j < keys_; ++j) {
            keep[j] = problem_.dropout_threshold == 0 ||
                      core::dropout_keep(problem_.seed, problem_.offset, b_ * problem_.num_heads_q + h_, i_, j,
                                         problem_.dropout_threshold);
        }
        // A NaN score makes its row NaN, even if dropout leaves nothing of it.
        std::fill(o.begin(), o.end(), std::isnan(lse) ? lse : 0.0);
        for (int64_t j = 0; j < keys_; ++j) {
            if (!visible[j]) continue;
            load(problem_.v, b_, sequence_->kv_row0 + j, g_, value);
            add_scaled(o, dropped(j, p[j]), value);
        }
    }

    // Adds to dk and dv, [kv_len, head_dim] of this KV head, and to `shared`; sets dq. Any span may be empty: not
    // wanted.
    void gradients(const BackwardArgs& args, std::span<double> dk, std::span<double> dv, SharedGradients& shared) {
        std::fill(dq.begin(), dq.end(), 0.0);
        const int64_t row = sequence_->q_row0 + i_;
        const double dlse =
            args.dlse ? core::load_float(args.dlse.data, args.dlse.dtype, args.dlse.offset(b_, h_, row)) : 0;
        if (empty) {
            if (!shared.sinks.empty()) shared.sinks[h_] += dlse;  // lse = sink, and nothing else moves
            return;
        }

        load(args.d_o, b_, row, h_, d_o);
        const double D = dot(o, d_o);
        for (int64_t j = 0; j < keys_; ++j) {
            if (!visible[j]) continue;
            load(problem_.v, b_, sequence_->kv_row0 + j, g_, value);
            const double dp = dropped(j, dot(d_o, value));
            dx[j] = p[j] * (dp - D + dlse);
            if (!dv.empty()) add_scaled(piece(dv, j, problem_.head_dim_v), dropped(j, p[j]), d_o);
        }
        if (!shared.sinks.empty() && sink != -kInf) shared.sinks[h_] += std::exp(sink - lse) * (dlse - D);

        // From here on dx is the gradient of the score one step further up the formula.
        if (mod_) mod_gradient(shared);
        for (int64_t j = 0; j < keys_; ++j) {
            if (!visible[j]) continue;
            if (!shared.slopes.empty()) shared.slopes[slope_index()] -= dx[j] * distance(j);
            if (!shared.bias.empty()) shared.bias[bias_index(j)] += dx[j];
            if (problem_.softcap > 0) {
                const double tanh = capped[j] / problem_.softcap;
                dx[j] *= 1 - tanh * tanh;
            }
            if (problem_.head_dim_qk == 0) continue;
            load(problem_.k, b_, sequence_->kv_row0 + j, g_, key);
            add_scaled(dq, dx[j] * problem_.softmax_scale, key);
            if (!dk.empty()) add_scaled(piece(dk, j, problem_.head_dim_qk), dx[j] * problem_.softmax_scale, q);
        }
    }

private:
    [[nodiscard]] double distance(int64_t j) const { return std::abs(static_cast<double>(t_ - j)); }
    [[nodiscard]] double dropped(int64_t j, double y) const {
        return problem_.dropout_threshold == 0 ? y : keep[j] ? y / problem_.keep_prob() : 0.0;
    }
    static std::span<double> piece(std::span<double> rows, int64_t j, int64_t dims) {
        return rows.subspan(static_cast<size_t>(j * dims), static_cast<size_t>(dims));
    }
    [[nodiscard]] size_t slope_index() const {
        const Array& slopes = problem_.alibi_slopes;
        return static_cast<size_t>((slopes.rank == 2 && slopes.shape[0] > 1 ? b_ * problem_.num_heads_q : 0) + h_);
    }
    [[nodiscard]] size_t bias_index(int64_t j) const {
        const auto& shape = problem_.bias.shape;
        const auto at = [&](int axis, int64_t index) { return shape[axis] == 1 ? 0 : index; };
        return static_cast<size_t>(((at(0, b_) * shape[1] + at(1, h_)) * shape[2] + at(2, i_)) * shape[3] + at(3, j));
    }

    void mod_gradient(SharedGradients& shared) {
        mod_adjoints_->evaluate_nodes(context_, i_, {0, keys_}, mod_input.data());
        for (const auto& gather : mod_->adjoint.gathers) {
            const Array target = shared.arrays.empty() ? Array{} : shared.arrays[static_cast<size_t>(gather.array)];
            if (!target) continue;
            const auto factor = mod_adjoints_->value(gather.adjoint_node);
            core::gather_offsets(*mod_adjoints_, gather, target, keys_, offsets_.data());
            for (int64_t j = 0; j < keys_; ++j) {
                if (!visible[j] || offsets_[j] < 0) continue;
                static_cast<double*>(target.data)[offsets_[j]] += dx[j] * factor.real_at(j);
            }
        }
        const auto factor = mod_adjoints_->value(mod_->adjoint.dx_node);
        for (int64_t j = 0; j < keys_; ++j) {
            if (visible[j]) dx[j] *= factor.real_at(j);
        }
    }

    const Problem& problem_;
    const core::BoundMask* mask_;
    const ScoreMod* mod_;
    std::optional<core::RowEvaluator<double>> mod_values_, mod_adjoints_;
    std::span<int64_t> offsets_;
    core::ExprContext context_;
    const Sequence* sequence_ = nullptr;
    int64_t b_ = 0, h_ = 0, g_ = 0, i_ = 0, t_ = 0, keys_ = 0;
};

}  // namespace tilewise::cpu::reference
