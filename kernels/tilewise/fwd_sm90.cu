// Forward pass on Hopper: FlashAttention-2's tiles with what FlashAttention-3 (Shah et al. 2024) adds, for fp16 and bf16.
//
// One block stays on each SM and takes tiles of queries from a queue. Its warpgroups have roles:
//
//     producer     one thread asks the copy engine for Q, K and V, as far ahead as there are buffers
//     consumers    kConsumers warpgroups, each with 64 rows of the tile
//
// A consumer starts two products and works on the scores of one while the tensor cores are busy with the other:
//
//     tensor cores    S(n) = Q K(n)^T    o += P(n-1) V(n-1)    S(n+1)         o += P(n) V(n)
//     exp units                          P(n) of S(n)                         P(n+1) of S(n+1)
//
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
static_assert(!kOInQ || (kPanelsV <= kPanelsQK && kQBuffers == 1));
constexpr int kConsumerThreads = kConsumers * 128;
static_assert(kThreads == kConsumerThreads + 128, "consumers and the producer");

struct Work {  // one tile of queries
    int first, count;  // of the tiles of keys that some row sees: where they start, how many; below 0: there is no more work
    int i0, h, b;
};

struct __align__(1024) Shared {
    Half q[kQBuffers][kPanelsQK][kTileQ * kPanel];
    Half k[kStages][kPanelsQK][kTileKV * kPanel];
    Half v[kStages][kPanelsV][kTileKV * kPanel];
    Half o[kOInQ ? 1 : kPanelsV][kOInQ ? 8 : kTileQ * kPanel];  // on its way out; or it takes the place of q
    Work work[kQBuffers];  // comes and goes with q
    Barrier q_full[kQBuffers], q_empty[kQBuffers];
    Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};
static_assert(sizeof(Shared) + 1024 <= kSharedBytes, "the host asks for kSharedBytes");

struct Params {
    abi::TensorMap q, k, v;
    abi::Forward call;
    abi::Sm90Forward plan;
    MaskData mask;
};

