// What all attention kernels ask of a problem: the class of a tile, and the score of an element. spec.cuh comes before
// this file: Real, kTileQ queries by kTileKV keys, and which options there are.
#pragma once

#include "mask.cuh"

namespace tilewise {

// Of the tile that starts at query i0 and key j0; what lies beyond the lengths makes it partial.
TW_DEVICE int class_within(const abi::Problem& p, const MaskData& mask, const Site& site, Int i0, Int j0) {
    const Int i1 = minimum(i0 + kTileQ, site.q_len), j1 = minimum(j0 + kTileKV, site.kv_len);
    if (i0 >= i1 || j0 >= j1) return kSkip;
    const int c = classify(p, mask, site, i0, i1, j0, j1);
    return c == kFull && (i1 < i0 + kTileQ || j1 < j0 + kTileKV) ? kPartial : c;
}

// ---------------------------------------------------------------------------------------------------------------------
// From q k^T to the score that enters softmax, element by element

constexpr bool kPlainScore = !kSoftcap && !kBias && !kSlopes && !kScoreMod;  // nothing but the scale

struct ScoreContext {
    const abi::Problem& p;
    const MaskData& mask;
    Site site;
    Real scale, softcap, slope;

    __device__ __forceinline__ ScoreContext(const abi::Problem& problem, const MaskData& data, const Site& where)
        : p(problem), mask(data), site(where), scale(Real(problem.softmax_scale)), softcap(Real(problem.softcap)),
          slope(0) {
        if (kSlopes) {
            slope = load_any<Real>(p.slopes.data, p.slopes.dtype, site.b * p.slopes.batch + site.h * p.slopes.head);
        }
    }

    __device__ __forceinline__ Real distance(Int i, Int j) const { return absolute(Real(i + site.q_offset - j)); }

    // Score before score_mod; capped is the score after softcap.
    __device__ __forceinline__ Real before_mod(Real product, Int i, Int j, Real& capped) const {
        Real x = product * scale;
        if (kSoftcap) x = softcap * hyperbolic_tangent(x / softcap);
        capped = x;
        if (kBias) x += bias(i, j);
        if (kSlopes) x -= slope * distance(i, j);
        return x;
    }
    __device__ __forceinline__ Real after_mod(Real x, Int i, Int j) const {
        if constexpr (kScoreMod) return score_mod(site, mask, x, i, j);
        return x;
    }
    __device__ __forceinline__ bool sees(int tile_class, Int i, Int j) const {
        if (tile_class == kFull) return true;
        return i < site.q_len && j < site.kv_len && visible(p, mask, site, i, j);
    }

private:
    __device__ __forceinline__ Real bias(Int i, Int j) const {
        // Lengths in device memory may exceed what the host could check the shape against.
        const bool inside = (p.bias.shape[2] == 1 || i < p.bias.shape[2]) && (p.bias.shape[3] == 1 || j < p.bias.shape[3]);
        if (!inside) return 0;
        return load_any<Real>(p.bias.data, p.bias.dtype,
                              site.b * p.bias.stride[0] + site.h * p.bias.stride[1] + i * p.bias.stride[2] +
                                  j * p.bias.stride[3]);
    }
};

}  // namespace tilewise
