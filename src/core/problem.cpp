// From the C struct to a validated Problem. Every check that a caller can fail stands here, before anything is written.
#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "dropout.hpp"
#include "env.hpp"
#include "mask.hpp"

namespace tilewise::core {
namespace {

void require_data(const Array& array, const char* argument) {
    if (array && array.data == nullptr && array.size() != 0)
        refuse(argument, "a null pointer", "a pointer to its elements");
}

std::string shape_text(const Array& array) {
    std::string text = "shape [";
    for (int d = 0; d < array.rank; ++d) text += (d ? ", " : "") + std::to_string(array.shape[d]);
    return text + "]";
}

std::string shape_text(std::initializer_list<int64_t> shape) {
    std::string text = "[";
    for (const int64_t* n = shape.begin(); n != shape.end(); ++n) {
        text += (n != shape.begin() ? ", " : "") + std::to_string(*n);
    }
    return text + "]";
}

void require_finite(double value, const char* argument) {
    if (!std::isfinite(value)) refuse(argument, std::to_string(value), "a finite number");
}

void require_float(const Array& array, const char* argument, const std::string& advice = "") {
    if (!is_float(array.dtype)) {
        refuse(argument, name(array.dtype), "float64, float32, float16 or bfloat16", advice);
    }
}

// Index arrays: a bool is no length, and other widths are nothing but trouble to support on a GPU.
void require_index(const Array& array, const char* argument) {
    if (array.dtype != DType::i32 && array.dtype != DType::i64) refuse(argument, name(array.dtype), "int32 or int64");
}

int64_t element(const Array& array, int64_t n) { return load_int(array.data, array.dtype, n * array.stride[0]); }

// An integer per sequence.
Array per_sequence(const tilewise_tensor& tensor, const char* argument, int64_t batch) {
    const Array array = make_array(tensor, argument);
    if (!array) return array;
    require_index(array, argument);
    if (array.rank != 1 || array.shape[0] != batch) {
        refuse(argument, shape_text(array), "[batch] = " + shape_text({batch}));
    }
    return array;
}

struct Axes {
    int64_t batch, rows, heads, dim;
};

// The four axes of q, k, v, o or a gradient, in whatever layout it came.
Axes axes_of(const Array& array, const char* argument, bool packed, int32_t layout) {
    if (array.rank != (packed ? 3 : 4)) {
        refuse(argument, "rank " + std::to_string(array.rank),
               packed
                   ? "rank 3 [total, heads, head_dim], since cu_seqlens is given"
                   : "rank 4 [batch, seqlen, heads, head_dim] (or [batch, heads, seqlen, head_dim] with layout bhsd)",
               packed ? ""
                      : "For packed sequences give cu_seqlens_q and cu_seqlens_kv; for one sequence add a batch axis.");
    }
    if (packed) return {1, array.shape[0], array.shape[1], array.shape[2]};
    if (layout == TILEWISE_BHSD) return {array.shape[0], array.shape[2], array.shape[1], array.shape[3]};
    return {array.shape[0], array.shape[1], array.shape[2], array.shape[3]};
}

Tensor4 view4(const Array& array, bool packed, int32_t layout) {
    Tensor4 view{array.data, array.dtype, 0, 0, 0, 0};
    const auto& stride = array.stride;
    if (packed) {
        view.row_stride = stride[0], view.head_stride = stride[1], view.dim_stride = stride[2];
    } else {
        view.batch_stride = stride[0];
        view.row_stride = stride[layout == TILEWISE_BHSD ? 2 : 1];
        view.head_stride = stride[layout == TILEWISE_BHSD ? 1 : 2];
        view.dim_stride = stride[3];
    }
    return view;
}

void require_lengths(const Array& cu, const char* argument, int64_t total) {
    int64_t previous = element(cu, 0);
    if (previous < 0) refuse(argument, "first entry " + std::to_string(previous), "entries >= 0");
    for (int64_t n = 1; n < cu.shape[0]; ++n) {
        const int64_t next = element(cu, n);
        if (next < previous) {
            refuse(argument,
                   "entry " + std::to_string(n) + " = " + std::to_string(next) + " after " + std::to_string(previous),
                   "entries that never decrease (prefix sums of the lengths)");
        }
        previous = next;
    }
    if (previous > total) {
        refuse(argument, "last entry " + std::to_string(previous),
               "at most the number of tokens, " + std::to_string(total));
    }
}

// What positions can be added to without overflow.
int64_t position(int64_t q_offset, int64_t entry = -1) {
    if (std::abs(static_cast<double>(q_offset)) > 0x1p52) {
        const std::string where = entry < 0 ? "" : "entry " + std::to_string(entry) + " = ";
        refuse("q_offset", where + std::to_string(q_offset), "a position within +-2^52");
    }
    return q_offset;
}

Grid4 broadcast_grid(const Array& array, const char* argument, const Problem& p, bool lengths_known) {
    Grid4 grid;
    grid.data = array.data;
    grid.dtype = array.dtype;
    if (array.rank > 4) refuse(argument, "rank " + std::to_string(array.rank), "rank 0 to 4");
    const std::array<int64_t, 4> want{p.batch, p.num_heads_q, p.packed_q ? p.max_seqlen_q : p.q_rows,
                                      p.packed_kv ? p.max_seqlen_kv : p.kv_rows};
    const std::array<bool, 4> at_least{false, false, p.packed_q, p.packed_kv};
    for (int axis = 0; axis < 4; ++axis) {
        const int from = axis - (4 - array.rank);
        if (from < 0) continue;
        const int64_t extent = array.shape[from];
        const bool fits = extent == want[axis] || (at_least[axis] && (extent > want[axis] || !lengths_known));
        if (extent != 1 && !fits) {
            refuse(argument, shape_text(array),
                   "anything that broadcasts to [batch, num_heads_q, seqlen_q, seqlen_kv] = " +
                       shape_text({want[0], want[1], want[2], want[3]}));
        }
        grid.shape[axis] = extent;
        // An axis of one element is broadcast, whatever stride it came with. (If it is 1 because the problem is 1
        // long, the stride is never used.)
        grid.stride[axis] = extent == 1 ? 0 : array.stride[from];
    }
    return grid;
}

// Bytes [first, last) that an array can touch.
struct Extent {
    const char* first;
    const char* last;
};
Extent extent_of(const void* data, DType dtype, int32_t rank, const int64_t* shape, const int64_t* stride) {
    const int64_t width = size_of(dtype);
    int64_t low = 0, high = 0;
    for (int d = 0; d < rank; ++d) {
        if (shape[d] == 0) return {nullptr, nullptr};
        const int64_t reach = (shape[d] - 1) * stride[d];
        (reach < 0 ? low : high) += reach;
    }
    const char* base = static_cast<const char*>(data);
    return {base + low * width, base + high * width + width};
}
Extent extent_of(const Array& array) {
    return extent_of(array.data, array.dtype, array.rank, array.shape.data(), array.stride.data());
}
bool apart(Extent a, Extent b) {
    return a.first == a.last || b.first == b.last || a.last <= b.first || b.last <= a.first;
}

// Slots of one fused buffer (q, k, v, o side by side in each row) interleave without sharing an element. Try every
// stride P as the period of such a buffer: if all longer strides are multiples of P and the shorter ones stay inside
// disjoint parts of the period, nothing is shared.
bool interleaved_apart(const Array& a, const Array& b) {
    const auto inner = [](const Array& x, int64_t period, int64_t& width) {
        const int64_t size = size_of(x.dtype);
        int64_t span = 0;
        for (int d = 0; d < x.rank; ++d) {
            if (x.shape[d] == 1) continue;
            const int64_t stride = x.stride[d] * size;
            if (stride < 0) return false;
            if (stride >= period) {
                if (stride % period != 0) return false;
            } else {
                span += (x.shape[d] - 1) * stride;
            }
        }
        width = span + size;
        return width <= period;
    };
    for (const Array* source : {&a, &b}) {
        for (int d = 0; d < source->rank; ++d) {
            const int64_t period = source->stride[d] * size_of(source->dtype);
            int64_t width_a = 0, width_b = 0;
            if (period <= 0 || !inner(a, period, width_a) || !inner(b, period, width_b)) continue;
            const int64_t distance = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
            const int64_t phase = ((distance % period) + period) % period;  // where b starts, seen from a
            if (phase >= width_a && phase + width_b <= period) return true;
        }
    }
    return false;
}

void refuse_overlap(const Array& output, const char* output_name, const Array& input, const char* input_name,
                    const char* kind = "input") {
    if (!output || !input) return;
    if (apart(extent_of(output), extent_of(input)) || interleaved_apart(output, input)) return;
    refuse(output_name, std::string("memory shared with the ") + kind + " " + input_name, "memory of its own",
           "Give another output tensor.");
}

// An output whose elements coincide would hold whatever was written last.
void require_distinct(const Array& output, const char* argument) {
    if (output.size() == 0) return;
    for (int d = 0; d < output.rank; ++d) {
        if (output.shape[d] > 1 && output.stride[d] == 0) {
            refuse(argument, "stride 0 on axis " + std::to_string(d), "an output with one place per element");
        }
    }
}

void refuse_overlap_with_inputs(const Array& output, const char* argument, const tilewise_problem& raw) {
    if (!output) return;
    require_distinct(output, argument);
    const Extent mine = extent_of(output);
    const auto against = [&](const tilewise_tensor& tensor, const char* input) {
        if (tensor.dtype == TILEWISE_NONE) return;
        if (apart(mine, extent_of(tensor.data, static_cast<DType>(tensor.dtype), tensor.rank, tensor.shape,
                                  tensor.strides)))  // as nearly always: the problem was checked before
            return;
        refuse_overlap(output, argument, make_array(tensor, input), input);
    };
    against(raw.q, "q"), against(raw.k, "k"), against(raw.v, "v");
    against(raw.bias, "bias"), against(raw.alibi_slopes, "alibi_slopes"), against(raw.sinks, "sinks");
    against(raw.cu_seqlens_q, "cu_seqlens_q"), against(raw.cu_seqlens_kv, "cu_seqlens_kv");
    against(raw.seqused_q, "seqused_q"), against(raw.seqused_kv, "seqused_kv"), against(raw.leftpad_kv, "leftpad_kv");
    against(raw.q_offset, "q_offset");
    for (int n = 0; n < raw.num_arrays; ++n) against(raw.arrays[n], ("arrays[" + std::to_string(n) + "]").c_str());
}

void require_shape(const Array& array, const char* argument, const Array& like, const char* like_name) {
    bool same = array.rank == like.rank;
    for (int d = 0; same && d < like.rank; ++d) same = array.shape[d] == like.shape[d];
    if (!same) refuse(argument, shape_text(array), "the shape of " + std::string(like_name) + ", " + shape_text(like));
    if (array.dtype != like.dtype) {
        refuse(argument, name(array.dtype), std::string("the dtype of ") + like_name + ", " + name(like.dtype));
    }
}

// o, its gradient, or the gradients of q, k, v.
Tensor4 view_like(const Array& array, const char* argument, const Problem& p, bool query_side, int64_t dim) {
    if (!array) return {};
    const bool packed = query_side ? p.packed_q : p.packed_kv;
    const Axes axes = axes_of(array, argument, packed, p.layout);
    const int64_t batch = packed ? 1 : p.batch;
    const int64_t rows = query_side ? p.q_rows : p.kv_rows;
    const int64_t heads = query_side ? p.num_heads_q : p.num_heads_kv;
    if (axes.batch != batch || axes.rows != rows || axes.heads != heads || axes.dim != dim) {
        const std::string want = packed                      ? shape_text({rows, heads, dim})
                                 : p.layout == TILEWISE_BHSD ? shape_text({batch, heads, rows, dim})
                                                             : shape_text({batch, rows, heads, dim});
        refuse(argument, shape_text(array), want);
    }
    if (array.dtype != p.dtype) refuse(argument, name(array.dtype), std::string(name(p.dtype)) + ", the dtype of q");
    return view4(array, packed, p.layout);
}

}  // namespace

Array make_array(const tilewise_tensor& tensor, const char* argument) {
    Array array;
    if (tensor.dtype == TILEWISE_NONE) return array;
    if (tensor.dtype < 0 || tensor.dtype > TILEWISE_UINT32) {
        refuse(argument, "dtype number " + std::to_string(tensor.dtype), "a tilewise_dtype");
    }
    if (tensor.rank < 0 || tensor.rank > kMaxRank) {
        refuse(argument, "rank " + std::to_string(tensor.rank), "0 to " + std::to_string(kMaxRank));
    }
    array.data = tensor.data;
    array.dtype = static_cast<DType>(tensor.dtype);
    array.rank = tensor.rank;
    int64_t elements = 1;
    for (int d = 0; d < tensor.rank; ++d) {
        if (tensor.shape[d] < 0) refuse(argument, "extent " + std::to_string(tensor.shape[d]), "extents >= 0");
        // Extents far beyond any memory would overflow the products that follow. In floating point, since every run
        // asks for dozens of arrays, and divisions would take a third of its time.
        if (static_cast<double>(elements) * static_cast<double>(tensor.shape[d]) > 0x1p60) {
            refuse(argument, "more than 2^60 elements", "extents that address memory");
        }
        elements *= tensor.shape[d];
        array.shape[d] = tensor.shape[d];
        // Nobody follows the stride of an axis of one, so it may be any number: products with it must not overflow.
        const bool followed = tensor.shape[d] > 1 || std::abs(static_cast<double>(tensor.strides[d])) <= 0x1p40;
        array.stride[d] = followed ? tensor.strides[d] : 0;
    }
    if (elements == 0) array.stride = {};  // nor those of a tensor without elements, whose data may be a null pointer
    return array;
}

Rows3 view_lse(const tilewise_tensor& tensor, const char* argument, const Problem& p) {
    const Array array = make_array(tensor, argument);
    if (!array) return {};
    if (array.dtype != p.accumulator()) refuse(argument, name(array.dtype), name(p.accumulator()));
    Rows3 rows{array.data, array.dtype, 0, 0, 0};
    if (p.packed_q) {
        if (array.rank != 2 || array.shape[0] != p.num_heads_q || array.shape[1] != p.q_rows) {
            refuse(argument, shape_text(array), "[num_heads_q, total_q] = " + shape_text({p.num_heads_q, p.q_rows}));
        }
        rows.head_stride = array.stride[0], rows.row_stride = array.stride[1];
    } else {
        if (array.rank != 3 || array.shape[0] != p.batch || array.shape[1] != p.num_heads_q ||
            array.shape[2] != p.q_rows) {
            refuse(argument, shape_text(array),
                   "[batch, num_heads_q, seqlen_q] = " + shape_text({p.batch, p.num_heads_q, p.q_rows}));
        }
        rows.batch_stride = array.stride[0], rows.head_stride = array.stride[1], rows.row_stride = array.stride[2];
    }
    return rows;
}

void read_lengths(Problem& p) {
    if (p.packed_q) require_lengths(p.cu_seqlens_q, "cu_seqlens_q", p.q_rows);
    if (p.packed_kv) require_lengths(p.cu_seqlens_kv, "cu_seqlens_kv", p.kv_rows);
    p.sequences.assign(static_cast<size_t>(p.batch), {});
    p.max_seqlen_q = p.max_seqlen_kv = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
        Sequence& s = p.sequences[static_cast<size_t>(b)];
        s.q_row0 = p.packed_q ? element(p.cu_seqlens_q, b) : 0;
        s.q_rows = p.packed_q ? element(p.cu_seqlens_q, b + 1) - s.q_row0 : p.q_rows;
        s.kv_first_row = p.packed_kv ? element(p.cu_seqlens_kv, b) : 0;
        s.kv_rows = p.packed_kv ? element(p.cu_seqlens_kv, b + 1) - s.kv_first_row : p.kv_rows;
        const auto bounded = [&](const Array& array, const char* argument, int64_t fallback, int64_t limit) {
            if (!array) return fallback;
            const int64_t n = element(array, b);
            if (n < 0 || n > limit) {
                refuse(argument, "entry " + std::to_string(b) + " = " + std::to_string(n),
                       "0 to the rows of that sequence, " + std::to_string(limit));
            }
            return n;
        };
        s.q_len = bounded(p.seqused_q, "seqused_q", s.q_rows, s.q_rows);
        const int64_t used = bounded(p.seqused_kv, "seqused_kv", s.kv_rows, s.kv_rows);
        const int64_t pad = bounded(p.leftpad_kv, "leftpad_kv", 0, s.kv_rows);
        s.kv_row0 = s.kv_first_row + pad;
        s.kv_len = std::max<int64_t>(used - pad, 0);
        switch (p.q_offset_mode) {
            case TILEWISE_BOTTOM_RIGHT: s.q_offset = s.kv_len - s.q_len; break;
            case TILEWISE_OFFSET_VALUE: s.q_offset = p.q_offset_value; break;
            case TILEWISE_OFFSET_ARRAY: s.q_offset = position(element(p.q_offsets, b), b); break;
            default: s.q_offset = 0;
        }
        p.max_seqlen_q = std::max(p.max_seqlen_q, s.q_len);
        p.max_seqlen_kv = std::max(p.max_seqlen_kv, s.kv_len);
    }
}

