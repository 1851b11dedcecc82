// The source of an attention kernel: the texts of kernels/tilewise and the spec.cuh that fits them to a problem.
#pragma once

#include "core/problem.hpp"
#include "render_mask.hpp"
#include "source.hpp"

namespace tilewise::jit {

// Options of a problem that are compiled into its kernels; everything else is a run-time value.
struct OptionSpec {
    core::DType dtype = core::DType::f32;
    bool softcap = false, bias = false, slopes = false, sinks = false, dropout = false, score_mod = false;

    OptionSpec() = default;
    explicit OptionSpec(const core::Problem& problem);
};

// A constant of spec.cuh.
struct Constant {
    const char* name;
    int value;
};
using Constants = std::vector<Constant>;
std::string text_of(const OptionSpec& options, const Constants& constants);  // equal for equal specs only

// What fwd_simt and bwd_simt are compiled for.
struct SimtSpec : OptionSpec {
    int columns = 64;  // of head_dim that a block's output holds

    SimtSpec(const core::Problem& problem, core::Pass pass);
    [[nodiscard]] Constants constants(core::Pass pass) const;
    [[nodiscard]] int64_t shared_bytes() const;  // of a block, dynamic; the kernels check that it suffices
};

// Number of arrays in GradientArrays: those of the problem if the score_mod reads float arrays, else 0.
int num_gradient_arrays(const core::Problem& problem);

// A file of kernels/tilewise that includes spec.cuh. Kernels of the backward pass have names that start with bwd.
Source attention_source(const char* file, const OptionSpec& options, const Constants& constants,
                        const core::Problem& problem, const MaskProgram& mask);
Source plain_source(const char* file);  // prepare.cu, summaries.cu, combine.cu, ...: the same for every problem

}  // namespace tilewise::jit
