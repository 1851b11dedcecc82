// Backward pass on tensor cores: FlashAttention-2 (Dao 2023) for fp16 and bf16, on every GPU from Turing on.
//
// One block owns kTileKV keys and the query heads that share them. The tiles of kTileQ queries that see one of the keys
// pass by; the next one is on its way while one is worked on:
//
//     S = Q K^T, dP' = dO V^T - D      a warp has kTileQ / kWarpsQ queries and kTileKV / kWarpsK keys of both
//     P = exp(x - lse), dS = P dP'     x is the score of the formula; both pass through shared memory, in 16 bits
//     dV += P^T dO, dK += dS^T Q       in registers until all queries have passed
//     dQ += dS K                       in fp32 in global memory, since other keys add to the same rows
//
// bwd_mma_finish.cu makes lse and D beforehand, and rounds dQ afterwards. The sums of dQ are atomic, in any order, unless
// kDeterministic: then blocks take turns, and none waits for a block with a larger number.
//
// grid.x: key-value heads, and tiles of keys in them.

#include "spec.cuh"
#include "mma.cuh"
#include "score.cuh"
#include "mma_backward.cuh"

namespace tilewise {

// What a warp has of each product: 16-row fragments and 8-column fragments.
constexpr int kWarpsK = kWarps / kWarpsQ;
constexpr int kRowFragments = kTileQ / kWarpsQ / 16, kKeyFragments = kTileKV / kWarpsK / 8;  // S, dP
constexpr int kElements = kRowFragments * kKeyFragments * 4;
constexpr int kWarpsColumns = kWarps / kWarpsKeys;                                      // dK, dV
constexpr int kOwnFragments = kTileKV / kWarpsKeys / 16;
constexpr int kWarpsQueryColumns = kWarps / kWarpsQueries;                              // dQ
constexpr int kQueryFragments = kTileQ / kWarpsQueries / 16;
// Pairs of column fragments: the warps of a row take turns, and the last ones may have one less.
template <int kDims, int kSharers>
constexpr int kPairs = (kDims / 16 + kSharers - 1) / kSharers;

static_assert(kReadAhead <= kKeyFragments / 2, "left fragments are read one step ahead");
static_assert(kRowFragments > 0 && kKeyFragments > 0 && kKeyFragments % 2 == 0 && kOwnFragments > 0 && kQueryFragments > 0);

constexpr bool kRanges = kBands || kDocuments;  // what a row sees is a range of keys, of which documents leave some out

// dS = P dP' takes P as it lies in shared memory, rounded as in P^T dO, unless it needs what is not there: registers are
// for dK, dV and reading ahead.
constexpr bool kReloads = !kDropout && !kSoftcap && !kScoreMod;

using Scores = float[kRowFragments][kKeyFragments][4];

// Numbers that stay the same for all tiles are in shared memory: registers are for dK and dV.
struct __align__(16) BlockConstants {
    Site site;                   // h: the first head of the group
    const Half *q, *d_o, *k;     // of the sequence and the first head: the first row, or the first key of the block
    const Half* rows;            // lse and D, likewise
    float* dq_sums;
    int* turns;
    int begin, end, per_head;    // the first tile of queries, and how many there are in a head
    int full_begin, full_end;    // bands: queries that see all keys of the block
};

// Not copied to: padding takes less arithmetic.
using TileOfScores = Tile<kTileQ, kTileKV, false>;

struct Shared {
    Tile<kTileKV, kDimsQK> k;
    Tile<kTileKV, kDimsV> v;
    Tile<kTileQ, kDimsQK> q[2];
    Tile<kTileQ, kDimsV> d_o[kStages];
    TileOfScores p, ds;
    BlockConstants block;
    float rows[2][kTileQ][2];         // lse in powers of two, D
    int seen[kRanges ? kTileQ : 2][2];  // keys of the block that a row sees: the first one, and behind the last one
    DocumentId query_ids[kDocuments ? kTileQ : 2], key_ids[kDocuments ? kTileKV : 2];  // of those, only in its document
    int list[kBands ? 4 : kThreads];  // where tiles to work on start, and their class in the low two bits
    int warp_counts[kBands ? 4 : kWarps];
    float elements[kRolled ? kElements : 1][kRolled ? kThreads : 4];  // of each thread, where scores are finished one by one
};
static_assert(sizeof(Shared) <= kSharedBytes, "the host asks for kSharedBytes");

struct Params {
    abi::MmaBackward call;
    MaskData mask;
    GradientArrays gradients;
};

// ---------------------------------------------------------------------------------------------------------------------
// Products

// This thread's place in S and dP: row_of() of its kRowFragments * 2 rows, column_of() of its columns.
TW_DEVICE int first_row() { return warp_id() % kWarpsQ * (kRowFragments * 16); }
TW_DEVICE int first_column() { return warp_id() / kWarpsQ * (kKeyFragments * 8); }
TW_DEVICE int row_of(int r) { return first_row() + r / 2 * 16 + r % 2 * 8 + lane_id() / 4; }
TW_DEVICE int column_of(int n, int c) { return first_column() + n * 8 + lane_id() % 4 * 2 + c; }

// s += left right^T, over kDims columns of both. Fragments of right are read kReadAhead products before they are needed,
// those of left a step before: shared memory takes its time, and few warps are there to hide it.
template <int kDims>
TW_DEVICE void multiply_scores(Scores& s, const Tile<kTileQ, kDims>& left, const Tile<kTileKV, kDims>& right) {
    constexpr int kColumnPairs = kKeyFragments / 2, kProducts = kDims / 16 * kColumnPairs, kRing = kReadAhead + 1;
    Word a[2][kRowFragments][4], b[kRing][4];
    const auto rows = Matrices<Tile<kTileQ, kDims>>::by_rows(left, first_row(), 0);
    const auto columns = Matrices<Tile<kTileKV, kDims>>::by_columns(right, first_column(), 0);
    const auto read = [&](int g) {
        const int d = g / kColumnPairs, n = g % kColumnPairs;
        if (n == 0) {
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m) rows.load(a[d % 2][m], m * 16, d * 16);
        }
        columns.load(b[g % kRing], n * 16, d * 16);
    };
#pragma unroll
    for (int g = 0; g < kReadAhead && g < kProducts; ++g) read(g);
#pragma unroll
    for (int g = 0; g < kProducts; ++g) {
        if (g + kReadAhead < kProducts) read(g + kReadAhead);
        const int d = g / kColumnPairs, n = g % kColumnPairs;
        const Word(&x)[4] = b[g % kRing];
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
            mma(s[m][2 * n], a[d % 2][m], x[0], x[1]);
            mma(s[m][2 * n + 1], a[d % 2][m], x[2], x[3]);
        }
    }
}

