// Forward pass on tensor cores: FlashAttention-2 (Dao 2023) for fp16 and bf16, on every GPU from Turing on.
//
// One block works on kTileQ queries of one head: kWarps warps with 16 kMTiles rows each, so that softmax never leaves a
// warp. The tiles of kTileKV keys that its rows can see pass by, two at a time in shared memory: while one is worked on,
// the next is under way.
//
//     S = Q K^T                                     multiply_scores
//     x = score of the formula, -inf where hidden   finish_scores
//     a reference r >= max x - 8 log(2), per row    raise_reference
//     P = exp(x - r); l += row sum of P             exponentiate
//     o += dropout(P) V                             multiply_output
//
// r follows the running maximum only when that has grown by more than 8 (in powers of two), since P up to 2^8 loses
// nothing in floating point: o is rescaled a few times per row, not once per tile. At the end o / l and
// lse = r + log l are written. With kAhead the scores of the next tile are multiplied while this one is
// exponentiated, so that tensor cores and exp units work at the same time.
//
// grid.x: heads, and tiles of queries in them; grid.y: pieces of kColumns of head_dim_v; grid.z: splits of the keys, each
// of which leaves its own o and lse to combine.cu.

#include "spec.cuh"
#include "mma.cuh"
#include "score.cuh"

namespace tilewise {

constexpr int kRowsPerThread = 2 * kMTiles;
constexpr int kDepthSteps = kDimsQK / 16, kKeySteps = kTileKV / 16;
constexpr int kQPitch = (kDimsQK > kColumns ? kDimsQK : kColumns) + kPad;  // its place also holds o, at the end
constexpr int kElements = kMTiles * kTileKV / 8 * 4;                       // of a thread, of a tile of scores
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kHeadroom = 8;

using Scores = float[kMTiles][kTileKV / 8][4];
using Output = float[kMTiles][kColumns / 8][4];

struct Shared {
    Half q[kTileQ][kQPitch];
    Half k[2][kTileKV][kDimsQK + kPad];
    Half v[2][kTileKV][kColumns + kPad];
    int list[kBands ? 1 : kThreads];  // where tiles to work on start, and their class in the low two bits
    int warp_counts[kBands ? 1 : kWarps];
    float elements[kRolled ? kElements : 1][kThreads];  // of each thread, where scores are finished one by one
};
static_assert(sizeof(Shared) <= kSharedBytes, "the host asks for kSharedBytes");

struct Params {
    abi::Forward call;
    abi::Split split;
    MaskData mask;
};

// The rows of this thread: number n of kRowsPerThread is in half n % 2 of fragment n / 2.
TW_DEVICE int row_of(int n) { return (warp_id() * kMTiles + n / 2) * 16 + n % 2 * 8 + lane_id() / 4; }
TW_DEVICE int column_of(int n8, int c) { return n8 * 8 + lane_id() % 4 * 2 + c; }  // of score or output fragment n8

// ---------------------------------------------------------------------------------------------------------------------
// Products

struct Queries {  // fragments of Q: kept in registers, or read again for every tile
    Word held[kQInRegisters ? kDepthSteps : 1][kMTiles][4];

    __device__ __forceinline__ void load(const Shared& shared) {
        if constexpr (kQInRegisters) {
#pragma unroll
            for (int d = 0; d < kDepthSteps; ++d) read(held[d], shared, d);
        }
    }
    __device__ __forceinline__ void get(Word (&a)[kMTiles][4], const Shared& shared, int d) const {
        if constexpr (kQInRegisters) {
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                for (int w = 0; w < 4; ++w) a[m][w] = held[d][m][w];
            }
        } else {
            read(a, shared, d);
        }
    }

private:
    TW_DEVICE void read(Word (&a)[kMTiles][4], const Shared& shared, int d) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) load_a(a[m], shared.q, (warp_id() * kMTiles + m) * 16, d * 16);
    }
};

TW_DEVICE void clear(Scores& s) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kTileKV / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
        }
    }
}

