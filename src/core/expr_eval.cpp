// Evaluation along a row: the order of the nodes, their scratch rows, and the baseline build of the inner loops.
#define TILEWISE_EXPR_NAMESPACE expr_baseline
#include "expr_eval.inl"

#include <algorithm>
#include <cassert>
#include <memory>
#include <new>

namespace tilewise::core {

namespace {

constexpr int64_t kAlignment = 64;
int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t values_bytes(const RowProgram& program, size_t real_size) {
    const size_t value = real_size == sizeof(double) ? sizeof(RowValue<double>) : sizeof(RowValue<float>);
    return aligned(static_cast<int64_t>(program.expr().nodes().size() * value));
}
int64_t row_bytes(int64_t max_n, size_t real_size) { return aligned(max_n * static_cast<int64_t>(real_size)); }

std::shared_ptr<std::byte> allocate(int64_t bytes) {
    void* memory = ::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)), std::align_val_t{kAlignment});
    return {static_cast<std::byte*>(memory), [](std::byte* p) { ::operator delete(p, std::align_val_t{kAlignment}); }};
}

}  // namespace

RowProgram::RowProgram(const Expr& expr) : RowProgram(expr, {}) {}

RowProgram::RowProgram(const Expr& expr, std::span<const int> outputs) : expr_(expr) {
    const std::span<const Node> nodes = expr.nodes();
    constexpr int kUnused = -1, kForever = std::numeric_limits<int>::max();
    std::vector<int> last_user(nodes.size(), kUnused);
    if (!nodes.empty()) last_user[static_cast<size_t>(expr.result())] = kForever;
    for (const int id : outputs) last_user[static_cast<size_t>(id)] = kForever;
    // Operands come first, so going down every user is met before its operands.
    for (size_t id = nodes.size(); id-- > 0;) {
        if (last_user[id] == kUnused) continue;
        for (int a = 0; a < nodes[id].num_args; ++a) {
            int& last = last_user[static_cast<size_t>(nodes[id].args[static_cast<size_t>(a)])];
            last = std::max(last, static_cast<int>(id));
        }
    }
    // A row is free again after the last use of its node, so scratch is as large as what is alive, not as the tree.
    // The result's row is taken before its operands' rows are given back: no loop writes a row that it reads.
    std::vector<int> row_of(nodes.size(), -1), free_rows;
    for (size_t id = 0; id < nodes.size(); ++id) {
        const Node& node = nodes[id];
        if (last_user[id] == kUnused) continue;
        const bool is_x = node.op == Op::variable && node.index == static_cast<int>(Variable::x);
        if (!node.uniform() && !is_x) {
            if (free_rows.empty()) free_rows.push_back(num_rows_++);
            row_of[id] = free_rows.back();
            free_rows.pop_back();
        }
        steps_.push_back({static_cast<int32_t>(id), row_of[id]});
        for (int a = 0; a < node.num_args; ++a) {
            const size_t arg = static_cast<size_t>(node.args[static_cast<size_t>(a)]);
            if (last_user[arg] != static_cast<int>(id) || row_of[arg] < 0) continue;
            free_rows.push_back(row_of[arg]);
            row_of[arg] = -1;  // an operand used twice gives its row back once
        }
    }
}

int64_t RowProgram::scratch_bytes(int64_t max_n, size_t real_size) const {
    return values_bytes(*this, real_size) + num_rows_ * row_bytes(max_n, real_size);
}

template <class T>
RowEvaluator<T>::RowEvaluator(const Expr& expr, int64_t max_n)
    : own_program_(std::make_shared<RowProgram>(expr)),
      own_scratch_(allocate(own_program_->scratch_bytes(max_n, sizeof(T)))),
      program_(own_program_.get()),
      kernel_(&expr_baseline::evaluate_row<T>),
      max_n_(std::max<int64_t>(max_n, 1)) {
    place(own_scratch_.get());
}

template <class T>
RowEvaluator<T>::RowEvaluator(const RowProgram& program, int64_t max_n, void* scratch, RowKernel<T> kernel)
    : program_(&program), kernel_(kernel ? kernel : &expr_baseline::evaluate_row<T>), max_n_(max_n) {
    place(static_cast<std::byte*>(scratch));
}

template <class T>
void RowEvaluator<T>::place(std::byte* scratch) {
    values_ = reinterpret_cast<RowValue<T>*>(scratch);
    std::uninitialized_default_construct_n(values_, program_->expr().nodes().size());
    rows_ = scratch + values_bytes(*program_, sizeof(T));
}

template <class T>
void RowEvaluator<T>::run(const ExprContext& context, int64_t i, int64_t j, int64_t n, const T* x, void* result_row) {
    kernel_({.program = program_,
             .context = &context,
             .i = i,
             .j_begin = j,
             .n = n,
             .x = x,
             .values = values_,
             .rows = rows_,
             .row_bytes = row_bytes(max_n_, sizeof(T)),
             .result_row = result_row});
}

template <class T>
void RowEvaluator<T>::evaluate_nodes(const ExprContext& context, int64_t i, Range j, const T* x) {
    assert(j.size() <= max_n_);
    run(context, i, j.begin, j.size(), x, nullptr);
}

template <class T>
template <class V>
void RowEvaluator<T>::result(const ExprContext& context, int64_t i, Range j, const T* x, V* out) {
    const int id = program_->expr().result();
    // Written in place only if nothing is computed after it: a later node could still read x, which out may be.
    const bool direct = !program_->steps().empty() && program_->steps().back().node == id;
    for (int64_t done = 0; done < j.size(); done += max_n_) {
        const int64_t n = std::min(max_n_, j.size() - done);
        run(context, i, j.begin + done, n, x ? x + done : nullptr, direct ? out + done : nullptr);
        const RowValue<T>& value = values_[id];
        if (value.uniform()) {
            V v;
            if constexpr (std::is_same_v<V, T>) v = value.real;
            else v = static_cast<V>(value.integer);
            std::fill_n(out + done, n, v);
        } else if (value.row != out + done) {
            std::memcpy(out + done, value.row, static_cast<size_t>(n) * sizeof(V));
        }
    }
}

template <class T>
void RowEvaluator<T>::real(const ExprContext& context, int64_t i, Range j, const T* x, T* out) {
    result(context, i, j, x, out);
}

template <class T>
void RowEvaluator<T>::boolean(const ExprContext& context, int64_t i, Range j, uint8_t* out) {
    result<uint8_t>(context, i, j, nullptr, out);
}

template class RowEvaluator<float>;
template class RowEvaluator<double>;

template <class T>
void gather_offsets(const RowEvaluator<T>& evaluator, const Adjoint::Gather& gather, const Array& target, int64_t n,
                    int64_t* offsets) {
    std::fill_n(offsets, n, int64_t{0});
    for (int axis = 0; axis < target.rank; ++axis) {
        const size_t d = static_cast<size_t>(axis);
        const RowValue<T> index = evaluator.value(gather.index_nodes[d]);
        const int64_t shape = target.shape[d], stride = target.stride[d];
        for (int64_t k = 0; k < n; ++k) {
            const int32_t at = index.integer_at(k);
            if (at < 0 || at >= shape) offsets[k] = kOutside;
            else if (offsets[k] != kOutside) offsets[k] += at * stride;
        }
    }
}
template void gather_offsets(const RowEvaluator<float>&, const Adjoint::Gather&, const Array&, int64_t, int64_t*);
template void gather_offsets(const RowEvaluator<double>&, const Adjoint::Gather&, const Array&, int64_t, int64_t*);

}  // namespace tilewise::core
