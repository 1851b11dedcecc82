#include "standard.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "core/dropout.hpp"
#include "core/mask.hpp"

namespace tilewise::test {
namespace {

using namespace core;

// One head of one sequence with its whole score matrix; R is the type of accumulators, float or double.
template <class R>
class StandardHead {
public:
    StandardHead(const Problem& problem, const BoundMask& mask, int64_t b, int64_t h)
        : p_(problem),
          b_(b),
          h_(h),
          g_(h / problem.group()),
          s_(problem.sequences[static_cast<size_t>(b)]),
          rows_(s_.q_len),
          keys_(s_.kv_len),
          d_(problem.head_dim_qk),
          dv_(problem.head_dim_v) {
        q = load(p_.q, s_.q_row0, rows_, h, d_);
        k = load(p_.k, s_.kv_row0, keys_, g_, d_);
        v = load(p_.v, s_.kv_row0, keys_, g_, dv_);
        const size_t size = static_cast<size_t>(rows_ * keys_);
        for (auto* matrix : {&capped, &mod_input, &x, &probability}) matrix->assign(size, R(0));
        visible.resize(size), keep.assign(size, 1);
        lse.assign(static_cast<size_t>(rows_), -std::numeric_limits<R>::infinity());
        for (int64_t i = 0; i < rows_; ++i) mask.visible(b, h, i, {0, keys_}, visible.data() + at(i, 0));
        if (!problem.score_mod.empty()) {
            mod_ = Expr::parse(problem.score_mod, Role::score_mod, problem.arrays,
                               static_cast<int>(problem.scalars.size()));
        }
        context_ = {b, h, g_, s_.q_len, s_.kv_len, s_.q_offset, problem.arrays, problem.scalars};
    }

    void forward() {
        std::unique_ptr<RowEvaluator<R>> mod;
        if (mod_) mod = std::make_unique<RowEvaluator<R>>(mod_, std::max<int64_t>(keys_, 1));
        for (int64_t i = 0; i < rows_; ++i) {
            for (int64_t j = 0; j < keys_; ++j) {
                if (!visible[at(i, j)]) continue;
                R sum = 0;
                for (int64_t n = 0; n < d_; ++n) sum += q[i * d_ + n] * k[j * d_ + n];
                R score = round(sum * static_cast<R>(p_.softmax_scale));
                const R softcap = static_cast<R>(p_.softcap);
                if (p_.softcap > 0) score = softcap * std::tanh(score / softcap);
                capped[at(i, j)] = score;
                if (p_.bias)
                    score += static_cast<R>(load_float(p_.bias.data, p_.bias.dtype, p_.bias.offset(b_, h_, i, j)));
                if (p_.alibi_slopes) score -= static_cast<R>(p_.slope(b_, h_)) * distance(i, j);
                mod_input[at(i, j)] = score;
            }
            std::copy_n(mod_input.data() + at(i, 0), keys_, x.data() + at(i, 0));
            if (mod) mod->real(context_, i, {0, keys_}, mod_input.data() + at(i, 0), x.data() + at(i, 0));
            R m = sink();
            bool empty = true;
            for (int64_t j = 0; j < keys_; ++j) {
                uint8_t& sees = visible[at(i, j)];
                sees = sees && x[at(i, j)] != -std::numeric_limits<R>::infinity();
                if (!sees) continue;
                empty = false;
                if (x[at(i, j)] > m || std::isnan(x[at(i, j)])) m = x[at(i, j)];
            }
            lse[i] = m;
            if (empty) continue;
            R l = std::exp(sink() - m);
            for (int64_t j = 0; j < keys_; ++j) l += visible[at(i, j)] ? std::exp(x[at(i, j)] - m) : R(0);
            for (int64_t j = 0; j < keys_; ++j) {
                probability[at(i, j)] = visible[at(i, j)] ? round(std::exp(x[at(i, j)] - m) / l) : R(0);
                if (p_.dropout_threshold) {
                    keep[at(i, j)] =
                        dropout_keep(p_.seed, p_.offset, b_ * p_.num_heads_q + h_, i, j, p_.dropout_threshold);
                }
            }
            lse[i] = m + std::log(l);
        }
    }

