// What an instruction set exports: one table of entry points, and thin test entries for the parts that have no other
// door.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {
namespace {

template <class T>
void test_multiply(const T* a, bool by_columns, const T* b, T* c, int64_t m, int64_t n, int64_t k, T* scratch) {
    // B is packed by columns from its transpose, or by rows, as the two kinds of products do it.
    T* const packed = scratch;
    uint8_t hot[kTileN + 1];
    const Source source{b, sizeof(T) == 8 ? DType::f64 : DType::f32, 0, by_columns ? 1 : n, by_columns ? n : 1};
    if (by_columns) {
        pack_columns<T>(source, n, k, round_up(n, kPanel<T>), kPanel<T>, packed);
        multiply<T, Order::by_columns>(a, m, {0, m}, {packed, k, round_up(n, kPanel<T>)}, {0, k}, c, kTileN,
                                       Epilogue::store);
    } else {
        pack_rows<T>(source, k, n, k, packed, hot);
        multiply<T, Order::by_rows>(a, 0, {0, m}, panels_of(packed, k, n), {0, k}, c, kTileN, Epilogue::store);
    }
}

template <class T>
void test_function(int which, const T* x, T* out, int64_t n) {
    for (int64_t k = 0; k < n; k += kLanes<T>)
        store<T>(out + k, which == 0 ? exp2<T>(load(x + k)) : tanh<T>(load(x + k)));
}

void test_load16(DType dtype, const uint16_t* in, float* out, int64_t n) {
    for (int64_t k = 0; k < n; k += kLanes<float>) {
        store<float>(out + k, dtype == DType::f16 ? load_half(in + k) : load_bfloat(in + k));
    }
}
void test_store16(DType dtype, const float* in, uint16_t* out, int64_t n) {
    for (int64_t k = 0; k < n; k += kLanes<float>) {
        if (dtype == DType::f16) store_half(out + k, load(in + k));
        else store_bfloat(out + k, load(in + k));
    }
}

template <class T>
constexpr KernelsOf<T> kernels_of() {
    return {pack_tile<T>, forward_block<T>, direct_block<T>, merge_partials<T>, test_multiply<T>, test_function<T>};
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels{kernels_of<float>(), kernels_of<double>(), test_load16, test_store16, &kBackwardKernels};

}  // namespace tilewise::cpu::TILEWISE_ISA