// Step d of kDepthSteps of S = Q K^T.
TW_DEVICE void multiply_scores_step(Scores& s, const Queries& queries, const Shared& shared, int stage, int d) {
    Word a[kMTiles][4];
    queries.get(a, shared, d);
#pragma unroll
    for (int n = 0; n < kKeySteps; ++n) {
        Word b[4];
        load_b(b, shared.k[stage], n * 16, d * 16);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            mma(s[m][2 * n], a[m], b[0], b[1]);
            mma(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
    }
}

// o += P V; P is rounded to the dtype of V.
TW_DEVICE void multiply_output(Output& o, const Scores& p, const Shared& shared, int stage) {
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
        Word a[kMTiles][4];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const float(&left)[4] = p[m][2 * j], (&right)[4] = p[m][2 * j + 1];
            a[m][0] = pack(left[0], left[1]), a[m][1] = pack(left[2], left[3]);
            a[m][2] = pack(right[0], right[1]), a[m][3] = pack(right[2], right[3]);
        }
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) {
            Word b[4];
            load_b_transposed(b, shared.v[stage], j * 16, n * 16);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                mma(o[m][2 * n], a[m], b[0], b[1]);
                mma(o[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax

struct Shifts {  // what exponents are shifted by, per row
    float of[kRowsPerThread];
};

struct Softmax {
    float scale;                         // of what S holds after finish_scores, to powers of two
    float reference[kRowsPerThread];     // r, before that scale
    float sum[kRowsPerThread];           // l, of this thread's columns

    __device__ __forceinline__ explicit Softmax(float s) : scale(s) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) reference[r] = -Limits<float>::infinity(), sum[r] = 0;
    }

    __device__ __forceinline__ void raise_reference(const Scores& s, Output& o) {
        float highest[kRowsPerThread];
        const float headroom = kHeadroom / scale;
        bool grown = false;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            highest[r] = larger(s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1]);
#pragma unroll
            for (int n = 1; n < kTileKV / 8; ++n) {
                highest[r] = larger(highest[r], larger(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
            }
            grown |= highest[r] > reference[r] + headroom;
        }
        if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            highest[r] = larger(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 1));
            highest[r] = larger(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 2));
            // A row whose own scores did not grow stays as it is: its bits do not depend on its neighbours.
            float factor = 1;
            if (highest[r] > reference[r] + headroom) {
                factor = exp2_fast((reference[r] - highest[r]) * scale);
                reference[r] = highest[r];
            }
            sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < kColumns / 8; ++n) o[r / 2][n][r % 2 * 2] *= factor, o[r / 2][n][r % 2 * 2 + 1] *= factor;
        }
    }

    __device__ __forceinline__ Shifts shifts() const {
        Shifts all;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            // Nothing seen yet: any finite number serves, all exponentials are 0.
            all.of[r] = reference[r] == -Limits<float>::infinity() ? 0.0f : reference[r] * scale;
        }
        return all;
    }

    // Fragments [begin, end) of the kMTiles * kTileKV / 8.
    __device__ __forceinline__ void exponentiate(Scores& s, const Shifts& shifts, int begin, int end) {
#pragma unroll
        for (int f = begin; f < end; ++f) {
            const int m = f / (kTileKV / 8), n = f % (kTileKV / 8);
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = exp2_fast(s[m][n][e] * scale - shifts.of[2 * m + e / 2]);
#pragma unroll
            for (int half = 0; half < 2; ++half) sum[2 * m + half] += s[m][n][2 * half] + s[m][n][2 * half + 1];
        }
    }

    __device__ __forceinline__ float row_sum(int r) const {
        const float two = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
        return two + __shfl_xor_sync(0xffffffffu, two, 2);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

struct Block {  // what one block works on
    const abi::Problem& p;
    Int group, h, i0;  // query heads side by side in its rows; the first of them; the first query
    Site site;

    __device__ __forceinline__ Int query(int row) const { return kPackGQA ? i0 + row / group : i0 + row; }
    __device__ __forceinline__ Int head(int row) const { return kPackGQA ? h + row % group : h; }
    __device__ __forceinline__ Int queries() const { return minimum(p.q_tile, site.q_len - i0); }
    __device__ __forceinline__ int rows() const { return static_cast<int>(queries() * (kPackGQA ? group : 1)); }
};

// Bits [0, n) of a word; n may be below 0 and is at most 31.
TW_DEVICE Word bits_below(int n) { return n <= 0 ? 0u : (1u << n) - 1u; }

// Scores of the formula, from products: all of them if the rows see every key of the tile, else -inf where they do not.
TW_DEVICE void finish_scores(Scores& s, const ScoreContext& score, const Block& block, Shared& shared, Int j0,
                             int tile_class) {
    const Site& site = block.site;
    constexpr bool kByElement = kBias || kScoreMod;  // each score takes more than a few instructions
    if (kRolled && (kByElement || (!kBands && tile_class != kFull))) {
        // A loop that is not unrolled: a hundred copies of a long expression would take longer to compile than most
        // problems take to run.
        float* const mine = &shared.elements[0][threadIdx.x];
#pragma unroll
        for (int e = 0; e < kElements; ++e) mine[e * kThreads] = s[e / (kTileKV / 2)][e / 4 % (kTileKV / 8)][e % 4];
#pragma unroll 1
        for (int e = 0; e < kElements; ++e) {
            const Int i = block.query(row_of(e / (kTileKV / 2) * 2 + e % 4 / 2)), j = j0 + column_of(e / 4 % (kTileKV / 8), e % 2);
            float capped, x = -Limits<float>::infinity();
            if (score.sees(tile_class, i, j)) {
                x = mine[e * kThreads];
                if constexpr (!kRaw) x = score.after_mod(score.before_mod(x, i, j, capped), i, j);
            }
            mine[e * kThreads] = x;
        }
#pragma unroll
        for (int e = 0; e < kElements; ++e) s[e / (kTileKV / 2)][e / 4 % (kTileKV / 8)][e % 4] = mine[e * kThreads];
        return;
    }
    if constexpr (!kRaw && !kByElement) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            // Distances are small differences of large positions: taken as integers first.
            const float ahead = static_cast<float>(block.query(row_of(r)) + site.q_offset - j0);
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
    if (kBands && tile_class != kFull) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            const Int i = block.query(row_of(r));
            const Range keys = key_hull(block.p, score.mask, site, i, i + 1);
            const int first = static_cast<int>(clamp(keys.begin - j0, 0, kTileKV)) - column_of(0, 0);
            const int end = static_cast<int>(clamp(keys.end - j0, 0, kTileKV)) - column_of(0, 0);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                // Bit n says whether the row sees column 8 n + c of those that this thread has.
                const Word seen = bits_below((end - c + 7) >> 3) & ~bits_below((first - c + 7) >> 3);
#pragma unroll
                for (int n = 0; n < kTileKV / 8; ++n) {
                    if (!(seen >> n & 1u)) s[r / 2][n][r % 2 * 2 + c] = -Limits<float>::infinity();
                }
            }
        }
    }
}

