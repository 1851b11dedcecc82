// fwd_simt and bwd_simt: the portable kernels, always there on a GPU.
#pragma once

#include "core/registry.hpp"

namespace tilewise::cuda {

extern const core::Implementation kFwdSimt, kBwdSimt;

}  // namespace tilewise::cuda
