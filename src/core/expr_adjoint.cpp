// Derivative of a score_mod by reverse mode: walks the nodes from the result down and appends the derivative's nodes.
#include "expr.hpp"

#include <algorithm>
#include <cmath>

namespace tilewise::core {

namespace {

class Differentiator {
public:
    explicit Differentiator(const Expr& expr)
        : expr_(expr),
          build_(expr),
          active_(expr.nodes().size()),
          adjoint_(expr.nodes().size(), kNone),
          zero_(build_.literal(0.0)),
          one_(build_.literal(1.0)) {}

    Adjoint run() {
        const std::span<const Node> nodes = expr_.nodes();
        for (size_t id = 0; id < nodes.size(); ++id) active_[id] = is_active(nodes[id]);

        adjoint_[at(expr_.result())] = {one_, false};
        for (int id = expr_.result(); id >= 0; --id) {
            if (active_[at(id)] && adjoint_[at(id)].node != zero_ && adjoint_[at(id)].node >= 0) propagate(id);
        }

        Adjoint out;
        out.dx_node = zero_;
        const std::vector<char> difference = by_difference();
        for (size_t id = 0; id < nodes.size(); ++id) {
            const Node& node = nodes[id];
            const int adjoint = adjoint_[id].node;
            if (adjoint < 0 || !active_[id]) continue;
            if (node.op == Op::variable) out.dx_node = adjoint;
            if (node.op != Op::gather || adjoint == zero_) continue;
            Adjoint::Gather gather{.array = node.index,
                                   .node = static_cast<int>(id),
                                   .index_nodes = {node.args.begin(), node.args.begin() + node.num_args},
                                   .adjoint_node = adjoint,
                                   .uses = 0,
                                   .difference = true};
            for (const int index : gather.index_nodes) {
                gather.uses |= nodes[at(index)].uses;
                gather.difference = gather.difference && difference[at(index)] != 0;
            }
            out.gathers.push_back(std::move(gather));
        }
        out.expr = build_.finish(expr_.result());
        return out;
    }

private:
    // `selected`: the value is a select that may be exactly 0 because its branch was not taken.
    struct Value {
        int node;
        bool selected;
    };
    static constexpr Value kNone{-1, false};
    static size_t at(int id) { return static_cast<size_t>(id); }

    // Does a change of x or of a float array reach this node smoothly?
    [[nodiscard]] bool is_active(const Node& node) const {
        if (node.kind != Kind::real) return false;
        if (node.op == Op::variable || node.op == Op::gather) return true;
        if (node.op == Op::floordiv) return false;
        for (int a = 0; a < node.num_args; ++a) {
            if (active_[at(node.args[at(a)])]) return true;
        }
        return false;
    }

    void propagate(int id) {
        const Node node = build_.node(id);
        const Value adjoint = adjoint_[at(id)];
        const int a = node.args[0], b = node.args[1];
        const auto wanted = [&](int arg) { return active_[at(arg)] != 0; };
        const auto select = [&](int condition, int taken, int otherwise) -> Value {
            return {build_.call(Op::where, {condition, taken, otherwise}), true};
        };
        switch (node.op) {
            case Op::add:
                give(a, adjoint);
                give(b, adjoint);
                break;
            case Op::sub:
                give(a, adjoint);
                if (wanted(b)) give(b, negated(adjoint));
                break;
            case Op::mul:
                if (wanted(a)) give(a, product(adjoint, b));
                if (wanted(b)) give(b, product(adjoint, a));
                break;
            case Op::div:
                if (wanted(a)) give(a, quotient(adjoint, b));
                if (wanted(b)) give(b, negated(product(adjoint, build_.call(Op::div, {id, b}))));
                break;
            case Op::mod:
                give(a, adjoint);
                if (wanted(b)) give(b, negated(product(adjoint, build_.call(Op::floordiv, {a, b}))));
                break;
            case Op::max:
            case Op::min: {
                const int first = build_.call(node.op == Op::max ? Op::ge : Op::le, {a, b});
                if (wanted(a)) give(a, select(first, adjoint.node, zero_));
                if (wanted(b)) give(b, select(first, zero_, adjoint.node));
                break;
            }
            case Op::where:
                if (wanted(b)) give(b, select(a, adjoint.node, zero_));
                if (wanted(node.args[2])) give(node.args[2], select(a, zero_, adjoint.node));
                break;
            case Op::neg: give(a, negated(adjoint)); break;
            case Op::abs:
                give(a, {build_.call(Op::where, {build_.call(Op::lt, {a, zero_}), negated(adjoint).node, adjoint.node}),
                         adjoint.selected});
                break;
            case Op::exp: give(a, product(adjoint, id)); break;
            case Op::log: give(a, quotient(adjoint, a)); break;
            case Op::tanh:
                give(a, product(adjoint, build_.call(Op::sub, {one_, build_.call(Op::mul, {id, id})})));
                break;
            case Op::sqrt: give(a, quotient(adjoint, build_.call(Op::add, {id, id}))); break;
            default: break;  // leaves; floordiv, comparisons and conversions, which have no derivative
        }
    }

