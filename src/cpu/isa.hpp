// Which instruction set the CPU kernels use: found once by CPUID, capped by TILEWISE_CPU_ISA.
#pragma once

#include <string>
#include <vector>

namespace tilewise::cpu {

enum class Isa { scalar = 0, avx2 = 1, avx512 = 2 };

const char* name(Isa isa);
bool available(Isa isa);  // this build and this CPU
// The best available, or TILEWISE_CPU_ISA if set. Throws Error if that is unknown or not available here: a forced
// choice is never silently replaced. Read at every call, so that tests can change it.
Isa current_isa();

}  // namespace tilewise::cpu
