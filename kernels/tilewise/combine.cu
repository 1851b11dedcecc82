// Joins the splits of a forward pass: the parts of a row's softmax, each with its own lse, are weighted by
// exp(lse_z - lse). Sinks enter here, once.

#include "base.cuh"

namespace tilewise {

constexpr int kThreads = 128, kBlocks = 1;

TW_KERNEL(combine, abi::Combine, c) {
    const abi::Problem& p = c.problem;
    const Int tiles = gridDim.x / p.num_heads_q, h = blockIdx.x / tiles;
    const Place place = place_of(p, blockIdx.x % tiles, true);
    if (place.b < 0) return;
    const Site site = make_site(p, place.b, h);
    const Int b = batch_of(p.packed_q, place.b), lane = threadIdx.x % 32;
    const Int end = minimum(place.row + p.q_tile, site.q_len);
    for (Int i = place.row + threadIdx.x / 32; i < end; i += kThreads / 32) {
        const Int row = site.q_row0 + i;
        const float* const lse = static_cast<const float*>(c.split.lse.data) + b * c.split.lse.batch +
                                 h * c.split.lse.head + row * c.split.lse.row;
        const float* const o = static_cast<const float*>(c.split.o.data) + b * c.split.o.batch + h * c.split.o.head +
                               row * c.split.o.row;
        float sink = -Limits<float>::infinity(), highest = sink, total = 0;
        if (p.sinks.data) highest = sink = load_any<float>(p.sinks.data, p.sinks.dtype, h * p.sinks.head);
        for (Int z = 0; z < c.split.splits; ++z) highest = larger(highest, lse[z * c.split.lse_split]);
        const float shift = highest == -Limits<float>::infinity() ? 0.0f : highest;
        for (Int z = 0; z < c.split.splits; ++z) total += expf(lse[z * c.split.lse_split] - shift);
        if (p.sinks.data) total += expf(sink - shift);
        const bool empty = total == 0;
        for (Int d = lane; d < p.head_dim_v; d += 32) {
            float sum = 0;
            for (Int z = 0; z < c.split.splits; ++z) {
                const float weight = expf(lse[z * c.split.lse_split] - shift);
                if (weight != 0) sum += weight * o[z * c.split.o_split + d];
            }
            store_any<float>(c.o.data, c.dtype, b * c.o.batch + row * c.o.row + h * c.o.head + d * c.o.dim,
                             empty ? 0.0f : sum / total);
        }
        if (c.lse.data && lane == 0) {
            static_cast<float*>(c.lse.data)[b * c.lse.batch + h * c.lse.head + row * c.lse.row] =
                empty ? -Limits<float>::infinity() : shift + logf(total);
        }
    }
}

}  // namespace tilewise
