// Forward pass on Hopper: FlashAttention-2's tiles with what FlashAttention-3 (Shah et al. 2024) adds, for fp16 and bf16.
//
// One block stays on each SM and takes tiles of queries from a queue. Its warpgroups have roles:
//
//     producer     a warp takes work from the queue and finds out which keys it sees; a thread of another one asks the copy
//                  engine for Q, K and V, as far ahead as there are buffers
//     consumers    kConsumers warpgroups, each with 64 rows of the tile
//
// A consumer starts two products and works on the scores of one while the tensor cores are busy with the other:
//
//     tensor cores    S(n) = Q K(n)^T    o += P(n+1) V(n+1)    S(n-1)         o += P(n) V(n)
//     exp units                          P(n) of S(n)                         P(n-1) of S(n-1)
//
// and so from one tile of queries to the next: the first scores of the next are under way while o of the last is written.
// Warpgroups start their products in turn, so that one is at its scores while the products of another are under way. o is
// rescaled only when a row's scores have grown by 2^8. Tiles of keys come from the last one down, so that a causal mask, or
// the end of the keys, is dealt with first.

#include "spec.cuh"
#include "sm90.cuh"
#include "fragments.cuh"
#include "wgmma.cuh"

namespace tilewise {

constexpr int kPanelsQK = (kDimsQK + kPanel - 1) / kPanel, kPanelsV = (kColumns + kPanel - 1) / kPanel;
constexpr int kConsumerThreads = kConsumers * 128;
constexpr int kTurns = 1 + kConsumers;  // barriers of the turns; those before are the block's and its warpgroups'
using RowSoftmax = RowSoftmaxOf<kSigns != 0>::Type;
static_assert(kThreads == kConsumerThreads + 128, "consumers and the producer");
// What warpgroups give and take is what the block has at its start; who asks for more waits for ever.
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));

// Of the tiles of keys from Work::first on: which some row sees, and which all rows see. Bands need no list.
struct TileList {
    Word seen[kListed / 32], full[kListed / 32];

    __device__ __forceinline__ int below(int n) const {  // the last seen one before n, or a negative number
        if (kBands || n == 0) return n - 1;
        int w = (n - 1) / 32;
        Word bits = seen[w] & 0xffffffffu >> (31 - (n - 1) % 32);
        while (bits == 0 && w > 0) bits = seen[--w];
        return w * 32 + 31 - __clz(static_cast<int>(bits));
    }
};

struct Work {  // one tile of queries
    int i0, head;  // its first query, and its head among those of all sequences
    Site site;     // where it is found out ahead
    int q_row, q_batch, h, kv_row, kv_batch, head_kv;  // where it lies in q, and its key 0 in k and v
    int kv_len;
    int first, count;  // tiles of keys: where they start, how many there are; 0: there is no more work
    struct {
        int full_begin, full_end;  // bands: keys that all its rows see
        int passes;                // bands: it sees nothing of the last tile, and another one comes
    } rows[kConsumers];
    TileList list;
    TokenIds queries, keys;  // of its sequence, where the mask is of documents
};
// Where it takes a while to find out what is next, it is found out while there is work still.
constexpr bool kAhead = kTable || !kBands;
constexpr int kWorks = kAhead ? 2 : 1;
// With more tiles of keys than this, what is next is asked for when nearly all of them have been: what one block takes too
// early, another could begin sooner, and the last block to end is one that took too much.
constexpr int kLong = 8;

struct __align__(1024) Shared {
    Half q[kQBuffers][kPanelsQK][kTileQ * kPanel];
    Half k[kKStages][kPanelsQK][kTileKV * kPanel];
    Half v[kVStages][kPanelsV][kTileKV * kPanel];
    Work work[kWorks];
    Barrier work_full[kWorks], work_empty[kWorks];
    Barrier q_full[kQBuffers], q_empty[kQBuffers];
    Barrier k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};
static_assert(sizeof(Shared) <= kSharedBytes, "the host asks for kSharedBytes");

struct Params {
    abi::TensorMap q, k, v;
    abi::Forward call;
    abi::Sm90Forward plan;
    MaskData mask;
};

