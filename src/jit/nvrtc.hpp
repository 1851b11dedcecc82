// NVRTC, CUDA's run-time compiler, found on the machine and loaded when first needed. nvrtc.cpp alone knows its names.
#pragma once

#include <string>
#include <vector>

#include "arch.hpp"
#include "image.hpp"
#include "source.hpp"

namespace tilewise::jit {

// Folders that hold libnvrtc, beside those found without help: Python passes the lib folders of pip's packages.
void set_search_path(std::vector<std::string> directories);

class Nvrtc {
public:
    [[nodiscard]] int major() const { return major_; }
    [[nodiscard]] int minor() const { return minor_; }
    [[nodiscard]] std::string name() const;                          // "NVRTC 13.0"
    [[nodiscard]] const std::string& path() const { return path_; }  // file it was loaded from
    [[nodiscard]] const std::string& found_in() const { return found_in_; }
    [[nodiscard]] const std::string& identity() const { return identity_; }  // tells builds of one version apart
    [[nodiscard]] const std::vector<int>& archs() const { return archs_; }   // 75, 80, ..., 121

    // Throws Error with the compiler's log. Safe to call from several threads.
    [[nodiscard]] Image compile(const Source& source, const Target& target) const;

private:
    friend struct NvrtcLoader;
    int major_ = 0, minor_ = 0;
    std::string path_, found_in_, identity_;
    std::vector<int> archs_;
    const struct NvrtcTable* table_ = nullptr;
};

// The newest one whose CUDA major is not above the driver's (13020 is CUDA 13.2; 0: no driver, any) and, if a GPU is
// named and there is a choice, that knows it. Null if there is none; `searched` then says where it was looked for and
// what was wrong with those found. Throws Error only if TILEWISE_NVRTC names something unusable.
const Nvrtc* find_nvrtc(int driver_version, const Arch* gpu = nullptr, std::string* searched = nullptr);

// find_nvrtc, or an Error that says what to install.
const Nvrtc& require_nvrtc(int driver_version, const Arch* gpu = nullptr);

}  // namespace tilewise::jit
