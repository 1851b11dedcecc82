// Parsing, checking and printing of mask text. Every refusal says which kind, what was seen, what is allowed, what to
// do.
#include "mask_text.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "mask.hpp"
#include "summary.hpp"

namespace tilewise::core {
namespace {

// What a kind is called, and its arguments: @ array, i integer, n integer or array, c causal|full, e expression,
// m one mask, M any number of masks.
struct KindInfo {
    MaskOp op;
    std::string_view name;
    std::string_view arguments;
    const char* usage;
};
constexpr KindInfo kKinds[] = {
    {MaskOp::all_of, "and", "M", "and(mask, ...)"},
    {MaskOp::any_of, "or", "M", "or(mask, ...)"},
    {MaskOp::negate, "not", "m", "not(mask)"},
    {MaskOp::causal, "causal", "", "causal()"},
    {MaskOp::window, "window", "ii", "window(left, right)"},
    {MaskOp::chunk, "chunk", "i", "chunk(c)"},
    {MaskOp::key_padding, "key_padding", "@", "key_padding(@keep)"},
    {MaskOp::documents, "documents", "@@", "documents(@q_ids, @kv_ids)"},
    {MaskOp::prefix, "prefix", "n", "prefix(n) or prefix(@n)"},
    {MaskOp::intervals, "intervals", "@c", "intervals(@startend_row_indices, causal) or intervals(@..., full)"},
    {MaskOp::row_intervals, "row_intervals", "@@", "row_intervals(@start, @end)"},
    {MaskOp::tree, "tree", "@n", "tree(@bits, n) or tree(@bits, @n)"},
    {MaskOp::blocks, "blocks", "@ii", "blocks(@map, bq, bkv)"},
    {MaskOp::dense, "dense", "@", "dense(@array)"},
    {MaskOp::mod, "mod", "e", "mod(expression)"},
};

const KindInfo& info(MaskOp op) {
    return *std::find_if(std::begin(kKinds), std::end(kKinds), [&](const KindInfo& kind) { return kind.op == op; });
}

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

class Parser {
public:
    Parser(std::string_view text, const Problem& problem) : text_(text), problem_(problem) {}

    MaskNode parse() {
        if (text_.size() > kMaxMaskBytes) {
            refuse("mask", std::to_string(text_.size()) + " bytes of text", "at most " + std::to_string(kMaxMaskBytes));
        }
        MaskNode node = mask(1);
        skip_space();
        if (at_ != text_.size()) fail(seen(), "the end of the text", "Join masks with and(...) or or(...).");
        return node;
    }

private:
    MaskNode mask(int depth) {
        if (depth > kMaxMaskDepth) {
            fail("more than " + std::to_string(kMaxMaskDepth) + " nested masks", "at most that many",
                 "Use one mod(expression), or one dense array.");
        }
        if (++nodes_ > kMaxMaskNodes) {
            fail("more than " + std::to_string(kMaxMaskNodes) + " masks in one text", "at most that many");
        }
        skip_space();
        const size_t start = at_;
        const std::string_view word = identifier();
        const auto kind =
            std::find_if(std::begin(kKinds), std::end(kKinds), [&](const KindInfo& k) { return k.name == word; });
        if (word.empty() || kind == std::end(kKinds)) {
            at_ = start;
            std::string names;
            for (const KindInfo& k : kKinds) names += (names.empty() ? "" : ", ") + std::string(k.name);
            fail(seen(), "a mask: " + names);
        }
        usage_ = kind->usage;
        expect('(');
        MaskNode node;
        node.op = kind->op;
        int arrays = 0, numbers = 0;
        for (size_t n = 0; n < kind->arguments.size(); ++n) {
            if (n > 0) expect(',');
            switch (kind->arguments[n]) {
                case '@': node.array[static_cast<size_t>(arrays++)] = array(); break;
                case 'i': node.number[static_cast<size_t>(numbers++)] = integer(); break;
                case 'n':
                    skip_space();
                    if (at_ < text_.size() && text_[at_] == '@') {
                        node.array[static_cast<size_t>(arrays)] = array();
                    } else {
                        node.number[static_cast<size_t>(numbers)] = integer();
                    }
                    break;
                case 'c': node.causal = causal_or_full(); break;
                case 'e': node.expr = expression(); break;
                case 'm': node.parts.push_back(mask(depth + 1)); break;
                default: do { node.parts.push_back(mask(depth + 1));
                    } while (accept(','));
            }
        }
        usage_ = kind->usage;
        expect(')');
        return simplify(std::move(node));
    }