    void give(int arg, Value share) {
        if (!active_[at(arg)] || share.node == zero_) return;
        Value& sum = adjoint_[at(arg)];
        if (sum.node < 0) sum = share;
        else sum = {build_.call(Op::add, {sum.node, share.node}), sum.selected || share.selected};
    }

    Value negated(Value v) {
        const Node node = build_.node(v.node);
        if (v.node == zero_) return v;
        if (node.op == Op::literal) return {build_.literal(-node.real), v.selected};
        if (node.op == Op::neg) return {node.args[0], v.selected};
        return {build_.call(Op::neg, {v.node}), v.selected};
    }

    Value product(Value adjoint, int factor) {
        const Literal value = literal(factor);
        if (adjoint.node == zero_ || (value.known && value.value == 0)) return {zero_, false};
        if (adjoint.node == one_) return {factor, false};
        if (value.known && value.value == 1) return adjoint;
        const Op op = build_.node(factor).op;
        const bool finite = (value.known && std::isfinite(value.value)) || op == Op::promote || op == Op::to_real;
        return guarded(adjoint, build_.call(Op::mul, {adjoint.node, factor}), finite);
    }

    Value quotient(Value adjoint, int divisor) {
        const Literal value = literal(divisor);
        if (adjoint.node == zero_ || (value.known && value.value == 1)) return adjoint;
        return guarded(adjoint, build_.call(Op::div, {adjoint.node, divisor}), value.known && value.value != 0);
    }

    // In a branch that was not taken the adjoint is 0 but the local derivative can be inf or NaN: 0 * inf must be 0.
    Value guarded(Value adjoint, int share, bool finite) {
        if (!adjoint.selected || finite) return {share, adjoint.selected};
        return {build_.call(Op::where, {build_.call(Op::eq, {adjoint.node, zero_}), zero_, share}), true};
    }

    struct Literal {
        bool known;
        double value;
    };
    [[nodiscard]] Literal literal(int id) const {
        const Node* node = &build_.node(id);
        if (node->op == Op::promote || node->op == Op::to_real) node = &build_.node(node->args[0]);
        if (node->op != Op::literal) return {false, 0};
        return {true, node->kind == Kind::real ? node->real : node->integer};
    }

    // Which nodes depend on i and j through i - j only. Integer sums are followed as ci * i + cj * j + rest.
    [[nodiscard]] std::vector<char> by_difference() const {
        struct Affine {
            bool known;  // value == ci * i + cj * j + something that depends on neither
            int64_t ci, cj;
        };
        const std::span<const Node> nodes = expr_.nodes();
        std::vector<Affine> form(nodes.size());
        std::vector<char> difference(nodes.size());
        for (size_t id = 0; id < nodes.size(); ++id) {
            const Node& node = nodes[id];
            const size_t a = at(node.args[0]), b = at(node.args[1]);
            const int64_t sign = node.op == Op::sub ? -1 : 1;
            if ((node.uses & (bit(Variable::i) | bit(Variable::j) | bit(Variable::x))) == 0) {
                form[id] = {true, 0, 0};
            } else if (node.op == Op::variable) {
                form[id] = {node.kind == Kind::integer, node.index == static_cast<int>(Variable::i),
                            node.index == static_cast<int>(Variable::j)};
            } else if (node.kind == Kind::integer && (node.op == Op::add || node.op == Op::sub)) {
                form[id] = {form[a].known && form[b].known, form[a].ci + sign * form[b].ci,
                            form[a].cj + sign * form[b].cj};
            } else if (node.kind == Kind::integer && node.op == Op::neg) {
                form[id] = {form[a].known, -form[a].ci, -form[a].cj};
            }
            // Larger coefficients can only come from chains of doublings, and would overflow here.
            constexpr int64_t kLimit = int64_t{1} << 32;
            if (std::abs(form[id].ci) > kLimit || std::abs(form[id].cj) > kLimit) form[id] = {false, 0, 0};

            bool all = node.num_args > 0;
            for (int arg = 0; arg < node.num_args; ++arg) all = all && difference[at(node.args[at(arg)])];
            difference[id] = form[id].known ? form[id].ci + form[id].cj == 0 : all;
        }
        return difference;
    }

    const Expr& expr_;
    ExprBuilder build_;
    std::vector<char> active_;
    std::vector<Value> adjoint_;
    int zero_;
    int one_;
};

}  // namespace

Adjoint differentiate(const Expr& score_mod) {
    if (!score_mod || score_mod.role() != Role::score_mod) {
        throw Error(Status::internal, "differentiate: needs a score_mod");
    }
    return Differentiator(score_mod).run();
}

bool Adjoint::dx_is(double value) const {
    const Node& node = expr.nodes()[static_cast<size_t>(dx_node)];
    return node.op == Op::literal && node.real == value;
}

std::vector<int> Adjoint::outputs() const {
    std::vector<int> nodes{expr.result(), dx_node};
    for (const Gather& gather : gathers) {
        nodes.push_back(gather.adjoint_node);
        nodes.insert(nodes.end(), gather.index_nodes.begin(), gather.index_nodes.end());
    }
    return nodes;
}

}  // namespace tilewise::core
