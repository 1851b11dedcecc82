// Tilewise for C++20: a header over the C ABI (tilewise.h). Link with libtilewise; nothing else is needed.
//
//     std::vector<float> q(2 * 512 * 8 * 64), k(q), v(q), o(q);
//     tilewise::Tensor tq(q.data(), {2, 512, 8, 64});             // [batch, seqlen, heads, head_dim], dense
//     tilewise::Options options;
//     options.causal = true;
//     tilewise::attention(tq, tk, tv, to, options);
//
// Masks and score functions are written with ordinary operators and sent as text; nothing is compiled:
//
//     options.mask = tilewise::documents(ids) & ~tilewise::prefix(16);
//     options.score_mod = [](auto x, auto b, auto h, auto i, auto j, auto s) { return x - 0.1 * abs(i - j); };
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tilewise.h"

namespace tilewise {

// what() names the argument, the value seen, what is allowed and what to do.
class Error : public std::runtime_error {
public:
    Error(tilewise_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
    [[nodiscard]] tilewise_status status() const { return status_; }

private:
    tilewise_status status_;
};

namespace detail {
inline void check(tilewise_status status) {
    if (status == TILEWISE_OUT_OF_MEMORY) throw std::bad_alloc();
    if (status != TILEWISE_OK) throw Error(status, tilewise_last_error());
}
}  // namespace detail

// 16-bit floats as bit patterns: the library converts, the caller stores.
struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

template <class T>
constexpr tilewise_dtype dtype_of() {
    using U = std::remove_cv_t<T>;
    if constexpr (std::is_same_v<U, double>) return TILEWISE_FLOAT64;
    if constexpr (std::is_same_v<U, float>) return TILEWISE_FLOAT32;
    if constexpr (std::is_same_v<U, Float16>) return TILEWISE_FLOAT16;
    if constexpr (std::is_same_v<U, BFloat16>) return TILEWISE_BFLOAT16;
    if constexpr (std::is_same_v<U, bool>) return TILEWISE_BOOL;
    if constexpr (std::is_same_v<U, uint8_t>) return TILEWISE_UINT8;
    if constexpr (std::is_same_v<U, int8_t>) return TILEWISE_INT8;
    if constexpr (std::is_same_v<U, int16_t>) return TILEWISE_INT16;
    if constexpr (std::is_same_v<U, int32_t>) return TILEWISE_INT32;
    if constexpr (std::is_same_v<U, uint32_t>) return TILEWISE_UINT32;
    if constexpr (std::is_same_v<U, int64_t>) return TILEWISE_INT64;
    return TILEWISE_NONE;
}

// A view of memory that the caller owns. Default-constructed: absent.
class Tensor {
public:
    Tensor() = default;

    // Dense, row-major.
    template <class T>
    Tensor(T* data, std::initializer_list<int64_t> shape) : Tensor(data, std::vector<int64_t>(shape), {}) {}

    // strides in elements; empty = dense.
    template <class T>
    Tensor(T* data, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
        static_assert(dtype_of<T>() != TILEWISE_NONE, "element type that Tilewise does not know");
        if (shape.size() > TILEWISE_MAX_RANK || (!strides.empty() && strides.size() != shape.size())) {
            throw Error(TILEWISE_INVALID_ARGUMENT, "Tensor: got rank " + std::to_string(shape.size()) + " with " +
                                                       std::to_string(strides.size()) +
                                                       " strides; allowed: rank 0 to 5 and one stride per axis.");
        }
        // Inputs are never written; the C ABI has one struct for both.
        c_.data = const_cast<std::remove_const_t<T>*>(data);
        c_.dtype = dtype_of<T>();
        c_.rank = static_cast<int32_t>(shape.size());
        int64_t dense = 1;
        for (size_t d = shape.size(); d-- > 0;) {
            c_.shape[d] = shape[d];
            c_.strides[d] = strides.empty() ? dense : strides[d];
            dense *= shape[d];
        }
    }

    explicit operator bool() const { return c_.dtype != TILEWISE_NONE; }
    [[nodiscard]] const tilewise_tensor& c() const { return c_; }

private:
    tilewise_tensor c_{};
};

// ---------------------------------------------------------------------------------------------------------------------
// Masks and score functions

namespace detail {

// Text with holes: arrays and run-time scalars get their numbers when a problem is put together.
struct Node {
    std::string op;
    std::vector<std::shared_ptr<const Node>> args;
    std::optional<Tensor> array;
    std::optional<double> scalar;
};
using NodePtr = std::shared_ptr<const Node>;

inline NodePtr node(std::string op, std::vector<NodePtr> args = {}) {
    return std::make_shared<const Node>(Node{std::move(op), std::move(args), {}, {}});
}

struct Rendered {
    std::vector<tilewise_tensor> arrays;
    std::vector<double> scalars;
    std::vector<const Node*> seen_arrays, seen_scalars;

