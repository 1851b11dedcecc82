// Before and around the main kernels: lengths and positions of the sequences; rows that belong to none. Nothing here
// trusts a value in device memory: lengths are clamped so that all rows lie inside the tensors and no two sequences
// overlap.

#include "scan.cuh"

namespace tilewise {

constexpr int kThreads = 256, kBlocks = 1;

// sequences[batch + 1]; one block. The last entry holds the numbers of tiles.
TW_KERNEL(prepare_sequences, abi::Problem, p) {
    __shared__ Int scratch[kThreads];
    __shared__ Int carry[4];  // first row of q and of k not yet given away; tiles before, likewise
    if (threadIdx.x < 4) carry[threadIdx.x] = 0;
    __syncthreads();
    const auto larger_of = [](Int a, Int b) { return maximum(a, b); };
    const auto sum_of = [](Int a, Int b) { return a + b; };
    // Start of sequence n: never before the end of an earlier one.
    const auto bound = [&](const abi::Index& cu, Int n, Int rows) {
        return n <= p.batch ? clamp(load_index(cu, n), 0, rows) : 0;
    };
    for (Int base = 0; base <= p.batch; base += kThreads) {
        const Int b = base + threadIdx.x;
        abi::Sequence s{b, 0, 0, 0, 0, 0, 0, 0, 0};
        Int q_rows = p.q_rows, kv_rows = p.kv_rows;
        const Int q_before = carry[0], kv_before = carry[1];
        Int q_end = 0, kv_end = 0;  // starts of the next sequences
        if (p.packed_q) {
            s.q_row0 = maximum(q_before, block_scan(bound(p.cu_q, b, p.q_rows), scratch, larger_of));
            q_end = b < p.batch ? maximum(s.q_row0, bound(p.cu_q, b + 1, p.q_rows)) : s.q_row0;
            q_rows = q_end - s.q_row0;
        }
        if (p.packed_kv) {
            s.kv_first_row = maximum(kv_before, block_scan(bound(p.cu_kv, b, p.kv_rows), scratch, larger_of));
            kv_end = b < p.batch ? maximum(s.kv_first_row, bound(p.cu_kv, b + 1, p.kv_rows)) : s.kv_first_row;
            kv_rows = kv_end - s.kv_first_row;
        }
        if (b < p.batch) {
            s.q_len = p.used_q.data ? clamp(load_index(p.used_q, b), 0, q_rows) : q_rows;
            const Int used = p.used_kv.data ? clamp(load_index(p.used_kv, b), 0, kv_rows) : kv_rows;
            const Int pad = p.leftpad.data ? clamp(load_index(p.leftpad, b), 0, kv_rows) : 0;
            s.kv_row0 = s.kv_first_row + pad;
            s.kv_len = maximum(used - pad, 0);
            switch (p.q_offset_mode) {  // tilewise_offset_mode
                case 0: s.q_offset = s.kv_len - s.q_len; break;
                case 2: s.q_offset = p.q_offset_value; break;
                case 3: s.q_offset = clamp(load_index(p.q_offset, b), -(1ll << 60), 1ll << 60); break;
                default: s.q_offset = 0;
            }
        }
        const Int q_tiles = ceil_div(s.q_len, p.q_tile), kv_tiles = ceil_div(s.kv_len, p.kv_tile);
        s.q_tiles_before = carry[2] + block_scan(q_tiles, scratch, sum_of) - q_tiles;
        s.kv_tiles_before = carry[3] + block_scan(kv_tiles, scratch, sum_of) - kv_tiles;
        if (b <= p.batch) p.sequences[b] = s;
        __syncthreads();  // all have read the carry
        if (threadIdx.x == kThreads - 1) {
            carry[0] = maximum(q_end, s.q_row0), carry[1] = maximum(kv_end, s.kv_first_row);
            carry[2] = s.q_tiles_before + q_tiles, carry[3] = s.kv_tiles_before + kv_tiles;
        }
        __syncthreads();
    }
}

// A warp per row: rows of no sequence get 0, and lse = -inf.
TW_KERNEL(clear_rows, abi::Clear, c) {
    const abi::Problem& p = c.problem;
    const Int rows = c.query_side ? p.q_rows : p.kv_rows, packed = c.query_side ? p.packed_q : p.packed_kv;
    const Int n = (Int(blockIdx.x) * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (n >= rows * (packed ? 1 : p.batch)) return;
    const Int row = n % rows, batch = n / rows;
    const auto begin = [&](Int b) { return c.query_side ? p.sequences[b].q_row0 : p.sequences[b].kv_row0; };
    const auto length = [&](Int b) { return c.query_side ? p.sequences[b].q_len : p.sequences[b].kv_len; };
    Int b = batch;
    if (packed) {
        // The last sequence that starts at or before the row; empty ones start where the next does. Left padding moves
        // a start, but never past the start of the next sequence.
        const auto first = [&](Int s) { return c.query_side ? p.sequences[s].q_row0 : p.sequences[s].kv_first_row; };
        Int low = 0, high = p.batch;
        while (high - low > 1) {
            const Int middle = (low + high) / 2;
            (first(middle) <= row ? low : high) = middle;
        }
        b = low;
    }
    if (p.batch > 0 && row >= begin(b) && row < begin(b) + length(b)) return;
    for (Int h = 0; h < c.heads; ++h) {
        const Int offset = batch * c.tensor.batch + row * c.tensor.row + h * c.tensor.head;
        for (Int d = lane; d < c.dims; d += 32) {
            const Int at = offset + d * c.tensor.dim;  // zero is all bits zero in every dtype
            if (c.dtype == kF64) static_cast<double*>(c.tensor.data)[at] = 0;
            else if (c.dtype == kF32) static_cast<float*>(c.tensor.data)[at] = 0;
            else static_cast<unsigned short*>(c.tensor.data)[at] = 0;
        }
        if (c.lse.data && lane == 0) {
            const Int at = batch * c.lse.batch + h * c.lse.head + row * c.lse.row;
            if (c.dtype == kF64) static_cast<double*>(c.lse.data)[at] = -Limits<double>::infinity();
            else static_cast<float*>(c.lse.data)[at] = -Limits<float>::infinity();
        }
    }
}

}  // namespace tilewise