// P of what dropout takes is 0. One draw serves the rows g, g + 8 and four fragments of keys.
TW_DEVICE void drop(Scores& p, const Philox& philox, const Block& block, Int j0) {
    const Word threshold = static_cast<Word>(block.p.dropout_threshold);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kTileKV / 8; n += 4) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const auto draw = philox.draw(block.query(row_of(2 * m)), j0 + column_of(n, c));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int f = 0; f < 4 && n + f < kTileKV / 8; ++f) {
                        if (!draw.keep(half, static_cast<int>(j0 / 16 + f / 2) & 1, f % 2, threshold)) p[m][n + f][2 * half + c] = 0;
                    }
                }
            }
        }
    }
}

// The tiles of keys that a block works on, a number of them at a time.
struct Tiles {
    int begin, end;            // keys that some row sees
    int full_begin, full_end;  // keys that every row sees, if they are in [begin, end)
    int chunk, count;          // where the tiles at hand start, and how many of them are not skipped

    // Of rows [first, last] of a block.
    TW_DEVICE Tiles make(const Block& block, const MaskData& mask, int first, int last) {
        const Int i0 = minimum(block.query(first), block.site.q_len - 1), i1 = minimum(block.query(last), block.site.q_len - 1);
        const Range low = key_hull(block.p, mask, block.site, i0, i0 + 1), high = key_hull(block.p, mask, block.site, i1, i1 + 1);
        return {static_cast<int>(low.begin), static_cast<int>(high.end), static_cast<int>(high.begin), static_cast<int>(low.end), 0, 0};
    }

