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
// lse = r + log l are written.
//
// grid.x: heads, and tiles of queries in them; grid.y: pieces of kColumns of head_dim_v; grid.z: splits of the keys, each
// of which leaves its own o and lse to combine.cu.

#include "spec.cuh"
#include "mma.cuh"
#include "fragments.cuh"

namespace tilewise {

constexpr int kDepthSteps = kDimsQK / 16, kKeySteps = kTileKV / 16;
constexpr int kQWidth = kDimsQK > kColumns ? kDimsQK : kColumns;  // its place also holds o, at the end
constexpr int kElements = kMTiles * kTileKV / 8 * 4;                       // of a thread, of a tile of scores

// Numbers that stay the same for all tiles are in shared memory: compilers would rather compute them again for every tile
// than keep them in registers, and that takes longer than the exponentials.
struct __align__(16) WarpConstants {
    KeyRange keys;  // bands: of the rows of this warp
    int first, count;  // bands: the first tile, and how many there are
    int whole_end;     // tiles that end here or before can be copied without a check of every row and column
};
struct __align__(16) ThreadConstants {
    const Half *k, *v;       // what this thread copies first, from row 0 on
    int k_offset, v_offset;  // and to where in a tile
};

struct Shared {
    Tile<kTileQ, kQWidth> q;
    Tile<kTileKV, kDimsQK> k[2];
    Tile<kTileKV, kColumns> v[2];
    int list[kBands ? 1 : kThreads];  // where tiles to work on start, and their class in the low two bits
    int warp_counts[kBands ? 1 : kWarps];
    WarpConstants warps[kWarps];
    TileSource<kDimsQK> k_source;
    TileSource<kColumns> v_source;
    ThreadConstants threads[kThreads];
    TokenIds key_documents;  // where those of key_ids come from
    DocumentId query_ids[kDocuments ? kTileQ : 1], key_ids[2][kDocuments ? kTileKV : 1];
    float elements[kRolled ? kElements : 1][kThreads];  // of each thread, where scores are finished one by one
};
static_assert(sizeof(Shared) <= kSharedBytes, "the host asks for kSharedBytes");

struct Params {
    abi::Forward call;
    abi::Split split;
    MaskData mask;
};

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
        for (int m = 0; m < kMTiles; ++m) {
            Matrices<Tile<kTileQ, kQWidth>>::by_rows(shared.q, warp_id() * kMTiles * 16, 0).load(a[m], m * 16, d * 16);
        }
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

// S = Q K^T. Fragments are read kReadAhead products before they are needed: shared memory takes its time.
TW_DEVICE void multiply_scores(Scores& s, const Queries& queries, const Shared& shared, int stage) {
    constexpr int kProducts = kDepthSteps * kKeySteps, kRing = kReadAhead + 1;
    static_assert(kReadAhead <= kKeySteps, "of Q, the fragments of two steps are at hand");
    Word a[2][kMTiles][4], b[kRing][4];
    const auto k = Matrices<Tile<kTileKV, kDimsQK>>::by_columns(shared.k[stage], 0, 0);
    const auto read = [&](int g) {
        if (g % kKeySteps == 0) queries.get(a[g / kKeySteps % 2], shared, g / kKeySteps);
        k.load(b[g % kRing], g % kKeySteps * 16, g / kKeySteps * 16);
    };
    clear(s);
#pragma unroll
    for (int g = 0; g < kReadAhead && g < kProducts; ++g) read(g);
#pragma unroll
    for (int g = 0; g < kProducts; ++g) {
        if (g + kReadAhead < kProducts) read(g + kReadAhead);
        const Word(&right)[4] = b[g % kRing];
        const int n = g % kKeySteps;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            mma(s[m][2 * n], a[g / kKeySteps % 2][m], right[0], right[1]);
            mma(s[m][2 * n + 1], a[g / kKeySteps % 2][m], right[2], right[3]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Output

// o += P V; P is rounded to the dtype of V. With kExponentiate, P is still what exponentiate() takes: exp units work on
// the keys of the next step while tensor cores work on these.
template <bool kExponentiate>
TW_DEVICE void multiply_output(Output& o, Scores& p, Softmax& softmax, const Shared& shared, int stage) {
    constexpr int kSteps = kColumns / 16;
    const Shifts shifts = softmax.shifts();
    const auto exponentiate = [&](int step, int part, int parts) {  // of 2 kMTiles fragments
#pragma unroll
        for (int f = part * 2 * kMTiles / parts; f < (part + 1) * 2 * kMTiles / parts; ++f) {
            softmax.exponentiate(p[f / 2][2 * step + f % 2], shifts, f / 2);
        }
    };
    if constexpr (kExponentiate) exponentiate(0, 0, 1);
    constexpr int kProducts = kKeySteps * kSteps, kRing = kReadAhead + 1;
    Word a[kMTiles][4], b[kRing][4];
    const auto v = Matrices<Tile<kTileKV, kColumns>>::by_rows(shared.v[stage], 0, 0);
    const auto read = [&](int g) { v.load_transposed(b[g % kRing], g / kSteps * 16, g % kSteps * 16); };
#pragma unroll
    for (int g = 0; g < kReadAhead && g < kProducts; ++g) read(g);
#pragma unroll
    for (int g = 0; g < kProducts; ++g) {
        const int j = g / kSteps, n = g % kSteps;
        if (g + kReadAhead < kProducts) read(g + kReadAhead);
        if (n == 0) {
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                const float(&left)[4] = p[m][2 * j], (&right)[4] = p[m][2 * j + 1];
                a[m][0] = pack(left[0], left[1]), a[m][1] = pack(left[2], left[3]);
                a[m][2] = pack(right[0], right[1]), a[m][3] = pack(right[2], right[3]);
            }
        }
        const Word(&right)[4] = b[g % kRing];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            mma(o[m][2 * n], a[m], right[0], right[1]);
            mma(o[m][2 * n + 1], a[m], right[2], right[3]);
        }
        if constexpr (kExponentiate) {
            if (j + 1 < kKeySteps) exponentiate(j + 1, n, kSteps);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

// Scores of the formula, from products: all of them if the rows see every key of the tile, else -inf where they do not.
TW_DEVICE void finish_scores(Scores& s, const ScoreContext& score, const Block& block, Shared& shared, int stage, Int j0,
                             int tile_class) {
    const Site& site = block.site;
    constexpr bool kByElement = kBias || kScoreMod;  // each score takes more than a few instructions
    if (kRolled && (kByElement || (!kBands && !kDocuments && tile_class != kFull))) {
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
    if constexpr (!kRaw && !kByElement) apply_options(s, score, block, j0);
    if ((kBands || kDocuments) && tile_class != kFull) {
        Word seen[kRowsPerThread][2];
        see_hulls(seen, block, score.mask, j0);
        if constexpr (kDocuments) {
            DocumentId document[kRowsPerThread];
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) document[r] = shared.query_ids[row_of(r)];
#pragma unroll 2
            for (int n = 0; n < kTileKV / 8; ++n) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const DocumentId id = shared.key_ids[stage][column_of(n, c)];
#pragma unroll
                    for (int r = 0; r < kRowsPerThread; ++r) {
                        if (id != document[r] || id < 0) seen[r][c] &= ~(1u << n);
                    }
                }
            }
        }
        hide(s, seen);
    }
}

// The tiles of keys that a block works on, a number of them at a time.
struct Tiles {
    int begin, end;    // keys that some row sees
    int chunk, count;  // where the tiles at hand start, and how many of them are not skipped

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
};

// When all keys have passed a row: writes its lse, and returns the factor of its o.
TW_DEVICE float finish_row(const Params& params, const Block& block, int row, float reference, float sum, bool writes_lse) {
    const float factor = close_row(block, row, reference, sum);
    const abi::Rows& out = kSplit ? params.split.lse : params.call.lse;
    if (writes_lse && blockIdx.y == 0 && out.data) {
        const Int at = block.site.q_row0 + block.query(row), b = batch_of(block.p.packed_q, block.site.b);
        const Int split = kSplit ? blockIdx.z * params.split.lse_split : 0;
        static_cast<float*>(out.data)[split + b * out.batch + block.head(row) * out.head + at * out.row] = lse_of(reference, sum);
    }
    return factor;
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
// see must not touch it. For warps whose o is not finite.
TW_DEVICE void attend_with_care(const Params& params, const Block& block, const ScoreContext& score, const Philox& philox,
                                const Tiles& walk, const Shared& shared) {
    const TileSource<kDimsQK>& k = shared.k_source;
    const TileSource<kColumns>& v = shared.v_source;
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
                    product += Float<kDTypeQ>::template load<float>(*shared.q.at(row, d)) *
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
        const float factor = finish_row(params, block, row, reference, sum, lane == 0);
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
    const Int group = kPackGQA ? quotient(p.num_heads_q, p.num_heads_kv) : 1;
    const Int tiles = quotient(gridDim.x * group, p.num_heads_q), heads = quotient(blockIdx.x, tiles);
    // The last rows of a causal mask see most; the blocks that start first get them.
    const Place place = place_of(p, tiles - 1 - (blockIdx.x - heads * tiles), true);
    if (place.b < 0) return;
    const Int h = heads * group, c0 = Int(blockIdx.y) * kColumns;
    const Block block{p, group, h, place.row, make_site(p, place.b, h)};
    const Site& site = block.site;
    const int rows = block.rows();
    const Int b_q = batch_of(p.packed_q, site.b), b_kv = batch_of(p.packed_kv, site.b);
    {
        const auto q = TileSource<kDimsQK>::make(p.q, b_q, site.q_row0 + block.i0, h, 0, rows, p.head_dim_qk);
        if (!kPackGQA && rows == kTileQ && copies_whole<kDimsQK, kTileQ>(q)) {
            copy_whole_tile<kDimsQK>(shared.q, q.my_offset<Tile<kTileQ, kQWidth>>(), q.mine(), q.row);
        } else if constexpr (kPackGQA) {
            constexpr int kChunks = kDimsQK / 8;
            for (int n = threadIdx.x; n < kTileQ * kChunks; n += kThreads) {
                const int r = n / kChunks, c = n % kChunks * 8;
                copy_chunk(shared.q.at(r, c), q.data + (r / group) * q.row + (r % group) * p.q.head + c * q.dim, q.dim,
                           r < rows ? q.dims - c : 0);
            }
        } else {
            copy_tile(shared.q, q, 0);
        }
    }

    const ScoreContext score(p, params.mask, site);
    const Philox philox = Philox::make(p, site);

    const int first_row = warp_id() * 16 * kMTiles;
    const KeyRange seen = keys_of(block, params.mask, 0, rows - 1);
    Tiles walk{seen.begin, seen.end, 0, 0};
    if (kSplit) {
        const int size = static_cast<int>(params.split.keys), z = static_cast<int>(blockIdx.z);
        if (z * size > walk.begin) walk.begin = z * size;
        if ((z + 1) * size < walk.end && z + 1 < static_cast<int>(gridDim.z)) walk.end = (z + 1) * size;
    }

    const auto k = TileSource<kDimsQK>::make(p.k, b_kv, site.kv_row0, site.head_kv, 0, site.kv_len, p.head_dim_qk);
    const auto v = TileSource<kColumns>::make(p.v, b_kv, site.kv_row0, site.head_kv, c0, site.kv_len, p.head_dim_v);
    if (lane_id() == 0) {
        const int first = walk.begin / kTileKV * kTileKV;
        const bool whole = copies_whole<kDimsQK, kTileKV>(k) && copies_whole<kColumns, kTileKV>(v);
        shared.warps[warp_id()] = {keys_of(block, params.mask, first_row, first_row + 16 * kMTiles - 1), first,
                                   (walk.end - first + kTileKV - 1) / kTileKV, whole ? k.count : 0};
    }
    shared.threads[threadIdx.x] = {k.mine(), v.mine(), k.my_offset<Tile<kTileKV, kDimsQK>>(),
                                   v.my_offset<Tile<kTileKV, kColumns>>()};
    if (threadIdx.x == 0) {
        shared.k_source = k, shared.v_source = v;
        if (kDocuments) shared.key_documents = key_documents(params.mask, site);
    }
    if constexpr (kDocuments) {
        const TokenIds ids = query_documents(params.mask, site);
        for (int r = static_cast<int>(threadIdx.x); r < kTileQ; r += kThreads)
            shared.query_ids[r] = query_document(ids, minimum(block.query(r), site.q_len - 1));
    }
    // Number n of the tiles at hand.
    const auto start_of = [&](int n) { return kBands ? shared.warps[warp_id()].first + n * kTileKV : shared.list[n] & ~3; };
    const auto count = [&] { return kBands ? shared.warps[warp_id()].count : walk.count; };
    const auto class_of = [&](int n, const WarpConstants& now) {  // for this warp
        if constexpr (!kBands) return shared.list[n] & 3;
        const KeyRange keys = now.keys;
        const int j0 = now.first + n * kTileKV;
        if (j0 >= keys.full_begin && j0 + kTileKV <= keys.full_end) return static_cast<int>(kFull);
        return static_cast<int>(j0 + kTileKV <= keys.begin || j0 >= keys.end ? kSkip : kPartial);
    };
    const auto copy_key_ids = [&](int n, int start) {
        const TokenIds from = shared.key_documents;
        for (int j = static_cast<int>(threadIdx.x); j < kTileKV; j += kThreads) {
            DocumentId& to = shared.key_ids[n % 2][j];
            const Int key = minimum(start + j, site.kv_len - 1);
            if constexpr (kKeyDocumentsAsRead) {
                copy_number_async(&to, static_cast<const DocumentId*>(from.data) + from.first + key * from.stride);
            } else {
                to = key_document(from, key);
            }
        }
    };
    const auto copy_k_and_v = [&](int n, const WarpConstants& now, const ThreadConstants& mine) {
        const int start = kBands ? now.first + n * kTileKV : start_of(n);
        if constexpr (kDocuments) copy_key_ids(n, start);
        if (start + kTileKV <= now.whole_end) {
            copy_whole_tile<kDimsQK>(shared.k[n % 2], mine.k_offset, mine.k + start * p.k.row, p.k.row);
            commit_copies();
            copy_whole_tile<kColumns>(shared.v[n % 2], mine.v_offset, mine.v + start * p.v.row, p.v.row);
        } else {
            copy_tile(shared.k[n % 2], shared.k_source, start);
            commit_copies();
            copy_tile(shared.v[n % 2], shared.v_source, start);
        }
        commit_copies();
    };
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
    bool worked = false;
    for (bool first = true; walk.next(block, params.mask, shared, first); first = false) {
        if (walk.count == 0) continue;
        worked = true;
        __syncthreads();  // the buffers have been read, the constants are there
        copy_k_and_v(0, shared.warps[warp_id()], shared.threads[threadIdx.x]);
        for (int n = 0; n < count(); ++n) {
            const WarpConstants now = shared.warps[warp_id()];
            const ThreadConstants mine = shared.threads[threadIdx.x];
            if (n == 0) wait_for_copies<1>();
            else wait_for_copies<0>();
            __syncthreads();  // this tile is there, of the first one K, and the one before has been read
            if (n == 0) queries.load(shared);
            if (n + 1 < (kBands ? now.count : walk.count)) copy_k_and_v(n + 1, now, mine);
            const auto await_v = [&] {
                if (n > 0) return;
                if (count() > 1) wait_for_copies<2>();
                else wait_for_copies<0>();
                await_block(kThreads);
            };
            const int tile_class = class_of(n, now);
            if (kBands && tile_class == kSkip) {  // other warps see it
                await_v();
                continue;
            }
            Scores s;
            multiply_scores(s, queries, shared, n % 2);
            if (!kRaw || tile_class != kFull) finish_scores(s, score, block, shared, n % 2, start_of(n), tile_class);
            float factors[kRowsPerThread];
            if (softmax.follow(s, factors)) rescale(o, factors);
            await_v();
            if constexpr (kDropout) {
                softmax.exponentiate(s);
                drop(s, philox, block, start_of(n));
            }
            multiply_output<!kDropout>(o, s, softmax, shared, n % 2);
        }
    }

    if (!worked) {  // nothing to see: but q has to be there before o takes its place
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
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
    if (__any_sync(0xffffffffu, probe != 0)) {
        attend_with_care(params, block, score, philox, walk, shared);
        return;
    }

    float factors[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        const float sum = row_sum(softmax.sum[r]);
        factors[r] = 0;
        if (row_of(r) < rows) {
            const float reference = softmax.reference[r] * softmax.scale;
            factors[r] = finish_row(params, block, row_of(r), reference, sum, lane_id() % 4 == 0);
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
            *reinterpret_cast<Word*>(shared.q.at(row_of(r), column_of(n, 0))) =
                pack(x[r % 2 * 2] * factors[r], x[r % 2 * 2 + 1] * factors[r]);
        }
    }
    __syncwarp();
    constexpr int kChunks = kColumns / 8;
    constexpr bool kEven = 32 % kChunks == 0;  // a lane stays in its columns
    if (kEven && !kPackGQA && params.call.aligned && first_row + 16 * kMTiles <= rows && shared.v_source.dims >= kColumns) {
        const int r = lane_id() / kChunks, c = lane_id() % kChunks * 8;
        Half* to = output_row(params, block, first_row + r) + c;
#pragma unroll 8
        for (int n = 0; n < 16 * kMTiles; n += 32 / kChunks, to += 32 / kChunks * params.call.o.row) {
            *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(shared.q.at(first_row + r + n, c));
        }
        return;
    }
#pragma unroll 1
    for (int n = lane_id(); n < 16 * kMTiles * kChunks; n += 32) {
        const int row = first_row + n / kChunks, c = n % kChunks * 8, left = shared.v_source.dims - c;
        if (row >= rows || left <= 0) continue;
        Half* const to = output_row(params, block, row) + c * params.call.o.dim;
        if (params.call.aligned && left >= 8) {
            *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(shared.q.at(row, c));
        } else {
#pragma unroll 1
            for (int x = 0; x < 8 && x < left; ++x) to[x * params.call.o.dim] = *shared.q.at(row, c + x);
        }
    }
}

}  // namespace tilewise
