#include "render_mask.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/mask_text.hpp"
#include "render_expr.hpp"

namespace tilewise::jit {
namespace {

using core::MaskNode;
using core::MaskOp;
using core::Problem;

// Two expressions in C++ for one mask.
struct Answers {
    std::string visible;  // of i, j
    std::string cls;      // of i0, i1, j0, j1
};

class Renderer {
public:
    Renderer(const Problem& problem, MaskProgram& program, bool sequences)
        : p_(problem), out_(program), sequences_(sequences) {}

    void run() {
        std::vector<Answers> parts;
        tighten(out_.window_left, p_.window_left);
        tighten(out_.window_right, p_.causal ? 0 : -1);
        tighten(out_.window_right, p_.window_right);
        if (p_.chunk > 0) chunks_.push_back(number(p_.chunk));
        if (!p_.mask.empty()) top_level(core::parse_mask(p_.mask, p_), parts);
        out_.bands = parts.empty();
        out_.documents = parts.size() == 1 && documents_.size() == 2;
        for (const std::string& chunk : chunks_) parts.push_back(chunk_answers(chunk));
        parts.insert(parts.begin(), {"window_visible(site, p.window_left, p.window_right, i, j)",
                                     "window_class(site, p.window_left, p.window_right, i0, i1, j0, j1)"});
        std::string cls = joined(parts, "both").cls;
        std::string text = functions_;
        if (!p_.score_mod.empty()) {
            const core::Expr expr =
                core::Expr::parse(p_.score_mod, core::Role::score_mod, p_.arrays, static_cast<int>(p_.scalars.size()));
            gather(expr);
            const std::string hides = render_score_hides(expr, p_.arrays, "score_mod_hides");
            if (!hides.empty()) {
                out_.bands = out_.documents = false;
                text += hides;
                cls = "score_mod_hides(site, data, i0, i1, j0, j1) ? static_cast<int>(kSkip) : " + cls;
            }
        }
        constexpr const char* kSite = "(const abi::Problem& p, const MaskData& data, const Site& site, ";
        text += std::string("TW_DEVICE bool visible") + kSite + "Int i, Int j) {\n    return " +
                joined(parts, "both").visible + ";\n}\n";
        text += std::string("TW_DEVICE int classify") + kSite + "Int i0, Int i1, Int j0, Int j1) {\n    return " + cls +
                ";\n}\n";
        text += std::string("TW_DEVICE Range key_hull") + kSite +
                "Int i0, Int i1) {\n"
                "    const Int t0 = i0 + site.q_offset, t1 = i1 - 1 + site.q_offset;\n"
                "    Range keys{window_keys(p.window_left, p.window_right, t0).begin, "
                "window_keys(p.window_left, p.window_right, t1).end};\n";
        for (const std::string& chunk : chunks_) {
            text.append("    keys = intersect(keys, {chunk_keys(").append(chunk).append(", t0).begin, chunk_keys(");
            text.append(chunk).append(", t1).end});\n");
        }
        text += "    return intersect(keys, {0, site.kv_len});\n}\n";
        text += std::string("constexpr bool kChunkMask = ") + (chunks_.empty() ? "false" : "true") + ";\n";
        text += std::string("TW_DEVICE Range query_hull") + kSite +
                "Int j0, Int j1) {\n"
                "    Range seen = window_positions(p.window_left, p.window_right, {j0, j1});\n";
        for (const std::string& chunk : chunks_) {
            text += "    seen = intersect(seen, chunk_positions(" + chunk + ", {j0, j1}));\n";
        }
        text += "    return intersect({seen.begin - site.q_offset, seen.end - site.q_offset}, {0, site.q_len});\n}\n";
        // Kernels name them whether the mask has documents or not.
        const std::string wide = std::to_string(static_cast<int>(core::DType::i64)),
                          u32 = std::to_string(static_cast<int>(core::DType::u32));
        const bool narrow = std::none_of(documents_.begin(), documents_.end(),
                                         [&](const std::string& dtype) { return dtype == wide || dtype == u32; });
        const std::string as_read = narrow ? std::to_string(static_cast<int>(core::DType::i32)) : wide;
        text += std::string("using DocumentId = ") + (narrow ? "int" : "Int") + ";\n";
        text += std::string("constexpr bool kKeyDocumentsAsRead = ") +
                (out_.documents && documents_[1] == as_read ? "true" : "false") + ";\n";
        const std::array<const char*, 2> sides = {"query", "key"}, tokens = {"site.q_token", "site.kv_token"};
        for (size_t side = 0; side < 2; ++side) {
            const std::string ids =
                out_.documents ? "token_ids(data.masks[" + std::to_string(side) + "], site, " + tokens[side] + ")"
                               : "{nullptr, 0, 0}";
            const std::string id = out_.documents ? "token_id<" + documents_[side] + ">(ids, n)" : "n";
            text.append("TW_DEVICE TokenIds ").append(sides[side]);
            text.append("_documents(const MaskData& data, const Site& site) {\n    return ").append(ids);
            text.append(";\n}\nTW_DEVICE DocumentId ").append(sides[side]);
            text.append("_document(const TokenIds& ids, Int n) {\n    return static_cast<DocumentId>(").append(id);
            text.append(");\n}\n");
        }
        out_.text = std::move(text);
    }

private:
    static void tighten(int64_t& bound, int64_t value) {
        constexpr int64_t kBeyond = int64_t{1} << 60;  // no position lies further apart
        if (value >= 0 && value < kBeyond && (bound < 0 || value < bound)) bound = value;
    }
    void gather(const core::Expr& expr) {
        for (const int k : expr.arrays()) {
            if (std::find(out_.gathered.begin(), out_.gathered.end(), k) == out_.gathered.end())
                out_.gathered.push_back(k);
        }
    }
    std::string number(int64_t value) {
        out_.numbers.push_back(value);
        return "data.numbers[" + std::to_string(out_.numbers.size() - 1) + "]";
    }
    std::string operand(int array, MaskRole role, bool causal = false) {
        out_.operands.push_back({array, role, causal});
        return "data.masks[" + std::to_string(out_.operands.size() - 1) + "]";
    }
    std::string dtype(int array) const {
        return std::to_string(static_cast<int>(p_.arrays[static_cast<size_t>(array)].dtype));
    }
    static Answers chunk_answers(const std::string& chunk) {
        return {"chunk_visible(site, " + chunk + ", i, j)", "chunk_class(site, " + chunk + ", i0, i1, j0, j1)"};
    }
    static Answers joined(const std::vector<Answers>& parts, const char* join) {
        const char* const logic = std::string(join) == "both" ? " && " : " || ";
        Answers all = parts[0];
        for (size_t n = 1; n < parts.size(); ++n) {
            all.visible += logic + parts[n].visible;
            all.cls = std::string(join) + "(" + all.cls + ", " + parts[n].cls + ")";
        }
        if (parts.size() > 1) all.visible = "(" + all.visible + ")";
        return all;
    }

