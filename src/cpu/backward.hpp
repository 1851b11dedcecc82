// The backward pass of cpu_tiled. This header is the door between its driver (backward.cpp: memory, items, order;
// compiled once) and its kernels (backward.inl: tiles; compiled once per instruction set).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cpu_tiled.hpp"

namespace tilewise::cpu {

// Called by cpu_tiled.cpp.
size_t backward_workspace_bytes(const core::Problem& problem);
std::string backward_explain(const core::Problem& problem);
void run_backward(const core::Problem& problem, const core::BackwardArgs& args, core::Workspace workspace);

// Query rows that a tile of keys meets at once: the products dK and dV sum over them, and a longer sum amortises
// reading and writing the accumulators.
inline constexpr int kStripBlocks = 2;
inline constexpr int kStripM = kStripBlocks * kTileM;
// Blocks of kTileN keys that a strip meets before it is dropped: a strip is packed once for all of them.
inline constexpr int kMaxBundle = 4;

// What all threads of one backward pass share; read-only but for the memory behind the pointers.
struct BackwardCall : Call {
    const core::BackwardArgs* args = nullptr;
    const core::Adjoint* adjoint = nullptr;             // of the score_mod; null: none
    const core::RowProgram* adjoint_program = nullptr;  // computes its outputs
    bool want_scores = false;                           // anything that needs dS
    bool direct_bias = false;  // every element of dbias belongs to one tile: written in passing

    int64_t groups = 1;  // groups of key blocks, each with dq sums of its own
    int bundle = 1;      // key blocks that one strip meets
    int64_t rows = 0;    // of q over all sequences
    int64_t blocks = 0;  // upper bound of their blocks of kTileM rows

    void* delta = nullptr;       // [head][row] of T: D - dlse
    void* dq = nullptr;          // [group][head][row][padded head_dim_qk] of T
    uint8_t* touched = nullptr;  // [group][head][block of kTileM rows]: dq of this group holds something
    void* refined = nullptr;     // like delta, for sink gradients: a tile that holds a whole row knows better than o
    uint8_t* whole = nullptr;    // [head][block of kTileM rows]: all keys that the block sees lie in one tile
    double* slopes = nullptr;    // [group][batch][head]: sums for dalibi_slopes; null: not wanted

    [[nodiscard]] int64_t row(int64_t b, int64_t i) const {
        return (problem->packed_q ? 0 : b * problem->q_rows) + sequence(b).q_row0 + i;
    }
    // Blocks of different sequences never share a number: each sequence may waste one.
    [[nodiscard]] int64_t block(int64_t b, int64_t i) const { return row(b, 0) / kTileM + b + i / kTileM; }
    template <class T>
    [[nodiscard]] T* delta_of(int64_t b, int64_t h, int64_t i) const {
        return static_cast<T*>(delta) + h * rows + row(b, i);
    }
    template <class T>
    [[nodiscard]] T* dq_of(int64_t group, int64_t b, int64_t h, int64_t i) const {
        return static_cast<T*>(dq) +
               ((group * problem->num_heads_q + h) * rows + row(b, i)) * padded<T>(problem->head_dim_qk);
    }
    [[nodiscard]] uint8_t* touched_of(int64_t group, int64_t b, int64_t h, int64_t i) const {
        return touched + (group * problem->num_heads_q + h) * blocks + block(b, i);
    }
    [[nodiscard]] uint8_t* whole_of(int64_t b, int64_t h, int64_t i) const { return whole + h * blocks + block(b, i); }
    template <class T>
    [[nodiscard]] T* refined_of(int64_t b, int64_t h, int64_t i) const {
        return static_cast<T*>(refined) + h * rows + row(b, i);
    }
};

// Blocks of kTileM query rows that see some of the keys, ascending. Valid until the thread's next call with the same
// `list`, which is below kMaxBundle.
std::span<const core::Tile> query_tiles(const Call& call, int64_t b, int64_t h, core::Range keys, int list);

// How many tiles of kTileN keys a block of rows of one head sees something of.
int64_t num_key_tiles(const Call& call, const RowBlock& block);

// Key blocks group, group + groups, group + 2 groups ... of one sequence and KV head.
struct KeyItem {
    int64_t b = 0, head_kv = 0, group = 0;
};

// Part of dbias: queries and keys in its own coordinates, summed over all b, h, i, j that it is broadcast over.
struct BiasItem {
    core::Range b, h, i, j;
};
inline constexpr int64_t kBiasRows = 4 * kTileM;

// One of num_chunks contiguous parts of the (sequence, head, key block) triples, with its own sums for captured arrays.
struct ArrayItem {
    int64_t chunk = 0, num_chunks = 1;
    const core::Array* sums = nullptr;  // contiguous float64, one per array, absent where not wanted
};

// One block of kTileN keys in all the layouts that the five products want, and the sums of its gradients.
template <class T>
struct KeyBlock {
    T* k;          // by columns, for S = Q K^T
    T* v;          // by columns, for dP = dO V^T
    T* k_rows;     // by rows, for dQ += dS K
    T* dk;         // [kTileN][padded head_dim_qk]
    T* dv;         // [kTileN][padded head_dim_v]
    uint8_t* hot;  // of k_rows: pack_rows
};

// Thread scratch; the same code measures and carves.
template <class T>
struct BackwardScratch {
    T *q[kStripBlocks], *d_o[kStripBlocks];  // by columns, [dim][kTileM]
    T *q_rows, *d_o_rows;                    // by rows, kStripM deep
    uint8_t *q_hot, *d_o_hot;
    T *s, *ds;                 // [kStripM][kTileN]
    uint8_t* seen;             // [kStripM][kTileN]
    T *capped, *mod_input;     // [kTileM][kTileN]
    uint8_t* keep;             // [kTileN]
    int64_t* offsets;          // [kTileN]
    double* bias;              // [kBiasRows][kTileN]
    std::byte *mod, *adjoint;  // of the evaluators
    KeyBlock<T> keys[kMaxBundle];

