// GPU kernels compiled before they are needed, and what is known about those on disk: reports as JSON lines
// (tilewise.h says which fields).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace tilewise::cuda {

// arch: "80", "90a"; "compute_90" for PTX; "" is the GPU of the problem. directory: a pack; "" is the user's cache.
std::string compile_ahead(const core::Problem& problem, core::Pass pass, const std::string& arch,
                          const std::string& directory);
std::string list_compiled(const std::string& directory, bool verify);
uint64_t clear_compiled(const std::string& directory);

// What the compiler's log says about one kernel; -1: nothing.
struct KernelResources {
    std::string entry;
    int registers = -1, shared_bytes = -1, stack_bytes = -1, spill_store_bytes = -1, spill_load_bytes = -1,
        local_bytes = -1;
};
struct CompilerLog {
    std::vector<KernelResources> kernels;
    std::vector<std::string>
        warnings;  // every line that is no resource: C7510, which serialises wgmma, has no "warning"
};
CompilerLog parse_log(const std::string& log);

}  // namespace tilewise::cuda
