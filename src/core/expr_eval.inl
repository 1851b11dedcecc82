// The inner loops of expression evaluation: one node after the other, each along the whole row, so that the compiler
// vectorises every loop. This file is compiled once per ISA: define TILEWISE_EXPR_NAMESPACE, include it, and give
// tilewise::core::TILEWISE_EXPR_NAMESPACE::evaluate_row<T> to RowEvaluator. Nothing else is visible from outside.
//
// A node that does not vary along the row is computed once, by the same code with n = 1 lane.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "expr.hpp"

// Destination rows are never operands of another element: a row is read and written at the same k (out may be x).
#if defined(__clang__)
#define TILEWISE_EXPR_LOOP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define TILEWISE_EXPR_LOOP _Pragma("GCC ivdep")
#else
#define TILEWISE_EXPR_LOOP __pragma(loop(ivdep))
#endif

namespace tilewise::core::TILEWISE_EXPR_NAMESPACE {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Element operations. Integers wrap around: their arithmetic is done on unsigned.

using I = int32_t;
inline I wrapped(uint32_t v) { return static_cast<I>(v); }
inline uint32_t bits(I v) { return static_cast<uint32_t>(v); }

struct Add {
    I operator()(I a, I b) const { return wrapped(bits(a) + bits(b)); }
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Sub {
    I operator()(I a, I b) const { return wrapped(bits(a) - bits(b)); }
    template <class T>
    T operator()(T a, T b) const {
        return a - b;
    }
};
struct Mul {
    I operator()(I a, I b) const { return wrapped(bits(a) * bits(b)); }
    template <class T>
    T operator()(T a, T b) const {
        return a * b;
    }
};
struct Div {
    template <class T>
    T operator()(T a, T b) const {
        return a / b;
    }
};
struct FloorDiv {
    I operator()(I a, I b) const {
        if (b == 0) return 0;
        if (b == -1) return wrapped(0u - bits(a));  // INT_MIN / -1 wraps
        return a / b - ((a % b != 0) & ((a < 0) != (b < 0)));
    }
    template <class T>
    T operator()(T a, T b) const {
        return std::floor(a / b);
    }
};
struct Mod {
    I operator()(I a, I b) const {
        if (b == 0 || b == -1) return 0;
        const I r = a % b;
        return r != 0 && (r < 0) != (b < 0) ? r + b : r;
    }
    template <class T>
    T operator()(T a, T b) const {
        const T r = std::fmod(a, b);
        return r != 0 && (r < 0) != (b < 0) ? r + b : r;
    }
};
struct Min {
    template <class T>
    T operator()(T a, T b) const {
        return a <= b || a != a ? a : b;
    }
};
struct Max {
    template <class T>
    T operator()(T a, T b) const {
        return a >= b || a != a ? a : b;
    }
};
struct Neg {
    I operator()(I a) const { return wrapped(0u - bits(a)); }
    template <class T>
    T operator()(T a) const {
        return -a;
    }
};
struct Abs {
    I operator()(I a) const { return a < 0 ? wrapped(0u - bits(a)) : a; }
    template <class T>
    T operator()(T a) const {
        return std::fabs(a);
    }
};
struct Exp {
    template <class T>
    T operator()(T a) const {
        return std::exp(a);
    }
};
struct Log {
    template <class T>
    T operator()(T a) const {
        return std::log(a);
    }
};
struct Tanh {
    template <class T>
    T operator()(T a) const {
        return std::tanh(a);
    }
};
struct Sqrt {
    template <class T>
    T operator()(T a) const {
        return std::sqrt(a);
    }
};
struct Lt {
    template <class T>
    uint8_t operator()(T a, T b) const {
        return a < b;
    }
};
struct Le {
    template <class T>
    uint8_t operator()(T a, T b) const {
        return a <= b;
    }
};
struct Eq {
    template <class T>
    uint8_t operator()(T a, T b) const {
        return a == b;
    }
};
struct Ne {
    template <class T>
    uint8_t operator()(T a, T b) const {
        return a != b;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Operands and results: rows or single values

template <class V>
struct Row {
    const V* p;
    V operator[](int64_t k) const { return p[k]; }
};
template <class V>
struct Same {
    V v;
    V operator[](int64_t) const { return v; }
};

template <class V, class T>
V single(const RowValue<T>& value) {
    if constexpr (std::is_same_v<V, T>) return value.real;
    else return static_cast<V>(value.integer);
}

template <class V, class T, class F>
void with_operand(const RowValue<T>& value, F&& f) {
    if (value.row) f(Row<V>{static_cast<const V*>(value.row)});
    else f(Same<V>{single<V>(value)});
}

// Where a node's values go: a row of n, or one value if no operand is a row.
template <class T>
struct Target {
    RowValue<T>* value;
    void* row;
    int64_t n;

    template <class V>
    void set(V v) const {
        value->row = nullptr;
        if constexpr (std::is_same_v<V, T>) value->real = v;
        else value->integer = v;
    }
    template <class V, class F>
    void fill(F f) const {
        V* const out = static_cast<V*>(row);
        const int64_t count = n;  // a local, because a byte store may alias any member
        TILEWISE_EXPR_LOOP
        for (int64_t k = 0; k < count; ++k) out[k] = f(k);
        value->row = row;
    }
};

template <class Out, class In, class F, class T>
void unary(const Target<T>& to, const RowValue<T>& a, F op) {
    if (!to.row) return to.template set<Out>(static_cast<Out>(op(single<In>(a))));
    const In* pa = static_cast<const In*>(a.row);
    to.template fill<Out>([=](int64_t k) { return static_cast<Out>(op(pa[k])); });
}

template <class Out, class In, class F, class T>
void binary(const Target<T>& to, const RowValue<T>& a, const RowValue<T>& b, F op) {
    if (!to.row) return to.template set<Out>(static_cast<Out>(op(single<In>(a), single<In>(b))));
    const In* pa = static_cast<const In*>(a.row);
    const In* pb = static_cast<const In*>(b.row);
    if (!pb) {
        const In vb = single<In>(b);
        to.template fill<Out>([=](int64_t k) { return static_cast<Out>(op(pa[k], vb)); });
    } else if (!pa) {
        const In va = single<In>(a);
        to.template fill<Out>([=](int64_t k) { return static_cast<Out>(op(va, pb[k])); });
    } else {
        to.template fill<Out>([=](int64_t k) { return static_cast<Out>(op(pa[k], pb[k])); });
    }
}

// Integer or real by kind of the operands.
template <class F, class T>
void arithmetic(const Target<T>& to, Kind kind, const RowValue<T>& a, const RowValue<T>& b, F op) {
    if (kind == Kind::real) binary<T, T>(to, a, b, op);
    else binary<I, I>(to, a, b, op);
}
template <class F, class T>
void compare(const Target<T>& to, Kind operands, const RowValue<T>& a, const RowValue<T>& b, F op) {
    if (operands == Kind::real) binary<uint8_t, T>(to, a, b, op);
    else binary<uint8_t, I>(to, a, b, op);
}

// Division of a row by one positive integer, the usual case, without a division instruction per element: a shift for
// powers of two, else in double, where the quotient of two int32 is never rounded across an integer.
template <bool kModulo, class T>
bool divide_by_constant(const Target<T>& to, const RowValue<T>& a, const RowValue<T>& b) {
    if (!a.row || b.row || b.integer <= 0) return false;
    const I* in = static_cast<const I*>(a.row);
    const I d = b.integer;
    if ((d & (d - 1)) == 0) {
        int shift = 0;
        while ((I{1} << shift) != d) ++shift;
        if (kModulo) to.template fill<I>([=](int64_t k) { return in[k] & (d - 1); });
        else to.template fill<I>([=](int64_t k) { return in[k] >> shift; });
        return true;
    }
    const double divisor = d;
    to.template fill<I>([=](int64_t k) {
        const I toward_zero = static_cast<I>(static_cast<double>(in[k]) / divisor);
        const I rest = in[k] - toward_zero * d;
        const I borrow = rest < 0;
        return kModulo ? rest + (borrow ? d : 0) : toward_zero - borrow;
    });
    return true;
}

template <class V, class T>
void select(const Target<T>& to, const RowValue<T>& condition, const RowValue<T>& a, const RowValue<T>& b) {
    if (!condition.row) {
        const RowValue<T>& taken = condition.integer ? a : b;
        if (!taken.row) {
            *to.value = taken;
        } else {  // copied: the operand's row is reused after this
            const V* p = static_cast<const V*>(taken.row);
            to.template fill<V>([=](int64_t k) { return p[k]; });
        }
        return;
    }
    const uint8_t* c = static_cast<const uint8_t*>(condition.row);
    with_operand<V>(a, [&](auto pa) {
        with_operand<V>(b, [&](auto pb) {
            // Both sides are loaded before the choice, so that the compiler can blend.
            to.template fill<V>([=](int64_t k) {
                const V va = pa[k], vb = pb[k];
                return c[k] ? va : vb;
            });
        });
    });
}

template <class T>
void convert(const Target<T>& to, Kind from, Kind kind, const RowValue<T>& a) {
    const auto same = [](auto v) { return v; };
    if (kind == Kind::integer) unary<I, uint8_t>(to, a, same);
    else if (from == Kind::integer) unary<T, I>(to, a, same);
    else unary<T, uint8_t>(to, a, same);
}

// ---------------------------------------------------------------------------------------------------------------------
// Gather

template <class V>
V load(const void* data, int64_t offset) {
    V v;
    std::memcpy(&v, static_cast<const std::byte*>(data) + offset * static_cast<int64_t>(sizeof(V)), sizeof(V));
    return v;
}

// Calls f(loader) with loader(data, offset) -> V, for the dtypes that give that kind.
template <class V, class F>
void with_loader(DType dtype, F&& f) {
    const auto plain = [&]<class E>(E) {
        f([](const void* data, int64_t offset) { return static_cast<V>(load<E>(data, offset)); });
    };
    if constexpr (std::is_same_v<V, uint8_t>) {  // any non-zero byte is true
        f([](const void* data, int64_t k) { return static_cast<V>(load<uint8_t>(data, k) != 0); });
    } else if constexpr (std::is_same_v<V, I>) {
        switch (dtype) {
            case DType::i64: return plain(int64_t{});
            case DType::i16: return plain(int16_t{});
            case DType::i8: return plain(int8_t{});
            case DType::u8: return plain(uint8_t{});
            default: return plain(int32_t{});  // u32 too: the same bits
        }
    } else {
        switch (dtype) {
            case DType::f64: return plain(double{});
            case DType::f32: return plain(float{});
            case DType::f16:
                return f([](const void* data, int64_t k) { return V{half_to_float(load<uint16_t>(data, k))}; });
            default: return f([](const void* data, int64_t k) { return V{bfloat_to_float(load<uint16_t>(data, k))}; });
        }
    }
}

template <class V, class T>
void gather(const RowFrame<T>& frame, const Target<T>& to, const Node& node) {
    const Array& array = frame.context->arrays[static_cast<size_t>(node.index)];
    const auto index = [&](int axis) -> const RowValue<T>& {
        return frame.values[node.args[static_cast<size_t>(axis)]];
    };
    const auto zeros = [&] { to.template set<V>(V{}); };

    int64_t base = 0;  // of the axes whose index is one value
    int rows = 0;      // axes whose index is a row
    int row_axis = 0;
    for (int axis = 0; axis < array.rank; ++axis) {
        const size_t d = static_cast<size_t>(axis);
        if (array.shape[d] <= 0) return zeros();
        if (!index(axis).uniform()) {
            ++rows;
            row_axis = axis;
            continue;
        }
        const I v = index(axis).integer;
        if (v < 0 || v >= array.shape[d]) return zeros();
        base += v * array.stride[d];
    }

    with_loader<V>(array.dtype, [&](auto element) {
        if (rows == 0) return to.template set<V>(element(array.data, base));
        const size_t d = static_cast<size_t>(row_axis);
        const Node& row_node = frame.program->expr().nodes()[static_cast<size_t>(node.args[d])];
        if (rows == 1 && row_node.op == Op::variable) {
            // Indexed by j itself: one run of elements, zeros on both sides. (j stays below 2^31: it is an int32.)
            const int64_t stride = array.stride[d];
            const int64_t shape = array.shape[d];
            const I j0 = static_cast<I>(frame.j_begin);
            const int64_t first = std::min(frame.n, j0 < 0 ? -int64_t{j0} : 0);
            const int64_t last = std::min(frame.n, std::max(first, shape - j0));
            if (int64_t{j0} + frame.n <= int64_t{INT32_MAX} + 1) {
                V* out = static_cast<V*>(to.row);
                for (int64_t k = 0; k < first; ++k) out[k] = V{};
                const int64_t start = base + j0 * stride;
                if (stride == 1) {
                    for (int64_t k = first; k < last; ++k) out[k] = element(array.data, start + k);
                } else {
                    for (int64_t k = first; k < last; ++k) out[k] = element(array.data, start + k * stride);
                }
                for (int64_t k = last; k < frame.n; ++k) out[k] = V{};
                to.value->row = to.row;
                return;
            }
        }
        // General. An index out of range reads element `base`, which exists, and drops it.
        struct Axis {
            const I* index;
            uint64_t shape;
            int64_t stride;
        };
        std::array<Axis, kMaxRank> axes{};
        int used = 0;
        for (int axis = 0; axis < array.rank; ++axis) {
            if (index(axis).uniform()) continue;
            axes[static_cast<size_t>(used++)] = {static_cast<const I*>(index(axis).row),
                                                 static_cast<uint64_t>(array.shape[static_cast<size_t>(axis)]),
                                                 array.stride[static_cast<size_t>(axis)]};
        }
        const void* const data = array.data;
        const auto loop = [&](auto one_axis) {
            const size_t count = one_axis ? 1 : static_cast<size_t>(rows);
            to.template fill<V>([=](int64_t k) {
                int64_t offset = base;
                bool inside = true;
                for (size_t a = 0; a < count; ++a) {
                    const int64_t at = axes[a].index[k];
                    const bool in = static_cast<uint64_t>(at) < axes[a].shape;  // negative ones are huge
                    inside &= in;
                    offset += in ? at * axes[a].stride : 0;
                }
                const V v = element(data, offset);
                return inside ? v : V{};
            });
        };
        if (rows == 1) loop(std::true_type{});
        else loop(std::false_type{});
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Leaves

template <class T>
I variable(const RowFrame<T>& frame, Variable v) {
    const ExprContext& c = *frame.context;
    switch (v) {
        case Variable::b: return static_cast<I>(c.b);
        case Variable::h: return static_cast<I>(c.h);
        case Variable::i: return static_cast<I>(frame.i);
        case Variable::seqlen_q: return static_cast<I>(c.seqlen_q);
        case Variable::seqlen_kv: return static_cast<I>(c.seqlen_kv);
        case Variable::q_offset: return static_cast<I>(c.q_offset);
        case Variable::head_kv: return static_cast<I>(c.head_kv);
        case Variable::x:
        case Variable::j: break;
    }
    return 0;
}

inline I integer_scalar(double v) {
    if (v != v) return 0;
    if (v <= -2147483648.0) return INT32_MIN;
    if (v >= 2147483647.0) return INT32_MAX;
    return static_cast<I>(v);
}

}  // namespace

template <class T>
void evaluate_row(const RowFrame<T>& frame) {
    const std::span<const Node> nodes = frame.program->expr().nodes();
    for (const RowProgram::Step& step : frame.program->steps()) {
        const Node& node = nodes[static_cast<size_t>(step.node)];
        Target<T> to{frame.values + step.node, nullptr, frame.n};
        bool varies = node.op == Op::variable;
        for (int arg = 0; arg < node.num_args; ++arg) {
            varies |= frame.values[node.args[static_cast<size_t>(arg)]].row != nullptr;
        }
        if (step.row >= 0 && varies) {
            to.row = step.node == frame.program->expr().result() && frame.result_row
                         ? frame.result_row
                         : frame.rows + step.row * frame.row_bytes;
        }
        const RowValue<T>& a = frame.values[node.args[0]];
        const RowValue<T>& b = frame.values[node.args[1]];
        const Kind operands = nodes[static_cast<size_t>(node.args[0])].kind;
        const bool integers = operands == Kind::integer;

        switch (node.op) {
            case Op::literal: *to.value = {nullptr, static_cast<T>(node.real), node.integer}; break;
            case Op::variable:
                if (node.index == static_cast<int>(Variable::x)) {
                    *to.value = {frame.x, T{}, 0};
                } else if (node.index == static_cast<int>(Variable::j)) {
                    const uint32_t j0 = static_cast<uint32_t>(frame.j_begin);
                    to.template fill<I>([=](int64_t k) { return wrapped(j0 + static_cast<uint32_t>(k)); });
                } else {
                    *to.value = {nullptr, T{}, variable(frame, static_cast<Variable>(node.index))};
                }
                break;
            case Op::scalar: {
                const double v = frame.context->scalars[static_cast<size_t>(node.index)];
                *to.value = {nullptr, static_cast<T>(v), integer_scalar(v)};
                break;
            }
            case Op::gather:
                if (node.kind == Kind::real) gather<T>(frame, to, node);
                else if (node.kind == Kind::integer) gather<I>(frame, to, node);
                else gather<uint8_t>(frame, to, node);
                break;
            case Op::promote:
            case Op::to_real: convert(to, operands, node.kind, a); break;
            case Op::add: arithmetic(to, operands, a, b, Add{}); break;
            case Op::sub: arithmetic(to, operands, a, b, Sub{}); break;
            case Op::mul: arithmetic(to, operands, a, b, Mul{}); break;
            case Op::div: binary<T, T>(to, a, b, Div{}); break;
            case Op::floordiv:
                if (!integers || !divide_by_constant<false>(to, a, b)) arithmetic(to, operands, a, b, FloorDiv{});
                break;
            case Op::mod:
                if (!integers || !divide_by_constant<true>(to, a, b)) arithmetic(to, operands, a, b, Mod{});
                break;
            case Op::min: arithmetic(to, operands, a, b, Min{}); break;
            case Op::max: arithmetic(to, operands, a, b, Max{}); break;
            case Op::neg:
                if (integers) unary<I, I>(to, a, Neg{});
                else unary<T, T>(to, a, Neg{});
                break;
            case Op::abs:
                if (integers) unary<I, I>(to, a, Abs{});
                else unary<T, T>(to, a, Abs{});
                break;
            case Op::exp: unary<T, T>(to, a, Exp{}); break;
            case Op::log: unary<T, T>(to, a, Log{}); break;
            case Op::tanh: unary<T, T>(to, a, Tanh{}); break;
            case Op::sqrt: unary<T, T>(to, a, Sqrt{}); break;
            case Op::lt: compare(to, operands, a, b, Lt{}); break;
            case Op::le: compare(to, operands, a, b, Le{}); break;
            case Op::gt: compare(to, operands, b, a, Lt{}); break;
            case Op::ge: compare(to, operands, b, a, Le{}); break;
            case Op::eq: compare(to, operands, a, b, Eq{}); break;
            case Op::ne: compare(to, operands, a, b, Ne{}); break;
            case Op::logical_and: binary<uint8_t, uint8_t>(to, a, b, [](uint8_t p, uint8_t q) { return p & q; }); break;
            case Op::logical_or: binary<uint8_t, uint8_t>(to, a, b, [](uint8_t p, uint8_t q) { return p | q; }); break;
            case Op::logical_not: unary<uint8_t, uint8_t>(to, a, [](uint8_t p) { return p ^ 1; }); break;
            case Op::where: {
                const RowValue<T>& otherwise = frame.values[node.args[2]];
                if (node.kind == Kind::real) select<T>(to, a, b, otherwise);
                else if (node.kind == Kind::integer) select<I>(to, a, b, otherwise);
                else select<uint8_t>(to, a, b, otherwise);
                break;
            }
        }
    }
}

template void evaluate_row<float>(const RowFrame<float>&);
template void evaluate_row<double>(const RowFrame<double>&);

}  // namespace tilewise::core::TILEWISE_EXPR_NAMESPACE

#undef TILEWISE_EXPR_LOOP
