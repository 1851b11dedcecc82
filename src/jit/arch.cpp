#include "arch.hpp"

#include <algorithm>
#include <charconv>

#include "core/env.hpp"
#include "core/error.hpp"

namespace tilewise::jit {

Arch Arch::parse(std::string_view text) {
    std::string_view rest = text;
    for (const std::string_view prefix : {"sm_", "compute_"}) {
        if (rest.starts_with(prefix)) rest.remove_prefix(prefix.size());
    }
    Arch arch;
    if (rest.ends_with('a')) {
        arch.specific = true;
        rest.remove_suffix(1);
    }
    std::string digits;
    for (const char c : rest) {
        if (c != '.') digits += c;
    }
    int number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size() || number < 10 || number > 999) {
        core::refuse("arch", "\"" + std::string(text) + "\"", "names like 80, sm_80, 8.0 or 90a");
    }
    arch.major = number / 10;
    arch.minor = number % 10;
    return arch;
}

std::string Arch::name() const { return "sm_" + std::to_string(number()) + (specific ? "a" : ""); }
std::string Arch::virtual_name() const { return "compute_" + std::to_string(number()) + (specific ? "a" : ""); }

Arch kernel_arch(int gpu_major, int gpu_minor) {
    const Arch gpu{gpu_major, gpu_minor, false};
    const std::string text = core::env("TILEWISE_GPU_ARCH");
    if (text.empty()) return gpu;
    const Arch forced = Arch::parse(text);
    if (forced.number() > gpu.number() || forced.specific) {
        core::refuse("TILEWISE_GPU_ARCH", text, "archs up to the GPU's " + gpu.name() + ", without a letter");
    }
    return forced;
}

Target choose_target(const Arch& gpu, const std::vector<int>& known, const std::string& compiler) {
    if (std::find(known.begin(), known.end(), gpu.number()) != known.end()) return {gpu, false};
    int best = 0;
    std::string names;
    for (const int number : known) {
        if (number < gpu.number()) best = std::max(best, number);
        names += (names.empty() ? "sm_" : ", sm_") + std::to_string(number);
    }
    if (gpu.specific || best == 0) {
        throw core::Error(
            core::Status::unsupported,
            "GPU arch: got " + gpu.name() + "; " + compiler + " compiles for " + names + ". " +
                (best == 0 ? "An older compiler knows this GPU: pip install nvidia-cuda-nvrtc-cu12, or name "
                             "its library in TILEWISE_NVRTC."
                           : "This kernel uses instructions of this GPU alone: a newer NVRTC is needed."));
    }
    return {{best / 10, best % 10, false}, true};
}

}  // namespace tilewise::jit
