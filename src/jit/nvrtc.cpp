#include "nvrtc.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>

#include "core/env.hpp"
#include "core/error.hpp"
#include "folder.hpp"
#include "sha256.hpp"

namespace tilewise::jit {

using core::Error;
using core::Status;

// What we use of nvrtc.h, so that no CUDA header is needed to build.
struct NvrtcTable {
    using Program = void*;
    using Result = int;  // 0: success
    Result (*version)(int*, int*);
    Result (*num_archs)(int*);
    Result (*archs)(int*);
    const char* (*error_string)(Result);
    Result (*create)(Program*, const char* text, const char* name, int headers, const char* const* header_texts,
                     const char* const* header_names);
    Result (*destroy)(Program*);
    Result (*compile)(Program, int options, const char* const* option_texts);
    Result (*log_size)(Program, size_t*);
    Result (*log)(Program, char*);
    Result (*cubin_size)(Program, size_t*);
    Result (*cubin)(Program, char*);
    Result (*ptx_size)(Program, size_t*);
    Result (*ptx)(Program, char*);
};

namespace {

constexpr int kOldestMajor = 12;

// ---------------------------------------------------------------------------------------------------------------------
// Looking for it

struct Candidate {
    std::string path;  // real path, or a bare name that the loader resolves
    std::string found_in;
    int major = 0, minor = 0;  // as far as file names tell; 0: unknown
};

std::mutex search_mutex;
std::vector<std::string> search_path;

std::string join(std::string folder, const std::string& name) {
    folder += '/';
    return folder += name;
}

std::string real_path(const std::string& path) {
    const std::unique_ptr<char, void (*)(void*)> real(realpath(path.c_str(), nullptr), std::free);
    return real ? real.get() : "";
}

std::string folder_of(const std::string& path) {
    const size_t slash = path.find_last_of('/');
    return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::string file_of(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

constexpr const char* kLibrary = "libnvrtc.so";
constexpr const char* kBuiltins = "libnvrtc-builtins.so";

// "libnvrtc.so.12.9.86": 12, 9.
bool version_in(const std::string& file, const char* prefix, int& major, int& minor) {
    const size_t length = std::strlen(prefix);
    if (file.compare(0, length, prefix) != 0) return false;
    major = minor = 0;
    return std::sscanf(file.c_str() + length, ".%d.%d", &major, &minor) >= 1;
}

// The builtins beside the library, which carry the full version in their name where the library itself often does not.
std::vector<std::string> builtins_beside(const std::string& path, int wanted_major) {
    std::vector<std::string> found;
    const std::string folder = folder_of(path);
    for (const std::string& name : names_in(folder)) {
        int major = 0, minor = 0;
        if (!version_in(name, kBuiltins, major, minor)) continue;
        if (wanted_major == 0 || major == wanted_major) found.push_back(join(folder, name));
    }
    return found;
}

void add_file(std::vector<Candidate>& list, const std::string& path, const std::string& found_in) {
    Candidate candidate{real_path(path), found_in};
    if (candidate.path.empty()) return;
    if (std::any_of(list.begin(), list.end(), [&](const Candidate& c) { return c.path == candidate.path; })) return;
    int major = 0, minor = 0;
    if (version_in(file_of(candidate.path), kLibrary, major, minor) ||
        version_in(file_of(path), kLibrary, major, minor)) {
        candidate.major = major;
        candidate.minor = minor;
    }
    if (candidate.minor == 0) {
        for (const std::string& builtins : builtins_beside(candidate.path, candidate.major)) {
            if (version_in(file_of(builtins), kBuiltins, major, minor))
                candidate.major = major, candidate.minor = minor;
        }
    }
    list.push_back(std::move(candidate));
}

void add_folder(std::vector<Candidate>& list, const std::string& folder, const std::string& found_in) {
    for (const std::string& name : names_in(folder)) {
        // Not libnvrtc-builtins, libnvrtc.alt (the same compiler, slower) or libnvrtc_static.
        if (name.compare(0, std::strlen(kLibrary), kLibrary) == 0) add_file(list, join(folder, name), found_in);
    }
}

std::vector<std::string> loaded_libraries() {
    std::vector<std::string> found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            const std::string path = info->dlpi_name ? info->dlpi_name : "";
            if (file_of(path).compare(0, std::strlen(kLibrary), kLibrary) == 0)
                static_cast<std::vector<std::string>*>(data)->push_back(path);
            return 0;
        },
        &found);
    return found;
}

std::vector<Candidate> candidates(std::string& searched) {
    std::vector<Candidate> list;
    for (const std::string& path : loaded_libraries()) add_file(list, path, "loaded in this process");
    searched += "libraries of this process";
    {
        const std::lock_guard lock(search_mutex);
        for (const std::string& folder : search_path) {
            add_folder(list, folder, "the search path given to the library");
            searched += ", " + folder;
        }
    }
    // Where the loader would look: without asking it, LD_LIBRARY_PATH, ld.so.cache and RPATH cannot be known.
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
        void* handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
        if (handle == nullptr) continue;
        link_map* map = nullptr;
        if (dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr)
            add_file(list, map->l_name, "the loader's path");
        dlclose(handle);
    }
    searched += ", the loader's path";
    std::vector<std::string> toolkits;
    if (const std::string home = core::env("CUDA_HOME"); !home.empty()) toolkits.push_back(home);
    for (const std::string& name : names_in("/usr/local")) {
        if (name.compare(0, 4, "cuda") == 0) toolkits.push_back("/usr/local/" + name);
    }
    for (const std::string& toolkit : toolkits) {
        for (const char* sub : {"/lib64", "/targets/x86_64-linux/lib", "/targets/sbsa-linux/lib", "/lib"})
            add_folder(list, toolkit + sub, "CUDA toolkit " + toolkit);
        searched += ", " + toolkit;
    }
    return list;
}

// ---------------------------------------------------------------------------------------------------------------------
// What tells two builds of one version apart: the linker's build id, else the bytes of the file.

std::string note_of_loaded(const void* address) {
    struct Search {
        uintptr_t address;
        std::string id;
    } search{reinterpret_cast<uintptr_t>(address), ""};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto& wanted = *static_cast<Search*>(data);
            bool here = false;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const ElfW(Phdr) & header = info->dlpi_phdr[i];
                const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
                here |= header.p_type == PT_LOAD && wanted.address >= begin && wanted.address < begin + header.p_memsz;
            }
            if (!here) return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const ElfW(Phdr) & header = info->dlpi_phdr[i];
                if (header.p_type != PT_NOTE) continue;
                // NOLINTNEXTLINE(performance-no-int-to-ptr): the loader's addresses are integers
                const auto* at = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
                const char* end = at + header.p_memsz;
                while (at + sizeof(ElfW(Nhdr)) <= end) {
                    ElfW(Nhdr) note;
                    std::memcpy(&note, at, sizeof note);
                    const char* name = at + sizeof note;
                    const char* content = name + (note.n_namesz + 3) / 4 * 4;
                    at = content + (note.n_descsz + 3) / 4 * 4;
                    if (at > end) break;
                    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
                        static constexpr char kDigits[] = "0123456789abcdef";
                        for (unsigned b = 0; b < note.n_descsz; ++b) {
                            const auto byte = static_cast<unsigned char>(content[b]);
                            wanted.id += kDigits[byte >> 4];
                            wanted.id += kDigits[byte & 15];
                        }
                        return 1;
                    }
                }
            }
            return 1;
        },
        &search);
    return search.id;
}

