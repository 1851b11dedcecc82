#include "folder.hpp"

#include <dirent.h>

#include <algorithm>
#include <memory>

namespace tilewise::jit {

std::vector<std::string> names_in(const std::string& directory) {
    std::vector<std::string> names;
    const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(directory.c_str()), closedir);
    if (!dir) return names;
    while (const dirent* entry = readdir(dir.get()))
        names.emplace_back(entry->d_name);  // NOLINT(concurrency-mt-unsafe)
    std::sort(names.begin(), names.end());
    return names;
}

}  // namespace tilewise::jit
