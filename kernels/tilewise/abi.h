// What host and device agree on: the parameters of the kernels. Plain structs of 8-byte members; includes nothing.
// Strides count elements; data = null means absent. Dtypes are the numbers of tilewise_dtype.
#pragma once

namespace tilewise::abi {

using Int = long long;  // NVRTC brings no <cstdint>

struct Tensor {  // q, k, v, o and their gradients: element (b, row, h, d)
    void* data;
    Int batch, row, head, dim;
};

struct Rows {  // lse and its like: element (b, h, row)
    void* data;
    Int batch, head, row;
};

struct Grid {  // bias and its gradient: element (b, h, i, j); broadcast axes have shape 1 and stride 0
    void* data;
    Int dtype;
    Int shape[4], stride[4];
};

struct PerHead {  // slopes, sinks
    void* data;
    Int dtype;
    Int batch, head;
};

struct Index {  // int32 or int64 [n]
    const void* data;
    Int stride, is_64_bit;
};

struct Array {  // read by expressions; dtype and rank are part of the spec
    void* data;
    Int shape[5], stride[5];
};

struct GatherSummary {  // what expr.cuh's summarise_block says of an array, block after block; null: nothing is known
    const double* data;
};

// An array behind a mask kind: element (b, h, row, column), with broadcasting folded into the strides. A token array
// has its tokens along `row`, and columns where a token has several numbers.
struct MaskArray {
    const void* data;
    Int batch, head, row, column;
    Int rows, columns;
    Int queries_per_head;  // query heads that share an entry of the heads axis
    // What is known about 64 neighbours at once (summaries.cu): blocks of plane b * plane_batch + h * plane_head.
    Int* summary;
    Int plane_batch, plane_head, planes;
};

// One sequence: query i in [0, q_len) is row q_row0 + i of q, key j in [0, kv_len) is row kv_row0 + j of k and v.
struct Sequence {
    Int b;  // of what is not packed, and of arrays with a batch axis
    Int q_row0, q_len;
    Int kv_row0, kv_len;
    Int kv_first_row;  // kv_row0 minus leftpad
    Int q_offset;
    Int q_tiles_before, kv_tiles_before;  // tiles of the sequences before this one
};

struct Problem {
    Int batch, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v;
    Int q_rows, kv_rows;
    Int q_tile, kv_tile;  // rows of a tile, as the table of sequences and the grids count them
    Int packed_q, packed_kv;
    Int q_offset_mode, q_offset_value;  // tilewise_offset_mode
    Index cu_q, cu_kv, used_q, used_kv, leftpad, q_offset;
    Sequence* sequences;  // [num_sequences + 1], made on the device; null: all are q_rows by kv_rows long
    Int num_sequences;    // batch; or, where they are documents, at most so many
    Tensor q, k, v;
    double softmax_scale, softcap;
    Int window_left, window_right;  // causal is window_right = 0
    Grid bias;
    PerHead slopes, sinks;
    double keep_inverse;  // 1 / keep_prob
    Int dropout_threshold, seed, offset;
    Index seed_offset;  // int64 [2] that replaces the two numbers
};

struct Forward {
    Problem problem;
    Tensor o;
    Rows lse;
    Int aligned;  // rows of o take 16 bytes at a time
};

// Partial results of blocks that share a tile of queries, fp32: split z is z * o_split and z * lse_split elements on.
struct Split {
    Tensor o;
    Rows lse;
    Int o_split, lse_split, splits;
    Int keys;  // of one split; a multiple of the tile
};

// TMA's description of a tensor (src/cuda/tensor_map.hpp).
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// Tiles that blocks take one after another (sm90.cuh).
struct Queue {
    void* words;    // [3] of 8 bytes, in the workspace
    Int signature;  // of this launch; not 0
};

struct Sm90Forward {
    Queue queue;
    Int tiles, q_tiles;  // of all heads and sequences, and of one head
    Int heads_at_once;   // whose keys and values fit into L2 together
    Int last_first;      // later rows see more
    // Of the launch before, which has the same to do, with documents as sequences; null: there is none. If it has any
    // tile, nothing is left.
    const Sequence* end_of_documents;
};

struct Documents {  // a token's document is that with its id; negative: none. Same ids for queries and keys
    Problem problem;
    MaskArray ids;
    Int wide;  // int64 and not int32
};

struct Combine {
    Problem problem;
    Split split;
    Tensor o;
    Rows lse;
    Int dtype;
};

struct Backward {
    Problem problem;
    Tensor d_o, o;
    Rows lse, dlse;
    Tensor dq, dk, dv;
    Grid dbias;
    PerHead dslopes, dsinks;
    Rows delta;  // workspace: sum of o * do, minus dlse
    // Workspace [num_heads_q, q_tiles]: what each tile of queries adds to the gradients of slopes and sinks.
    void *slope_partial, *sink_partial;
    Int q_tiles;  // of all sequences; when lengths are in device memory, no fewer than there are
};

struct MmaBackward {  // bwd_mma, and what comes before and after it
    Problem problem;
    Tensor d_o, o;
    Rows lse, dlse;
    Tensor dq, dk, dv;
    Int dtype;
    Int aligned_rows, aligned_dq, aligned_dkv;  // rows of o and do, of dq, of dk and dv take 16 bytes at a time
    // Workspace, by head and tile of queries: pairs of lse (in powers of two) and D per row, sums of dq in the order of
    // mma_backward.cuh, and how many tiles of keys have added to them.
    void *rows, *dq_sums, *turns;
    Int q_tiles;  // of all sequences; when lengths are in device memory, no fewer than there are
    Int columns;  // of a tile of dq_sums
    Int spread;   // blocks are numbered by tile of keys first, then by head and sequence
};

// Captured arrays: the sums, contiguous (null: all zero), and where they go rounded to the dtype of the array.
struct ArrayGradient {
    const void* sums;
    Array target;
    Int rank, dtype;
};

struct Summarise {  // one launch of a kernel of summaries.cu
    MaskArray array;
    Array captured;
    double* captured_summary;
    Int dtype, rank, as_bool;
    Int numbers, causal;  // of `intervals`
};

struct Clear {  // rows of a tensor, and of lse, that belong to no sequence
    Problem problem;
    Tensor tensor;
    Rows lse;
    Int dtype, heads, dims, query_side;
};

}  // namespace tilewise::abi
