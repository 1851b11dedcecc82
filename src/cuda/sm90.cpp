// fwd_sm90 on the host: which kernel a problem needs, its tensor maps, and the order of its work.
#include "sm90.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "call.hpp"
#include "core/summary.hpp"
#include "device.hpp"
#include "jit/mma_spec.hpp"
#include "jit/sm90_spec.hpp"
#include "launch.hpp"
#include "mma.hpp"
#include "program.hpp"
#include "tensor_map.hpp"

namespace tilewise::cuda {
namespace {

using core::ceil_div;
using core::Pass;
using core::Problem;
using core::Workspace;

struct Params {  // before mask and score_mod
    abi::TensorMap q, k, v;
    abi::Forward call;
    abi::Sm90Forward plan;
};
static_assert(sizeof(abi::TensorMap) == sizeof(TensorMap));

struct Decision {
    jit::Sm90ForwardSpec spec;
    int64_t q_tiles = 0, tiles = 0;  // of a head, of all
    int64_t blocks = 0;
    bool unequal = false;  // later rows see more keys
    int64_t heads_at_once = 1;
};

std::optional<Decision> decide(const Problem& p, const Program& program, std::string* why_not = nullptr) {
    const DeviceInfo& device = device_info(p.device.index);
    const auto spec = jit::sm90_forward_spec(p, program.mask, jit::kernel_arch(device.major, device.minor), why_not);
    if (!spec) return std::nullopt;
    Decision decision{*spec};
    // Of one head of one sequence; or, where lengths are in device memory, of all, and then no fewer than there are.
    decision.q_tiles = p.packed_q ? p.q_rows / spec->rows() + p.batch : ceil_div(p.q_rows, spec->rows());
    if (spec->table && !p.packed_q) decision.q_tiles *= p.batch;
    if (program.mask.sequences_of >= 0) decision.q_tiles = p.batch * p.q_rows / spec->rows() + most_documents(p);
    decision.tiles = decision.q_tiles * p.num_heads_q * (spec->table ? 1 : p.batch);
    decision.blocks = std::min<int64_t>(decision.tiles, device.num_sms);
    const auto no = [&](const char* text) {
        if (why_not != nullptr)
            *why_not =
                std::to_string(decision.tiles) + " tiles of " + std::to_string(spec->rows()) + " queries; " + text;
        return std::nullopt;
    };
    if (decision.tiles > INT32_MAX) return no("numbers of tiles have 31 bits");
    // A row's bits shall not depend on how many others there are.
    if (p.backend.empty() && !p.batch_invariant && (decision.tiles * 2 < device.num_sms || p.max_seqlen_q <= 64))
        return no("too few for this GPU, and fwd_mma has smaller blocks and splits keys");
    // Blocks that work at the same time share keys: all are on the heads of a group, or on as many as half of L2 holds,
    // so that the longest tiles of several heads come first.
    decision.unequal = program.mask.window_right >= 0 && program.mask.window_left < 0;
    const int64_t keys = std::clamp<int64_t>(p.max_seqlen_kv, 1, p.kv_rows);
    const int64_t bytes_of_head = 2 * keys * (p.head_dim_qk + p.head_dim_v), group = p.group();
    const int64_t fitting = static_cast<int64_t>(device.l2_bytes / 2) / bytes_of_head * group;
    decision.heads_at_once =
        decision.unequal ? std::clamp<int64_t>(fitting, group, decision.tiles / decision.q_tiles) : group;
    return decision;
}

std::string supports(const Problem& p, Pass pass) {
    std::string why_not;
    if (!available(&why_not)) return why_not;
    const auto program = program_of(p, pass);
    if (!decide(p, *program, &why_not)) return why_not;
    return parameters_fit(p, *program, pass, sizeof(Params));
}

struct Memory {
    void* queue;
    explicit Memory(Arena& arena) : queue(arena.take(3 * 8)) {}
};

// One launch of the kernel, apart from its arguments.
struct Variant {
    std::shared_ptr<const Program> program;
    Decision decision;
    const Function* function = nullptr;  // once it is loaded