// x += left right, or (kTransposed) left^T right: kDepth rows of right, and of its columns every kSharers-th pair of
// fragments from number `column` on, kFirst of them left out.
template <bool kTransposed, int kSharers, int kFirst = 0, int kDims, int kDepth, int kRows, int kFragments>
TW_DEVICE void multiply_columns(float (&x)[kRows][kFragments][4], const TileOfScores& left, int row,
                                const Tile<kDepth, kDims>& right, int column) {
    constexpr int kColumnPairs = kFragments / 2, kProducts = kDepth / 16 * kColumnPairs, kRing = kReadAhead + 1;
    Word a[2][kRows][4], b[kRing][4];
    using Left = Matrices<TileOfScores>;
    const Left rows = kTransposed ? Left::by_columns(left, 0, row) : Left::by_rows(left, row, 0);
    const auto columns = Matrices<Tile<kDepth, kDims>>::by_rows(right, 0, column * 16);
    static_assert((kSharers & (kSharers - 1)) == 0, "columns are added to bits that no warp's first column has");
    const auto has = [&](int n) { return kDims / 16 % kSharers == 0 || column + (kFirst + n) * kSharers < kDims / 16; };
    const auto read = [&](int g) {
        const int depth = g / kColumnPairs, n = g % kColumnPairs;
        if (n == 0) {
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
                if constexpr (kTransposed) rows.load_transposed(a[depth % 2][m], depth * 16, m * 16);
                else rows.load(a[depth % 2][m], m * 16, depth * 16);
            }
        }
        if (has(n)) columns.load_transposed(b[g % kRing], depth * 16, (kFirst + n) * kSharers * 16);
    };
#pragma unroll
    for (int g = 0; g < kReadAhead && g < kProducts; ++g) read(g);
#pragma unroll
    for (int g = 0; g < kProducts; ++g) {
        if (g + kReadAhead < kProducts) read(g + kReadAhead);
        const int depth = g / kColumnPairs, n = g % kColumnPairs;
        if (!has(n)) continue;
        const Word(&y)[4] = b[g % kRing];
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
            mma(x[m][2 * n], a[depth % 2][m], y[0], y[1]);
            mma(x[m][2 * n + 1], a[depth % 2][m], y[2], y[3]);
        }
    }
}

