// What the portable kernels share: 64 x 64 tiles on 256 threads, products on the ordinary arithmetic units in full
// precision (true fp32, fp64), tensors of any strides and alignment.
//
// Thread (ty, tx) of 16 x 16 owns rows 4 ty .. 4 ty + 3 of a tile and, of scores, columns 4 tx .. 4 tx + 3; of outputs
// columns 64 g + 4 tx .. + 3 for every group g of 64 columns. The 16 threads of a row are half a warp.
//
// spec.cuh, which the host renders for a problem, comes before this file: Real, kDTypeQ, kColumns and the options.
#pragma once

#include "score.cuh"

namespace tilewise {

constexpr int kTile = 64;                                   // queries, and keys
static_assert(kTileQ == kTile && kTileKV == kTile);
constexpr int kDepth = sizeof(Real) == 8 ? 16 : 32;         // of a product, staged at once
constexpr int kStagedRows = sizeof(Real) == 8 ? 16 : 32;    // of the right factor of an output product
constexpr int kGroups = kColumns / 64;
static_assert(kColumns % 64 == 0 && kThreads % kColumns == 0, "columns come in groups, and stages in whole rows");
constexpr int kLead = kTile + 4;                            // of a tile in shared memory, to spread its banks

struct Shared {
    union {
        struct {
            Real a[kDepth][kLead], b[kDepth][kLead];  // depth x rows: factors of a score product
        } factors;
        Real staged[kStagedRows][kColumns];
    };
    Real tile[kTile][kLead];  // P or dS
    Int list[kThreads];       // tiles to work on, and their class in the low two bits
    int warp_counts[kThreads / 32];
};
static_assert(sizeof(Shared) <= kSharedBytes, "the host asks for kSharedBytes");

TW_DEVICE int thread_x() { return static_cast<int>(threadIdx.x) % 16; }
TW_DEVICE int thread_y() { return static_cast<int>(threadIdx.x) / 16; }

// Rows [row0, row0 + count) of one head of a tensor; beyond them all is zero.
struct Source {
    const typename Float<kDTypeQ>::Stored* data;
    Int row, dim;  // strides
    int count;

    TW_DEVICE Source make(const abi::Tensor& t, Int b, Int row0, Int h, int count) {
        using Stored = typename Float<kDTypeQ>::Stored;
        return {static_cast<const Stored*>(t.data) + b * t.batch + row0 * t.row + h * t.head, t.row, t.dim, count};
    }
    __device__ __forceinline__ Real at(Int r, Int d) const {
        return Float<kDTypeQ>::template load<Real>(data[r * row + d * dim]);
    }
};

TW_DEVICE void stage_factor(Real (&out)[kDepth][kLead], const Source& source, Int d0, Int dims) {
    const int d = threadIdx.x % kDepth;
    const typename Float<kDTypeQ>::Stored* at = source.data + (d0 + d) * source.dim;
    constexpr int kStep = kThreads / kDepth;
    const int rows = d0 + d < dims ? source.count : 0;
    const int r0 = threadIdx.x / kDepth;
    at += r0 * source.row;
#pragma unroll 4
    for (int r = 0; r < kTile; r += kStep, at += kStep * source.row) {
        out[d][r0 + r] = r0 + r < rows ? Float<kDTypeQ>::template load<Real>(*at) : Real(0);
    }
}

// s[a][b] = sum over d of left(row a, d) * right(row b, d)
TW_DEVICE void score_product(Real (&s)[4][4], const Source& left, const Source& right, Int dims, Shared& shared) {
    const int tx = thread_x(), ty = thread_y();
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) s[a][b] = 0;
    }
    for (Int d0 = 0; d0 < dims; d0 += kDepth) {
        __syncthreads();  // whoever read the stage before is done
        stage_factor(shared.factors.a, left, d0, dims);
        stage_factor(shared.factors.b, right, d0, dims);
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < kDepth; ++d) {
            Real x[4], y[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) x[n] = shared.factors.a[d][4 * ty + n], y[n] = shared.factors.b[d][4 * tx + n];
#pragma unroll
            for (int a = 0; a < 4; ++a) {
#pragma unroll
                for (int b = 0; b < 4; ++b) s[a][b] += x[a] * y[b];
            }
        }
    }
}

using Output = Real[4][kGroups][4];

TW_DEVICE void clear(Output& o) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
            for (int b = 0; b < 4; ++b) o[a][g][b] = 0;
        }
    }
}

// o += tile * right, or (kTransposed) tile^T * right: columns [c0, c0 + kColumns) of right, which has kTile rows. Where the
// tile holds 0 for a key that is hidden, and right something that is not finite, the product is 0 all the same.
template <bool kTransposed>
TW_DEVICE void output_product(Output& o, const Source& right, Int c0, Int dims, Shared& shared) {
    const int tx = thread_x(), ty = thread_y();
    const auto left = [&](int a, int r) -> Real {
        return kTransposed ? shared.tile[r][4 * ty + a] : shared.tile[4 * ty + a][r];
    };
    for (int r0 = 0; r0 < kTile && r0 < right.count; r0 += kStagedRows) {
        __syncthreads();
        const int c = threadIdx.x % kColumns;
        const int rows = c0 + c < dims ? right.count - r0 : 0;
        constexpr int kStep = kThreads / kColumns;
        const int first = threadIdx.x / kColumns;
        const typename Float<kDTypeQ>::Stored* at = right.data + (c0 + c) * right.dim + (r0 + first) * right.row;
        Real probe = 0;  // becomes NaN at the first number that is not finite
#pragma unroll 4
        for (int r = 0; r < kStagedRows; r += kStep, at += kStep * right.row) {
            const Real x = first + r < rows ? Float<kDTypeQ>::template load<Real>(*at) : Real(0);
            shared.staged[first + r][c] = x;
            probe += x * Real(0);
        }
        if (__syncthreads_or(probe != 0)) {
#pragma unroll 1
            for (int r = 0; r < kStagedRows; ++r) {
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        const Real v = shared.staged[r][64 * g + 4 * tx + b];
#pragma unroll
                        for (int a = 0; a < 4; ++a) {
                            const Real p = left(a, r0 + r);
                            o[a][g][b] += p == 0 ? Real(0) : p * v;
                        }
                    }
                }
            }
            continue;
        }
