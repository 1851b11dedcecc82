// The ISA room for every CPU: 128-bit vectors that the compiler lowers to whatever there is (SSE2, NEON, plain code).
//
// What a room is: the namespace in which the .inl files of this directory are compiled once more, and the few things
// that differ between instruction sets. All rooms define the same names:
//
//   TILEWISE_ISA                    name of the namespace
//   kVectorBytes                    width of a vector
//   kTileRows x kTileVectors        register tile of the matrix product: accumulators + B vectors + one broadcast must
//                                   fit the register file
//   f32v f64v i32v i64v             vectors; + - * / < ? : and friends are the compiler's
//   splat(x)                        x in every lane
//   fma(a, b, c)                    a * b + c, rounded once where the hardware can
//   larger(a, b), smaller(a, b)     a > b ? a : b and a < b ? a : b, so the result is b if either is NaN
//   load_half load_bfloat           kVectorBytes / 4 16-bit floats, widened
//   store_half store_bfloat         the reverse, rounded to nearest even, NaN stays NaN
//
// One definition rule. A room with more instructions than the baseline must not leak them: the linker keeps one copy of
// every inline function or template instance that several objects hold, and if it kept the AVX-512 copy of a
// std::vector member, the library would crash on other machines. Therefore these objects are compiled with the baseline
// flags, all standard and core headers come first, and only then the room switches the target for the rest of the file.
// Templates keep the target of the place where they are defined, so std:: code stays baseline even when it is
// instantiated by a kernel, and kernels live in the room's namespace, where nothing is shared.
#pragma once

#include <cstdint>

#include "core/types.hpp"

#define TILEWISE_ISA scalar

namespace tilewise::cpu::scalar {

inline constexpr int kVectorBytes = 16;
inline constexpr int kTileRows = 4, kTileVectors = 2;

typedef float f32v __attribute__((vector_size(16)));
typedef double f64v __attribute__((vector_size(16)));
typedef int32_t i32v __attribute__((vector_size(16)));
typedef int64_t i64v __attribute__((vector_size(16)));

[[gnu::always_inline]] inline f32v splat(float x) { return f32v{x, x, x, x}; }
[[gnu::always_inline]] inline f64v splat(double x) { return f64v{x, x}; }
[[gnu::always_inline]] inline f32v fma(f32v a, f32v b, f32v c) { return a * b + c; }
[[gnu::always_inline]] inline f64v fma(f64v a, f64v b, f64v c) { return a * b + c; }
[[gnu::always_inline]] inline f32v larger(f32v a, f32v b) { return a > b ? a : b; }
[[gnu::always_inline]] inline f64v larger(f64v a, f64v b) { return a > b ? a : b; }
[[gnu::always_inline]] inline f32v smaller(f32v a, f32v b) { return a < b ? a : b; }
[[gnu::always_inline]] inline f64v smaller(f64v a, f64v b) { return a < b ? a : b; }

inline f32v load_half(const uint16_t* p) {
    return f32v{core::half_to_float(p[0]), core::half_to_float(p[1]), core::half_to_float(p[2]),
                core::half_to_float(p[3])};
}
inline f32v load_bfloat(const uint16_t* p) {
    return f32v{core::bfloat_to_float(p[0]), core::bfloat_to_float(p[1]), core::bfloat_to_float(p[2]),
                core::bfloat_to_float(p[3])};
}
inline void store_half(uint16_t* p, f32v v) {
    for (int n = 0; n < 4; ++n) p[n] = core::float_to_half(v[n]);
}
inline void store_bfloat(uint16_t* p, f32v v) {
    for (int n = 0; n < 4; ++n) p[n] = core::float_to_bfloat(v[n]);
}

}  // namespace tilewise::cpu::scalar
