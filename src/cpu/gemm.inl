// One matrix product for everything: C [M x N] = A [M x K] * B [K x N].
//
//   forward    S  = Q K^T     A = Q  by columns   B = K^T panels (pack_columns of K)
//              O += P V       A = P  by rows      B = V panels   (pack_rows of V)
//   backward   dP = dO V^T    A = dO by columns   B = V^T panels (pack_columns of V)
//              dV += P^T dO   A = P  by columns   B = dO panels  (pack_rows)
//              dK += dS^T Q   A = dS by columns   B = Q panels   (pack_rows)
//              dQ += dS K     A = dS by rows      B = K panels   (pack_rows)
//
// The micro-kernel keeps a kTileRows x kTileVectors block of C in registers and walks down K: per step kTileVectors
// loads of B, kTileRows broadcasts of A and kTileRows * kTileVectors FMAs. It is FMA-bound if the loads hit L1 or
// stream from L2, which the layouts see to:
//
//   B panels   kPanel = kTileVectors vectors wide, [panel][k][kPanel]: a micro-kernel reads one panel front to back,
//   and
//              a panel (K * kPanel * 4 bytes, 8 KiB for K = 128) stays in L1 while all row blocks of A pass. If N is an
//              odd number of vectors, the last panel is one vector wide.
//   A          by columns: element (m, k) at a[k * lda + m], so that the broadcasts of a step are neighbours;
//              by rows: element (m, k) at a[m * kTileN + k], the score tile as the softmax left it. The row stride is a
//              constant so that all rows of a block are one base register plus displacements.
//   C          row-major with stride ldc.
//
// Bits: element (m, n) is a chain of FMAs from 0 in the order of k, then one epilogue operation, whatever M, the split
// of M into blocks and the panel it lies in. So a row's result does not depend on its neighbours, and leaving out k
// with a zero in A changes nothing.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {

static_assert(kTileVectors == 2, "panels are two vectors wide, the last one two or one");
template <class T>
inline constexpr int kPanel = kTileVectors * kLanes<T>;

template <class T>
struct Panels {
    const T* data;
    int64_t depth;    // rows of a panel as packed (>= K)
    int64_t columns;  // N, a multiple of kLanes
};

enum class Order { by_rows, by_columns };

// What happens to C once the chain `sum` is complete.
enum class Epilogue {
    store,      // C = sum
    add,        // C = C + sum
    scale_add,  // C = C * scale[m] + sum
};

template <class T>
struct Product {
    const T* a;
    int64_t lda;  // by_columns only
    const T* b;   // start of the panel, at row k = 0
    int64_t k_begin, k_end;
    T* c;
    int64_t ldc;
    Epilogue epilogue;
    const T* scale;
};

// Rows [m, m + M) of one panel of V vectors.
template <class T, Order kOrder, int M, int V>
void micro_kernel(const Product<T>& p, int64_t m) {
    constexpr int kWidth = V * kLanes<T>;
    Vec<T> sum[M][V];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
        for (int n = 0; n < V; ++n) sum[i][n] = splat(T{0});
    }
    const int64_t a_step = kOrder == Order::by_rows ? 1 : p.lda;
    constexpr int64_t kRowStep = kOrder == Order::by_rows ? kTileN : 1;
    const T* a = p.a + m * kRowStep + p.k_begin * a_step;
    const T* b = p.b + p.k_begin * kWidth;
    const T* const b_end = p.b + p.k_end * kWidth;
#pragma GCC unroll 4
    for (; b < b_end; b += kWidth, a += a_step) {
        Vec<T> row[V];
#pragma GCC unroll 2
        for (int n = 0; n < V; ++n) row[n] = load(b + n * kLanes<T>);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const Vec<T> factor = splat(a[i * kRowStep]);
#pragma GCC unroll 2
            for (int n = 0; n < V; ++n) sum[i][n] = fma(factor, row[n], sum[i][n]);
        }
    }
    T* const c = p.c + m * p.ldc;
    const int64_t ldc = p.ldc;
    if (p.epilogue == Epilogue::store) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
            for (int n = 0; n < V; ++n) store<T>(c + i * ldc + n * kLanes<T>, sum[i][n]);
        }
        return;
    }
    const T one = 1;  // C * 1 + sum and C + sum are the same bits
    const T* const scale = p.epilogue == Epilogue::scale_add ? p.scale + m : &one;
    const int64_t scale_step = p.epilogue == Epilogue::scale_add ? 1 : 0;
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
        const Vec<T> factor = splat(scale[i * scale_step]);
#pragma GCC unroll 2
        for (int n = 0; n < V; ++n) {
            T* const at = c + i * ldc + n * kLanes<T>;
            store<T>(at, fma(load(at), factor, sum[i][n]));
        }
    }
}

// Block heights 1 ... kTileRows as a table of functions.
template <class T>
using MicroKernel = void (*)(const Product<T>&, int64_t);
template <class T, Order kOrder, int V, int... M>
constexpr MicroKernel<T> pick_kernel(int rows, std::integer_sequence<int, M...>) {
    constexpr MicroKernel<T> kTable[] = {micro_kernel<T, kOrder, M + 1, V>...};
    return kTable[rows - 1];
}

// One panel, rows [rows.begin, rows.end). The rows are split into blocks of nearly equal height: 7 rows as 4 + 3, not
// 6 + 1, because a low block has too few independent chains to hide the latency of an FMA.
template <class T, Order kOrder>
void multiply_panel(const Product<T>& p, core::Range rows, int vectors) {
    const int64_t count = rows.size();
    if (count == 0) return;
    const int64_t blocks = (count + kTileRows - 1) / kTileRows;
    int64_t m = rows.begin;
    for (int64_t n = 0; n < blocks; ++n) {
        const int height = static_cast<int>((count * (n + 1)) / blocks - (count * n) / blocks);
        constexpr std::make_integer_sequence<int, kTileRows> kHeights{};
        const auto kernel = vectors == kTileVectors ? pick_kernel<T, kOrder, kTileVectors>(height, kHeights)
                                                    : pick_kernel<T, kOrder, 1>(height, kHeights);
        kernel(p, m);
        m += height;
    }
}

// Rows `rows` of C = A * B, or of the other epilogues, over k in [k.begin, k.end). `scale` belongs to scale_add.
template <class T, Order kOrder>
void multiply(const T* a, int64_t lda, core::Range rows, const Panels<T>& b, core::Range k, T* c, int64_t ldc,
              Epilogue epilogue, const T* scale = nullptr) {
    for (int64_t column = 0; column < b.columns; column += kPanel<T>) {
        const int vectors = b.columns - column >= kPanel<T> ? 2 : 1;
        const Product<T> p{a, lda, b.data + column * b.depth, k.begin, k.end, c + column, ldc, epilogue, scale};
        multiply_panel<T, kOrder>(p, rows, vectors);
    }
}

}  // namespace tilewise::cpu::TILEWISE_ISA
