// User functions as device text: an expression becomes one function of kernels/tilewise/expr.cuh's vocabulary, for
// namespace tilewise. `data` is a MaskData, whose members arrays[k], scalars[k] and gather_summaries[k] are read where
// the expression needs them.
#pragma once

#include <span>
#include <string>

#include "core/expr.hpp"

namespace tilewise::jit {

// bool NAME(const Site& site, const MaskData& data, Int i, Int j)
std::string render_mask_value(const core::Expr& mask_mod, std::span<const core::Array> arrays, const std::string& name);

// int NAME(const Site& site, const MaskData& data, Int i0, Int i1, Int j0, Int j1): on queries [i0, i1) and keys
// [j0, j1), none empty: 0 = false everywhere, 2 = true everywhere, 1 = unknown.
std::string render_mask_truth(const core::Expr& mask_mod, std::span<const core::Array> arrays, const std::string& name);

// Real NAME(const Site& site, const MaskData& data, Real x, Int i, Int j)
std::string render_score_value(const core::Expr& score_mod, std::span<const core::Array> arrays,
                               const std::string& name);

// bool NAME(const Site& site, const MaskData& data, Int i0, Int i1, Int j0, Int j1): -inf on the whole rectangle,
// whatever the scores. Empty if no tile can ever be.
std::string render_score_hides(const core::Expr& score_mod, std::span<const core::Array> arrays,
                               const std::string& name);

// Real NAME(const Site& site, const MaskData& data, Real x, Int i, Int j): d result / d x. And, if there are gathers
// with a gradient, given g = d loss / d result:
// void NAME_arrays(const Site& site, const MaskData& data, const GradientArrays& out, Real g, Real x, Int i, Int j)
// adds their gradients to out.arrays[k], Reals with the array's shape; those whose data is null are not wanted.
std::string render_score_gradient(const core::Adjoint& adjoint, std::span<const core::Array> arrays,
                                  const std::string& name);

}  // namespace tilewise::jit
