// Host memory for the time of one call.
#pragma once

#include <cstddef>

namespace tilewise::cpu {

// 64-byte aligned, undefined contents. Throws Error (out of memory). A thread keeps the last block that it gave back,
// up to 64 MiB, until it ends.
void* take_workspace(size_t bytes);
void give_workspace(void* memory);

}  // namespace tilewise::cpu
