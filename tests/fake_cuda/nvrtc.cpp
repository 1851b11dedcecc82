// libnvrtc.so.13 without NVIDIA: compiles a kernel's text for the CPU with device.hpp in front of it. The "cubin" is a
// shared object with a header (image.hpp), which the fake driver loads.
//   TILEWISE_FAKE_CXX        compiler; default: the one that built this library
//   TILEWISE_FAKE_CXXFLAGS   more flags, at the end: -g, -fsanitize=undefined -fsanitize-undefined-trap-on-error
//   TILEWISE_FAKE_KEEP       a folder that keeps the sources, to look at or to debug with
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "calls.hpp"
#include "image.hpp"

#ifndef TILEWISE_FAKE_CXX_DEFAULT
#define TILEWISE_FAKE_CXX_DEFAULT "c++"
#endif

extern char** environ;

namespace {

namespace fs = std::filesystem;

enum : int {
    kSuccess = 0,
    kOutOfMemory = 1,
    kInvalidInput = 3,
    kInvalidProgram = 4,
    kInvalidOption = 5,
    kCompilation = 6,
    kNoLoweredNames = 9,
    kNotValidName = 10,
    kInternalError = 11,
};

constexpr int kArchs[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Program {
    std::string source, name, log, cubin, ptx;
    std::vector<std::pair<std::string, std::string>> headers;
    std::vector<std::string> names;
};

std::string environment(const char* name, const char* otherwise) {
    const char* text = std::getenv(name);
    return text && *text ? text : otherwise;
}

bool read_file(const fs::path& path, std::string& text) {
    std::ifstream file(path, std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(file), {});
    return !file.bad();
}
bool write_file(const fs::path& path, std::string_view text) {
    std::error_code error;
    fs::create_directories(path.parent_path(), error);
    std::ofstream file(path, std::ios::binary);
    file << text;
    return static_cast<bool>(file.flush());
}

// A folder that goes away again.
class Folder {
public:
    Folder() : keep_(std::getenv("TILEWISE_FAKE_KEEP")) {
        std::string path = environment("TMPDIR", "/tmp") + "/tilewise-nvrtc-XXXXXX";
        if (keep_) {
            std::error_code error;
            fs::create_directories(keep_, error);
            path = std::string(keep_) + "/kernel-XXXXXX";
        }
        if (mkdtemp(path.data())) path_ = path;
    }
    ~Folder() {
        std::error_code error;
        if (!keep_ && !path_.empty()) fs::remove_all(path_, error);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    const fs::path& path() const { return path_; }

private:
    const char* keep_;
    fs::path path_;
};

bool run_compiler(const std::vector<std::string>& arguments, const fs::path& log) {
    std::vector<char*> argv, env;
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    std::string locale = "LC_ALL=C";
    for (char** e = environ; *e; ++e) {  // a preloaded sanitizer is for the caller and not for the compiler
        if (std::strncmp(*e, "LD_PRELOAD=", 11) != 0 && std::strncmp(*e, "LC_ALL=", 7) != 0) env.push_back(*e);
    }
    env.push_back(locale.data());
    env.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t child = 0;
    const int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), env.data());
    posix_spawn_file_actions_destroy(&actions);
    if (error) {
        write_file(log, "cannot run " + arguments[0] + ": " + std::strerror(error) + "\n");
        return false;
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) return false;
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string without_comments(const std::string& text) {  // nor strings: only names and braces matter here
    std::string result = text;
    const auto blank = [&](size_t from, size_t to) {
        for (size_t i = from; i < to && i < result.size(); ++i) {
            if (result[i] != '\n') result[i] = ' ';
        }
    };
    for (size_t i = 0; i + 1 < text.size();) {
        size_t end;
        if (text.compare(i, 2, "//") == 0) end = std::min(text.find('\n', i), text.size());
        else if (text.compare(i, 2, "/*") == 0) end = std::min(text.find("*/", i + 2), text.size() - 2) + 2;
        else if (text[i] == '"') {
            for (end = i + 1; end < text.size() && text[end] != '"' && text[end] != '\n'; ++end)
                end += text[end] == '\\';
            ++end;
        } else {
            ++i;
            continue;
        }
        blank(i, end);
        i = end;
    }
    return result;
}

// Names of ordinary extern "C" __global__ functions outside namespaces. (TW_KERNEL exports itself.)
std::vector<std::string> global_kernels(const std::string& source) {
    const std::string text = without_comments(source);
    std::vector<std::string> names;
    int depth = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '{') {
            // The brace of extern "C" { does not count; its string is blank by now.
            size_t j = i;
            while (j > 0 && std::isspace(static_cast<unsigned char>(text[j - 1]))) --j;
            depth += j >= 6 && text.compare(j - 6, 6, "extern") == 0 ? 0 : 1;
        }
        if (text[i] == '}') depth = std::max(0, depth - 1);
        if (depth || text.compare(i, 10, "__global__") != 0) continue;
        size_t p = i + 10;
        for (std::string word; p < text.size();) {
            while (p < text.size() && std::isspace(static_cast<unsigned char>(text[p]))) ++p;
            const size_t start = p;
            while (p < text.size() && (std::isalnum(static_cast<unsigned char>(text[p])) || text[p] == '_')) ++p;
            if (p == start) break;
            word = text.substr(start, p - start);
            while (p < text.size() && std::isspace(static_cast<unsigned char>(text[p]))) ++p;
            if (p >= text.size() || text[p] != '(') continue;
            if (word == "__launch_bounds__" || word == "__maxnreg__" || word == "__cluster_dims__") {
                for (int open = 0; p < text.size(); ++p) {
                    open += text[p] == '(' ? 1 : text[p] == ')' ? -1 : 0;
                    if (open == 0) break;
                }
                ++p;
                continue;
            }
            const size_t line = source.rfind('\n', i) == std::string::npos ? 0 : source.rfind('\n', i) + 1;
            const bool extern_c = source.find("extern \"C\"", line > 200 ? line - 200 : 0) < i;
            if (extern_c && std::find(names.begin(), names.end(), word) == names.end()) names.push_back(word);
            break;
        }
    }
    return names;
}

