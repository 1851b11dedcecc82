// The ordered list of implementations: best first, the reference last. The only file that sees the backends.
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/registry.hpp"
#include "cpu/cpu_tiled.hpp"
#include "cpu/isa.hpp"
#include "cpu/parallel.hpp"
#include "cpu/reference.hpp"
#include "cuda/compile_ahead.hpp"
#include "cuda/device.hpp"
#include "cuda/facts.hpp"
#include "cuda/simt.hpp"
#include "jit/nvrtc.hpp"

namespace tilewise::core {
namespace {

// Host memory that remembers its size in front of itself, for the alignment's sake a whole cache line.
struct alignas(64) Block {
    size_t bytes;
};

// The block that this thread freed last, for its next call: touching fresh memory is a page fault per 4 KiB, which is
// more than all the work of a small problem.
struct LastFreed {
    static constexpr size_t kMaxBytes = size_t{64} << 20;
    Block* block = nullptr;

    LastFreed() = default;
    LastFreed(const LastFreed&) = delete;
    LastFreed& operator=(const LastFreed&) = delete;
    ~LastFreed() { std::free(std::exchange(block, nullptr)); }
};
thread_local LastFreed last_freed;

Block* take_block(size_t bytes) {
    Block* const kept = std::exchange(last_freed.block, nullptr);
    if (kept && kept->bytes >= bytes) return kept;
    std::free(kept);
    bytes = (bytes + sizeof(Block) - 1) / sizeof(Block) * sizeof(Block);
    void* const memory = std::aligned_alloc(alignof(Block), sizeof(Block) + bytes);
    return memory ? new (memory) Block{bytes} : nullptr;
}

void give_block(Block* block) {
    if (block->bytes <= LastFreed::kMaxBytes && (!last_freed.block || last_freed.block->bytes < block->bytes))
        std::swap(block, last_freed.block);
    std::free(block);
}

}  // namespace

std::span<const Implementation* const> implementations() {
    static constexpr const Implementation* kList[] = {
        &cuda::kFwdSimt,
        &cuda::kBwdSimt,
        &cpu::kCpuTiled,
        &cpu::kReference,
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
    Block* const block = take_block(bytes);
    if (block == nullptr) {
        throw Error(Status::out_of_memory, "workspace: " + std::to_string(bytes) +
                                               " bytes could not be allocated. Free memory, or split the batch.");
    }
    return {block + 1, [](Device, void* memory, void*) { give_block(static_cast<Block*>(memory) - 1); }};
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
