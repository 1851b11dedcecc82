// The mask algebra: one expression of mask kinds, bound to a problem, that answers three questions in both loop orders:
// which tiles can be skipped without looking, what class a tile has, and whether query i sees key j.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "problem.hpp"

namespace tilewise::core {

enum class TileClass : uint8_t { skip = 0, partial = 1, full = 2 };

struct Tile {
    int64_t begin;  // first key (or query) of the tile; a multiple of the tile size
    TileClass cls;
};

// Parses and prints canonically; refuses unknown kinds, wrong arrays, and combinations that §4 forbids.
std::string canonical_mask(std::string_view text, const Problem& problem);

// Rectangles that kv_tiles and q_tiles have looked at in this thread so far: the work that a mask costs.
int64_t mask_rectangles_looked_at();

// The whole visibility of a problem: causal, window, chunk, sequence lengths, AND the mask text, AND a score_mod that
// is -inf over a whole tile. Building it makes the summaries (O(size of the mask arrays)); afterwards it is read-only
// and safe to use from many threads.
class BoundMask {
public:
    explicit BoundMask(const Problem& problem);  // keeps a reference to the problem
    ~BoundMask();
    BoundMask(const BoundMask&) = delete;
    BoundMask& operator=(const BoundMask&) = delete;

    // Class of the rectangle: queries i, keys j of sequence b, query head h. Rows and keys beyond the sequence's
    // lengths are not visible (so a rectangle that reaches past kv_len or q_len is never full). Empty rectangles are
    // skipped.
    [[nodiscard]] TileClass classify(int64_t b, int64_t h, Range i, Range j) const;

    // Appends the tiles that are not skipped, in ascending order. Work is proportional to what is visible (times a
    // logarithm), not to the length. Tiles start at multiples of tile_n (tile_m) from key (query) 0. Each has the class
    // that classify() gives it: clip i (j) to the sequence, or no tile is full.
    void kv_tiles(int64_t b, int64_t h, Range i, int64_t tile_n, std::vector<Tile>& out) const;
    void q_tiles(int64_t b, int64_t h, Range j, int64_t tile_m, std::vector<Tile>& out) const;

    // out[n] = 1 if query i sees key j.begin + n, else 0. j may reach past kv_len (0 there).
    void visible(int64_t b, int64_t h, int64_t i, Range j, uint8_t* out) const;

    // If everything is a band (causal, window, chunk, lengths), the visible keys of query i are one range and
    // row_range gives it; the fast path of partial tiles. (A score_mod may still hide single keys, and whole tiles.)
    [[nodiscard]] bool is_band() const;
    [[nodiscard]] Range row_range(int64_t b, int64_t i) const;

    // False if all heads of a KV group (of all heads) see the same: tile lists can be shared.
    [[nodiscard]] bool varies_by_head() const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace tilewise::core