using GradientK = float[kOwnFragments][2 * kPairs<kDimsQK, kWarpsColumns>][4];
using GradientV = float[kOwnFragments][2 * kPairs<kDimsV, kWarpsColumns>][4];
// dQ in two halves where there are registers for one.
constexpr int kQueryPairs = kPairs<kDimsQK, kWarpsQueryColumns>;
constexpr int kQueryParts = kQueryFragments * kQueryPairs * 8 > 32 && kDimsQK > 128 && kQueryPairs % 2 == 0 ? 2 : 1;
using GradientQ = float[kQueryFragments][2 * kQueryPairs / kQueryParts][4];

// The keys and the pair of columns where this warp's part of dK and dV starts; the same of dQ.
TW_DEVICE int own_key() { return warp_id() % kWarpsKeys * (kOwnFragments * 16); }
TW_DEVICE int own_pair() { return warp_id() / kWarpsKeys; }
TW_DEVICE int query_row() { return warp_id() % kWarpsQueries * (kQueryFragments * 16); }
TW_DEVICE int query_pair() { return warp_id() / kWarpsQueries; }

// ---------------------------------------------------------------------------------------------------------------------
// P and dS

struct QueryTile {  // a tile of queries; the keys are those of the block
    int h, i0, tile_class;  // h: of the group
};

using Keep = KeepBits<kRowFragments, kKeyFragments>;
TW_DEVICE constexpr int element_of(int m, int n, int e) { return Keep::element_of(m, n, e); }

// Two numbers of this thread side by side into P or dS.
TW_DEVICE void put(TileOfScores& to, int r, int n, float left, float right) {
    *reinterpret_cast<Word*>(to.at(row_of(r), column_of(n, 0))) = pack(left, right);
}

constexpr float kHidden = -0.0f;  // P of a hidden key: 0 where it counts, and known from a P that was rounded to 0
constexpr Half kHiddenBits = 0x8000;

// From products to P, which goes to shared memory, dropout applied; unless kReloads, s then holds dS / dP'. One by one, in
// a loop that is not unrolled: a hundred copies of a long expression would take longer to compile than most problems take to run.
TW_DEVICE void exponentiate_elements(Scores& s, const ScoreContext& score, const Keep& keep, Shared& shared, int stage,
                                     const QueryTile& tile, int j0) {
    float* const mine = &shared.elements[0][threadIdx.x];
    constexpr int kStride = kRolled ? kThreads : 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) mine[e * kStride] = s[e / 4 / kKeyFragments][e / 4 % kKeyFragments][e % 4];
#pragma unroll 1
    for (int e = 0; e < kElements; ++e) {
        const int row = row_of(e / 4 / kKeyFragments * 2 + e % 4 / 2), column = column_of(e / 4 % kKeyFragments, e % 2);
        const Int i = tile.i0 + row, j = j0 + column;
        const float lse = shared.rows[stage][row][0];
        float probability = kHidden, factor = 1;
        if (lse != Limits<float>::infinity() && score.sees(tile.tile_class, i, j)) {
            float capped;
            const float input = score.before_mod(mine[e * kStride], i, j, capped), x = score.after_mod(input, i, j);
            if (x != -Limits<float>::infinity()) {
                probability = exp2_fast(x * kLog2E - lse);
                if constexpr (kScoreMod) factor = score_mod_gradient(score.site, score.mask, input, i, j);
                if (kSoftcap) factor *= 1 - capped / score.softcap * (capped / score.softcap);
            }
        }
        *shared.p.at(row, column) = Float<kDTypeQ>::store(keep[e] ? probability : 0.0f);
        if (!kReloads) mine[e * kStride] = probability == 0 ? 0.0f : probability * factor;
    }
    if (kReloads) return;
#pragma unroll
    for (int e = 0; e < kElements; ++e) s[e / 4 / kKeyFragments][e / 4 % kKeyFragments][e % 4] = mine[e * kStride];
}

// The same for options of few instructions; kMasked: a row sees the keys that shared.seen says.
using OwnRows = float[2 * kRowFragments];  // a number for each row of this thread