#pragma unroll 4
        for (int r = 0; r < kStagedRows; ++r) {
            Real p[4];
#pragma unroll
            for (int a = 0; a < 4; ++a) p[a] = left(a, r0 + r);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const Real v = shared.staged[r][64 * g + 4 * tx + b];
#pragma unroll
                    for (int a = 0; a < 4; ++a) o[a][g][b] += p[a] * v;
                }
            }
        }
    }
}

// Row a of this thread's output into a tensor row, times a factor.
TW_DEVICE void store_row(const abi::Tensor& t, Int b, Int row, Int h, const Real (&values)[kGroups][4], Real factor,
                         Int c0, Int dims) {
    const Int offset = b * t.batch + row * t.row + h * t.head;
    const int tx = thread_x();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const Int c = c0 + 64 * g + 4 * tx + n;
            if (c < dims) store_float<kDTypeQ>(t.data, offset + c * t.dim, values[g][n] * factor);
        }
    }
}

// A thread's elements of a tile in shared memory. What it does to each of them, masks and all, is a loop that is not
// unrolled: sixteen copies of a long expression would take longer to compile than most problems take to run.
template <class Tile>
TW_DEVICE void put_elements(const Real (&values)[4][4], Tile& tile) {
    const int tx = thread_x(), ty = thread_y();
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) tile[4 * ty + a][4 * tx + b] = values[a][b];
    }
}
template <class Tile>
TW_DEVICE void get_elements(Real (&values)[4][4], const Tile& tile) {
    const int tx = thread_x(), ty = thread_y();
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) values[a][b] = tile[4 * ty + a][4 * tx + b];
    }
}
// body(row, column) for the elements of rows [first, first + count) of this thread's four.
template <class Body>
TW_DEVICE void for_each_element(int first, int count, const Body& body) {
    const int tx = thread_x(), ty = thread_y();
#pragma unroll 1
    for (int e = 4 * first; e < 4 * (first + count); ++e) body(4 * ty + e / 4, 4 * tx + e % 4);
}

// Over the 16 threads of a row.
TW_DEVICE Real row_sum(Real x) {
#pragma unroll
    for (int lane = 8; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}
TW_DEVICE Real row_max(Real x) {
#pragma unroll
    for (int lane = 8; lane > 0; lane /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Which tiles: one thread classifies one tile, the block then works on those that are not skipped, in order

// Calls body(start, class) for every tile of [begin, end) that class_of(start) does not skip; begin is a multiple of
// kTile. All threads get the same calls.
template <class ClassOf, class Body>
TW_DEVICE void for_each_tile(Int begin, Int end, Shared& shared, const ClassOf& class_of, const Body& body) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (Int chunk = begin; chunk < end; chunk += Int(kThreads) * kTile) {
        const Int start = chunk + Int(threadIdx.x) * kTile;
        const int c = start < end ? class_of(start) : kSkip;
        const Word found = __ballot_sync(0xffffffffu, c != kSkip);
        if (lane == 0) shared.warp_counts[warp] = __popc(found);
        __syncthreads();
        int place = __popc(found & ((1u << lane) - 1u)), total = 0;
        for (int w = 0; w < kThreads / 32; ++w) {
            const int n = shared.warp_counts[w];
            place += w < warp ? n : 0, total += n;
        }
        if (c != kSkip) shared.list[place] = start * 4 + c;
        __syncthreads();
        for (int n = 0; n < total; ++n) {
            const Int entry = shared.list[n];
            body(entry / 4, static_cast<int>(entry % 4));
        }
        __syncthreads();  // before the list is overwritten
    }
}

template <class Body>
TW_DEVICE void for_each_kv_tile(const abi::Problem& p, const MaskData& mask, const Site& site, Int i0, Shared& shared,
                                const Body& body) {
    const Range keys = key_hull(p, mask, site, i0, minimum(i0 + kTile, site.q_len));
    if (keys.begin >= keys.end) return;
    for_each_tile(keys.begin / kTile * kTile, keys.end, shared,
                  [&](Int j0) { return class_within(p, mask, site, i0, j0); }, body);
}
template <class Body>
TW_DEVICE void for_each_q_tile(const abi::Problem& p, const MaskData& mask, const Site& site, Int j0, Shared& shared,
                               const Body& body) {
    const Range rows = query_hull(p, mask, site, j0, minimum(j0 + kTile, site.kv_len));
    if (rows.begin >= rows.end) return;
    for_each_tile(rows.begin / kTile * kTile, rows.end, shared,
                  [&](Int i0) { return class_within(p, mask, site, i0, j0); }, body);
}

}  // namespace tilewise
