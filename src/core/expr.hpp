// User functions as data: mask_mod and score_mod are small typed expressions. One line of text is their only outside
// form (C ABI, op schema, cache key); inside they are a list of nodes in evaluation order that the CPU evaluates along
// a tile row, the GPU renders into its kernel, and that is differentiated and bounded by intervals here.
//
//   text     := integer | real | true | false | inf | -inf | variable | $k | $ki | op(text,...) | gather(@k,text,...)
//   integer  := -?digits, an int32            real := -?digits with '.digits', an exponent or both; prints like
//   $k, $ki  := run-time scalar k, real or integer    Python's repr, the shortest text that reads back as that double
//
//   variable := x (real; score_mod only) | b h i j seqlen_q seqlen_kv q_offset head_kv (integers)
//   real     : div exp log tanh sqrt; float (from bool or integer)
//   number   : add sub mul min max floordiv mod neg abs (integer if every operand is, else real)
//   bool     : lt le gt ge eq ne (of numbers), and or not (of bools)
//   any      : where(bool,a,b); gather(@k,index...): one integer index per axis, kind of the array's elements
//
// Kinds widen silently: bool -> integer -> real. Integers are int32 and wrap around. Reals are float, or double in an
// fp64 problem. The corner cases, the same on every backend:
//   floordiv, mod   round towards minus infinity, like Python. Integers: division by zero gives 0. Reals:
//                   floordiv(a,b) = floor(a/b); mod is fmod, plus b where the signs of remainder and b differ.
//   min, max        a NaN operand gives NaN; of equal operands the first is taken.
//   comparisons     with NaN are false, ne is true.
//   gather          an index outside the array (negative included) gives 0 or false, and no gradient.
//   $ki             the scalar truncated to int32, saturating; NaN gives 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"
#include "types.hpp"

namespace tilewise::core {

// ---------------------------------------------------------------------------------------------------------------------
// The expression

enum class Role : uint8_t { mask_mod, score_mod };  // result: bool, x not allowed; or real
enum class Kind : uint8_t { boolean, integer, real };
enum class Variable : uint8_t { x, b, h, i, j, seqlen_q, seqlen_kv, q_offset, head_kv };
inline constexpr int kNumVariables = 9;

enum class Op : uint8_t {
    literal,   // kind says which of real, integer holds it (a bool is 0 or 1 in integer)
    variable,  // index: the Variable
    scalar,    // index: which run-time scalar; kind real or integer
    gather,    // index: which array; args: one integer per axis
    promote,   // widening to `kind` that the text does not show
    to_real,   // float(...)
    add,
    sub,
    mul,
    div,
    floordiv,
    mod,
    min,
    max,
    neg,
    abs,
    exp,
    log,
    tanh,
    sqrt,
    lt,
    le,
    gt,
    ge,
    eq,
    ne,  // args of one kind: both integer or both real
    logical_and,
    logical_or,
    logical_not,
    where,  // args: bool, then two of this node's kind
};
const char* name(Op op);
const char* name(Variable variable);

// Set of variables, as bits.
using Uses = uint32_t;
constexpr Uses bit(Variable v) { return Uses{1} << static_cast<int>(v); }
inline constexpr Uses kVariesAlongRow = bit(Variable::x) | bit(Variable::j);

// Operands come before their users, and their kinds already fit: every conversion is a node.
struct Node {
    Op op = Op::literal;
    Kind kind = Kind::boolean;
    uint8_t num_args = 0;
    uint16_t depth = 1;  // of the tree below, this node included
    std::array<int32_t, kMaxRank> args{};
    int32_t index = 0;
    int32_t integer = 0;
    double real = 0;
    Uses uses = 0;  // variables anywhere below

    [[nodiscard]] bool uniform() const { return (uses & kVariesAlongRow) == 0; }  // one value for a whole row
    bool operator==(const Node&) const;  // real by bits, so that 0.0 and -0.0 stay two literals
};

inline constexpr int kMaxExprNodes = 4096;  // distinct nodes
inline constexpr int kMaxExprDepth = 256;
inline constexpr size_t kMaxExprBytes = size_t{1} << 17;  // of text: shared subexpressions are written out

// Immutable; copies share the nodes. Equal subexpressions are one node.
class Expr {
public:
    Expr() = default;  // absent

