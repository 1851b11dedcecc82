// What a compiler gives and a driver loads: a cubin for one arch, or PTX that the driver finishes itself.
#pragma once

#include <string>

namespace tilewise::jit {

struct Image {
    std::string bytes;
    bool is_ptx = false;
    std::string log;    // of the compiler: warnings, registers and spills if the options ask for them
    std::string about;  // one line for people: file, arch, compiler
};

}  // namespace tilewise::jit