    // All threads get the same; false when there are no more tiles.
    __device__ __forceinline__ bool next(const Block& block, const MaskData& mask, Shared& shared, bool first) {
        if (kBands && !first) return false;
        chunk = first ? begin / kTileKV * kTileKV : chunk + kThreads * kTileKV;
        if (chunk >= end) return false;
        if constexpr (kBands) {
            count = (end - chunk + kTileKV - 1) / kTileKV;
        } else {
            const int lane = lane_id(), warp = warp_id(), start = chunk + static_cast<int>(threadIdx.x) * kTileKV;
            const int c = start < end ? class_within(block.p, mask, block.site, block.i0, start) : kSkip;
            const Word found = __ballot_sync(0xffffffffu, c != kSkip);
            __syncthreads();  // the list before has been read
            if (lane == 0) shared.warp_counts[warp] = __popc(found);
            __syncthreads();
            int place = __popc(found & ((1u << lane) - 1u));
            count = 0;
            for (int w = 0; w < kWarps; ++w) {
                const int n = shared.warp_counts[w];
                place += w < warp ? n : 0, count += n;
            }
            if (c != kSkip) shared.list[place] = start + c;
            __syncthreads();
        }
        return true;
    }
    __device__ __forceinline__ int start(const Shared& shared, int n) const {
        return kBands ? chunk + n * kTileKV : shared.list[n] & ~3;
    }
    __device__ __forceinline__ int class_of(const Shared& shared, int n) const {
        if constexpr (!kBands) return shared.list[n] & 3;
        return class_of_start(start(shared, n));
    }
    __device__ __forceinline__ int class_of_start(int j0) const {  // bands
        return j0 >= full_begin && j0 + kTileKV <= full_end ? kFull : j0 + kTileKV <= begin || j0 >= end ? kSkip : kPartial;
    }
};

// What is known of a row when all keys have passed: the reference of its softmax, in powers of two, and its sum. Writes
// lse, and returns the factor of o.
TW_DEVICE float close_row(const Params& params, const Block& block, int row, float reference, float sum, bool writes_lse) {
    const abi::Problem& p = block.p;
    const Int h = block.head(row), at = block.site.q_row0 + block.query(row), b = batch_of(p.packed_q, block.site.b);
    float scale = 1;
    if (kSinks && !kSplit) {
        const float sink = load_any<float>(p.sinks.data, p.sinks.dtype, h * p.sinks.head) * kLog2E, before = reference;
        reference = larger(reference, sink);
        const float shift = reference == -Limits<float>::infinity() ? 0.0f : reference;
        scale = exp2_fast(before - shift);
        sum = sum * scale + exp2_fast(sink - shift);
    }
    const bool empty = sum == 0;
    if (writes_lse && blockIdx.y == 0) {
        const abi::Rows& out = kSplit ? params.split.lse : params.call.lse;
        const Int split = kSplit ? blockIdx.z * params.split.lse_split : 0;
        if (out.data) {
            static_cast<float*>(out.data)[split + b * out.batch + h * out.head + at * out.row] =
                empty ? -Limits<float>::infinity() : reference * kLn2 + logf(sum);
        }
    }
    return empty ? 0.0f : scale / sum * (kDropout ? static_cast<float>(p.keep_inverse) : 1.0f);
}

