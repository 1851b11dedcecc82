// Merges partial results over disjoint sets of keys: what split-KV decoding and ring attention do with their parts.
#pragma once

#include "types.hpp"

namespace tilewise::core {

// o_parts [parts, rows, head_dim_v], lse_parts [parts, rows] -> o [rows, head_dim_v], lse [rows]; parts in order.
// A part with lse = -inf contributes nothing, whatever its o holds. Arithmetic in fp64.
void merge(const Array& o_parts, const Array& lse_parts, const Array& o, const Array& lse);

}  // namespace tilewise::core