bool wants_validation(const tilewise_problem& raw) { return raw.validate != 0 || env("TILEWISE_VALIDATE") == "1"; }

Problem make_problem(const tilewise_problem& raw, bool with_data) {
    if (raw.abi_version != TILEWISE_ABI_VERSION) {
        throw Error(Status::version_mismatch, "problem.abi_version: got " + std::to_string(raw.abi_version) +
                                                  "; allowed: " + std::to_string(TILEWISE_ABI_VERSION) +
                                                  ". Compile against the tilewise.h of the library that is loaded, and "
                                                  "start from tilewise_problem_init.");
    }
    Problem p;
    if (raw.device_type != TILEWISE_CPU && raw.device_type != TILEWISE_CUDA) {
        refuse("device_type", std::to_string(raw.device_type), "TILEWISE_CPU (0) or TILEWISE_CUDA (1)");
    }
    if (raw.device_index < 0 || (raw.device_type == TILEWISE_CPU && raw.device_index != 0)) {
        refuse("device_index", std::to_string(raw.device_index),
               raw.device_type == TILEWISE_CPU ? "0 on the CPU" : "the number of a CUDA device, >= 0");
    }
    p.device = {raw.device_type, raw.device_index};
    p.layout = raw.layout;
    if (raw.layout != TILEWISE_BSHD && raw.layout != TILEWISE_BHSD) {
        refuse("layout", std::to_string(raw.layout), "TILEWISE_BSHD (0) or TILEWISE_BHSD (1)");
    }
    if (raw.page_table.dtype != TILEWISE_NONE || raw.page_size != 0 || raw.k_scale.dtype != TILEWISE_NONE ||
        raw.v_scale.dtype != TILEWISE_NONE) {
        refuse("page_table, page_size, k_scale, v_scale", "a value", "nothing yet: these fields are reserved");
    }

    // Tensors and sizes
    const Array q = make_array(raw.q, "q"), k = make_array(raw.k, "k"), v = make_array(raw.v, "v");
    for (const auto& [array, argument] : {std::pair{&q, "q"}, {&k, "k"}, {&v, "v"}}) {
        if (!*array) refuse(argument, "nothing", "a tensor");
        if (with_data) require_data(*array, argument);
    }
    if (!is_float(q.dtype) || q.dtype != k.dtype || q.dtype != v.dtype) {
        refuse("q, k, v", std::string("dtypes ") + name(q.dtype) + ", " + name(k.dtype) + ", " + name(v.dtype),
               "one dtype for all three, of float64, float32, float16, bfloat16", "Convert them to one dtype first.");
    }
    p.dtype = q.dtype;

    const Array cu_q = make_array(raw.cu_seqlens_q, "cu_seqlens_q");
    const Array cu_kv = make_array(raw.cu_seqlens_kv, "cu_seqlens_kv");
    p.packed_q = static_cast<bool>(cu_q);
    p.packed_kv = static_cast<bool>(cu_kv);
    const Axes qa = axes_of(q, "q", p.packed_q, p.layout);
    const Axes ka = axes_of(k, "k", p.packed_kv, p.layout);
    const Axes va = axes_of(v, "v", p.packed_kv, p.layout);

    int64_t batch = -1;
    const auto agree_on_batch = [&](int64_t n, const char* argument) {
        if (batch >= 0 && n != batch) {
            refuse(argument, "batch " + std::to_string(n),
                   "batch " + std::to_string(batch) + ", as the arguments before it");
        }
        batch = n;
    };
    for (const auto& [cu, argument] : {std::pair{&cu_q, "cu_seqlens_q"}, {&cu_kv, "cu_seqlens_kv"}}) {
        if (!*cu) continue;
        require_index(*cu, argument);
        if (cu->rank != 1 || cu->shape[0] < 1) refuse(argument, shape_text(*cu), "[batch + 1]");
        agree_on_batch(cu->shape[0] - 1, argument);
    }
    if (!p.packed_q) agree_on_batch(qa.batch, "q");
    if (!p.packed_kv) agree_on_batch(ka.batch, "k"), agree_on_batch(va.batch, "v");
    p.batch = batch;
    p.q_rows = qa.rows;
    p.kv_rows = ka.rows;
    p.num_heads_q = qa.heads;
    p.num_heads_kv = ka.heads;
    p.head_dim_qk = qa.dim;
    p.head_dim_v = va.dim;
    if (ka.dim != qa.dim) {
        refuse("k", "head_dim " + std::to_string(ka.dim), "the head_dim of q, " + std::to_string(qa.dim),
               "Only v may have another head_dim.");
    }
    if (va.rows != ka.rows) refuse("v", std::to_string(va.rows) + " rows", "as many as k, " + std::to_string(ka.rows));
    if (va.heads != ka.heads)
        refuse("v", std::to_string(va.heads) + " heads", "as many as k, " + std::to_string(ka.heads));
    if (p.num_heads_kv == 0 ? p.num_heads_q != 0 : p.num_heads_q % p.num_heads_kv != 0) {
        refuse("q",
               std::to_string(p.num_heads_q) + " heads with " + std::to_string(p.num_heads_kv) + " heads of k and v",
               "a whole multiple (num_heads_q = group * num_heads_kv)");
    }
    p.q = view4(q, p.packed_q, p.layout);
    p.k = view4(k, p.packed_kv, p.layout);
    p.v = view4(v, p.packed_kv, p.layout);

    // Sequences
    p.cu_seqlens_q = cu_q, p.cu_seqlens_kv = cu_kv;
    p.seqused_q = per_sequence(raw.seqused_q, "seqused_q", p.batch);
    p.seqused_kv = per_sequence(raw.seqused_kv, "seqused_kv", p.batch);
    p.leftpad_kv = per_sequence(raw.leftpad_kv, "leftpad_kv", p.batch);
    p.q_offset_mode = raw.q_offset_mode;
    switch (raw.q_offset_mode) {
        case TILEWISE_BOTTOM_RIGHT:
        case TILEWISE_TOP_LEFT: break;
        case TILEWISE_OFFSET_VALUE: p.q_offset_value = position(raw.q_offset_value); break;
        case TILEWISE_OFFSET_ARRAY:
            p.q_offsets = per_sequence(raw.q_offset, "q_offset", p.batch);
            if (!p.q_offsets) refuse("q_offset", "nothing", "an integer array [batch], since q_offset_mode says so");
            break;
        default: refuse("q_offset_mode", std::to_string(raw.q_offset_mode), "a tilewise_offset_mode (0 to 3)");
    }
    bool any_array = false;
    for (const auto& [array, argument] : {std::pair{&cu_q, "cu_seqlens_q"},
                                          {&cu_kv, "cu_seqlens_kv"},
                                          {&p.seqused_q, "seqused_q"},
                                          {&p.seqused_kv, "seqused_kv"},
                                          {&p.leftpad_kv, "leftpad_kv"},
                                          {&p.q_offsets, "q_offset"}}) {
        if (with_data) require_data(*array, argument);
        any_array |= static_cast<bool>(*array);
    }
    if (raw.max_seqlen_q < 0) refuse("max_seqlen_q", std::to_string(raw.max_seqlen_q), ">= 0 (0 = not given)");
    if (raw.max_seqlen_kv < 0) refuse("max_seqlen_kv", std::to_string(raw.max_seqlen_kv), ">= 0 (0 = not given)");
    p.lengths_known = !any_array || (with_data && !p.device.is_cuda());
    if (p.lengths_known) {
        read_lengths(p);
    } else {
        // From shapes alone: one sequence could hold everything, unless the caller's hint says less.
        p.sequences.resize(static_cast<size_t>(p.batch));
        p.max_seqlen_q = raw.max_seqlen_q ? std::min(raw.max_seqlen_q, p.q_rows) : p.q_rows;
        p.max_seqlen_kv = raw.max_seqlen_kv ? std::min(raw.max_seqlen_kv, p.kv_rows) : p.kv_rows;
    }

    // Options
    p.softmax_scale = raw.has_softmax_scale ? raw.softmax_scale
                      : p.head_dim_qk == 0  ? 1.0
                                            : 1.0 / std::sqrt(static_cast<double>(p.head_dim_qk));
    require_finite(p.softmax_scale, "softmax_scale");
    require_finite(raw.softcap, "softcap");
    if (raw.softcap < 0) refuse("softcap", std::to_string(raw.softcap), "a positive number, or 0 for none");
    if (p.accumulator() == DType::f32) {
        // Scores are float32: what is infinite or 0 there makes them NaN.
        using Limits = std::numeric_limits<float>;
        const auto seen = [](double value) {
            char text[32];
            std::snprintf(text, sizeof text, "%g", value);
            return std::string(text);
        };
        if (std::abs(p.softmax_scale) > Limits::max()) {
            refuse("softmax_scale", seen(p.softmax_scale), "a number that float32 holds, up to 3.4e38 in size");
        }
        if (raw.softcap > Limits::max() || (raw.softcap > 0 && raw.softcap < Limits::min())) {
            refuse("softcap", seen(raw.softcap), "a number that float32 holds, 1.2e-38 to 3.4e38, or 0 for none");
        }
    }
    p.softcap = raw.softcap;
    if (raw.causal != 0 && raw.causal != 1) refuse("causal", std::to_string(raw.causal), "0 or 1");
    p.causal = raw.causal != 0;
    for (const auto& [value, argument] :
         {std::pair{raw.window_left, "window left"}, {raw.window_right, "window right"}}) {
        if (value < -1) refuse(argument, std::to_string(value), ">= 0, or -1 for unbounded");
    }
    p.window_left = raw.window_left;
    p.window_right = raw.window_right;
    if (raw.chunk < 0) refuse("chunk", std::to_string(raw.chunk), "a positive number of keys, or 0 for none");
    p.chunk = raw.chunk;
    if (!(raw.dropout_p >= 0 && raw.dropout_p < 1)) {
        refuse("dropout_p", std::to_string(raw.dropout_p), "a probability in [0, 1)");
    }
    p.dropout_p = raw.dropout_p;
    p.dropout_threshold = dropout_threshold(raw.dropout_p);
    if (p.dropout_threshold >= 65536) {
        refuse("dropout_p", std::to_string(raw.dropout_p), "at most 1 - 2^-16: probabilities are multiples of 1/65536");
    }
    p.seed = raw.seed;
    p.offset = raw.offset;
    p.seed_offset = make_array(raw.seed_offset, "seed_offset");
    if (p.seed_offset) {
        if (p.seed_offset.dtype != DType::i64 || p.seed_offset.rank != 1 || p.seed_offset.shape[0] != 2) {
            refuse("seed_offset", describe(p.seed_offset), "int64 [2]: (seed, offset)");
        }
        if (with_data) require_data(p.seed_offset, "seed_offset");
        if (with_data && !p.device.is_cuda()) {
            p.seed = element(p.seed_offset, 0), p.offset = element(p.seed_offset, 1);
            p.seed_offset = {};
        }
    }
    p.validate = wants_validation(raw);
    p.deterministic = raw.deterministic != 0;
    p.batch_invariant = raw.batch_invariant != 0;
    p.backend = raw.backend ? raw.backend : "";

    const Array bias = make_array(raw.bias, "bias");
    if (bias) {
        require_float(bias, "bias", "Give a bool array as mask, not as bias.");
        if (with_data) require_data(bias, "bias");
        p.bias = broadcast_grid(bias, "bias", p, p.lengths_known);
    }
    p.alibi_slopes = make_array(raw.alibi_slopes, "alibi_slopes");
    if (Array& slopes = p.alibi_slopes) {
        require_float(slopes, "alibi_slopes");
        if (with_data) require_data(slopes, "alibi_slopes");
        const bool one = slopes.rank == 1 && slopes.shape[0] == p.num_heads_q;
        const bool two = slopes.rank == 2 && (slopes.shape[0] == p.batch || slopes.shape[0] == 1) &&
                         slopes.shape[1] == p.num_heads_q;
        if (!one && !two) {
            refuse("alibi_slopes", shape_text(slopes),
                   "[num_heads_q] = " + shape_text({p.num_heads_q}) +
                       " or [batch, num_heads_q] = " + shape_text({p.batch, p.num_heads_q}));
        }
        if (two && slopes.shape[0] == 1) slopes.stride[0] = 0;
    }
    p.sinks = make_array(raw.sinks, "sinks");
    if (p.sinks) {
        require_float(p.sinks, "sinks");
        if (with_data) require_data(p.sinks, "sinks");
        if (p.sinks.rank != 1 || p.sinks.shape[0] != p.num_heads_q) {
            refuse("sinks", shape_text(p.sinks), "[num_heads_q] = " + shape_text({p.num_heads_q}));
        }
    }

    if (raw.num_arrays < 0 || (raw.num_arrays > 0 && raw.arrays == nullptr)) {
        refuse("arrays", raw.num_arrays < 0 ? std::to_string(raw.num_arrays) + " arrays" : "a null pointer",
               "num_arrays tensors");
    }
    if (raw.num_scalars < 0 || (raw.num_scalars > 0 && raw.scalars == nullptr)) {
        refuse("scalars", raw.num_scalars < 0 ? std::to_string(raw.num_scalars) + " scalars" : "a null pointer",
               "num_scalars numbers");
    }
    for (int n = 0; n < raw.num_arrays; ++n) {
        const std::string argument = "arrays[" + std::to_string(n) + "]";
        p.arrays.push_back(make_array(raw.arrays[n], argument.c_str()));
        if (!p.arrays.back()) refuse(argument, "nothing", "a tensor");
        if (with_data) require_data(p.arrays.back(), argument.c_str());
    }
    p.scalars.assign(raw.scalars, raw.scalars + raw.num_scalars);
    if (raw.mask && *raw.mask) p.mask = canonical_mask(raw.mask, p);
    if (raw.score_mod && *raw.score_mod) {
        p.score_mod = Expr::parse(raw.score_mod, Role::score_mod, p.arrays, raw.num_scalars).text();
    }
    return p;
}

