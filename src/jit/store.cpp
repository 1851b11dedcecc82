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
    if (const Arch arch = kernel_arch(gpu_major, gpu_minor); arch.number() != gpu.number()) {
        // As a GPU that its compiler does not know runs them: from PTX, which the driver compiles.
        const Nvrtc& nvrtc = require_nvrtc(driver_version, &arch);
        const Target target{arch, true};
        return user_cache().get_or_compile(key_material(source, target, nvrtc.identity()),
                                           [&] { return compile(nvrtc, source, target); });
    }
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

namespace {

Compiled compile_for(const Nvrtc& nvrtc, const Source& source, const Target& target, const std::string& directory) {
    // By which compiler code of a pack was made does not matter to whoever runs it.
    const bool pack = !directory.empty();
    const Cache cache = pack ? Cache(directory, UINT64_MAX) : user_cache();
    const std::string material = key_material(source, target, pack ? "" : nvrtc.identity());
    Compiled result;
    result.path = cache.directory() + "/" + Cache::file_name(material);
    result.from_cache = true;
    const auto now = [&] {
        result.from_cache = false;
        const auto start = std::chrono::steady_clock::now();
        Image image = compile(nvrtc, source, target);
        result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        return image;
    };
    result.image = cache.get_or_compile(material, now);
    // But who makes a pack gets what his compiler gives, and is told what it says.
    if (result.from_cache && !result.image.about.ends_with(" " + nvrtc.name())) {
        result.image = now();
        cache.publish(material, result.image);
    }
    // Unlike a cache, a pack may be for all users of a machine.
    if (pack ? chmod(result.path.c_str(), 0644) != 0 : !cache.find(material)) {
        throw core::Error(core::Status::invalid_argument,
                          (pack ? "pack: " : "cache: ") + cache.directory() +
                              (cache.max_bytes() == 0 ? " is switched off; allowed: TILEWISE_CACHE_MAX_MB above 0."
                                                      : " does not take files; allowed: a folder that can be "
                                                        "written to, on a disk with room."));
    }
    return result;
}

}  // namespace

Compiled compile_ahead(const Source& source, const Arch& gpu, bool ptx, int driver_version,
                       const std::string& directory) {
    const Arch arch{gpu.major, gpu.minor, source.arch_specific};
    const Nvrtc& nvrtc = require_nvrtc(driver_version, &arch);
    Target target = choose_target(arch, nvrtc.archs(), nvrtc.name() + " (" + nvrtc.path() + ")");
    target.ptx |= ptx;
    return compile_for(nvrtc, source, target, directory);
}

}  // namespace tilewise::jit
