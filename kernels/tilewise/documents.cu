// Documents as sequences: before a kernel that has tiles of queries for each of them (src/cuda/sm90.cpp), it is found out
// whether that is right, and the table of sequences is made. Nothing here trusts an id.

#include "scan.cuh"

namespace tilewise {

constexpr int kThreads = 1024, kBlocks = 1;

// sequences[num_sequences + 1], of documents that are runs of tokens; one block. Without any tile, if that is not so: if an
// id comes back, as it may where ids do not rise, or if there are too many runs.
TW_KERNEL(prepare_documents, abi::Documents, d) {
    const abi::Problem& p = d.problem;
    __shared__ Int scratch[kThreads];
    __shared__ Int carry;
    const int t = threadIdx.x, lane = t % 32, last = static_cast<int>(p.num_sequences);
    const int rows = static_cast<int>(p.q_rows), tokens = static_cast<int>(p.batch) * rows;  // below 2^30
    const auto id_at = [&](Int n) {
        return d.wide ? static_cast<const Int*>(d.ids.data)[n] : static_cast<const int*>(d.ids.data)[n];
    };
    const auto id_of = [&](int token) { return id_at(token / rows * d.ids.batch + token % rows * d.ids.row); };
    const auto sum_of = [](Int a, Int b) { return a + b; };
    // A warp has so many tokens, and asks for some of them before it looks at the first. In the first round runs of
    // equal ids are counted; in the second it is known how many come before, and each tells where it begins.
    const int each = (tokens + kThreads - 1) / kThreads * 32, begin = t / 32 * each;
    const int end = static_cast<int>(minimum(begin + each, tokens));
    constexpr int kTogether = 8;
    int n = 0, all_runs = 0;
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        int b = (begin + lane) / rows, row = begin + lane - b * rows;
#pragma unroll 1
        for (int at = begin; at < end; at += 32 * kTogether) {
            Word begins[kTogether];
            const auto look = [&](const auto* ids) {
#pragma unroll
                for (int g = 0; g < kTogether; ++g) {
                    const bool inside = at + g * 32 + lane < end;
                    const Int place = inside ? b * d.ids.batch + row * d.ids.row : 0;
                    const bool differs = ids[place] != ids[inside && row > 0 ? place - d.ids.row : place];
                    begins[g] = inside && (row == 0 || differs);
                    row += 32;
                    if (row >= rows) b += row / rows, row %= rows;
                }
            };
            if (d.wide) look(static_cast<const Int*>(d.ids.data));
            else look(static_cast<const int*>(d.ids.data));
#pragma unroll
            for (int g = 0; g < kTogether; ++g) {
                const Word all = __ballot_sync(0xffffffffu, begins[g]);
                const int mine = n + __popc(all & ((1u << lane) - 1));
                if (round == 1 && begins[g] && mine < last) p.sequences[mine].q_row0 = at + g * 32 + lane;
                n += __popc(all);
            }
        }
        if (round == 1) break;
        const int runs = n;
        n = static_cast<int>(block_scan(lane == 0 ? runs : 0, scratch, sum_of)) - runs;
        if (t == kThreads - 1) carry = n + runs;
        __syncthreads();
        all_runs = static_cast<int>(carry);
    }
    __syncthreads();
    if (t == 0) carry = 0;  // from here on: tiles
    const auto start_of = [&](int run) { return static_cast<int>(p.sequences[run].q_row0); };
    bool rises = all_runs <= last;
#pragma unroll 1
    for (int run = t; all_runs <= last && run < all_runs; run += kThreads) {
        const int first = start_of(run), before = run > 0 ? start_of(run - 1) : 0;
        const Int id = id_of(first), id_before = id_of(before);
        if (first % rows == 0 || id < 0) continue;
        // No id comes back: each is larger than the one before, and no padding between them.
        rises &= id_before < 0 ? before % rows == 0 : id_before < id;
    }
    rises = __syncthreads_and(rises);
#pragma unroll 1
    for (int base = 0; base <= last; base += kThreads) {
        const int run = base + t;
        abi::Sequence s{0, 0, 0, 0, 0, 0, 0, 0, 0};
        if (rises && run < all_runs) {
            const int first = start_of(run), behind = run + 1 < all_runs ? start_of(run + 1) : tokens;
            s.b = first / rows, s.q_row0 = s.kv_row0 = s.kv_first_row = first % rows;
            s.q_len = behind - first, s.kv_len = id_of(first) < 0 ? 0 : s.q_len;
        }
        const Int tiles = ceil_div(s.q_len, p.q_tile);
        s.q_tiles_before = carry + block_scan(tiles, scratch, sum_of) - tiles;
        if (run <= last) p.sequences[run] = s;
        __syncthreads();  // all have read what came before, and where the next run begins
        if (t == kThreads - 1) carry = s.q_tiles_before + tiles;
        __syncthreads();
    }
}

}  // namespace tilewise