ForwardArgs make_forward_args(const Problem& problem, const tilewise_problem& raw, const tilewise_forward_args& args) {
    ForwardArgs out;
    const Array o = make_array(args.o, "o"), lse = make_array(args.lse, "lse");
    out.o = view_like(o, "o", problem, true, problem.head_dim_v);
    if (!out.o) refuse("o", "nothing", "the output tensor");
    require_data(o, "o");
    out.lse = view_lse(args.lse, "lse", problem);
    require_data(lse, "lse");
    refuse_overlap_with_inputs(o, "o", raw);
    refuse_overlap_with_inputs(lse, "lse", raw);
    refuse_overlap(lse, "lse", o, "o", "output");
    return out;
}

BackwardArgs make_backward_args(const Problem& p, const tilewise_problem& raw, const tilewise_backward_args& args) {
    BackwardArgs out;
    out.d_o = view_like(make_array(args.d_o, "do"), "do", p, true, p.head_dim_v);
    out.o = view_like(make_array(args.o, "o"), "o", p, true, p.head_dim_v);
    out.lse = view_lse(args.lse, "lse", p);
    out.dlse = view_lse(args.dlse, "dlse", p);
    if (!out.d_o) refuse("do", "nothing", "the gradient of o");
    if (!out.o) refuse("o", "nothing", "the output of the forward pass");
    if (!out.lse) refuse("lse", "nothing", "the lse of the forward pass");
    out.dq = view_like(make_array(args.dq, "dq"), "dq", p, true, p.head_dim_qk);
    out.dk = view_like(make_array(args.dk, "dk"), "dk", p, false, p.head_dim_qk);
    out.dv = view_like(make_array(args.dv, "dv"), "dv", p, false, p.head_dim_v);
    const Array dbias = make_array(args.dbias, "dbias");
    if (dbias) {
        if (!p.bias) refuse("dbias", "a tensor", "nothing, since there is no bias");
        require_shape(dbias, "dbias", make_array(raw.bias, "bias"), "bias");
        out.dbias = broadcast_grid(dbias, "dbias", p, p.lengths_known);
    }
    out.dalibi_slopes = make_array(args.dalibi_slopes, "dalibi_slopes");
    if (out.dalibi_slopes) {
        if (!p.alibi_slopes) refuse("dalibi_slopes", "a tensor", "nothing, since there are no alibi_slopes");
        require_shape(out.dalibi_slopes, "dalibi_slopes", make_array(raw.alibi_slopes, "alibi_slopes"), "alibi_slopes");
    }
    out.dsinks = make_array(args.dsinks, "dsinks");
    if (out.dsinks) {
        if (!p.sinks) refuse("dsinks", "a tensor", "nothing, since there are no sinks");
        require_shape(out.dsinks, "dsinks", p.sinks, "sinks");
    }
    for (int n = 0; args.darrays && n < raw.num_arrays; ++n) {
        const std::string argument = "darrays[" + std::to_string(n) + "]";
        const Array array = make_array(args.darrays[n], argument.c_str());
        if (array) {
            require_shape(array, argument.c_str(), p.arrays[static_cast<size_t>(n)],
                          ("arrays[" + std::to_string(n) + "]").c_str());
            if (!is_float(array.dtype)) refuse(argument, name(array.dtype), "a float array: others have no gradient");
        }
        out.darrays.push_back(array);
    }
    std::vector<std::pair<Array, std::string>> outputs;
    const auto output = [&](const tilewise_tensor& tensor, const char* argument) {
        const Array array = make_array(tensor, argument);
        require_data(array, argument);
        for (const auto& [other, other_name] : outputs)
            refuse_overlap(array, argument, other, other_name.c_str(), "output");
        outputs.emplace_back(array, argument);
        refuse_overlap_with_inputs(array, argument, raw);
        for (const auto& [input, input_name] :
             {std::pair{&args.d_o, "do"}, {&args.o, "o"}, {&args.lse, "lse"}, {&args.dlse, "dlse"}}) {
            refuse_overlap(array, argument, make_array(*input, input_name), input_name);
        }
    };
    require_data(make_array(args.d_o, "do"), "do");
    require_data(make_array(args.o, "o"), "o");
    require_data(make_array(args.lse, "lse"), "lse");
    require_data(make_array(args.dlse, "dlse"), "dlse");
    output(args.dq, "dq"), output(args.dk, "dk"), output(args.dv, "dv"), output(args.dbias, "dbias");
    output(args.dalibi_slopes, "dalibi_slopes"), output(args.dsinks, "dsinks");
    for (int n = 0; args.darrays && n < raw.num_arrays; ++n) {
        output(args.darrays[n], ("darrays[" + std::to_string(n) + "]").c_str());
    }
    return out;
}

