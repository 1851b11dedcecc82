// Standard attention in the dtype of the problem: the yardstick of the accuracy rule. What a user would write with
// plain matrix products: S = round_T(scale * q k^T), P = round_T(softmax(S)), O = round_T(P v), gradients likewise;
// products accumulate in fp32 (fp64 for fp64), options between S and P are applied in fp32. round_T rounds to the
// dtype.
#pragma once

#include "core/problem.hpp"

namespace tilewise::test {

void standard_forward(const core::Problem& problem, const core::ForwardArgs& args);

// Ignores args.o and args.lse: it uses its own. Outputs that are absent are not written.
void standard_backward(const core::Problem& problem, const core::BackwardArgs& args);

}  // namespace tilewise::test