struct Options {
    unsigned arch = 75;
    char suffix = 0;
    bool ptx_only = true;
    std::vector<std::string> flags;
};

// False, with the log, for what NVRTC would not know either.
bool parse(int n, const char* const* given, Options& options, std::string& log) {
    const auto refuse = [&](const std::string& option) {
        log += "nvrtc: error: unrecognized option " + option + "\n";
        return false;
    };
    for (int i = 0; i < n; ++i) {
        if (!given[i]) return refuse("(null)");
        std::string option = given[i], value;
        const bool takes_next = option == "-arch" || option == "--gpu-architecture" || option == "-D" ||
                                option == "-I" || option == "-U" || option == "--define-macro" ||
                                option == "--include-path" || option == "-std" || option == "--std" ||
                                option == "--maxrregcount" || option == "-maxrregcount";
        if (takes_next && option.find('=') == std::string::npos) {
            ++i;
            if (i >= n || !given[i]) return refuse(option);
            value = given[i];
        } else if (const size_t equals = option.find('=');
                   equals != std::string::npos && option.compare(0, 2, "-D") != 0) {
            value = option.substr(equals + 1);
            option.resize(equals);
        } else if (option.size() > 2 && option[0] == '-' &&
                   (option[1] == 'D' || option[1] == 'I' || option[1] == 'U')) {
            value = option.substr(2);
            option.resize(2);
        }
        if (option == "-arch" || option == "--gpu-architecture" || option == "--gpu-arch") {
            std::string number = value;
            if (number.compare(0, 3, "sm_") == 0) number.erase(0, 3), options.ptx_only = false;
            else if (number.compare(0, 8, "compute_") == 0) number.erase(0, 8), options.ptx_only = true;
            else number.clear();
            options.suffix = 0;
            if (!number.empty() && (number.back() == 'a' || number.back() == 'f')) {
                options.suffix = number.back();
                number.pop_back();
            }
            const int arch = std::atoi(number.c_str());
            if (std::find(std::begin(kArchs), std::end(kArchs), arch) == std::end(kArchs)) {
                log += "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
                return false;
            }
            options.arch = static_cast<unsigned>(arch);
        } else if (option == "-D" || option == "--define-macro") {
            options.flags.push_back("-D" + value);
        } else if (option == "-U") {
            options.flags.push_back("-U" + value);
        } else if (option == "-I" || option == "--include-path") {
            options.flags.push_back("-I" + value);
        } else if (option == "-std" || option == "--std") {
            if (value != "c++11" && value != "c++14" && value != "c++17" && value != "c++20" && value != "c++23") {
                return refuse(given[i]);
            }
        } else {
            // Without meaning on a CPU
            constexpr std::string_view known[] = {"--use_fast_math",
                                                  "-use_fast_math",
                                                  "--fmad",
                                                  "-fmad",
                                                  "--ftz",
                                                  "-ftz",
                                                  "--prec-sqrt",
                                                  "-prec-sqrt",
                                                  "--prec-div",
                                                  "-prec-div",
                                                  "--extra-device-vectorization",
                                                  "-extra-device-vectorization",
                                                  "--maxrregcount",
                                                  "-maxrregcount",
                                                  "--generate-line-info",
                                                  "-lineinfo",
                                                  "--device-debug",
                                                  "-G",
                                                  "--dopt",
                                                  "-dopt",
                                                  "--device-as-default-execution-space",
                                                  "-default-device",
                                                  "--disable-warnings",
                                                  "-w",
                                                  "--relocatable-device-code",
                                                  "-rdc",
                                                  "--device-c",
                                                  "-dc",
                                                  "--device-w",
                                                  "-dw",
                                                  "--restrict",
                                                  "-restrict",
                                                  "--ptxas-options",
                                                  "-Xptxas",
                                                  "--split-compile",
                                                  "-split-compile",
                                                  "--minimal",
                                                  "-minimal",
                                                  "--no-cache",
                                                  "-no-cache",
                                                  "--no-source-include",
                                                  "-no-source-include",
                                                  "--diag-suppress",
                                                  "-diag-suppress",
                                                  "--diag-error",
                                                  "-diag-error",
                                                  "--diag-warn",
                                                  "-diag-warn",
                                                  "--display-error-number",
                                                  "-err-no",
                                                  "--no-display-error-number",
                                                  "-no-err-no",
                                                  "--builtin-move-forward",
                                                  "--builtin-initializer-list",
                                                  "--pch",
                                                  "-pch",
                                                  "--time",
                                                  "-time",
                                                  "--dlto",
                                                  "-dlto",
                                                  "--optimization-info",
                                                  "--brief-diagnostics",
                                                  "-brief-diag",
                                                  "--Ofast-compile",
                                                  "-Ofc",
                                                  "--std-dialect",
                                                  "--jump-table-density",
                                                  "--device-stack-protector",
                                                  "--fdevice-time-trace",
                                                  "--frandom-seed",
                                                  "-frandom-seed",
                                                  "-opt-info",
                                                  "-modify-stack-limit"};
            if (std::find(std::begin(known), std::end(known), option) == std::end(known)) return refuse(given[i]);
            if ((option == "-Xptxas" || option == "--ptxas-options") && value.empty()) ++i;
        }
    }
    return true;
}