    std::string text(const NodePtr& n) {
        if (n->array) return "@" + number(n.get(), seen_arrays, [&] { arrays.push_back(n->array->c()); });
        if (n->scalar) return "$" + number(n.get(), seen_scalars, [&] { scalars.push_back(*n->scalar); });
        std::string out = n->op;
        if (n->args.empty()) return out;
        out += '(';
        for (size_t k = 0; k < n->args.size(); ++k) out += (k ? "," : "") + text(n->args[k]);
        return out + ')';
    }

private:
    template <class Add>
    static std::string number(const Node* n, std::vector<const Node*>& seen, Add add) {
        for (size_t k = 0; k < seen.size(); ++k) {
            if (seen[k] == n) return std::to_string(k);
        }
        seen.push_back(n);
        add();
        return std::to_string(seen.size() - 1);
    }
};

inline std::string real_text(double value) {
    if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
    char buffer[40];
    std::snprintf(buffer, sizeof buffer, "%.17g", value);
    std::string text = buffer;
    if (text.find_first_of(".en") == std::string::npos) text += ".0";
    return text;
}

}  // namespace detail

// A traced value inside a mask_mod or score_mod. Operators build text; C++'s && || ! work, since they are overloaded
// and have no short cut here.
class Expr {
public:
    Expr(int value) : node_(detail::node(std::to_string(value))) {}        // NOLINT(google-explicit-constructor)
    Expr(double value) : node_(detail::node(detail::real_text(value))) {}  // NOLINT(google-explicit-constructor)
    Expr(float value) : Expr(static_cast<double>(value)) {}                // NOLINT(google-explicit-constructor)
    explicit Expr(bool value) : node_(detail::node(value ? "true" : "false")) {}
    explicit Expr(detail::NodePtr node) : node_(std::move(node)) {}
    [[nodiscard]] const detail::NodePtr& node() const { return node_; }

private:
    detail::NodePtr node_;
};

#define TILEWISE_BINARY(symbol, op) \
    inline Expr operator symbol(const Expr& a, const Expr& b) { return Expr(detail::node(op, {a.node(), b.node()})); }
TILEWISE_BINARY(+, "add")
TILEWISE_BINARY(-, "sub")
TILEWISE_BINARY(*, "mul")
TILEWISE_BINARY(/, "div")
TILEWISE_BINARY(%, "mod")
TILEWISE_BINARY(<, "lt")
TILEWISE_BINARY(<=, "le")
TILEWISE_BINARY(>, "gt")
TILEWISE_BINARY(>=, "ge")
TILEWISE_BINARY(==, "eq")
TILEWISE_BINARY(!=, "ne")
TILEWISE_BINARY(&&, "and")
TILEWISE_BINARY(||, "or")
#undef TILEWISE_BINARY
inline Expr operator!(const Expr& a) { return Expr(detail::node("not", {a.node()})); }
inline Expr operator-(const Expr& a) { return Expr(detail::node("neg", {a.node()})); }
inline Expr floordiv(const Expr& a, const Expr& b) { return Expr(detail::node("floordiv", {a.node(), b.node()})); }
inline Expr min(const Expr& a, const Expr& b) { return Expr(detail::node("min", {a.node(), b.node()})); }
inline Expr max(const Expr& a, const Expr& b) { return Expr(detail::node("max", {a.node(), b.node()})); }
inline Expr abs(const Expr& a) { return Expr(detail::node("abs", {a.node()})); }
inline Expr exp(const Expr& a) { return Expr(detail::node("exp", {a.node()})); }
inline Expr log(const Expr& a) { return Expr(detail::node("log", {a.node()})); }
inline Expr tanh(const Expr& a) { return Expr(detail::node("tanh", {a.node()})); }
inline Expr sqrt(const Expr& a) { return Expr(detail::node("sqrt", {a.node()})); }
inline Expr where(const Expr& condition, const Expr& a, const Expr& b) {
    return Expr(detail::node("where", {condition.node(), a.node(), b.node()}));
}

// An array that a function reads: table(h, i - j). Float arrays get a gradient through score_mod.
class Captured {
public:
    explicit Captured(const Tensor& tensor)
        : node_(std::make_shared<const detail::Node>(detail::Node{"", {}, tensor, {}})) {}
    template <class... Index>
    Expr operator()(const Index&... index) const {
        return Expr(detail::node("gather", {node_, Expr(index).node()...}));
    }
    [[nodiscard]] const detail::NodePtr& node() const { return node_; }

private:
    detail::NodePtr node_;
};

// A number that may change from call to call without changing the text.
inline Expr scalar(double value) { return Expr(std::make_shared<const detail::Node>(detail::Node{"", {}, {}, value})); }

struct Lengths {
    Expr seqlen_q{detail::node("seqlen_q")}, seqlen_kv{detail::node("seqlen_kv")};
    Expr q_offset{detail::node("q_offset")}, head_kv{detail::node("head_kv")};
};

namespace detail {
inline Expr variable(const char* name) { return Expr(node(name)); }
}  // namespace detail

class ScoreMod {
public:
    ScoreMod() = default;
    // function(x, b, h, i, j, s) -> x
    template <class F>
        requires std::is_invocable_r_v<Expr, F, Expr, Expr, Expr, Expr, Expr, Lengths>
    ScoreMod(F function)  // NOLINT(google-explicit-constructor)
        : node_(Expr(function(detail::variable("x"), detail::variable("b"), detail::variable("h"),
                              detail::variable("i"), detail::variable("j"), Lengths{}))
                    .node()) {}
    explicit operator bool() const { return node_ != nullptr; }
    [[nodiscard]] const detail::NodePtr& node() const { return node_; }

private:
    detail::NodePtr node_;
};

// Which keys a query sees; see docs/masks.md for each kind. Default-constructed: everything.
class Mask {
public:
    Mask() = default;
    explicit Mask(detail::NodePtr node) : node_(std::move(node)) {}
    explicit operator bool() const { return node_ != nullptr; }
    [[nodiscard]] const detail::NodePtr& node() const { return node_; }

private:
    detail::NodePtr node_;
};

inline Mask operator&(const Mask& a, const Mask& b) {
    return !a ? b : !b ? a : Mask(detail::node("and", {a.node(), b.node()}));
}
inline Mask operator|(const Mask& a, const Mask& b) {
    return !a || !b ? Mask() : Mask(detail::node("or", {a.node(), b.node()}));
}
inline Mask operator~(const Mask& a) {
    return Mask(detail::node("not", {a ? a.node() : detail::node("mod", {detail::node("true")})}));
}

namespace detail {
inline NodePtr array(const Tensor& tensor) { return std::make_shared<const Node>(Node{"", {}, tensor, {}}); }
inline NodePtr integer(int64_t value) { return node(std::to_string(value)); }
}  // namespace detail

inline Mask causal() { return Mask(detail::node("causal()")); }
inline Mask window(int64_t left, int64_t right) {
    return Mask(detail::node("window", {detail::integer(left), detail::integer(right)}));
}
inline Mask chunk(int64_t keys) { return Mask(detail::node("chunk", {detail::integer(keys)})); }
inline Mask key_padding(const Tensor& keep) { return Mask(detail::node("key_padding", {detail::array(keep)})); }
inline Mask documents(const Tensor& q_ids, const Tensor& kv_ids) {
    return Mask(detail::node("documents", {detail::array(q_ids), detail::array(kv_ids)}));
}
inline Mask documents(const Tensor& ids) {
    const auto array = detail::array(ids);
    return Mask(detail::node("documents", {array, array}));
}
inline Mask prefix(int64_t keys) { return Mask(detail::node("prefix", {detail::integer(keys)})); }
inline Mask prefix(const Tensor& keys) { return Mask(detail::node("prefix", {detail::array(keys)})); }
inline Mask intervals(const Tensor& startend_row_indices, bool causal) {
    return Mask(
        detail::node("intervals", {detail::array(startend_row_indices), detail::node(causal ? "causal" : "full")}));
}
inline Mask row_intervals(const Tensor& start, const Tensor& end) {
    return Mask(detail::node("row_intervals", {detail::array(start), detail::array(end)}));
}
inline Mask tree(const Tensor& bits, int64_t keys) {
    return Mask(detail::node("tree", {detail::array(bits), detail::integer(keys)}));
}
inline Mask blocks(const Tensor& map, int64_t block_q, int64_t block_kv) {
    return Mask(detail::node("blocks", {detail::array(map), detail::integer(block_q), detail::integer(block_kv)}));
}
inline Mask dense(const Tensor& array) { return Mask(detail::node("dense", {detail::array(array)})); }
// function(b, h, i, j, s) -> bool
template <class F>
    requires std::is_invocable_r_v<Expr, F, Expr, Expr, Expr, Expr, Lengths>
Mask mod(F function) {
    return Mask(detail::node("mod", {Expr(function(detail::variable("b"), detail::variable("h"), detail::variable("i"),
                                                   detail::variable("j"), Lengths{}))
                                         .node()}));
}

// ---------------------------------------------------------------------------------------------------------------------
// Problems

enum class Layout { bshd = TILEWISE_BSHD, bhsd = TILEWISE_BHSD };

// Every option of the formula (docs/formula.md), with the default of each.
struct Options {
    Layout layout = Layout::bshd;                 // of rank-4 tensors; packed ones are [total, heads, head_dim]
    std::optional<double> softmax_scale;          // default 1/sqrt(head_dim_qk)
    bool causal = false;                          // j <= t
    bool top_left = false;                        // q_offset = 0 instead of seqlen_kv - seqlen_q
    std::optional<int64_t> q_offset;              // one position offset for all sequences
    Tensor q_offset_array;                        // or one per sequence, int32 or int64 [batch]
    int64_t window_left = -1, window_right = -1;  // t - left <= j <= t + right; -1 = unbounded
    int64_t chunk = 0;
    Mask mask;
    ScoreMod score_mod;
    double softcap = 0;
    Tensor bias, alibi_slopes, sinks;
    Tensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, leftpad_kv;
    double dropout_p = 0;
    int64_t seed = 0, offset = 0;
    bool deterministic = false, batch_invariant = false, validate = false;
    std::string backend;  // empty = best
};

// The C struct and the storage it points into.
class Problem {
public:
    Problem(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o = {}) : backend_(o.backend) {
        tilewise_problem_init(&c_);
        c_.q = q.c(), c_.k = k.c(), c_.v = v.c();
        c_.layout = static_cast<int32_t>(o.layout);
        c_.has_softmax_scale = o.softmax_scale.has_value();
        c_.softmax_scale = o.softmax_scale.value_or(0);
        c_.causal = o.causal;
        c_.softcap = o.softcap;
        c_.window_left = o.window_left, c_.window_right = o.window_right, c_.chunk = o.chunk;
        c_.q_offset_mode = o.q_offset_array ? TILEWISE_OFFSET_ARRAY
                           : o.q_offset     ? TILEWISE_OFFSET_VALUE
                           : o.top_left     ? TILEWISE_TOP_LEFT
                                            : TILEWISE_BOTTOM_RIGHT;
        c_.q_offset = o.q_offset_array.c();
        c_.q_offset_value = o.q_offset.value_or(0);
        if (o.mask) mask_ = rendered_.text(o.mask.node());
        if (o.score_mod) score_mod_ = rendered_.text(o.score_mod.node());
        c_.bias = o.bias.c(), c_.alibi_slopes = o.alibi_slopes.c(), c_.sinks = o.sinks.c();
        c_.cu_seqlens_q = o.cu_seqlens_q.c(), c_.cu_seqlens_kv = o.cu_seqlens_kv.c();
        c_.seqused_q = o.seqused_q.c(), c_.seqused_kv = o.seqused_kv.c(), c_.leftpad_kv = o.leftpad_kv.c();
        c_.dropout_p = o.dropout_p, c_.seed = o.seed, c_.offset = o.offset;
        c_.deterministic = o.deterministic, c_.batch_invariant = o.batch_invariant, c_.validate = o.validate;
        c_.mask = mask_.empty() ? nullptr : mask_.c_str();
        c_.score_mod = score_mod_.empty() ? nullptr : score_mod_.c_str();
        c_.arrays = rendered_.arrays.data(), c_.num_arrays = static_cast<int32_t>(rendered_.arrays.size());
        c_.scalars = rendered_.scalars.data(), c_.num_scalars = static_cast<int32_t>(rendered_.scalars.size());
        c_.backend = backend_.c_str();
    }
    Problem(const Problem&) = delete;
    Problem& operator=(const Problem&) = delete;