std::string build_identity(const void* address, const std::string& path) {
    if (std::string id = note_of_loaded(address); !id.empty()) return id;
    std::ifstream file(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    return hex(sha256(bytes));
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Loading

struct NvrtcLoader {
    // Null, with the reason, if the file is not usable. What was loaded stays: the compiler keeps threads and state.
    static std::unique_ptr<Nvrtc> load(const Candidate& candidate, std::string& why_not) {
        // The compiler asks for its builtins by bare name and finds those already in the process; without this, only an
        // LD_LIBRARY_PATH would show it the ones beside it.
        for (const std::string& builtins : builtins_beside(candidate.path, candidate.major))
            dlopen(builtins.c_str(), RTLD_LAZY | RTLD_LOCAL);
        void* handle = dlopen(candidate.path.c_str(), RTLD_LAZY | RTLD_LOCAL);
        if (handle == nullptr) {
            const char* text = dlerror();  // NOLINT(concurrency-mt-unsafe)
            why_not = text ? text : "cannot be loaded";
            return nullptr;
        }
        auto table = std::make_unique<NvrtcTable>();
        const char* missing = nullptr;
        const auto bind = [&](auto& function, const char* symbol) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, symbol));
            if (function == nullptr && missing == nullptr) missing = symbol;
        };
        bind(table->version, "nvrtcVersion");
        bind(table->num_archs, "nvrtcGetNumSupportedArchs");
        bind(table->archs, "nvrtcGetSupportedArchs");
        bind(table->error_string, "nvrtcGetErrorString");
        bind(table->create, "nvrtcCreateProgram");
        bind(table->destroy, "nvrtcDestroyProgram");
        bind(table->compile, "nvrtcCompileProgram");
        bind(table->log_size, "nvrtcGetProgramLogSize");
        bind(table->log, "nvrtcGetProgramLog");
        bind(table->cubin_size, "nvrtcGetCUBINSize");
        bind(table->cubin, "nvrtcGetCUBIN");
        bind(table->ptx_size, "nvrtcGetPTXSize");
        bind(table->ptx, "nvrtcGetPTX");
        if (missing != nullptr) {
            why_not = std::string("it has no ") + missing;
            return nullptr;
        }
        auto nvrtc = std::make_unique<Nvrtc>();
        int count = 0;
        if (table->version(&nvrtc->major_, &nvrtc->minor_) != 0 || table->num_archs(&count) != 0 || count < 0) {
            why_not = "it does not tell its version";
            return nullptr;
        }
        nvrtc->archs_.resize(static_cast<size_t>(count));
        if (count > 0 && table->archs(nvrtc->archs_.data()) != 0) {
            why_not = "it does not tell its archs";
            return nullptr;
        }
        nvrtc->path_ = candidate.path;
        nvrtc->found_in_ = candidate.found_in;
        nvrtc->identity_ =
            nvrtc->name() + " " + build_identity(reinterpret_cast<const void*>(table->version), candidate.path);
        nvrtc->table_ = table.release();  // lives as long as the library stays loaded: for ever
        return nvrtc;
    }
};