int compile(Program& program, int n, const char* const* given) {
    program.log.clear();
    program.cubin.clear();
    program.ptx.clear();
    Options options;
    if (!parse(n, given, options, program.log)) return kInvalidOption;
    const Folder folder;
    if (folder.path().empty()) {
        program.log = "fake NVRTC: cannot make a temporary folder\n";
        return kInternalError;
    }
    std::string file = program.name.empty() ? "default_program" : program.name;
    std::replace(file.begin(), file.end(), '/', '_');
    const fs::path source = folder.path() / (file + ".cpp"), object = folder.path() / "kernel.so",
                   log = folder.path() / "log";
    std::string text = "#line 1 \"" + file + "\"\n" + program.source + "\n";
    for (const std::string& name : global_kernels(program.source)) text += "TW_EXPORT(" + name + ", 1024)\n";
    bool written = write_file(source, text);
    for (const auto& [name, header] : program.headers) {
        if (name.empty() || name[0] == '/' || name.find("..") != std::string::npos) {
            program.log = "fake NVRTC: an include name must be relative: " + name + "\n";
            return kInvalidInput;
        }
        written = write_file(folder.path() / "include" / name, header) && written;
    }
    if (!written) {
        program.log = "fake NVRTC: cannot write to " + folder.path().string() + "\n";
        return kInternalError;
    }

    const std::string arch = std::to_string(options.arch) + "0";
    std::vector<std::string> command = {environment("TILEWISE_FAKE_CXX", TILEWISE_FAKE_CXX_DEFAULT)};
    for (const char* flag : {"-std=c++20",
                             "-shared",
                             "-fPIC",
                             "-O1",
                             "-w",
                             "-nostdinc",
                             "-nostdinc++",
                             "-fno-exceptions",
                             "-fno-rtti",
                             "-fno-strict-aliasing",
                             "-fwrapv",
                             "-fno-stack-protector",
                             "-fstack-clash-protection",
                             "-fno-asynchronous-unwind-tables",
                             "-fno-threadsafe-statics",
                             "-fno-math-errno",
                             "-fno-trapping-math",
                             "-ffp-contract=off",
                             "-fvisibility=hidden",
                             "-fdiagnostics-color=never",
                             "-DTILEWISE_FAKE_CUDA=1",
                             "-D__CUDACC__=1",
                             "-D__CUDACC_RTC__=1",
                             "-D__CUDACC_VER_MAJOR__=13",
                             "-D__CUDACC_VER_MINOR__=0",
                             "-D__NVCC__=1"}) {
        command.emplace_back(flag);
    }
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("fma")) command.emplace_back("-mfma");
#endif
    command.push_back("-D__CUDA_ARCH__=" + arch);
    command.push_back("-D__CUDA_ARCH_LIST__=" + arch);
    if (options.suffix == 'a') command.push_back("-D__CUDA_ARCH_FEAT_SM" + std::to_string(options.arch) + "_ALL=1");
    command.emplace_back("-include");
    command.emplace_back(TILEWISE_FAKE_DEVICE_HPP);
    command.push_back("-I" + (folder.path() / "include").string());
    command.insert(command.end(), options.flags.begin(), options.flags.end());
    std::istringstream more(environment("TILEWISE_FAKE_CXXFLAGS", ""));
    for (std::string flag; more >> flag;) command.push_back(flag);
    for (const std::string& a : {std::string("-o"), object.string(), source.string(), std::string("-lm")})
        command.push_back(a);

    const bool good = run_compiler(command, log);
    std::string said;
    read_file(log, said);
    // Where the text lay is nobody's business, and would differ from run to run.
    for (const std::string& path : {(folder.path() / "include").string() + "/", folder.path().string() + "/"}) {
        for (size_t at; (at = said.find(path)) != std::string::npos;) said.erase(at, path.size());
    }
    program.log += said;
    if (!good) {
        if (program.log.empty()) program.log = "fake NVRTC: the compiler failed without a word\n";
        return kCompilation;
    }
    std::string bytes;
    if (!read_file(object, bytes) || bytes.empty()) return kInternalError;
    program.ptx = tw_fake::make_image(bytes, options.arch, options.suffix, true);
    if (!options.ptx_only) program.cubin = tw_fake::make_image(bytes, options.arch, options.suffix, false);
    return kSuccess;
}

}  // namespace

