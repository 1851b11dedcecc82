// Kernels for Hopper alone.
#pragma once

#include "core/registry.hpp"

namespace tilewise::cuda {

extern const core::Implementation kFwdSm90;

}  // namespace tilewise::cuda