std::string describe(Device device) { return device.is_cuda() ? "cuda:" + std::to_string(device.index) : "cpu"; }

std::string describe(const Problem& p) {
    std::string text = p.device.is_cuda() ? describe(p.device) + " b" : "b";
    text += std::to_string(p.batch) + " hq" + std::to_string(p.num_heads_q) + "/hkv" + std::to_string(p.num_heads_kv) +
            " sq" + std::to_string(p.max_seqlen_q) + " skv" + std::to_string(p.max_seqlen_kv) + " d" +
            std::to_string(p.head_dim_qk);
    if (p.head_dim_v != p.head_dim_qk) text += "/" + std::to_string(p.head_dim_v);
    text += std::string(" ") + name(p.dtype);
    if (p.packed_q || p.packed_kv) text += " ragged";
    if (p.causal) text += " causal";
    if (p.window_left >= 0 || p.window_right >= 0) {
        text += " window(" + std::to_string(p.window_left) + "," + std::to_string(p.window_right) + ")";
    }
    if (p.chunk > 0) text += " chunk(" + std::to_string(p.chunk) + ")";
    if (p.softcap > 0) text += " softcap";
    if (p.bias) text += " bias";
    if (p.alibi_slopes) text += " alibi";
    if (p.sinks) text += " sinks";
    if (p.dropout_threshold > 0) text += " dropout";
    if (!p.mask.empty()) text += " mask=" + p.mask;
    if (!p.score_mod.empty()) text += " score_mod=" + p.score_mod;
    if (p.deterministic) text += " deterministic";
    if (p.batch_invariant) text += " batch_invariant";
    return text;
}

