// Forward pass on Hopper: FlashAttention-2's tiles with what FlashAttention-3 (Shah et al. 2024) adds, for fp16 and bf16.
//
// One block stays on each SM and takes tiles of queries from a queue. Its warpgroups have roles:
//
//     producer     one thread takes work from the queue, another asks the copy engine for Q, K and V, as far ahead as
//                  there are buffers
//     consumers    kConsumers warpgroups, each with 64 rows of the tile
//
// A consumer starts two products and works on the scores of one while the tensor cores are busy with the other:
//
//     tensor cores    S(n) = Q K(n)^T    o += P(n+1) V(n+1)    S(n-1)         o += P(n) V(n)
//     exp units                          P(n) of S(n)                         P(n-1) of S(n-1)
//
// and so from one tile of queries to the next: the first scores of the next are under way while o of the last is written.
// Softmax is that of fwd_mma: o is rescaled only when a row's scores have grown by 2^8. Tiles of keys come from the last
// one down, so that a causal mask, or the end of the keys, is dealt with first.

#include "spec.cuh"
#include "sm90.cuh"
#include "fragments.cuh"
#include "wgmma.cuh"

namespace tilewise {

constexpr int kPanelsQK = (kDimsQK + kPanel - 1) / kPanel, kPanelsV = (kColumns + kPanel - 1) / kPanel;
constexpr int kQBytes = kPanelsQK * kTileQ * kPanel * 2;
constexpr int kKBytes = kPanelsQK * kTileKV * kPanel * 2, kVBytes = kPanelsV * kTileKV * kPanel * 2;
constexpr int kConsumerThreads = kConsumers * 128;
static_assert(kThreads == kConsumerThreads + 128, "consumers and the producer");

struct Work {  // one tile of queries
    int i0, head;      // its first query, and its head among those of all sequences
    int b, h, head_kv;
    int first, count;  // of the tiles of keys that some row sees: where they start, how many; 0: there is no more work
    struct {
        int full_begin, full_end;  // keys that all its rows see
        int passes;                // it sees nothing of the last tile, and another one comes
    } rows[kConsumers];
};

struct __align__(1024) Shared {
    Half q[kQBuffers][kPanelsQK][kTileQ * kPanel];
    Half k[kKStages][kPanelsQK][kTileKV * kPanel];
    Half v[kVStages][kPanelsV][kTileKV * kPanel];
    Work work;
    Barrier work_full, work_empty;
    Barrier q_full[kQBuffers], q_empty[kQBuffers];
    Barrier k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};
static_assert(sizeof(Shared) + 1024 <= kSharedBytes, "the host asks for kSharedBytes");

struct Params {
    abi::TensorMap q, k, v;
    abi::Forward call;
    abi::Sm90Forward plan;
    MaskData mask;
};

TW_DEVICE Block block_of(const Params& params, int i0, int head) {
    const abi::Problem& p = params.call.problem;
    const Word heads = static_cast<Word>(p.num_heads_q), b = static_cast<Word>(head) / heads, h = static_cast<Word>(head) - b * heads;
    return {p, 1, h, i0, make_site(p, b, h)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Producer: two threads

TW_DEVICE void schedule(const Params& params, Shared& shared) {
    const abi::Queue& queue = params.plan.queue;
    Ring<1> works;
    Queue::open(queue);
    for (int number = static_cast<int>(blockIdx.x); number < params.plan.tiles; number = Queue::next(queue)) {
        const Word q_tiles = static_cast<Word>(params.plan.q_tiles), at_once = static_cast<Word>(params.plan.heads_at_once);
        const Word all = static_cast<Word>(params.plan.tiles) / q_tiles, n = static_cast<Word>(number);
        const Word section = n / (at_once * q_tiles), rest = n - section * (at_once * q_tiles);
        const Word width = all - section * at_once < at_once ? all - section * at_once : at_once, row = rest / width;
        const int head = static_cast<int>(section * at_once + rest - row * width);
        const Block block = block_of(params, static_cast<int>(params.plan.last_first ? q_tiles - 1 - row : row) * kTileQ, head);

        Work& work = shared.work;
        work.i0 = static_cast<int>(block.i0), work.head = head;
        work.b = static_cast<int>(block.site.b), work.h = static_cast<int>(block.h);
        work.head_kv = static_cast<int>(block.site.head_kv);
        const KeyRange seen = keys_of(block, params.mask, 0, block.rows() - 1);
        int first = seen.begin / kTileKV * kTileKV, count = (seen.end - first + kTileKV - 1) / kTileKV;
        if (seen.end <= seen.begin) {  // nothing to see: a tile beyond the last key, where all is zero
            first = (static_cast<int>(block.site.kv_len) + kTileKV - 1) / kTileKV * kTileKV, count = 1;
        }
        work.first = first, work.count = count;
#pragma unroll 1
        for (int group = 0; group < kConsumers; ++group) {
            const KeyRange mine = keys_of(block, params.mask, group * 64, group * 64 + 63);
            work.rows[group] = {mine.full_begin, mine.full_end, count > 1 && first + (count - 1) * kTileKV >= mine.end};
        }
        shared.work_full.arrive();
        // Not before nearly all has been asked for: what one block takes too early, another could begin sooner.
        shared.work_empty.wait(works.phase);
        works.advance();
    }
    shared.work.count = 0;
    shared.work_full.arrive();
    Queue::leave(queue);
}

TW_DEVICE void copy(const Params& params, Shared& shared) {
    Ring<1> works;
    Ring<kQBuffers> queries;
    Ring<kKStages> keys;
    Ring<kVStages> values;
    for (;; works.advance()) {
        shared.work_full.wait(works.phase);
        const Work& work = shared.work;
        const int first = work.first, count = work.count, b = work.b, head_kv = work.head_kv;
        if (count == 0) return;
        const auto copy_k = [&](int n) {
            Barrier& full = shared.k_full[keys.at];
            shared.k_empty[keys.at].wait(keys.phase ^ 1u);
            full.expect(kKBytes);
#pragma unroll
            for (int panel = 0; panel < kPanelsQK; ++panel)
                copy_panel(shared.k[keys.at][panel], params.k, full, panel * kPanel, first + n * kTileKV, head_kv, b);
            keys.advance();
        };
        const auto copy_v = [&](int n) {
            Barrier& full = shared.v_full[values.at];
            shared.v_empty[values.at].wait(values.phase ^ 1u);
            full.expect(kVBytes);
#pragma unroll
            for (int panel = 0; panel < kPanelsV; ++panel)
                copy_panel(shared.v[values.at][panel], params.v, full, panel * kPanel, first + n * kTileKV, head_kv, b);
            values.advance();
        };
        copy_k(count - 1);
        Barrier& full = shared.q_full[queries.at];
        shared.q_empty[queries.at].wait(queries.phase ^ 1u);
        full.expect(kQBytes);
#pragma unroll
        for (int panel = 0; panel < kPanelsQK; ++panel)
            copy_panel(shared.q[queries.at][panel], params.q, full, panel * kPanel, work.i0, work.h, b);
        queries.advance();
#pragma unroll 1
        for (int n = count - 1; n >= 0; --n) {
            if (n == (count > 1)) shared.work_empty.arrive();  // what comes next takes a moment to find
            if (n > 0) copy_k(n - 1);
            copy_v(n);
        }
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

// Of 4 x 4 words, one row in each lane of a quad, the columns.
TW_DEVICE void transpose(Word (&w)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const Word got = __shfl_xor_sync(0xffffffffu, odd ? w[n] : w[n + 1], 1);
        (odd ? w[n] : w[n + 1]) = got;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const Word got = __shfl_xor_sync(0xffffffffu, high ? w[n] : w[n + 2], 2);
        (high ? w[n] : w[n + 2]) = got;
    }
}

// o and lse of the rows of this warp. A quad of lanes has a row, in pairs of numbers, and writes it by 16 bytes each.
TW_DEVICE void write_output(const Params& params, const Block& block, const Output& o, const Softmax& softmax) {
    // Addresses that depend on the thread alone would otherwise stay in registers from tile to tile.
    const int thread = as_unknown(static_cast<int>(threadIdx.x)), lane = thread % 32;
    const int rows = block.rows(), dims = static_cast<int>(block.p.head_dim_v);
    const abi::Rows& lse = params.call.lse;
    const abi::Tensor& out = params.call.o;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        const int row = thread / 32 * 16 + r * 8 + lane / 4;
        float reference = softmax.reference[r] * softmax.scale, sum = softmax.row_sum(r);
        const float factor = close_row(block, row, reference, sum);
        if (lse.data && lane % 4 == 0 && row < rows) {
            static_cast<float*>(lse.data)[block.site.b * lse.batch + block.h * lse.head + (block.i0 + row) * lse.row] =
                lse_of(reference, sum);
        }
        Half* const to = static_cast<Half*>(out.data) + block.site.b * out.batch + block.h * out.head + (block.i0 + row) * out.row;
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 4) {
            Word words[4];
#pragma unroll
            for (int m = 0; m < 4; ++m)
                words[m] = n + m < kColumns / 8 ? pack(o[0][n + m][2 * r] * factor, o[0][n + m][2 * r + 1] * factor) : 0;
            transpose(words, lane);
            const int c = (n + lane % 4) * 8;
            if (row >= rows || c >= dims) continue;
            if (params.call.aligned && c + 8 <= dims) {
                *reinterpret_cast<Chunk*>(to + c) = {{words[0], words[1], words[2], words[3]}};
            } else {
#pragma unroll
                for (int x = 0; x < 8; ++x) {
                    if (c + x < dims) to[(c + x) * out.dim] = static_cast<Half>(words[x / 2] >> x % 2 * 16);
                }
            }
        }
    }
}

TW_DEVICE void consume(const Params& params, Shared& shared) {
    const abi::Problem& p = params.call.problem;
    const int group = __shfl_sync(0xffffffffu, warp_id() / 4, 0);  // the compiler sees that it is the same in all lanes
    const float scale = kRaw ? static_cast<float>(p.softmax_scale) * kLog2E : kLog2E;
    Ring<1> works;
    Ring<kQBuffers> queries;
    Ring<kKStages> keys;
    Ring<kVStages> values;
    int i0 = 0, head = 0, j0 = 0, n = 0;  // queries, and the tile of keys that is worked on, the last but n
    int full_begin = 0, full_end = 0, passes = 0;  // as in Work
    Scores s;
    Output o;
    Probabilities probabilities;
    Softmax softmax(scale);
    float factors[kRowsPerThread];

    const auto leave = [](Barrier& barrier) {
        __syncwarp();
        if (lane_id() == 0) barrier.arrive();
    };
    const auto leave_k = [&] { leave(shared.k_empty[keys.at]), keys.advance(); };
    const auto leave_v = [&] { leave(shared.v_empty[values.at]), values.advance(); };
    const auto await_k = [&] { shared.k_full[keys.at].wait(keys.phase); };
    const auto await_v = [&] { shared.v_full[values.at].wait(values.phase); };
    // Goes to the next tile of queries, if there is one, and to its first tile of keys.
    const auto enter = [&] {
        shared.work_full.wait(works.phase);
        const Work& work = shared.work;
        const bool more = work.count > 0;
        if (more) {
            i0 = work.i0, head = work.head;
            full_begin = work.rows[group].full_begin, full_end = work.rows[group].full_end;
            passes = work.rows[group].passes;
            n = work.count - 1 - passes, j0 = work.first + n * kTileKV;
        }
        leave(shared.work_empty), works.advance();
        return more;
    };
    const auto start_scores = [&] {
        await_k();
        begin_products();
        start_score_product(s, by_rows_of(shared.q[queries.at][0] + group * 64 * kPanel, kTileQ),
                            by_rows_of(shared.k[keys.at][0], kTileKV));
        commit_products();
    };
    const auto start_first_scores = [&] {
        // One tile may pass: to wait for a third one before the v of the tile before is free would be forever.
        if (passes) await_k(), leave_k();
        shared.q_full[queries.at].wait(queries.phase);
        start_scores();
    };
    const auto start_output = [&] {
        await_v();
        begin_products();
        start_output_product(o, probabilities.words, by_columns_of(shared.v[values.at][0], kTileKV));
        commit_products();
    };
    // From products to P; whether o is to be rescaled.
    const auto finish_scores = [&] {
        if constexpr (!kRaw) {
            const Block block = block_of(params, i0, head);
            apply_options(s, ScoreContext(p, params.mask, block.site), block, j0);
        }
        if (j0 < full_begin || j0 + kTileKV > full_end) {
            const Block block = block_of(params, i0, head);
            Word visible[kRowsPerThread][2];
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) see_hull(visible[r], block, params.mask, row_of(r), j0);
            hide(s, visible);
        }
        const bool grown = softmax.raise_reference(s, factors);
        const Shifts shifts = softmax.shifts();
#pragma unroll
        for (int f = 0; f < kTileKV / 8; ++f) softmax.exponentiate(s[0][f], shifts, 0);
        if constexpr (kDropout) {
            const Block block = block_of(params, i0, head);
            drop(s, Philox::make(p, block.site), block, j0);
        }
        return grown;
    };

    const auto clear = [&] {
#pragma unroll
        for (int f = 0; f < kColumns / 8; ++f) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[0][f][e] = 0;
        }
        if (passes) await_v(), leave_v();
    };