    // Nested and/or are one and/or in the same order; one operand stands for itself; double negation is none.
    static MaskNode simplify(MaskNode node) {
        if (node.op == MaskOp::negate && node.parts[0].op == MaskOp::negate) {
            MaskNode inner = std::move(node.parts[0].parts[0]);
            return inner;
        }
        if (node.op != MaskOp::all_of && node.op != MaskOp::any_of) return node;
        std::vector<MaskNode> flat;
        for (MaskNode& part : node.parts) {
            if (part.op == node.op) {
                for (MaskNode& inner : part.parts) flat.push_back(std::move(inner));
            } else {
                flat.push_back(std::move(part));
            }
        }
        if (flat.size() == 1) {
            MaskNode only = std::move(flat[0]);
            return only;
        }
        node.parts = std::move(flat);
        return node;
    }

    int array() {
        skip_space();
        if (at_ >= text_.size() || text_[at_] != '@') fail(seen(), "an array, @0, @1, ...");
        ++at_;
        const size_t start = at_;
        int k = 0;
        const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), k);
        if (error != std::errc() || text_[at_] == '-') fail(seen(), "a number of an array after @");
        at_ = static_cast<size_t>(end - text_.data());
        if (k >= static_cast<int>(problem_.arrays.size())) {
            at_ = start - 1;
            fail("@" + std::to_string(k) + " with " + std::to_string(problem_.arrays.size()) + " arrays",
                 problem_.arrays.empty() ? "no array, since none was given"
                                         : "@0 to @" + std::to_string(problem_.arrays.size() - 1),
                 "Give the array in `arrays`.");
        }
        return k;
    }

    int64_t integer() {
        skip_space();
        int64_t value = 0;
        const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
        if (error == std::errc::result_out_of_range) fail("a number beyond 64 bits", "a 64-bit integer");
        if (error != std::errc()) fail(seen(), "an integer");
        at_ = static_cast<size_t>(end - text_.data());
        return value;
    }

    bool causal_or_full() {
        skip_space();
        const size_t start = at_;
        const std::string_view word = identifier();
        if (word == "causal") return true;
        if (word == "full") return false;
        at_ = start;
        fail(seen(), "causal or full");
    }

    // Up to the parenthesis that closes mod(...; expressions have no other use for parentheses.
    Expr expression() {
        const size_t start = at_;
        int open = 0;
        for (; at_ < text_.size(); ++at_) {
            if (text_[at_] == '(') ++open;
            if (text_[at_] == ')' && open-- == 0) break;
        }
        if (at_ == text_.size()) fail("the end of the text", "a closing parenthesis");
        try {
            return Expr::parse(text_.substr(start, at_ - start), Role::mask_mod, problem_.arrays,
                               static_cast<int>(problem_.scalars.size()));
        } catch (const Error& error) {
            throw Error(error.status(), "mask mod(expression): " + std::string(error.what()));
        }
    }

    void skip_space() {
        while (at_ < text_.size() && is_space(text_[at_])) ++at_;
    }
    std::string_view identifier() {
        const size_t start = at_;
        while (at_ < text_.size() && ((text_[at_] >= 'a' && text_[at_] <= 'z') || text_[at_] == '_')) ++at_;
        return text_.substr(start, at_ - start);
    }
    bool accept(char c) {
        skip_space();
        if (at_ >= text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }
    void expect(char c) {
        if (!accept(c)) fail(seen(), std::string("'") + c + "'");
    }

    // The next few bytes, printable.
    [[nodiscard]] std::string seen() const {
        if (at_ >= text_.size()) return "the end of the text";
        std::string shown;
        for (const char c : text_.substr(at_, 16)) shown += c >= 0x20 && c < 0x7f ? c : '?';
        return "'" + shown + "'";
    }
    [[noreturn]] void fail(const std::string& got, const std::string& allowed, const std::string& advice = "") const {
        const std::string kind = usage_ ? std::string(" ") + usage_ : "";
        refuse("mask" + kind + " at byte " + std::to_string(at_), got, allowed, advice);
    }

    std::string_view text_;
    const Problem& problem_;
    size_t at_ = 0;
    int nodes_ = 0;
    const char* usage_ = nullptr;
};

// ---------------------------------------------------------------------------------------------------------------------
// Shapes

// One axis: its name and the extents it may have.
struct Axis {
    std::string name;
    std::vector<int64_t> extents;
    bool at_least = false;  // the extent, or more