template <bool kMasked>
TW_DEVICE void exponentiate(Scores& s, const ScoreContext& score, const Keep& keep, Shared& shared, const OwnRows& lse,
                            const QueryTile& tile, int j0) {
    const Site& site = score.site;
    const float scale = score.scale * kLog2E;
#pragma unroll
    for (int r = 0; r < 2 * kRowFragments; ++r) {
        Word seen[2] = {~0u, ~0u};
        if constexpr (kMasked) {
            const int first = shared.seen[row_of(r)][0] - column_of(0, 0), end = shared.seen[row_of(r)][1] - column_of(0, 0);
            // Bit n says whether the row sees column 8 n + c of those that this thread has.
#pragma unroll
            for (int c = 0; c < 2; ++c) seen[c] = bits_below((end - c + 7) >> 3) & ~bits_below((first - c + 7) >> 3);
            if constexpr (kDocuments) {
                const DocumentId id = shared.query_ids[row_of(r)];
#pragma unroll
                for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        if (id < 0 || id != shared.key_ids[column_of(n, c)]) seen[c] &= ~(1u << n);
                    }
                }
            }
        }
        // Distances are small differences of large positions: taken as integers first.
        const float ahead = kSlopes ? static_cast<float>(tile.i0 + row_of(r) + site.q_offset - j0) : 0.0f;
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n) {
            float probability[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[r / 2][n][r % 2 * 2 + c];
                float factor = 1;
                if constexpr (kSoftcap || kSlopes) {
                    float y = x * score.scale;
                    if (kSoftcap) {
                        const float tangent = tanh_fast(y * (1 / score.softcap));
                        y = score.softcap * tangent, factor = 1 - tangent * tangent;
                    }
                    if (kSlopes) y -= score.slope * fabsf(ahead - static_cast<float>(column_of(n, c)));
                    probability[c] = exp2_fast(y * kLog2E - lse[r]);
                } else {
                    probability[c] = exp2_fast(x * scale - lse[r]);
                }
                if (kMasked && !(seen[c] >> n & 1u)) probability[c] = kHidden;
                x = kSoftcap ? probability[c] * factor : probability[c];
                if (kSoftcap && kMasked && probability[c] == 0) x = 0;  // the factor of a hidden key may be anything
                if (!keep[element_of(r / 2, n, r % 2 * 2 + c)]) probability[c] = 0;
            }
            put(shared.p, r, n, probability[0], probability[1]);
        }
    }
}

// dS into shared memory, from what exponentiate left and dP'. kPartial: hidden keys have 0, whatever dP' is.
// centres: a warp has all keys that its rows see, and the sum of a row of dS is 0. D from o is right only up to the rounding
// of o, which is no less than the gradients of a row that sees few keys.
template <bool kPartial>
TW_DEVICE void put_gradients(const Scores& s, const Scores& dp, const Keep& keep, float keep_inverse, Shared& shared, int stage,
                             bool centres) {
#pragma unroll
    for (int r = 0; r < 2 * kRowFragments; ++r) {
        float delta = kDropout ? shared.rows[stage][row_of(r)][1] : 0.0f;  // dP' has it already without dropout
        if constexpr (kCentres && kPartial) {
            for (int n = 0; n < 2 * kKeyFragments; ++n) {
                const Half p = *shared.p.at(row_of(r), column_of(n / 2, n % 2));
                if (p != kHiddenBits) delta += Float<kDTypeQ>::template load<float>(p) * dp[r / 2][n / 2][r % 2 * 2 + n % 2];
            }
            delta += __shfl_xor_sync(0xffffffffu, delta, 1);
            delta += __shfl_xor_sync(0xffffffffu, delta, 2);
            if (!centres) delta = 0;
        }
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n) {
            float ds[2];
            const Word ps = kReloads ? *reinterpret_cast<const Word*>(shared.p.at(row_of(r), column_of(n, 0))) : 0;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int e = r % 2 * 2 + c;
                const auto p = static_cast<Half>(ps >> 16 * c & 0xffffu);
                float gradient = dp[r / 2][n][e];
                if (kCentres && kPartial) gradient -= delta;
                if (kDropout) gradient = (keep[element_of(r / 2, n, e)] ? gradient * keep_inverse : 0.0f) - delta;
                const float factor = kReloads ? Float<kDTypeQ>::template load<float>(p) : s[r / 2][n][e];
                const bool hidden = kPartial && (kReloads ? p == kHiddenBits : factor == 0);
                ds[c] = hidden ? 0.0f : factor * gradient;
            }
            put(shared.ds, r, n, ds[0], ds[1]);
        }
    }
}

// P of this thread becomes NaN where its dS is: that a row of dO is not finite would not show in dV otherwise, once dO
// has been cleaned.
TW_DEVICE void spread_nan(Shared& shared) {
#pragma unroll 1
    for (int e = 0; e < kElements; ++e) {
        const int row = row_of(e / 4 / kKeyFragments * 2 + e % 4 / 2), column = column_of(e / 4 % kKeyFragments, e % 2);
        const float ds = Float<kDTypeQ>::template load<float>(*shared.ds.at(row, column));
        if (ds != ds) *shared.p.at(row, column) = 0x7fff;
    }
}

TW_DEVICE float probe_of(const Scores& s) {  // 0, or NaN if a number is not finite
    float probe = 0;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) probe += s[m][n][e] * 0.0f;
        }
    }
    return probe;
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