namespace {

struct Loaded {
    std::unique_ptr<Nvrtc> nvrtc;  // null: not usable
    std::string why_not;
};
std::mutex load_mutex;

const Loaded& load_once(const Candidate& candidate) {
    static auto* loaded = new std::map<std::string, Loaded>;  // never destroyed: others may still compile at exit
    const auto found = loaded->find(candidate.path);
    if (found != loaded->end()) return found->second;
    Loaded entry;
    entry.nvrtc = NvrtcLoader::load(candidate, entry.why_not);
    return loaded->emplace(candidate.path, std::move(entry)).first->second;
}

std::string version_text(int driver_version) {
    return std::to_string(driver_version / 1000) + "." + std::to_string(driver_version % 1000 / 10);
}

bool knows(const Nvrtc& nvrtc, const Arch* gpu) {
    return gpu == nullptr ||
           std::find(nvrtc.archs().begin(), nvrtc.archs().end(), gpu->number()) != nvrtc.archs().end();
}

}  // namespace

void set_search_path(std::vector<std::string> directories) {
    const std::lock_guard lock(search_mutex);
    search_path = std::move(directories);
}

std::string Nvrtc::name() const { return "NVRTC " + std::to_string(major_) + "." + std::to_string(minor_); }

const Nvrtc* find_nvrtc(int driver_version, const Arch* gpu, std::string* searched) {
    const std::lock_guard lock(load_mutex);
    const int driver_major = driver_version == 0 ? 0 : driver_version / 1000;
    if (const std::string forced = core::env("TILEWISE_NVRTC"); !forced.empty()) {
        std::vector<Candidate> list;
        add_file(list, forced, "TILEWISE_NVRTC");
        const std::string allowed = "the path of a libnvrtc.so of CUDA 12 or newer";
        if (list.empty()) core::refuse("TILEWISE_NVRTC", "\"" + forced + "\", which is not there", allowed);
        const Loaded& loaded = load_once(list[0]);
        if (!loaded.nvrtc) core::refuse("TILEWISE_NVRTC", "\"" + forced + "\" (" + loaded.why_not + ")", allowed);
        const Nvrtc& nvrtc = *loaded.nvrtc;
        if (driver_major != 0 && nvrtc.major() > driver_major) {
            core::refuse("TILEWISE_NVRTC", "\"" + forced + "\", " + nvrtc.name(),
                         "CUDA " + std::to_string(driver_major) + " or older, which the driver (CUDA " +
                             version_text(driver_version) + ") can run",
                         "Unset it, or update the driver.");
        }
        return &nvrtc;
    }

    std::string places;
    std::vector<Candidate> list = candidates(places);
    // Newest first as far as names tell; where two are the same, the one that was found first.
    std::stable_sort(list.begin(), list.end(), [](const Candidate& a, const Candidate& b) {
        return a.major != b.major ? a.major > b.major : a.minor > b.minor;
    });
    const Nvrtc* best = nullptr;
    std::string notes;
    for (const Candidate& candidate : list) {
        const auto note = [&](const std::string& text) { notes += "; " + candidate.path + ": " + text; };
        const auto allowed = [&](int major) {
            if (driver_major != 0 && major > driver_major) {
                note("CUDA " + std::to_string(major) + ", newer than the driver's CUDA " +
                     version_text(driver_version));
                return false;
            }
            if (major < kOldestMajor) note("CUDA " + std::to_string(major) + ", older than CUDA 12");
            return major >= kOldestMajor;
        };
        if (candidate.major != 0 && !allowed(candidate.major)) continue;
        const Loaded& loaded = load_once(candidate);
        if (!loaded.nvrtc) {
            note(loaded.why_not);
            continue;
        }
        const Nvrtc& nvrtc = *loaded.nvrtc;
        if (candidate.major == 0 && !allowed(nvrtc.major())) continue;
        const auto rank = [&](const Nvrtc& n) { return (knows(n, gpu) ? 1000000 : 0) + n.major() * 1000 + n.minor(); };
        if (best == nullptr || rank(nvrtc) > rank(*best)) best = &nvrtc;
        // The rest of a sorted list is no newer. (Of unknown version are those at its end only.)
        if (knows(*best, gpu) && candidate.major != 0) break;
    }
    if (searched != nullptr) *searched = places + notes;
    return best;
}

