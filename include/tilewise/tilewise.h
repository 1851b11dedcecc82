/* Tilewise: exact attention with linear memory. C ABI.
 *
 * Rules of this header
 *  - Every struct starts with struct_size = sizeof(that struct). Fields are only ever appended; a library that is
 *    newer than its caller treats missing fields as zero. A size that no version had is refused.
 *  - Zero-initialise structs (or use the tilewise_*_init functions, which also set the defaults).
 *  - Functions return a status. On anything but TILEWISE_OK, tilewise_last_error() of the same thread says which
 *    argument, what was seen, what is allowed and what to do, and no output has been written.
 *  - Strides count elements, not bytes, and may be 0 (broadcast) or negative, in every tensor.
 *  - The library never allocates in *_run functions; the caller brings the workspace, whose contents are undefined.
 */
#ifndef TILEWISE_TILEWISE_H
#define TILEWISE_TILEWISE_H

#include <stddef.h>
#include <stdint.h>

#define TILEWISE_ABI_VERSION 1
#define TILEWISE_VERSION_STRING "0.1.0"

#if defined(_WIN32)
#define TILEWISE_API
#else
#define TILEWISE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tilewise_status {
    TILEWISE_OK = 0,
    TILEWISE_INVALID_ARGUMENT = 1, /* bad shape, dtype, range or text; the message names the argument */
    TILEWISE_UNSUPPORTED = 2,      /* valid, but no implementation on this machine takes it; the message says why */
    TILEWISE_OUT_OF_MEMORY = 3,
    TILEWISE_VERSION_MISMATCH = 4, /* abi_version or struct_size is not one this library knows */
    TILEWISE_INTERNAL = 5
} tilewise_status;

typedef enum tilewise_dtype {
    TILEWISE_NONE = 0, /* absent tensor */
    TILEWISE_FLOAT64 = 1,
    TILEWISE_FLOAT32 = 2,
    TILEWISE_FLOAT16 = 3,
    TILEWISE_BFLOAT16 = 4,
    TILEWISE_INT64 = 5,
    TILEWISE_INT32 = 6,
    TILEWISE_INT16 = 7,
    TILEWISE_INT8 = 8,
    TILEWISE_UINT8 = 9,
    TILEWISE_BOOL = 10,
    TILEWISE_UINT32 = 11
} tilewise_dtype;

#define TILEWISE_MAX_RANK 5

/* Where the tensors of a problem live. All of one problem live in one place. */
typedef enum tilewise_device_type { TILEWISE_CPU = 0, TILEWISE_CUDA = 1 } tilewise_device_type;

/* A strided array that the caller owns, in host memory or in that of the problem's device. dtype = TILEWISE_NONE means
 * "not given". */
typedef struct tilewise_tensor {
    void* data;
    int32_t dtype; /* tilewise_dtype */
    int32_t rank;
    int64_t shape[TILEWISE_MAX_RANK];
    int64_t strides[TILEWISE_MAX_RANK]; /* in elements */
} tilewise_tensor;

typedef enum tilewise_layout {
    TILEWISE_BSHD = 0, /* q [batch, seqlen_q, num_heads_q, head_dim_qk]; k, v and o alike */
    TILEWISE_BHSD = 1  /* q [batch, num_heads_q, seqlen_q, head_dim_qk] */
} tilewise_layout;     /* packed tensors [total, heads, head_dim] are told by rank 3 and cu_seqlens */

typedef enum tilewise_offset_mode {
    TILEWISE_BOTTOM_RIGHT = 0, /* q_offset = seqlen_kv - seqlen_q of each sequence: the last query sees the last key */
    TILEWISE_TOP_LEFT = 1,     /* q_offset = 0 */
    TILEWISE_OFFSET_VALUE = 2, /* q_offset = q_offset_value */
    TILEWISE_OFFSET_ARRAY = 3  /* q_offset = q_offset[b], integer [batch] */
} tilewise_offset_mode;

/* One attention problem: tensors and every option of the formula (docs/formula.md).
 * Query i of sequence b has position t = i + q_offset; key j has position j. */
