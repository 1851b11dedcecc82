// Where the code of a kernel comes from: packs compiled beforehand, the user's cache, the compiler.
#pragma once

#include "arch.hpp"
#include "image.hpp"
#include "source.hpp"

namespace tilewise::jit {

// Code that runs on a GPU of this arch under a driver of this version (13020 is CUDA 13.2). Throws Error if there is no
// way, with what to install.
Image obtain(const Source& source, int gpu_major, int gpu_minor, int driver_version);

struct Compiled {
    Image image;
    std::string path;  // of the file that holds it
    double seconds = 0;
    bool from_cache = false;  // it was there already
};

// What obtain() would compile for such a GPU, or PTX for it and all later ones, put where it will be found: into a
// folder that TILEWISE_PACKS may name later, or for "" into the user's cache. No GPU is needed; driver_version 0: any.
Compiled compile_ahead(const Source& source, const Arch& gpu, bool ptx, int driver_version,
                       const std::string& directory);

}  // namespace tilewise::jit
