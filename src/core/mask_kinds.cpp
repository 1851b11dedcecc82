// Bands, expressions, the three ways to join masks, and the way from the tree of the text to all of them. The kinds
// backed by arrays are in mask_tokens.cpp and mask_grids.cpp.
#include "mask_kinds.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

namespace tilewise::core {
namespace {

constexpr int64_t kFar = int64_t{1} << 62;     // beyond every position
constexpr int64_t kBeyond = int64_t{1} << 61;  // a window or chunk of this size has no edge at any position

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

class BandKind final : public BoundKind {
public:
    explicit BandKind(Band band) : band_(std::move(band)) {}
    TileClass classify(const Place& place, Range i, Range j) const override { return band_.classify(place.seq, i, j); }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const Range keys = band_.keys(i + Band::offset(place.seq));
        const int64_t begin = std::clamp(keys.begin, j.begin, j.end), end = std::clamp(keys.end, begin, j.end);
        std::memset(out, 0, static_cast<size_t>(j.size()));
        std::memset(out + (begin - j.begin), 1, static_cast<size_t>(end - begin));
    }

private:
    Band band_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Expressions

ExprContext context_of(const Problem& p, const Place& place) {
    return {place.b,  place.h,  place.h / p.group(), place.seq.q_len, place.seq.kv_len, place.seq.q_offset,
            p.arrays, p.scalars};
}

bool uses_head(const Expr& expr) { return expr.uses(Variable::h) || expr.uses(Variable::head_kv); }

// Evaluators hold scratch, so every thread keeps a few of its own. Ids are never reused: an evaluator of a mask that is
// gone is replaced, not called.
template <class T>
RowEvaluator<T>& evaluator_of(uint64_t id, const RowProgram& program) {
    struct Slot {
        uint64_t id = 0;
        std::vector<std::byte> scratch;
        std::optional<RowEvaluator<T>> evaluator;
    };
    thread_local std::array<Slot, 8> slots;
    Slot& slot = slots[id % slots.size()];
    if (slot.id != id) {
        constexpr size_t kAlign = 64;
        const size_t bytes = static_cast<size_t>(program.scratch_bytes(kMaskPiece, sizeof(T)));
        slot.evaluator.reset();
        slot.id = 0;  // nobody's, should what follows fail
        if (slot.scratch.size() < bytes + kAlign) slot.scratch.resize(bytes + kAlign);
        void* aligned = slot.scratch.data();
        size_t space = slot.scratch.size();
        std::align(kAlign, bytes, aligned, space);
        slot.evaluator.emplace(program, kMaskPiece, aligned);
        slot.id = id;
    }
    return *slot.evaluator;
}

class Mod final : public BoundKind {
public:
    Mod(const Problem& p, const Expr& expr, const ArraySummaries& summaries)
        : problem_(p), program_(expr), summaries_(summaries.all()) {
        static std::atomic<uint64_t> next{1};
        id_ = next.fetch_add(1, std::memory_order_relaxed);
        varies_by_head = uses_head(expr);
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const ExprContext context = context_of(problem_, place);
        const Truth t = problem_.dtype == DType::f64 ? truth<double>(program_.expr(), context, i, j, summaries_)
                                                     : truth<float>(program_.expr(), context, i, j, summaries_);
        return t == Truth::no ? TileClass::skip : t == Truth::yes ? TileClass::full : TileClass::partial;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const ExprContext context = context_of(problem_, place);
        if (problem_.dtype == DType::f64) {
            evaluator_of<double>(id_, program_).boolean(context, i, j, out);
        } else {
            evaluator_of<float>(id_, program_).boolean(context, i, j, out);
        }
    }

private:
    const Problem& problem_;
    RowProgram program_;
    std::span<const ArraySummary> summaries_;
    uint64_t id_;
};

class ScoreMod final : public BoundKind {
public:
    ScoreMod(const Problem& p, Expr expr, const ArraySummaries& summaries)
        : problem_(p), expr_(std::move(expr)), summaries_(summaries.all()) {
        varies_by_head = uses_head(expr_);
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const ExprContext context = context_of(problem_, place);
        return problem_.dtype == DType::f64 ? of<double>(context, i, j) : of<float>(context, i, j);
    }
    void visible(const Place&, int64_t, Range j, uint8_t* out) const override {
        std::memset(out, 1, static_cast<size_t>(j.size()));
    }

private:
    // Hidden means -inf for every score, 0 among them: if no key is hidden at 0, none is.
    template <class T>
    [[nodiscard]] TileClass of(const ExprContext& context, Range i, Range j) const {
        if (real_interval<T>(expr_, context, i, j, summaries_, Interval{}).lo > -kInfinity) return TileClass::full;
        return hides_all<T>(expr_, context, i, j, summaries_) ? TileClass::skip : TileClass::partial;
    }

