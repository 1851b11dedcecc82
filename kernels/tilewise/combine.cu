// Joins the splits of a forward pass: the parts of a row's softmax, each with its own lse, are weighted by
// exp(lse_z - lse). Sinks enter here, once. grid.x: heads, and tiles of queries in them; grid.y: kWarps rows of a tile.

#include "base.cuh"

namespace tilewise {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocks = 1;

struct __align__(16) Four {
    float x[4];
};

// A row has a warp. Its lanes first hold the splits' weights, then four columns of o each: where a row has fewer columns
// than that, lanes side by side take one split after the other.
TW_KERNEL(combine, abi::Combine, c) {
#if !defined(TILEWISE_FAKE_CUDA) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");  // launched while the splits are still at work
#endif
    const abi::Problem& p = c.problem;
    const Int tiles = quotient(gridDim.x, p.num_heads_q), h = quotient(blockIdx.x, tiles);
    const Place place = place_of(p, blockIdx.x - h * tiles, true);
    if (place.b < 0) return;
    const Site site = make_site(p, place.b, h);
    const Int b = batch_of(p.packed_q, place.b), in_tile = Int(blockIdx.y) * kWarps + threadIdx.x / 32;
    if (in_tile >= p.q_tile || place.row + in_tile >= site.q_len) return;
    const Int row = site.q_row0 + place.row + in_tile;
    const int lane = threadIdx.x % 32, splits = static_cast<int>(c.split.splits), dims = static_cast<int>(p.head_dim_v);
    const float* const lse = static_cast<const float*>(c.split.lse.data) + b * c.split.lse.batch +
                             h * c.split.lse.head + row * c.split.lse.row;
    const float* const o = static_cast<const float*>(c.split.o.data) + b * c.split.o.batch + h * c.split.o.head +
                           row * c.split.o.row;
    const float kNone = -Limits<float>::infinity();
    const auto lse_of = [&](int z) { return z < splits ? lse[z * c.split.lse_split] : kNone; };

    const float first = lse_of(lane);  // most have no more splits than a warp has lanes
    float sink = kNone, highest = first, total = 0;
    if (p.sinks.data) sink = load_any<float>(p.sinks.data, p.sinks.dtype, h * p.sinks.head);
    for (int z = 32 + lane; z < splits; z += 32) highest = larger(highest, lse_of(z));
    for (int step = 16; step > 0; step /= 2) highest = larger(highest, __shfl_xor_sync(0xffffffffu, highest, step));
    highest = larger(highest, sink);
    const float shift = highest == kNone ? 0.0f : highest;
    for (int z = lane; z < splits; z += 32) total += expf((z == lane ? first : lse_of(z)) - shift);
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    if (p.sinks.data) total += expf(sink - shift);
    const float inverse = total == 0 ? 0.0f : 1 / total;

    const int lanes = dims <= 32 ? 8 : dims <= 64 ? 16 : 32, together = 32 / lanes;
    for (int d0 = 0; d0 < dims; d0 += 4 * lanes) {
        const int d = d0 + lane % lanes * 4;
        Four sum{};
        for (int z0 = 0; z0 < splits; z0 += 32) {
            const float weight = expf((z0 == 0 ? first : lse_of(z0 + lane)) - shift) * inverse;
            const int count = splits - z0 < 32 ? splits - z0 : 32;
#pragma unroll 4
            for (int n = 0; n < count; n += together) {
                const int z = n + lane / lanes;
                const float w = __shfl_sync(0xffffffffu, weight, z);
                if (w == 0 || d >= dims) continue;  // a split that saw nothing, or is none
                const Four part = *reinterpret_cast<const Four*>(o + (z0 + z) * c.split.o_split + d);
#pragma unroll
                for (int x = 0; x < 4; ++x) sum.x[x] += w * part.x[x];
            }
        }
        for (int step = lanes; step < 32; step *= 2) {
#pragma unroll
            for (int x = 0; x < 4; ++x) sum.x[x] += __shfl_xor_sync(0xffffffffu, sum.x[x], step);
        }
        if (lane >= lanes) continue;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            if (d + x < dims) {
                store_any<float>(c.o.data, c.dtype, b * c.o.batch + row * c.o.row + h * c.o.head + (d + x) * c.o.dim,
                                 sum.x[x]);
            }
        }
    }
    if (c.lse.data && lane == 0) {
        static_cast<float*>(c.lse.data)[b * c.lse.batch + h * c.lse.head + row * c.lse.row] =
            total == 0 ? kNone : shift + logf(total);
    }
}

}  // namespace tilewise