typedef struct tilewise_problem {
    uint32_t struct_size;
    uint32_t abi_version; /* TILEWISE_ABI_VERSION */

    /* float64, float32, float16 or bfloat16, one dtype for all. Rank 4 in `layout`, or rank 3 [total, heads, dim]
     * with cu_seqlens. num_heads_q is a multiple of num_heads_kv; head_dim_v may differ from head_dim_qk. */
    tilewise_tensor q, k, v;
    int32_t layout; /* tilewise_layout, for q, k, v, o and their gradients */

    double softmax_scale; /* used if has_softmax_scale, else 1/sqrt(head_dim_qk) */
    int32_t has_softmax_scale;
    int32_t causal;        /* 0 | 1: key j is visible to query t only if j <= t */
    double softcap;        /* > 0: x = softcap * tanh(x / softcap); 0 = off */
    int64_t window_left;   /* t - window_left <= j; -1 = unbounded */
    int64_t window_right;  /* j <= t + window_right; -1 = unbounded */
    int64_t chunk;         /* > 0: floor(j / chunk) == floor(t / chunk); 0 = off */
    int32_t q_offset_mode; /* tilewise_offset_mode */
    int32_t reserved0;
    int64_t q_offset_value;
    tilewise_tensor q_offset;

    /* Mask and score function as one line of canonical text each (docs/masks.md), or NULL. "@k" in them is
     * arrays[k], "$k" is scalars[k]. Both texts share the two lists. */
    const char* mask;
    const char* score_mod;
    const tilewise_tensor* arrays;
    const double* scalars;
    int32_t num_arrays;
    int32_t num_scalars;

    tilewise_tensor bias; /* any float dtype, up to rank 4, broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv] */
    tilewise_tensor alibi_slopes; /* any float dtype, [num_heads_q] or [batch, num_heads_q]: x -= slope * |t - j| */
    tilewise_tensor sinks; /* any float dtype, [num_heads_q]: one extra logit per head in the softmax denominator */

    tilewise_tensor cu_seqlens_q, cu_seqlens_kv; /* int32 or int64 [batch + 1] */
    tilewise_tensor seqused_q, seqused_kv; /* int32 or int64 [batch]: rows at or past it are not part of the sequence */
    tilewise_tensor leftpad_kv;            /* int32 or int64 [batch]: keys before it are not part of the sequence */
    int64_t max_seqlen_q, max_seqlen_kv;   /* sizing hints, 0 = not given: too small is slower, never wrong */

    double dropout_p; /* [0, 1) */
    int64_t seed, offset;

    int32_t deterministic;   /* the CPU always is */
    int32_t batch_invariant; /* bits of a row do not depend on batch, chunking, padding, or capacity */
    int32_t validate;        /* check lengths and offsets in arrays and refuse bad ones; otherwise they are clamped */
    int32_t reserved1;
    const char* backend; /* NULL or "" = best; else the name of an implementation */

    /* Reserved for paged and quantised caches; must be absent. */
    tilewise_tensor page_table;
    int64_t page_size;
    tilewise_tensor k_scale, v_scale;

    int32_t device_type;  /* tilewise_device_type, of every tensor here and in the arguments of a run */
    int32_t device_index; /* number of the CUDA device, as the driver counts; 0 on the CPU */
    /* int64 [2]: (seed, offset), read by the kernels instead of the two numbers above: a CUDA graph that changes it
     * between replays gets new dropout masks. */
    tilewise_tensor seed_offset;
} tilewise_problem;

/* Outputs of the forward pass. */
typedef struct tilewise_forward_args {
    uint32_t struct_size;
    uint32_t reserved;
    tilewise_tensor o;   /* dtype of q, shape of q with head_dim_v; required */
    tilewise_tensor lse; /* optional: float32 (float64 for float64 inputs), [batch, num_heads_q, seqlen_q] or
                            [num_heads_q, total_q]; natural log */
} tilewise_forward_args;

/* Inputs and outputs of the backward pass. Absent outputs are not computed. */
typedef struct tilewise_backward_args {
    uint32_t struct_size;
    uint32_t reserved;
    tilewise_tensor d_o, o, lse; /* gradient of o; o and lse as the forward pass returned them */
    tilewise_tensor dlse;        /* optional gradient of lse, dtype and shape of lse */
    tilewise_tensor dq, dk, dv;  /* shapes and dtype of q, k, v */
    tilewise_tensor dbias;       /* shape and dtype of bias */
    tilewise_tensor dalibi_slopes, dsinks;
    const tilewise_tensor*
        darrays; /* num_arrays entries, absent where not wanted: gradients of arrays read by score_mod */
} tilewise_backward_args;

