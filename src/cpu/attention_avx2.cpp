// The kernels for AVX2, FMA and F16C. All other headers come before the room, which switches the target:
// simd_scalar.hpp.
#if defined(__x86_64__)
#include <cmath>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "backward.hpp"
#include "core/dropout.hpp"
#include "cpu_tiled.hpp"
#include "simd_avx2.hpp"

#define TILEWISE_EXPR_NAMESPACE expr_avx2
#include "core/expr_eval.inl"

#include "vector_math.inl"

#include "gemm.inl"

#include "tile.inl"

#include "forward.inl"

#include "direct.inl"

#include "backward_tile.inl"

#include "backward.inl"

#include "kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop  // of the room
#endif
#endif
