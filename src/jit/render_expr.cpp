#include "render_expr.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <vector>

namespace tilewise::jit {

using core::Adjoint;
using core::Array;
using core::DType;
using core::Expr;
using core::Kind;
using core::Node;
using core::Op;
using core::Variable;

namespace {

size_t at(int id) { return static_cast<size_t>(id); }

std::string hexadecimal(double v) {  // reads back as the same double, in any locale
    std::array<char, 40> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), std::fabs(v), std::chars_format::hex);
    return (std::signbit(v) ? "-0x" : "0x") + std::string(digits.data(), end.ptr);
}

// The statements of one function. A node is a constant n<id>; values and bounds are written alike, because expr.cuh
// has both under the same names.
class Body {
public:
    Body(const Expr& expr, std::span<const Array> arrays, std::span<const int> outputs, bool bounds)
        : nodes_(expr.nodes()), arrays_(arrays), bounds_(bounds), needed_(nodes_.size()), exact_(nodes_.size()) {
        for (const int id : outputs) needed_[at(id)] = 1;
        for (size_t id = nodes_.size(); id-- > 0;) {
            if (needed_[id]) need_args(nodes_[id], exact_[id] != 0);
        }
    }

    [[nodiscard]] std::string text() const {
        std::string out;
        for (size_t id = 0; id < nodes_.size(); ++id) {
            if (!needed_[id]) continue;
            out += "    const " + std::string(type(nodes_[id].kind)) + " " + local(static_cast<int>(id)) + " = " +
                   value(static_cast<int>(id)) + ";\n";
        }
        return out;
    }
    static std::string local(int id) { return "n" + std::to_string(id); }

    // "n1, n2, n3", with something before or without.
    static std::string list(std::string before, std::span<const int> ids) {
        for (const int id : ids) before += (before.empty() ? "" : ", ") + local(id);
        return before;
    }

private:
    // A compiler may fuse a product with the sum that takes it, which is faster and a little different. That may not
    // change what a comparison says, which the CPU and the bounds of a tile decide without fusing; nor may it get near
    // a logarithm or a quotient, where a difference that is 0 or not is all the difference. So it is allowed only where
    // nothing but sums and choices lie between the product and the result.
    void need_args(const Node& node, bool exact) {
        const bool passes = node.op == Op::add || node.op == Op::sub || node.op == Op::neg || node.op == Op::where;
        for (int arg = 0; arg < node.num_args; ++arg) {
            const size_t id = at(node.args[at(arg)]);
            needed_[id] = 1;
            if (exact || !passes) exact_[id] = 1;
        }
    }

    [[nodiscard]] const char* type(Kind kind) const {
        switch (kind) {
            case Kind::boolean: return bounds_ ? "expr::Truth" : "bool";
            case Kind::integer: return bounds_ ? "expr::Integers" : "int";
            case Kind::real: break;
        }
        return bounds_ ? "expr::Interval" : "Real";
    }

    [[nodiscard]] std::string point(const std::string& v) const { return bounds_ ? "expr::point(" + v + ")" : v; }

    [[nodiscard]] std::string value(int id) const {
        const Node& node = nodes_[at(id)];
        switch (node.op) {
            case Op::literal: return point(literal(node));
            case Op::variable: return variable(static_cast<Variable>(node.index));
            case Op::scalar: return scalar(node);
            case Op::gather: return gather(node);
            case Op::promote:
            case Op::to_real: return call(node.kind == Kind::integer ? "to_integer" : "to_real", node);
            case Op::mul:
                if (bounds_ || node.kind == Kind::integer || exact_[at(id)]) break;
                return local(node.args[0]) + " * " + local(node.args[1]);
            case Op::floordiv:
            case Op::mod:
                if (const int shift = power_of_two(node); shift >= 0) {
                    return std::string(node.op == Op::mod ? "expr::mod_power<" : "expr::floordiv_power<") +
                           std::to_string(shift) + ">(" + local(node.args[0]) + ")";
                }
                break;
            case Op::logical_and: return call("logical_and", node);
            case Op::logical_or: return call("logical_or", node);
            case Op::logical_not: return call("logical_not", node);
            default: break;
        }
        return call(name(node.op), node);
    }

    static std::string call(const std::string& function, const Node& node) {
        return "expr::" + function + "(" + list("", {node.args.data(), node.num_args}) + ")";
    }

    static std::string literal(const Node& node) {
        switch (node.kind) {
            case Kind::boolean: return node.integer ? "true" : "false";
            case Kind::integer: return node.integer == INT32_MIN ? "-2147483647 - 1" : std::to_string(node.integer);
            case Kind::real: break;
        }
        if (std::isinf(node.real)) return node.real > 0 ? "expr::infinity()" : "-expr::infinity()";
        return "expr::real(" + hexadecimal(node.real) + ")";
    }

    [[nodiscard]] std::string variable(Variable v) const {
        const auto position = [&](const std::string& letter) {
            return bounds_ ? "expr::positions(" + letter + "0, " + letter + "1)" : "static_cast<int>(" + letter + ")";
        };
        const auto member = [&](const char* of_site) {
            return point("static_cast<int>(site." + std::string(of_site) + ")");
        };
        switch (v) {
            case Variable::x: return bounds_ ? "expr::anything()" : "x";
            case Variable::i: return position("i");
            case Variable::j: return position("j");
            case Variable::b: return member("b");
            case Variable::h: return member("h");
            case Variable::seqlen_q: return member("q_len");
            case Variable::seqlen_kv: return member("kv_len");
            case Variable::q_offset: return member("q_offset");
            case Variable::head_kv: return member("head_kv");
        }
        return {};
    }