    [[nodiscard]] bool takes(int64_t n) const {
        return at_least ? n >= extents[0] : std::find(extents.begin(), extents.end(), n) != extents.end();
    }
};
using Shape = std::vector<Axis>;

Axis batch_axis(const Problem& p) { return {"batch", {1, p.batch}}; }
Axis heads_axis(const Problem& p) { return {"heads", {1, p.num_heads_kv, p.num_heads_q}}; }
Axis q_axis(const Problem& p) { return {p.packed_q ? "total_q" : "seqlen_q", {p.q_rows}}; }
Axis kv_axis(const Problem& p) { return {p.packed_kv ? "total_kv" : "seqlen_kv", {p.kv_rows}}; }

// Longest sequence; 0 while lengths are not known (they are checked again when the mask is bound to data).
int64_t longest_q(const Problem& p) {
    int64_t n = 0;
    for (const Sequence& s : p.sequences) n = std::max(n, s.q_len);
    return n;
}
int64_t longest_kv(const Problem& p) {
    int64_t n = 0;
    for (const Sequence& s : p.sequences) n = std::max(n, s.kv_len);
    return n;
}

// "[heads, total_q], where heads is 1, 2 or 8 and total_q is 100"
std::string shape_list(const std::vector<Shape>& shapes) {
    std::string text, where;
    std::vector<std::string> explained;
    for (const Shape& shape : shapes) {
        text += text.empty() ? "[" : " or [";
        for (size_t n = 0; n < shape.size(); ++n) {
            const Axis& axis = shape[n];
            text += (n ? ", " : "") + axis.name;
            if (std::find(explained.begin(), explained.end(), axis.name) != explained.end()) continue;
            explained.push_back(axis.name);
            std::vector<int64_t> extents = axis.extents;
            std::sort(extents.begin(), extents.end());
            extents.erase(std::unique(extents.begin(), extents.end()), extents.end());
            where += (where.empty() ? ", where " : ", ") + axis.name + (axis.at_least ? " is at least " : " is ");
            for (size_t k = 0; k < extents.size(); ++k) {
                where += (k == 0 ? "" : k + 1 == extents.size() ? " or " : ", ") + std::to_string(extents[k]);
            }
        }
        text += "]";
    }
    return text + where;
}

enum class Elements { integer, truth, int32, words };

// One array argument of a kind.
class Checker {
public:
    Checker(const Problem& problem, const MaskNode& node) : problem_(problem), node_(node) {}

    void array(size_t n, const char* argument, Elements elements, const std::vector<Shape>& shapes) const {
        const Array& a = problem_.arrays[static_cast<size_t>(node_.array[n])];
        const auto fail = [&](const std::string& allowed, const char* advice) {
            refuse("mask " + std::string(info(node_.op).name) + ": " + argument + " (@" +
                       std::to_string(node_.array[n]) + ")",
                   describe(a), allowed, advice);
        };
        switch (elements) {
            case Elements::truth:
                if (!is_integer(a.dtype)) fail("a bool or integer array", "Convert it to bool first.");
                break;
            case Elements::integer:
                if (!is_integer(a.dtype) || a.dtype == DType::boolean)
                    fail("an integer array", "Convert it to int32 first.");
                break;
            case Elements::int32:
                if (a.dtype != DType::i32 && a.dtype != DType::i64)
                    fail("an int32 (or int64) array", "Convert it to int32 first.");
                break;
            case Elements::words:
                if (a.dtype != DType::u32 && a.dtype != DType::i32) {
                    fail("a uint32 or int32 array of 32 bits per word",
                         "Pack the bits first, the lowest bit of a word is its first key.");
                }
                break;
        }
        for (const Shape& shape : shapes) {
            bool fits = static_cast<size_t>(a.rank) == shape.size();
            for (size_t axis = 0; fits && axis < shape.size(); ++axis) fits = shape[axis].takes(a.shape[axis]);
            if (fits) return;
        }
        fail(shape_list(shapes), "Axes named batch and heads may be 1 to broadcast; no other axis is broadcast.");
    }

