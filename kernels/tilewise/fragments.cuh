// Scores as fragments of a warp: which row and column of its block a thread's numbers belong to, and what the formula does
// to them there. fwd_mma and fwd_sm90 have the same fragments: 16 kMTiles rows per warp, rows g and g + 8 of each 16 per
// thread, where g = lane / 4.
//
// spec.cuh comes before this file: kMTiles, kTileKV, kColumns, kPackGQA and the options of the formula.
#pragma once

#include "score.cuh"
#include "softmax.cuh"

namespace tilewise {

// The rows of this thread: number n of kRowsPerThread is in half n % 2 of fragment n / 2.
TW_DEVICE int row_of(int n) { return (warp_id() * kMTiles + n / 2) * 16 + n % 2 * 8 + lane_id() / 4; }
TW_DEVICE int column_of(int n8, int c) { return n8 * 8 + lane_id() % 4 * 2 + c; }  // of score or output fragment n8

struct __align__(16) KeyRange {
    int begin, end;            // keys that some row sees
    int full_begin, full_end;  // keys that every row sees, if they are in [begin, end)
};

struct Block {  // what one block works on
    const abi::Problem& p;
    Int group, h, i0;  // query heads side by side in its rows; the first of them; the first query
    Site site;

    __device__ __forceinline__ Int query(int row) const { return kPackGQA ? i0 + row / group : i0 + row; }
    __device__ __forceinline__ Int head(int row) const { return kPackGQA ? h + row % group : h; }
    __device__ __forceinline__ Int queries() const { return minimum(p.q_tile, site.q_len - i0); }
    __device__ __forceinline__ int rows() const { return static_cast<int>(queries() * (kPackGQA ? group : 1)); }
};

// What rows [first, last] of a block see; bands.
TW_DEVICE KeyRange keys_of(const Block& block, const MaskData& mask, int first, int last) {
    const Site& site = block.site;
    const Int i0 = minimum(block.query(first), site.q_len - 1), i1 = minimum(block.query(last), site.q_len - 1);
    const Range low = key_hull(block.p, mask, site, i0, i0 + 1), high = key_hull(block.p, mask, site, i1, i1 + 1);
    return {static_cast<int>(low.begin), static_cast<int>(high.end), static_cast<int>(high.begin), static_cast<int>(low.end)};
}

// Scale, softcap and slopes.
TW_DEVICE void apply_options(Scores& s, const ScoreContext& score, const Block& block, Int j0) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        // Distances are small differences of large positions: taken as integers first.
        const float ahead = static_cast<float>(block.query(row_of(r)) + block.site.q_offset - j0);
#pragma unroll
        for (int n = 0; n < kTileKV / 8; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float x = s[r / 2][n][r % 2 * 2 + c] * score.scale;
                if (kSoftcap) x = score.softcap * tanh_fast(x * (1 / score.softcap));
                if (kSlopes) x -= score.slope * fabsf(ahead - static_cast<float>(column_of(n, c)));
                s[r / 2][n][r % 2 * 2 + c] = x;
            }
        }
    }
}

// Bit n of seen[r][c] says whether row r of this thread sees column 8 n + c of those that it has, as far as its hull goes.
TW_DEVICE void see_hulls(Word (&seen)[kRowsPerThread][2], const Block& block, const MaskData& mask, Int j0) {
    const Site& site = block.site;
    // Counted from j0 numbers of 32 bits do: what is further away than a tile and a block of queries is beyond either end.
    constexpr int kBeyond = 1 << 20;
    static_assert(kTileKV / 8 < 32, "a bit for each column, and one beyond");
    const auto from_j0 = [&](Int j) { return static_cast<int>(clamp(j - j0, -kBeyond, kBeyond)); };
    const auto between = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
    const Range window = window_keys(block.p.window_left, block.p.window_right, block.i0 + site.q_offset);
    const int begin = from_j0(window.begin), end = from_j0(window.end), last = between(from_j0(site.kv_len), 0, kTileKV);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        const Int i = block.query(row_of(r));
        const int queries = static_cast<int>(i - block.i0);  // the window of each begins and ends one key later
        int first = begin + queries, behind = end + queries;
        if constexpr (kChunkMask) {
            const Range hull = key_hull(block.p, mask, site, i, i + 1);
            first = from_j0(hull.begin), behind = from_j0(hull.end);
        }
        first = between(first, 0, last), behind = between(behind, first, last);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const auto at = [&](int key) { return 1u << ((key - column_of(0, c) + 7) >> 3); };
            seen[r][c] = at(behind) - at(first);
        }
    }
}
TW_DEVICE void hide(Scores& s, const Word (&seen)[kRowsPerThread][2]) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int n = 0; n < kTileKV / 8; ++n) {
                if (!(seen[r][c] >> n & 1u)) s[r / 2][n][r % 2 * 2 + c] = -Limits<float>::infinity();
            }
        }
    }
}

// P of what dropout takes is 0. One draw serves the rows g and g + 8, and four fragments of keys if those start at a
// multiple of 32, as they do where tiles are multiples of 32.
TW_DEVICE void drop(Scores& p, const Philox& philox, const Block& block, Int j0) {
    constexpr int kTogether = kTileKV % 32 == 0 ? 4 : 2;
    const Word threshold = static_cast<Word>(block.p.dropout_threshold);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kTileKV / 8; n += kTogether) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const auto draw = philox.draw(block.query(row_of(2 * m)), j0 + column_of(n, c));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int f = 0; f < kTogether; ++f) {
                        if (!draw.keep(half, static_cast<int>(j0 / 16 + (n + f) / 2) & 1, f % 2, threshold)) p[m][n + f][2 * half + c] = 0;
                    }
                }
            }
        }
    }
}

// What is known of a row when all keys have passed: the reference of its softmax, in powers of two, and its sum. Joins
// them with the row's sink; then (reference, sum) make its lse, and o is multiplied by the result.
TW_DEVICE float close_row(const Block& block, int row, float& reference, float& sum) {
    const abi::Problem& p = block.p;
    float scale = 1;
    if (kSinks && !kSplit) {
        const float sink = load_any<float>(p.sinks.data, p.sinks.dtype, block.head(row) * p.sinks.head) * kLog2E, before = reference;
        reference = larger(reference, sink);
        const float shift = reference == -Limits<float>::infinity() ? 0.0f : reference;
        scale = exp2_fast(before - shift);
        sum = sum * scale + exp2_fast(sink - shift);
    }
    return sum == 0 ? 0.0f : scale / sum * (kDropout ? static_cast<float>(p.keep_inverse) : 1.0f);
}
TW_DEVICE float lse_of(float reference, float sum) { return sum == 0 ? -Limits<float>::infinity() : reference * kLn2 + logf(sum); }

}  // namespace tilewise