    [[nodiscard]] std::string scalar(const Node& node) const {
        const std::string number = "data.scalars[" + std::to_string(node.index) + "]";
        if (node.kind == Kind::integer) return point("expr::integer_scalar(" + number + ")");
        return std::string(bounds_ ? "expr::scalar(" : "expr::real(") + number + ")";
    }

    [[nodiscard]] std::string gather(const Node& node) const {
        const auto pick = [&](const char* real, const char* integer, const char* boolean) {
            return node.kind == Kind::real ? real : node.kind == Kind::integer ? integer : boolean;
        };
        const char* const function = bounds_ ? pick("real_bounds", "integer_bounds", "truth_bounds")
                                             : pick("gather_real", "gather_integer", "gather_bool");
        const std::string k = "[" + std::to_string(node.index) + "]";
        const std::string array = "data.arrays" + k + (bounds_ ? ", data.gather_summaries" + k : "");
        return std::string("expr::") + function + "<" +
               std::to_string(static_cast<int>(arrays_[at(node.index)].dtype)) + ">(" +
               list(array, {node.args.data(), node.num_args}) + ")";
    }

    // log2 of the divisor if it is a literal power of two, else -1.
    [[nodiscard]] int power_of_two(const Node& node) const {
        const Node& divisor = nodes_[at(node.args[1])];
        if (bounds_ || node.kind != Kind::integer || divisor.op != Op::literal || divisor.integer <= 0) return -1;
        const auto d = static_cast<uint32_t>(divisor.integer);
        return std::has_single_bit(d) ? std::countr_zero(d) : -1;
    }

    std::span<const Node> nodes_;
    std::span<const Array> arrays_;
    bool bounds_;
    std::vector<char> needed_, exact_;
};

const std::string kWhere = "(const Site& site, const MaskData& data, ";

std::string value_function(const char* result, const std::string& name, const char* parameters, const Expr& expr,
                           std::span<const Array> arrays, int node) {
    return std::string("TW_DEVICE ") + result + " " + name + kWhere + parameters + ") {\n" +
           Body(expr, arrays, {&node, 1}, false).text() + "    return " + Body::local(node) + ";\n}\n";
}

std::string bounds_function(const char* result, const std::string& name, const char* judge, const Expr& expr,
                            std::span<const Array> arrays) {
    const int node = expr.result();
    return std::string("TW_DEVICE ") + result + " " + name + kWhere + "Int i0, Int i1, Int j0, Int j1) {\n" +
           Body(expr, arrays, {&node, 1}, true).text() + "    return expr::" + judge + "(" + Body::local(node) +
           ");\n}\n";
}

// -inf for every score needs something that can be infinite by itself.
bool can_hide(const Expr& expr, std::span<const Array> arrays) {
    return std::any_of(expr.nodes().begin(), expr.nodes().end(), [&](const Node& node) {
        switch (node.op) {
            case Op::literal: return node.kind == Kind::real && std::isinf(node.real);
            case Op::scalar: return node.kind == Kind::real;
            case Op::gather: return is_float(arrays[at(node.index)].dtype);
            case Op::log:
            case Op::div: return true;
            default: return false;
        }
    });
}

}  // namespace

std::string render_mask_value(const Expr& mask_mod, std::span<const Array> arrays, const std::string& name) {
    return value_function("bool", name, "Int i, Int j", mask_mod, arrays, mask_mod.result());
}

std::string render_mask_truth(const Expr& mask_mod, std::span<const Array> arrays, const std::string& name) {
    return bounds_function("int", name, "decided", mask_mod, arrays);
}

std::string render_score_value(const Expr& score_mod, std::span<const Array> arrays, const std::string& name) {
    return value_function("Real", name, "Real x, Int i, Int j", score_mod, arrays, score_mod.result());
}

std::string render_score_hides(const Expr& score_mod, std::span<const Array> arrays, const std::string& name) {
    if (!can_hide(score_mod, arrays)) return {};
    return bounds_function("bool", name, "only_minus_infinity", score_mod, arrays);
}

std::string render_score_gradient(const Adjoint& adjoint, std::span<const Array> arrays, const std::string& name) {
    std::string text = value_function("Real", name, "Real x, Int i, Int j", adjoint.expr, arrays, adjoint.dx_node);
    if (adjoint.gathers.empty()) return text;

    std::vector<int> outputs;
    for (const Adjoint::Gather& gather : adjoint.gathers) {
        outputs.push_back(gather.adjoint_node);
        outputs.insert(outputs.end(), gather.index_nodes.begin(), gather.index_nodes.end());
    }
    text +=
        "TW_DEVICE void " + name + "_arrays" + kWhere + "const GradientArrays& out, Real g, Real x, Int i, Int j) {\n";
    text += Body(adjoint.expr, arrays, outputs, false).text();
    for (const Adjoint::Gather& gather : adjoint.gathers) {
        const std::string sums = "out.arrays[" + std::to_string(gather.array) + "]";
        text += "    expr::add_gradient(" +
                Body::list(sums + ", g * " + Body::local(gather.adjoint_node), gather.index_nodes) + ");\n";
    }
    return text + "}\n";
}

}  // namespace tilewise::jit
