// Kernels of this process: compiled or fetched once per device and key, loaded, kept for good.
#pragma once

#include <functional>
#include <string>

#include "jit/source.hpp"

namespace tilewise::cuda {

struct Function {
    void* handle = nullptr;
    int registers = 0, shared_static = 0, local_bytes = 0, max_threads = 0;
    int device = 0;
    unsigned max_dynamic_shared = 0;  // what a launch may ask for
    std::string name;                 // of the source and the entry, for messages
    std::string log;                  // of the compiler
};

// The kernel `entry` of the module that `render` gives the text of, compiled for this device or taken from the packs or
// the cache. `key` stands for the text: render is called when this process sees it first. Thread-safe; of concurrent
// callers with one key one compiles, and all get its error if that fails; a later call tries again. The reference stays
// valid. Allowed while a stream is being captured.
const Function& function(int device, const std::string& key, const char* entry,
                         const std::function<jit::Source()>& render);

}  // namespace tilewise::cuda
