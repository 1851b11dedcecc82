// A prefix sum, or the like, over the threads of a block.
#pragma once

#include "base.cuh"

namespace tilewise {

// Inclusive scan over a block of kSize threads by `join`, which must be associative.
template <int kSize, class Join>
TW_DEVICE Int block_scan(Int x, Int (&shared)[kSize], const Join& join) {
    const int t = threadIdx.x;
    shared[t] = x;
    __syncthreads();
    for (int distance = 1; distance < kSize; distance *= 2) {
        const Int other = t >= distance ? shared[t - distance] : 0;
        __syncthreads();
        if (t >= distance) shared[t] = join(other, shared[t]);
        __syncthreads();
    }
    const Int result = shared[t];
    __syncthreads();
    return result;
}

}  // namespace tilewise
