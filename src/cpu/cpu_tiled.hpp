// cpu_tiled: the fused CPU kernels. This header is the door between the driver (cpu_tiled.cpp: shapes, memory, waves
// and work items; compiled once) and the kernels (attention_<isa>.cpp: tiles; compiled once per instruction set).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/expr.hpp"
#include "core/mask.hpp"
#include "core/problem.hpp"
#include "core/registry.hpp"
#include "isa.hpp"

namespace tilewise::cpu {

extern const core::Implementation kCpuTiled;

// Keys per tile, query rows per block. Chosen by measurement (Zen 3, 32 KiB L1): 48 x 128 fp32 scores are 24 KiB, so
// that the softmax finds them in L1, and the depth of P V amortises reading and writing the 48 x head_dim_v
// accumulator.
inline constexpr int kTileN = 128;
inline constexpr int kTileM = 48;
// Segments of this many keys, counted from key 0, are softmaxed on their own and merged in ascending order, in prefill
// and decode alike: that makes the bits of a row independent of threads, splits and chunking.
inline constexpr int64_t kSegment = 1024;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
// Row length of accumulators and packed rows: whole cache lines, whatever the ISA, so that memory does not depend on
// it.
template <class T>
constexpr int64_t padded(int64_t dim) {
    return round_up(dim, 64 / static_cast<int64_t>(sizeof(T)));
}

// Query rows that are worked on together: `queries` consecutive queries of `heads` consecutive heads of one KV head.
struct RowBlock {
    int64_t b = 0, h0 = 0, i0 = 0;
    int heads = 1, queries = 0;

    [[nodiscard]] int rows() const { return heads * queries; }  // at most kTileM
    [[nodiscard]] int64_t head(int row) const { return h0 + row / queries; }
    [[nodiscard]] int64_t query(int row) const { return i0 + row % queries; }
};

// What all threads of one pass share; read-only.
struct Call {
    const core::Problem* problem = nullptr;
    const core::BoundMask* mask = nullptr;
    const core::RowProgram* score_mod = nullptr;  // null: none

    [[nodiscard]] const core::Sequence& sequence(int64_t b) const { return problem->sequences[static_cast<size_t>(b)]; }
    // The score is scale * <q, k> and nothing else, so the softmax can work on raw products. A scale <= 0 would turn
    // their order around; an extreme one would lose what the exponential relies on.
    [[nodiscard]] bool plain() const {
        const double scale = problem->softmax_scale;
        return problem->softcap == 0 && !problem->bias && !problem->alibi_slopes && !score_mod && scale > 1e-25 &&
               scale < 1e25;
    }
};

// Tiles of keys that a block of rows sees, within a range of keys, in ascending order. The range begins at a multiple
// of kTileN and may reach past the sequence. Valid until the thread's next call.
std::span<const core::Tile> visible_tiles(const Call& call, const RowBlock& block, core::Range keys);

// One packed tile of kTileN keys: K by columns, V by rows (gemm.inl), and which rows of V are not finite.
template <class T>
struct KvTile {
    T* k;          // [panel of keys][head_dim_qk][kPanel]
    T* v;          // [panel of dims][kTileN][kPanel]
    uint8_t* hot;  // hot[kTileN]: some row is not finite; then hot[row]. Such rows are 0 in v.

    static int64_t bytes(const core::Problem& p) {
        const int64_t elements = kTileN * (p.head_dim_qk + padded<T>(p.head_dim_v));
        return round_up(elements * static_cast<int64_t>(sizeof(T)) + kTileN + 1, 64);
    }
    static KvTile at(std::byte* memory, const core::Problem& p) {
        T* k = reinterpret_cast<T*>(memory);
        T* v = k + kTileN * p.head_dim_qk;
        return {k, v, reinterpret_cast<uint8_t*>(v + kTileN * padded<T>(p.head_dim_v))};
    }
};

// Softmax state of a block: row maximum, sum and output, not yet divided. A row that has seen nothing has l = 0.
template <class T>
struct State {
    T* m;  // [rows]
    T* l;  // [rows]
    T* o;  // [rows][padded head_dim_v]

