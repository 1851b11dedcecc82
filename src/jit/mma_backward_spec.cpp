#include "mma_backward_spec.hpp"

#include <algorithm>

#include "core/env.hpp"

namespace tilewise::jit {

using core::DType;
using core::Problem;

Constants MmaBackwardSpec::constants() const {
    return {{"kThreads", warps * 32},
            {"kWarps", warps},
            {"kTileQ", queries},
            {"kTileKV", keys},
            {"kBlocks", blocks},
            {"kDimsQK", dims_qk},
            {"kDimsV", dims_v},
            {"kWarpsQ", warps_q},
            {"kWarpsKeys", warps_keys},
            {"kWarpsQueries", warps_queries},
            {"kStages", stages},
            {"kReadAhead", read_ahead},
            {"kBands", bands},
            {"kWindow", window},
            {"kDocuments", documents},
            {"kAligned", aligned},
            {"kDeterministic", deterministic},
            {"kRolled", rolled},
            {"kCentres", centres},
            {"kSharedBytes", static_cast<int>(shared_bytes())}};
}

int64_t MmaBackwardSpec::shared_bytes() const {  // of struct Shared
    const int64_t qk = tile_pitch(dims_qk), v = tile_pitch(dims_v);
    int64_t bytes = 2 * (keys * (qk + v) + queries * (2 * qk + stages * v) + 2 * queries * (keys + 8));
    bytes += 160 + 16 * queries + (bands ? 32 : 16 + warps * 32 * 4 + 4 * warps);
    bytes += (bands || documents ? 8 * queries : 16) + (documents ? 8 * (queries + keys) : 32);
    bytes += rolled ? int64_t{4} * queries * keys : 16;
    return round_up(bytes, 128);
}

std::optional<MmaBackwardSpec> mma_backward_spec(const Problem& p, const MaskProgram& mask, const Arch& arch,
                                                 std::string* why_not) {
    const auto no = [&](std::string text) {
        if (why_not != nullptr) *why_not = std::move(text);
        return std::nullopt;
    };
    if (p.dtype != DType::f16 && p.dtype != DType::bf16)
        return no("dtype " + std::string(core::name(p.dtype)) + "; tensor cores are for float16 and bfloat16");
    if (arch.number() < 75) return no(arch.name() + " has no mma.sync of this shape; sm_75 and later have");
    if (p.dtype == DType::bf16 && arch.number() < 80)
        return no(arch.name() + " has no bfloat16 tensor cores; float16 works");
    constexpr int64_t kMaxDims = 256;
    if (std::max(p.head_dim_qk, p.head_dim_v) > kMaxDims)
        return no("head dims " + std::to_string(p.head_dim_qk) + " and " + std::to_string(p.head_dim_v) +
                  "; at most 256 are taken");
    if (std::max(p.q_rows, p.kv_rows) >= int64_t{1} << 30)
        return no(std::to_string(std::max(p.q_rows, p.kv_rows)) + " rows; fewer than 2^30 are taken");
    if (num_gradient_arrays(p) > 0)
        return no("score_mod reads float arrays, which may want a gradient; bwd_simt computes it");

    MmaBackwardSpec spec;
    static_cast<OptionSpec&>(spec) = OptionSpec(p);
    spec.dims_qk = round_up(std::max<int64_t>(p.head_dim_qk, 1), 16);
    spec.dims_v = round_up(std::max<int64_t>(p.head_dim_v, 1), 16);
    spec.bands = mask.bands, spec.documents = mask.documents;
    spec.window = mask.bands && mask.numbers.empty();  // chunks have numbers
    spec.aligned = takes_16_bytes(p.q) && takes_16_bytes(p.k) && takes_16_bytes(p.v);
    spec.deterministic = p.deterministic;
    spec.rolled = spec.bias || spec.score_mod || !(spec.bands || spec.documents);

    const int dims = std::max(spec.dims_qk, spec.dims_v);
    const int64_t limit = shared_limit(arch);
    // dK and dV take half of the registers. Blocks of four warps leave room for a second one on the SM, whose products
    // go on while this one exponentiates or waits.
    if (dims <= 64) {
        spec.queries = limit > 200 * 1024 ? 64 : 128, spec.keys = 64, spec.warps = 4;
        spec.blocks = limit > 200 * 1024 ? 3 : 1;
    } else if (dims <= 128) {
        spec.queries = 64, spec.keys = 64, spec.warps = 4, spec.blocks = limit > 200 * 1024 ? 2 : 1;
        // More keys share what is read of a tile of queries; in short causal masks too much of them would be hidden,
        // but for the shortest, which one tile has.
        const bool short_causal =
            mask.window_right == 0 && p.max_seqlen_kv > 64 && p.max_seqlen_kv <= 2048 && limit > 200 * 1024;
        if (limit >= 163 * 1024 && !short_causal) spec.keys = 128, spec.warps = 8, spec.blocks = 1;
    } else {
        spec.queries = 64, spec.keys = 64, spec.warps = 8, spec.blocks = 1;
    }
    const auto tuned = [](const char* name, int fallback) { return core::tuned("bwd_mma", name, fallback); };
    spec.warps = tuned("kWarps", spec.warps), spec.blocks = tuned("kBlocks", spec.blocks);
    spec.queries = tuned("kTileQ", spec.queries), spec.keys = tuned("kTileKV", spec.keys);
    spec.stages = tuned("kStages", spec.stages);
    if (spec.shared_bytes() > limit) spec.stages = 1;
    if (spec.shared_bytes() > limit && spec.queries > 64) spec.queries = 64;
    if (spec.shared_bytes() > limit && spec.queries > 32) spec.queries = 32;
    if (spec.shared_bytes() > limit && spec.keys > 64) spec.keys = 64, spec.warps = 4;
    if (spec.shared_bytes() > limit && spec.keys > 32) spec.keys = 32, spec.warps = 4;
    if (spec.shared_bytes() > limit)
        return no("head dims " + std::to_string(p.head_dim_qk) + " and " + std::to_string(p.head_dim_v) + " need " +
                  std::to_string(spec.shared_bytes()) + " bytes of shared memory; " + arch.name() + " has " +
                  std::to_string(limit));
    // Parts of a warp as square as its product allows: they read the fewest operands.
    spec.warps_q = tuned("kWarpsQ", spec.queries >= 128 && spec.warps >= 8 ? 4 : 2);
    spec.warps_keys = tuned("kWarpsKeys", std::min(spec.keys / 32, spec.warps));
    spec.warps_queries =
        tuned("kWarpsQueries", spec.warps >= 8 && (spec.queries >= 128 || (dims > 128 && spec.queries >= 64)) ? 4 : 2);
    if (spec.warps / spec.warps_q > spec.keys / 16) spec.warps_q = spec.warps / (spec.keys / 16);
    // No further than the right fragments of one step.
    const int steps = std::min(
        {spec.keys * spec.warps_q / spec.warps / 16, spec.dims_qk * spec.warps_keys / spec.warps / 16,
         spec.dims_v * spec.warps_keys / spec.warps / 16, spec.dims_qk * spec.warps_queries / spec.warps / 16});
    spec.read_ahead = std::min(tuned("kReadAhead", 1), std::max(steps, 1));
    spec.centres = p.max_seqlen_kv <= spec.keys * spec.warps_q / spec.warps && !spec.dropout && !spec.softcap &&
                   !spec.score_mod && !spec.sinks;
    return spec;
}

}  // namespace tilewise::jit
