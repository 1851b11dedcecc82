// The kinds of masks on the device. Each answers two questions about one (batch, head): whether query i sees key j, and
// the class of a rectangle of queries [i0, i1) and keys [j0, j1), which lies within the lengths and is not empty. The
// spec's `visible` and `classify` are made of these; what a kind means is in docs/masks.md.
//
// Kinds backed by arrays classify from summaries of 64 neighbours, so `skip` and `full` are always right, and a tile
// that straddles two summaries may be called partial though it is not.
#pragma once

#include "base.cuh"

namespace tilewise {

enum TileClass : int { kSkip = 0, kPartial = 1, kFull = 2 };

TW_DEVICE int both(int a, int b) { return a < b ? a : b; }    // of masks joined by and
TW_DEVICE int either(int a, int b) { return a > b ? a : b; }  // by or
TW_DEVICE int opposite(int a) { return 2 - a; }

constexpr Int kFar = 1ll << 62;             // beyond every position
constexpr Int kNoInteger = 0x7fffffffffffffffll;
constexpr int kSummary = 64;                // neighbours in a block of a summary
constexpr int kSummaryNumbers = 4;          // per block: smallest, largest, smallest that is not negative, unused
constexpr int kIntervalNumbers = 8;         // per block of `intervals`: extremes of begin and end, twice

// ---------------------------------------------------------------------------------------------------------------------
// Bands: the visible keys of a position are one range, whose ends never decrease with the position

struct Range {
    Int begin, end;
};

TW_DEVICE Range intersect(Range a, Range b) { return {maximum(a.begin, b.begin), minimum(a.end, b.end)}; }

TW_DEVICE Range window_keys(Int left, Int right, Int t) {
    return {left < 0 ? -kFar : t - left, right < 0 ? kFar : t + right + 1};
}
TW_DEVICE Range chunk_keys(Int chunk, Int t) {
    const Int first = floor_div(t, chunk) * chunk;
    return {first, first + chunk};
}
TW_DEVICE Range window_positions(Int left, Int right, Range j) {
    return {right < 0 ? -kFar : j.begin - right, left < 0 ? kFar : j.end + left};
}
TW_DEVICE Range chunk_positions(Int chunk, Range j) {
    return {floor_div(j.begin, chunk) * chunk, (floor_div(j.end - 1, chunk) + 1) * chunk};
}

// first, last: keys of the first and last position of the rectangle; seen: positions that see one of its keys.
TW_DEVICE int band_class(Range first, Range last, Range seen, Int t0, Int t1, Int j0, Int j1) {
    if (seen.begin >= t1 || seen.end <= t0) return kSkip;
    return last.begin <= j0 && first.end >= j1 ? kFull : kPartial;
}

TW_DEVICE bool window_visible(const Site& site, Int left, Int right, Int i, Int j) {
    const Int distance = j - (i + site.q_offset);
    return (left < 0 || -distance <= left) && (right < 0 || distance <= right);
}
TW_DEVICE int window_class(const Site& site, Int left, Int right, Int i0, Int i1, Int j0, Int j1) {
    const Int t0 = i0 + site.q_offset, t1 = i1 + site.q_offset;
    return band_class(window_keys(left, right, t0), window_keys(left, right, t1 - 1),
                      window_positions(left, right, {j0, j1}), t0, t1, j0, j1);
}
TW_DEVICE bool chunk_visible(const Site& site, Int chunk, Int i, Int j) {
    return floor_div(j, chunk) == floor_div(i + site.q_offset, chunk);
}
TW_DEVICE int chunk_class(const Site& site, Int chunk, Int i0, Int i1, Int j0, Int j1) {
    const Int t0 = i0 + site.q_offset, t1 = i1 + site.q_offset;
    return band_class(chunk_keys(chunk, t0), chunk_keys(chunk, t1 - 1), chunk_positions(chunk, {j0, j1}), t0, t1, j0,
                      j1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arrays

TW_DEVICE Int head_of(const abi::MaskArray& a, const Site& site) {
    return static_cast<Word>(site.h) / static_cast<Word>(a.queries_per_head);
}
TW_DEVICE Int plane_offset(const abi::MaskArray& a, const Site& site) { return site.b * a.batch + head_of(a, site) * a.head; }
template <int kDType>
TW_DEVICE Int element(const abi::MaskArray& a, const Site& site, Int row, Int column = 0) {
    return load_integer(a.data, kDType, plane_offset(a, site) + row * a.row + column * a.column);
}

// Smallest, largest and smallest non-negative number of rows [begin, end), or of somewhat more of them.
struct Extremes {
    Int low, high, low_document;
};
TW_DEVICE const Int* summary_of(const abi::MaskArray& a, const Site& site, Int blocks, int numbers) {
    return a.summary + (site.b * a.plane_batch + head_of(a, site) * a.plane_head) * blocks * numbers;
}
TW_DEVICE Extremes extremes(const abi::MaskArray& a, const Site& site, Int begin, Int end) {
    const Int* const blocks = summary_of(a, site, ceil_div(a.rows, kSummary), kSummaryNumbers);
    Extremes all{kNoInteger, -kNoInteger, kNoInteger};
    for (Int block = begin / kSummary; block <= (end - 1) / kSummary; ++block) {
        const Int* const known = blocks + block * kSummaryNumbers;
        all.low = minimum(all.low, known[0]), all.high = maximum(all.high, known[1]);
        all.low_document = minimum(all.low_document, known[2]);
    }
    return all;
}

// key_padding counts physical rows of k.
template <int kDType>
TW_DEVICE bool key_padding_visible(const abi::MaskArray& keep, const Site& site, Int j) {
    return element<kDType>(keep, site, site.kv_row0 + j) != 0;
}
TW_DEVICE int key_padding_class(const abi::MaskArray& keep, const Site& site, Int j0, Int j1) {
    const Extremes kept = extremes(keep, site, site.kv_row0 + j0, site.kv_row0 + j1);  // of 0 and 1
    return kept.high == 0 ? kSkip : kept.low == 0 ? kPartial : kFull;
}

// The ids of the tokens of one sequence, found once.
struct TokenIds {
    const void* data;
    Int first, stride;
};
TW_DEVICE TokenIds token_ids(const abi::MaskArray& a, const Site& site, Int token) {
    return {a.data, plane_offset(a, site) + token * a.row, a.row};
}
template <int kDType>
TW_DEVICE Int token_id(const TokenIds& ids, Int n) {
    return load_integer(ids.data, kDType, ids.first + n * ids.stride);
}

template <int kDTypeQ, int kDTypeKV>
TW_DEVICE bool documents_visible(const abi::MaskArray& q, const abi::MaskArray& kv, const Site& site, Int i, Int j) {
    const Int id = element<kDTypeQ>(q, site, site.q_token + i);
    return id >= 0 && id == element<kDTypeKV>(kv, site, site.kv_token + j);
}
TW_DEVICE int documents_class(const abi::MaskArray& q, const abi::MaskArray& kv, const Site& site, Int i0, Int i1,
                              Int j0, Int j1) {
    const Extremes a = extremes(q, site, site.q_token + i0, site.q_token + i1);
    const Extremes b = extremes(kv, site, site.kv_token + j0, site.kv_token + j1);
    if (a.low_document > b.high || b.low_document > a.high) return kSkip;  // padding only, or no id in common
    return a.low >= 0 && b.low >= 0 && a.low == a.high && b.low == b.high ? kFull : kPartial;
}

// The visible keys of query i are [0, max(n, t + 1)).
TW_DEVICE bool prefix_visible(const Site& site, Int n, Int i, Int j) { return j < n || j <= i + site.q_offset; }
TW_DEVICE int prefix_class(const Site& site, Int n, Int i0, Int i1, Int j0, Int j1) {
    if (maximum(n, i1 + site.q_offset) <= j0) return kSkip;
    return maximum(n, i0 + site.q_offset + 1) >= j1 ? kFull : kPartial;
}

// FlashMask: rows [begin, end) of a key column are hidden, for one or two intervals; with causal also those before the
// diagonal. kColumns numbers per key, in the order of docs/masks.md.
template <int kColumns, bool kCausal>
struct IntervalBounds {
    Int begin1, end1, begin2, end2;
};
template <int kDType, int kColumns, bool kCausal>
TW_DEVICE IntervalBounds<kColumns, kCausal> interval_bounds(const abi::MaskArray& a, Int plane, Int key) {
    const auto number = [&](int n) { return load_integer(a.data, kDType, plane + key * a.row + n * a.column); };
    constexpr bool kOpen = kColumns == 1 || (kColumns == 2 && !kCausal);  // the first interval has no end
    IntervalBounds<kColumns, kCausal> x{number(0), kOpen ? kNoInteger : number(1), 0, 0};
    if (!kCausal) x.begin2 = kColumns == 4 ? number(2) : 0, x.end2 = number(kColumns - 1);
    if (x.begin1 >= x.end1) x.begin1 = kNoInteger, x.end1 = -kNoInteger;
    if (x.begin2 >= x.end2) x.begin2 = kNoInteger, x.end2 = -kNoInteger;
    return x;
}
template <int kDType, int kColumns, bool kCausal>
TW_DEVICE bool intervals_visible(const abi::MaskArray& a, const Site& site, Int i, Int j) {
    const auto x = interval_bounds<kDType, kColumns, kCausal>(a, plane_offset(a, site), site.kv_token + j);
    if (kCausal && j > i + site.q_offset) return false;
    return (i < x.begin1 || i >= x.end1) && (i < x.begin2 || i >= x.end2);
}
template <bool kCausal>
TW_DEVICE int intervals_class(const abi::MaskArray& a, const Site& site, Int i0, Int i1, Int j0, Int j1) {
    const int diagonal = kCausal ? window_class(site, -1, 0, i0, i1, j0, j1) : kFull;
    if (diagonal == kSkip) return kSkip;
    Int min_begin[2] = {kNoInteger, kNoInteger}, max_begin[2] = {-kNoInteger, -kNoInteger};
    Int min_end[2] = {kNoInteger, kNoInteger}, max_end[2] = {-kNoInteger, -kNoInteger};
    const Int* const blocks = summary_of(a, site, ceil_div(a.rows, kSummary), kIntervalNumbers);
    for (Int block = (site.kv_token + j0) / kSummary; block <= (site.kv_token + j1 - 1) / kSummary; ++block) {
        const Int* const known = blocks + block * kIntervalNumbers;
        for (int n = 0; n < 2; ++n) {
            min_begin[n] = minimum(min_begin[n], known[4 * n]), max_begin[n] = maximum(max_begin[n], known[4 * n + 1]);
            min_end[n] = minimum(min_end[n], known[4 * n + 2]), max_end[n] = maximum(max_end[n], known[4 * n + 3]);
        }
    }
    bool clear = true;
    for (int n = 0; n < 2; ++n) {
        clear &= min_begin[n] >= i1 || max_end[n] <= i0;
        if (max_begin[n] <= i0 && min_end[n] >= i1) return kSkip;
        if (max_begin[n] <= i0 && min_end[n] >= max_begin[1 - n] && min_end[1 - n] >= i1) return kSkip;
    }
    return clear ? diagonal : kPartial;
}

template <int kDTypeBegin, int kDTypeEnd>
TW_DEVICE bool row_intervals_visible(const abi::MaskArray& begin, const abi::MaskArray& end, const Site& site, Int i,
                                     Int j) {
    return element<kDTypeBegin>(begin, site, site.q_token + i) <= j && j < element<kDTypeEnd>(end, site, site.q_token + i);
}
TW_DEVICE int row_intervals_class(const abi::MaskArray& begin, const abi::MaskArray& end, const Site& site, Int i0,
                                  Int i1, Int j0, Int j1) {
    const Extremes a = extremes(begin, site, site.q_token + i0, site.q_token + i1);
    const Extremes b = extremes(end, site, site.q_token + i0, site.q_token + i1);
    if (a.high <= j0 && b.low >= j1) return kFull;
    return a.low >= j1 || b.high <= j0 ? kSkip : kPartial;
}

// The last n keys are nodes of a tree of drafts: a bit per (query, node). All keys before them are visible.
TW_DEVICE Int first_node(const Site& site, Int n) { return site.kv_len - clamp(n, 0, kFar); }
TW_DEVICE bool tree_visible(const abi::MaskArray& bits, const Site& site, Int n, Int i, Int j) {
    const Int node = j - first_node(site, n);
    if (node < 0) return true;
    if (node >= 32 * bits.columns || site.q_token + i >= bits.rows) return false;
    const Int offset = plane_offset(bits, site) + (site.q_token + i) * bits.row + node / 32 * bits.column;
    return static_cast<const Word*>(bits.data)[offset] >> (node % 32) & 1u;
}
TW_DEVICE int tree_class(const abi::MaskArray& bits, const Site& site, Int n, Int j0, Int j1) {
    const Int first = first_node(site, n);
    if (j1 <= first) return kFull;
    return j0 >= first && j0 - first >= 32 * bits.columns ? kSkip : kPartial;
}

// map[i / bq, j / bkv] says all about its block.
template <int kDType>
TW_DEVICE bool blocks_visible(const abi::MaskArray& map, const Site& site, Int bq, Int bkv, Int i, Int j) {
    const Int row = quotient(i, bq), column = quotient(j, bkv);
    return row < map.rows && column < map.columns && element<kDType>(map, site, row, column) != 0;
}
template <int kDType>
TW_DEVICE int blocks_class(const abi::MaskArray& map, const Site& site, Int bq, Int bkv, Int i0, Int i1, Int j0,
                           Int j1) {
    const Int row1 = ceil_div(i1, bq), column1 = ceil_div(j1, bkv);
    if ((row1 - quotient(i0, bq)) * (column1 - quotient(j0, bkv)) > 256) return kPartial;  // reading the map would cost more than the tile
    bool set = false, clear = row1 > map.rows || column1 > map.columns;
    for (Int row = quotient(i0, bq); row < minimum(row1, map.rows); ++row) {
        for (Int column = quotient(j0, bkv); column < minimum(column1, map.columns); ++column) {
            (element<kDType>(map, site, row, column) != 0 ? set : clear) = true;
        }
    }
    return set ? (clear ? kPartial : kFull) : kSkip;
}

// Broadcast axes have rows or columns = 1 and stride 0, and no end.
template <int kDType>
TW_DEVICE bool dense_visible(const abi::MaskArray& a, const Site& site, Int i, Int j) {
    const bool inside = (a.rows == 1 || i < a.rows) && (a.columns == 1 || j < a.columns);
    return inside && element<kDType>(a, site, a.rows == 1 ? 0 : i, a.columns == 1 ? 0 : j) != 0;
}
// The summary has one number per 64 x 64 block: bit 0 = something is set, bit 1 = something is clear.
TW_DEVICE int dense_class(const abi::MaskArray& a, const Site& site, Int i0, Int i1, Int j0, Int j1) {
    if (a.rows == 1) i0 = 0, i1 = 1;
    if (a.columns == 1) j0 = 0, j1 = 1;
    const Int row_blocks = ceil_div(a.rows, kSummary), column_blocks = ceil_div(a.columns, kSummary);
    const Int* const blocks = summary_of(a, site, row_blocks * column_blocks, 1);
    Int seen = i1 > a.rows || j1 > a.columns ? 2 : 0;
    for (Int row = i0 / kSummary; row < minimum(ceil_div(i1, kSummary), row_blocks); ++row) {
        for (Int column = j0 / kSummary; column < minimum(ceil_div(j1, kSummary), column_blocks); ++column) {
            seen |= blocks[row * column_blocks + column];
        }
    }
    return seen == 1 ? kFull : seen == 2 || seen == 0 ? kSkip : kPartial;
}

}  // namespace tilewise
