// Where the code of a kernel comes from: packs compiled beforehand, the user's cache, the compiler.
#pragma once

#include "arch.hpp"
#include "image.hpp"
#include "source.hpp"

namespace tilewise::jit {

// Code that runs on a GPU of this arch under a driver of this version (13020 is CUDA 13.2). Throws Error if there is no
// way, with what to install.
Image obtain(const Source& source, int gpu_major, int gpu_minor, int driver_version);

// Compiles for an arch and puts it into a folder that TILEWISE_PACKS may name later. No GPU is needed.
Image compile_into_pack(const Source& source, const Target& target, const std::string& directory);

}  // namespace tilewise::jit
