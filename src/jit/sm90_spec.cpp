#include "sm90_spec.hpp"

#include <algorithm>
#include <cstring>

#include "core/env.hpp"
#include "mma_spec.hpp"

namespace tilewise::jit {

using core::DType;
using core::Problem;

namespace {

constexpr int kListed = 4096;      // tiles of keys, where those that are seen are listed
constexpr size_t kLongMask = 500;  // of text: it stands among wgmma's registers, and takes time to compile
constexpr int kPanel = 64;         // numbers in a row of a tile in shared memory: 128 bytes, what a swizzle spans

// TMA takes distances of whole 16 bytes below 2^40; what only one number of an axis exists of has no distance.
bool fits_tma(const core::Tensor4& t, int64_t batch, int64_t heads) {
    const auto good = [](int64_t stride, int64_t extent) {
        return extent <= 1 || (stride > 0 && stride < (int64_t{1} << 38));
    };
    return takes_16_bytes(t) && good(t.row_stride, 2) && good(t.head_stride, heads) && good(t.batch_stride, batch);
}

}  // namespace

bool documents_may_be_sequences(const Problem& p, const MaskProgram& mask) {
    // What depends on positions in the whole row stays as it is, and so do a row's bits if they shall not depend on
    // others.
    if (!mask.documents || !mask.numbers.empty() || p.dropout_threshold > 0 || p.has_lengths() || p.batch_invariant)
        return false;
    const DType ids = p.arrays[static_cast<size_t>(mask.operands[0].array)].dtype;
    return ids == DType::i32 || ids == DType::i64;
}

Constants Sm90ForwardSpec::constants() const {
    // Registers of an SM: 64 K, shared in multiples of 8. Who classifies tiles needs more than who only counts them.
    const bool three = consumers == 3;
    const int of_consumer = three ? 160 : bands ? 232 : 216, of_producer = three ? 32 : bands ? 40 : 72;
    return {{"kThreads", threads()},
            {"kBlocks", 1},
            {"kConsumers", consumers},
            {"kConsumerRegisters", of_consumer},
            {"kProducerRegisters", of_producer},
            {"kMTiles", 1},
            {"kTileQ", rows()},
            {"kTileKV", keys},
            {"kKStages", k_stages},
            {"kVStages", v_stages},
            {"kQBuffers", q_buffers},
            {"kDimsQK", dims_qk},
            {"kColumns", columns},
            {"kBands", bands},
            {"kDocuments", documents},
            {"kListed", bands ? 32 : kListed},
            {"kTable", table},
            {"kDelays", delays},
            {"kInTurn", in_turn},
            {"kSigns", signs},
            {"kPackGQA", 0},
            {"kSplit", 0},
            {"kAligned", 1},
            {"kRaw", raw},
            {"kSharedBytes", static_cast<int>(shared_bytes())}};
}

int64_t Sm90ForwardSpec::shared_bytes() const {  // of struct Shared
    const int64_t qk = round_up(dims_qk, kPanel), v = round_up(columns, kPanel);
    return 2 * (q_buffers * rows() * qk + keys * (k_stages * qk + v_stages * v)) + (bands ? 1024 : 4096);
}

std::optional<Sm90ForwardSpec> sm90_forward_spec(const Problem& p, const MaskProgram& mask, const Arch& arch,
                                                 std::string* why_not) {
    const auto no = [&](std::string text) {
        if (why_not != nullptr) *why_not = std::move(text);
        return std::nullopt;
    };
    if (arch.number() != 90) return no(arch.name() + "; its instructions are those of sm_90 alone");
    if (p.dtype != DType::f16 && p.dtype != DType::bf16)
        return no("dtype " + std::string(core::name(p.dtype)) + "; tensor cores are for float16 and bfloat16");
    if (std::max(p.head_dim_qk, p.head_dim_v) > 256)
        return no("head dims " + std::to_string(p.head_dim_qk) + " and " + std::to_string(p.head_dim_v) +
                  "; at most 256 are taken");
    if (std::min(p.head_dim_qk, p.head_dim_v) < 1) return no("a head dim of 0");
    if (p.head_dim_v % 8 != 0) return no("head_dim_v " + std::to_string(p.head_dim_v) + "; multiples of 8 are taken");
    if (p.bias || !p.score_mod.empty()) return no("it takes no bias and no score_mod");
    if (!mask.bands && !mask.documents && p.mask.size() > kLongMask)
        return no("a mask of " + std::to_string(p.mask.size()) + " letters; at most " + std::to_string(kLongMask) +
                  " are taken");
    if (std::max(p.q_rows, p.kv_rows) >= int64_t{1} << 30)
        return no(std::to_string(std::max(p.q_rows, p.kv_rows)) + " rows; fewer than 2^30 are taken");
    if (std::min({p.q_rows, p.kv_rows, p.batch, p.num_heads_q}) < 1) return no("nothing to do");
    const int64_t q_batch = p.packed_q ? 1 : p.batch, kv_batch = p.packed_kv ? 1 : p.batch;
    if (!fits_tma(p.q, q_batch, p.num_heads_q) || !fits_tma(p.k, kv_batch, p.num_heads_kv) ||
        !fits_tma(p.v, kv_batch, p.num_heads_kv))
        return no("rows of q, k and v must start at multiples of 16 bytes, with their numbers side by side");

    Sm90ForwardSpec spec;
    static_cast<OptionSpec&>(spec) = OptionSpec(p);
    spec.dims_qk = round_up(p.head_dim_qk, 16), spec.columns = round_up(p.head_dim_v, 16);
    spec.bands = mask.bands, spec.documents = mask.documents;
    spec.table = p.has_lengths() || mask.sequences_of >= 0;
    spec.raw = !spec.softcap && !spec.slopes && p.softmax_scale > 0;
    const int dims = round_up(std::max(spec.dims_qk, spec.columns), kPanel);
    const bool plain = spec.raw && spec.bands && !spec.dropout;
    const bool crowded = !spec.raw || spec.dropout;  // what options need takes registers from scores
    if (dims <= 64) {
        // Three warpgroups have 160 registers per thread: enough where scores need no more than softmax. With a causal
        // mask 192 queries see more tiles that are half hidden: what counts while there are few.
        const bool short_causal = mask.window_right >= 0 && p.max_seqlen_q <= 1024 && !p.batch_invariant;
        const bool short_sequences = short_causal || mask.sequences_of >= 0;
        spec.consumers = plain && mask.numbers.empty() && !short_sequences ? 3 : 2;
        spec.k_stages = spec.v_stages = 4;
        if (crowded) spec.keys = 96;
    } else if (dims <= 128) {
        spec.keys = crowded ? 96 : 128, spec.k_stages = 3;  // scores come first
    } else {  // 227 KB of shared memory leave room for one q, and for fewer keys
        spec.keys = dims <= 192 ? (crowded ? 64 : 80) : crowded ? 48 : 64, spec.q_buffers = 1;
        if (dims > 192) spec.k_stages = 3;
    }
    const auto tuned = [](const char* name, int fallback) { return core::tuned("fwd_sm90", name, fallback); };
    spec.consumers = tuned("kConsumers", spec.consumers), spec.keys = tuned("kTileKV", spec.keys);
    spec.delays = tuned("kDelays", 0) != 0, spec.in_turn = tuned("kInTurn", 1) != 0;
    spec.signs = tuned("kSigns", spec.consumers < 3) != 0;  // slower with three: docs/kernel-log.md, fwd_sm90 11
    spec.k_stages = tuned("kKStages", spec.k_stages), spec.v_stages = tuned("kVStages", spec.v_stages);
    spec.q_buffers = tuned("kQBuffers", spec.q_buffers);
    while (spec.shared_bytes() > shared_limit(arch) && spec.keys > 16) spec.keys -= 16;
    if (!spec.bands && p.kv_rows > int64_t{kListed} * spec.keys)
        return no(std::to_string(p.kv_rows) + " keys; lists of visible tiles end at " +
                  std::to_string(kListed * spec.keys));
    return spec;
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

namespace {

std::string registers(int from, int count) {
    std::string text = "{";
    for (int n = 0; n < count; ++n) text += (n ? ", %" : "%") + std::to_string(from + n);
    return text + "}";
}
std::string operands(const char* constraint, const std::string& array, int fragments) {
    std::string text;
    for (int n = 0; n < fragments; ++n) {
        for (int e = 0; e < 4; ++e) {
            text += (n + e ? ", \"" : "\"") + std::string(constraint) + "\"(" + array + "[" + std::to_string(n) + "][" +
                    std::to_string(e) + "])";
        }
    }
    return text;
}

}  // namespace

std::string render_wgmma(DType dtype, const Constants& constants) {
    const auto value = [&](const char* name) {
        for (const Constant& each : constants) {
            if (std::strcmp(each.name, name) == 0) return each.value;
        }
        return 0;
    };
    const int keys = value("kTileKV"), dims = value("kDimsQK"), columns = value("kColumns"), rows = value("kTileQ");
    const std::string types = dtype == DType::bf16 ? ".f32.bf16.bf16 " : ".f32.f16.f16 ";
    const auto shape = [](int n) { return "wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + "k16"; };
    // Descriptors count 16 bytes: 2 for 16 numbers of a row of a panel, 8 for a row of it.
    const auto line = [](const std::string& text) { return "        \"" + text + "\\n\"\n"; };

    std::string out =
        "// S = Q K^T and o += P V: started, not finished. Operands as in sm90.cuh.\n#pragma once\n"
        "#include \"sm90.cuh\"\n#include \"softmax.cuh\"\nnamespace tilewise {\n";
    out += "#ifndef TILEWISE_FAKE_CUDA\n";
    out += "TW_DEVICE void start_score_product(Scores& s, Operand q, Operand k) {\n    asm volatile(\n";
    const int scores = keys / 2;
    out += line("{") + line(".reg .pred sum;") + line(".reg .b64 q, k;") + line(".reg .b32 zero;") +
           line("mov.b32 zero, 0;") + line("setp.ne.b32 sum, zero, 0;");
    for (int d = 0; d < dims; d += 16) {
        const int within = d % kPanel / 8, panel = d / kPanel;
        out += line("add.s64 q, %" + std::to_string(scores) + ", " + std::to_string(panel * rows * 8 + within) + ";");
        out +=
            line("add.s64 k, %" + std::to_string(scores + 1) + ", " + std::to_string(panel * keys * 8 + within) + ";");
        if (d == 16) out += line("setp.eq.b32 sum, zero, 0;");
        out += line(shape(keys) + types + registers(0, scores) + ", q, k, sum, 1, 1, 0, 0;");
    }
    out += line("}") + "        : " + operands("+f", "s[0]", keys / 8) +
           "\n        : \"l\"(q), \"l\"(k) : \"memory\");\n}\n";

    out +=
        "TW_DEVICE void start_output_product(Output& o, const Word (&p)[kTileKV / 16][4], Operand v) {\n    asm "
        "volatile(\n";
    const int sums = columns / 2, words = keys / 4;
    out += line("{") + line(".reg .pred sum;") + line(".reg .b64 v;") + line(".reg .b32 zero;") +
           line("mov.b32 zero, 0;") + line("setp.eq.b32 sum, zero, 0;");
    for (int j = 0; j < keys; j += 16) {
        out += line("add.s64 v, %" + std::to_string(sums + words) + ", " + std::to_string(j * 8) + ";");
        out += line(shape(columns) + types + registers(0, sums) + ", " + registers(sums + j / 4, 4) +
                    ", v, sum, 1, 1, 1;");
    }
    out += line("}") + "        : " + operands("+f", "o[0]", columns / 8) +
           "\n        : " + operands("r", "p", keys / 16) + ", \"l\"(v) : \"memory\");\n}\n";
    out += "TW_DEVICE void hold(Scores& s) { asm volatile(\"\" : " + operands("+f", "s[0]", keys / 8) +
           " :: \"memory\"); }\n";
    if (keys != columns)
        out += "TW_DEVICE void hold(Output& o) { asm volatile(\"\" : " + operands("+f", "o[0]", columns / 8) +
               " :: \"memory\"); }\n";
    out += R"(#else
TW_DEVICE float number(const Half* panels, int rows, int row, int column) {
    const Half* const panel = panels + column / kPanel * rows * kPanel;
    return Float<kDTypeQ>::template load<float>(panel[Tile<8, kPanel>::index(row, column % kPanel)]);
}
TW_DEVICE void start_score_product(Scores& s, Operand q, Operand k) {
    for (int n = 0; n < kTileKV / 8; ++n) {
        for (int e = 0; e < 4; ++e) {
            const int row = warp_id() % 4 * 16 + e / 2 * 8 + lane_id() / 4, column = n * 8 + lane_id() % 4 * 2 + e % 2;
            float sum = 0;
            for (int d = 0; d < kDimsQK; ++d) sum += number(q, kTileQ, row, d) * number(k, kTileKV, column, d);
            s[0][n][e] = sum;
        }
    }
}
TW_DEVICE void start_output_product(Output& o, const Word (&p)[kTileKV / 16][4], Operand v) {
    for (int j = 0; j < kTileKV; ++j) {
        for (int half = 0; half < 2; ++half) {  // rows g and g + 8
            const Word word = __shfl_sync(0xffffffffu, p[j / 16][j % 16 / 8 * 2 + half], (lane_id() & ~3) + j % 8 / 2);
            const float left = Float<kDTypeQ>::template load<float>(static_cast<Half>(word >> j % 2 * 16));
            for (int n = 0; n < kColumns / 8; ++n) {
                for (int c = 0; c < 2; ++c) o[0][n][half * 2 + c] += left * number(v, kTileKV, j, n * 8 + lane_id() % 4 * 2 + c);
            }
        }
    }
}
template <class Fragments>
TW_DEVICE void hold(Fragments&) {}
#endif
)";
    return out + "}  // namespace tilewise\n";
}

}  // namespace tilewise::jit