    [[nodiscard]] const tilewise_problem& c() const { return c_; }
    // Arrays that mask and score_mod read, in the order of the gradients in Gradients::arrays.
    [[nodiscard]] size_t num_arrays() const { return rendered_.arrays.size(); }

private:
    tilewise_problem c_{};
    std::string mask_, score_mod_, backend_;
    detail::Rendered rendered_;
};

// Where gradients go; absent ones are not computed.
struct Gradients {
    Tensor dq, dk, dv, dbias, dalibi_slopes, dsinks;
    std::vector<Tensor> arrays;  // one per captured array, or empty
};

namespace detail {
inline tilewise_forward_args forward_args(const Tensor& o, const Tensor& lse) {
    tilewise_forward_args args;
    tilewise_forward_args_init(&args);
    args.o = o.c(), args.lse = lse.c();
    return args;
}

struct BackwardArgs {
    tilewise_backward_args c;
    std::vector<tilewise_tensor> arrays;

    BackwardArgs(const Problem& problem, const Tensor& d_o, const Tensor& o, const Tensor& lse, const Tensor& dlse,
                 const Gradients& g) {
        if (!g.arrays.empty() && g.arrays.size() != problem.num_arrays()) {
            throw Error(TILEWISE_INVALID_ARGUMENT, "Gradients::arrays: got " + std::to_string(g.arrays.size()) +
                                                       " tensors; allowed: none, or one per captured array, " +
                                                       std::to_string(problem.num_arrays()) + ".");
        }
        tilewise_backward_args_init(&c);
        c.d_o = d_o.c(), c.o = o.c(), c.lse = lse.c(), c.dlse = dlse.c();
        c.dq = g.dq.c(), c.dk = g.dk.c(), c.dv = g.dv.c();
        c.dbias = g.dbias.c(), c.dalibi_slopes = g.dalibi_slopes.c(), c.dsinks = g.dsinks.c();
        for (const Tensor& array : g.arrays) arrays.push_back(array.c());
        c.darrays = arrays.empty() ? nullptr : arrays.data();
    }
    BackwardArgs(const BackwardArgs&) = delete;
    BackwardArgs& operator=(const BackwardArgs&) = delete;
};
}  // namespace detail

// o = attention(q, k, v). lse (optional): float32, or float64 for float64 inputs, [batch, num_heads_q, seqlen_q] or
// [num_heads_q, total_q]. Throws Error; on failure nothing has been written.
inline void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Options& options = {},
                      const Tensor& lse = {}) {
    const Problem problem(q, k, v, options);
    const auto args = detail::forward_args(o, lse);
    detail::check(tilewise_forward(&problem.c(), &args));
}

// Gradients of attention() with the same options, from its o and lse. dlse (optional): gradient of lse.
inline void attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                               const Tensor& lse, const Gradients& gradients, const Options& options = {},
                               const Tensor& dlse = {}) {
    const Problem problem(q, k, v, options);
    const detail::BackwardArgs args(problem, d_o, o, lse, dlse, gradients);
    detail::check(tilewise_backward(&problem.c(), &args.c));
}