    static int64_t carve(const core::Problem& p, const core::RowProgram* mod, const core::RowProgram* adjoint,
                         int bundle, std::byte* base, BackwardScratch* out) {
        int64_t used = 0;
        const auto take = [&]<class U>(U*& to, int64_t count) {
            to = base ? reinterpret_cast<U*>(base + used) : nullptr;
            used += round_up(count * static_cast<int64_t>(sizeof(U)), 64);
        };
        BackwardScratch ignored;
        BackwardScratch& f = out ? *out : ignored;
        const int64_t dqk = p.head_dim_qk, dv = p.head_dim_v;
        for (int n = 0; n < kStripBlocks; ++n) take(f.q[n], dqk * kTileM), take(f.d_o[n], dv * kTileM);
        take(f.q_rows, kStripM * padded<T>(dqk)), take(f.d_o_rows, kStripM * padded<T>(dv));
        take(f.q_hot, kStripM + 1), take(f.d_o_hot, kStripM + 1);
        take(f.s, kStripM * kTileN), take(f.ds, kStripM * kTileN), take(f.seen, kStripM * kTileN);
        take(f.capped, p.softcap > 0 ? kTileM * kTileN : 0), take(f.mod_input, mod ? kTileM * kTileN : 0);
        take(f.keep, kTileN), take(f.offsets, kTileN), take(f.bias, p.bias ? kBiasRows * kTileN : 0);
        take(f.mod, mod ? mod->scratch_bytes(kTileN, sizeof(T)) : 0);
        take(f.adjoint, adjoint ? adjoint->scratch_bytes(kTileN, sizeof(T)) : 0);
        for (int n = 0; n < bundle; ++n) {
            KeyBlock<T>& block = f.keys[n];
            take(block.k, kTileN * dqk), take(block.v, kTileN * dv), take(block.k_rows, kTileN * padded<T>(dqk));
            take(block.dk, kTileN * padded<T>(dqk)), take(block.dv, kTileN * padded<T>(dv)),
                take(block.hot, kTileN + 1);
        }
        return used;
    }
};

template <class T>
struct BackwardKernelsOf {
    void (*delta_block)(const BackwardCall& call, const RowBlock& block, std::byte* scratch);
    void (*key_item)(const BackwardCall& call, const KeyItem& item, std::byte* scratch);
    void (*sum_dq)(const BackwardCall& call, const RowBlock& block);
    void (*bias_item)(const BackwardCall& call, const BiasItem& item, std::byte* scratch);
    void (*array_item)(const BackwardCall& call, const ArrayItem& item, std::byte* scratch);
};

struct BackwardKernels {
    BackwardKernelsOf<float> f32;
    BackwardKernelsOf<double> f64;

    template <class T>
    [[nodiscard]] const BackwardKernelsOf<T>& of() const {
        if constexpr (sizeof(T) == 4) return f32;
        else return f64;
    }
};

}  // namespace tilewise::cpu
