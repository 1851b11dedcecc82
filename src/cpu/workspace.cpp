#include "workspace.hpp"

#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace tilewise::cpu {
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

void* take_workspace(size_t bytes) {
    Block* const block = take_block(bytes);
    if (block == nullptr) {
        throw core::Error(
            core::Status::out_of_memory,
            "workspace: " + std::to_string(bytes) + " bytes could not be allocated. Free memory, or split the batch.");
    }
    return block + 1;
}

void give_workspace(void* memory) { give_block(static_cast<Block*>(memory) - 1); }

}  // namespace tilewise::cpu