typedef enum tilewise_pass { TILEWISE_FORWARD = 0, TILEWISE_BACKWARD = 1 } tilewise_pass;

typedef struct tilewise_plan tilewise_plan;

TILEWISE_API uint32_t tilewise_abi_version(void);
TILEWISE_API const char* tilewise_version(void);
/* Text of the last failure in this thread; "" if there was none. Valid until the next call in this thread. */
TILEWISE_API const char* tilewise_last_error(void);

/* Sets struct_size, abi_version and every default (windows -1). */
TILEWISE_API void tilewise_problem_init(tilewise_problem* problem);
TILEWISE_API void tilewise_forward_args_init(tilewise_forward_args* args);
TILEWISE_API void tilewise_backward_args_init(tilewise_backward_args* args);

/* Validates the problem, chooses an implementation and its configuration. Data pointers of q, k, v may be NULL here:
 * only dtypes, shapes and options are looked at. */
TILEWISE_API tilewise_status tilewise_plan_create(const tilewise_problem* problem, tilewise_pass pass,
                                                  tilewise_plan** plan);
TILEWISE_API void tilewise_plan_destroy(tilewise_plan* plan);
/* Writes up to `capacity` bytes (with terminator) of a readable account of the decision; returns the length needed. */
TILEWISE_API size_t tilewise_plan_explain(const tilewise_plan* plan, char* buffer, size_t capacity);
/* Bytes of workspace that a run needs; alignment 64. */
TILEWISE_API tilewise_status tilewise_plan_workspace_size(const tilewise_plan* plan, size_t* bytes);
/* The same for a run of this problem, which may have other lengths and strides than the planned one. */
TILEWISE_API tilewise_status tilewise_plan_workspace_size_for(const tilewise_plan* plan,
                                                              const tilewise_problem* problem, size_t* bytes);

/* The problem given here carries the data. It must agree with the planned one in dtypes, head counts, head dims,
 * layout and options; lengths, batch and strides may differ as long as the workspace suffices. Thread-safe as long as
 * every concurrent run has its own workspace. On a CUDA device the workspace is device memory, `stream` is the CUstream
 * that the work is queued on (NULL = the default stream), and nothing waits for the device: values in device memory are
 * read by the kernels, which clamp lengths and offsets, unless `validate` asks for a check. */
TILEWISE_API tilewise_status tilewise_plan_forward(const tilewise_plan* plan, const tilewise_problem* problem,
                                                   const tilewise_forward_args* args, void* workspace,
                                                   size_t workspace_bytes, void* stream);
TILEWISE_API tilewise_status tilewise_plan_backward(const tilewise_plan* plan, const tilewise_problem* problem,
                                                    const tilewise_backward_args* args, void* workspace,
                                                    size_t workspace_bytes, void* stream);

/* One call: plan, allocate the workspace, run; on a CUDA device on its default stream. */
TILEWISE_API tilewise_status tilewise_forward(const tilewise_problem* problem, const tilewise_forward_args* args);
TILEWISE_API tilewise_status tilewise_backward(const tilewise_problem* problem, const tilewise_backward_args* args);

/* out[b, h, i, j] = 1 where dropout keeps the element; uint8 or bool, rank 4 [batch, num_heads_q, rows, keys]. */
TILEWISE_API tilewise_status tilewise_dropout_mask(int64_t seed, int64_t offset, double dropout_p,
                                                   const tilewise_tensor* out);

/* Probabilities of chosen rows: out[b, n, r, j] = p of query rows[r], head heads[n], key j (0 where hidden), float32 or
 * float64, [batch, num_heads, num_rows, seqlen_kv]. lse may be NULL: it is then computed. problem->v is not read. */
TILEWISE_API tilewise_status tilewise_attn_probs(const tilewise_problem* problem, const tilewise_tensor* lse,
                                                 const int64_t* rows, int64_t num_rows, const int64_t* heads,
                                                 int64_t num_heads, const tilewise_tensor* out);