// Number n of all tiles: row of tiles, head and batch.
TW_DEVICE Work work_of(const Params& params, Word n) {
    const abi::Sm90Forward& plan = params.plan;
    const Word heads = static_cast<Word>(params.call.problem.num_heads_q), q_tiles = static_cast<Word>(plan.q_tiles);
    const Word at_once = static_cast<Word>(plan.heads_at_once), all = heads * static_cast<Word>(params.call.problem.batch);
    const Word section = n / (at_once * q_tiles), rest = n - section * (at_once * q_tiles);
    const Word width = all - section * at_once < at_once ? all - section * at_once : at_once;
    const Word row = rest / width, head = section * at_once + rest - row * width, b = head / heads;
    return {0, 0, static_cast<int>(plan.last_first ? q_tiles - 1 - row : row) * kTileQ, static_cast<int>(head - b * heads),
            static_cast<int>(b)};
}
TW_DEVICE Block block_of(const Params& params, const Work& work) {
    const abi::Problem& p = params.call.problem;
    return {p, 1, work.h, work.i0, make_site(p, work.b, work.h)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Producer: one thread

TW_DEVICE void produce(const Params& params, Shared& shared) {
    const abi::Queue& queue = params.plan.queue;
    Ring<kQBuffers> queries;
    Ring<kStages> keys, values;
    Queue::open(queue);
    int number = static_cast<int>(blockIdx.x);
    while (true) {
        shared.q_empty[queries.at].wait(queries.phase ^ 1u);
        if (number >= params.plan.tiles) break;
        const int following = Queue::next(queue);
        Work work = work_of(params, static_cast<Word>(number));
        {
            const Block block = block_of(params, work);
            const KeyRange seen = keys_of(block, params.mask, 0, block.rows() - 1);
            work.first = seen.begin / kTileKV * kTileKV;
            work.count = seen.end > seen.begin ? (seen.end - work.first + kTileKV - 1) / kTileKV : 0;
        }
        shared.work[queries.at] = work;
        const int head = work.h / static_cast<int>(params.plan.group);
        const auto copy_k = [&](int n) {
            Barrier& full = shared.k_full[keys.at];
            shared.k_empty[keys.at].wait(keys.phase ^ 1u);
            full.expect(kKBytes);
#pragma unroll
            for (int panel = 0; panel < kPanelsQK; ++panel)
                copy_panel(shared.k[keys.at][panel], params.k, full, panel * kPanel, work.first + n * kTileKV, head, work.b);
            keys.advance();
        };
        const auto copy_v = [&](int n) {
            Barrier& full = shared.v_full[values.at];
            shared.v_empty[values.at].wait(values.phase ^ 1u);
            full.expect(kVBytes);
#pragma unroll
            for (int panel = 0; panel < kPanelsV; ++panel)
                copy_panel(shared.v[values.at][panel], params.v, full, panel * kPanel, work.first + n * kTileKV, head, work.b);
            values.advance();
        };
        Barrier& full = shared.q_full[queries.at];
        full.expect(kQBytes);
#pragma unroll
        for (int panel = 0; panel < kPanelsQK; ++panel)
            copy_panel(shared.q[queries.at][panel], params.q, full, panel * kPanel, work.i0, work.h, work.b);
        queries.advance();
        if (work.count > 0) copy_k(work.count - 1);
        for (int n = work.count - 1; n >= 0; --n) {
            if (n > 0) copy_k(n - 1);
            copy_v(n);
        }
        number = following;
    }
    shared.work[queries.at].count = -1;
    shared.q_full[queries.at].arrive();
    Queue::leave(queue);
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

// Of one tile of queries, to where the rows of this warp go.
TW_DEVICE void write_output(const Params& params, const Block& block, Output& o, Softmax& softmax, Shared& shared) {
    // Addresses that depend on the thread alone would otherwise stay in registers from tile to tile.
    const int thread = as_unknown(static_cast<int>(threadIdx.x)), lane = thread % 32, first = thread / 32 * 16;
    const int rows = block.rows();
    const auto staged = [&](int row, int c) {
        return (kOInQ ? shared.q[0][c / kPanel] : shared.o[c / kPanel]) + Tile<kTileQ, kPanel>::index(row, c % kPanel);
    };
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        float reference = softmax.reference[r] * softmax.scale, sum = softmax.row_sum(r);
        const int row = first + r * 8 + lane / 4;
        const float factor = close_row(block, row, reference, sum);
        const abi::Rows& lse = params.call.lse;
        if (lse.data && lane % 4 == 0 && row < rows) {
            static_cast<float*>(lse.data)[block.site.b * lse.batch + block.h * lse.head + (block.i0 + row) * lse.row] =
                lse_of(reference, sum);
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            const float(&x)[4] = o[0][n];
            *reinterpret_cast<Word*>(staged(row, n * 8 + lane % 4 * 2)) = pack(x[r * 2] * factor, x[r * 2 + 1] * factor);
        }
    }
    __syncwarp();
    constexpr int kChunks = kColumns / 8;
    const abi::Tensor& out = params.call.o;
    Half* const to = static_cast<Half*>(out.data) + block.site.b * out.batch + block.h * out.head + block.i0 * out.row;
    const int dims = static_cast<int>(block.p.head_dim_v);
#pragma unroll
    for (int n = lane; n < 16 * kChunks; n += 32) {
        const int row = first + n / kChunks, c = n % kChunks * 8;
        if (row >= rows || c >= dims) continue;
        const Half* const from = staged(row, c);
        if (params.call.aligned && c + 8 <= dims) {
            *reinterpret_cast<Chunk*>(to + row * out.row + c) = *reinterpret_cast<const Chunk*>(from);
        } else {
#pragma unroll 1
            for (int x = 0; x < 8 && c + x < dims; ++x) to[row * out.row + (c + x) * out.dim] = from[x];
        }
    }
    __syncwarp();
}

TW_DEVICE void consume(const Params& params, Shared& shared) {
    const abi::Problem& p = params.call.problem;
    const int group = __shfl_sync(0xffffffffu, warp_id() / 4, 0);  // the compiler sees that it is the same in all lanes
    Ring<kQBuffers> queries;
    Ring<kStages> keys, values;
    const auto release = [](Barrier& barrier) {
        __syncwarp();
        if (lane_id() == 0) barrier.arrive();
    };
    while (true) {
        shared.q_full[queries.at].wait(queries.phase);
        const Work& work = shared.work[queries.at];  // read again where it is needed: registers are for scores
        if (work.count < 0) break;
        const int count = work.count;
        int full_begin, full_end;  // keys that all rows of this warpgroup see
        {
            const KeyRange seen = keys_of(block_of(params, work), params.mask, group * 64, group * 64 + 63);
            full_begin = seen.full_begin, full_end = seen.full_end;
        }
        const Operand q = by_rows_of(shared.q[queries.at][0] + group * 64 * kPanel, kTileQ);

        Scores s;
        Output o;
        Probabilities probabilities;
        Softmax softmax(kRaw ? static_cast<float>(p.softmax_scale) * kLog2E : kLog2E);
        float factors[kRowsPerThread];
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[0][n][e] = 0;
        }
        const auto start_scores = [&] {
            shared.k_full[keys.at].wait(keys.phase);
            begin_products();
            start_score_product(s, q, by_rows_of(shared.k[keys.at][0], kTileKV));
            commit_products();
        };
        const auto start_output = [&] {
            shared.v_full[values.at].wait(values.phase);
            begin_products();
            start_output_product(o, probabilities.words, by_columns_of(shared.v[values.at][0], kTileKV));
            commit_products();
        };
        // From products to P; whether o is to be rescaled.
        const auto finish_scores = [&](int n) {
            const int j0 = work.first + n * kTileKV;
            if constexpr (!kRaw) {
                const Block block = block_of(params, work);
                apply_options(s, ScoreContext(p, params.mask, block.site), block, j0);
            }
            if (j0 < full_begin || j0 + kTileKV > full_end) {
                const Block block = block_of(params, work);
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
                const Block block = block_of(params, work);
                drop(s, Philox::make(p, block.site), block, j0);
            }
            return grown;
        };

        if (count > 0) {
            start_scores();
            wait_for_products<0>();
            hold(s);
            release(shared.k_empty[keys.at]);
            keys.advance();
            finish_scores(count - 1);
            probabilities.set(s);
#pragma unroll 1
            for (int n = count - 2; n >= 0; --n) {
                start_scores();
                start_output();
                wait_for_products<1>();
                hold(s);
                release(shared.k_empty[keys.at]);
                keys.advance();
                const bool grown = finish_scores(n);
                wait_for_products<0>();
                hold(o);
                release(shared.v_empty[values.at]);
                values.advance();
                if (grown) Softmax::rescale(o, factors);
                probabilities.set(s);
            }
        }
        if (count > 0) {
            start_output();
            wait_for_products<0>();
            hold(o);
            release(shared.v_empty[values.at]);
            values.advance();
        }
        const Block block = block_of(params, work);
        if (!kOInQ) release(shared.q_empty[queries.at]);
        write_output(params, block, o, softmax, shared);
        if (kOInQ) {
            fence_copies();
            release(shared.q_empty[queries.at]);
        }
        queries.advance();
    }
}

TW_KERNEL(fwd_sm90, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    unsigned char* const aligned = memory + (1024 - reinterpret_cast<unsigned long long>(memory) % 1024) % 1024;
    Shared& shared = *reinterpret_cast<Shared*>(aligned);
    if (threadIdx.x == 0) {
        constexpr int kWarps = kConsumers * 4;
        for (int n = 0; n < kQBuffers; ++n) shared.q_full[n].init(1), shared.q_empty[n].init(kWarps);
        for (int n = 0; n < kStages; ++n) {
            shared.k_full[n].init(1), shared.k_empty[n].init(kWarps);
            shared.v_full[n].init(1), shared.v_empty[n].init(kWarps);
        }
        publish_barriers();
    }
    __syncthreads();
    if (warp_id() >= kConsumers * 4) {
        give_registers<kProducerRegisters>();
        if (threadIdx.x == kConsumerThreads) produce(params, shared);
    } else {
        take_registers<kConsumerRegisters>();
        consume(params, shared);
    }
}

}  // namespace tilewise
