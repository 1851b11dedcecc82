#include "store.hpp"

#include <sys/stat.h>

#include <chrono>
#include <cstdio>
#include <optional>

#include "cache.hpp"
#include "core/env.hpp"
#include "core/error.hpp"
#include "nvrtc.hpp"

namespace tilewise::jit {
namespace {

// Packs hold what some machine compiled: by which compiler does not matter to whoever uses it.
std::optional<Image> find_in_packs(const std::vector<Cache>& folders, const Source& source, const Arch& gpu) {
    std::vector<Target> targets{{gpu, false}};
    if (!source.arch_specific) {
        // Machine code runs on later GPUs of the same major version, PTX on all later ones.
        for (int minor = gpu.minor - 1; minor >= 0; --minor) targets.push_back({{gpu.major, minor, false}, false});
        for (int number = gpu.number(); number >= 70; --number)
            targets.push_back({{number / 10, number % 10, false}, true});
    }
    for (const Target& target : targets) {
        const std::string material = key_material(source, target, "");
        for (const Cache& folder : folders) {
            if (std::optional<Image> image = folder.find(material)) return image;
        }
    }
    return std::nullopt;
}

Image compile(const Nvrtc& nvrtc, const Source& source, const Target& target) {
    const auto start = std::chrono::steady_clock::now();
    Image image = nvrtc.compile(source, target);
    if (core::env("TILEWISE_VERBOSE").find("jit") != std::string::npos) {
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        std::fprintf(stderr, "tilewise: compiled %s in %.2f s, %zu bytes%s%s\n", image.about.c_str(), seconds.count(),
                     image.bytes.size(), image.log.empty() ? "" : "\n", image.log.c_str());
    }
    return image;
}

}  // namespace

Image obtain(const Source& source, int gpu_major, int gpu_minor, int driver_version) {
    const Arch gpu{gpu_major, gpu_minor, source.arch_specific};
    const std::vector<Cache> folders = packs();
    if (!folders.empty()) {
        if (std::optional<Image> image = find_in_packs(folders, source, gpu)) return std::move(*image);
    }
    std::string searched;
    const Nvrtc* nvrtc = find_nvrtc(driver_version, &gpu, &searched);
    if (nvrtc == nullptr && !folders.empty()) {
        std::string text = "kernel " + source.name + " for " + gpu.name() + ": not in a pack (";
        for (const Cache& folder : folders) text += (&folder == folders.data() ? "" : ", ") + folder.directory();
        throw core::Error(
            core::Status::unsupported,
            text + "; wanted " + Cache::file_name(key_material(source, {gpu, false}, "")) +
                "), and no NVRTC is there to compile it. Packs fit the version of the library that made "
                "them. Or: pip install " +
                (driver_version != 0 && driver_version < 13000 ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc") +
                ". Searched: " + searched + ".");
    }
    if (nvrtc == nullptr) nvrtc = &require_nvrtc(driver_version, &gpu);
    const Target target = choose_target(gpu, nvrtc->archs(), nvrtc->name() + " (" + nvrtc->path() + ")");
    return user_cache().get_or_compile(key_material(source, target, nvrtc->identity()),
                                       [&] { return compile(*nvrtc, source, target); });
}

Image compile_into_pack(const Source& source, const Target& target, const std::string& directory) {
    Image image = compile(require_nvrtc(0, &target.arch), source, target);
    const std::string material = key_material(source, target, "");
    // Unlike a cache, a pack may be for all users of a machine.
    if (!Cache(directory, UINT64_MAX).publish(material, image) ||
        chmod((directory + "/" + Cache::file_name(material)).c_str(), 0644) != 0) {
        throw core::Error(core::Status::invalid_argument,
                          "pack: " + directory + " does not take files; allowed: a folder that can be written to.");
    }
    return image;
}

}  // namespace tilewise::jit