    // Takes any bytes; refuses with core::Error naming the position and what was expected. The arrays give rank and
    // dtype only: their data may live on a device.
    static Expr parse(std::string_view text, Role role, std::span<const Array> arrays = {}, int num_scalars = 0);
    [[nodiscard]] std::string text() const;  // canonical; parse(text()) == *this

    explicit operator bool() const { return nodes_ != nullptr; }
    bool operator==(const Expr& other) const;

    [[nodiscard]] Role role() const { return role_; }
    [[nodiscard]] std::span<const Node> nodes() const {
        return nodes_ ? std::span<const Node>(*nodes_) : std::span<const Node>();
    }
    [[nodiscard]] int result() const { return result_; }  // index of the node that is the value

    [[nodiscard]] Uses uses() const { return nodes_ ? (*nodes_)[static_cast<size_t>(result_)].uses : 0; }
    [[nodiscard]] bool uses(Variable v) const { return (uses() & bit(v)) != 0; }
    [[nodiscard]] std::vector<int> arrays() const;  // numbers of the gathered arrays, ascending
    [[nodiscard]] int max_array() const;            // -1: none
    [[nodiscard]] int max_scalar() const;           // -1: none

private:
    friend class ExprBuilder;
    std::shared_ptr<const std::vector<Node>> nodes_;
    int result_ = 0;
    Role role_ = Role::mask_mod;
};

// Makes nodes, checks kinds, inserts promotions, shares equal nodes. Used by the parser, by differentiate() and by
// anyone who builds expressions in C++. Errors are core::Error; `origin` begins their text.
class ExprBuilder {
public:
    ExprBuilder(Role role, std::span<const Array> arrays, int num_scalars);
    explicit ExprBuilder(const Expr& start);  // continues with these nodes, without limits on size

    int literal(int32_t value);
    int literal(double value);  // NaN is refused
    int literal(bool value);
    int variable(Variable v);
    int scalar(int k, Kind kind);
    int gather(int array, std::span<const int> indices);
    int call(Op op, std::span<const int> args);
    int call(Op op, std::initializer_list<int> args) { return call(op, {args.begin(), args.size()}); }

    [[nodiscard]] const Node& node(int id) const { return nodes_[static_cast<size_t>(id)]; }
    Expr finish(int result);  // widens to real for a score_mod; the builder is empty afterwards

    std::string origin;

private:
    int add(Node node);
    int widen(int id, Kind kind);
    [[noreturn]] void fail(const std::string& seen, const std::string& allowed, const std::string& advice = "") const;

    Role role_;
    bool limited_ = true;
    std::vector<Array> arrays_;
    int num_scalars_ = 0;
    std::vector<Node> nodes_;
    std::vector<int32_t> table_;  // open-addressing hash table of node ids, -1 = free
};

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation along a row: fixed b, h, i and keys [j.begin, j.end)

struct ExprContext {
    int64_t b = 0;
    int64_t h = 0;
    int64_t head_kv = 0;
    int64_t seqlen_q = 0;
    int64_t seqlen_kv = 0;
    int64_t q_offset = 0;
    std::span<const Array> arrays;
    std::span<const double> scalars;
};

// What to compute, in which order and in which scratch row. Immutable after construction; threads share it.
class RowProgram {
public:
    RowProgram() = default;
    explicit RowProgram(const Expr& expr);                       // the result only
    RowProgram(const Expr& expr, std::span<const int> outputs);  // these nodes too; all are kept to the end
    [[nodiscard]] const Expr& expr() const { return expr_; }

    // Bytes an evaluator for rows of up to max_n keys needs, with reals of real_size bytes.
    [[nodiscard]] int64_t scratch_bytes(int64_t max_n, size_t real_size) const;