    const Problem& problem_;
    Expr expr_;
    std::span<const ArraySummary> summaries_;
};

// ---------------------------------------------------------------------------------------------------------------------
// or, not

class AnyOf final : public BoundKind {
public:
    void add(std::unique_ptr<BoundKind> part) {
        varies_by_head |= part->varies_by_head;
        parts_.push_back(std::move(part));
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        TileClass best = TileClass::skip;
        for (const auto& part : parts_) {
            best = std::max(best, part->classify(place, i, j));
            if (best == TileClass::full) break;
        }
        return best;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        std::array<uint8_t, kMaskPiece> other;
        parts_[0]->visible(place, i, j, out);
        for (size_t n = 1; n < parts_.size(); ++n) {
            parts_[n]->visible(place, i, j, other.data());
            for (int64_t k = 0; k < j.size(); ++k) out[k] |= other[static_cast<size_t>(k)];
        }
    }

private:
    std::vector<std::unique_ptr<BoundKind>> parts_;
};

class Negation final : public BoundKind {
public:
    explicit Negation(std::unique_ptr<BoundKind> part) : part_(std::move(part)) {
        varies_by_head = part_->varies_by_head;
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const TileClass c = part_->classify(place, i, j);
        return c == TileClass::skip ? TileClass::full : c == TileClass::full ? TileClass::skip : c;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        part_->visible(place, i, j, out);
        for (int64_t k = 0; k < j.size(); ++k) out[k] ^= 1;
    }

private:
    std::unique_ptr<BoundKind> part_;
};

const Array& array_of(const MaskNode& node, size_t n, const Problem& p) {
    const Array& a = p.arrays[static_cast<size_t>(node.array[n])];
    if (a.data == nullptr && a.size() > 0) {
        refuse("mask: @" + std::to_string(node.array[n]), "a null pointer",
               "a pointer to the elements of " + describe(a));
    }
    return a;
}

// A mask by itself, as a part of or(...) and not(...).
std::unique_ptr<BoundKind> bind_alone(const MaskNode& node, const Problem& p, ArraySummaries& summaries) {
    auto all = std::make_unique<AllOf>();
    bind_mask(node, p, summaries, *all);
    if (all->only_band()) return std::make_unique<BandKind>(all->band);
    return all;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Bands and `and`

void Band::add_window(int64_t left, int64_t right) {
    const auto tighten = [](int64_t& bound, int64_t value) {
        if (value >= 0 && value < kBeyond && (bound < 0 || value < bound)) bound = value;
    };
    tighten(left_, left);
    tighten(right_, right);
}

void Band::add_chunk(int64_t c) {
    c = std::min(c, kBeyond);
    if (std::find(chunks_.begin(), chunks_.end(), c) == chunks_.end()) chunks_.push_back(c);
}

int64_t Band::offset(const Sequence& seq) {
    constexpr int64_t kLimit = int64_t{1} << 60;
    return std::clamp(seq.q_offset, -kLimit, kLimit);
}

Range Band::keys(int64_t t) const {
    Range seen{left_ < 0 ? -kFar : t - left_, right_ < 0 ? kFar : t + right_ + 1};
    for (const int64_t c : chunks_) {
        const int64_t first = floor_div(t, c) * c;
        seen.begin = std::max(seen.begin, first);
        seen.end = std::min(seen.end, first + c);
    }
    return seen;
}

Range Band::positions(Range j) const {
    // The first position whose range ends after j.begin, and the first whose range begins at or after j.end.
    Range seen{right_ < 0 ? -kFar : j.begin - right_, left_ < 0 ? kFar : j.end + left_};
    for (const int64_t c : chunks_) {
        seen.begin = std::max(seen.begin, floor_div(j.begin, c) * c);
        seen.end = std::min(seen.end, (floor_div(j.end - 1, c) + 1) * c);
    }
    return seen;
}

TileClass Band::classify(const Sequence& seq, Range i, Range j) const {
    const int64_t first = i.begin + offset(seq), last = i.end - 1 + offset(seq);
    const Range interested = positions(j);
    if (interested.begin > last || interested.end <= first) return TileClass::skip;
    return keys(last).begin <= j.begin && keys(first).end >= j.end ? TileClass::full : TileClass::partial;
}

void AllOf::add(std::unique_ptr<BoundKind> part) {
    varies_by_head |= part->varies_by_head;
    parts_.push_back(std::move(part));
}

TileClass AllOf::classify(const Place& place, Range i, Range j) const {
    TileClass worst = band.classify(place.seq, i, j);
    for (size_t n = 0; n < parts_.size() && worst != TileClass::skip; ++n) {
        worst = std::min(worst, parts_[n]->classify(place, i, j));
    }
    return worst;
}

void AllOf::visible(const Place& place, int64_t i, Range j, uint8_t* out) const {
    // Parts are only asked inside the band.
    const Range keys = band.keys(i + Band::offset(place.seq));
    const int64_t begin = std::clamp(keys.begin, j.begin, j.end), end = std::clamp(keys.end, begin, j.end);
    const Range seen{begin, end};
    std::memset(out, 0, static_cast<size_t>(begin - j.begin));
    std::memset(out + (end - j.begin), 0, static_cast<size_t>(j.end - end));
    if (seen.empty()) return;
    out += begin - j.begin;
    if (parts_.empty()) {
        std::memset(out, 1, static_cast<size_t>(seen.size()));
        return;
    }
    std::array<uint8_t, kMaskPiece> other;
    parts_[0]->visible(place, i, seen, out);
    for (size_t n = 1; n < parts_.size(); ++n) {
        parts_[n]->visible(place, i, seen, other.data());
        for (int64_t k = 0; k < seen.size(); ++k) out[k] &= other[static_cast<size_t>(k)];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// From the tree of the text

void ArraySummaries::need(const Expr& expr) {
    for (const int k : expr.arrays()) {
        const size_t n = static_cast<size_t>(k);
        const Array& a = problem_.arrays[n];
        if (a.data == nullptr && a.size() > 0) {
            refuse("mask mod, score_mod: @" + std::to_string(k), "a null pointer",
                   "a pointer to the elements of " + describe(a));
        }
        if (!summaries_[n]) summaries_[n] = ArraySummary(a);
    }
}

void bind_mask(const MaskNode& node, const Problem& p, ArraySummaries& summaries, AllOf& into) {
    const auto array = [&](size_t n) -> const Array& { return array_of(node, n, p); };
    const auto optional_array = [&](size_t n) { return node.array[n] < 0 ? nullptr : &array(n); };
    switch (node.op) {
        case MaskOp::all_of:
            for (const MaskNode& part : node.parts) bind_mask(part, p, summaries, into);
            break;
        case MaskOp::any_of: {
            auto any = std::make_unique<AnyOf>();
            for (const MaskNode& part : node.parts) any->add(bind_alone(part, p, summaries));
            into.add(std::move(any));
            break;
        }
        case MaskOp::negate: into.add(std::make_unique<Negation>(bind_alone(node.parts[0], p, summaries))); break;
        case MaskOp::causal: into.band.add_causal(); break;
        case MaskOp::window: into.band.add_window(node.number[0], node.number[1]); break;
        case MaskOp::chunk: into.band.add_chunk(node.number[0]); break;
        case MaskOp::key_padding: into.add(make_key_padding(p, array(0))); break;
        case MaskOp::documents: into.add(make_documents(p, array(0), array(1))); break;
        case MaskOp::prefix: into.add(make_prefix(p, optional_array(0), node.number[0])); break;
        case MaskOp::intervals:
            // The kind itself knows the diagonal, to be exact with it; the band knows it too, to bound the descent.
            if (node.causal) into.band.add_causal();
            into.add(make_intervals(p, array(0), node.causal));
            break;
        case MaskOp::row_intervals: into.add(make_row_intervals(p, array(0), array(1))); break;
        case MaskOp::tree: into.add(make_tree(p, array(0), optional_array(1), node.number[0])); break;
        case MaskOp::blocks: into.add(make_blocks(p, array(0), node.number[0], node.number[1])); break;
        case MaskOp::dense: into.add(make_dense(p, array(0))); break;
        case MaskOp::mod:
            summaries.need(node.expr);
            into.add(std::make_unique<Mod>(p, node.expr, summaries));
            break;
    }
}

std::unique_ptr<BoundKind> bind_score_mod(const Problem& p, ArraySummaries& summaries) {
    if (p.score_mod.empty()) return nullptr;
    const Expr expr = Expr::parse(p.score_mod, Role::score_mod, p.arrays, static_cast<int>(p.scalars.size()));
    // -inf for every score needs something that can be infinite by itself; most score_mods have nothing of the kind and
    // are spared one evaluation per tile.
    const auto nodes = expr.nodes();
    const bool can_hide = std::any_of(nodes.begin(), nodes.end(), [&](const Node& node) {
        switch (node.op) {
            case Op::literal: return node.kind == Kind::real && std::isinf(node.real);
            case Op::scalar: return node.kind == Kind::real;
            case Op::gather: return is_float(p.arrays[static_cast<size_t>(node.index)].dtype);
            case Op::log:
            case Op::div: return true;
            default: return false;
        }
    });
    if (!can_hide) return nullptr;
    summaries.need(expr);
    return std::make_unique<ScoreMod>(p, expr, summaries);
}

}  // namespace tilewise::core
