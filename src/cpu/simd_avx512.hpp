// The ISA room for AVX-512 F + BW + DQ + VL (Skylake-X, Ice Lake, Zen 4 and later). What a room is: simd_scalar.hpp.
// Include this after every other header: the rest of the file is compiled for this instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define TILEWISE_ISA avx512

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

namespace tilewise::cpu::avx512 {

inline constexpr int kVectorBytes = 64;
// Of 32 registers: 24 accumulators, 2 vectors of B, 1 broadcast. 12 divides the 48 rows of a block; 14 x 2 would not,
// and 24 independent FMAs already cover latency 4 x 2 per clock.
inline constexpr int kTileRows = 12, kTileVectors = 2;

typedef float f32v __attribute__((vector_size(64)));
typedef double f64v __attribute__((vector_size(64)));
typedef int32_t i32v __attribute__((vector_size(64)));
typedef int64_t i64v __attribute__((vector_size(64)));

// The maskz forms with a full mask compile to the plain instructions; GCC 12 warns falsely about the plain intrinsics.
inline constexpr __mmask16 kAll16 = 0xffff;
inline constexpr __mmask8 kAll8 = 0xff;

[[gnu::always_inline]] inline f32v splat(float x) { return _mm512_set1_ps(x); }
[[gnu::always_inline]] inline f64v splat(double x) { return _mm512_set1_pd(x); }
[[gnu::always_inline]] inline f32v fma(f32v a, f32v b, f32v c) { return _mm512_fmadd_ps(a, b, c); }
[[gnu::always_inline]] inline f64v fma(f64v a, f64v b, f64v c) { return _mm512_fmadd_pd(a, b, c); }
[[gnu::always_inline]] inline f32v larger(f32v a, f32v b) { return _mm512_maskz_max_ps(kAll16, a, b); }
[[gnu::always_inline]] inline f64v larger(f64v a, f64v b) { return _mm512_maskz_max_pd(kAll8, a, b); }
[[gnu::always_inline]] inline f32v smaller(f32v a, f32v b) { return _mm512_maskz_min_ps(kAll16, a, b); }
[[gnu::always_inline]] inline f64v smaller(f64v a, f64v b) { return _mm512_maskz_min_pd(kAll8, a, b); }

[[gnu::always_inline]] inline f32v load_half(const uint16_t* p) {
    return _mm512_maskz_cvtph_ps(kAll16, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
[[gnu::always_inline]] inline f32v load_bfloat(const uint16_t* p) {
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll16, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll16, wide, 16));
}
[[gnu::always_inline]] inline void store_half(uint16_t* p, f32v v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_maskz_cvtps_ph(kAll16, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
[[gnu::always_inline]] inline void store_bfloat(uint16_t* p, f32v v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i high = _mm512_maskz_srli_epi32(kAll16, bits, 16);
    const __m512i half_ulp = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)));
    const __m512i rounded = _mm512_maskz_srli_epi32(kAll16, _mm512_add_epi32(bits, half_ulp), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));  // rounding could carry a NaN into infinity
    const __m512i word = _mm512_mask_mov_epi32(rounded, nan, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(kAll16, word));
}

}  // namespace tilewise::cpu::avx512