    // One entry per token of a side.
    void tokens(size_t n, const char* argument, Elements elements, bool packed, const Axis& axis) const {
        const Axis batch = batch_axis(problem_), heads = heads_axis(problem_);
        if (packed) {
            array(n, argument, elements, {{axis}, {heads, axis}});
        } else {
            array(n, argument, elements, {{axis}, {batch, axis}, {batch, heads, axis}});
        }
    }

    void number(size_t n, const char* argument, int64_t low, const char* advice) const {
        if (node_.number[n] < low) {
            refuse("mask " + std::string(info(node_.op).name) + ": " + argument, std::to_string(node_.number[n]),
                   "an integer of at least " + std::to_string(low), advice);
        }
    }

    void check() const;

private:
    const Problem& problem_;
    const MaskNode& node_;
};

void Checker::check() const {
    const Problem& p = problem_;
    const Axis batch = batch_axis(p), heads = heads_axis(p);
    switch (node_.op) {
        case MaskOp::all_of:
        case MaskOp::any_of:
        case MaskOp::negate:
            for (const MaskNode& part : node_.parts) Checker(p, part).check();
            break;
        case MaskOp::causal: break;
        case MaskOp::window:
            number(0, "left", -1, "-1 means unbounded.");
            number(1, "right", -1, "-1 means unbounded.");
            break;
        case MaskOp::chunk: number(0, "c", 1, "Leave the chunk away if there is none."); break;
        case MaskOp::key_padding: tokens(0, "keep", Elements::truth, p.packed_kv, kv_axis(p)); break;
        case MaskOp::documents:
            tokens(0, "q_ids", Elements::integer, p.packed_q, q_axis(p));
            tokens(1, "kv_ids", Elements::integer, p.packed_kv, kv_axis(p));
            break;
        case MaskOp::prefix:
            if (node_.array[0] < 0) {
                number(0, "n", 0, "It counts keys.");
            } else {
                array(0, "n", Elements::integer, {{batch}, {batch, heads}});
            }
            break;
        case MaskOp::intervals: {
            // FlashMask's table: with the causal part one or two bounds, without it two or four.
            const Axis bounds = node_.causal ? Axis{"bounds", {1, 2}} : Axis{"bounds", {2, 4}};
            const std::vector<Shape> shapes =
                p.packed_kv ? std::vector<Shape>{{kv_axis(p), bounds}, {heads, kv_axis(p), bounds}}
                            : std::vector<Shape>{{batch, heads, kv_axis(p), bounds}};
            array(0, node_.causal ? "startend_row_indices, causal" : "startend_row_indices, full", Elements::int32,
                  shapes);
            break;
        }
        case MaskOp::row_intervals:
            tokens(0, "start", Elements::integer, p.packed_q, q_axis(p));
            tokens(1, "end", Elements::integer, p.packed_q, q_axis(p));
            break;
        case MaskOp::tree: {
            int64_t words = 0;
            if (node_.array[1] < 0) {
                number(0, "n", 0, "It counts keys.");
                words = ceil_div(node_.number[0], 32);
            } else {
                array(1, "n", Elements::integer, {{batch}});
            }
            const Axis word_axis{"words", {words}, true};
            array(0, "bits", Elements::words,
                  p.packed_q ? std::vector<Shape>{{q_axis(p), word_axis}, {heads, q_axis(p), word_axis}}
                             : std::vector<Shape>{{q_axis(p), word_axis},
                                                  {batch, q_axis(p), word_axis},
                                                  {batch, heads, q_axis(p), word_axis}});
            break;
        }
        case MaskOp::blocks: {
            number(0, "bq", 1, "It counts queries per block.");
            number(1, "bkv", 1, "It counts keys per block.");
            const Axis rows{"ceil(max_seqlen_q / bq)", {ceil_div(longest_q(p), node_.number[0])}, true};
            const Axis columns{"ceil(max_seqlen_kv / bkv)", {ceil_div(longest_kv(p), node_.number[1])}, true};
            array(0, "map", Elements::truth, {{rows, columns}, {batch, heads, rows, columns}});
            break;
        }
        case MaskOp::dense: {
            const auto side = [](bool packed, const Axis& tokens, const char* name, int64_t longest) {
                return packed ? Axis{name, {longest}, true} : tokens;
            };
            const Array& a = p.arrays[static_cast<size_t>(node_.array[0])];
            Shape shape{batch, heads, side(p.packed_q, q_axis(p), "max_seqlen_q", longest_q(p)),
                        side(p.packed_kv, kv_axis(p), "max_seqlen_kv", longest_kv(p))};
            // Every axis may be 1, and leading axes may be missing, as in NumPy.
            for (size_t n = 0; n < 4; ++n) {
                const int64_t axis = static_cast<int64_t>(n) - (4 - a.rank);
                if (axis >= 0 && axis < a.rank && a.shape[static_cast<size_t>(axis)] == 1)
                    shape[n].at_least = false, shape[n].extents.push_back(1);
            }
            if (a.rank <= 4) shape.erase(shape.begin(), shape.begin() + (4 - a.rank));
            array(0, "array", Elements::truth, {shape});
            break;
        }
        case MaskOp::mod: break;  // checked by its own parser
    }
}

bool contains(const MaskNode& node, MaskOp op) {
    return node.op == op ||
           std::any_of(node.parts.begin(), node.parts.end(), [&](const MaskNode& part) { return contains(part, op); });
}

// A prefix reaches past t on purpose; anything that bounds keys on the right at the outermost level would cut it off
// without a word.
void refuse_cut_prefix(const MaskNode& root, const Problem& p) {
    if (!contains(root, MaskOp::prefix)) return;
    const char* by = p.causal ? "causal=True" : p.window_right >= 0 ? "a window with a right bound" : nullptr;
    const auto bounds = [&](const MaskNode& node) {
        if (node.op == MaskOp::causal) by = "causal()";
        if (node.op == MaskOp::window && node.number[1] >= 0) by = "window() with a right bound";
        if (node.op == MaskOp::intervals && node.causal) by = "intervals(..., causal)";
    };
    if (root.op == MaskOp::all_of) std::for_each(root.parts.begin(), root.parts.end(), bounds);
    if (by) {
        refuse("mask prefix", std::string("prefix together with ") + by, "prefix without it",
               "prefix(n) is `j < n or j <= t`: it contains causal already.");
    }
}

}  // namespace

