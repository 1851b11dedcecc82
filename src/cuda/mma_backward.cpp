// bwd_mma on the host: which kernels a problem needs, their parameters, their order.
#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "call.hpp"
#include "core/summary.hpp"
#include "device.hpp"
#include "jit/mma_backward_spec.hpp"
#include "launch.hpp"
#include "mma.hpp"
#include "program.hpp"

namespace tilewise::cuda {
namespace {

using core::ceil_div;
using core::Pass;
using core::Problem;
using core::Workspace;

constexpr const char *kMain = "bwd_mma.cu", *kFinish = "bwd_mma_finish.cu";
constexpr int64_t kSimtThreads = 256;

std::optional<jit::MmaBackwardSpec> decide(const Problem& p, const Program& program, std::string* why_not = nullptr) {
    const DeviceInfo& device = device_info(p.device.index);
    return jit::mma_backward_spec(p, program.mask, jit::kernel_arch(device.major, device.minor), why_not);
}

std::string supports(const Problem& p, Pass pass) {
    std::string why_not;
    if (!available(&why_not)) return why_not;
    const auto program = program_of(p, pass);
    if (!decide(p, *program, &why_not)) return why_not;
    return parameters_fit(p, *program, pass, std::max(sizeof(abi::MmaBackward), sizeof(abi::Backward)));
}

// Gradients of bias, slopes and sinks: the kernels of bwd_simt, with tiles of their own.
bool may_need_simt(const Problem& p) { return p.bias || p.alibi_slopes || p.sinks; }

// What a run keeps in its workspace.
struct Memory {
    Arena arena;
    Call call;
    void *rows = nullptr, *dq_sums = nullptr, *turns = nullptr;
    int64_t turn_bytes = 0;
    std::optional<Call> simt;
    abi::Rows delta{};
    void *slope_partial = nullptr, *sink_partial = nullptr;

    Memory(const Problem& p, const Program& program, const jit::MmaBackwardSpec& spec, void* base)
        : arena(base), call(p, program.mask, arena, spec.queries, spec.keys) {
        const int64_t tiles = p.num_heads_q * call.q_tiles();
        rows = arena.take(tiles * spec.queries * 8);
        dq_sums = arena.take(tiles * spec.queries * spec.dims_qk * 4);
        turn_bytes = spec.deterministic ? tiles * 4 : 0;
        if (turn_bytes > 0) turns = arena.take(turn_bytes);
        if (!may_need_simt(p)) return;
        simt.emplace(p, program.mask, arena);
        delta = {arena.take((p.packed_q ? 1 : p.batch) * p.num_heads_q * p.q_rows * 4), p.num_heads_q * p.q_rows,
                 p.q_rows, 1};
        const int64_t partial = p.num_heads_q * simt->q_tiles() * 4;
        if (p.alibi_slopes) slope_partial = arena.take(partial);
        if (p.sinks) sink_partial = arena.take(partial);
    }
    Memory(const Memory&) = delete;  // its Calls hold on to the arena's pieces
    Memory& operator=(const Memory&) = delete;
    ~Memory() = default;
};

size_t workspace(const Problem& p, Pass pass) {
    const auto program = program_of(p, pass);
    const auto spec = decide(p, *program);
    return spec ? static_cast<size_t>(Memory(p, *program, *spec, nullptr).arena.used()) : 0;
}

std::string explain(const Problem& p, Pass pass) {
    const auto spec = decide(p, *program_of(p, pass));
    if (!spec) return "";
    return "  device: " + device_info(p.device.index).name + "\n  tiles: " + std::to_string(spec->queries) +
           " queries x " + std::to_string(spec->keys) + " keys, " + std::to_string(spec->warps) +
           " warps, fp32 sums\n  copies: " + (spec->aligned ? "16 bytes" : "single numbers") + "\n  dq: " +
           (spec->deterministic ? "added by turns, the same bits in every run"
                                : "added with atomics, not bitwise repeatable; deterministic=True is") +
           "\n";
}

constexpr const char *kDelta = "bwd_simt_delta.cu", *kTiles = "bwd_simt.cu", *kShared = "bwd_simt_shared.cu";

// The gradients of bias, slopes and sinks that are wanted.
struct Wanted {
    bool slopes, sinks, bias;

