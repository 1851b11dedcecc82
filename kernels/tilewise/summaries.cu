// Summaries of the arrays behind masks and expressions: what is known about 64 neighbours at once, so that a tile can be
// classified without reading all of it. Made anew in every run, so that a replayed graph sees new contents.

#include "mask.cuh"

namespace tilewise {

constexpr int kThreads = 256, kBlocks = 1;
using Real = double;

}  // namespace tilewise

#include "expr.cuh"

namespace tilewise {

// Address of plane number n of a mask array: planes are [batch axis, heads axis], each 1 where broadcast.
TW_DEVICE Int offset_of_plane(const abi::MaskArray& a, Int plane) {
    if (a.plane_batch == 0) return plane * a.head;
    return plane / a.plane_batch * a.batch + plane % a.plane_batch * a.head;
}

// A warp per block of 64 tokens.
TW_KERNEL(summarise_tokens, abi::Summarise, p) {
    const abi::MaskArray& a = p.array;
    const Int blocks = ceil_div(a.rows, kSummary), n = (Int(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (n >= blocks * a.planes) return;
    const Int start = offset_of_plane(a, n / blocks), first = n % blocks * kSummary;
    Int low = kNoInteger, high = -kNoInteger, low_document = kNoInteger;
#pragma unroll
    for (int part = 0; part < kSummary / 32; ++part) {
        const Int token = first + part * 32 + threadIdx.x % 32;
        if (token >= a.rows) continue;
        Int x = load_integer(a.data, p.dtype, start + token * a.row);
        if (p.as_bool) x = x != 0;
        low = minimum(low, x), high = maximum(high, x);
        if (x >= 0) low_document = minimum(low_document, x);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        low = minimum(low, Int{__shfl_xor_sync(0xffffffffu, low, distance)});
        high = maximum(high, Int{__shfl_xor_sync(0xffffffffu, high, distance)});
        low_document = minimum(low_document, Int{__shfl_xor_sync(0xffffffffu, low_document, distance)});
    }
    if (threadIdx.x % 32 > 0) return;
    Int* const out = a.summary + n * kSummaryNumbers;
    out[0] = low, out[1] = high, out[2] = low_document, out[3] = 0;
}

template <int kColumns, bool kCausal>
TW_DEVICE void put_interval_extremes(const abi::Summarise& p, Int plane, Int first, Int* out) {
    const abi::MaskArray& a = p.array;
    Int x[8] = {kNoInteger, -kNoInteger, kNoInteger, -kNoInteger, kNoInteger, -kNoInteger, kNoInteger, -kNoInteger};
    for (Int key = first; key < minimum(first + kSummary, a.rows); ++key) {
        const auto bounds = p.dtype == kI64 ? interval_bounds<kI64, kColumns, kCausal>(a, plane, key)
                                            : interval_bounds<kI32, kColumns, kCausal>(a, plane, key);
        x[0] = minimum(x[0], bounds.begin1), x[1] = maximum(x[1], bounds.begin1);
        x[2] = minimum(x[2], bounds.end1), x[3] = maximum(x[3], bounds.end1);
        x[4] = minimum(x[4], bounds.begin2), x[5] = maximum(x[5], bounds.begin2);
        x[6] = minimum(x[6], bounds.end2), x[7] = maximum(x[7], bounds.end2);
    }
    for (int n = 0; n < 8; ++n) out[n] = x[n];
}

TW_KERNEL(summarise_intervals, abi::Summarise, p) {
    const abi::MaskArray& a = p.array;
    const Int blocks = ceil_div(a.rows, kSummary), n = Int(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= blocks * a.planes) return;
    const Int plane = offset_of_plane(a, n / blocks), first = n % blocks * kSummary;
    Int* const out = a.summary + n * kIntervalNumbers;
    switch (p.numbers * 2 + p.causal) {
        case 3: return put_interval_extremes<1, true>(p, plane, first, out);
        case 4: return put_interval_extremes<2, false>(p, plane, first, out);
        case 5: return put_interval_extremes<2, true>(p, plane, first, out);
        default: return put_interval_extremes<4, false>(p, plane, first, out);
    }
}

// A block per 64 x 64 elements.
TW_KERNEL(summarise_dense, abi::Summarise, p) {
    const abi::MaskArray& a = p.array;
    const Int row_blocks = ceil_div(a.rows, kSummary), column_blocks = ceil_div(a.columns, kSummary);
    Int n = blockIdx.x;
    const Int column0 = n % column_blocks * kSummary, row0 = n / column_blocks % row_blocks * kSummary;
    const Int start = offset_of_plane(a, n / (column_blocks * row_blocks));
    bool set = false, clear = false;
    for (int e = threadIdx.x; e < kSummary * kSummary; e += kThreads) {
        const Int row = row0 + e / kSummary, column = column0 + e % kSummary;
        if (row >= a.rows || column >= a.columns) continue;
        (load_integer(a.data, p.dtype, start + row * a.row + column * a.column) != 0 ? set : clear) = true;
    }
    const int any_set = __syncthreads_or(set), any_clear = __syncthreads_or(clear);
    if (threadIdx.x == 0) a.summary[n] = (any_set ? 1 : 0) + (any_clear ? 2 : 0);
}

// A thread per run of 64 elements of an array that an expression reads.
TW_KERNEL(summarise_captured, abi::Summarise, p) {
    Int size = 1;
    for (int d = 0; d < p.rank; ++d) size *= p.captured.shape[d];
    const Int n = Int(blockIdx.x) * kThreads + threadIdx.x;
    if (n < ceil_div(size, kSummary)) {
        expr::summarise_block(p.captured, static_cast<int>(p.dtype), static_cast<int>(p.rank), n, p.captured_summary + 3 * n);
    }
}

}  // namespace tilewise