    void output(const ForwardArgs& args) const {
        for (int64_t i = 0; i < rows_; ++i) {
            for (int64_t n = 0; n < dv_; ++n) {
                R sum = 0;
                for (int64_t j = 0; j < keys_; ++j) {
                    if (visible[at(i, j)]) sum += dropped(i, j, probability[at(i, j)]) * v[j * dv_ + n];
                }
                store_float(args.o.data, args.o.dtype, args.o.offset(b_, s_.q_row0 + i, h_) + n * args.o.dim_stride,
                            sum);
            }
            if (args.lse) store_float(args.lse.data, args.lse.dtype, args.lse.offset(b_, h_, s_.q_row0 + i), lse[i]);
        }
    }

    // Adds to dk, dv of the KV head and to the shared sums; writes dq.
    void gradients(const BackwardArgs& args, std::vector<R>& dk, std::vector<R>& dv, std::vector<double>& dbias,
                   std::vector<double>& dslopes, std::vector<double>& dsinks,
                   std::vector<std::vector<double>>& darrays) {
        const std::vector<R> d_o = load(args.d_o, s_.q_row0, rows_, h_, dv_);
        std::vector<R> ds(static_cast<size_t>(keys_)), dq(static_cast<size_t>(d_));
        Adjoint adjoint;
        std::unique_ptr<RowProgram> program;
        std::unique_ptr<RowEvaluator<R>> mod;
        std::shared_ptr<double[]> scratch;
        const int64_t max_n = std::max<int64_t>(keys_, 1);
        if (mod_) {
            adjoint = differentiate(mod_);
            program = std::make_unique<RowProgram>(adjoint.expr, adjoint.outputs());
            const size_t bytes = static_cast<size_t>(program->scratch_bytes(max_n, sizeof(R)));
            scratch.reset(static_cast<double*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)),
                          [](double* m) { std::free(m); });
            mod = std::make_unique<RowEvaluator<R>>(*program, max_n, scratch.get());
        }
        for (int64_t i = 0; i < rows_; ++i) {
            const int64_t row = s_.q_row0 + i;
            const R dlse =
                args.dlse ? static_cast<R>(load_float(args.dlse.data, args.dlse.dtype, args.dlse.offset(b_, h_, row)))
                          : R(0);
            std::fill(dq.begin(), dq.end(), R(0));
            const bool empty = std::none_of(visible.data() + at(i, 0), visible.data() + at(i, 0) + keys_,
                                            [](uint8_t sees) { return sees; });
            R delta = 0;
            for (int64_t j = 0; j < keys_ && !empty; ++j) {
                if (!visible[at(i, j)]) continue;
                R sum = 0;
                for (int64_t n = 0; n < dv_; ++n) sum += d_o[i * dv_ + n] * v[j * dv_ + n];
                ds[j] = dropped(i, j, round(sum));
            }
            // D = sum of o * do, of the o that the forward pass has rounded: as the formula says, and as everybody does
            // who keeps o and not P.
            for (int64_t n = 0; n < dv_ && !empty; ++n) {
                R o = 0;
                for (int64_t j = 0; j < keys_; ++j) {
                    if (visible[at(i, j)]) o += dropped(i, j, probability[at(i, j)]) * v[j * dv_ + n];
                }
                delta += round(o) * d_o[i * dv_ + n];
            }
            if (!dsinks.empty() && (empty || sink() != -std::numeric_limits<R>::infinity())) {
                dsinks[h_] += empty ? dlse : std::exp(sink() - lse[i]) * (dlse - delta);
            }
            if (mod && !empty) mod->evaluate_nodes(context_, i, {0, keys_}, mod_input.data() + at(i, 0));
            std::vector<std::vector<int64_t>> offsets;
            for (const auto& gather : adjoint.gathers) {
                Array target = p_.arrays[static_cast<size_t>(gather.array)];
                int64_t stride = 1;
                for (int axis = target.rank - 1; axis >= 0; stride *= target.shape[axis--])
                    target.stride[axis] = stride;
                offsets.emplace_back(static_cast<size_t>(keys_));
                if (!empty) gather_offsets(*mod, gather, target, keys_, offsets.back().data());
            }
            for (int64_t j = 0; j < keys_ && !empty; ++j) {
                if (!visible[at(i, j)]) continue;
                for (int64_t n = 0; n < dv_; ++n)
                    dv[j * dv_ + n] += dropped(i, j, probability[at(i, j)]) * d_o[i * dv_ + n];
                R dx = probability[at(i, j)] * (ds[j] - delta + dlse);
                for (size_t n = 0; n < offsets.size(); ++n) {
                    const auto& gather = adjoint.gathers[n];
                    if (offsets[n][j] < 0 || darrays.empty()) continue;
                    darrays[static_cast<size_t>(gather.array)][offsets[n][j]] +=
                        dx * mod->value(gather.adjoint_node).real_at(j);
                }
                if (mod) dx *= mod->value(adjoint.dx_node).real_at(j);
                if (!dslopes.empty()) {
                    const bool per_batch = p_.alibi_slopes.rank == 2 && p_.alibi_slopes.shape[0] > 1;
                    dslopes[(per_batch ? b_ * p_.num_heads_q : 0) + h_] -= dx * distance(i, j);
                }
                if (!dbias.empty()) {
                    const auto& shape = p_.bias.shape;
                    const auto place = [&](int axis, int64_t index) { return shape[axis] == 1 ? 0 : index; };
                    dbias[((place(0, b_) * shape[1] + place(1, h_)) * shape[2] + place(2, i)) * shape[3] +
                          place(3, j)] += dx;
                }
                if (p_.softcap > 0) {
                    const R tanh = capped[at(i, j)] / static_cast<R>(p_.softcap);
                    dx *= 1 - tanh * tanh;
                }
                dx = round(dx);
                for (int64_t n = 0; n < d_; ++n) dq[n] += dx * k[j * d_ + n];
                for (int64_t n = 0; n < d_; ++n) dk[j * d_ + n] += dx * q[i * d_ + n];
            }
            for (int64_t n = 0; args.dq && n < d_; ++n) {
                store_float(args.dq.data, args.dq.dtype, args.dq.offset(b_, row, h_) + n * args.dq.dim_stride,
                            dq[n] * static_cast<R>(p_.softmax_scale));
            }
        }
    }

private:
    [[nodiscard]] size_t at(int64_t i, int64_t j) const { return static_cast<size_t>(i * keys_ + j); }
    [[nodiscard]] R distance(int64_t i, int64_t j) const { return static_cast<R>(std::abs(i + s_.q_offset - j)); }
    [[nodiscard]] R dropped(int64_t i, int64_t j, R value) const {
        return p_.dropout_threshold == 0 ? value : keep[at(i, j)] ? value / static_cast<R>(p_.keep_prob()) : R(0);
    }
    [[nodiscard]] R sink() const {
        return p_.sinks ? static_cast<R>(p_.sink(h_)) : -std::numeric_limits<R>::infinity();
    }
    [[nodiscard]] R round(R value) const {
        if (p_.dtype == DType::f16) return half_to_float(float_to_half(static_cast<float>(value)));
        if (p_.dtype == DType::bf16) return bfloat_to_float(float_to_bfloat(static_cast<float>(value)));
        return value;
    }
    [[nodiscard]] std::vector<R> load(const Tensor4& tensor, int64_t row0, int64_t rows, int64_t head,
                                      int64_t dims) const {
        std::vector<R> out;
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t n = 0; n < dims; ++n) {
                out.push_back(static_cast<R>(
                    load_float(tensor.data, tensor.dtype, tensor.offset(b_, row0 + r, head) + n * tensor.dim_stride)));
            }
        }
        return out;
    }

    const Problem& p_;
    int64_t b_, h_, g_;
    const Sequence& s_;
    int64_t rows_, keys_, d_, dv_;
    Expr mod_;
    ExprContext context_;
    std::vector<R> q, k, v, capped, mod_input, x, probability, lse;
    std::vector<uint8_t> visible, keep;
};

