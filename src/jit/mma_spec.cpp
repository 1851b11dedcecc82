#include "mma_spec.hpp"

#include <algorithm>

#include "core/env.hpp"
#include "core/summary.hpp"

namespace tilewise::jit {

using core::DType;
using core::Problem;

int round_up(int64_t x, int64_t step) { return static_cast<int>((x + step - 1) / step * step); }

int64_t tile_pitch(int64_t width) { return width % 64 == 0 ? width : width + 8; }

int64_t shared_limit(const Arch& arch) {
    switch (arch.number()) {
        case 75: return 64 * 1024;
        case 80:
        case 87: return 163 * 1024;
        case 86:
        case 89: return 99 * 1024;
        default: return arch.major >= 12 ? 99 * 1024 : 227 * 1024;
    }
}

bool takes_16_bytes(const core::Tensor4& t) {
    const auto multiple = [](int64_t stride) { return stride % 8 == 0; };
    return t.dim_stride == 1 && multiple(t.batch_stride) && multiple(t.row_stride) && multiple(t.head_stride) &&
           reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

Constants MmaForwardSpec::constants() const {
    return {{"kThreads", warps * 32},
            {"kWarps", warps},
            {"kMTiles", m_tiles},
            {"kTileQ", rows()},
            {"kTileKV", keys},
            {"kBlocks", blocks},
            {"kDimsQK", dims_qk},
            {"kColumns", columns},
            {"kQInRegisters", q_in_registers},
            {"kReadAhead", read_ahead},
            {"kBands", bands},
            {"kDocuments", documents},
            {"kAligned", aligned},
            {"kPackGQA", pack_gqa},
            {"kSplit", split},
            {"kRaw", raw},
            {"kRolled", rolled},
            {"kSharedBytes", static_cast<int>(shared_bytes())}};
}

int64_t MmaForwardSpec::shared_bytes() const {  // of struct Shared
    int64_t bytes = 2 * rows() * tile_pitch(std::max(dims_qk, columns));
    bytes += 2 * 2 * keys * (tile_pitch(dims_qk) + tile_pitch(columns));
    bytes += round_up(bands ? 8 : warps * 32 * 4 + 4 * warps, 16) + 32 * warps + 80 + 32 * 32 * warps;
    bytes += 24 + int64_t{8} * (documents ? rows() + 2 * keys : 3);
    bytes += rolled ? int64_t{4} * rows() * keys : int64_t{4} * warps * 32;
    return round_up(bytes, 128);
}

std::optional<MmaForwardSpec> mma_forward_spec(const Problem& p, const MaskProgram& mask, const Arch& arch,
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
    constexpr int64_t kMaxDims = 576;
    if (std::max(p.q_rows, p.kv_rows) >= int64_t{1} << 30)
        return no(std::to_string(std::max(p.q_rows, p.kv_rows)) + " rows; fewer than 2^30 are taken");
    if (std::max(p.head_dim_qk, p.head_dim_v) > kMaxDims)
        return no("head dims " + std::to_string(p.head_dim_qk) + " and " + std::to_string(p.head_dim_v) +
                  "; at most 576 are taken");

    MmaForwardSpec spec;
    static_cast<OptionSpec&>(spec) = OptionSpec(p);
    spec.dims_qk = round_up(std::max<int64_t>(p.head_dim_qk, 1), 16);
    spec.columns = std::min(round_up(std::max<int64_t>(p.head_dim_v, 1), 16), 256);
    spec.bands = mask.bands, spec.documents = mask.documents;
    spec.aligned = takes_16_bytes(p.q) && takes_16_bytes(p.k) && takes_16_bytes(p.v);
    spec.raw = !spec.softcap && !spec.bias && !spec.slopes && !spec.score_mod && p.softmax_scale > 0;
    spec.rolled = spec.bias || spec.score_mod || !(spec.bands || spec.documents);

    // ptxas spills with 256 columns on Turing, whose copies go through registers.
    if (arch.number() < 80) spec.columns = std::min(spec.columns, 128);

    const int dims = std::max(spec.dims_qk, spec.columns);
    const int64_t limit = shared_limit(arch);
    const bool large = limit > 100 * 1024;
    if (dims <= 64) {
        spec.m_tiles = large ? 2 : 1, spec.warps = large ? 4 : 8;
        spec.keys = large ? 128 : 64, spec.blocks = large ? 2 : 1;
    } else if (dims <= 128) {
        spec.m_tiles = large ? 2 : 1, spec.warps = large ? 4 : 8;
        spec.keys = large ? 64 : 32, spec.blocks = large ? 2 : 1;
    } else {
        spec.m_tiles = 1, spec.warps = dims <= 256 && large ? 8 : 4;
        spec.keys = dims <= 256 ? 64 : 32, spec.blocks = 1;
    }
    const auto tuned = [](const char* name, int fallback) { return core::tuned("fwd_mma", name, fallback); };
    spec.warps = tuned("kWarps", spec.warps), spec.m_tiles = tuned("kMTiles", spec.m_tiles);
    spec.keys = tuned("kTileKV", spec.keys), spec.blocks = tuned("kBlocks", spec.blocks);
    spec.q_in_registers = tuned("kQInRegisters", spec.q_in_registers) != 0;

    // Few queries: the heads that share keys stand side by side in one tile, and a tile has no more rows than needed.
    const int64_t group = p.group();
    const bool few = p.max_seqlen_q * group <= spec.rows();
    spec.pack_gqa = group > 1 && few && spec.bands && !spec.rolled && !spec.slopes && !spec.dropout;
    const int64_t rows = p.max_seqlen_q * (spec.pack_gqa ? group : 1);
    if (rows <= 64 && !p.batch_invariant) {
        spec.m_tiles = 1, spec.warps = rows <= 16 ? 1 : rows <= 32 ? 2 : 4;
        spec.blocks = std::min(spec.blocks, 2);
    }
    while (spec.shared_bytes() > limit && spec.keys > 16) spec.keys /= 2;
    while (spec.shared_bytes() > limit && spec.m_tiles > 1) spec.m_tiles /= 2;
    while (spec.shared_bytes() > limit && spec.warps > 1) spec.warps /= 2;
    spec.read_ahead = spec.m_tiles == 1 && arch.number() >= 80 ? 3 : 2;
    if (arch.major == 10 && spec.m_tiles == 2 && dims > 64) spec.read_ahead = 0;  // ptxas spills
    spec.read_ahead = std::min(tuned("kReadAhead", spec.read_ahead), spec.keys / 16);
    if (spec.shared_bytes() > limit)
        return no("head dims " + std::to_string(p.head_dim_qk) + " and " + std::to_string(p.head_dim_v) + " need " +
                  std::to_string(spec.shared_bytes()) + " bytes of shared memory; " + arch.name() + " has " +
                  std::to_string(limit));
    return spec;
}

MmaForwardLayout mma_forward_layout(const Problem& p, const MmaForwardSpec& spec, int num_sms, int64_t shared_per_sm) {
    MmaForwardLayout layout{spec};
    const auto tiles_of = [&](int64_t rows) {
        const int64_t q_tile = rows / (spec.pack_gqa ? p.group() : 1);
        return p.packed_q ? p.q_rows / q_tile + p.batch : p.batch * core::ceil_div(p.q_rows, q_tile);
    };
    layout.heads = p.num_heads_q / (spec.pack_gqa ? p.group() : 1);
    layout.pieces = std::max<int64_t>(core::ceil_div(p.head_dim_v, spec.columns), 1);
    const auto blocks_of = [&](int64_t rows) {
        return std::max<int64_t>(tiles_of(rows) * layout.heads * layout.pieces, 1);
    };
    const auto finish = [&] {
        layout.q_tile = layout.spec.rows() / (spec.pack_gqa ? p.group() : 1);
        return layout;
    };
    layout.keys_per_split = int64_t{round_up(std::max<int64_t>(p.kv_rows, 1), spec.keys)};
    if (p.batch_invariant) return finish();

    constexpr int64_t kLeast = 4;  // tiles of a split: less does not pay for joining
    const int64_t kv_tiles = core::ceil_div(p.max_seqlen_kv, spec.keys);
    if (kv_tiles < 2 * kLeast || p.window_left >= 0 || p.chunk > 0) {
        while (layout.spec.rows() > 64 && !spec.pack_gqa && blocks_of(layout.spec.rows()) * 2 <= num_sms) {
            (layout.spec.m_tiles > 1 ? layout.spec.m_tiles : layout.spec.warps) /= 2;
        }
        return finish();
    }
    const int64_t per_sm = std::max<int64_t>(1, shared_per_sm / (spec.shared_bytes() + 1024));
    const int64_t slots = num_sms * std::min<int64_t>(per_sm, std::max(spec.blocks, 8 / spec.warps));
    const int64_t blocks = blocks_of(spec.rows());
    if (blocks * 5 > slots * 4) return finish();
    const int64_t wanted = std::clamp<int64_t>(slots / blocks, 1, kv_tiles / kLeast);
    layout.keys_per_split = core::ceil_div(kv_tiles, wanted) * spec.keys;
    layout.splits = core::ceil_div(kv_tiles * spec.keys, layout.keys_per_split);
    layout.spec.split = layout.splits > 1;
    return finish();
}

}  // namespace tilewise::jit