    if (!enter()) return;
    start_first_scores();
    clear();
    wait_for_products<0>();
    hold(s);
    leave_k();
    finish_scores();
    probabilities.set(s);
    while (true) {
#pragma unroll 1
        for (; n > 0; --n) {
            j0 -= kTileKV;
            start_scores();
            start_output();
            wait_for_products<1>();
            hold(s);
            leave_k();
            const bool grown = finish_scores();
            wait_for_products<0>();
            hold(o);
            leave_v();
            if (grown) Softmax::rescale(o, factors);
            probabilities.set(s);
        }
        leave(shared.q_empty[queries.at]), queries.advance();
        const int i0_before = i0, head_before = head;
        if (!enter()) break;  // nothing is under way here, or ptxas would wait for all products one by one
        const auto write = [&](const Softmax& closed) {
            hold(o);
            leave_v();
            write_output(params, block_of(params, i0_before, head_before), o, closed);
            clear();
        };
        if constexpr (kQBuffers > 1) {  // the next q is there already
            start_first_scores();
            start_output();
            wait_for_products<1>();
            hold(s);
            leave_k();
            const Softmax closed = softmax;
            softmax = Softmax(scale);
            finish_scores();
            wait_for_products<0>();
            probabilities.set(s);
            write(closed);
        } else {
            start_output();
            start_first_scores();
            wait_for_products<1>();
            write(softmax);
            softmax = Softmax(scale);
            wait_for_products<0>();
            hold(s);
            leave_k();
            finish_scores();
            probabilities.set(s);
        }
    }
    start_output();
    wait_for_products<0>();
    hold(o);
    write_output(params, block_of(params, i0, head), o, softmax);
}

TW_KERNEL(fwd_sm90, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    unsigned char* const aligned = memory + (1024 - reinterpret_cast<unsigned long long>(memory) % 1024) % 1024;
    Shared& shared = *reinterpret_cast<Shared*>(aligned);
    if (threadIdx.x == 0) {
        constexpr int kWarps = kConsumers * 4;
        shared.work_full.init(1), shared.work_empty.init(kWarps + 1);
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
        if (threadIdx.x == kConsumerThreads + 32) schedule(params, shared);
    } else {
        take_registers<kConsumerRegisters>();
        consume(params, shared);
    }
}

}  // namespace tilewise
