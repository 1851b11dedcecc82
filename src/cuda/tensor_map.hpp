// Descriptors of the tensor memory accelerator (TMA) of Hopper and later.
#pragma once

#include <array>
#include <cstdint>

namespace tilewise::cuda {

// The numbers are the driver's.
enum class TmaType : int { u8 = 0, u16 = 1, u32 = 2, i32 = 3, u64 = 4, i64 = 5, f16 = 6, f32 = 7, f64 = 8, bf16 = 9 };
enum class TmaSwizzle : int { none = 0, bytes_32 = 1, bytes_64 = 2, bytes_128 = 3 };
enum class TmaL2 : int { none = 0, bytes_64 = 1, bytes_128 = 2, bytes_256 = 3 };

// Passed to a kernel as a part of its parameters, at an offset that is a multiple of 64.
struct alignas(64) TensorMap {
    std::array<uint64_t, 16> opaque;
};
static_assert(sizeof(TensorMap) == 128);

struct TiledLayout {
    const void* data = nullptr;  // device memory, 16-byte aligned
    TmaType dtype = TmaType::f16;
    int rank = 1;                            // 1 to 5
    std::array<uint64_t, 5> shape{};         // innermost first; elements
    std::array<uint64_t, 5> stride_bytes{};  // of axes 1 ..; axis 0 is dense and its entry unused
    std::array<uint32_t, 5> box{};           // elements of a tile
    TmaSwizzle swizzle = TmaSwizzle::none;
    TmaL2 l2 = TmaL2::bytes_256;
    bool nan_outside = false;  // what lies outside reads as NaN instead of zero
};

// Throws Error that names what the hardware does not take.
TensorMap encode_tiled(const TiledLayout& layout);

}  // namespace tilewise::cuda