    struct Step {
        int32_t node;
        int32_t row;  // scratch row for the values; -1: the node is uniform, or x itself
    };
    [[nodiscard]] std::span<const Step> steps() const { return steps_; }
    [[nodiscard]] int num_rows() const { return num_rows_; }

private:
    Expr expr_;
    std::vector<Step> steps_;
    int num_rows_ = 0;
};

// One node's values: a row of T, int32_t or uint8_t by kind, or a single value if row is null.
template <class T>
struct RowValue {
    const void* row = nullptr;
    T real = 0;
    int32_t integer = 0;  // bool too

    [[nodiscard]] bool uniform() const { return row == nullptr; }
    [[nodiscard]] T real_at(int64_t k) const { return row ? static_cast<const T*>(row)[k] : real; }
    [[nodiscard]] int32_t integer_at(int64_t k) const { return row ? static_cast<const int32_t*>(row)[k] : integer; }
    [[nodiscard]] bool boolean_at(int64_t k) const {
        return row ? static_cast<const uint8_t*>(row)[k] != 0 : integer != 0;
    }
};

// One evaluation, as the inner loops see it (expr_eval.inl, which may be compiled once per ISA).
template <class T>
struct RowFrame {
    const RowProgram* program;
    const ExprContext* context;
    int64_t i;
    int64_t j_begin;
    int64_t n;
    const T* x;
    RowValue<T>* values;  // by node
    std::byte* rows;
    int64_t row_bytes;
    void* result_row;  // where a result that varies goes, or null for its scratch row
};
template <class T>
using RowKernel = void (*)(const RowFrame<T>&);

// T is float or double. One per thread; evaluating does not allocate and does not throw.
template <class T>
class RowEvaluator {
public:
    RowEvaluator(const Expr& expr, int64_t max_n);  // owns its program and scratch
    // Scratch of program.scratch_bytes(max_n, sizeof(T)) bytes, 64-byte aligned; both must outlive the evaluator.
    // kernel: another build of the inner loops; null is the baseline one.
    RowEvaluator(const RowProgram& program, int64_t max_n, void* scratch, RowKernel<T> kernel = nullptr);
    RowEvaluator(RowEvaluator&&) = default;  // not copied: a copy would write to the same scratch
    RowEvaluator& operator=(RowEvaluator&&) = default;

    // The result for any number of keys (in pieces of max_n). out may be x. x may be null if the expression does not
    // use it; bools are 0 or 1.
    void real(const ExprContext& context, int64_t i, Range j, const T* x, T* out);
    void boolean(const ExprContext& context, int64_t i, Range j, uint8_t* out);

    // All outputs of the program, j.size() <= max_n. value(node) is valid until the next evaluation; a row of x is x.
    void evaluate_nodes(const ExprContext& context, int64_t i, Range j, const T* x);
    [[nodiscard]] RowValue<T> value(int node) const { return values_[node]; }

private:
    void place(std::byte* scratch);
    void run(const ExprContext& context, int64_t i, int64_t j, int64_t n, const T* x, void* result_row);
    template <class V>
    void result(const ExprContext& context, int64_t i, Range j, const T* x, V* out);

    std::shared_ptr<const RowProgram> own_program_;
    std::shared_ptr<std::byte> own_scratch_;
    const RowProgram* program_;
    RowKernel<T> kernel_;
    int64_t max_n_;
    RowValue<T>* values_;
    std::byte* rows_;
};
extern template class RowEvaluator<float>;
extern template class RowEvaluator<double>;

// ---------------------------------------------------------------------------------------------------------------------
// Derivative of a score_mod, by reverse mode

// Everything is a node of `expr`, which is the original program plus the derivative's nodes. With g = dLoss/dresult:
// dLoss/dx = g * dx, and element [index_nodes] of a captured array gets g * adjoint, if the index is in range.
// Conventions: abs'(0) = 1; of equal operands of min or max the first gets the gradient; mod'(a) = 1; floordiv,
// comparisons and integers have none; a branch that `where`, min or max did not take contributes exactly 0, whatever
// its values. Where the result is -inf or NaN, dx can be inf or NaN: skip hidden keys, do not multiply by 0.
struct Adjoint {
    struct Gather {
        int array;
        int node;                      // the gather itself
        std::vector<int> index_nodes;  // integers, one per axis
        int adjoint_node;              // real
        Uses uses;                     // what the index depends on
        bool difference;               // the index depends on i and j through i - j only
    };
    Expr expr;
    int dx_node = 0;              // a literal 1 if f = x + anything without x, a literal 0 if x is not used
    std::vector<Gather> gathers;  // of float arrays, those with a gradient that is not 0 everywhere

