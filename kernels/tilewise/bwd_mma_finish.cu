// Around bwd_mma.cu, for every problem the same:
//
//   bwd_mma_delta   before: per row, lse in powers of two and D = sum of o * do, minus dlse; zeroes the sums of dQ
//   bwd_mma_finish  after: dQ = softmax_scale * sums, in the dtype of the problem

#include "base.cuh"

namespace tilewise {

constexpr int kThreads = 256, kBlocks = 3;

struct __align__(16) Halves {
    unsigned short of[8];
};
struct __align__(16) Floats {
    float of[4];
};
struct __align__(8) RowPair {
    float lse, delta;
};

template <class T>
TW_DEVICE T* row_at(const abi::Tensor& t, Int b, Int row, Int h) {
    return static_cast<T*>(t.data) + b * t.batch + row * t.row + h * t.head;
}
TW_DEVICE float number_at(const abi::Rows& rows, Int b, Int row, Int h) {
    return static_cast<const float*>(rows.data)[b * rows.batch + h * rows.head + row * rows.row];
}

template <int kDType>
TW_DEVICE void delta(const abi::MmaBackward& call) {
    const abi::Problem& p = call.problem;
    const Int tiles = call.q_tiles, h = quotient(blockIdx.x, tiles), n = blockIdx.x - h * tiles, tile = h * tiles + n;
    const Int size = p.q_tile * call.columns / 4;
    Floats* const sums = static_cast<Floats*>(call.dq_sums) + tile * size;
    if (call.dq.data) {
        for (Int e = threadIdx.x; e < size; e += kThreads) sums[e] = Floats{};
    }
    const Place place = place_of(p, n, true);
    if (place.b < 0) return;
    const Site site = make_site(p, place.b, h);
    const Int b = batch_of(p.packed_q, site.b), dims = p.head_dim_v;
    int lanes = 4;  // that share a row, in pieces of 8 numbers
    while (lanes < 32 && lanes * 8 < dims) lanes *= 2;
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    for (Int r = threadIdx.x / lanes; r < p.q_tile; r += kThreads / lanes) {
        const bool exists = place.row + r < site.q_len;
        const Int row = site.q_row0 + place.row + r;
        float sum = 0;
        if (exists) {
            const unsigned short* const o = row_at<unsigned short>(call.o, b, row, h);
            const unsigned short* const d_o = row_at<unsigned short>(call.d_o, b, row, h);
            for (Int c = 8 * lane; c < dims; c += 8 * lanes) {
                Halves x{}, y{};
                if (call.aligned_rows && c + 8 <= dims) {
                    x = *reinterpret_cast<const Halves*>(o + c), y = *reinterpret_cast<const Halves*>(d_o + c);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        if (c + e < dims) x.of[e] = o[(c + e) * call.o.dim], y.of[e] = d_o[(c + e) * call.d_o.dim];
                    }
                }
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const float left = Float<kDType>::template load<float>(x.of[e]);
                    // An empty row has no gradient, whatever do holds.
                    if (left != 0) sum += left * Float<kDType>::template load<float>(y.of[e]);
                }
            }
        }
        for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane != 0) continue;
        RowPair pair{Limits<float>::infinity(), 0};  // of rows that see nothing: every probability is 0
        if (exists) {
            const float lse = number_at(call.lse, b, row, h);
            if (lse != -Limits<float>::infinity()) {
                pair = {lse * 1.4426950408889634f, sum};
                if (call.dlse.data) pair.delta -= number_at(call.dlse, b, row, h);
            }
        }
        static_cast<RowPair*>(call.rows)[tile * p.q_tile + r] = pair;
    }
}

TW_KERNEL(bwd_mma_delta, abi::MmaBackward, call) {
    if (call.dtype == kBF16) delta<kBF16>(call);
    else delta<kF16>(call);
}

template <int kDType, bool kVectorAdd>
TW_DEVICE void finish(const abi::MmaBackward& call) {
    const abi::Problem& p = call.problem;
    const Int tiles = call.q_tiles, h = quotient(blockIdx.x, tiles), n = blockIdx.x - h * tiles;
    const Place place = place_of(p, n, true);
    if (place.b < 0) return;
    const Site site = make_site(p, place.b, h);
    const Int b = batch_of(p.packed_q, site.b), dims = p.head_dim_qk;
    const int fragments = static_cast<int>(call.columns) / 8, items = static_cast<int>(p.q_tile) / 16 * 8 * fragments;
    const float scale = static_cast<float>(p.softmax_scale);
    const float* const sums = static_cast<const float*>(call.dq_sums) + (h * tiles + n) * p.q_tile * call.columns;
    // Eight numbers of the rows g and g + 8 of a fragment: those of four threads, as mma_backward.cuh says.
    for (int item = threadIdx.x; item < items; item += kThreads) {
        const int fragment = item % fragments, g = item / fragments % 8, m = item / fragments / 8;
        const float* const from = sums + (m * fragments + fragment) * 128;
        Floats x[4];  // of kVectorAdd threads, else elements
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = *reinterpret_cast<const Floats*>(from + (kVectorAdd ? 16 * g + 4 * e : 32 * e + 4 * g));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Int r = place.row + m * 16 + half * 8 + g, c0 = fragment * 8;
            if (r >= site.q_len) continue;
            Halves out;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const float value = kVectorAdd ? x[c / 2].of[2 * half + c % 2] : x[2 * half + c % 2].of[c / 2];
                out.of[c] = Float<kDType>::template store<float>(value * scale);
            }
            unsigned short* const to = row_at<unsigned short>(call.dq, b, site.q_row0 + r, h) + c0 * call.dq.dim;
            if (call.aligned_dq && c0 + 8 <= dims) {
                *reinterpret_cast<Halves*>(to) = out;
            } else {
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if (c0 + c < dims) to[c * call.dq.dim] = out.of[c];
                }
            }
        }
    }
}

TW_KERNEL(bwd_mma_finish, abi::MmaBackward, call) {
#if defined(TILEWISE_FAKE_CUDA) || __CUDA_ARCH__ >= 900
    constexpr bool kVectorAdd = true;
#else
    constexpr bool kVectorAdd = false;
#endif
    if (call.dtype == kBF16) finish<kBF16, kVectorAdd>(call);
    else finish<kF16, kVectorAdd>(call);
}

}  // namespace tilewise
