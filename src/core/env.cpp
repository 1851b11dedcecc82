#include "env.hpp"

#include <cstdlib>

namespace tilewise::core {

const std::vector<EnvVariable>& env_variables() {
    static const std::vector<EnvVariable> table{
        {"TILEWISE_CPU_ISA", "scalar, avx2 or avx512: forces the instruction set of the CPU kernels"},
        {"TILEWISE_NUM_THREADS", "threads of the CPU kernels; default: as the OpenMP run time of the process"},
        {"TILEWISE_VALIDATE", "1: as validate=True in every call: lengths in device memory are checked, with a wait"},
        {"TILEWISE_VERBOSE", "dispatch: one line per plan, with the reason of every implementation that declined"},
    };
    return table;
}

std::string env(const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here calls setenv
    return value ? value : "";
}

}  // namespace tilewise::core