TW_DEVICE Block block_of(const Params& params, int i0, int head) {
    const abi::Problem& p = params.call.problem;
    const Word heads = static_cast<Word>(p.num_heads_q), b = static_cast<Word>(head) / heads, h = static_cast<Word>(head) - b * heads;
    Site site = make_site(p, kTable ? p.sequences : nullptr, b, h);
    if (kBands) site.q_token = site.kv_token = 0;  // they are for arrays
    return {p, 1, h, i0, site};
}

// ---------------------------------------------------------------------------------------------------------------------
// Producer

struct SequenceTiles {  // of queries of one head; tiles are counted over all sequences
    int number;         // of the sequence; < 0: there are no more
    Word before, count;
};
// A warp: the sequence with this tile.
TW_DEVICE SequenceTiles sequence_of(const abi::Problem& p, Word tile) {
    if (!p.sequences) {
        const Word count = static_cast<Word>(ceil_div(p.q_rows, Int{kTileQ})), b = tile / count;
        return {static_cast<int>(b), b * count, count};
    }
    const auto before = [&](int b) { return static_cast<Word>(p.sequences[b].q_tiles_before); };
    int low = 0, high = static_cast<int>(p.num_sequences);  // before(low) <= tile < before(high)
    if (tile >= before(high)) return {-1, 0, 0};
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, at = low + (lane_id() + 1) * step;
        low += __popc(__ballot_sync(0xffffffffu, at < high && before(at) <= tile)) * step;
        high = low + step < high ? low + step : high;
    }
    return {low, before(low), before(low + 1) - before(low)};
}

