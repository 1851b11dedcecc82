// The kinds of masks, bound to the arrays of a problem. Each answers two questions about one (batch, head): the class
// of a rectangle, and which keys of a row are visible. Composition and descent are in mask.cpp; what a kind means is in
// docs/masks.md.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mask.hpp"
#include "mask_text.hpp"
#include "problem.hpp"

namespace tilewise::core {

// A row of visible() is worked on in pieces of this many keys, so that scratch fits on the stack.
inline constexpr int64_t kMaskPiece = 1024;
// Rectangles up to this edge are classified exactly where summaries leave a doubt.
inline constexpr int64_t kExactEdge = 128;

// What a question is about.
struct Place {
    int64_t b;
    int64_t h;
    const Sequence& seq;
};

class BoundKind {
public:
    BoundKind() = default;
    BoundKind(const BoundKind&) = delete;
    BoundKind& operator=(const BoundKind&) = delete;
    virtual ~BoundKind() = default;

    // Neither range is empty; both lie within the lengths of the sequence.
    [[nodiscard]] virtual TileClass classify(const Place& place, Range i, Range j) const = 0;
    // out[n] = 0 or 1 for key j.begin + n; at most kMaskPiece keys, within the lengths.
    virtual void visible(const Place& place, int64_t i, Range j, uint8_t* out) const = 0;

    bool varies_by_head = false;
};

// causal, window and chunk, any number of them: the visible keys of a position are one range that contains the position
// itself, and both of its ends never decrease with the position. All answers below rest on that.
class Band {
public:
    void add_causal() { add_window(-1, 0); }
    void add_window(int64_t left, int64_t right);
    void add_chunk(int64_t c);

    [[nodiscard]] bool everything() const { return left_ < 0 && right_ < 0 && chunks_.empty(); }
    // Keys that position t sees and positions that see a key of j, before lengths.
    [[nodiscard]] Range keys(int64_t t) const;
    [[nodiscard]] Range positions(Range j) const;
    // Exact.
    [[nodiscard]] TileClass classify(const Sequence& seq, Range i, Range j) const;

    // Position of query 0. Beyond 2^60 nothing but the sign matters, and sums cannot overflow.
    static int64_t offset(const Sequence& seq);

private:
    int64_t left_ = -1, right_ = -1;
    std::vector<int64_t> chunks_;
};

// Masks joined by `and`, with every band among them merged into one.
class AllOf final : public BoundKind {
public:
    Band band;

    void add(std::unique_ptr<BoundKind> part);
    [[nodiscard]] bool only_band() const { return parts_.empty(); }
    [[nodiscard]] TileClass classify(const Place& place, Range i, Range j) const override;
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override;

private:
    std::vector<std::unique_ptr<BoundKind>> parts_;
};

// Summaries of the arrays that expressions gather from, made once per problem.
class ArraySummaries {
public:
    explicit ArraySummaries(const Problem& problem) : problem_(problem), summaries_(problem.arrays.size()) {}
    void need(const Expr& expr);
    [[nodiscard]] std::span<const ArraySummary> all() const { return summaries_; }

private:
    const Problem& problem_;
    std::vector<ArraySummary> summaries_;
};

// Kinds backed by arrays (mask_tokens.cpp, mask_grids.cpp). A null n stands for `value`.
std::unique_ptr<BoundKind> make_key_padding(const Problem& p, const Array& keep);
std::unique_ptr<BoundKind> make_documents(const Problem& p, const Array& q_ids, const Array& kv_ids);
std::unique_ptr<BoundKind> make_prefix(const Problem& p, const Array* n, int64_t value);
std::unique_ptr<BoundKind> make_intervals(const Problem& p, const Array& bounds, bool causal);
std::unique_ptr<BoundKind> make_row_intervals(const Problem& p, const Array& start, const Array& end);
std::unique_ptr<BoundKind> make_tree(const Problem& p, const Array& bits, const Array* n, int64_t value);
std::unique_ptr<BoundKind> make_blocks(const Problem& p, const Array& map, int64_t bq, int64_t bkv);
std::unique_ptr<BoundKind> make_dense(const Problem& p, const Array& array);

// Adds the mask `node` to `into`. The problem and the summaries must outlive it.
void bind_mask(const MaskNode& node, const Problem& problem, ArraySummaries& summaries, AllOf& into);

// skip: the problem's score_mod is -inf on the whole rectangle, whatever the scores; full: on no part of it; partial:
// who knows. (Keys hidden one by one are the kernels' business.) Null if the score_mod cannot hide a tile.
std::unique_ptr<BoundKind> bind_score_mod(const Problem& problem, ArraySummaries& summaries);

}  // namespace tilewise::core