/* Merges partial results over disjoint key sets, in order: o [parts, ...rows, head_dim_v], lse [parts, ...rows]
 * flattened to o [parts, rows, head_dim_v] and lse [parts, rows]. o_out [rows, head_dim_v], lse_out [rows]; lse float32
 * or float64. */
TILEWISE_API tilewise_status tilewise_merge(const tilewise_tensor* o_parts, const tilewise_tensor* lse_parts,
                                            const tilewise_tensor* o_out, const tilewise_tensor* lse_out);

/* Class of tiles of one head under the problem's whole mask: out[ti * ceil(seqlen_kv / tile_n) + tj] = 0 skip, 1
 * partial, 2 full; for drawing and tests. `capacity` counts bytes of out; needed size is written to *count. */
TILEWISE_API tilewise_status tilewise_mask_tiles(const tilewise_problem* problem, int64_t b, int64_t h, int64_t tile_m,
                                                 int64_t tile_n, uint8_t* out, size_t capacity, size_t* count);

/* The host's own threads instead of the OpenMP run time of the process: must call body(context, index) once for every
 * index in [0, count), in any order, from at most `num_threads` threads, and return when all are done. NULL restores.
 */
typedef void (*tilewise_body)(void* context, int64_t index);
typedef void (*tilewise_parallel_for)(void* user, int64_t count, int32_t num_threads, tilewise_body body,
                                      void* context);
TILEWISE_API tilewise_status tilewise_set_parallel_for(tilewise_parallel_for function, void* user, int32_t num_threads);
/* Number of threads the CPU backend uses; 0 = follow the OpenMP run time, cgroup quota and affinity. */
TILEWISE_API tilewise_status tilewise_set_num_threads(int32_t num_threads);
TILEWISE_API int32_t tilewise_num_threads(void);

/* Folders, joined by colons, that may hold NVRTC, CUDA's run-time compiler, beside those where it is looked for anyway.
 */
TILEWISE_API tilewise_status tilewise_set_nvrtc_path(const char* directories);

/* Compiles the GPU kernels that runs of this problem launch, before the first of them; no GPU is needed. Of the problem
 * only dtypes, head dims, ranks and options count; device_type is taken as TILEWISE_CUDA, and data may be NULL.
 *
 * `arch` names the GPU: "80", "sm_90a"; NULL or "" = the one of the problem's device_index. The code goes into
 * `directory`, a pack that TILEWISE_PACKS can name at run time, on machines without a compiler too; NULL or "" = into
 * the user's cache, where runs look. What is there already is not compiled again.
 *
 * Writes up to `capacity` bytes (with terminator) of a report, and the length needed to *needed (may be NULL): one JSON
 * object per line and kernel, with family, file, entry, arch, compiler, registers, shared_bytes, stack_bytes,
 * spill_store_bytes, spill_load_bytes, local_bytes, image_bytes, seconds, from_cache, warnings, path, rendered. entry
 * is
 * "" and the numbers of the kernel are null where the compiler does not tell (PTX). A file's seconds stand at its first
 * kernel, and so does its rendered text: what the problem's mask, functions and tile sizes became. Safe to call from
 * several threads. */
TILEWISE_API tilewise_status tilewise_compile(const tilewise_problem* problem, tilewise_pass pass, const char* arch,
                                              const char* directory, char* report, size_t capacity, size_t* needed);

/* What is in a pack, or for NULL or "" in the user's cache: one JSON object per line, with key, about, bytes, last_use
 * (seconds since 1970), problem ("" or why it would not be used); the first line is {"directory", "max_bytes"}.
 * `verify` reads and checks everything, else only headers are looked at. Text and length as above. */
TILEWISE_API tilewise_status tilewise_cache_list(const char* directory, int32_t verify, char* text, size_t capacity,
                                                 size_t* needed);
/* Removes compiled kernels and nothing else; writes their number to *removed (may be NULL). Processes that run keep
 * those that they have loaded. */
TILEWISE_API tilewise_status tilewise_cache_clear(const char* directory, uint64_t* removed);

/* Facts about this build and machine, one "key: value" per line (ISA chosen and why, threads, implementations). */
TILEWISE_API size_t tilewise_doctor(char* buffer, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_TILEWISE_H */
