#include "env.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <map>
#include <sstream>

#include "error.hpp"

namespace tilewise::core {

const std::vector<EnvVariable>& env_variables() {
    static const std::vector<EnvVariable> table{
        {"TILEWISE_CACHE_DIR",
         "folder of compiled GPU kernels; default: $XDG_CACHE_HOME/tilewise or ~/.cache/tilewise"},
        {"TILEWISE_CACHE_MAX_MB", "its largest size in MiB, default 1024; 0: no cache"},
        {"TILEWISE_CONFIG", "family:name=value,...;... : constants of GPU kernels instead of the tuned ones"},
        {"TILEWISE_CPU_ISA", "scalar, avx2 or avx512: forces the instruction set of the CPU kernels"},
        {"TILEWISE_CUDA_DRIVER", "library to load as the CUDA driver; default: the one of the system"},
        {"TILEWISE_GPU_ARCH", "an arch older than the GPU's, like 75: kernels for it, as PTX, to check them"},
        {"TILEWISE_NVRTC",
         "library to load as NVRTC, CUDA's run-time compiler; default: the newest that the driver takes"},
        {"TILEWISE_PACKS", "folders of kernels compiled beforehand, joined by colons"},
        {"TILEWISE_NUM_THREADS", "threads of the CPU kernels; default: as the OpenMP run time of the process"},
        {"TILEWISE_VALIDATE", "1: as validate=True in every call: lengths in device memory are checked, with a wait"},
        {"TILEWISE_VERBOSE",
         "dispatch: one line per plan, with the reason of every implementation that declined; jit: one "
         "per compiled GPU kernel"},
        {"CUDA_HOME", "a CUDA toolkit, where NVRTC may lie"},
        {"HOME", "for the folder of compiled GPU kernels"},
        {"XDG_CACHE_HOME", "for the folder of compiled GPU kernels"},
    };
    return table;
}

std::string env(const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here calls setenv
    return value ? value : "";
}

namespace {

using Constants = std::map<std::string, int>;  // by "family:name"

// Every constant that some kernel asks tuned() for.
constexpr const char* kTunable[] = {
    "fwd_simt:kColumns", "fwd_simt:kBlocks",   "bwd_simt:kColumns",     "bwd_simt:kBlocks",      "fwd_mma:kWarps",
    "fwd_mma:kMTiles",   "fwd_mma:kTileKV",    "fwd_mma:kBlocks",       "fwd_mma:kQInRegisters", "fwd_mma:kReadAhead",
    "bwd_mma:kWarps",    "bwd_mma:kBlocks",    "bwd_mma:kTileQ",        "bwd_mma:kTileKV",       "bwd_mma:kStages",
    "bwd_mma:kWarpsQ",   "bwd_mma:kWarpsKeys", "bwd_mma:kWarpsQueries", "bwd_mma:kReadAhead",    "fwd_sm90:kConsumers",
    "fwd_sm90:kTileKV",  "fwd_sm90:kKStages",  "fwd_sm90:kVStages",     "fwd_sm90:kQBuffers",    "fwd_sm90:kDelays",
    "fwd_sm90:kInTurn",  "fwd_sm90:kSigns"};

Constants parse_config(const std::string& text) {
    const auto fail = [&](const std::string& part) {
        refuse("TILEWISE_CONFIG", "\"" + part + "\" in \"" + text + "\"",
               "family:name=value,name=value, families joined by ;, values whole numbers");
    };
    Constants all;
    std::istringstream families(text);
    for (std::string family; std::getline(families, family, ';');) {
        const size_t colon = family.find(':');
        if (colon == std::string::npos) fail(family);
        std::istringstream constants(family.substr(colon + 1));
        for (std::string constant; std::getline(constants, constant, ',');) {
            const size_t equals = constant.find('=');
            int value = 0;
            const char* const end = constant.data() + constant.size();
            if (equals == std::string::npos) fail(constant);
            const auto [at, error] = std::from_chars(constant.data() + equals + 1, end, value);
            if (error != std::errc() || at != end) fail(constant);
            const std::string name = family.substr(0, colon + 1) + constant.substr(0, equals);
            if (std::find(std::begin(kTunable), std::end(kTunable), name) == std::end(kTunable)) {
                std::string names;
                for (const char* known : kTunable) names += (names.empty() ? "" : ", ") + std::string(known);
                refuse("TILEWISE_CONFIG", name, names);
            }
            all[name] = value;
        }
    }
    return all;
}

}  // namespace

int tuned(const std::string& family, const std::string& name, int fallback) {
    static const Constants constants = parse_config(env("TILEWISE_CONFIG"));
    if (constants.empty()) return fallback;  // as nearly always, and every call asks
    const auto found = constants.find(family + ":" + name);
    return found == constants.end() ? fallback : found->second;
}

}  // namespace tilewise::core
