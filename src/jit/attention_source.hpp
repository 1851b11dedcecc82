// The source of an attention kernel: the texts of kernels/tilewise and the spec.cuh that fits them to a problem.
#pragma once

#include "core/problem.hpp"
#include "render_mask.hpp"
#include "source.hpp"

namespace tilewise::jit {

// What is compiled into the portable kernels; everything else is a run-time value.
struct SimtSpec {
    core::DType dtype = core::DType::f32;
    int columns = 64;  // of head_dim that a block's output holds
    bool softcap = false, bias = false, slopes = false, sinks = false, dropout = false;
};

SimtSpec simt_spec(const core::Problem& problem, core::Pass pass);
std::string text_of(const SimtSpec& spec);      // equal for equal specs only
int64_t shared_bytes_of(const SimtSpec& spec);  // of a block, dynamic; the kernels check that it suffices

// Number of arrays in GradientArrays: those of the problem if the score_mod reads float arrays, else 0.
int num_gradient_arrays(const core::Problem& problem);

// `file` is fwd_simt.cu, bwd_simt_delta.cu, bwd_simt.cu or bwd_simt_shared.cu.
Source simt_source(const char* file, const SimtSpec& spec, const core::Problem& problem, const MaskProgram& mask);
Source plain_source(const char* file);  // prepare.cu, summaries.cu: the same for every problem

}  // namespace tilewise::jit
