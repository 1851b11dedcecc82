// Problem: one attention problem, validated and in one canonical form, whatever layout it came in.
//
// Everything behind this header sees q, k, v, o as [batch, row, head, dim] with four strides. Packed (ragged) tensors
// have batch stride 0 and are addressed through Sequence::q_row0 / kv_row0.
#pragma once

#include <string>
#include <vector>

#include "error.hpp"
#include "expr.hpp"
#include "tilewise/tilewise.h"
#include "types.hpp"

namespace tilewise::core {

// q, k, v, o or a gradient: element (b, row, h, d) lies at b*batch + row*row_stride + h*head + d*dim elements.
struct Tensor4 {
    void* data = nullptr;
    DType dtype = DType::none;
    int64_t batch_stride = 0, row_stride = 0, head_stride = 0, dim_stride = 0;

    explicit operator bool() const { return dtype != DType::none; }
    [[nodiscard]] int64_t offset(int64_t b, int64_t row, int64_t h) const {
        return b * batch_stride + row * row_stride + h * head_stride;
    }
};

// lse, dlse: [batch, head, row]; packed [head, total] has batch stride 0.
struct Rows3 {
    void* data = nullptr;
    DType dtype = DType::none;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

    explicit operator bool() const { return dtype != DType::none; }
    [[nodiscard]] int64_t offset(int64_t b, int64_t h, int64_t row) const {
        return b * batch_stride + h * head_stride + row * row_stride;
    }
};

// bias and its gradient, dense masks: [b, h, i, j] in coordinates local to the sequence; broadcast axes have stride 0
// and extent 1 in shape.
struct Grid4 {
    void* data = nullptr;
    DType dtype = DType::none;
    std::array<int64_t, 4> shape{1, 1, 1, 1};
    std::array<int64_t, 4> stride{};

    explicit operator bool() const { return dtype != DType::none; }
    [[nodiscard]] int64_t offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
        return b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
    }
};

// What sequence b is, after cu_seqlens, seqused and leftpad, clamped so that nothing is out of bounds.
// Query i in [0, q_len) is row q_row0 + i of q; key j in [0, kv_len) is row kv_row0 + j of k and v.
struct Sequence {
    int64_t q_row0 = 0, q_len = 0;
    int64_t q_rows = 0;  // rows of q that belong to b, used or not: [q_row0, q_row0 + q_rows)
    int64_t kv_row0 = 0, kv_len = 0;
    int64_t kv_first_row = 0;  // kv_row0 minus leftpad: where physical indices (key_padding) count from
    int64_t kv_rows = 0;       // rows of k that belong to b: [kv_first_row, kv_first_row + kv_rows)
    int64_t q_offset = 0;      // position of query i is i + q_offset
};

struct Device {
    int32_t type = TILEWISE_CPU;
    int32_t index = 0;
    [[nodiscard]] bool is_cuda() const { return type == TILEWISE_CUDA; }
};
std::string describe(Device device);  // "cpu", "cuda:0"

struct Problem {
    Device device;
    DType dtype = DType::f32;  // of q, k, v, o
    int64_t batch = 0, num_heads_q = 0, num_heads_kv = 0, head_dim_qk = 0, head_dim_v = 0;
    int64_t q_rows = 0, kv_rows = 0;              // extent of the row axis: seqlen_q or total_q; seqlen_kv or total_kv
    int64_t max_seqlen_q = 0, max_seqlen_kv = 0;  // largest q_len / kv_len over the batch (host data)
    bool packed_q = false, packed_kv = false;
    int32_t layout = TILEWISE_BSHD;

    Tensor4 q, k, v;
    double softmax_scale = 1.0;
    double softcap = 0.0;
    bool causal = false;
    int64_t window_left = -1, window_right = -1;
    int64_t chunk = 0;
    std::string mask;       // canonical text or empty
    std::string score_mod;  // canonical text or empty
    std::vector<Array> arrays;
    std::vector<double> scalars;
    Grid4 bias;
    Array alibi_slopes;  // [num_heads_q] or [batch, num_heads_q]
    Array sinks;         // [num_heads_q]
    double dropout_p = 0.0;
    uint32_t dropout_threshold = 0;  // T of the formula: keep iff lane >= T; 0 = no dropout
    int64_t seed = 0, offset = 0;
    Array seed_offset;  // int64 [2] that replaces the two numbers; absent: they hold
    bool deterministic = false, batch_invariant = false;
    bool validate = false;  // values in device memory are to be checked before a run
    std::string backend;