// A warp: what tile of queries is next, and which keys it sees.
TW_DEVICE void schedule(const Params& params, Shared& shared) {
    const abi::Problem& p = params.call.problem;
    const abi::Sm90Forward& plan = params.plan;
    const int lane = lane_id();
    Ring<kWorks> works;
    if (lane == 0) Queue::open(plan.queue);
    bool is_long = false;
    const Int tiles = kDocuments && plan.end_of_documents && plan.end_of_documents->q_tiles_before > 0 ? 0 : plan.tiles;
    const auto next = [&] {
        // What a block takes long before it has time, another one might do sooner.
        if (kAhead && is_long) shared.work_empty[works.at].wait(works.phase ^ 1u);
        int number = 0;
        if (lane == 0) number = Queue::next(plan.queue);
        return __shfl_sync(0xffffffffu, number, 0);
    };
    for (int number = static_cast<int>(blockIdx.x); number < tiles; number = next()) {
        Word n = static_cast<Word>(number), q_tiles = static_cast<Word>(plan.q_tiles), heads = static_cast<Word>(plan.tiles) / q_tiles;
        int head = 0;
        if (kTable) {  // one sequence after the other
            heads = static_cast<Word>(p.num_heads_q);
            const SequenceTiles sequence = sequence_of(p, n / heads);
            if (sequence.number < 0) break;
            n -= sequence.before * heads, q_tiles = sequence.count, head = sequence.number * static_cast<int>(heads);
        }
        const Word at_once = static_cast<Word>(plan.heads_at_once);
        const Word section = n / (at_once * q_tiles), rest = n - section * (at_once * q_tiles);
        const Word width = heads - section * at_once < at_once ? heads - section * at_once : at_once, row = rest / width;
        const Word tile = plan.last_first ? q_tiles - 1 - row : row;
        head += static_cast<int>(section * at_once + rest - row * width);
        const int i0 = static_cast<int>(tile) * kTileQ;
        const Block block = block_of(params, i0, head);
        const Site& site = block.site;

        if (kAhead) shared.work_empty[works.at].wait(works.phase ^ 1u);
        Work& work = shared.work[works.at];
        if (lane == 0) {
            work.i0 = i0, work.head = head;
            work.q_row = static_cast<int>(site.q_row0) + i0, work.q_batch = static_cast<int>(batch_of(p.packed_q, site.b));
            work.h = static_cast<int>(site.h), work.head_kv = static_cast<int>(site.head_kv);
            work.kv_row = static_cast<int>(site.kv_row0), work.kv_batch = static_cast<int>(batch_of(p.packed_kv, site.b));
            work.kv_len = static_cast<int>(site.kv_len);
            if (kAhead) work.site = site;
            if (kDocuments) work.queries = query_documents(params.mask, site), work.keys = key_documents(params.mask, site);
        }
        // A lane for each warpgroup; the first and the last one's rows tell of all.
        const int group = lane < kConsumers ? lane : kConsumers - 1;
        const KeyRange mine = keys_of(block, params.mask, group * 64, group * 64 + 63);
        const int begin = __shfl_sync(0xffffffffu, mine.begin, 0), end = __shfl_sync(0xffffffffu, mine.end, kConsumers - 1);
        int first = begin / kTileKV * kTileKV, count = end > begin ? (end - first + kTileKV - 1) / kTileKV : 0;
        if constexpr (!kBands) {
            bool any = false;
            for (int t = 0; t < count; t += 32) {
                const int c = t + lane < count ? class_within(p, params.mask, site, i0, first + (t + lane) * kTileKV) : kSkip;
                const Word seen_here = __ballot_sync(0xffffffffu, c != kSkip), full = __ballot_sync(0xffffffffu, c == kFull);
                any |= seen_here != 0;
                if (lane == 0) work.list.seen[t / 32] = seen_here, work.list.full[t / 32] = full;
            }
            if (!any) count = 0;
        }
        if (count == 0) {  // nothing to see: a tile beyond the last key
            if (!kBands && lane == 0) work.list.seen[0] = 1, work.list.full[0] = 0;
            first = (static_cast<int>(site.kv_len) + kTileKV - 1) / kTileKV * kTileKV, count = 1;
        }
        if (lane == 0) work.first = first, work.count = count;
        is_long = count > kLong;
        if (kBands && lane < kConsumers) {
            work.rows[lane] = {mine.full_begin, mine.full_end, count > 1 && first + (count - 1) * kTileKV >= mine.end};
        }
        __syncwarp();
        if (lane == 0) shared.work_full[works.at].arrive();
        if (!kAhead) shared.work_empty[works.at].wait(works.phase);
        works.advance();
    }
    if (kAhead) shared.work_empty[works.at].wait(works.phase ^ 1u);
    if (lane > 0) return;
    shared.work[works.at].count = 0;
    shared.work_full[works.at].arrive();
    Queue::leave(plan.queue);
}

// Asks for one tile, as soon as the next buffer of its ring is free.
template <int kBuffers, int kPanels, int kNumbers>
TW_DEVICE void ask(Half (&to)[kBuffers][kPanels][kNumbers], Barrier (&full)[kBuffers], Barrier (&empty)[kBuffers], Ring<kBuffers>& next,
                   const abi::TensorMap& map, int row, int head, int batch) {
    empty[next.at].wait(next.phase ^ 1u);
    full[next.at].expect(sizeof to[0]);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) copy_panel(to[next.at][panel], map, full[next.at], panel * kPanel, row, head, batch);
    next.advance();
}

