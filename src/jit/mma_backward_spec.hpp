// Which tiles the backward tensor-core kernel works on: a pure function of the GPU's arch and the problem.
#pragma once

#include <optional>

#include "mma_spec.hpp"

namespace tilewise::jit {

// What bwd_mma is compiled for; names as in kernels/tilewise/bwd_mma.cu.
struct MmaBackwardSpec : OptionSpec {
    int dims_qk = 0, dims_v = 0;  // multiples of 16
    int queries = 64, keys = 64;  // of a tile
    int warps = 4, blocks = 1;
    int warps_q = 2, warps_keys = 2, warps_queries = 2;  // that share the rows of S, of dK and dV, of dQ
    int stages = 1;                                      // of dO
    int read_ahead = 1;                                  // products between reading a fragment and its use
    bool bands = false, documents = false, window = false, aligned = false, deterministic = false;
    bool rolled = false;   // some scores are finished one by one
    bool centres = false;  // rows may see so few keys that one warp has them all

    [[nodiscard]] Constants constants() const;
    [[nodiscard]] int64_t shared_bytes() const;
};

// Nothing, if the arch or its shared memory does not suffice for the problem; why_not then says what would work.
std::optional<MmaBackwardSpec> mma_backward_spec(const core::Problem& problem, const MaskProgram& mask,
                                                 const Arch& arch, std::string* why_not);

}  // namespace tilewise::jit
