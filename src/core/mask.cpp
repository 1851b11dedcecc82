// BoundMask: lengths, the problem's own band, the mask text and the score_mod taken together; and the descent that
// finds the tiles which matter.
#include "mask.hpp"

#include <algorithm>
#include <cstring>

#include "mask_kinds.hpp"
#include "mask_text.hpp"
#include "summary.hpp"

namespace tilewise::core {
namespace {

thread_local int64_t rectangles_looked_at = 0;

Range intersect(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }
bool equal(Range a, Range b) { return a.begin == b.begin && a.end == b.end; }

// A class, and whether every part of the rectangle is sure to have it (skip always is).
struct Answer {
    TileClass cls;
    bool throughout;
};

// Finds the tiles of one loop: a range of tiles is classified as a whole, and halved only if it is neither hidden nor
// visible throughout. So a long stretch of one class costs a logarithm, and a visible tile at most one per level.
template <class Classify>
class Descent {
public:
    // Tiles [first, last) of `size` along an axis of `length`; classify(Range) -> Answer takes non-empty ranges within
    // the axis. If never_full, the other side of the rectangle reaches beyond the sequence.
    Descent(int64_t size, int64_t length, bool never_full, const Classify& classify, std::vector<Tile>& out)
        : size_(size), length_(length), never_full_(never_full), classify_(classify), out_(out) {}
    ~Descent() { rectangles_looked_at += looked_at_; }
    Descent(const Descent&) = delete;
    Descent& operator=(const Descent&) = delete;

    void run(int64_t first, int64_t last) {
        if (first >= last) return;
        ++looked_at_;
        const auto [c, throughout] = classify_(Range{first * size_, std::min(last * size_, length_)});
        if (c == TileClass::skip) return;
        if ((c == TileClass::full && throughout) || last - first == 1) {
            for (int64_t tile = first; tile < last; ++tile) {
                const bool inside = (tile + 1) * size_ <= length_ && !never_full_;
                out_.push_back({tile * size_, c == TileClass::full && inside ? TileClass::full : TileClass::partial});
            }
            return;
        }
        const int64_t middle = first + (last - first) / 2;
        run(first, middle);
        run(middle, last);
    }

private:
    int64_t size_, length_;
    bool never_full_;
    const Classify& classify_;
    std::vector<Tile>& out_;
    int64_t looked_at_ = 0;
};

}  // namespace

int64_t mask_rectangles_looked_at() { return rectangles_looked_at; }

struct BoundMask::Impl {
    const Problem& problem;
    ArraySummaries summaries;
    AllOf mask;                            // the call's own band and the text
    std::unique_ptr<BoundKind> score_mod;  // null: hides no tile

    explicit Impl(const Problem& p) : problem(p), summaries(p) {
        if (p.causal) mask.band.add_causal();
        mask.band.add_window(p.window_left, p.window_right);
        if (p.chunk > 0) mask.band.add_chunk(p.chunk);
        if (!p.mask.empty()) bind_mask(parse_mask(p.mask, p), p, summaries, mask);
        score_mod = bind_score_mod(p, summaries);
    }

    [[nodiscard]] Place place(int64_t b, int64_t h) const { return {b, h, problem.sequences[static_cast<size_t>(b)]}; }

    // Within the lengths. A score_mod either hides all of a rectangle or does not change its class, but it may still
    // hide all of a smaller one inside.
    [[nodiscard]] Answer classify(const Place& at, Range i, Range j) const {
        const TileClass c = mask.classify(at, i, j);
        if (c == TileClass::skip || !score_mod) return {c, true};
        const TileClass scores = score_mod->classify(at, i, j);
        return {scores == TileClass::skip ? scores : c, scores != TileClass::partial};
    }
};

BoundMask::BoundMask(const Problem& problem) : impl_(std::make_unique<Impl>(problem)) {}
BoundMask::~BoundMask() = default;

TileClass BoundMask::classify(int64_t b, int64_t h, Range i, Range j) const {
    const Place at = impl_->place(b, h);
    const Range rows = intersect(i, {0, at.seq.q_len}), keys = intersect(j, {0, at.seq.kv_len});
    if (rows.empty() || keys.empty()) return TileClass::skip;
    const TileClass c = impl_->classify(at, rows, keys).cls;
    return c == TileClass::full && !(equal(rows, i) && equal(keys, j)) ? TileClass::partial : c;
}

void BoundMask::kv_tiles(int64_t b, int64_t h, Range i, int64_t tile_n, std::vector<Tile>& out) const {
    const Place at = impl_->place(b, h);
    const Range rows = intersect(i, {0, at.seq.q_len});
    if (rows.empty()) return;
    // Every position sees its own key, were it inside the sequence: so the union of the rows' ranges has no gaps.
    const Band& band = impl_->mask.band;
    const int64_t offset = Band::offset(at.seq);
    const Range hull{band.keys(rows.begin + offset).begin, band.keys(rows.end - 1 + offset).end};
    const Range keys = intersect(hull, {0, at.seq.kv_len});
    if (keys.empty()) return;
    const auto classify = [&](Range j) { return impl_->classify(at, rows, j); };
    Descent descent(tile_n, at.seq.kv_len, !equal(rows, i), classify, out);
    descent.run(keys.begin / tile_n, ceil_div(keys.end, tile_n));
}

void BoundMask::q_tiles(int64_t b, int64_t h, Range j, int64_t tile_m, std::vector<Tile>& out) const {
    const Place at = impl_->place(b, h);
    const Range keys = intersect(j, {0, at.seq.kv_len});
    if (keys.empty()) return;
    const int64_t offset = Band::offset(at.seq);
    const Range hull = impl_->mask.band.positions(keys);
    const Range rows = intersect({hull.begin - offset, hull.end - offset}, {0, at.seq.q_len});
    if (rows.empty()) return;
    const auto classify = [&](Range i) { return impl_->classify(at, i, keys); };
    Descent descent(tile_m, at.seq.q_len, !equal(keys, j), classify, out);
    descent.run(rows.begin / tile_m, ceil_div(rows.end, tile_m));
}

void BoundMask::visible(int64_t b, int64_t h, int64_t i, Range j, uint8_t* out) const {
    if (j.empty()) return;
    const Place at = impl_->place(b, h);
    const Range keys = i >= 0 && i < at.seq.q_len ? intersect(j, {0, at.seq.kv_len}) : Range{};
    if (keys.empty()) {
        std::memset(out, 0, static_cast<size_t>(j.size()));
        return;
    }
    std::memset(out, 0, static_cast<size_t>(keys.begin - j.begin));
    for (int64_t begin = keys.begin; begin < keys.end; begin += kMaskPiece) {
        const Range piece{begin, std::min(begin + kMaskPiece, keys.end)};
        impl_->mask.visible(at, i, piece, out + (begin - j.begin));
    }
    std::memset(out + (keys.end - j.begin), 0, static_cast<size_t>(j.end - keys.end));
}

bool BoundMask::is_band() const { return impl_->mask.only_band(); }

Range BoundMask::row_range(int64_t b, int64_t i) const {
    const Sequence& seq = impl_->problem.sequences[static_cast<size_t>(b)];
    if (i < 0 || i >= seq.q_len) return {};
    const Range keys = intersect(impl_->mask.band.keys(i + Band::offset(seq)), {0, seq.kv_len});
    return keys.empty() ? Range{} : keys;
}

bool BoundMask::varies_by_head() const {
    return impl_->mask.varies_by_head || (impl_->score_mod && impl_->score_mod->varies_by_head);
}

}  // namespace tilewise::core
