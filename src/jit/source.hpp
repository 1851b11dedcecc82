// The text of a kernel, and the embedded files that it is made of.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "arch.hpp"

namespace tilewise::jit {

struct Header {
    std::string name, text;
};

struct Source {        // one translation unit
    std::string name;  // "fwd_simt.cu"
    std::string text;  // may include the headers below and nothing else
    std::vector<Header> headers;
    std::vector<std::string> options;  // beside those that every kernel gets
    bool arch_specific = false;        // needs instructions of one arch alone: wgmma and TMA of sm_90a
};

// Text of kernels/tilewise/<file>, as it was when the library was built. Throws Error (internal) for an unknown name.
std::string_view kernel_text(std::string_view file);
std::vector<std::string> kernel_files();

// Everything that decides the bytes of a compiled source. `compiler` is its identity, or "" where only the source
// counts.
std::string key_material(const Source& source, const Target& target, std::string_view compiler);

}  // namespace tilewise::jit