// Whether the block of keys j0 works on the tile of queries i0.
TW_DEVICE bool works_on(const abi::Problem& p, const MaskData& mask, const Site& site, Int i0, Int j0) {
    const Range rows = query_hull(p, mask, site, j0, minimum(j0 + kTileKV, site.kv_len));
    if (rows.begin >= rows.end || i0 + kTileQ <= rows.begin || i0 >= rows.end) return false;
    return kBands || class_within(p, mask, site, i0, j0) != kSkip;
}

// dK or dV of this block, through a tile of shared memory that nobody reads any more.
template <int kDims, int kFragments, int kPairs2>
TW_DEVICE void store_gradient(const abi::Tensor& out, const float (&x)[kFragments][kPairs2][4], float scale,
                              Tile<kTileKV, kDims>& tile, const Site& site, Int b, Int j0, Int dims, bool aligned) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int n = 0; n < kPairs2; ++n) {
            const int pair = own_pair() + n / 2 * kWarpsColumns;
            if (kDims / 16 % kWarpsColumns != 0 && pair >= kDims / 16) break;
            const int row = own_key() + m * 16 + lane_id() / 4, column = pair * 16 + n % 2 * 8 + lane_id() % 4 * 2;
            *reinterpret_cast<Word*>(tile.at(row, column)) = pack(x[m][n][0] * scale, x[m][n][1] * scale);
            *reinterpret_cast<Word*>(tile.at(row + 8, column)) = pack(x[m][n][2] * scale, x[m][n][3] * scale);
        }
    }
    __syncthreads();
    constexpr int kChunks = kDims / 8;
    const int keys = static_cast<int>(minimum(kTileKV, site.kv_len - j0));
    Half* const to = static_cast<Half*>(out.data) + b * out.batch + (site.kv_row0 + j0) * out.row + site.head_kv * out.head;
#pragma unroll 1
    for (int n = threadIdx.x; n < keys * kChunks; n += kThreads) {
        const int r = n / kChunks, c = n % kChunks * 8, left = static_cast<int>(dims) - c;
        if (left <= 0) continue;
        Half* const at = to + r * out.row + c * out.dim;
        if (aligned && left >= 8) {
            *reinterpret_cast<Chunk*>(at) = *reinterpret_cast<const Chunk*>(tile.at(r, c));
        } else {
#pragma unroll 1
            for (int e = 0; e < 8 && e < left; ++e) at[e * out.dim] = *tile.at(r, c + e);
        }
    }
}

TW_DEVICE void describe_block(const Params& params, const Place& place, Int head_kv, BlockConstants& block) {
    const abi::MmaBackward& call = params.call;
    const abi::Problem& p = call.problem;
    const Int h = head_kv * quotient(p.num_heads_q, p.num_heads_kv), j0 = place.row;
    const Site site = make_site(p, place.b, h);
    const Int b_q = batch_of(p.packed_q, site.b), b_kv = batch_of(p.packed_kv, site.b);
    block.site = site;
    block.site.head_kv = head_kv;  // also where there are no query heads
    block.q = static_cast<const Half*>(p.q.data) + b_q * p.q.batch + site.q_row0 * p.q.row + h * p.q.head;
    block.d_o = static_cast<const Half*>(call.d_o.data) + b_q * call.d_o.batch + site.q_row0 * call.d_o.row + h * call.d_o.head;
    block.k = static_cast<const Half*>(p.k.data) + b_kv * p.k.batch + (site.kv_row0 + j0) * p.k.row + head_kv * p.k.head;
    const Int tile = h * call.q_tiles + (p.sequences ? p.sequences[site.b].q_tiles_before : site.b * ceil_div(p.q_rows, kTileQ));
    block.rows = static_cast<const Half*>(call.rows) + tile * (4 * kTileQ);
    block.dq_sums = static_cast<float*>(call.dq_sums) + tile * (kTileQ * kDimsQK);
    block.turns = static_cast<int*>(call.turns) + tile;

    const Int j1 = minimum(j0 + kTileKV, site.kv_len);
    const Range rows = query_hull(p, params.mask, site, j0, j1);
    block.end = static_cast<int>(maximum(rows.begin, rows.end));
    block.begin = static_cast<int>(rows.begin) / kTileQ * kTileQ;
    block.per_head = rows.begin < rows.end ? (block.end - block.begin + kTileQ - 1) / kTileQ : 0;
    // Queries that see the first key and the last one see all of them.
    block.full_begin = block.full_end = 0;
    if (j1 == j0 + kTileKV) {
        block.full_begin = static_cast<int>(query_hull(p, params.mask, site, j1 - 1, j1).begin);
        block.full_end = static_cast<int>(query_hull(p, params.mask, site, j0, j0 + 1).end);
    }
}

