// Text to nodes and back: the builder that checks kinds and shares equal nodes, the parser, the printer.
// Evaluation is in expr_eval.inl, derivatives in expr_adjoint.cpp, bounds over tiles in expr_interval.cpp.
#include "expr.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <utility>

namespace tilewise::core {

namespace {

// How an operation is written, in the order of Op; the first five have syntax of their own.
struct Syntax {
    const char* name;
    int num_args;
};
constexpr std::array<Syntax, 30> kSyntax{{
    {"literal", 0}, {"variable", 0}, {"scalar", 0}, {"gather", 0}, {"promote", 1},  {"float", 1},
    {"add", 2},     {"sub", 2},      {"mul", 2},    {"div", 2},    {"floordiv", 2}, {"mod", 2},
    {"min", 2},     {"max", 2},      {"neg", 1},    {"abs", 1},    {"exp", 1},      {"log", 1},
    {"tanh", 1},    {"sqrt", 1},     {"lt", 2},     {"le", 2},     {"gt", 2},       {"ge", 2},
    {"eq", 2},      {"ne", 2},       {"and", 2},    {"or", 2},     {"not", 1},      {"where", 3},
}};
constexpr std::array<const char*, kNumVariables> kVariableNames{"x",        "b",         "h",        "i",      "j",
                                                                "seqlen_q", "seqlen_kv", "q_offset", "head_kv"};
constexpr const char* kVariableList = "x b h i j seqlen_q seqlen_kv q_offset head_kv";
constexpr const char* kOpList =
    "add sub mul div floordiv mod min max neg abs exp log tanh sqrt lt le gt ge eq ne and or not where float gather";

const Syntax& syntax(Op op) { return kSyntax[static_cast<size_t>(op)]; }

const char* kind_name(Kind kind) { return kind == Kind::boolean ? "bool" : kind == Kind::integer ? "integer" : "real"; }

}  // namespace

const char* name(Op op) { return syntax(op).name; }
const char* name(Variable variable) { return kVariableNames[static_cast<size_t>(variable)]; }

bool Node::operator==(const Node& other) const {
    return op == other.op && kind == other.kind && num_args == other.num_args && args == other.args &&
           index == other.index && integer == other.integer &&
           std::bit_cast<uint64_t>(real) == std::bit_cast<uint64_t>(other.real);
}

// ---------------------------------------------------------------------------------------------------------------------
// Builder

namespace {

size_t hash(const Node& node) {
    uint64_t state = 0;
    const auto mix = [&](uint64_t value) { state = (std::rotl(state, 23) ^ value) * 0x9e3779b97f4a7c15u; };
    mix(static_cast<uint64_t>(node.op) | static_cast<uint64_t>(node.kind) << 8);
    for (int a = 0; a < node.num_args; ++a) mix(static_cast<uint64_t>(node.args[static_cast<size_t>(a)]));
    mix(static_cast<uint32_t>(node.index));
    mix(static_cast<uint32_t>(node.integer));
    mix(std::bit_cast<uint64_t>(node.real));
    return static_cast<size_t>(state ^ (state >> 29));
}

Kind wider(Kind a, Kind b) { return a > b ? a : b; }

}  // namespace

ExprBuilder::ExprBuilder(Role role, std::span<const Array> arrays, int num_scalars)
    : origin(role == Role::mask_mod ? "mask_mod" : "score_mod"),
      role_(role),
      arrays_(arrays.begin(), arrays.end()),
      num_scalars_(num_scalars) {}

ExprBuilder::ExprBuilder(const Expr& start) : ExprBuilder(start.role(), {}, 0) {
    limited_ = false;
    for (const Node& node : start.nodes()) add(node);
}

void ExprBuilder::fail(const std::string& seen, const std::string& allowed, const std::string& advice) const {
    refuse(origin, seen, allowed, advice);
}

int ExprBuilder::add(Node node) {
    // The table is kept at most half full, so probing always ends at a free place.
    if (2 * nodes_.size() >= table_.size()) {
        table_.assign(std::max<size_t>(64, 4 * nodes_.size()), -1);
        for (size_t id = 0; id < nodes_.size(); ++id) {
            size_t place = hash(nodes_[id]) % table_.size();
            while (table_[place] >= 0) place = (place + 1) % table_.size();
            table_[place] = static_cast<int32_t>(id);
        }
    }
    size_t place = hash(node) % table_.size();
    for (; table_[place] >= 0; place = (place + 1) % table_.size()) {
        if (nodes_[static_cast<size_t>(table_[place])] == node) return table_[place];
    }

    int depth = 0;
    for (int a = 0; a < node.num_args; ++a) {
        const Node& operand = this->node(node.args[static_cast<size_t>(a)]);
        depth = std::max<int>(depth, operand.depth);
        node.uses |= operand.uses;
    }
    if (node.op != Op::promote) ++depth;  // promotions are not in the text, so they do not count
    node.depth = static_cast<uint16_t>(std::min(depth, 0xffff));
    if (limited_ && depth > kMaxExprDepth) {
        fail("an expression nested more than " + std::to_string(kMaxExprDepth) + " deep",
             "up to " + std::to_string(kMaxExprDepth) + " levels", "Capture a precomputed array instead.");
    }
    if (limited_ && nodes_.size() >= static_cast<size_t>(kMaxExprNodes)) {
        fail("more than " + std::to_string(kMaxExprNodes) + " distinct operations",
             "up to " + std::to_string(kMaxExprNodes), "Capture a precomputed array instead.");
    }
    table_[place] = static_cast<int32_t>(nodes_.size());
    nodes_.push_back(node);
    return table_[place];
}

int ExprBuilder::widen(int id, Kind kind) {
    if (node(id).kind == kind) return id;
    return add({.op = Op::promote, .kind = kind, .num_args = 1, .args = {id}});
}

int ExprBuilder::literal(int32_t value) { return add({.op = Op::literal, .kind = Kind::integer, .integer = value}); }
int ExprBuilder::literal(bool value) { return add({.op = Op::literal, .kind = Kind::boolean, .integer = value}); }
int ExprBuilder::literal(double value) {
    if (std::isnan(value)) fail("the constant NaN", "numbers, inf and -inf");
    return add({.op = Op::literal, .kind = Kind::real, .real = value});
}

int ExprBuilder::variable(Variable v) {
    if (v == Variable::x && role_ == Role::mask_mod) {
        fail("the variable x", "b h i j seqlen_q seqlen_kv q_offset head_kv",
             "A mask cannot depend on the score; a score_mod that gives -inf can.");
    }
    return add({.op = Op::variable,
                .kind = v == Variable::x ? Kind::real : Kind::integer,
                .index = static_cast<int32_t>(v),
                .uses = bit(v)});
}

int ExprBuilder::scalar(int k, Kind kind) {
    if (k < 0 || k >= num_scalars_) {
        fail("scalar $" + std::to_string(k), num_scalars_ > 0 ? "$0 to $" + std::to_string(num_scalars_ - 1) : "none",
             std::to_string(std::max(num_scalars_, 0)) + " scalars were passed.");
    }
    return add({.op = Op::scalar, .kind = kind == Kind::integer ? kind : Kind::real, .index = k});
}

int ExprBuilder::gather(int array, std::span<const int> indices) {
    if (array < 0 || static_cast<size_t>(array) >= arrays_.size()) {
        fail("array @" + std::to_string(array),
             arrays_.empty() ? "none" : "@0 to @" + std::to_string(arrays_.size() - 1),
             std::to_string(arrays_.size()) + " arrays were passed.");
    }
    const Array& source = arrays_[static_cast<size_t>(array)];
    if (!source || source.rank < 0 || source.rank > kMaxRank) {
        fail("array @" + std::to_string(array) + ", which is absent", "arrays of up to 5 axes");
    }
    if (indices.size() != static_cast<size_t>(source.rank)) {
        fail("gather with " + std::to_string(indices.size()) + " indices from @" + std::to_string(array) + ", " +
                 describe(source),
             "one index per axis, " + std::to_string(source.rank));
    }
    Node node{.op = Op::gather, .num_args = static_cast<uint8_t>(indices.size()), .index = array};
    node.kind = is_float(source.dtype) ? Kind::real : source.dtype == DType::boolean ? Kind::boolean : Kind::integer;
    for (size_t axis = 0; axis < indices.size(); ++axis) {
        if (this->node(indices[axis]).kind == Kind::real) {
            fail("a real index in gather from @" + std::to_string(array), "integers",
                 "floordiv of two integers is an integer.");
        }
        node.args[axis] = widen(indices[axis], Kind::integer);
    }
    return add(node);
}

int ExprBuilder::call(Op op, std::span<const int> args) {
    if (op <= Op::promote) fail("a call of " + std::string(name(op)), kOpList);
    if (args.size() != static_cast<size_t>(syntax(op).num_args)) {
        fail(std::string(name(op)) + " with " + std::to_string(args.size()) + " arguments",
             std::to_string(syntax(op).num_args));
    }
    const auto kind = [&](size_t a) { return node(args[a]).kind; };
    const auto need_bool = [&](size_t a) {
        if (kind(a) == Kind::boolean) return;
        fail(std::string(kind(a) == Kind::real ? "a real" : "an integer") + " as argument " + std::to_string(a + 1) +
                 " of " + name(op),
             "bool", "Compare it: ne(...,0).");
    };

    Node node{.op = op, .num_args = static_cast<uint8_t>(args.size())};
    Kind operands = Kind::integer;  // what args[first...] are widened to: bools become numbers
    size_t first = 0;
    for (size_t a = 0; a < args.size(); ++a) operands = wider(operands, kind(a));
    switch (op) {
        case Op::add:
        case Op::sub:
        case Op::mul:
        case Op::floordiv:
        case Op::mod:
        case Op::min:
        case Op::max:
        case Op::neg:
        case Op::abs: node.kind = operands; break;
        case Op::div:
        case Op::exp:
        case Op::log:
        case Op::tanh:
        case Op::sqrt: node.kind = operands = Kind::real; break;
        case Op::lt:
        case Op::le:
        case Op::gt:
        case Op::ge:
        case Op::eq:
        case Op::ne: node.kind = Kind::boolean; break;
        case Op::logical_and:
        case Op::logical_or:
        case Op::logical_not:
            for (size_t a = 0; a < args.size(); ++a) need_bool(a);
            node.kind = operands = Kind::boolean;
            break;
        case Op::where:
            need_bool(0);
            node.args[0] = args[0];
            node.kind = operands = wider(kind(1), kind(2));
            first = 1;
            break;
        case Op::to_real:
            if (kind(0) == Kind::real) return args[0];
            node.kind = Kind::real;
            operands = kind(0);
            break;
        case Op::literal:
        case Op::variable:
        case Op::scalar:
        case Op::gather:
        case Op::promote: break;
    }
    for (size_t a = first; a < args.size(); ++a) node.args[a] = widen(args[a], operands);
    return add(node);
}

Expr ExprBuilder::finish(int result) {
    if (role_ == Role::mask_mod && node(result).kind != Kind::boolean) {
        fail(std::string("a result of kind ") + kind_name(node(result).kind), "bool", "Compare it: ne(...,0).");
    }
    if (role_ == Role::score_mod) result = widen(result, Kind::real);

    auto nodes = std::make_shared<std::vector<Node>>();
    if (limited_) {
        // Renumbers depth first from the result: one order for one expression, however it was built, and nothing
        // that the result does not need. Depth is limited, so recursion is safe.
        std::vector<int32_t> number(nodes_.size(), -1);
        const auto visit = [&](const auto& self, int id) -> int32_t {
            if (number[static_cast<size_t>(id)] >= 0) return number[static_cast<size_t>(id)];
            Node copy = node(id);
            for (int a = 0; a < copy.num_args; ++a) {
                copy.args[static_cast<size_t>(a)] = self(self, copy.args[static_cast<size_t>(a)]);
            }
            nodes->push_back(copy);
            return number[static_cast<size_t>(id)] = static_cast<int32_t>(nodes->size()) - 1;
        };
        result = visit(visit, result);
    } else {
        *nodes = std::move(nodes_);
    }
    nodes_.clear();
    table_.clear();

    Expr expr;
    expr.nodes_ = std::move(nodes);
    expr.result_ = result;
    expr.role_ = role_;
    if (limited_) (void)expr.text();  // refuses what the parser would not take back
    return expr;
}

// ---------------------------------------------------------------------------------------------------------------------
// Queries and printer

bool Expr::operator==(const Expr& other) const {
    if (!nodes_ || !other.nodes_) return nodes_ == other.nodes_;
    return role_ == other.role_ && result_ == other.result_ && (nodes_ == other.nodes_ || *nodes_ == *other.nodes_);
}

std::vector<int> Expr::arrays() const {
    std::vector<int> numbers;
    for (const Node& node : nodes()) {
        if (node.op == Op::gather) numbers.push_back(node.index);
    }
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    return numbers;
}

int Expr::max_array() const {
    int largest = -1;
    for (const Node& node : nodes()) {
        if (node.op == Op::gather) largest = std::max(largest, node.index);
    }
    return largest;
}

int Expr::max_scalar() const {
    int largest = -1;
    for (const Node& node : nodes()) {
        if (node.op == Op::scalar) largest = std::max(largest, node.index);
    }
    return largest;
}

namespace {

// What Python's repr(float) prints, so that both tracers and this file agree.
std::string real_text(double value) {
    if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
    std::array<char, 40> buffer;
    const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific);
    std::string text(buffer.data(), end.ptr);  // -d.ddde-XX
    const size_t e = text.find('e');
    int exponent = 0;
    const char* digits = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
    std::from_chars(digits, text.data() + text.size(), exponent);
    if (exponent < -4 || exponent >= 16) return text;
    std::to_chars_result fixed =
        std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed);
    text.assign(buffer.data(), fixed.ptr);
    return text.find('.') == std::string::npos ? text + ".0" : text;
}

