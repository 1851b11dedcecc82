// fwd_simt and bwd_simt on the host: which kernels a problem needs, their parameters, their order.
#include "simt.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "call.hpp"
#include "core/summary.hpp"
#include "device.hpp"
#include "jit/attention_source.hpp"
#include "launch.hpp"
#include "program.hpp"

namespace tilewise::cuda {
namespace {

using core::ceil_div;
using core::DType;
using core::Pass;
using core::Problem;
using core::Workspace;

constexpr int64_t kThreads = 256;
const Function& kernel(const Problem& p, Pass pass, const Program& program, const jit::SimtSpec& spec, const char* file,
                       const char* entry) {
    return kernel(p, program, file, entry, spec, spec.constants(pass));
}

// Rows of one head in memory; those of a packed tensor may belong to no sequence.
int64_t query_rows(const Problem& p) { return (p.packed_q ? 1 : p.batch) * p.q_rows; }
int64_t key_rows(const Problem& p) { return (p.packed_kv ? 1 : p.batch) * p.kv_rows; }

LaunchConfig config_of(const jit::SimtSpec& spec, int64_t tiles, int64_t heads, int64_t dims, void* stream) {
    LaunchConfig config;
    config.grid = {grid_x(tiles, heads), static_cast<unsigned>(std::max<int64_t>(1, ceil_div(dims, spec.columns))), 1};
    config.block = {static_cast<unsigned>(kThreads), 1, 1};
    config.dynamic_shared = static_cast<unsigned>(spec.shared_bytes());
    config.stream = stream;
    return config;
}

std::string supports(const Problem& p, Pass own) {
    std::string why_not;
    if (!available(&why_not)) return why_not;
    const auto program = program_of(p, own);
    std::string too_many =
        parameters_fit(p, *program, own, own == Pass::forward ? sizeof(abi::Forward) : sizeof(abi::Backward));
    if (!too_many.empty()) return too_many;
    if (own == Pass::backward && p.deterministic && program->gradient_arrays > 0) {
        return "deterministic=True, and the gradient of an array that score_mod reads is summed with atomics; leave "
               "deterministic out, detach the array, or run on the CPU";
    }
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

std::string forward_supports(const Problem& p, Pass) { return supports(p, Pass::forward); }

size_t forward_workspace(const Problem& p, Pass) {
    Arena arena(nullptr);
    const auto program = program_of(p, Pass::forward);
    [[maybe_unused]] const Call call(p, program->mask, arena);
    return static_cast<size_t>(arena.used());
}

std::string forward_explain(const Problem& p, Pass) {
    const jit::SimtSpec spec(p, Pass::forward);
    const DeviceInfo& device = device_info(p.device.index);
    return "  device: " + device.name + "\n  tiles: 64 queries x 64 keys, 256 threads, " +
           std::to_string(spec.columns) + " columns of v at a time, " + (p.dtype == DType::f64 ? "fp64" : "fp32") +
           " arithmetic without tensor cores\n";
}

void forward(const Problem& p, const core::ForwardArgs& args, Workspace workspace) {
    const DeviceGuard guard(p.device.index);
    if (p.validate) validate_lengths(p, workspace.stream);
    const auto program = program_of(p, Pass::forward);
    const jit::SimtSpec spec(p, Pass::forward);
    Arena arena(workspace.data);
    const Call call(p, program->mask, arena);
    const abi::Tensor o = to_abi(args.o);
    const abi::Rows lse = args.lse ? to_abi(args.lse) : abi::Rows{};
    if (p.num_heads_q * query_rows(p) == 0) return;
    const auto main = [&]() -> const Function& {
        return kernel(p, Pass::forward, *program, spec, "fwd_simt.cu", "fwd_simt");
    };
    if (program->first_time("fwd_simt" + jit::text_of(spec, {}))) {
        std::vector<std::function<void()>> loads = call.loads();
        loads.emplace_back(main);
        side_by_side(loads);
    }
    call.prepare(workspace.stream);
    call.clear_rows(o, lse, p.num_heads_q, p.head_dim_v, true, workspace.stream);
    std::vector<std::byte> params;
    const abi::Forward fixed{call.problem(), o, lse, 0};
    append(params, &fixed, sizeof fixed);
    append(params, call.mask_data().data(), call.mask_data().size());
    launch(main(), config_of(spec, call.q_tiles(), p.num_heads_q, p.head_dim_v, workspace.stream), params.data(),
           params.size());
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

std::string backward_supports(const Problem& p, Pass) { return supports(p, Pass::backward); }

// Workspace after that of Call. Sized for every gradient, since a plan does not know which are wanted.
struct BackwardMemory {
    abi::Rows delta{};
    void *slope_partial = nullptr, *sink_partial = nullptr;
    std::vector<void*> array_sums;  // per array; null: not a float array

    BackwardMemory(const Problem& p, const Program& program, const Call& call, Arena& arena) {
        const int64_t real = core::size_of(p.accumulator());
        const int64_t batch = p.packed_q ? 1 : p.batch;
        delta = {arena.take(batch * p.num_heads_q * p.q_rows * real), p.num_heads_q * p.q_rows, p.q_rows, 1};
        const int64_t partial = p.num_heads_q * call.q_tiles() * real;
        if (p.alibi_slopes) slope_partial = arena.take(partial);
        if (p.sinks) sink_partial = arena.take(partial);
        for (int k = 0; k < program.gradient_arrays; ++k) {
            const core::Array& a = p.arrays[static_cast<size_t>(k)];
            array_sums.push_back(core::is_float(a.dtype) ? arena.take(std::max<int64_t>(a.size(), 1) * real) : nullptr);
        }
    }
};

size_t backward_workspace(const Problem& p, Pass) {
    Arena arena(nullptr);
    const auto program = program_of(p, Pass::backward);
    const Call call(p, program->mask, arena);
    [[maybe_unused]] const BackwardMemory memory(p, *program, call, arena);
    return static_cast<size_t>(arena.used());
}

std::string backward_explain(const Problem& p, Pass) {
    const jit::SimtSpec spec(p, Pass::backward);
    const DeviceInfo& device = device_info(p.device.index);
    return "  device: " + device.name +
           "\n  kernels: delta, dq by tiles of 64 queries, dk and dv by tiles of 64 keys, " +
           std::to_string(spec.columns) + " columns at a time; the same bits in every run" +
           (program_of(p, Pass::backward)->gradient_arrays > 0 ? ", but for the arrays that score_mod reads" : "") +
           "\n";
}

void backward(const Problem& p, const core::BackwardArgs& args, Workspace workspace) {
    const DeviceGuard guard(p.device.index);
    void* const stream = workspace.stream;
    if (p.validate) validate_lengths(p, stream);
    const auto program = program_of(p, Pass::backward);
    const jit::SimtSpec spec(p, Pass::backward);
    Arena arena(workspace.data);
    const Call call(p, program->mask, arena);
    BackwardMemory memory(p, *program, call, arena);
    const int64_t real = core::size_of(p.accumulator());

    abi::Backward fixed{};
    fixed.problem = call.problem();
    fixed.d_o = to_abi(args.d_o), fixed.o = to_abi(args.o);
    fixed.lse = to_abi(args.lse);
    if (args.dlse) fixed.dlse = to_abi(args.dlse);
    if (args.dq) fixed.dq = to_abi(args.dq);
    if (args.dk) fixed.dk = to_abi(args.dk);
    if (args.dv) fixed.dv = to_abi(args.dv);
    if (args.dbias) fixed.dbias = to_abi(args.dbias);
    const bool want_slopes = args.dalibi_slopes && args.dalibi_slopes.size() > 0;
    const bool want_sinks = args.dsinks && args.dsinks.size() > 0;
    if (want_slopes) fixed.dslopes = per_head(args.dalibi_slopes);
    if (want_sinks) fixed.dsinks = per_head(args.dsinks);
    fixed.delta = memory.delta;
    fixed.slope_partial = want_slopes ? memory.slope_partial : nullptr;
    fixed.sink_partial = want_sinks ? memory.sink_partial : nullptr;
    fixed.q_tiles = p.num_heads_q * query_rows(p) > 0 ? call.q_tiles() : 0;  // of those that write partial sums

    // Gradients of captured arrays start from zero.
    std::vector<abi::Array> sums(static_cast<size_t>(std::max(program->gradient_arrays, 1)));
    bool any_array = false;
    for (size_t k = 0; k < args.darrays.size() && k < memory.array_sums.size(); ++k) {
        const core::Array& target = args.darrays[k];
        if (!target || memory.array_sums[k] == nullptr) continue;
        sums[k].data = memory.array_sums[k];
        int64_t stride = 1;
        for (int d = target.rank - 1; d >= 0; --d) {
            const auto n = static_cast<size_t>(d);
            sums[k].shape[n] = target.shape[n], sums[k].stride[n] = stride;
            stride *= target.shape[n];
        }
        memset_async(sums[k].data, 0, static_cast<size_t>(std::max<int64_t>(target.size(), 1) * real), stream);
        any_array = true;
    }

    std::vector<std::byte> params;
    append(params, &fixed, sizeof fixed);
    append(params, call.mask_data().data(), call.mask_data().size());
    append(params, sums.data(), sums.size() * sizeof(abi::Array));
    const auto run = [&](const char* file, const char* entry, const LaunchConfig& config) {
        launch(kernel(p, Pass::backward, *program, spec, file, entry), config, params.data(), params.size());
    };
    constexpr const char *kDelta = "bwd_simt_delta.cu", *kTiles = "bwd_simt.cu", *kShared = "bwd_simt_shared.cu";
    const bool any_shared = args.dbias || want_slopes || want_sinks || !args.darrays.empty();
    if (program->first_time("bwd_simt" + jit::text_of(spec, {}))) {
        std::vector<std::function<void()>> loads = call.loads();
        const auto load = [&](const char* file, const char* entry) {
            loads.emplace_back([&, file, entry] { kernel(p, Pass::backward, *program, spec, file, entry); });
        };
        load(kDelta, "bwd_simt_delta");
        load(kTiles, "bwd_simt_dkdv");
        if (any_shared) load(kShared, "bwd_simt_heads");
        side_by_side(loads);
    }
    const bool queries = p.num_heads_q * query_rows(p) > 0, keys = p.num_heads_kv * key_rows(p) > 0;
    call.prepare(stream);
    if (args.dq && queries) call.clear_rows(fixed.dq, {}, p.num_heads_q, p.head_dim_qk, true, stream);
    if (args.dk && keys) call.clear_rows(fixed.dk, {}, p.num_heads_kv, p.head_dim_qk, false, stream);
    if (args.dv && keys) call.clear_rows(fixed.dv, {}, p.num_heads_kv, p.head_dim_v, false, stream);
    if (queries) {
        run(kDelta, "bwd_simt_delta", config_of(spec, call.q_tiles(), p.num_heads_q, 0, stream));
        if (args.dq || fixed.slope_partial || any_array) {
            run(kTiles, "bwd_simt_dq",
                config_of(spec, call.q_tiles(), p.num_heads_q, args.dq ? p.head_dim_qk : 0, stream));
        }
    }
    if (keys && (args.dk || args.dv)) {
        const int64_t dims = std::max(args.dk ? p.head_dim_qk : 0, args.dv ? p.head_dim_v : 0);
        run(kTiles, "bwd_simt_dkdv", config_of(spec, call.kv_tiles(), p.num_heads_kv, dims, stream));
    }
    if (args.dbias) {
        const auto& shape = args.dbias.shape;
        const auto tiles = [](int64_t extent) { return extent == 1 ? 1 : ceil_div(extent, kTile); };
        run(kShared, "bwd_simt_dbias",
            config_of(spec, tiles(shape[2]) * tiles(shape[3]), shape[0] * shape[1], 0, stream));
    }
    if (want_slopes || want_sinks) {
        LaunchConfig config = config_of(spec, 1, p.num_heads_q, 0, stream);
        const bool per_batch = want_slopes && args.dalibi_slopes.rank == 2 && args.dalibi_slopes.shape[0] > 1;
        config.grid.y = per_batch ? static_cast<unsigned>(p.batch) : 1;
        run(kShared, "bwd_simt_heads", config);
    }
    for (size_t k = 0; k < args.darrays.size(); ++k) {
        const core::Array& target = args.darrays[k];
        if (!target || target.size() == 0) continue;
        // No sums: the score_mod does not read it.
        abi::ArrayGradient gradient{
            k < sums.size() ? sums[k].data : nullptr, {}, target.rank, static_cast<int64_t>(target.dtype)};
        gradient.target.data = target.data;
        for (size_t d = 0; d < core::kMaxRank; ++d) {
            gradient.target.shape[d] = target.shape[d], gradient.target.stride[d] = target.stride[d];
        }
        LaunchConfig config;
        config.block = {static_cast<unsigned>(kThreads), 1, 1};
        config.grid.x = static_cast<unsigned>(std::min<int64_t>(ceil_div(target.size(), kThreads), 4096));
        config.stream = stream;
        launch(kernel(p, Pass::backward, *program, spec, kShared, "bwd_simt_array"), config, gradient);
    }
}

}  // namespace

const core::Implementation kFwdSimt{"fwd_simt", forward_supports, forward_workspace, forward_explain,
                                    forward,    nullptr,          TILEWISE_CUDA};
const core::Implementation kBwdSimt{"bwd_simt", backward_supports, backward_workspace, backward_explain,
                                    nullptr,    backward,          TILEWISE_CUDA};

}  // namespace tilewise::cuda