// Rows of [0, rows) that lie in no [first, first + length) of the sequences given in ascending order.
template <class First, class Length>
static std::vector<Range> gaps(const Problem& p, int64_t rows, bool packed, int64_t b, First first, Length length) {
    std::vector<Range> out;
    int64_t covered = 0;
    const auto cover = [&](const Sequence& s) {
        const int64_t begin = first(s), end = begin + length(s);
        if (begin > covered) out.push_back({covered, begin});
        covered = std::max(covered, end);
    };
    if (packed) {
        for (const Sequence& s : p.sequences) {
            if (length(s) > 0) cover(s);
        }
    } else {
        const Sequence& s = p.sequences[static_cast<size_t>(b)];
        if (length(s) > 0) cover(s);
    }
    if (covered < rows) out.push_back({covered, rows});
    return out;
}

std::vector<Range> unused_q_rows(const Problem& p, int64_t b) {
    return gaps(
        p, p.q_rows, p.packed_q, b, [](const Sequence& s) { return s.q_row0; },
        [](const Sequence& s) { return s.q_len; });
}

std::vector<Range> unused_kv_rows(const Problem& p, int64_t b) {
    return gaps(
        p, p.kv_rows, p.packed_kv, b, [](const Sequence& s) { return s.kv_row0; },
        [](const Sequence& s) { return s.kv_len; });
}

}  // namespace tilewise::core
