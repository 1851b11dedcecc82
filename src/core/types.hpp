// The small vocabulary that every room shares: dtypes, ranges, strided arrays.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

namespace tilewise::core {

// Numbers are those of tilewise_dtype in tilewise.h.
enum class DType : int32_t {
    none = 0,
    f64 = 1,
    f32 = 2,
    f16 = 3,
    bf16 = 4,
    i64 = 5,
    i32 = 6,
    i16 = 7,
    i8 = 8,
    u8 = 9,
    boolean = 10,
    u32 = 11,
};

const char* name(DType dtype);
int64_t size_of(DType dtype);
inline bool is_float(DType dtype) {
    return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}
inline bool is_integer(DType dtype) { return dtype >= DType::i64 && dtype <= DType::u32; }  // bool included

// Half-open range of rows, keys or tokens.
struct Range {
    int64_t begin = 0;
    int64_t end = 0;
    [[nodiscard]] int64_t size() const { return end > begin ? end - begin : 0; }
    [[nodiscard]] bool empty() const { return end <= begin; }
};

inline constexpr int kMaxRank = 5;

// A strided array that somebody else owns. Strides count elements and may be 0 or negative.
struct Array {
    void* data = nullptr;
    DType dtype = DType::none;  // none = absent
    int32_t rank = 0;
    std::array<int64_t, kMaxRank> shape{};
    std::array<int64_t, kMaxRank> stride{};

    explicit operator bool() const { return dtype != DType::none; }
    [[nodiscard]] int64_t size() const {
        int64_t n = 1;
        for (int d = 0; d < rank; ++d) n *= shape[d];
        return n;
    }
    [[nodiscard]] int64_t offset(int64_t n) const {  // of element n in row-major order, in elements
        int64_t at = 0;
        for (int d = rank - 1; d >= 0; n /= shape[d--]) at += n % shape[d] * stride[d];
        return at;
    }
};

std::string describe(const Array& array);  // "float32 [2, 3, 4]"

// 16-bit floats are stored as integers; arithmetic happens in fp32.
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);  // round to nearest even
inline float bfloat_to_float(uint16_t bits) {
    uint32_t word = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}
uint16_t float_to_bfloat(float value);  // round to nearest even, NaN stays NaN

// Element access by element offset for any float dtype, and for any integer or bool dtype.
double load_float(const void* data, DType dtype, int64_t offset);
int64_t load_int(const void* data, DType dtype, int64_t offset);
void store_float(void* data, DType dtype, int64_t offset, double value);

}  // namespace tilewise::core