const Nvrtc& require_nvrtc(int driver_version, const Arch* gpu) {
    std::string searched;
    if (const Nvrtc* nvrtc = find_nvrtc(driver_version, gpu, &searched)) return *nvrtc;
    const bool old = driver_version != 0 && driver_version < 13000;
    throw Error(Status::unsupported,
                std::string("NVRTC, which compiles GPU kernels: found none of CUDA 12") + (old ? "" : " or newer") +
                    (driver_version ? " for a driver of CUDA " + version_text(driver_version) : "") +
                    ". Install it: pip install " + (old ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc") +
                    "; or name its library in TILEWISE_NVRTC. Searched: " + searched + ".");
}

Image Nvrtc::compile(const Source& source, const Target& target) const {
    std::vector<const char*> texts, names, options;
    for (const Header& header : source.headers) {
        texts.push_back(header.text.c_str());
        names.push_back(header.name.c_str());
    }
    const std::string arch = "--gpu-architecture=" + (target.ptx ? target.arch.virtual_name() : target.arch.name());
    // Of files only the given ones: what lies in the current folder must not get in. The compiler's own cache (12.9)
    // would be a second one beside ours.
    std::vector<std::string> given{arch, "-std=c++17", "-default-device", "-no-source-include"};
    if (major_ > 12 || minor_ >= 9) given.emplace_back("-no-cache");
    // Registers and spills, into the log.
    if (!target.ptx) given.emplace_back("--ptxas-options=-v");
    given.insert(given.end(), source.options.begin(), source.options.end());
    for (const std::string& option : given) options.push_back(option.c_str());

    const auto check = [&](int result, const char* what) {
        if (result == 0) return;
        throw Error(Status::internal, source.name + " for " + arch.substr(19) + ": " + what + " failed in " + name() +
                                          " (" + path_ + "): " + table_->error_string(result));
    };
    NvrtcTable::Program program = nullptr;
    check(table_->create(&program, source.text.c_str(), source.name.c_str(), static_cast<int>(texts.size()),
                         texts.data(), names.data()),
          "making a program");
    const auto destroy = [this](NvrtcTable::Program* p) { table_->destroy(p); };
    const std::unique_ptr<NvrtcTable::Program, decltype(destroy)> owner(&program, destroy);

    const int result = table_->compile(program, static_cast<int>(options.size()), options.data());
    Image image;
    size_t size = 0;
    const auto read = [&](auto size_of, auto content_of, std::string& text) {
        if (size_of(program, &size) != 0) return false;
        text.resize(size);
        return size == 0 || content_of(program, text.data()) == 0;
    };
    if (!read(table_->log_size, table_->log, image.log)) image.log.clear();
    while (!image.log.empty() && (image.log.back() == '\0' || image.log.back() == '\n')) image.log.pop_back();
    if (result != 0) {
        throw Error(Status::internal, source.name + " does not compile for " + arch.substr(19) + " with " + name() +
                                          " (" + path_ + "): " + table_->error_string(result) + "\n" + image.log);
    }
    image.is_ptx = target.ptx;
    const bool got = target.ptx ? read(table_->ptx_size, table_->ptx, image.bytes)
                                : read(table_->cubin_size, table_->cubin, image.bytes);
    check(got && !image.bytes.empty() ? 0 : -1, "reading the code");
    image.about = source.name + " " + (target.ptx ? target.arch.virtual_name() : target.arch.name()) + " " + name();
    return image;
}

}  // namespace tilewise::jit
