#include "tensor_map.hpp"

#include <string>

#include "core/error.hpp"
#include "driver.hpp"

namespace tilewise::cuda {
namespace {

uint64_t size_of(TmaType dtype) {
    switch (dtype) {
        case TmaType::u8: return 1;
        case TmaType::u16:
        case TmaType::f16:
        case TmaType::bf16: return 2;
        case TmaType::u32:
        case TmaType::i32:
        case TmaType::f32: return 4;
        case TmaType::u64:
        case TmaType::i64:
        case TmaType::f64: return 8;
    }
    return 0;
}

uint64_t span_of(TmaSwizzle swizzle) {
    return swizzle == TmaSwizzle::none ? 0 : uint64_t{16} << static_cast<int>(swizzle);
}

std::string axis(const char* what, int d) { return std::string(what) + "[" + std::to_string(d) + "]"; }

[[noreturn]] void refuse(const std::string& what, const std::string& seen, const std::string& allowed) {
    // Callers choose layouts that fit, so this is our mistake and not the user's.
    throw core::Error(core::Status::internal, "tensor map, " + what + ": got " + seen + "; allowed: " + allowed + ".");
}

// The driver answers "invalid value" to each of these alike.
void validate(const TiledLayout& t) {
    if (t.rank < 1 || t.rank > 5) refuse("rank", std::to_string(t.rank), "1 to 5");
    const uint64_t element = size_of(t.dtype);
    if (element == 0) refuse("dtype", std::to_string(static_cast<int>(t.dtype)), "one of TmaType");
    const auto data = reinterpret_cast<uintptr_t>(t.data);
    if (data == 0 || data % 16) refuse("data", std::to_string(data), "an address that is a multiple of 16");
    for (int d = 0; d < t.rank; ++d) {
        const auto i = static_cast<size_t>(d);
        if (t.shape[i] == 0 || t.shape[i] > (uint64_t{1} << 32))
            refuse(axis("shape", d), std::to_string(t.shape[i]), "1 to 2^32");
        if (t.box[i] == 0 || t.box[i] > 256) refuse(axis("box", d), std::to_string(t.box[i]), "1 to 256");
        if (d == 0) continue;
        if (t.stride_bytes[i] % 16 || t.stride_bytes[i] >= (uint64_t{1} << 40)) {
            refuse(axis("stride_bytes", d), std::to_string(t.stride_bytes[i]), "multiples of 16 below 2^40");
        }
    }
    const uint64_t row = t.box[0] * element, span = span_of(t.swizzle);
    if (row % 16) refuse("inner row of the box", std::to_string(row) + " bytes", "multiples of 16 bytes");
    if (span != 0 && row > span) {
        refuse("inner row of the box", std::to_string(row) + " bytes",
               "up to the span of the swizzle, " + std::to_string(span) + " bytes");
    }
}

}  // namespace

TensorMap encode_tiled(const TiledLayout& layout) {
    validate(layout);
    // Not in the returned object: GCC does not align the place of a result that its caller drops.
    alignas(64) std::array<uint64_t, 16> opaque{};
    const std::array<uint32_t, 5> ones{1, 1, 1, 1, 1};
    const Result result = driver().encode_tiled(
        opaque.data(), static_cast<int>(layout.dtype), static_cast<uint32_t>(layout.rank),
        const_cast<void*>(layout.data), layout.shape.data(), layout.stride_bytes.data() + 1, layout.box.data(),
        ones.data(), 0, static_cast<int>(layout.swizzle), static_cast<int>(layout.l2), layout.nan_outside ? 1 : 0);
    check(result, [&] {
        std::string text = "encoding a tensor map (dtype " + std::to_string(static_cast<int>(layout.dtype)) + ", shape";
        for (size_t d = 0; d < static_cast<size_t>(layout.rank); ++d) {
            text += " " + std::to_string(layout.shape[d]) + ":" +
                    (d ? std::to_string(layout.stride_bytes[d]) : "dense") + ":" + std::to_string(layout.box[d]);
        }
        return text + " as size:stride:box, swizzle " + std::to_string(span_of(layout.swizzle)) + ")";
    });
    return {opaque};
}

}  // namespace tilewise::cuda