MaskNode parse_mask(std::string_view text, const Problem& problem) {
    MaskNode root = Parser(text, problem).parse();
    Checker(problem, root).check();
    refuse_cut_prefix(root, problem);
    return root;
}

std::string print_mask(const MaskNode& node) {
    const KindInfo& kind = info(node.op);
    std::string text = std::string(kind.name) + "(";
    size_t arrays = 0, numbers = 0;
    const auto array = [&] { return "@" + std::to_string(node.array[arrays++]); };
    const auto integer = [&] { return std::to_string(node.number[numbers++]); };
    for (size_t n = 0; n < kind.arguments.size(); ++n) {
        if (n > 0) text += ",";
        switch (kind.arguments[n]) {
            case '@': text += array(); break;
            case 'i': text += integer(); break;
            case 'n': text += node.array[arrays] >= 0 ? array() : integer(); break;
            case 'c': text += node.causal ? "causal" : "full"; break;
            case 'e': text += node.expr.text(); break;
            default:
                for (size_t k = 0; k < node.parts.size(); ++k) {
                    if (k > 0) text += ",";
                    text += print_mask(node.parts[k]);
                }
        }
    }
    return text + ")";
}

std::string canonical_mask(std::string_view text, const Problem& problem) {
    return print_mask(parse_mask(text, problem));
}

}  // namespace tilewise::core