// Where number c0 + column of a row goes.
TW_DEVICE float* split_row(const Params& params, const Block& block, int row) {
    const abi::Tensor& out = params.split.o;
    return static_cast<float*>(out.data) + blockIdx.z * params.split.o_split + batch_of(block.p.packed_q, block.site.b) * out.batch +
           block.head(row) * out.head + (block.site.q_row0 + block.query(row)) * out.row + Int(blockIdx.y) * kColumns;
}
TW_DEVICE Half* output_row(const Params& params, const Block& block, int row) {
    const abi::Tensor& out = params.call.o;
    return static_cast<Half*>(out.data) + batch_of(block.p.packed_q, block.site.b) * out.batch +
           (block.site.q_row0 + block.query(row)) * out.row + block.head(row) * out.head + Int(blockIdx.y) * kColumns * out.dim;
}

// The rows of a warp again, one by one and without tensor cores, which take 0 times infinity for NaN: what a row does not
// see must not touch it. For blocks whose o is not finite and that have hidden keys.
TW_DEVICE void attend_with_care(const Params& params, const Block& block, const ScoreContext& score, const Philox& philox,
                                const Tiles& walk, const TileSource& k, const TileSource& v, const Shared& shared) {
    constexpr int kParts = (kColumns + 31) / 32;
    const int lane = lane_id(), first = warp_id() * 16 * kMTiles;
#pragma unroll 1
    for (int row = first; row < first + 16 * kMTiles && row < block.rows(); ++row) {
        const Int i = block.query(row);
        float reference = -Limits<float>::infinity(), sum = 0, o[kParts];
#pragma unroll
        for (int n = 0; n < kParts; ++n) o[n] = 0;
#pragma unroll 1
        for (int j0 = walk.begin; j0 < walk.end; j0 += 32) {
            const int j = j0 + lane;
            float x = -Limits<float>::infinity(), capped;
            if (j < walk.end && score.sees(kPartial, i, j)) {
                float product = 0;
#pragma unroll 1
                for (int d = 0; d < k.dims; ++d) {
                    product += Float<kDTypeQ>::template load<float>(shared.q[row][d]) *
                               Float<kDTypeQ>::template load<float>(k.data[j * k.row + d * k.dim]);
                }
                x = score.after_mod(score.before_mod(product, i, j, capped), i, j) * kLog2E;
            }
            float highest = x;
#pragma unroll 1
            for (int step = 16; step > 0; step /= 2) highest = larger(highest, __shfl_xor_sync(0xffffffffu, highest, step));
            highest = larger(highest, reference);
            const float shift = highest == -Limits<float>::infinity() ? 0.0f : highest;
            const float factor = exp2_fast(reference - shift);
            float mine = exp2_fast(x - shift), total = mine;
            reference = highest;
#pragma unroll 1
            for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
            sum = sum * factor + total;
#pragma unroll
            for (int n = 0; n < kParts; ++n) o[n] *= factor;
            if (kDropout && !philox.keep(i, j, static_cast<Word>(block.p.dropout_threshold))) mine = 0;
#pragma unroll 1
            for (int other = 0; other < 32; ++other) {
                const float p = __shfl_sync(0xffffffffu, mine, other);
                if (p == 0) continue;
#pragma unroll
                for (int n = 0; n < kParts; ++n) {
                    const int c = lane + 32 * n;
                    if (c < v.dims && c < kColumns)
                        o[n] += p * Float<kDTypeQ>::template load<float>(v.data[(j0 + other) * v.row + c * v.dim]);
                }
            }
        }
        const float factor = close_row(params, block, row, reference, sum, lane == 0);
#pragma unroll
        for (int n = 0; n < kParts; ++n) {
            const int c = lane + 32 * n;
            if (c >= v.dims || c >= kColumns) continue;
            if (kSplit) split_row(params, block, row)[c] = o[n] * factor;
            else output_row(params, block, row)[c * params.call.o.dim] = Float<kDTypeQ>::store(o[n] * factor);
        }
    }
}

