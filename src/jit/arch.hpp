// GPU architectures by NVIDIA's names: sm_80, sm_90a.
#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <vector>

namespace tilewise::jit {

struct Arch {
    int major = 0, minor = 0;
    bool specific = false;  // "a": instructions of this arch alone; its code runs on no later one

    static Arch parse(std::string_view text);        // "90a", "sm_90a", "compute_90", "9.0"
    [[nodiscard]] std::string name() const;          // sm_90a: machine code
    [[nodiscard]] std::string virtual_name() const;  // compute_90a: PTX
    [[nodiscard]] int number() const { return major * 10 + minor; }
    friend auto operator<=>(const Arch&, const Arch&) = default;
};

// The arch that kernels are made for on a GPU of this compute capability: its own, or the older one that
// TILEWISE_GPU_ARCH names. Throws Error if that is newer than the GPU.
Arch kernel_arch(int gpu_major, int gpu_minor);

// How to compile for a GPU with a compiler that knows some archs (their numbers: 75, 80, ..., 121).
struct Target {
    Arch arch;
    bool ptx = false;  // of an older arch: the driver of a GPU that the compiler does not know yet finishes it
};
// Throws Error if the compiler has no way to serve the GPU; `compiler` names it in the message.
Target choose_target(const Arch& gpu, const std::vector<int>& known, const std::string& compiler);

}  // namespace tilewise::jit
