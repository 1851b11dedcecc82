// Starting kernels. A kernel takes one struct by value (__grid_constant__).
#pragma once

#include <cstddef>
#include <type_traits>

#include "module.hpp"

namespace tilewise::cuda {

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

struct LaunchConfig {
    Dim3 grid, block, cluster{1, 1, 1};
    unsigned dynamic_shared = 0;
    bool programmatic_dependent = false;  // may start before the kernel ahead of it in the stream has ended
    void* stream = nullptr;
};

// Does not wait. A grid with no block is no launch. Throws Error for a shape that the GPU does not take; errors of the
// kernel itself show in a later call.
void launch(const Function& function, const LaunchConfig& config, const void* params, size_t param_bytes);

template <class Params>
void launch(const Function& function, const LaunchConfig& config, const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params>);
    launch(function, config, &params, sizeof(Params));
}

}  // namespace tilewise::cuda
