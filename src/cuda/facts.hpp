// What this process knows of GPUs, compilers and caches, for `tilewise doctor`.
#pragma once

#include <string>

namespace tilewise::cuda {

std::string facts();  // "key: value" lines; never throws for want of a GPU

}  // namespace tilewise::cuda
