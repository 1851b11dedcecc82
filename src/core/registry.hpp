// The ordered list of implementations; each says why it does not take a problem. Reading the list is reading the
// architecture. The list itself stands in src/implementations.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "problem.hpp"

namespace tilewise::core {

// What a run is given beside its arguments.
struct Workspace {
    void* data = nullptr;  // in the memory of the problem's device, 64-byte aligned; undefined contents
    size_t bytes = 0;
    void* stream = nullptr;  // CUstream that the work is queued on; nothing on the CPU
    // Where an implementation may keep what it decided: it finds it there when the problem comes again with other
    // addresses (of the same alignment to 256 bytes), seeds and values behind pointers. Null: nothing is kept.
    std::shared_ptr<const void>* kept = nullptr;
};

struct Implementation {
    const char* name;
    // A pass that it does not have is null and never asked for. Empty string = takes it; otherwise one sentence that
    // says why not and what would work.
    std::string (*supports)(const Problem& problem, Pass pass);
    size_t (*workspace_bytes)(const Problem& problem, Pass pass);
    std::string (*explain)(const Problem& problem, Pass pass);  // tile sizes, ISA, split: one line per fact
    void (*forward)(const Problem& problem, const ForwardArgs& args, Workspace workspace);
    void (*backward)(const Problem& problem, const BackwardArgs& args, Workspace workspace);
    int32_t device_type = TILEWISE_CPU;  // of the tensors; others are declined before supports() is asked
};

// These few are implemented in src/implementations.cpp, the only file that sees the backends.
std::span<const Implementation* const> implementations();
void set_parallel_for(tilewise_parallel_for function, void* user, int32_t num_threads);
void set_num_threads(int32_t count);
int32_t num_threads();
std::string backend_facts();  // "key: value" lines
// Memory of a device for the time of one run.
struct DeviceMemory {
    void* data = nullptr;
    void (*release)(Device device, void* data, void* stream) = nullptr;
};
DeviceMemory allocate(Device device, size_t bytes, void* stream);
// Probabilities of chosen rows and heads into out [batch, heads, rows, seqlen_kv]; lse may be absent.
void attn_probs(const Problem& problem, const Rows3& lse, std::span<const int64_t> rows, std::span<const int64_t> heads,
                const Array& out);

// Compiled GPU kernels; texts are those of tilewise.h. An empty directory is the user's cache, an empty arch the GPU of
// the problem.
void set_nvrtc_path(std::vector<std::string> directories);
std::string compile_kernels(const Problem& problem, Pass pass, const std::string& arch, const std::string& directory);
std::string list_kernels(const std::string& directory, bool verify);
uint64_t clear_kernels(const std::string& directory);

struct Refusal {
    const Implementation* implementation;
    std::string reason;
};

struct Choice {
    const Implementation* implementation = nullptr;  // null: nothing takes the problem
    std::vector<Refusal> refusals;                   // of those asked before it
};

// Honours problem.backend: an unknown name, or one that refuses, is an Error, never a silent fallback.
Choice choose(const Problem& problem, Pass pass);

}  // namespace tilewise::core
