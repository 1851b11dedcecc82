// The ordered list of implementations: best first, the reference last. The only file that sees the backends.
#include <string>
#include <utility>
#include <vector>

#include "core/registry.hpp"
#include "cpu/cpu_tiled.hpp"
#include "cpu/isa.hpp"
#include "cpu/parallel.hpp"
#include "cpu/reference.hpp"
#include "cpu/workspace.hpp"
#include "cuda/compile_ahead.hpp"
#include "cuda/device.hpp"
#include "cuda/facts.hpp"
#include "cuda/mma.hpp"
#include "cuda/simt.hpp"
#include "cuda/sm90.hpp"
#include "jit/nvrtc.hpp"

namespace tilewise::core {

std::span<const Implementation* const> implementations() {
    static constexpr const Implementation* kList[] = {
        &cuda::kFwdSm90, &cuda::kFwdMma,  &cuda::kFwdSimt,  &cuda::kBwdMma,
        &cuda::kBwdSimt, &cpu::kCpuTiled, &cpu::kReference,
    };
    return kList;
}

void set_parallel_for(tilewise_parallel_for function, void* user, int32_t count) {
    cpu::set_executor(function, user, count);
}
void set_num_threads(int32_t count) { cpu::set_num_threads(count); }
int32_t num_threads() { return cpu::max_threads(); }

std::string backend_facts() {
    std::string text = std::string("cpu isa: ") + cpu::name(cpu::current_isa()) + " (available:";
    for (const cpu::Isa isa : {cpu::Isa::avx512, cpu::Isa::avx2, cpu::Isa::scalar}) {
        if (cpu::available(isa)) text += std::string(" ") + cpu::name(isa);
    }
    return text + ")\ncpu threads: " + std::to_string(cpu::max_threads()) + "\ncpu executor: " + cpu::executor_name() +
           "\n" + cuda::facts();
}

DeviceMemory allocate(Device device, size_t bytes, void* stream) {
    if (device.is_cuda()) {
        return {cuda::allocate(device.index, bytes, stream),
                [](Device on, void* memory, void* of) { cuda::release(on.index, memory, of); }};
    }
    return {cpu::take_workspace(bytes), [](Device, void* memory, void*) { cpu::give_workspace(memory); }};
}

void set_nvrtc_path(std::vector<std::string> directories) { jit::set_search_path(std::move(directories)); }
std::string compile_kernels(const Problem& problem, Pass pass, const std::string& arch, const std::string& directory) {
    return cuda::compile_ahead(problem, pass, arch, directory);
}
std::string list_kernels(const std::string& directory, bool verify) { return cuda::list_compiled(directory, verify); }
uint64_t clear_kernels(const std::string& directory) { return cuda::clear_compiled(directory); }

void attn_probs(const Problem& problem, const Rows3& lse, std::span<const int64_t> rows, std::span<const int64_t> heads,
                const Array& out) {
    cpu::attn_probs(problem, lse, rows, heads, out);
}

}  // namespace tilewise::core