#define TW_API extern "C" __attribute__((visibility("default"))) int
#define TW_ENTER() \
    if (const int code_ = tw_fake::calls().enter(__func__)) return code_

TW_API nvrtcVersion(int* major, int* minor) {
    TW_ENTER();
    if (!major || !minor) return kInvalidInput;
    *major = 13;
    *minor = 0;
    return kSuccess;
}
TW_API nvrtcGetNumSupportedArchs(int* n) {
    TW_ENTER();
    if (!n) return kInvalidInput;
    *n = static_cast<int>(std::size(kArchs));
    return kSuccess;
}
TW_API nvrtcGetSupportedArchs(int* archs) {
    TW_ENTER();
    if (!archs) return kInvalidInput;
    std::copy(std::begin(kArchs), std::end(kArchs), archs);
    return kSuccess;
}
TW_API nvrtcCreateProgram(Program** program, const char* source, const char* name, int n, const char* const* headers,
                          const char* const* names) {
    TW_ENTER();
    if (!program || !source || n < 0 || (n > 0 && (!headers || !names))) return kInvalidInput;
    *program = new Program;
    (*program)->source = source;
    (*program)->name = name ? name : "";
    for (int i = 0; i < n; ++i) (*program)->headers.emplace_back(names[i], headers[i]);
    return kSuccess;
}
TW_API nvrtcDestroyProgram(Program** program) {
    TW_ENTER();
    if (!program || !*program) return kInvalidProgram;
    delete *program;
    *program = nullptr;
    return kSuccess;
}
TW_API nvrtcCompileProgram(Program* program, int n, const char* const* options) {
    TW_ENTER();
    if (!program) return kInvalidProgram;
    if (n < 0 || (n > 0 && !options)) return kInvalidInput;
    try {
        return compile(*program, n, options);
    } catch (const std::exception& error) {
        program->log += std::string("fake NVRTC: ") + error.what() + "\n";
        return kInternalError;
    }
}