template <class R>
void forward(const Problem& problem, const ForwardArgs& args) {
    const BoundMask mask(problem);
    for (int64_t b = 0; b < problem.batch; ++b) {
        for (int64_t h = 0; h < problem.num_heads_q; ++h) {
            StandardHead<R> head(problem, mask, b, h);
            head.forward();
            head.output(args);
        }
    }
}

void store_all(const Array& target, const std::vector<double>& sums) {
    for (int64_t n = 0; target && n < target.size(); ++n) {
        int64_t offset = 0, rest = n;
        for (int d = target.rank - 1; d >= 0; rest /= target.shape[d--])
            offset += rest % target.shape[d] * target.stride[d];
        store_float(target.data, target.dtype, offset, sums[static_cast<size_t>(n)]);
    }
}

template <class R>
void backward(const Problem& problem, const BackwardArgs& args) {
    const BoundMask mask(problem);
    std::vector<double> dbias, dslopes, dsinks;
    std::vector<std::vector<double>> darrays;
    Array bias{args.dbias.data, args.dbias.dtype, 4, {}, {}};
    for (int axis = 0; axis < 4; ++axis)
        bias.shape[axis] = args.dbias.shape[axis], bias.stride[axis] = args.dbias.stride[axis];
    if (bias) dbias.resize(static_cast<size_t>(bias.size()));
    if (args.dalibi_slopes) dslopes.resize(static_cast<size_t>(args.dalibi_slopes.size()));
    if (args.dsinks) dsinks.resize(static_cast<size_t>(problem.num_heads_q));
    for (size_t n = 0; n < args.darrays.size(); ++n)
        darrays.emplace_back(static_cast<size_t>(problem.arrays[n].size()));

    for (int64_t b = 0; b < problem.batch; ++b) {
        const Sequence& s = problem.sequences[static_cast<size_t>(b)];
        for (int64_t g = 0; g < problem.num_heads_kv; ++g) {
            std::vector<R> dk(static_cast<size_t>(s.kv_len * problem.head_dim_qk));
            std::vector<R> dv(static_cast<size_t>(s.kv_len * problem.head_dim_v));
            for (int64_t h = g * problem.group(); h < (g + 1) * problem.group(); ++h) {
                StandardHead<R> head(problem, mask, b, h);
                head.forward();
                head.gradients(args, dk, dv, dbias, dslopes, dsinks, darrays);
            }
            const auto store = [&](const Tensor4& target, const std::vector<R>& sums, int64_t dims, double scale) {
                for (int64_t j = 0; target && j < s.kv_len; ++j) {
                    for (int64_t n = 0; n < dims; ++n) {
                        store_float(target.data, target.dtype,
                                    target.offset(b, s.kv_row0 + j, g) + n * target.dim_stride,
                                    sums[static_cast<size_t>(j * dims + n)] * static_cast<R>(scale));
                    }
                }
            };
            store(args.dk, dk, problem.head_dim_qk, problem.softmax_scale);
            store(args.dv, dv, problem.head_dim_v, 1.0);
        }
    }
    store_all(bias, dbias);
    store_all(args.dalibi_slopes, dslopes);
    store_all(args.dsinks, dsinks);
    for (size_t n = 0; n < args.darrays.size(); ++n) store_all(args.darrays[n], darrays[n]);
}

}  // namespace

void standard_forward(const Problem& problem, const ForwardArgs& args) {
    problem.dtype == DType::f64 ? forward<double>(problem, args) : forward<float>(problem, args);
}

void standard_backward(const Problem& problem, const BackwardArgs& args) {
    problem.dtype == DType::f64 ? backward<double>(problem, args) : backward<float>(problem, args);
}

}  // namespace tilewise::test