TW_KERNEL(fwd_mma, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::Problem& p = params.call.problem;
    const Int group = kPackGQA ? p.num_heads_q / p.num_heads_kv : 1, tiles = gridDim.x / (p.num_heads_q / group);
    // The last rows of a causal mask see most; the blocks that start first get them.
    const Place place = place_of(p, tiles - 1 - blockIdx.x % tiles, true);
    if (place.b < 0) return;
    const Int h = blockIdx.x / tiles * group, c0 = Int(blockIdx.y) * kColumns;
    const Block block{p, group, h, place.row, make_site(p, place.b, h)};
    const Site& site = block.site;
    const int rows = block.rows();
    const ScoreContext score(p, params.mask, site);
    const Philox philox = Philox::make(p, site);
    const Int b_q = batch_of(p.packed_q, site.b), b_kv = batch_of(p.packed_kv, site.b);

    const int first_row = warp_id() * 16 * kMTiles;
    Tiles walk = Tiles::make(block, params.mask, 0, rows - 1);
    const Tiles warp_walk = Tiles::make(block, params.mask, first_row, first_row + 16 * kMTiles - 1);  // of this warp's rows
    if (kSplit) {
        const int size = static_cast<int>(params.split.keys), z = static_cast<int>(blockIdx.z);
        if (z * size > walk.begin) walk.begin = z * size;
        if ((z + 1) * size < walk.end && z + 1 < static_cast<int>(gridDim.z)) walk.end = (z + 1) * size;
    }

    const TileSource k = TileSource::make(p.k, b_kv, site.kv_row0, site.head_kv, 0, site.kv_len, p.head_dim_qk);
    const TileSource v = TileSource::make(p.v, b_kv, site.kv_row0, site.head_kv, c0, site.kv_len, p.head_dim_v);
    const auto copy_k = [&](int n) { copy_tile<kTileKV, kDimsQK>(shared.k[n % 2], k.from(walk.start(shared, n))); };
    const auto copy_v = [&](int n) { copy_tile<kTileKV, kColumns>(shared.v[n % 2], v.from(walk.start(shared, n))); };
    {
        constexpr int kChunks = kDimsQK / 8;
#pragma unroll 2
        for (int n = threadIdx.x; n < kTileQ * kChunks; n += kThreads) {
            const int r = n / kChunks, c = n % kChunks * 8;
            const Half* const row = static_cast<const Half*>(p.q.data) + b_q * p.q.batch +
                                    (site.q_row0 + block.query(r)) * p.q.row + block.head(r) * p.q.head;
            copy_chunk(&shared.q[r][c], row + c * p.q.dim, p.q.dim, r < rows ? static_cast<int>(p.head_dim_qk) - c : 0);
        }
    }

    Queries queries;
    Output o;
    Softmax softmax(kRaw ? score.scale * kLog2E : kLog2E);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[m][n][e] = 0;
        }
    }
    bool hidden = false;  // some key from some row
    // Class of tile n for this warp.
    const auto class_of = [&](int n) {
        const int c = walk.class_of(shared, n);
        hidden |= c != kFull;
        return kBands ? warp_walk.class_of_start(walk.start(shared, n)) : c;
    };
    const auto finish = [&](Scores& s, int n, int tile_class) {
        if (!kRaw || tile_class != kFull) finish_scores(s, score, block, shared, walk.start(shared, n), tile_class);
        softmax.raise_reference(s, o);
    };
    const auto output = [&](Scores& s, int n) {
        if constexpr (kDropout) drop(s, philox, block, walk.start(shared, n));
        multiply_output(o, s, shared, n % 2);
    };
    constexpr int kFragments = kMTiles * kTileKV / 8;

    for (bool first = true; walk.next(block, params.mask, shared, first); first = false) {
        if (walk.count == 0) continue;
        __syncthreads();  // the buffers have been read
        copy_k(0);
        if constexpr (kAhead) commit_copies();
        copy_v(0);
        if constexpr (kAhead) {
            if (walk.count > 1) copy_k(1);
        }
        commit_copies();
        if constexpr (kAhead) {
            Scores s;
            wait_for_copies<1>();
            __syncthreads();
            queries.load(shared);
            clear(s);
#pragma unroll
            for (int d = 0; d < kDepthSteps; ++d) multiply_scores_step(s, queries, shared, 0, d);
            for (int n = 0;; ++n) {
                wait_for_copies<0>();
                __syncthreads();  // v of this tile and k of the next are there; k of this and v before have been read
                finish(s, n, class_of(n));
                const Shifts shifts = softmax.shifts();
                if (n + 1 == walk.count) {
                    softmax.exponentiate(s, shifts, 0, kFragments);
                    output(s, n);
                    break;
                }
                copy_v(n + 1);
                if (n + 2 < walk.count) copy_k(n + 2);
                commit_copies();
                Scores ahead;
                clear(ahead);
#pragma unroll
                for (int d = 0; d < kDepthSteps; ++d) {
                    multiply_scores_step(ahead, queries, shared, (n + 1) % 2, d);
                    softmax.exponentiate(s, shifts, d * kFragments / kDepthSteps, (d + 1) * kFragments / kDepthSteps);
                }
                output(s, n);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                    for (int f = 0; f < kTileKV / 8; ++f) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) s[m][f][e] = ahead[m][f][e];
                    }
                }
            }
        } else {
            for (int n = 0; n < walk.count; ++n) {
                wait_for_copies<0>();
                __syncthreads();  // this tile is there, and the one before has been read
                if (n == 0) queries.load(shared);
                if (n + 1 < walk.count) {
                    copy_k(n + 1);
                    copy_v(n + 1);
                    commit_copies();
                }
                const int tile_class = class_of(n);
                if (kBands && tile_class == kSkip) continue;  // other warps see it
                Scores s;
                clear(s);
#pragma unroll
                for (int d = 0; d < kDepthSteps; ++d) multiply_scores_step(s, queries, shared, n % 2, d);
                finish(s, n, tile_class);
                softmax.exponentiate(s, softmax.shifts(), 0, kFragments);
                output(s, n);
            }
        }
    }

    float probe = 0;  // becomes NaN at the first number that is not finite
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) probe += o[m][n][e] * 0.0f;
        }
    }
    if (__syncthreads_or(hidden && probe != 0)) {
        attend_with_care(params, block, score, philox, walk, k, v, shared);
        return;
    }

    float factors[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        const float sum = softmax.row_sum(r);
        factors[r] = 0;
        if (row_of(r) < rows) {
            const float reference = softmax.reference[r] * softmax.scale;
            factors[r] = close_row(params, block, row_of(r), reference, sum, lane_id() % 4 == 0);
        }
    }
    if constexpr (kSplit) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            if (row_of(r) >= rows) continue;
            float* const to = split_row(params, block, row_of(r)) + column_of(0, 0);