    // Lengths as they were given; the CPU reads them into `sequences`, kernels of a GPU read them where they are.
    Array cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, leftpad_kv, q_offsets;
    int32_t q_offset_mode = TILEWISE_BOTTOM_RIGHT;
    int64_t q_offset_value = 0;

    bool lengths_known = false;       // `sequences` holds the truth; else zeros, and max_seqlen_* are upper bounds
    std::vector<Sequence> sequences;  // [batch]

    [[nodiscard]] int64_t group() const { return num_heads_kv ? num_heads_q / num_heads_kv : 1; }
    [[nodiscard]] bool has_lengths() const {  // or offsets of queries, in arrays
        return cu_seqlens_q || cu_seqlens_kv || seqused_q || seqused_kv || leftpad_kv || q_offsets;
    }
    [[nodiscard]] DType accumulator() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }
    [[nodiscard]] float keep_prob() const { return static_cast<float>(65536 - dropout_threshold) / 65536.0f; }
    [[nodiscard]] double slope(int64_t b, int64_t h) const {
        return load_float(alibi_slopes.data, alibi_slopes.dtype,
                          alibi_slopes.rank == 2 ? b * alibi_slopes.stride[0] + h * alibi_slopes.stride[1]
                                                 : h * alibi_slopes.stride[0]);
    }
    [[nodiscard]] double sink(int64_t h) const { return load_float(sinks.data, sinks.dtype, h * sinks.stride[0]); }
};

struct ForwardArgs {
    Tensor4 o;
    Rows3 lse;  // absent if not wanted
};

struct BackwardArgs {
    Tensor4 d_o, o;
    Rows3 lse, dlse;
    Tensor4 dq, dk, dv;  // each absent if not wanted
    Grid4 dbias;
    Array dalibi_slopes, dsinks;
    std::vector<Array> darrays;  // num_arrays entries or empty
};

enum class Pass : int32_t { forward = 0, backward = 1 };

// Of a struct of tilewise.h, before a byte of it is read that a caller of another version may not have.
template <class Args>
void check_size(const Args& args, const char* what) {
    if (args.struct_size != sizeof(Args)) {
        throw Error(Status::version_mismatch,
                    std::string(what) + ".struct_size: got " + std::to_string(args.struct_size) + "; allowed: " +
                        std::to_string(sizeof(Args)) + ". Start from the tilewise_*_init function of the same header.");
    }
}

// All throw Error. `with_data` = false: pointers may be null and lengths held in arrays are not read. (Nor are those in
// device memory.)
Problem make_problem(const tilewise_problem& problem, bool with_data = true);
bool wants_validation(const tilewise_problem& problem);
void read_lengths(Problem& problem);  // fills `sequences` and max_seqlen_* from the arrays, which are in host memory
ForwardArgs make_forward_args(const Problem& problem, const tilewise_problem& raw, const tilewise_forward_args& args);
BackwardArgs make_backward_args(const Problem& problem, const tilewise_problem& raw,
                                const tilewise_backward_args& args);

Array make_array(const tilewise_tensor& tensor, const char* argument);
Rows3 view_lse(const tilewise_tensor& tensor, const char* argument, const Problem& problem);

std::string describe(const Problem& problem);  // one line: "b2 hq8/hkv2 sq512 skv512 d64 float32 causal softcap"

// Rows of q that belong to no sequence or lie past seqused_q: their o and dq are 0 and their lse is -inf.
std::vector<Range> unused_q_rows(const Problem& problem, int64_t b);  // b in [0, batch), dense; packed: call with b = 0
std::vector<Range> unused_kv_rows(const Problem& problem, int64_t b);  // likewise for dk and dv

}  // namespace tilewise::core