    [[nodiscard]] bool dx_is(double value) const;
    [[nodiscard]] std::vector<int> outputs() const;  // for RowProgram: result, dx, adjoints and indices
};
Adjoint differentiate(const Expr& score_mod);

// Element offset of each of n gathers in `target` (a gradient buffer with the array's shape and its own strides) after
// evaluate_nodes; kOutside where the index is out of range. Nothing is checked against the size of the buffer.
inline constexpr int64_t kOutside = std::numeric_limits<int64_t>::min();
template <class T>
void gather_offsets(const RowEvaluator<T>& evaluator, const Adjoint::Gather& gather, const Array& target, int64_t n,
                    int64_t* offsets);

// ---------------------------------------------------------------------------------------------------------------------
// Bounds over a tile [i.begin, i.end) x [j.begin, j.end)

struct Interval {
    double lo = 0;
    double hi = 0;
    bool maybe_nan = false;  // lo and hi bound the values that are not NaN

    [[nodiscard]] bool point() const { return lo == hi && !maybe_nan; }
    bool operator==(const Interval&) const = default;
};

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr Interval kAnything{-kInfinity, kInfinity, true};

// min and max of a captured array, over any box of indices. Blocks of 64 elements in row-major order, whatever the
// strides, then pairs of blocks up to the root: a run along the last axis costs O(log size), its ends are read one by
// one and so the bounds are exact. Keeps a view of the array, whose contents must not change.
class ArraySummary {
public:
    ArraySummary() = default;
    explicit ArraySummary(const Array& array);  // O(size)

    // Every value that gather can give for index[axis] in [begin, end): includes 0 if an index can be out of range.
    // Exact up to kMaxRuns runs along the last axis, wider beyond.
    [[nodiscard]] Interval range(std::span<const Range> index) const;
    static constexpr int64_t kMaxRuns = 64;

    explicit operator bool() const { return static_cast<bool>(array_); }

private:
    [[nodiscard]] Interval run(int64_t first, int64_t last) const;
    [[nodiscard]] Interval elements(int64_t first, int64_t last) const;

    Array array_;
    std::vector<std::vector<Interval>> levels_;  // levels_[0]: blocks of 64 elements
};

enum class Truth : uint8_t { no, yes, unknown };

// T is the real type of the evaluation. `summaries` has one entry per array, or may be shorter or hold empty entries:
// such arrays have unknown contents. Sound always: `no` and `yes` hold for every (i, j) of the tile. Empty tile: no.
template <class T>
Truth truth(const Expr& mask_mod, const ExprContext& context, Range i, Range j,
            std::span<const ArraySummary> summaries);

// Bounds of a score_mod's result for scores x in `x` (default: anything, NaN included).
template <class T>
Interval real_interval(const Expr& score_mod, const ExprContext& context, Range i, Range j,
                       std::span<const ArraySummary> summaries, Interval x = kAnything);

// The score_mod gives -inf on the whole tile, whatever the scores: nothing there is visible.
template <class T>
bool hides_all(const Expr& score_mod, const ExprContext& context, Range i, Range j,
               std::span<const ArraySummary> summaries) {
    const Interval result = real_interval<T>(score_mod, context, i, j, summaries);
    return result.hi == -kInfinity && !result.maybe_nan;
}

}  // namespace tilewise::core