// A thread: asks for what the work needs.
TW_DEVICE void copy(const Params& params, Shared& shared) {
    Ring<kWorks> works;
    Ring<kQBuffers> queries;
    Ring<kKStages> keys;
    Ring<kVStages> values;
    for (;; works.advance()) {
        shared.work_full[works.at].wait(works.phase);
        const Work& work = shared.work[works.at];
        const int first = work.kv_row + work.first, count = work.count, b = work.kv_batch, head_kv = work.head_kv;
        if (count == 0) return;
        const auto ask_k = [&](int n) {
            ask(shared.k, shared.k_full, shared.k_empty, keys, params.k, first + n * kTileKV, head_kv, b);
        };
        int n = work.list.below(count);
        ask_k(n);
        ask(shared.q, shared.q_full, shared.q_empty, queries, params.q, work.q_row, work.h, work.q_batch);
#pragma unroll 1
        while (n >= 0) {
            if (!kAhead && n == (count > kLong ? 1 : count - 1)) shared.work_empty[works.at].arrive();
            const int following = work.list.below(n);
            if (following >= 0) ask_k(following);
            ask(shared.v, shared.v_full, shared.v_empty, values, params.v, first + n * kTileKV, head_kv, b);
            n = following;
        }
        if (kAhead) shared.work_empty[works.at].arrive();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Consumers: a warpgroup each

struct Probabilities {  // P in the dtype of V, as the left operand of products 16 keys deep
    Word words[kTileKV / 16][4];

    __device__ __forceinline__ void set(const Scores& s) {
#pragma unroll
        for (int j = 0; j < kTileKV / 16; ++j) {
            const float(&left)[4] = s[0][2 * j], (&right)[4] = s[0][2 * j + 1];
            words[j][0] = pack(left[0], left[1]), words[j][1] = pack(left[2], left[3]);
            words[j][2] = pack(right[0], right[1]), words[j][3] = pack(right[2], right[3]);
        }
    }
};

struct Closed {  // what the rows of this thread need at their end
    float factor[kRowsPerThread];
};

// Writes lse. Can be done before o is there.
TW_DEVICE Closed close_rows(const Params& params, const Block& block, const RowSoftmax& softmax) {
    const abi::Rows& lse = params.call.lse;
    Closed closed;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        const int row = as_unknown(row_of(r));
        float reference = softmax.power(r), sum = row_sum(softmax.sum[r]);
        closed.factor[r] = close_row(block, row, reference, sum);
        if (lse.data && lane_id() % 4 == 0 && row < block.rows()) {
            const Int b = batch_of(block.p.packed_q, block.site.b);
            static_cast<float*>(lse.data)[b * lse.batch + block.h * lse.head + (block.site.q_row0 + block.i0 + row) * lse.row] =
                lse_of(reference, sum);
        }
    }
    return closed;
}

struct __align__(8) Pair {
    Word words[2];
};

// o of the rows of this warp. A quad of lanes has a row, in pairs of numbers. Two lanes swap pairs of two fragments, so that
// each writes 8 bytes, and the quad the 32 bytes of a sector. No branches between: a store waits for none before it.
TW_DEVICE void write_output(const Params& params, const Block& block, const Output& o, const Closed& closed) {
    // Addresses that depend on the thread alone would otherwise stay in registers from tile to tile.
    const int thread = as_unknown(static_cast<int>(threadIdx.x)), lane = thread % 32;
    const bool odd = lane & 1;
    const int rows = block.rows(), dims = static_cast<int>(block.p.head_dim_v);
    const abi::Tensor& out = params.call.o;
    const Int b = batch_of(block.p.packed_q, block.site.b);
    const int first_row = thread / 32 * 16 + lane / 4;
    Half* const to = static_cast<Half*>(out.data) + b * out.batch + block.h * out.head +
                     (block.site.q_row0 + block.i0 + first_row) * out.row + lane % 4 / 2 * 4 + (odd ? 8 : 0);
    const int left = dims - (odd ? 8 : 0);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        const bool inside = first_row + r * 8 < rows;
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 2) {
            const Word left_word = pack(o[0][n][2 * r] * closed.factor[r], o[0][n][2 * r + 1] * closed.factor[r]);
            const Word right_word = pack(o[0][n + 1][2 * r] * closed.factor[r], o[0][n + 1][2 * r + 1] * closed.factor[r]);
            const Word got = __shfl_xor_sync(0xffffffffu, odd ? left_word : right_word, 1);
            if (inside && n * 8 < left) {
                *reinterpret_cast<Pair*>(to + r * 8 * out.row + n * 8) = odd ? Pair{{got, right_word}} : Pair{{left_word, got}};
            }
        }
    }
}