// Decide once, run many: never allocates in forward() and backward(). Thread-safe with one workspace per run.
class Plan {
public:
    explicit Plan(const Problem& problem, tilewise_pass pass = TILEWISE_FORWARD) {
        tilewise_plan* plan = nullptr;
        detail::check(tilewise_plan_create(&problem.c(), pass, &plan));
        plan_.reset(plan);
    }
    [[nodiscard]] size_t workspace_bytes() const {
        size_t bytes = 0;
        detail::check(tilewise_plan_workspace_size(plan_.get(), &bytes));
        return bytes;
    }
    [[nodiscard]] std::string explain() const {
        std::string text(tilewise_plan_explain(plan_.get(), nullptr, 0), '\0');
        tilewise_plan_explain(plan_.get(), text.data(), text.size());
        text.pop_back();
        return text;
    }
    // workspace: 64-byte aligned, contents undefined.
    void forward(const Problem& problem, const Tensor& o, const Tensor& lse, void* workspace, size_t bytes) const {
        const auto args = detail::forward_args(o, lse);
        detail::check(tilewise_plan_forward(plan_.get(), &problem.c(), &args, workspace, bytes, nullptr));
    }
    void backward(const Problem& problem, const Tensor& d_o, const Tensor& o, const Tensor& lse,
                  const Gradients& gradients, const Tensor& dlse, void* workspace, size_t bytes) const {
        const detail::BackwardArgs args(problem, d_o, o, lse, dlse, gradients);
        detail::check(tilewise_plan_backward(plan_.get(), &problem.c(), &args.c, workspace, bytes, nullptr));
    }

private:
    struct Destroy {
        void operator()(tilewise_plan* plan) const { tilewise_plan_destroy(plan); }
    };
    std::unique_ptr<tilewise_plan, Destroy> plan_;
};

}  // namespace tilewise
