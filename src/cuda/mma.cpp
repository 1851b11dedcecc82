// fwd_mma on the host: which kernel a problem needs, how its keys are split over blocks, and what joins the splits.
#include "mma.hpp"

#include <functional>
#include <optional>
#include <vector>

#include "call.hpp"
#include "core/summary.hpp"
#include "device.hpp"
#include "jit/mma_spec.hpp"
#include "launch.hpp"
#include "program.hpp"

namespace tilewise::cuda {
namespace {

using core::ceil_div;
using core::Pass;
using core::Problem;
using core::Workspace;

std::optional<jit::MmaForwardLayout> decide(const Problem& p, const Program& program, std::string* why_not = nullptr) {
    const DeviceInfo& device = device_info(p.device.index);
    const auto spec = jit::mma_forward_spec(p, program.mask, jit::kernel_arch(device.major, device.minor), why_not);
    if (!spec) return std::nullopt;
    return jit::mma_forward_layout(p, *spec, device.num_sms, static_cast<int64_t>(device.shared_memory_per_sm));
}

struct Params {  // before mask and score_mod
    abi::Forward call;
    abi::Split split;
};

std::string supports(const Problem& p, Pass pass) {
    std::string why_not;
    if (!available(&why_not)) return why_not;
    const auto program = program_of(p, pass);
    const auto decision = decide(p, *program, &why_not);
    if (!decision) return why_not;
    return parameters_fit(p, *program, pass, sizeof(Params));
}

abi::Split split_of(const Problem& p, const jit::MmaForwardLayout& decision, Arena& arena) {
    abi::Split split{};
    split.splits = decision.splits, split.keys = decision.keys_per_split;
    if (decision.splits == 1) return split;
    const int64_t batch = p.packed_q ? 1 : p.batch, rows = batch * p.num_heads_q * p.q_rows;
    const int64_t width = decision.pieces * decision.spec.columns;
    split.o_split = rows * width, split.lse_split = rows;
    split.o = {arena.take(decision.splits * split.o_split * 4), p.num_heads_q * p.q_rows * width, width,
               p.q_rows * width, 1};
    split.lse = {arena.take(decision.splits * split.lse_split * 4), p.num_heads_q * p.q_rows, p.q_rows, 1};
    return split;
}

size_t workspace(const Problem& p, Pass pass) {
    const auto program = program_of(p, pass);
    const auto decision = decide(p, *program);
    if (!decision) return 0;
    Arena arena(nullptr);
    [[maybe_unused]] const Call call(p, program->mask, arena, decision->q_tile, decision->spec.keys);
    split_of(p, *decision, arena);
    return static_cast<size_t>(arena.used());
}

std::string explain(const Problem& p, Pass pass) {
    const auto decision = decide(p, *program_of(p, pass));
    if (!decision) return "";
    const jit::MmaForwardSpec& spec = decision->spec;
    return "  device: " + device_info(p.device.index).name + "\n  tiles: " + std::to_string(spec.rows()) +
           (spec.pack_gqa ? " rows (queries x heads of a group)" : " queries") + " x " + std::to_string(spec.keys) +
           " keys, " + std::to_string(spec.warps) + " warps, " + std::to_string(spec.columns) +
           " columns of v at a time, fp32 sums\n  copies: " + (spec.aligned ? "16 bytes" : "single numbers") +
           "\n  splits of the keys: " + std::to_string(decision->splits) + "\n";
}

// What a run does, apart from its arguments.
struct Decision {
    std::shared_ptr<const Program> program;
    jit::MmaForwardLayout layout;
    const Function *main = nullptr, *combine = nullptr;  // combine: with more than one split
};

std::shared_ptr<const Decision> make_decision(const Problem& p, Workspace workspace) {
    auto made = std::make_shared<Decision>();
    made->program = program_of(p, Pass::forward);
    made->layout = decide(p, *made->program).value();
    const jit::MmaForwardSpec& spec = made->layout.spec;
    const auto main = [&]() -> const Function& {
        return kernel(p, *made->program, "fwd_mma.cu", "fwd_mma", spec, spec.constants());
    };
    const auto combine = [&]() -> const Function& { return plain_function(p.device.index, "combine.cu", "combine"); };
    const bool joins = made->layout.splits > 1;
    if (made->program->first_time("fwd_mma" + jit::text_of(spec, spec.constants()))) {
        Arena arena(workspace.data);
        const Call call(p, made->program->mask, arena);
        std::vector<std::function<void()>> loads = call.loads();
        loads.emplace_back(main);
        if (joins) loads.emplace_back(combine);
        side_by_side(loads);
    }
    made->main = &main();
    if (joins) made->combine = &combine();
    if (workspace.kept != nullptr) *workspace.kept = made;
    return made;
}

void forward(const Problem& p, const core::ForwardArgs& args, Workspace workspace) {
    const DeviceGuard guard(p.device.index);
    void* const stream = workspace.stream;
    if (p.validate) validate_lengths(p, stream);
    if (p.num_heads_q * (p.packed_q ? 1 : p.batch) * p.q_rows == 0) return;
    const bool known = workspace.kept != nullptr && *workspace.kept != nullptr;
    const auto decision =
        known ? std::static_pointer_cast<const Decision>(*workspace.kept) : make_decision(p, workspace);
    const jit::MmaForwardLayout& layout = decision->layout;
    const jit::MmaForwardSpec& spec = layout.spec;
    Arena arena(workspace.data);
    const Call call(p, decision->program->mask, arena, layout.q_tile, spec.keys);
    const abi::Split split = split_of(p, layout, arena);
    const abi::Tensor o = to_abi(args.o);
    const abi::Rows lse = args.lse ? to_abi(args.lse) : abi::Rows{};
    const int64_t tiles = call.q_tiles();

    call.prepare(stream);
    call.clear_rows(o, lse, p.num_heads_q, p.head_dim_v, true, stream);
    std::vector<std::byte> params;
    params.reserve(sizeof(Params) + call.mask_data().size());
    const Params fixed{{call.problem(), o, lse, jit::takes_16_bytes(args.o)}, split};
    append(params, &fixed, sizeof fixed);
    append(params, call.mask_data().data(), call.mask_data().size());
    LaunchConfig config;
    config.grid = {grid_x(tiles, layout.heads), static_cast<unsigned>(layout.pieces),
                   static_cast<unsigned>(layout.splits)};
    config.block.x = static_cast<unsigned>(spec.warps * 32);
    config.dynamic_shared = static_cast<unsigned>(spec.shared_bytes());
    config.stream = stream;
    launch(*decision->main, config, params.data(), params.size());
    if (decision->combine != nullptr) {
        const abi::Combine joined{call.problem(), split, o, lse, static_cast<abi::Int>(p.dtype)};
        LaunchConfig join;
        constexpr int64_t kRows = 4;  // of a block of combine.cu
        join.grid = {grid_x(tiles, p.num_heads_q), static_cast<unsigned>(ceil_div(layout.q_tile, kRows)), 1};
        join.block.x = 32 * kRows;
        const DeviceInfo& device = device_info(p.device.index);
        join.programmatic_dependent = jit::kernel_arch(device.major, device.minor).major >= 9;
        join.stream = stream;
        launch(*decision->combine, join, joined);
    }
}

}  // namespace

const core::Implementation kFwdMma{"fwd_mma", supports, workspace, explain, forward, nullptr, TILEWISE_CUDA};

}  // namespace tilewise::cuda
