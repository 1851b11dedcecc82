// Which tiles the tensor-core kernels work on: a pure function of the GPU's arch and the problem.
#pragma once

#include <optional>

#include "arch.hpp"
#include "attention_source.hpp"

namespace tilewise::jit {

// What both passes ask.
int round_up(int64_t x, int64_t step);
// Numbers from one row of a tile in shared memory to the next, as Tile of kernels/tilewise/mma.cuh has them.
int64_t tile_pitch(int64_t width);
// Largest shared memory of a block in bytes (CUDA C++ Programming Guide, table of compute capabilities).
int64_t shared_limit(const Arch& arch);
// Rows follow each other at multiples of 16 bytes, and numbers lie side by side.
bool takes_16_bytes(const core::Tensor4& tensor);

// What fwd_mma is compiled for; names as in kernels/tilewise/fwd_mma.cu.
struct MmaForwardSpec : OptionSpec {
    int dims_qk = 0, columns = 0;  // multiples of 16; columns of head_dim_v in one block
    int warps = 4, m_tiles = 1;    // 16 m_tiles rows per warp
    int keys = 64;                 // of a tile
    int blocks = 1;                // on an SM at once: what registers are limited for
    bool q_in_registers = false;
    int read_ahead = 1;  // products between reading a fragment and using it
    bool bands = false, documents = false, aligned = false, pack_gqa = false, split = false;
    bool raw = false;     // softmax takes products as they are: nothing but a positive scale
    bool rolled = false;  // some scores are finished one by one

    [[nodiscard]] int rows() const { return warps * m_tiles * 16; }
    [[nodiscard]] Constants constants() const;
    [[nodiscard]] int64_t shared_bytes() const;
};

// Nothing, if the arch or its shared memory does not suffice for the problem; why_not then says what would work. The
// tiles are those of a GPU with work enough for all of its SMs.
std::optional<MmaForwardSpec> mma_forward_spec(const core::Problem& problem, const MaskProgram& mask, const Arch& arch,
                                               std::string* why_not);

// How the work is laid out on a GPU.
struct MmaForwardLayout {
    MmaForwardSpec spec;
    int64_t q_tile = 0;  // queries of a block
    int64_t heads = 0;   // that blocks are numbered by
    int64_t pieces = 0;  // of head_dim_v
    int64_t splits = 1, keys_per_split = 0;
};

// Where there are too few blocks for its SMs, keys are split over blocks, or, if there are few keys too, blocks get
// fewer queries. shared_per_sm in bytes.
MmaForwardLayout mma_forward_layout(const core::Problem& problem, const MmaForwardSpec& spec, int num_sms,
                                    int64_t shared_per_sm);

}  // namespace tilewise::jit
