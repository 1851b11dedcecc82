// fwd_mma, bwd_mma: the portable tensor-core kernels.
#pragma once

#include "core/registry.hpp"

namespace tilewise::cuda {

extern const core::Implementation kFwdMma, kBwdMma;

}  // namespace tilewise::cuda
