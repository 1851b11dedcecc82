// Which tiles the Hopper kernels work on: pure functions of the problem. And the text of their products.
#pragma once

#include <optional>

#include "arch.hpp"
#include "attention_source.hpp"
#include "render_mask.hpp"

namespace tilewise::jit {

// What fwd_sm90 is compiled for; names as in kernels/tilewise/fwd_sm90.cu.
struct Sm90ForwardSpec : OptionSpec {
    int dims_qk = 0, columns = 0;  // multiples of 16
    int consumers = 2;             // warpgroups of 64 queries
    int keys = 128;                // of a tile
    int k_stages = 2, v_stages = 2, q_buffers = 2;
    bool bands = false, documents = false;
    bool table = false;    // lengths and offsets are in device memory
    bool in_turn = false;  // warpgroups start their products one after the other
    bool signs = false;    // of exponents in place of a maximum (softmax.cuh)
    bool delays = false;   // at barriers, to find what relies on speed
    bool raw = false;      // softmax takes products as they are: nothing but a positive scale

    [[nodiscard]] int rows() const { return consumers * 64; }
    [[nodiscard]] int threads() const { return consumers * 128 + 128; }
    [[nodiscard]] Constants constants() const;
    [[nodiscard]] int64_t shared_bytes() const;
};

// Nothing, if the kernel does not take the problem; why_not then says why.
std::optional<Sm90ForwardSpec> sm90_forward_spec(const core::Problem& problem, const MaskProgram& mask,
                                                 const Arch& arch, std::string* why_not);

// Whether there is to be a kernel, too, that takes each document for a sequence, whose tiles of queries begin with it.
// If they are runs of tokens, which documents.cu finds out, it does the work.
bool documents_may_be_sequences(const core::Problem& problem, const MaskProgram& mask);

// wgmma.cuh for a kernel with these constants: products whose instructions name all of their registers.
std::string render_wgmma(core::DType dtype, const Constants& constants);

}  // namespace tilewise::jit