namespace {
// Sizes count the final 0 of text.
int give_size(const Program* program, const std::string Program::* what, bool text, size_t* size) {
    if (!program) return kInvalidProgram;
    if (!size) return kInvalidInput;
    const size_t n = (program->*what).size();
    *size = n + (text && (n || what == &Program::log) ? 1 : 0);
    return kSuccess;
}
int give(const Program* program, const std::string Program::* what, bool text, char* to) {
    if (!program) return kInvalidProgram;
    if (!to) return kInvalidInput;
    const std::string& from = program->*what;
    std::memcpy(to, from.data(), from.size());
    if (text) to[from.size()] = '\0';
    return kSuccess;
}
}  // namespace

TW_API nvrtcGetProgramLogSize(Program* program, size_t* size) {
    TW_ENTER();
    return give_size(program, &Program::log, true, size);
}
TW_API nvrtcGetProgramLog(Program* program, char* log) {
    TW_ENTER();
    return give(program, &Program::log, true, log);
}
TW_API nvrtcGetCUBINSize(Program* program, size_t* size) {
    TW_ENTER();
    return give_size(program, &Program::cubin, false, size);
}
TW_API nvrtcGetCUBIN(Program* program, char* cubin) {
    TW_ENTER();
    return give(program, &Program::cubin, false, cubin);
}
TW_API nvrtcGetPTXSize(Program* program, size_t* size) {
    TW_ENTER();
    return give_size(program, &Program::ptx, true, size);
}
TW_API nvrtcGetPTX(Program* program, char* ptx) {
    TW_ENTER();
    return give(program, &Program::ptx, true, ptx);
}
TW_API nvrtcAddNameExpression(Program* program, const char* name) {
    TW_ENTER();
    if (!program) return kInvalidProgram;
    if (!name) return kInvalidInput;
    program->names.emplace_back(name);
    return kSuccess;
}
TW_API nvrtcGetLoweredName(Program* program, const char* name,
                           const char** lowered) {  // of extern "C" names: themselves
    TW_ENTER();
    if (!program) return kInvalidProgram;
    if (!name || !lowered) return kInvalidInput;
    if (program->ptx.empty()) return kNoLoweredNames;
    const auto found = std::find(program->names.begin(), program->names.end(), name);
    if (found == program->names.end()) return kNotValidName;
    *lowered = found->c_str();
    return kSuccess;
}
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int code) {
    constexpr const char* names[] = {"NVRTC_SUCCESS",
                                     "NVRTC_ERROR_OUT_OF_MEMORY",
                                     "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                     "NVRTC_ERROR_INVALID_INPUT",
                                     "NVRTC_ERROR_INVALID_PROGRAM",
                                     "NVRTC_ERROR_INVALID_OPTION",
                                     "NVRTC_ERROR_COMPILATION",
                                     "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
                                     "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
                                     "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
                                     "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
                                     "NVRTC_ERROR_INTERNAL_ERROR",
                                     "NVRTC_ERROR_TIME_FILE_WRITE_FAILED"};
    return code >= 0 && code < static_cast<int>(std::size(names)) ? names[code] : "NVRTC_ERROR unknown";
}
extern "C" __attribute__((visibility("default"))) unsigned long long tilewise_fake_calls(const char* name) {
    return tw_fake::calls().count(name);
}