#pragma unroll
            for (int n = 0; n < kColumns / 8; ++n) {
                to[8 * n] = o[r / 2][n][r % 2 * 2] * factors[r];
                to[8 * n + 1] = o[r / 2][n][r % 2 * 2 + 1] * factors[r];
            }
        }
        return;
    }
    // Through shared memory, for whole rows at once. A warp's rows of q are read by no other.
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            const float(&x)[4] = o[r / 2][n];
            *reinterpret_cast<Word*>(&shared.q[row_of(r)][column_of(n, 0)]) =
                pack(x[r % 2 * 2] * factors[r], x[r % 2 * 2 + 1] * factors[r]);
        }
    }
    __syncwarp();
    constexpr int kChunks = kColumns / 8;
#pragma unroll 2
    for (int n = lane_id(); n < 16 * kMTiles * kChunks; n += 32) {
        const int row = first_row + n / kChunks, c = n % kChunks * 8, left = v.dims - c;
        if (row >= rows || left <= 0) continue;
        Half* const to = output_row(params, block, row) + c * params.call.o.dim;
        if (params.call.aligned && left >= 8) {
            *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(&shared.q[row][c]);
        } else {
#pragma unroll 1
            for (int x = 0; x < 8 && x < left; ++x) to[x * params.call.o.dim] = shared.q[row][c + x];
        }
    }
}

}  // namespace tilewise
