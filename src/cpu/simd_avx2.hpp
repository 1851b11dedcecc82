// The ISA room for AVX2 + FMA + F16C (Haswell, Zen and later). What a room is: simd_scalar.hpp. Include this after
// every other header: the rest of the file is compiled for this instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define TILEWISE_ISA avx2

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace tilewise::cpu::avx2 {

inline constexpr int kVectorBytes = 32;
// Of 16 registers: 12 accumulators, 2 vectors of B, 1 broadcast. 12 independent FMAs cover latency 4 x 2 per clock, and
// 8 loads per 12 FMAs stay below the 2 loads per clock of every AVX2 core.
inline constexpr int kTileRows = 6, kTileVectors = 2;

typedef float f32v __attribute__((vector_size(32)));
typedef double f64v __attribute__((vector_size(32)));
typedef int32_t i32v __attribute__((vector_size(32)));
typedef int64_t i64v __attribute__((vector_size(32)));

[[gnu::always_inline]] inline f32v splat(float x) { return _mm256_set1_ps(x); }
[[gnu::always_inline]] inline f64v splat(double x) { return _mm256_set1_pd(x); }
[[gnu::always_inline]] inline f32v fma(f32v a, f32v b, f32v c) { return _mm256_fmadd_ps(a, b, c); }
[[gnu::always_inline]] inline f64v fma(f64v a, f64v b, f64v c) { return _mm256_fmadd_pd(a, b, c); }
[[gnu::always_inline]] inline f32v larger(f32v a, f32v b) { return _mm256_max_ps(a, b); }
[[gnu::always_inline]] inline f64v larger(f64v a, f64v b) { return _mm256_max_pd(a, b); }
[[gnu::always_inline]] inline f32v smaller(f32v a, f32v b) { return _mm256_min_ps(a, b); }
[[gnu::always_inline]] inline f64v smaller(f64v a, f64v b) { return _mm256_min_pd(a, b); }

[[gnu::always_inline]] inline f32v load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline f32v load_bfloat(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
[[gnu::always_inline]] inline void store_half(uint16_t* p, f32v v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
[[gnu::always_inline]] inline void store_bfloat(uint16_t* p, f32v v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i half_ulp = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half_ulp), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));  // rounding could carry a NaN into infinity
    const __m256i word = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(word, word), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

}  // namespace tilewise::cpu::avx2
