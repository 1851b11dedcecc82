#include "isa.hpp"

#include "core/env.hpp"
#include "core/error.hpp"

namespace tilewise::cpu {

const char* name(Isa isa) {
    switch (isa) {
        case Isa::scalar: return "scalar";
        case Isa::avx2: return "avx2";
        case Isa::avx512: return "avx512";
    }
    return "unknown";
}

bool available(Isa isa) {
    if (isa == Isa::scalar) return true;
#if defined(__x86_64__)
    // These look at CPUID and at what the operating system saves (XGETBV).
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == Isa::avx2) return avx2;
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

Isa current_isa() {
    constexpr Isa kAll[] = {Isa::avx512, Isa::avx2, Isa::scalar};
    const std::string forced = core::env("TILEWISE_CPU_ISA");
    std::string here;
    for (const Isa isa : kAll) {
        if (!available(isa)) continue;
        if (forced.empty() || forced == name(isa)) return isa;
        here += std::string(here.empty() ? "" : ", ") + name(isa);
    }
    core::refuse("TILEWISE_CPU_ISA", "\"" + forced + "\"", here + " on this CPU", "Unset it for the best one.");
}

}  // namespace tilewise::cpu
