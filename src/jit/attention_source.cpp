#include "attention_source.hpp"

#include <algorithm>

#include "core/env.hpp"
#include "render_expr.hpp"
#include "sm90_spec.hpp"

namespace tilewise::jit {
namespace {

constexpr int kSimtThreads = 256, kSimtTile = 64;

// Everything a kernel text may include.
std::vector<Header> headers(std::string spec) {
    std::vector<Header> all;
    for (const std::string& file : kernel_files()) {
        if (file.ends_with(".cuh") || file.ends_with(".h")) all.push_back({file, std::string(kernel_text(file))});
    }
    if (!spec.empty()) all.push_back({"spec.cuh", std::move(spec)});
    return all;
}

core::Expr score_mod_of(const core::Problem& p) {
    return core::Expr::parse(p.score_mod, core::Role::score_mod, p.arrays, static_cast<int>(p.scalars.size()));
}

}  // namespace

OptionSpec::OptionSpec(const core::Problem& p)
    : dtype(p.dtype),
      softcap(p.softcap > 0),
      bias(static_cast<bool>(p.bias)),
      slopes(static_cast<bool>(p.alibi_slopes)),
      sinks(static_cast<bool>(p.sinks)),
      dropout(p.dropout_threshold > 0),
      score_mod(!p.score_mod.empty()) {}

std::string text_of(const OptionSpec& o, const Constants& constants) {
    std::string text;
    for (const int n : {static_cast<int>(o.dtype), int{o.softcap}, int{o.bias}, int{o.slopes}, int{o.sinks},
                        int{o.dropout}, int{o.score_mod}}) {
        text += " " + std::to_string(n);
    }
    for (const Constant& constant : constants) text += " " + std::to_string(constant.value);
    return text;
}

SimtSpec::SimtSpec(const core::Problem& p, core::Pass pass) : OptionSpec(p) {
    const int64_t dims = pass == core::Pass::forward ? p.head_dim_v : std::max(p.head_dim_qk, p.head_dim_v);
    // 128 columns keep a third of the registers in outputs; fp64 needs twice as many for 64.
    columns = core::tuned(pass == core::Pass::forward ? "fwd_simt" : "bwd_simt", "kColumns",
                          p.dtype != core::DType::f64 && dims > 64 ? 128 : 64);
}

Constants SimtSpec::constants(core::Pass pass) const {
    const bool backward = pass == core::Pass::backward;
    // Two blocks hide each other's waits; the accumulators of fp64, and of dK and dV side by side, leave no room.
    const bool crowded = dtype == core::DType::f64 || (backward && columns > 64);
    return {{"kThreads", kSimtThreads},
            {"kTileQ", kSimtTile},
            {"kTileKV", kSimtTile},
            {"kSharedBytes", static_cast<int>(shared_bytes())},
            {"kBlocks", core::tuned(backward ? "bwd_simt" : "fwd_simt", "kBlocks", crowded ? 1 : 2)},
            {"kColumns", columns}};
}

int64_t SimtSpec::shared_bytes() const {
    // Two factors of a score product, or rows of the right factor of an output product; a tile; the list of tiles.
    const int64_t real = dtype == core::DType::f64 ? 8 : 4, depth = dtype == core::DType::f64 ? 16 : 32;
    const int64_t lead = kSimtTile + 4, stage = std::max<int64_t>(2 * depth * lead, depth * columns) * real;
    return stage + kSimtTile * lead * real + kSimtThreads * 8 + kSimtThreads / 32 * 4;
}

int num_gradient_arrays(const core::Problem& p) {
    if (p.score_mod.empty() || core::differentiate(score_mod_of(p)).gathers.empty()) return 0;
    return static_cast<int>(p.arrays.size());
}

Source attention_source(const char* file, const OptionSpec& options, const Constants& constants, const core::Problem& p,
                        const MaskProgram& mask) {
    const bool backward = std::string_view(file).starts_with("bwd");
    std::string text = "#pragma once\n#include \"base.cuh\"\nnamespace tilewise {\n";
    const auto constant = [&](const char* type, const char* name, int value) {
        text += std::string("constexpr ") + type + " " + name + " = " + std::to_string(value) + ";\n";
    };
    const auto at_least_one = [](size_t n) { return std::to_string(std::max<size_t>(n, 1)); };
    text += options.dtype == core::DType::f64 ? "using Real = double;\n" : "using Real = float;\n";
    for (const Constant& each : constants) constant("int", each.name, each.value);
    constant("int", "kDTypeQ", static_cast<int>(options.dtype));
    constant("bool", "kSoftcap", options.softcap);
    constant("bool", "kBias", options.bias);
    constant("bool", "kSlopes", options.slopes);
    constant("bool", "kSinks", options.sinks);
    constant("bool", "kDropout", options.dropout);
    constant("bool", "kScoreMod", options.score_mod);
    text += "struct MaskData {\n    abi::MaskArray masks[" + at_least_one(mask.operands.size()) +
            "];\n    abi::Array arrays[" + at_least_one(p.arrays.size()) +
            "];\n    abi::GatherSummary gather_summaries[" + at_least_one(p.arrays.size()) + "];\n    double scalars[" +
            at_least_one(p.scalars.size()) + "];\n    Int numbers[" + at_least_one(mask.numbers.size()) + "];\n};\n";
    const int gradient_arrays = backward ? num_gradient_arrays(p) : 0;
    constant("int", "kGradientArrays", gradient_arrays);
    if (backward) {
        text += "struct GradientArrays {\n    abi::Array arrays[" + at_least_one(static_cast<size_t>(gradient_arrays)) +
                "];\n};\n";
    }
    text +=
        "}  // namespace tilewise\n#include \"mask.cuh\"\n#include \"expr.cuh\"\nnamespace tilewise {\n" + mask.text;
    if (!p.score_mod.empty()) {
        const core::Expr expr = score_mod_of(p);
        text += render_score_value(expr, p.arrays, "score_mod");
        if (backward) text += render_score_gradient(core::differentiate(expr), p.arrays, "score_mod_gradient");
    }
    // The kernels name them in branches that are never compiled into code, but are looked up.
    if (p.score_mod.empty()) {
        text += "TW_DEVICE Real score_mod(const Site&, const MaskData&, Real x, Int, Int) { return x; }\n";
        if (backward)
            text += "TW_DEVICE Real score_mod_gradient(const Site&, const MaskData&, Real, Int, Int) { return 1; }\n";
    }
    if (backward && gradient_arrays == 0) {
        text +=
            "TW_DEVICE void score_mod_gradient_arrays(const Site&, const MaskData&, const GradientArrays&, Real, Real, "
            "Int, Int) {}\n";
    }
    text += "}  // namespace tilewise\n";

    Source source;
    source.name = file;
    source.text = kernel_text(file);
    source.headers = headers(std::move(text));
    if (std::string_view(file).find("sm90") != std::string_view::npos) {
        source.headers.push_back({"wgmma.cuh", render_wgmma(options.dtype, constants)});
        source.arch_specific = true;
    }
    return source;
}

Source plain_source(const char* file) {
    Source source;
    source.name = file;
    source.text = kernel_text(file);
    source.headers = headers("");
    return source;
}

}  // namespace tilewise::jit