    void load(const Problem& p) {
        function = &kernel(p, *program, "fwd_sm90.cu", "fwd_sm90", decision.spec, decision.spec.constants());
    }
    [[nodiscard]] std::string text() const {
        return "fwd_sm90" + jit::text_of(decision.spec, decision.spec.constants());
    }
};

std::optional<Variant> variant_of(const Problem& p, bool sequences) {
    auto program = program_of(p, Pass::forward, sequences);
    auto decision = decide(p, *program);
    if (!decision) return std::nullopt;
    return Variant{std::move(program), *decision};
}
// The same again for documents that are sequences. Which of both has something to do, the device finds out.
std::optional<Variant> as_sequences(const Problem& p, const Variant& masked) {
    if (!jit::documents_may_be_sequences(p, masked.program->mask)) return std::nullopt;
    constexpr int64_t kMostTokens = 1 << 30, kFewTokens = 512;  // documents.cu; where it pays
    if (p.q_rows < kFewTokens || p.batch * p.q_rows >= kMostTokens) return std::nullopt;
    return variant_of(p, true);
}
// Whether queries and keys are the same tokens.
bool same_tokens(const Problem& p, const jit::MaskProgram& masked) {
    const auto array = [&](size_t n) -> const core::Array& {
        return p.arrays[static_cast<size_t>(masked.operands[n].array)];
    };
    if (!masked.documents) return false;
    const core::Array &q = array(0), &kv = array(1);
    const bool one_plane = q.rank < 3 || q.shape[1] == 1;  // [S], [B, S], [B, H, S]
    return p.q_rows == p.kv_rows && (p.q_offset_mode != TILEWISE_OFFSET_VALUE || p.q_offset_value == 0) && one_plane &&
           q.data == kv.data && q.dtype == kv.dtype && q.rank == kv.rank && q.shape == kv.shape &&
           q.stride == kv.stride;
}

// A plan serves problems of other lengths and strides too, and any o; fwd_mma does what this kernel does not take.
size_t workspace(const Problem& p, Pass pass) {
    const auto masked = variant_of(p, false);
    if (!masked) return kFwdMma.workspace_bytes(p, pass);
    Arena arena(nullptr);
    const auto take = [&](const Variant& variant) {
        const jit::Sm90ForwardSpec& spec = variant.decision.spec;
        [[maybe_unused]] const Call call(p, variant.program->mask, arena, spec.rows(), spec.keys);
        [[maybe_unused]] const Memory memory(arena);
    };
    take(*masked);
    if (const auto sequences = as_sequences(p, *masked)) take(*sequences);
    return std::max(static_cast<size_t>(arena.used()), kFwdMma.workspace_bytes(p, pass));
}

std::string explain(const Problem& p, Pass pass) {
    const auto masked = variant_of(p, false);
    if (!masked) return kFwdMma.explain(p, pass);
    const Decision& decision = masked->decision;
    const jit::Sm90ForwardSpec& spec = decision.spec;
    return "  device: " + device_info(p.device.index).name + "\n  tiles: " + std::to_string(spec.rows()) +
           " queries x " + std::to_string(spec.keys) + " keys, " + std::to_string(spec.consumers) +
           " warpgroups and a producer, fp32 sums\n" + "  buffers: " + std::to_string(spec.q_buffers) + " of q, " +
           std::to_string(spec.k_stages) + " of k, " + std::to_string(spec.v_stages) + " of v\n" +
           "  work: " + std::to_string(decision.tiles) + " tiles for " + std::to_string(decision.blocks) + " blocks\n" +
           (as_sequences(p, *masked) ? "  documents: sequences with tiles of their own, if the ids of queries and keys "
                                       "are one array and rise\n"
                                     : "");
}

// Axes: number, row, head, batch. What one tile needs of them comes in panels of 64 numbers.
abi::TensorMap map_of(const core::Tensor4& t, int64_t dims, int64_t rows, int64_t heads, int64_t batch, int tile) {
    constexpr int64_t kBytes = 2, kAny = 16;  // an axis of one has no distance, but TMA wants one
    const auto stride = [](int64_t elements, int64_t extent) {
        return static_cast<uint64_t>(extent > 1 ? elements * kBytes : kAny);
    };
    TiledLayout layout;
    layout.data = t.data;
    layout.dtype = t.dtype == core::DType::bf16 ? TmaType::bf16 : TmaType::f16;
    layout.rank = 4;
    layout.shape = {static_cast<uint64_t>(dims), static_cast<uint64_t>(rows), static_cast<uint64_t>(heads),
                    static_cast<uint64_t>(batch)};
    layout.stride_bytes = {0, stride(t.row_stride, rows), stride(t.head_stride, heads), stride(t.batch_stride, batch)};
    layout.box = {64, static_cast<uint32_t>(tile), 1, 1};
    layout.swizzle = TmaSwizzle::bytes_128;
    const TensorMap encoded = encode_tiled(layout);
    abi::TensorMap map;
    std::memcpy(&map, &encoded, sizeof map);
    return map;
}

// Never 0, and no other launch of this or another process is likely to have it.
abi::Int signature() {
    static std::atomic<uint64_t> last{[] {
        std::random_device random;
        return uint64_t{random()} << 32 | random();
    }()};
    return static_cast<abi::Int>(last.fetch_add(2) | 1);
}

// What a run does, apart from its arguments. Without a variant it is fwd_mma's, which keeps something of its own.
struct Kept {
    std::optional<Variant> masked, sequences;
    mutable std::shared_ptr<const void> of_mma;
};

std::shared_ptr<const Kept> keep(const Problem& p, Workspace workspace) {
    auto made = std::make_shared<Kept>();
    made->masked = variant_of(p, false);
    if (!made->masked) return made;
    if (same_tokens(p, made->masked->program->mask)) made->sequences = as_sequences(p, *made->masked);
    std::vector<std::function<void()>> loads;
    bool first = false;  // some of it may have to be compiled: all at the same time
    for (std::optional<Variant>* variant : {&made->sequences, &made->masked}) {
        if (!*variant) continue;
        Variant& each = **variant;
        loads.emplace_back([&p, &each] { each.load(p); });
        if (!each.program->first_time(each.text())) continue;
        first = true;
        Arena arena(workspace.data);
        for (auto& load : Call(p, each.program->mask, arena).loads()) loads.push_back(std::move(load));
    }
    if (first) side_by_side(loads);
    else std::for_each(loads.begin(), loads.end(), [](const auto& load) { load(); });
    return made;
}

// Returns where documents.cu says whether there is anything to do, if documents are sequences.
const abi::Sequence* run(const Problem& p, const core::ForwardArgs& args, const Variant& variant, Arena& arena,
                         const abi::Sequence* end_of_documents, void* stream) {
    const Decision& decision = variant.decision;
    const jit::MaskProgram& mask = variant.program->mask;
    const jit::Sm90ForwardSpec& spec = decision.spec;
    const Call call(p, mask, arena, spec.rows(), spec.keys);
    const Memory memory(arena);
    const bool documents = mask.sequences_of >= 0;

    const abi::Tensor o = to_abi(args.o);
    const abi::Rows lse = args.lse ? to_abi(args.lse) : abi::Rows{};
    call.prepare(stream);
    if (!documents) call.clear_rows(o, lse, p.num_heads_q, p.head_dim_v, true, stream);  // else every row has one

    const int64_t q_batch = p.packed_q ? 1 : p.batch, kv_batch = p.packed_kv ? 1 : p.batch;
    Params fixed{};
    fixed.q = map_of(p.q, p.head_dim_qk, p.q_rows, p.num_heads_q, q_batch, spec.rows());
    fixed.k = map_of(p.k, p.head_dim_qk, p.kv_rows, p.num_heads_kv, kv_batch, spec.keys);
    fixed.v = map_of(p.v, p.head_dim_v, p.kv_rows, p.num_heads_kv, kv_batch, spec.keys);
    fixed.call = {call.problem(), o, lse, jit::takes_16_bytes(args.o)};
    fixed.plan = {{memory.queue, signature()}, decision.tiles,   decision.q_tiles,
                  decision.heads_at_once,      decision.unequal, end_of_documents};
    std::vector<std::byte> params;
    params.reserve(sizeof fixed + call.mask_data().size() + 64);
    append(params, &fixed, offsetof(Params, plan) + sizeof fixed.plan);  // not the padding after it
    append(params, call.mask_data().data(), call.mask_data().size());
    params.resize((params.size() + 63) / 64 * 64);  // the struct is as aligned as its tensor maps

    LaunchConfig config;
    config.grid.x = static_cast<unsigned>(decision.blocks);
    config.block.x = static_cast<unsigned>(spec.threads());
    config.dynamic_shared = static_cast<unsigned>(spec.shared_bytes());
    config.programmatic_dependent = true;
    config.stream = stream;
    launch(*variant.function, config, params.data(), params.size());
    return documents ? call.last_sequence() : nullptr;
}

void forward(const Problem& p, const core::ForwardArgs& args, Workspace workspace) {
    const DeviceGuard guard(p.device.index);
    const bool known = workspace.kept != nullptr && *workspace.kept != nullptr;
    const auto kept = known ? std::static_pointer_cast<const Kept>(*workspace.kept) : keep(p, workspace);
    if (workspace.kept != nullptr) *workspace.kept = kept;
    if (!kept->masked || !jit::takes_16_bytes(args.o)) {
        workspace.kept = &kept->of_mma;
        return kFwdMma.forward(p, args, workspace);
    }
    if (p.validate) validate_lengths(p, workspace.stream);
    Arena arena(workspace.data);
    const abi::Sequence* end = nullptr;
    if (kept->sequences) end = run(p, args, *kept->sequences, arena, nullptr, workspace.stream);
    run(p, args, *kept->masked, arena, end, workspace.stream);
}

}  // namespace

const core::Implementation kFwdSm90{"fwd_sm90", supports, workspace, explain, forward, nullptr, TILEWISE_CUDA};

}  // namespace tilewise::cuda