// Rows of V from `rows` on, which belong to another sequence or to none: 0 times what is there may be NaN. Both
// warpgroups do it, rather than wait for each other.
TW_DEVICE void clear_rows(Half (&v)[kPanelsV][kTileKV * kPanel], int rows, int group) {
    constexpr int kChunks = kPanel / 8;
#pragma unroll 1
    for (int n = as_unknown(static_cast<int>(threadIdx.x)) % 128; n < kPanelsV * kTileKV * kChunks; n += 128) {
        const int row = n / kChunks % kTileKV;
        if (row >= rows) *reinterpret_cast<Chunk*>(v[n / kChunks / kTileKV] + row * kPanel + n % kChunks * 8) = Chunk{};
    }
    fence_copies();
    await_threads(1 + group, 128);
}

// Bits of keys that the rows' documents do not have go. A lane reads the ids of every 32nd key, and shows them to others:
// their low words, and the high ones only if those differ.
TW_DEVICE void see_documents(Word (&seen)[kRowsPerThread][2], const Work& work, int j0) {
    constexpr int kReads = (kTileKV + 31) / 32, kWords = sizeof(DocumentId) / sizeof(Word);
    const int last_key = work.kv_len - 1, last_query = static_cast<int>(work.site.q_len) - 1;
    const auto at_most = [](int n, int limit) { return n < limit ? n : limit; };
    Word of_key[kReads], of_row[kRowsPerThread];
#pragma unroll 1
    for (int word = 0; word < kWords; ++word) {
        int high = 0;
        bool same = true;
        const auto part = [&](DocumentId id, bool is_first) {
            if (kWords == 1) return static_cast<Word>(id);
            const int above = static_cast<int>(Int{id} >> 32);
            if (is_first) high = __shfl_sync(0xffffffffu, above, 0);
            same &= above == high;
            return word == 0 ? static_cast<Word>(id) : static_cast<Word>(above);
        };
#pragma unroll
        for (int n = 0; n < kReads; ++n) of_key[n] = part(key_document(work.keys, at_most(j0 + n * 32 + lane_id(), last_key)), n == 0);
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            const DocumentId id = query_document(work.queries, at_most(work.i0 + row_of(r), last_query));
            of_row[r] = part(id, false);
            if (id < 0) seen[r][0] = seen[r][1] = 0;
        }
#pragma unroll
        for (int n = 0; n < kTileKV / 8; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const Word id = __shfl_sync(0xffffffffu, of_key[n / 4], column_of(n % 4, c));
#pragma unroll
                for (int r = 0; r < kRowsPerThread; ++r) {
                    if (id != of_row[r]) seen[r][c] &= ~(1u << n);
                }
            }
        }
        if (__all_sync(0xffffffffu, same)) break;
    }
}

// Bits of keys that any other mask hides go, one key of a lane after another: its text stands here once.
TW_DEVICE void see_mask(Word (&seen)[kRowsPerThread][2], const Block& block, const MaskData& mask, int j0) {
    constexpr int kBits = 16;
    static_assert(kTileKV / 8 <= kBits && kRowsPerThread == 2, "64 bits are all that a lane has");
    const auto place = [](int r, int c) { return (r * 2 + c) * kBits; };
    unsigned long long left = 0;
    for (int r = 0; r < 2; ++r) {
        for (int c = 0; c < 2; ++c) left |= static_cast<unsigned long long>(seen[r][c]) << place(r, c);
    }
    unsigned long long hidden = 0;
#pragma unroll 1
    while (left != 0) {
        const int bit = __ffsll(static_cast<long long>(left)) - 1, at = bit / kBits;
        left &= left - 1;
        const Int i = block.query(at < 2 ? row_of(0) : row_of(1)), j = j0 + column_of(bit % kBits, at % 2);
        if (!visible(block.p, mask, block.site, i, j)) hidden |= 1ull << bit;
    }
    __syncwarp();
    for (int r = 0; r < 2; ++r) {
        for (int c = 0; c < 2; ++c) seen[r][c] &= ~static_cast<Word>(hidden >> place(r, c));
    }
}