    explicit Wanted(const core::BackwardArgs& args)
        : slopes(args.dalibi_slopes && args.dalibi_slopes.size() > 0),
          sinks(args.dsinks && args.dsinks.size() > 0),
          bias(args.dbias) {}
    [[nodiscard]] bool any() const { return slopes || sinks || bias; }
};

void simt_gradients(const Problem& p, const core::BackwardArgs& args, const Program& program, const Memory& memory,
                    bool queries, void* stream) {
    const Wanted wanted(args);
    if (!wanted.any()) return;
    const Call& call = *memory.simt;
    const jit::SimtSpec spec(p, Pass::backward);
    abi::Backward fixed{};
    fixed.problem = call.problem();
    fixed.d_o = to_abi(args.d_o), fixed.o = to_abi(args.o);
    fixed.lse = to_abi(args.lse);
    if (args.dlse) fixed.dlse = to_abi(args.dlse);
    if (args.dbias) fixed.dbias = to_abi(args.dbias);
    if (wanted.slopes) fixed.dslopes = per_head(args.dalibi_slopes), fixed.slope_partial = memory.slope_partial;
    if (wanted.sinks) fixed.dsinks = per_head(args.dsinks), fixed.sink_partial = memory.sink_partial;
    fixed.delta = memory.delta;
    fixed.q_tiles = queries ? call.q_tiles() : 0;
    std::vector<std::byte> params;
    append(params, &fixed, sizeof fixed);
    append(params, call.mask_data().data(), call.mask_data().size());
    const abi::Array no_array{};
    append(params, &no_array, sizeof no_array);
    const auto run = [&](const char* file, const char* entry, int64_t tiles, int64_t heads, unsigned grid_y = 1) {
        LaunchConfig config;
        config.grid = {grid_x(tiles, heads), grid_y, 1};
        config.block.x = static_cast<unsigned>(kSimtThreads);
        config.dynamic_shared = static_cast<unsigned>(spec.shared_bytes());
        config.stream = stream;
        launch(kernel(p, program, file, entry, spec, spec.constants(Pass::backward)), config, params.data(),
               params.size());
    };
    call.prepare(stream);
    if (queries) {
        run(kDelta, "bwd_simt_delta", call.q_tiles(), p.num_heads_q);
        if (wanted.slopes) run(kTiles, "bwd_simt_dq", call.q_tiles(), p.num_heads_q);
    }
    if (wanted.bias) {
        const auto& shape = args.dbias.shape;
        const auto tiles = [](int64_t extent) { return extent == 1 ? 1 : ceil_div(extent, kTile); };
        run(kShared, "bwd_simt_dbias", tiles(shape[2]) * tiles(shape[3]), shape[0] * shape[1]);
    }
    if (wanted.slopes || wanted.sinks) {
        const bool per_batch = wanted.slopes && args.dalibi_slopes.rank == 2 && args.dalibi_slopes.shape[0] > 1;
        run(kShared, "bwd_simt_heads", 1, p.num_heads_q, per_batch ? static_cast<unsigned>(p.batch) : 1);
    }
}

void backward(const Problem& p, const core::BackwardArgs& args, Workspace workspace) {
    const DeviceGuard guard(p.device.index);
    void* const stream = workspace.stream;
    if (p.validate) validate_lengths(p, stream);
    const auto program = program_of(p, Pass::backward);
    jit::MmaBackwardSpec spec = decide(p, *program).value();
    spec.aligned = spec.aligned && jit::takes_16_bytes(args.d_o);
    const Memory memory(p, *program, spec, workspace.data);
    const Call& call = memory.call;

    abi::MmaBackward fixed{};
    fixed.problem = call.problem();
    fixed.d_o = to_abi(args.d_o), fixed.o = to_abi(args.o);
    fixed.lse = to_abi(args.lse);
    if (args.dlse) fixed.dlse = to_abi(args.dlse);
    if (args.dq) fixed.dq = to_abi(args.dq);
    if (args.dk) fixed.dk = to_abi(args.dk);
    if (args.dv) fixed.dv = to_abi(args.dv);
    fixed.dtype = static_cast<abi::Int>(p.dtype);
    fixed.aligned_rows = jit::takes_16_bytes(args.o) && jit::takes_16_bytes(args.d_o);
    fixed.aligned_dq = args.dq && jit::takes_16_bytes(args.dq);
    fixed.aligned_dkv = (!args.dk || jit::takes_16_bytes(args.dk)) && (!args.dv || jit::takes_16_bytes(args.dv));
    fixed.rows = memory.rows, fixed.dq_sums = memory.dq_sums, fixed.turns = memory.turns;
    fixed.q_tiles = call.q_tiles();
    fixed.columns = spec.dims_qk;
    // With few heads, the first waves take the tiles that are seen by most queries from all of them, and those whose
    // turns come first; with many, or where all are seen by all, blocks side by side read the same queries.
    constexpr int64_t kFew = 32;
    const bool all_seen = spec.window && program->mask.window_left < 0 && program->mask.window_right < 0;
    fixed.spread = !p.packed_kv && p.batch * p.num_heads_kv <= kFew && (!all_seen || p.deterministic);

    const auto main = [&]() -> const Function& {
        return kernel(p, *program, kMain, "bwd_mma", spec, spec.constants());
    };
    if (program->first_time("bwd_mma" + jit::text_of(spec, spec.constants()))) {
        std::vector<std::function<void()>> loads = call.loads();
        loads.emplace_back(main);
        loads.emplace_back([&] { plain_function(p.device.index, kFinish, "bwd_mma_delta"); });
        const auto load_simt = [&](const char* file, const char* entry) {
            loads.emplace_back([&, file, entry] {
                const jit::SimtSpec simt(p, Pass::backward);
                kernel(p, *program, file, entry, simt, simt.constants(Pass::backward));
            });
        };
        const Wanted wanted(args);
        if (wanted.any()) load_simt(kDelta, "bwd_simt_delta");
        if (wanted.slopes) load_simt(kTiles, "bwd_simt_dq");
        if (wanted.any()) load_simt(kShared, "bwd_simt_heads");
        side_by_side(loads);
    }
    const auto helper = [&](const char* entry) {
        LaunchConfig config;
        config.grid.x = grid_x(call.q_tiles(), p.num_heads_q);
        config.block.x = 256;
        config.stream = stream;
        launch(plain_function(p.device.index, kFinish, entry), config, fixed);
    };
    const int64_t query_rows = (p.packed_q ? 1 : p.batch) * p.q_rows,
                  key_rows = (p.packed_kv ? 1 : p.batch) * p.kv_rows;
    const bool queries = p.num_heads_q * query_rows > 0, keys = p.num_heads_kv * key_rows > 0;
    call.prepare(stream);
    if (args.dq && queries) call.clear_rows(fixed.dq, {}, p.num_heads_q, p.head_dim_qk, true, stream);
    if (args.dk && keys) call.clear_rows(fixed.dk, {}, p.num_heads_kv, p.head_dim_qk, false, stream);
    if (args.dv && keys) call.clear_rows(fixed.dv, {}, p.num_heads_kv, p.head_dim_v, false, stream);
    const bool any = args.dq || args.dk || args.dv;
    if (any && queries) helper("bwd_mma_delta");
    if (memory.turn_bytes > 0) memset_async(memory.turns, 0, static_cast<size_t>(memory.turn_bytes), stream);
    if (any && keys) {
        std::vector<std::byte> params;
        append(params, &fixed, sizeof fixed);
        append(params, call.mask_data().data(), call.mask_data().size());
        const abi::Array no_array{};  // the spec's GradientArrays
        append(params, &no_array, sizeof no_array);
        LaunchConfig config;
        config.grid.x = grid_x(call.kv_tiles(), p.num_heads_kv);
        config.block.x = static_cast<unsigned>(spec.warps * 32);
        config.dynamic_shared = static_cast<unsigned>(spec.shared_bytes());
        config.stream = stream;
        launch(main(), config, params.data(), params.size());
    }
    if (args.dq && queries) helper("bwd_mma_finish");
    if (memory.simt) simt_gradients(p, args, *program, memory, queries, stream);
}

}  // namespace

const core::Implementation kBwdMma{"bwd_mma", supports, workspace, explain, nullptr, backward, TILEWISE_CUDA};

}  // namespace tilewise::cuda
