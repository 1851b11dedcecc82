#include "call.hpp"

#include <algorithm>
#include <cstring>

#include "core/mask_arrays.hpp"
#include "device.hpp"
#include "jit/attention_source.hpp"
#include "launch.hpp"

namespace tilewise::cuda {

using core::Array;
using core::ceil_div;
using core::Problem;

namespace {

constexpr const char *kPrepare = "prepare.cu", *kDocuments = "documents.cu", *kSummaries = "summaries.cu";
constexpr int kThreads = 256, kDocumentThreads = 1024;
constexpr int64_t kSummary = 64;  // as in mask.cuh

abi::Index to_index(const Array& array) {
    if (!array) return {};
    return {array.data, array.stride[0], array.dtype == core::DType::i64};
}

abi::Array to_abi(const Array& array) {
    abi::Array out{};
    out.data = array.data;
    for (size_t d = 0; d < core::kMaxRank; ++d) out.shape[d] = array.shape[d], out.stride[d] = array.stride[d];
    return out;
}

// Axes of a mask array by its role; planes as core reads them.
struct RoleAxes {
    int tail;          // axes that are neither batch nor heads
    bool heads_alone;  // a single leading axis is heads
};
RoleAxes axes_of(jit::MaskRole role, const Problem& p) {
    switch (role) {
        case jit::MaskRole::q_tokens: return {1, p.packed_q};
        case jit::MaskRole::kv_tokens:
        case jit::MaskRole::key_padding: return {1, p.packed_kv};
        case jit::MaskRole::intervals: return {2, p.packed_kv};
        case jit::MaskRole::tree: return {2, p.packed_q};
        case jit::MaskRole::per_head: return {0, false};
        case jit::MaskRole::blocks:
        case jit::MaskRole::dense: break;
    }
    return {2, false};
}

abi::MaskArray mask_array(const Problem& p, const jit::MaskOperand& operand) {
    Array a = p.arrays[static_cast<size_t>(operand.array)];
    if (operand.role == jit::MaskRole::dense) {  // to rank 4; axes of one element are broadcast
        Array padded = a;
        padded.rank = 4;
        for (int n = 0; n < 4; ++n) {
            const int axis = n - (4 - a.rank);
            padded.shape[static_cast<size_t>(n)] = axis < 0 ? 1 : a.shape[static_cast<size_t>(axis)];
            padded.stride[static_cast<size_t>(n)] =
                axis < 0 || a.shape[static_cast<size_t>(axis)] == 1 ? 0 : a.stride[static_cast<size_t>(axis)];
        }
        a = padded;
    }
    const RoleAxes axes = axes_of(operand.role, p);
    const core::Planes planes(p, a, axes.tail, axes.heads_alone);
    abi::MaskArray out{};
    out.data = a.data;
    out.batch = planes.batch == 1 ? 0 : planes.batch_stride;
    out.head = planes.heads == 1 ? 0 : planes.head_stride;
    out.queries_per_head = planes.queries_per_head;
    out.plane_batch = planes.batch == 1 ? 0 : planes.heads;
    out.plane_head = planes.heads == 1 ? 0 : 1;
    out.planes = planes.count();
    out.rows = out.columns = 1;
    if (axes.tail >= 1) {
        const auto axis = static_cast<size_t>(a.rank - axes.tail);
        out.rows = a.shape[axis], out.row = a.stride[axis];
    }
    if (axes.tail == 2) {
        const auto axis = static_cast<size_t>(a.rank - 1);
        out.columns = a.shape[axis], out.column = a.stride[axis];
    }
    return out;
}

// Bytes of the summary that a role classifies by.
int64_t summary_bytes(jit::MaskRole role, const abi::MaskArray& a) {
    const int64_t blocks = ceil_div(a.rows, kSummary) * a.planes;
    switch (role) {
        case jit::MaskRole::q_tokens:
        case jit::MaskRole::kv_tokens:
        case jit::MaskRole::key_padding: return blocks * 4 * 8;
        case jit::MaskRole::intervals: return blocks * 8 * 8;
        case jit::MaskRole::dense: return blocks * ceil_div(a.columns, kSummary) * 8;
        default: return 0;
    }
}

unsigned blocks_for(int64_t items, int64_t per_block) {
    const int64_t blocks = ceil_div(items, per_block);
    if (blocks > 0x7fffffff)
        core::refuse("problem", std::to_string(items) + " rows or blocks", "fewer than 2^31 blocks");
    return static_cast<unsigned>(blocks);
}

template <class T>
void append_all(std::vector<std::byte>& bytes, const std::vector<T>& values) {
    static constexpr T kNone{};  // an array of a struct has at least one element
    if (values.empty()) append(bytes, &kNone, sizeof(T));
    else append(bytes, values.data(), values.size() * sizeof(T));
}

}  // namespace

const Function& plain_function(int device, const char* file, const char* entry) {
    return function(device, file, entry, [&] { return jit::plain_source(file); });
}

unsigned grid_x(int64_t tiles, int64_t heads) {
    if (tiles * heads > 0x7fffffff) {
        core::refuse("problem", std::to_string(tiles) + " tiles in " + std::to_string(heads) + " heads",
                     "fewer than 2^31 tiles in all heads", "Split the batch.");
    }
    return static_cast<unsigned>(tiles * heads);
}

void append(std::vector<std::byte>& bytes, const void* part, size_t size) {
    const size_t before = bytes.size();
    bytes.resize(before + size);
    std::memcpy(bytes.data() + before, part, size);
}

abi::Tensor to_abi(const core::Tensor4& t) {
    return {t.data, t.batch_stride, t.row_stride, t.head_stride, t.dim_stride};
}
abi::Rows to_abi(const core::Rows3& r) { return {r.data, r.batch_stride, r.head_stride, r.row_stride}; }
abi::Grid to_abi(const core::Grid4& g) {
    abi::Grid out{};
    out.data = g.data;
    out.dtype = static_cast<int64_t>(g.dtype);
    for (size_t n = 0; n < 4; ++n) out.shape[n] = g.shape[n], out.stride[n] = g.stride[n];
    return out;
}
abi::PerHead per_head(const Array& a) {
    if (!a) return {};
    const bool two = a.rank == 2;
    return {a.data, static_cast<int64_t>(a.dtype), two && a.shape[0] > 1 ? a.stride[0] : 0, a.stride[two ? 1 : 0]};
}

Call::Call(const Problem& p, const jit::MaskProgram& mask, Arena& arena, int64_t q_tile, int64_t kv_tile)
    : p_(p), mask_(mask) {
    abi::Problem& out = problem_;
    out.batch = p.batch, out.num_heads_q = p.num_heads_q, out.num_heads_kv = p.num_heads_kv;
    out.head_dim_qk = p.head_dim_qk, out.head_dim_v = p.head_dim_v;
    out.q_rows = p.q_rows, out.kv_rows = p.kv_rows;
    out.q_tile = q_tile, out.kv_tile = kv_tile;
    out.packed_q = p.packed_q, out.packed_kv = p.packed_kv;
    out.q_offset_mode = p.q_offset_mode, out.q_offset_value = p.q_offset_value;
    out.cu_q = to_index(p.cu_seqlens_q), out.cu_kv = to_index(p.cu_seqlens_kv);
    out.used_q = to_index(p.seqused_q), out.used_kv = to_index(p.seqused_kv);
    out.leftpad = to_index(p.leftpad_kv), out.q_offset = to_index(p.q_offsets);
    out.num_sequences = mask.sequences_of >= 0 ? most_documents(p) : p.batch;
    if (p.has_lengths() || mask.sequences_of >= 0) {
        out.sequences = static_cast<abi::Sequence*>(
            arena.take((out.num_sequences + 1) * static_cast<int64_t>(sizeof(abi::Sequence))));
    }
    out.q = to_abi(p.q), out.k = to_abi(p.k), out.v = to_abi(p.v);
    out.softmax_scale = p.head_dim_qk == 0 ? 0.0 : p.softmax_scale;
    out.softcap = p.softcap;
    out.window_left = mask.window_left, out.window_right = mask.window_right;
    if (p.bias) out.bias = to_abi(p.bias);
    out.slopes = per_head(p.alibi_slopes), out.sinks = per_head(p.sinks);
    out.keep_inverse = 65536.0 / static_cast<double>(65536 - p.dropout_threshold);
    out.dropout_threshold = p.dropout_threshold;
    out.seed = p.seed, out.offset = p.offset;
    out.seed_offset = to_index(p.seed_offset);

    for (const jit::MaskOperand& operand : mask.operands) {
        abi::MaskArray array = mask_array(p, operand);
        const int64_t bytes = summary_bytes(operand.role, array);
        if (bytes > 0) array.summary = static_cast<abi::Int*>(arena.take(bytes));
        masks_.push_back(array);
    }
    for (const Array& array : p.arrays) arrays_.push_back(to_abi(array));
    gather_summaries_.resize(p.arrays.size());
    for (const int k : mask.gathered) {
        const Array& array = p.arrays[static_cast<size_t>(k)];
        const int64_t blocks = ceil_div(array.size(), kSummary);
        if (blocks > 0) gather_summaries_[static_cast<size_t>(k)].data = static_cast<double*>(arena.take(blocks * 24));
    }
    mask_data_.reserve(1024);  // what most calls need: it grows no further
    append_all(mask_data_, masks_);
    append_all(mask_data_, arrays_);
    append_all(mask_data_, gather_summaries_);
    append_all(mask_data_, p.scalars);
    append_all(mask_data_, mask.numbers);
}

int64_t Call::tiles(bool packed, int64_t rows, int64_t tile) const {
    return packed ? rows / tile + p_.batch : p_.batch * ceil_div(rows, tile);
}

std::vector<std::function<void()>> Call::loads() const {
    std::vector<std::function<void()>> all;
    const auto add = [&](const char* file, const char* entry) {
        all.emplace_back([device = p_.device.index, file, entry] { plain_function(device, file, entry); });
    };
    if (mask_.sequences_of >= 0) add(kDocuments, "prepare_documents");
    else if (problem_.sequences) add(kPrepare, "prepare_sequences");
    const auto used = [](const auto& summary) { return summary != nullptr; };
    if (std::any_of(masks_.begin(), masks_.end(), [&](const abi::MaskArray& a) { return used(a.summary); }) ||
        std::any_of(gather_summaries_.begin(), gather_summaries_.end(),
                    [&](const abi::GatherSummary& g) { return used(g.data); }))
        add(kSummaries, "summarise_tokens");
    return all;
}

void Call::prepare(void* stream) const {
    const int device = p_.device.index;
    LaunchConfig config;
    config.block = {kThreads, 1, 1};
    config.stream = stream;
    if (mask_.sequences_of >= 0) {
        const abi::MaskArray ids = mask_array(p_, {mask_.sequences_of, jit::MaskRole::q_tokens});
        const abi::Documents params{problem_, ids,
                                    p_.arrays[static_cast<size_t>(mask_.sequences_of)].dtype == core::DType::i64};
        LaunchConfig one_block = config;
        one_block.block.x = kDocumentThreads;
        launch(plain_function(device, kDocuments, "prepare_documents"), one_block, params);
    } else if (problem_.sequences) {
        launch(plain_function(device, kPrepare, "prepare_sequences"), config, problem_);
    }
    for (size_t n = 0; n < masks_.size(); ++n) {
        const abi::MaskArray& array = masks_[n];
        if (array.summary == nullptr) continue;
        abi::Summarise params{};
        params.array = array;
        params.dtype = static_cast<int64_t>(p_.arrays[static_cast<size_t>(mask_.operands[n].array)].dtype);
        const int64_t blocks = ceil_div(array.rows, kSummary) * array.planes;
        switch (mask_.operands[n].role) {
            case jit::MaskRole::dense:
                config.grid.x = blocks_for(blocks * ceil_div(array.columns, kSummary), 1);
                launch(plain_function(device, kSummaries, "summarise_dense"), config, params);
                break;
            case jit::MaskRole::intervals:
                params.numbers = array.columns, params.causal = mask_.operands[n].causal;
                config.grid.x = blocks_for(blocks, kThreads);
                launch(plain_function(device, kSummaries, "summarise_intervals"), config, params);
                break;
            default:
                params.as_bool = mask_.operands[n].role == jit::MaskRole::key_padding;
                config.grid.x = blocks_for(blocks, kThreads / 32);
                launch(plain_function(device, kSummaries, "summarise_tokens"), config, params);
        }
    }
    for (size_t k = 0; k < gather_summaries_.size(); ++k) {
        if (gather_summaries_[k].data == nullptr) continue;
        abi::Summarise params{};
        params.captured = arrays_[k];
        params.captured_summary = const_cast<double*>(gather_summaries_[k].data);
        params.dtype = static_cast<int64_t>(p_.arrays[k].dtype);
        params.rank = p_.arrays[k].rank;
        config.grid.x = blocks_for(ceil_div(p_.arrays[k].size(), kSummary), kThreads);
        launch(plain_function(device, kSummaries, "summarise_captured"), config, params);
    }
}

void Call::clear_rows(const abi::Tensor& tensor, const abi::Rows& lse, int64_t heads, int64_t dims, bool query_side,
                      void* stream) const {
    if (problem_.sequences == nullptr) return;  // every row belongs to a sequence
    abi::Clear params{problem_, tensor, lse, static_cast<int64_t>(p_.dtype), heads, dims, query_side};
    const bool packed = query_side ? p_.packed_q : p_.packed_kv;
    LaunchConfig config;
    config.block = {kThreads, 1, 1};
    config.grid.x = blocks_for((query_side ? p_.q_rows : p_.kv_rows) * (packed ? 1 : p_.batch), kThreads / 32);
    config.stream = stream;
    launch(plain_function(p_.device.index, kPrepare, "clear_rows"), config, params);
}

void validate_lengths(const Problem& problem, void* stream) {
    Problem copy = problem;
    std::vector<std::vector<std::byte>> memory;
    for (Array* array : {&copy.cu_seqlens_q, &copy.cu_seqlens_kv, &copy.seqused_q, &copy.seqused_kv, &copy.leftpad_kv,
                         &copy.q_offsets}) {
        if (!*array || array->size() == 0) continue;
        const int64_t width = core::size_of(array->dtype);
        const int64_t last = (array->shape[0] - 1) * array->stride[0];
        const int64_t first = std::min<int64_t>(last, 0), count = std::max<int64_t>(last, 0) - first + 1;
        auto& bytes = memory.emplace_back(static_cast<size_t>(count * width));
        copy_to_host(bytes.data(), static_cast<const std::byte*>(array->data) + first * width, bytes.size(), stream);
        array->data = bytes.data() - first * width;
    }
    synchronize(stream);
    core::read_lengths(copy);
}

}  // namespace tilewise::cuda
