#include "env.hpp"

#include <cstdlib>

namespace tilewise::core {

const std::vector<EnvVariable>& env_variables() {
    static const std::vector<EnvVariable> table{
        {"TILEWISE_CACHE_DIR",
         "folder of compiled GPU kernels; default: $XDG_CACHE_HOME/tilewise or ~/.cache/tilewise"},
        {"TILEWISE_CACHE_MAX_MB", "its largest size in MiB, default 1024; 0: no cache"},
        {"TILEWISE_CPU_ISA", "scalar, avx2 or avx512: forces the instruction set of the CPU kernels"},
        {"TILEWISE_CUDA_DRIVER", "library to load as the CUDA driver; default: the one of the system"},
        {"TILEWISE_NVRTC",
         "library to load as NVRTC, CUDA's run-time compiler; default: the newest that the driver takes"},
        {"TILEWISE_PACKS", "folders of kernels compiled beforehand, joined by colons"},
        {"TILEWISE_NUM_THREADS", "threads of the CPU kernels; default: as the OpenMP run time of the process"},
        {"TILEWISE_VALIDATE", "1: as validate=True in every call: lengths in device memory are checked, with a wait"},
        {"TILEWISE_VERBOSE",
         "dispatch: one line per plan, with the reason of every implementation that declined; jit: one "
         "per compiled GPU kernel"},
        {"CUDA_HOME", "a CUDA toolkit, where NVRTC may lie"},
        {"HOME", "for the folder of compiled GPU kernels"},
        {"XDG_CACHE_HOME", "for the folder of compiled GPU kernels"},
    };
    return table;
}

std::string env(const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here calls setenv
    return value ? value : "";
}

}  // namespace tilewise::core