std::string leaf_text(const Node& node) {
    switch (node.op) {
        case Op::literal:
            if (node.kind == Kind::real) return real_text(node.real);
            if (node.kind == Kind::integer) return std::to_string(node.integer);
            return node.integer ? "true" : "false";
        case Op::variable: return name(static_cast<Variable>(node.index));
        case Op::scalar: {
            std::string text = "$";
            text += std::to_string(node.index);
            return node.kind == Kind::integer ? text + "i" : text;
        }
        case Op::gather: {
            std::string text = "gather(@";
            return text += std::to_string(node.index);  // the indices and ')' follow
        }
        default: return std::string(name(node.op)) + "(";
    }
}

bool is_leaf(const Node& node) { return node.op == Op::literal || node.op == Op::variable || node.op == Op::scalar; }

}  // namespace

std::string Expr::text() const {
    if (!nodes_) return "";
    // Shared subexpressions are printed at every use, so the text can be exponentially longer than the nodes:
    // measure before printing.
    std::vector<size_t> bytes(nodes_->size());
    for (size_t id = 0; id < nodes_->size(); ++id) {
        const Node& node = (*nodes_)[id];
        size_t sum = node.op == Op::promote ? 0 : leaf_text(node).size() + 1;
        for (int a = 0; a < node.num_args; ++a) {
            sum += bytes[static_cast<size_t>(node.args[static_cast<size_t>(a)])] + 1;
        }
        bytes[id] = std::min(sum, 2 * kMaxExprBytes);
    }
    if (bytes[static_cast<size_t>(result_)] > kMaxExprBytes) {
        refuse(role_ == Role::mask_mod ? "mask_mod" : "score_mod",
               "an expression of more than " + std::to_string(kMaxExprBytes) + " bytes of text",
               "up to " + std::to_string(kMaxExprBytes), "Capture a precomputed array instead.");
    }
    std::string out;
    const auto print = [&](const auto& self, int id) -> void {
        const Node& node = (*nodes_)[static_cast<size_t>(id)];
        if (node.op == Op::promote) return self(self, node.args[0]);
        out += leaf_text(node);
        if (is_leaf(node)) return;
        for (int a = 0; a < node.num_args; ++a) {
            if (a > 0 || node.op == Op::gather) out += ',';
            self(self, node.args[static_cast<size_t>(a)]);
        }
        out += ')';
    };
    print(print, result_);
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Parser

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

class Parser {
public:
    Parser(std::string_view text, Role role, std::span<const Array> arrays, int num_scalars)
        : text_(text), subject_(role == Role::mask_mod ? "mask_mod" : "score_mod"), build_(role, arrays, num_scalars) {}

    Expr parse() {
        if (text_.size() > kMaxExprBytes) {
            refuse(subject_, std::to_string(text_.size()) + " bytes of text", "up to " + std::to_string(kMaxExprBytes));
        }
        const int result = expression(1);
        if (!at_end()) fail("the end of the text");
        build_.origin = subject_;
        return build_.finish(result);
    }

private:
    int expression(int depth) {
        if (depth > kMaxExprDepth) fail("at most " + std::to_string(kMaxExprDepth) + " levels of nesting");
        skip_spaces();
        const size_t start = position_;
        const auto at = [&](size_t k) { return position_ + k < text_.size() ? text_[position_ + k] : '\0'; };
        if (is_digit(at(0)) || (at(0) == '-' && is_digit(at(1)))) return number();
        if (at(0) == '$') return scalar();
        const bool minus = at(0) == '-';
        if (minus) ++position_;
        const std::string_view word = identifier();
        mark(start);
        if (word == "inf") return build_.literal(minus ? -HUGE_VAL : HUGE_VAL);
        if (minus) {
            position_ = start;
            fail("a number, inf or -inf", "Write neg(...) for anything else.");
        }
        if (word == "true" || word == "false") return build_.literal(word == "true");
        for (size_t v = 0; v < kVariableNames.size(); ++v) {
            if (word == kVariableNames[v]) return build_.variable(static_cast<Variable>(v));
        }
        if (word == "gather") return gather(start, depth);
        for (size_t op = static_cast<size_t>(Op::to_real); op < kSyntax.size(); ++op) {
            if (word == kSyntax[op].name) return call(static_cast<Op>(op), start, depth);
        }
        position_ = start;
        fail(std::string("a number, true, false, inf, $k, a variable (") + kVariableList + ") or an operation (" +
             kOpList + ")");
    }

    int call(Op op, size_t start, int depth) {
        std::array<int, 3> args{};
        const int count = syntax(op).num_args;
        expect('(');
        for (int a = 0; a < count; ++a) {
            if (a > 0) expect(',');
            args[static_cast<size_t>(a)] = expression(depth + 1);
        }
        expect(')');
        mark(start);
        return build_.call(op, std::span<const int>(args.data(), static_cast<size_t>(count)));
    }

    int gather(size_t start, int depth) {
        std::array<int, kMaxRank> indices{};
        size_t count = 0;
        expect('(');
        expect('@');
        const int array = ordinal("an array number");
        while (next() == ',') {
            if (count == kMaxRank) fail("')': an array has at most " + std::to_string(kMaxRank) + " axes");
            ++position_;
            indices[count++] = expression(depth + 1);
        }
        if (next() != ')') fail("',' or ')'");
        ++position_;
        mark(start);
        return build_.gather(array, std::span<const int>(indices.data(), count));
    }

    int scalar() {
        const size_t start = position_++;
        const int k = ordinal("a scalar number");
        const bool integer = position_ < text_.size() && text_[position_] == 'i';
        if (integer) ++position_;
        mark(start);
        return build_.scalar(k, integer ? Kind::integer : Kind::real);
    }

    int number() {
        const size_t start = position_;
        if (text_[position_] == '-') ++position_;
        const auto digits = [&](const char* what) {
            const size_t from = position_;
            while (position_ < text_.size() && is_digit(text_[position_])) ++position_;
            if (position_ == from) fail(what);
        };
        bool real = false;
        digits("a digit");
        if (position_ < text_.size() && text_[position_] == '.') {
            real = true;
            ++position_;
            digits("a digit after '.'");
        }
        if (position_ < text_.size() && (text_[position_] == 'e' || text_[position_] == 'E')) {
            real = true;
            ++position_;
            if (position_ < text_.size() && (text_[position_] == '+' || text_[position_] == '-')) ++position_;
            digits("a digit of the exponent");
        }
        const char* begin = text_.data() + start;
        const char* end = text_.data() + position_;
        mark(start);
        if (real) {
            double value = 0;
            if (std::from_chars(begin, end, value).ec != std::errc{}) {
                position_ = start;
                fail("a real number that a double can hold", "Write inf for infinity.");
            }
            return build_.literal(value);
        }
        int32_t value = 0;
        if (std::from_chars(begin, end, value).ec != std::errc{}) {
            position_ = start;
            fail("an integer from -2147483648 to 2147483647", "Add '.0' for a real number.");
        }
        return build_.literal(value);
    }

    int ordinal(const char* what) {
        int value = 0;
        const char* end = text_.data() + text_.size();
        if (position_ >= text_.size() || !is_digit(text_[position_])) fail(what);
        const auto result = std::from_chars(text_.data() + position_, end, value);
        if (result.ec != std::errc{}) fail(what);
        position_ = static_cast<size_t>(result.ptr - text_.data());
        return value;
    }

    std::string_view identifier() {
        const size_t start = position_;
        while (position_ < text_.size() && (is_letter(text_[position_]) || is_digit(text_[position_]))) ++position_;
        return text_.substr(start, position_ - start);
    }

    void skip_spaces() {
        while (position_ < text_.size() && text_[position_] == ' ') ++position_;
    }
    bool at_end() { return skip_spaces(), position_ == text_.size(); }
    char next() { return at_end() ? '\0' : text_[position_]; }
    void expect(char c) {
        if (next() != c || position_ == text_.size()) fail(std::string("'") + c + "'");
        ++position_;
    }

    // Errors of the builder are about the operation that starts here.
    void mark(size_t start) { build_.origin = subject_ + ", position " + std::to_string(start); }

    [[noreturn]] void fail(const std::string& allowed, const std::string& advice = "") const {
        // The text can hold anything: show a short, printable piece of it.
        std::string seen;
        for (size_t k = position_; k < std::min(text_.size(), position_ + 24); ++k) {
            const char c = text_[k];
            if (c >= ' ' && c <= '~') {
                seen += c;
            } else {
                constexpr const char* kHex = "0123456789abcdef";
                const auto byte = static_cast<unsigned char>(c);
                seen += std::string("\\x") + kHex[byte >> 4] + kHex[byte & 15];
            }
        }
        if (text_.size() > position_ + 24) seen += "...";
        refuse(subject_ + ", position " + std::to_string(position_),
               seen.empty() ? "the end of the text" : "'" + seen + "'", allowed, advice);
    }

    std::string_view text_;
    size_t position_ = 0;
    std::string subject_;
    ExprBuilder build_;
};

}  // namespace

Expr Expr::parse(std::string_view text, Role role, std::span<const Array> arrays, int num_scalars) {
    return Parser(text, role, arrays, num_scalars).parse();
}

}  // namespace tilewise::core
