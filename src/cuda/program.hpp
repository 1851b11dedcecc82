// What the kernels of a problem have in common, made once per process: its mask and score_mod as device text. And from
// there to the function that runs.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "jit/attention_source.hpp"
#include "module.hpp"

namespace tilewise::cuda {

inline constexpr size_t kMaxParameterBytes = 4096;  // of a kernel; later GPUs and drivers take more, none less

struct Program {
    jit::MaskProgram mask;
    int gradient_arrays = 0;
    std::string key;  // of modules, beside file and spec

    // True once for every name: who finds it so may compile several modules side by side.
    bool first_time(const std::string& name) const;
    // What was kept under this text, or null.
    const Function* known(const std::string& what) const;
    void keep(const std::string& what, const Function& function) const;

private:
    mutable std::mutex mutex_;
    mutable std::set<std::string> seen_;
    mutable std::unordered_map<std::string, const Function*> functions_;  // which stay where they are, for good
};

// With `sequences`, documents are not part of the mask (jit::render_mask).
std::shared_ptr<const Program> program_of(const core::Problem& problem, core::Pass pass, bool sequences = false);

// A kernel of a file that includes spec.cuh. Compiled, or read from the cache, if it is not loaded yet.
const Function& kernel(const core::Problem& problem, const Program& program, const char* file, const char* entry,
                       const jit::OptionSpec& options, const jit::Constants& constants);

// Every kernel that a run will need, loaded at the same time: a first run waits for the slowest compilation, not for
// all of them in turn. Throws what one of them throws.
void side_by_side(const std::vector<std::function<void()>>& loads);

// Why the parameters of a kernel do not fit, or "": `fixed` bytes come before those of mask and score_mod.
std::string parameters_fit(const core::Problem& problem, const Program& program, core::Pass pass, size_t fixed);

}  // namespace tilewise::cuda
