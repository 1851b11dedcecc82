#include "program.hpp"

#include <algorithm>
#include <future>
#include <map>
#include <utility>

#include "device.hpp"
#include "tilewise/abi.h"

namespace tilewise::cuda {

using core::Pass;
using core::Problem;

namespace {

// Everything that Program is made from. Numbers as bytes: every call makes it anew.
std::string identity(const Problem& p, Pass pass, bool sequences) {
    std::string key;
    const auto add = [&key](int64_t n) { key.append(reinterpret_cast<const char*>(&n), sizeof n); };
    // Bands are run-time numbers of the program, so they belong to its identity, though not to the text of the kernel.
    for (const int64_t n :
         {static_cast<int64_t>(pass), int64_t{sequences}, int64_t{p.causal}, p.window_left, p.window_right, p.chunk,
          int64_t{p.packed_q}, int64_t{p.packed_kv}, static_cast<int64_t>(p.scalars.size()),
          static_cast<int64_t>(p.arrays.size()), static_cast<int64_t>(p.mask.size())}) {
        add(n);
    }
    for (const core::Array& a : p.arrays) {
        const int64_t last = a.rank > 0 ? a.shape[static_cast<size_t>(a.rank - 1)] : 0;
        add(static_cast<int64_t>(a.dtype)), add(a.rank), add(last <= 4 ? last : 0);
    }
    return key.append(p.mask).append(p.score_mod);
}

}  // namespace

bool Program::first_time(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    return seen_.insert(name).second;
}

std::shared_ptr<const Program> program_of(const Problem& p, Pass pass, bool sequences) {
    constexpr size_t kMaxPrograms = 256;
    static std::mutex mutex;
    static std::map<std::string, std::shared_ptr<const Program>> programs;
    std::string id = identity(p, pass, sequences);
    const std::lock_guard lock(mutex);
    if (const auto found = programs.find(id); found != programs.end()) return found->second;
    auto program = std::make_shared<Program>();
    program->mask = jit::render_mask(p, sequences);
    program->gradient_arrays = pass == Pass::backward ? jit::num_gradient_arrays(p) : 0;
    program->key = std::to_string(p.arrays.size()) + " " + std::to_string(p.scalars.size());
    for (const core::Array& a : p.arrays) {
        program->key += " " + std::to_string(static_cast<int>(a.dtype)) + ":" + std::to_string(a.rank);
    }
    program->key += "\n" + program->mask.text + "\n" + p.score_mod;
    if (programs.size() >= kMaxPrograms) programs.clear();  // runs in flight keep theirs
    return programs.emplace(std::move(id), std::move(program)).first->second;
}

const Function* Program::known(const std::string& what) const {
    const std::lock_guard lock(mutex_);
    const auto found = functions_.find(what);
    return found == functions_.end() ? nullptr : found->second;
}

void Program::keep(const std::string& what, const Function& function) const {
    const std::lock_guard lock(mutex_);
    functions_.emplace(what, &function);
}

const Function& kernel(const Problem& p, const Program& program, const char* file, const char* entry,
                       const jit::OptionSpec& options, const jit::Constants& constants) {
    device_info(p.device.index);  // in a child of fork this throws
    // A short key first: the name of the module is a long text, and takes longer to make than the launch itself.
    const auto& [dtype, softcap, bias, slopes, sinks, dropout, score_mod] = options;
    std::string key = std::string(file) + ':' + entry;
    for (const int n : {p.device.index, static_cast<int>(dtype), int{softcap}, int{bias}, int{slopes}, int{sinks},
                        int{dropout}, int{score_mod}}) {
        key.append(reinterpret_cast<const char*>(&n), sizeof n);
    }
    for (const jit::Constant& constant : constants)
        key.append(reinterpret_cast<const char*>(&constant.value), sizeof constant.value);
    if (const Function* known = program.known(key)) return *known;
    const Function& found = function(p.device.index, file + jit::text_of(options, constants) + " " + program.key, entry,
                                     [&] { return jit::attention_source(file, options, constants, p, program.mask); });
    program.keep(key, found);
    return found;
}

void side_by_side(const std::vector<std::function<void()>>& loads) {
    std::vector<std::future<void>> others;
    for (size_t n = 1; n < loads.size(); ++n) others.push_back(std::async(std::launch::async, loads[n]));
    if (!loads.empty()) loads[0]();
    for (std::future<void>& other : others) other.get();
}

std::string parameters_fit(const Problem& p, const Program& program, Pass pass, size_t fixed) {
    size_t bytes = fixed + std::max<size_t>(program.mask.operands.size(), 1) * sizeof(abi::MaskArray) +
                   std::max<size_t>(p.arrays.size(), 1) * (sizeof(abi::Array) + sizeof(abi::GatherSummary)) +
                   std::max<size_t>(p.scalars.size(), 1) * 8 + std::max<size_t>(program.mask.numbers.size(), 1) * 8;
    if (pass == Pass::backward) bytes += static_cast<size_t>(std::max(program.gradient_arrays, 1)) * sizeof(abi::Array);
    if (bytes <= kMaxParameterBytes) return "";
    return "mask and score_mod read " + std::to_string(p.arrays.size()) + " arrays and " +
           std::to_string(p.scalars.size()) + " scalars, which make " + std::to_string(bytes) +
           " bytes of kernel parameters; at most 4096 fit. Join arrays, or use fewer mask kinds";
}

}  // namespace tilewise::cuda