    // Bands joined by `and` become part of the call's own.
    void top_level(const MaskNode& node, std::vector<Answers>& parts) {
        switch (node.op) {
            case MaskOp::all_of:
                for (const MaskNode& part : node.parts) top_level(part, parts);
                break;
            case MaskOp::causal: tighten(out_.window_right, 0); break;
            case MaskOp::window:
                tighten(out_.window_left, node.number[0]), tighten(out_.window_right, node.number[1]);
                break;
            case MaskOp::chunk: chunks_.push_back(number(node.number[0])); break;
            case MaskOp::intervals:
                if (node.causal) tighten(out_.window_right, 0);  // bounds the tiles that are looked at
                parts.push_back(alone(node));
                break;
            case MaskOp::documents:
                if (sequences_) {
                    out_.sequences_of = node.array[0];
                    break;
                }
                [[fallthrough]];
            default:
                parts.push_back(alone(node));
                if (node.op == MaskOp::documents && parts.size() == 1) {  // it reads the first two arrays of MaskData
                    documents_ = {dtype(node.array[0]), dtype(node.array[1])};
                }
        }
    }

    Answers alone(const MaskNode& node) {
        const auto many = [&](const char* join) {
            std::vector<Answers> parts;
            for (const MaskNode& part : node.parts) parts.push_back(alone(part));
            return joined(parts, join);
        };
        const std::string tile = ", site, i0, i1, j0, j1)", place = ", site, i, j)";
        switch (node.op) {
            case MaskOp::all_of: return many("both");
            case MaskOp::any_of: return many("either");
            case MaskOp::negate: {
                const Answers part = alone(node.parts[0]);
                return {"!(" + part.visible + ")", "opposite(" + part.cls + ")"};
            }
            case MaskOp::causal:
                return {"window_visible(site, -1, 0, i, j)", "window_class(site, -1, 0, i0, i1, j0, j1)"};
            case MaskOp::window: {
                const std::string bounds = number(node.number[0]) + ", " + number(node.number[1]);
                return {"window_visible(site, " + bounds + ", i, j)",
                        "window_class(site, " + bounds + ", i0, i1, j0, j1)"};
            }
            case MaskOp::chunk: return chunk_answers(number(node.number[0]));
            case MaskOp::key_padding: {
                const std::string keep = operand(node.array[0], MaskRole::key_padding);
                return {"key_padding_visible<" + dtype(node.array[0]) + ">(" + keep + ", site, j)",
                        "key_padding_class(" + keep + ", site, j0, j1)"};
            }
            case MaskOp::documents: {
                const std::string q = operand(node.array[0], MaskRole::q_tokens),
                                  kv = operand(node.array[1], MaskRole::kv_tokens);
                return {"documents_visible<" + dtype(node.array[0]) + ", " + dtype(node.array[1]) + ">(" + q + ", " +
                            kv + place,
                        "documents_class(" + q + ", " + kv + tile};
            }
            case MaskOp::prefix: {
                const std::string n = number_or_array(node, 0);
                return {"prefix_visible(site, " + n + ", i, j)", "prefix_class(site, " + n + ", i0, i1, j0, j1)"};
            }
            case MaskOp::intervals: {
                const auto& a = p_.arrays[static_cast<size_t>(node.array[0])];
                const std::string columns = std::to_string(a.shape[static_cast<size_t>(a.rank - 1)]);
                const std::string causal = node.causal ? "true" : "false";
                const std::string bounds = operand(node.array[0], MaskRole::intervals, node.causal);
                return {"intervals_visible<" + dtype(node.array[0]) + ", " + columns + ", " + causal + ">(" + bounds +
                            place,
                        "intervals_class<" + causal + ">(" + bounds + tile};
            }
            case MaskOp::row_intervals: {
                const std::string begin = operand(node.array[0], MaskRole::q_tokens),
                                  end = operand(node.array[1], MaskRole::q_tokens);
                return {"row_intervals_visible<" + dtype(node.array[0]) + ", " + dtype(node.array[1]) + ">(" + begin +
                            ", " + end + place,
                        "row_intervals_class(" + begin + ", " + end + tile};
            }
            case MaskOp::tree: {
                const std::string bits = operand(node.array[0], MaskRole::tree), n = number_or_array(node, 1);
                return {"tree_visible(" + bits + ", site, " + n + ", i, j)",
                        "tree_class(" + bits + ", site, " + n + ", j0, j1)"};
            }
            case MaskOp::blocks: {
                const std::string map = operand(node.array[0], MaskRole::blocks);
                const std::string edges = ", site, " + number(node.number[0]) + ", " + number(node.number[1]);
                return {"blocks_visible<" + dtype(node.array[0]) + ">(" + map + edges + ", i, j)",
                        "blocks_class<" + dtype(node.array[0]) + ">(" + map + edges + ", i0, i1, j0, j1)"};
            }
            case MaskOp::dense: {
                const std::string array = operand(node.array[0], MaskRole::dense);
                return {"dense_visible<" + dtype(node.array[0]) + ">(" + array + place, "dense_class(" + array + tile};
            }
            case MaskOp::mod: break;
        }
        gather(node.expr);
        const std::string name = "mask_mod_" + std::to_string(num_mods_++);
        functions_ += render_mask_value(node.expr, p_.arrays, name);
        functions_ += render_mask_truth(node.expr, p_.arrays, name + "_class");
        return {name + "(site, data, i, j)", name + "_class(site, data, i0, i1, j0, j1)"};
    }

    std::string number_or_array(const MaskNode& node, size_t n) {
        if (node.array[n] < 0) return number(node.number[0]);
        return "element<" + dtype(node.array[n]) + ">(" + operand(node.array[n], MaskRole::per_head) + ", site, 0)";
    }

    const Problem& p_;
    MaskProgram& out_;
    const bool sequences_;  // documents are
    std::vector<std::string> chunks_;
    std::vector<std::string> documents_;  // dtypes of both arrays, if the first part of the mask is documents
    std::string functions_;
    int num_mods_ = 0;
};

}  // namespace

MaskProgram render_mask(const Problem& problem, bool sequences) {
    MaskProgram program;
    Renderer(problem, program, sequences).run();
    return program;
}

}  // namespace tilewise::jit