    static int64_t bytes(const core::Problem& p, int64_t rows) {
        return (padded<T>(2 * rows) + rows * padded<T>(p.head_dim_v)) * static_cast<int64_t>(sizeof(T));
    }
    static State at(std::byte* memory, int64_t rows) {
        T* m = reinterpret_cast<T*>(memory);
        return {m, m + rows, m + padded<T>(2 * rows)};
    }
};

// A block of at most kDirectRows rows is not worth packing for: dot products with K and V as they lie in memory
// (direct.inl), of up to kDirectHeads KV heads together, which take turns every kDirectChunk keys. With so few rows
// there is no work but reading, so the segments are shorter than kSegment: more to share among threads.
inline constexpr int kDirectRows = 4, kDirectHeads = 8;
inline constexpr int64_t kDirectSegment = 256, kDirectChunk = 16;

// One block of rows against some of its keys.
struct ForwardItem {
    RowBlock block;
    core::Range keys;              // whole segments
    std::byte* packed = nullptr;   // packed KV tiles of this sequence and KV head, all of them; null: none
    std::byte* partial = nullptr;  // where the State of the only segment goes; null: finish and write o and lse
    // Direct: the same block of this many KV heads from block's on, whose States lie partial_step bytes apart. 0: not
    // direct.
    int heads_kv = 0;
    int64_t partial_step = 0;
};

// Thread scratch of the forward pass; the same code measures and carves (with a null base nothing is written).
template <class T>
struct ForwardScratch {
    T* q;            // [head_dim_qk][kTileM]; direct: [KV head][kDirectRows][padded head_dim_qk]
    T* s;            // [kTileM][kTileN]; direct: [KV head][2][kDirectRows][kTileN]
    T* scale;        // [kTileM]; direct: [KV head][kTileM]
    uint8_t* bytes;  // [kTileN]
    uint8_t* seen;   // [kTileM][kTileN]
    State<T> run, segment;
    KvTile<T> tile;
    std::byte* mod;  // of the score_mod evaluator

    static int64_t carve(const core::Problem& p, const core::RowProgram* score_mod, std::byte* base,
                         ForwardScratch* out) {
        int64_t used = 0;
        const auto take = [&](int64_t bytes) {
            std::byte* piece = base ? base + used : nullptr;
            used += round_up(bytes, 64);
            return piece;
        };
        constexpr int64_t kSize = sizeof(T);
        static_assert(kDirectHeads * kDirectRows <= kTileM);  // States
        std::byte* const q =
            take(std::max(p.head_dim_qk * kTileM, kDirectHeads * kDirectRows * padded<T>(p.head_dim_qk)) * kSize);
        std::byte* const s = take(std::max<int64_t>(kTileM, 2 * kDirectHeads * kDirectRows) * kTileN * kSize);
        std::byte* const scale = take(kDirectHeads * kTileM * kSize);
        std::byte* const bytes = take(kTileN);
        std::byte* const seen = take(int64_t{kTileM} * kTileN);
        std::byte* const run = take(State<T>::bytes(p, kTileM));
        std::byte* const segment = take(State<T>::bytes(p, kTileM));
        std::byte* const tile = take(KvTile<T>::bytes(p));
        std::byte* const mod = take(score_mod ? score_mod->scratch_bytes(kTileN, sizeof(T)) : 0);
        if (out) {
            *out = {reinterpret_cast<T*>(q),           reinterpret_cast<T*>(s),          reinterpret_cast<T*>(scale),
                    reinterpret_cast<uint8_t*>(bytes), reinterpret_cast<uint8_t*>(seen), State<T>::at(run, kTileM),
                    State<T>::at(segment, kTileM),     KvTile<T>::at(tile, p),           mod};
        }
        return used;
    }
};

// Kernels for T = float or double.
template <class T>
struct KernelsOf {
    void (*pack_tile)(const Call& call, int64_t b, int64_t head_kv, int64_t j0, const KvTile<T>& tile);
    void (*forward_block)(const Call& call, const core::ForwardArgs& args, const ForwardItem& item, std::byte* scratch);
    void (*direct_block)(const Call& call, const core::ForwardArgs& args, const ForwardItem& item, std::byte* scratch);
    // Merges the States of `count` segments, `stride` bytes apart, in order into the first, and writes o and lse.
    void (*merge_partials)(const Call& call, const core::ForwardArgs& args, const RowBlock& block, std::byte* partials,
                           int64_t count, int64_t stride);

    // For tests. C [m][kTileN] = A * B for n, k <= kTileN; A is [k][m] if by_columns, else [m][kTileN]; B [k][n];
    // scratch holds kTileN * kTileN elements. Functions: 0 = 2^x, 1 = tanh; n is a multiple of 16.
    void (*test_multiply)(const T* a, bool by_columns, const T* b, T* c, int64_t m, int64_t n, int64_t k, T* scratch);
    void (*test_function)(int which, const T* x, T* out, int64_t n);
};

struct BackwardKernels;  // of backward.inl
struct Kernels {
    KernelsOf<float> f32;
    KernelsOf<double> f64;
    // Widening and rounding of 16-bit floats, for tests; n is a multiple of 16.
    void (*test_load16)(core::DType dtype, const uint16_t* in, float* out, int64_t n);
    void (*test_store16)(core::DType dtype, const float* in, uint16_t* out, int64_t n);
    const BackwardKernels* backward;  // null: none

    template <class T>
    [[nodiscard]] const KernelsOf<T>& of() const {
        if constexpr (sizeof(T) == 4) return f32;
        else return f64;
    }
};
const Kernels& kernels(Isa isa);

namespace scalar {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace tilewise::cpu
