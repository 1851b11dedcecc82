#include "types.hpp"

#include <bit>
#include <cmath>
#include <limits>

namespace tilewise::core {

const char* name(DType dtype) {
    switch (dtype) {
        case DType::none: return "none";
        case DType::f64: return "float64";
        case DType::f32: return "float32";
        case DType::f16: return "float16";
        case DType::bf16: return "bfloat16";
        case DType::i64: return "int64";
        case DType::i32: return "int32";
        case DType::i16: return "int16";
        case DType::i8: return "int8";
        case DType::u8: return "uint8";
        case DType::boolean: return "bool";
        case DType::u32: return "uint32";
    }
    return "unknown";
}

int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
        case DType::i64: return 8;
        case DType::f32:
        case DType::i32:
        case DType::u32: return 4;
        case DType::f16:
        case DType::bf16:
        case DType::i16: return 2;
        case DType::i8:
        case DType::u8:
        case DType::boolean: return 1;
        case DType::none: return 0;
    }
    return 0;
}

std::string describe(const Array& array) {
    std::string text = std::string(name(array.dtype)) + " [";
    for (int d = 0; d < array.rank; ++d) text += (d ? ", " : "") + std::to_string(array.shape[d]);
    return text + "]";
}

float half_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t exponent = (bits >> 10) & 0x1f;
    const uint32_t mantissa = bits & 0x3ff;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in fp32
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
    }
    const uint32_t fp32_exponent = exponent == 31 ? 255 : exponent + 112;
    return std::bit_cast<float>(sign | (fp32_exponent << 23) | (mantissa << 13));
}

uint16_t float_to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));  // NaN
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (magnitude < 0x38800000u) {
        // Below the smallest normal half, adding 0.5 makes the FPU round at bit 2^-24 for us.
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return static_cast<uint16_t>(sign | (rounded >> 13));
}

uint16_t float_to_bfloat(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // keep NaN a NaN
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

double load_float(const void* data, DType dtype, int64_t offset) {
    switch (dtype) {
        case DType::f64: return static_cast<const double*>(data)[offset];
        case DType::f32: return static_cast<const float*>(data)[offset];
        case DType::f16: return half_to_float(static_cast<const uint16_t*>(data)[offset]);
        case DType::bf16: return bfloat_to_float(static_cast<const uint16_t*>(data)[offset]);
        default: return static_cast<double>(load_int(data, dtype, offset));
    }
}

int64_t load_int(const void* data, DType dtype, int64_t offset) {
    switch (dtype) {
        case DType::i64: return static_cast<const int64_t*>(data)[offset];
        case DType::i32: return static_cast<const int32_t*>(data)[offset];
        case DType::u32: return static_cast<const uint32_t*>(data)[offset];
        case DType::i16: return static_cast<const int16_t*>(data)[offset];
        case DType::i8: return static_cast<const int8_t*>(data)[offset];
        case DType::u8: return static_cast<const uint8_t*>(data)[offset];
        // Any non-zero byte is true: foreign bool arrays do not promise 0 and 1.
        case DType::boolean: return static_cast<const uint8_t*>(data)[offset] != 0;
        default: return 0;
    }
}

void store_float(void* data, DType dtype, int64_t offset, double value) {
    switch (dtype) {
        case DType::f64: static_cast<double*>(data)[offset] = value; break;
        case DType::f32: static_cast<float*>(data)[offset] = static_cast<float>(value); break;
        case DType::f16: static_cast<uint16_t*>(data)[offset] = float_to_half(static_cast<float>(value)); break;
        case DType::bf16: static_cast<uint16_t*>(data)[offset] = float_to_bfloat(static_cast<float>(value)); break;
        default: break;
    }
}

}  // namespace tilewise::core