TW_KERNEL(bwd_mma, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::MmaBackward& call = params.call;
    const abi::Problem& p = call.problem;
    const Int blocks = quotient(gridDim.x, p.num_heads_kv);
    Int head_kv = quotient(blockIdx.x, blocks), number = blockIdx.x - head_kv * blocks;
    if (call.spread) {  // tile after tile of all heads
        const Int sequences = p.num_heads_kv * p.batch, round = quotient(blockIdx.x, sequences), n = blockIdx.x - round * sequences;
        const Int per_sequence = quotient(blocks, p.batch);
        head_kv = quotient(n, p.batch);
        number = (n - head_kv * p.batch) * per_sequence + (kDeterministic ? per_sequence - 1 - round : round);
    } else if (kDeterministic) {
        number = blocks - 1 - number;
    }
    // The first keys of a causal mask are seen by most queries: without turns, the blocks that start first get them.
    const Place place = place_of(p, number, false);
    if (place.b < 0) return;
    const int j0 = static_cast<int>(place.row), group = static_cast<int>(quotient(p.num_heads_q, p.num_heads_kv));
    BlockConstants& block = shared.block;
    if (threadIdx.x == 0) describe_block(params, place, head_kv, block);
    __syncthreads();

    const auto copy_q = [&](const QueryTile& tile, int stage) {
        copy_rows<kDimsQK, kTileQ>(shared.q[stage], block.q + tile.h * p.q.head + tile.i0 * p.q.row, p.q.row, p.q.dim,
                                   static_cast<int>(block.site.q_len) - tile.i0, static_cast<int>(p.head_dim_qk));
        if (threadIdx.x < kTileQ / 2) {
            copy_async(reinterpret_cast<Half*>(&shared.rows[stage][2 * threadIdx.x][0]),
                       block.rows + ((tile.h * call.q_tiles * kTileQ) + tile.i0 + 2 * threadIdx.x) * 4, 16);
        }
    };
    const auto copy_d_o = [&](const QueryTile& tile, int stage) {
        copy_rows<kDimsV, kTileQ>(shared.d_o[stage % kStages], block.d_o + tile.h * call.d_o.head + tile.i0 * call.d_o.row,
                                  call.d_o.row, call.d_o.dim, static_cast<int>(block.site.q_len) - tile.i0,
                                  static_cast<int>(p.head_dim_v));
    };
    const auto copy_k = [&] {
        copy_rows<kDimsQK, kTileKV>(shared.k, block.k, p.k.row, p.k.dim, static_cast<int>(block.site.kv_len) - j0,
                                    static_cast<int>(p.head_dim_qk));
    };

    // Turns: blocks with later keys add to a tile of dQ first. A causal mask then needs no waiting: such a block comes to
    // the tile earlier, and blocks that others wait for have lower numbers.
    const auto turns_of = [&](const QueryTile& tile) { return block.turns + tile.h * call.q_tiles + tile.i0 / kTileQ; };
    const auto await_turn = [&](const QueryTile& tile) {
        if (!kDeterministic || !call.dq.data) return;
        int first = 0;  // how many blocks come before this one
        Site site = block.site;
        site.h += tile.h;
        if constexpr (kWindow) {  // the keys that a tile of queries sees are one range
            const Range keys = key_hull(p, params.mask, site, tile.i0, minimum(tile.i0 + kTileQ, site.q_len));
            first = (static_cast<int>(keys.end) - 1) / kTileKV - j0 / kTileKV;
        } else {
            for (int base = j0 + kTileKV; base < site.kv_len; base += kThreads * kTileKV) {
                const int other = base + static_cast<int>(threadIdx.x) * kTileKV;
                first += __syncthreads_count(other < site.kv_len && works_on(p, params.mask, site, tile.i0, other));
            }
        }
        if (threadIdx.x == 0) wait_for(turns_of(tile), first);
    };
    // After a barrier behind what all threads have added. Not at once: the fence waits for it to arrive.
    const auto end_turn = [&](const QueryTile& tile) {
        if (!kDeterministic || !call.dq.data || threadIdx.x != 0) return;
        __threadfence();
        atomicAdd(turns_of(tile), 1);
    };

    GradientK dk;
    GradientV dv;
    fill(dk, 0), fill(dv, 0);
    bool keys_copied = false;
    const auto work = [&](int count, const auto& tile_at) {
        if (count == 0) return;
        __syncthreads();  // the buffers have been read
        if (!keys_copied) {
            copy_k();
            const Half* const from = static_cast<const Half*>(p.v.data) + batch_of(p.packed_kv, block.site.b) * p.v.batch +
                                     (block.site.kv_row0 + j0) * p.v.row + block.site.head_kv * p.v.head;
            copy_rows<kDimsV, kTileKV>(shared.v, from, p.v.row, p.v.dim, static_cast<int>(block.site.kv_len) - j0,
                                       static_cast<int>(p.head_dim_v));
            keys_copied = true;
        }
        QueryTile tile = tile_at(QueryTile{}, 0), before = tile;
        copy_q(tile, 0);
        if constexpr (kStages == 1) commit_copies();
        copy_d_o(tile, 0);
        commit_copies();
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            const int stage = n % 2;
            const bool more = n + 1 < count;
            if (kRanges && tile.tile_class != kFull) {
                Site site = block.site;
                site.h += tile.h;
                const TokenIds query_ids = query_documents(params.mask, site), key_ids = key_documents(params.mask, site);
#pragma unroll 1
                for (int r = threadIdx.x; r < kTileQ; r += kThreads) {
                    const Int i = tile.i0 + r;
                    Range keys{0, 0};
                    if (i < site.q_len) keys = key_hull(p, params.mask, site, i, i + 1);
                    shared.seen[r][0] = static_cast<int>(clamp(keys.begin - j0, 0, kTileKV));
                    shared.seen[r][1] = static_cast<int>(clamp(keys.end - j0, 0, kTileKV));
                    if constexpr (kDocuments) shared.query_ids[r] = query_document(query_ids, minimum(i, site.q_len - 1));
                }
                if constexpr (kDocuments) {
#pragma unroll 1
                    for (int c = threadIdx.x; c < kTileKV; c += kThreads)
                        shared.key_ids[c] = key_document(key_ids, minimum(j0 + c, site.kv_len - 1));
                }
            }
            // Of this tile all is there, or with one stage all but dO; the tile before has been read.
            wait_for_copies<kStages == 1 ? 1 : 0>();
            __syncthreads();
            if (more) {
                const QueryTile next = tile_at(tile, n + 1);
                copy_q(next, 1 - stage);
                if constexpr (kStages == 2) copy_d_o(next, 1 - stage);
            }
            commit_copies();

            Site site = block.site;
            site.h += tile.h;
            const ScoreContext score(p, params.mask, site);
            const bool partial = tile.tile_class != kFull;
            Scores s, dp;
            OwnRows lse;
#pragma unroll
            for (int r = 0; r < 2 * kRowFragments; ++r) lse[r] = shared.rows[stage][row_of(r)][0];
            fill(s, 0);
            multiply_scores<kDimsQK>(s, shared.q[stage], shared.k);
            float probe = partial ? probe_of(s) : 0.0f;
            const Keep keep = Keep::make(p, site, tile.i0 + row_of(0), j0 + column_of(0, 0));
            if constexpr (kBias || kScoreMod) {
                exponentiate_elements(s, score, keep, shared, stage, tile, j0);
            } else if (!partial) {
                exponentiate<false>(s, score, keep, shared, lse, tile, j0);
            } else if constexpr (kRanges) {
                exponentiate<true>(s, score, keep, shared, lse, tile, j0);
            } else {
                exponentiate_elements(s, score, keep, shared, stage, tile, j0);
            }
#pragma unroll
            for (int r = 0; r < 2 * kRowFragments; ++r) {
                const float start = kDropout ? 0.0f : -shared.rows[stage][row_of(r)][1];
#pragma unroll
                for (int f = 0; f < kKeyFragments; ++f) dp[r / 2][f][r % 2 * 2] = dp[r / 2][f][r % 2 * 2 + 1] = start;
            }
            if constexpr (kStages == 1) {
                wait_for_copies<1>();
                __syncthreads();
            }
            auto& d_o = shared.d_o[stage % kStages];
            multiply_scores<kDimsV>(dp, d_o, shared.v);
            const float keep_inverse = static_cast<float>(p.keep_inverse);
            // Tensor cores take 0 times infinity for NaN: in a tile with hidden keys, numbers that are not finite become 0
            // from here on. What sees them has NaN in P and dS.
            bool careful = false;
            if (partial) {
                probe += probe_of(dp);
                const bool centres = site.kv_len <= kTileKV / kWarpsK && !call.dlse.data;
                put_gradients<true>(s, dp, keep, keep_inverse, shared, stage, centres);
                if (probe != 0) spread_nan(shared);
                await_turn(tile);
                careful = __syncthreads_or(probe != 0);
            } else {
                put_gradients<false>(s, dp, keep, keep_inverse, shared, stage, false);
                await_turn(tile);
                __syncthreads();
            }
            if (n > 0) end_turn(before);
            if (careful) {
                keep_finite(shared.q[stage]), keep_finite(d_o), keep_finite(shared.k);
                __syncthreads();
            }
            multiply_columns<true, kWarpsColumns>(dv, shared.p, own_key(), d_o, own_pair());
            if constexpr (kStages == 1) {
                __syncthreads();  // dO has been read
                if (more) copy_d_o(tile_at(tile, n + 1), 0);
                commit_copies();
            }
            multiply_columns<true, kWarpsColumns>(dk, shared.ds, own_key(), shared.q[stage], own_pair());
            if (call.dq.data) {
                const Int number = tile.h * call.q_tiles + tile.i0 / kTileQ;
                float* const sums = block.dq_sums + number * (kTileQ * kDimsQK);
                const auto add_part = [&](auto part) {
                    constexpr int kFirst = decltype(part)::value * kQueryPairs / kQueryParts;
                    GradientQ dq;
                    fill(dq, 0);
                    multiply_columns<false, kWarpsQueryColumns, kFirst>(dq, shared.ds, query_row(), shared.k, query_pair());
#pragma unroll
                    for (int m = 0; m < kQueryFragments; ++m) {
#pragma unroll
                        for (int f = 0; f < 2 * kQueryPairs / kQueryParts; ++f) {
                            const int pair = query_pair() + (kFirst + f / 2) * kWarpsQueryColumns;
                            if (kDimsQK / 16 % kWarpsQueryColumns != 0 && pair >= kDimsQK / 16) break;
                            add_fragment(sums + ((query_row() / 16 + m) * (kDimsQK / 8) + pair * 2 + f % 2) * 128, dq[m][f]);
                        }
                    }
                };
                add_part(Number<0>{});
                if constexpr (kQueryParts == 2) add_part(Number<1>{});
            }
            if (careful) {
                __syncthreads();
                copy_k();
                commit_copies();
                wait_for_copies<0>();
            }
            before = tile;
            if (more) tile = tile_at(tile, n + 1);
        }
        if constexpr (kDeterministic) {
            __syncthreads();
            end_turn(before);
        }
    };

    if constexpr (kBands) {
        work(block.per_head * group, [&](const QueryTile& last, int n) {
            QueryTile tile{last.h, last.i0 + kTileQ, kPartial};
            if (n == 0) tile = {0, block.begin, kPartial};
            else if (tile.i0 >= block.end) tile.h += 1, tile.i0 = block.begin;
            if (tile.i0 >= block.full_begin && tile.i0 + kTileQ <= block.full_end) tile.tile_class = kFull;
            return tile;
        });
    } else {
        const int lane = lane_id(), warp = warp_id();
#pragma unroll 1
        for (int h = 0; h < group; ++h) {
#pragma unroll 1
            for (int first = 0; first < block.per_head; first += kThreads) {
                Site site = block.site;
                site.h += h;
                const int number = first + static_cast<int>(threadIdx.x), start = block.begin + number * kTileQ;
                const int c = number < block.per_head ? class_within(p, params.mask, site, start, j0) : kSkip;
                const Word found = __ballot_sync(0xffffffffu, c != kSkip);
                __syncthreads();  // the list before has been read
                if (lane == 0) shared.warp_counts[warp] = __popc(found);
                __syncthreads();
                int position = __popc(found & ((1u << lane) - 1u)), count = 0;
                for (int w = 0; w < kWarps; ++w) {
                    const int more = shared.warp_counts[w];
                    position += w < warp ? more : 0, count += more;
                }
                if (c != kSkip) shared.list[position] = start + c;
                __syncthreads();
                work(count, [&](const QueryTile&, int n) { return QueryTile{h, shared.list[n] & ~3, shared.list[n] & 3}; });
            }
        }
    }

    wait_for_copies<0>();
    __syncthreads();  // keys have been read
    const Int b_kv = batch_of(p.packed_kv, block.site.b);
    if (call.dk.data) {
        store_gradient<kDimsQK>(call.dk, dk, static_cast<float>(p.softmax_scale), shared.k, block.site,
                                b_kv, j0, p.head_dim_qk, call.aligned_dkv);
    }
    if (call.dv.data) {
        store_gradient<kDimsV>(call.dv, dv, kDropout ? static_cast<float>(p.keep_inverse) : 1.0f, shared.v, block.site,
                               b_kv, j0, p.head_dim_v, call.aligned_dkv);
    }
}

}  // namespace tilewise
