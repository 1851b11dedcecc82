// The dropout mask of the formula: Philox4x32 with 7 rounds, a pure function of (seed, offset, b, h, i, j), so that
// every tiling, split and device drops the same elements. Source: Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace tilewise::core {

// T of the formula: round(65536 * p); an element is kept iff its 16-bit lane >= T.
uint32_t dropout_threshold(double dropout_p);

// One element, the definition read literally.
bool dropout_keep(int64_t seed, int64_t offset, int64_t bh, int64_t i, int64_t j, uint32_t threshold);

// out[n] = 1 if element (i, j.begin + n) is kept; bh = b * num_heads_q + h.
void dropout_row(int64_t seed, int64_t offset, int64_t bh, int64_t i, Range j, uint32_t threshold, uint8_t* out);

}  // namespace tilewise::core