TW_DEVICE void consume(const Params& params, Shared& shared) {
    const abi::Problem& p = params.call.problem;
    const int group = __shfl_sync(0xffffffffu, warp_id() / 4, 0);  // the compiler sees that it is the same in all lanes
    Ring<kWorks> works;
    Ring<kQBuffers> queries;
    Ring<kKStages> keys;
    Ring<kVStages> values;
    int i0 = 0, head = 0, first = 0, n = 0;  // queries, and the tile of keys that is worked on
    int slot = 0;                            // of its work
    int kv_len = 0, v_rows = 0;              // of a sequence, and of its tile of V from there on
    int full_begin = 0, full_end = 0, passes = 0;  // as in Work
    Scores s;
    Output o;
    Probabilities probabilities{};
    RowSoftmax softmax(kRaw ? static_cast<float>(p.softmax_scale) * kLog2E : kLog2E);
    float factors[kRowsPerThread];

    const auto leave = [](Barrier& barrier) {
        __syncwarp();
        if (lane_id() == 0) barrier.arrive();
    };
    const auto leave_k = [&] { leave(shared.k_empty[keys.at]), keys.advance(); };
    const auto leave_v = [&] { leave(shared.v_empty[values.at]), values.advance(); };
    const auto await_k = [&] { shared.k_full[keys.at].wait(keys.phase); };
    const auto await_v = [&] {
        shared.v_full[values.at].wait(values.phase);
        if (kTable && v_rows < kTileKV) clear_rows(shared.v[values.at], v_rows, group);
    };
    // Warpgroups start their products in turn, so that one has the tensor cores while others are at their scores. All have a
    // turn for each tile of keys.
    const auto await_turn = [&] {
        if (kInTurn) await_threads(kTurns + group, 256);
    };
    const auto pass_turn = [&] {
        if (kInTurn) come_by(kTurns + (group + 1 == kConsumers ? 0 : group + 1), 256);
    };
    if (group + 1 == kConsumers) pass_turn();
    // Goes to the next tile of queries, if there is one, and to its first tile of keys.
    const auto enter = [&] {
        shared.work_full[works.at].wait(works.phase);
        const Work& work = shared.work[works.at];
        const bool more = work.count > 0;
        if (more) {
            i0 = work.i0, head = work.head, first = work.first, kv_len = work.kv_len;
            if (kBands) {
                full_begin = work.rows[group].full_begin, full_end = work.rows[group].full_end;
                passes = work.rows[group].passes;
                n = work.count - 1 - passes;
            } else {
                n = work.list.below(work.count);
            }
        }
        slot = works.at;
        if (!kAhead) leave(shared.work_empty[slot]);
        works.advance();
        return more;
    };
    const auto list = [&]() -> const TileList& { return shared.work[slot].list; };
    const auto block_at = [&](int i0, int head, int slot) -> Block {
        if constexpr (kAhead) return {p, 1, shared.work[slot].site.h, i0, shared.work[slot].site};
        return block_of(params, i0, head);
    };
    const auto start_scores = [&] {
        begin_products();
        start_score_product(s, by_rows_of(shared.q[queries.at][0] + group * 64 * kPanel),
                            by_rows_of(shared.k[keys.at][0]));
        commit_products();
    };
    const auto start_output = [&] {
        begin_products();
        start_output_product(o, probabilities.words, by_columns_of(shared.v[values.at][0], kTileKV));
        commit_products();
    };
    // From products to P; whether o is to be rescaled.
    const auto finish_scores = [&](bool is_first) {
        const int j0 = first + n * kTileKV;
        v_rows = kv_len - j0;
        if constexpr (!kRaw) {
            const Block block = block_at(i0, head, slot);
            apply_options(s, ScoreContext(p, params.mask, block.site), block, j0);
        }
        const bool full = kBands ? j0 >= full_begin && j0 + kTileKV <= full_end : list().full[n / 32] >> n % 32 & 1u;
        if (!full) {
            const Block block = block_at(i0, head, slot);
            Word seen[kRowsPerThread][2];
            see_hulls(seen, block, params.mask, j0);
            if constexpr (kDocuments) see_documents(seen, shared.work[slot], j0);
            else if constexpr (!kBands) see_mask(seen, block, params.mask, j0);
            hide(s, seen);
        }
        bool grown = false;
        if (is_first) softmax.start(s);
        else grown = softmax.follow(s, factors);
        softmax.exponentiate(s);
        if constexpr (kDropout) {
            const Block block = block_at(i0, head, slot);
            drop(s, Philox::make(p, block.site), block, j0);
        }
        return grown;
    };

    for (bool first_work = true;; first_work = false) {
        // Two products between two tiles of queries, too; ptxas gives up on overlapping them where a path has only one.
        // Before the first tile, and after the last, one of them is of what happens to be there, and is not used.
        const int i0_before = i0, head_before = head, slot_before = slot;
        const bool more = enter();
        if (more && passes) await_turn(), pass_turn();
        const auto start_first_scores = [&] {
            if (more) {
                // One tile may pass: to wait for a third one before the v of the tile before is free would be forever.
                if (passes) await_k(), leave_k();
                shared.q_full[queries.at].wait(queries.phase);
                await_k();
            }
            if (kQBuffers > 1) await_turn();
            start_scores();
            if (kQBuffers == 1) pass_turn();
        };
        const auto start_last_output = [&] {
            if (!first_work) await_v();
            if (kQBuffers == 1) await_turn();
            start_output();
            if (kQBuffers > 1) pass_turn();
        };
        const auto close = [&] {
            Closed closed{};
            if (!first_work) closed = close_rows(params, block_at(i0_before, head_before, slot_before), softmax);
            return closed;
        };
        const auto write = [&](const Closed& closed) {
            hold(o);
            if (first_work) return;
            leave_v();
            write_output(params, block_at(i0_before, head_before, slot_before), o, closed);
            if (kAhead) leave(shared.work_empty[slot_before]);
        };
        const auto finish_first_scores = [&] {
            if (more) leave_k(), finish_scores(true);
        };
        if constexpr (kQBuffers > 1) {  // the next q is there already
            start_first_scores();
            start_last_output();
            const Closed closed = close();
            wait_for_products<1>();
            hold(s);
            finish_first_scores();
            wait_for_products<0>();
            write(closed);
        } else {
            start_last_output();
            start_first_scores();
            const Closed closed = close();
            wait_for_products<1>();
            write(closed);
            wait_for_products<0>();
            hold(s);
            finish_first_scores();
        }
        if (!more) break;
        if (passes) shared.v_full[values.at].wait(values.phase), leave_v();
#pragma unroll
        for (int f = 0; f < kColumns / 8; ++f) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[0][f][e] = 0;
        }
        probabilities.set(s);
#pragma unroll 1
        for (int following = list().below(n); following >= 0; following = list().below(n)) {
            await_k();
            await_turn();
            start_scores();
            await_v();
            start_output();
            pass_turn();
            n = following;
            wait_for_products<1>();
            hold(s);
            leave_k();
            const bool grown = finish_scores(false);
            wait_for_products<0>();
            hold(o);
            leave_v();
            if (grown) rescale(o, factors);
            probabilities.set(s);
        }
        leave(shared.q_empty[queries.at]), queries.advance();
    }
}

TW_KERNEL(fwd_sm90, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(as_unknown_place(memory));
    if (threadIdx.x == 0) {
        constexpr int kWarps = kConsumers * 4;
        for (int n = 0; n < kWorks; ++n) shared.work_full[n].init(1), shared.work_empty[n].init(kWarps + 1);
        for (int n = 0; n < kQBuffers; ++n) shared.q_full[n].init(1), shared.q_empty[n].init(kWarps);
        for (int n = 0; n < kKStages; ++n) shared.k_full[n].init(1), shared.k_empty[n].init(kWarps);
        for (int n = 0; n < kVStages; ++n) shared.v_full[n].init(1), shared.v_empty[n].init(kWarps);
        publish_barriers();
    }
    __syncthreads();
    await_kernel_before();
    let_next_kernel_start();
    if (warp_id() >= kConsumers * 4) {
        give_registers<kProducerRegisters>();
        if (threadIdx.x == kConsumerThreads) copy(params, shared);
        if (warp_id() == kConsumers * 4 + 1) schedule(params, shared);
    } else {
        take_registers<kConsumerRegisters>();
        consume(params, shared);
    }
}

}  // namespace tilewise
