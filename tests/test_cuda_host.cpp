// src/cuda on the fake GPU of tests/fake_cuda. The driver is loaded once per process, so each test runs in one of its
// own, with its own environment.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "core/types.hpp"
#include "cuda/device.hpp"
#include "cuda/launch.hpp"
#include "cuda/module.hpp"
#include "cuda/program.hpp"
#include "cuda/tensor_map.hpp"
#include "tilewise/abi.h"
#include "tilewise/tilewise.h"

extern char** environ;

namespace tilewise::cuda {
namespace {

namespace fs = std::filesystem;
using Variables = std::vector<std::pair<std::string, std::string>>;

fs::path fake_folder() { return fs::read_symlink("/proc/self/exe").parent_path() / "fake_cuda"; }
std::string fake_driver() { return (fake_folder() / "libcuda.so.1").string(); }
std::string fake_nvrtc() { return (fake_folder() / "libnvrtc.so.13").string(); }

constexpr const char* kChild = "TILEWISE_TEST_CHILD";

// Runs this test again in a process of its own with these variables; there, and only there, true is returned.
bool own_process(const Variables& variables) {
    if (std::getenv(kChild)) return true;  // NOLINT(concurrency-mt-unsafe)
    const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string cache = (fs::temp_directory_path() / "tilewise-test-XXXXXX").string();
    EXPECT_NE(mkdtemp(cache.data()), nullptr);
    Variables all = {{kChild, "1"},
                     {"TILEWISE_CUDA_DRIVER", fake_driver()},
                     {"TILEWISE_NVRTC", fake_nvrtc()},
                     {"TILEWISE_CACHE_DIR", cache},
                     {"TILEWISE_PACKS", ""},
                     {"TILEWISE_FAKE_DEVICES", "2"},
                     {"TILEWISE_FAKE_CC", "9.0"}};
    // The leak checker does not find its way on the stacks of the fake GPU's threads.
    const char* asan = std::getenv("ASAN_OPTIONS");  // NOLINT(concurrency-mt-unsafe)
    all.emplace_back("ASAN_OPTIONS", std::string(asan ? asan : "") + ":detect_leaks=0");
    all.insert(all.end(), variables.begin(), variables.end());
    std::vector<std::string> texts;
    for (char** variable = environ; *variable; ++variable) {
        const std::string text = *variable;
        const std::string name = text.substr(0, text.find('='));
        if (std::none_of(all.begin(), all.end(), [&](const auto& v) { return v.first == name; })) texts.push_back(text);
    }
    for (size_t i = 0; i < all.size(); ++i) {  // the last of a name counts
        const bool again = std::any_of(all.begin() + static_cast<std::ptrdiff_t>(i) + 1, all.end(),
                                       [&](const auto& v) { return v.first == all[i].first; });
        if (!again) texts.push_back(all[i].first + "=" + all[i].second);
    }
    std::string program = fs::read_symlink("/proc/self/exe").string();
    std::string filter = std::string("--gtest_filter=") + info->test_suite_name() + "." + info->name();
    std::vector<char*> arguments{program.data(), filter.data(), nullptr}, environment;
    for (std::string& text : texts) environment.push_back(text.data());
    environment.push_back(nullptr);
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments.data(), environment.data()), 0);
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "in its own process, see above";
    std::error_code ignored;
    fs::remove_all(cache, ignored);
    return false;
}

#define TILEWISE_ON_FAKE_GPU(name, ...)                                                                  \
    void body_##name();                                                                                  \
    TEST(CudaHost, name) {                                                                               \
        if (!fs::exists(fake_driver())) GTEST_SKIP() << "no " << fake_driver() << ": build all targets"; \
        if (own_process({__VA_ARGS__})) body_##name();                                                   \
    }                                                                                                    \
    void body_##name()

class Environment {
public:
    Environment(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;
    ~Environment() { unsetenv(name_); }

private:
    const char* name_;
};
Environment failing(const std::string& calls) { return {"TILEWISE_FAKE_FAIL", calls}; }

struct Caught {
    core::Status status = core::Status::ok;
    std::string text = "no error";
};
Caught caught(const std::function<void()>& body) {
    try {
        body();
    } catch (const core::Error& error) {
        return {error.status(), error.what()};
    }
    return {};
}
void expect_error(const std::function<void()>& body, core::Status status, std::initializer_list<const char*> parts) {
    const Caught error = caught(body);
    EXPECT_EQ(error.status, status) << error.text;
    for (const char* part : parts) EXPECT_NE(error.text.find(part), std::string::npos) << part << " in: " << error.text;
}

template <class Function>
Function symbol(const std::string& library, const char* name) {
    void* handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function>(handle ? dlsym(handle, name) : nullptr);
}
unsigned long long calls(const std::string& library, const char* name) {
    const auto count = symbol<unsigned long long (*)(const char*)>(library, "tilewise_fake_calls");
    return count ? count(name) : 0;
}
void* current_context() {
    void* context = nullptr;
    symbol<int (*)(void**)>(fake_driver(), "cuCtxGetCurrent")(&context);
    return context;
}

struct Params {
    int* data;
    int add;
};
jit::Source adder(const std::string& entry = "adder") {
    return {"adder.cu",
            "#include \"params.cuh\"\n"
            "extern \"C\" __global__ void " +
                entry +
                "(const __grid_constant__ Params p) {\n"
                "    p.data[blockIdx.x * blockDim.x + threadIdx.x] += p.add;\n"
                "}\n",
            {{"params.cuh", "struct Params { int* data; int add; };\n"}},
            {},
            false};
}
const Function& adder_on(int device) {
    return function(device, "adder", "adder", [] { return adder(); });
}

std::vector<int> run_adder(int device, int count, int add) {
    std::vector<int> values(static_cast<size_t>(count));
    std::iota(values.begin(), values.end(), 0);
    const size_t bytes = values.size() * sizeof(int);
    const DeviceGuard guard(device);
    void* data = allocate(device, bytes, nullptr);
    copy_to_device(data, values.data(), bytes, nullptr);
    launch(adder_on(device), {{static_cast<unsigned>(count) / 32}, {32}}, Params{static_cast<int*>(data), add});
    copy_to_host(values.data(), data, bytes, nullptr);
    synchronize(nullptr);
    release(device, data, nullptr);
    return values;
}
void expect_usable(int device = 0) {
    const std::vector<int> values = run_adder(device, 64, 7);
    EXPECT_EQ(values[0], 7);
    EXPECT_EQ(values[63], 70);
}

// ---------------------------------------------------------------------------------------------------------------------
// Devices

TILEWISE_ON_FAKE_GPU(DevicesAreDescribed) {
    std::string why_not;
    EXPECT_TRUE(available(&why_not)) << why_not;
    EXPECT_EQ(device_count(), 2);
    const DeviceInfo& info = device_info(1);
    EXPECT_EQ(info.index, 1);
    EXPECT_FALSE(info.name.empty());
    EXPECT_EQ(info.major, 9);
    EXPECT_EQ(info.minor, 0);
    EXPECT_GT(info.num_sms, 0);
    EXPECT_GE(info.shared_memory_optin, 227u << 10);
    EXPECT_GT(info.total_memory, 0u);
    EXPECT_GE(info.driver_version, 12000);
    EXPECT_TRUE(info.memory_pools);
    expect_error([] { device_info(2); }, core::Status::invalid_argument,
                 {"cuda:2", "cuda:0 to cuda:1", "CUDA_VISIBLE_DEVICES"});
    expect_error([] { device_info(-1); }, core::Status::invalid_argument, {"cuda:-1"});
    expect_error([] { const DeviceGuard guard(7); }, core::Status::invalid_argument, {"cuda:7"});
}

TILEWISE_ON_FAKE_GPU(GuardRestores) {
    ASSERT_TRUE(available());
    EXPECT_EQ(current_context(), nullptr);
    {
        const DeviceGuard outer(0);
        void* zero = current_context();
        EXPECT_NE(zero, nullptr);
        {
            const DeviceGuard inner(1);
            EXPECT_NE(current_context(), zero);
            const auto before = calls(fake_driver(), "cuCtxSetCurrent");
            {
                const DeviceGuard again(1);
            }
            EXPECT_EQ(calls(fake_driver(), "cuCtxSetCurrent"), before) << "it was current already";
            try {
                const DeviceGuard thrown(0);
                throw 1;
            } catch (int thrown) {
                EXPECT_EQ(thrown, 1);
            }
            EXPECT_NE(current_context(), zero);
        }
        EXPECT_EQ(current_context(), zero);
    }
    EXPECT_EQ(current_context(), nullptr);
    EXPECT_EQ(calls(fake_driver(), "cuDevicePrimaryCtxRetain"), 2u);
    std::thread([] { EXPECT_EQ(current_context(), nullptr); }).join();
}

TILEWISE_ON_FAKE_GPU(Memory) {
    EXPECT_EQ(allocate(0, 0, nullptr), nullptr);
    release(0, nullptr, nullptr);
    void* data = allocate(1, 1000, nullptr);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(current_context(), nullptr);
    const DeviceGuard guard(1);
    memset_async(data, 0x5a, 1000, nullptr);
    std::vector<unsigned char> bytes(1000);
    copy_to_host(bytes.data(), data, 1000, nullptr);
    synchronize(nullptr);
    EXPECT_EQ(bytes, std::vector<unsigned char>(1000, 0x5a));
    release(1, data, nullptr);
    EXPECT_EQ(calls(fake_driver(), "cuMemAllocAsync"), 1u);
    EXPECT_EQ(calls(fake_driver(), "cuMemFreeAsync"), 1u);
}

TILEWISE_ON_FAKE_GPU(OutOfMemory, {"TILEWISE_FAKE_MEMORY", "67108864"}) {
    expect_error([] { (void)allocate(0, size_t{1} << 40, nullptr); }, core::Status::out_of_memory,
                 {"1024.00 GiB", "GPU 0", "free", "CUDA_ERROR_OUT_OF_MEMORY"});
    EXPECT_EQ(current_context(), nullptr);
    expect_usable();
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

TILEWISE_ON_FAKE_GPU(KernelsRunOnEveryDevice) {
    for (const int device : {0, 1, 0}) {
        const std::vector<int> values = run_adder(device, 256, 100);
        for (int i = 0; i < 256; ++i) EXPECT_EQ(values[static_cast<size_t>(i)], i + 100);
        const Function& f = adder_on(device);
        EXPECT_EQ(f.device, device);
        EXPECT_EQ(f.name, "adder.cu:adder");
        EXPECT_GE(f.max_threads, 32);
        EXPECT_GE(f.max_dynamic_shared, 227u << 10);
        EXPECT_EQ(&f, &adder_on(device));
    }
    EXPECT_NE(&adder_on(0), &adder_on(1));
    EXPECT_EQ(calls(fake_nvrtc(), "nvrtcCompileProgram"), 1u) << "the second device finds it in the cache";
}

TILEWISE_ON_FAKE_GPU(ThreadsCompileOnce, {"TILEWISE_CACHE_MAX_MB", "0"}) {
    std::atomic<int> rendered{0};
    std::array<const Function*, 8> found{};
    std::vector<std::thread> threads;
    for (const Function*& place : found) {
        threads.emplace_back([&] {
            place = &function(0, "one", "adder", [&] {
                ++rendered;
                return adder();
            });
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Function* place : found) EXPECT_EQ(place, found[0]);
    EXPECT_EQ(rendered, 1);
    EXPECT_EQ(calls(fake_nvrtc(), "nvrtcCompileProgram"), 1u);
    (void)function(0, "two", "adder", [] { return adder(); });
    EXPECT_EQ(calls(fake_nvrtc(), "nvrtcCompileProgram"), 2u);
}

TILEWISE_ON_FAKE_GPU(FailuresReachAllWhoWaitAndAreNotKept) {
    std::atomic<int> rendered{0}, failed{0};
    std::vector<std::thread> threads;
    std::atomic<bool> go{false};
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&] {
            while (!go) std::this_thread::yield();
            const Caught error = caught([&] {
                (void)function(0, "adder", "adder", [&] {
                    ++rendered;
                    std::this_thread::sleep_for(std::chrono::milliseconds(300));
                    jit::Source source = adder();
                    source.text += "int broken = no_such_name;\n";
                    return source;
                });
            });
            if (error.text.find("no_such_name") != std::string::npos) ++failed;
        });
    }
    go = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(failed, 8);
    EXPECT_LT(rendered, 8);
    expect_usable();
    // A renderer may throw, too.
    expect_error(
        [] {
            (void)function(0, "thrown", "x",
                           []() -> jit::Source { throw core::Error(core::Status::unsupported, "no text"); });
        },
        core::Status::unsupported, {"no text"});
}

TILEWISE_ON_FAKE_GPU(EntriesThatAreNotThere) {
    expect_error([] { (void)function(0, "adder", "subtracter", [] { return adder(); }); }, core::Status::internal,
                 {"adder.cu:subtracter", "no entry"});
    expect_usable();
}

TILEWISE_ON_FAKE_GPU(LaunchesThatNoGpuTakes) {
    const Function& f = adder_on(0);
    const Params params{};
    const auto refused = [&](const LaunchConfig& config, std::initializer_list<const char*> parts) {
        expect_error([&] { launch(f, config, params); }, core::Status::internal, parts);
    };
    refused({{1}, {1025}}, {"adder.cu:adder", "block", "1025 x 1 x 1"});
    refused({{1}, {0}}, {"block"});
    refused({{1, 65536}, {32}}, {"grid", "65536"});
    refused({{3}, {32}, {2}}, {"cluster", "divisors"});
    refused({{1}, {32}, {1}, f.max_dynamic_shared + 1}, {"dynamic shared memory"});
    const std::array<char, 5000> large{};
    expect_error([&] { launch(f, {{1}, {32}}, large); }, core::Status::internal, {"parameters", "5000"});
    const auto before = calls(fake_driver(), "cuLaunchKernelEx");
    launch(f, {{0}, {32}}, params);  // nothing to do
    EXPECT_EQ(calls(fake_driver(), "cuLaunchKernelEx"), before);
    expect_usable();
}

TILEWISE_ON_FAKE_GPU(DynamicSharedMemory) {
    const auto render = [] {
        return jit::Source{"shared.cu",
                           "struct Params { int* data; int add; };\n"
                           "extern \"C\" __global__ void shared(const __grid_constant__ Params p) {\n"
                           "    TW_DYNAMIC_SHARED(bytes);\n"
                           "    int* memory = reinterpret_cast<int*>(bytes);\n"
                           "    memory[50000 + threadIdx.x] = p.add;\n"
                           "    __syncthreads();\n"
                           "    p.data[threadIdx.x] = memory[50000 + (threadIdx.x ^ 1)];\n"
                           "}\n",
                           {},
                           {},
                           false};
    };
    const Function& f = function(0, "shared", "shared", render);
    const DeviceGuard guard(0);
    void* data = allocate(0, 32 * sizeof(int), nullptr);
    launch(f, {{1}, {32}, {1}, 220000, true}, Params{static_cast<int*>(data), 5});
    std::array<int, 32> values{};
    copy_to_host(values.data(), data, sizeof values, nullptr);
    synchronize(nullptr);
    EXPECT_EQ(values[31], 5);
    release(0, data, nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// What goes wrong

TILEWISE_ON_FAKE_GPU(NoDriver, {"TILEWISE_CUDA_DRIVER", "/nonexistent/driver.so"}) {
    std::string why_not;
    EXPECT_FALSE(available(&why_not));
    EXPECT_NE(why_not.find("/nonexistent/driver.so"), std::string::npos) << why_not;
    EXPECT_EQ(device_count(), 0);
    expect_error([] { device_info(0); }, core::Status::unsupported, {"TILEWISE_CUDA_DRIVER"});
    expect_error([] { (void)adder_on(0); }, core::Status::unsupported, {"/nonexistent/driver.so"});
    expect_error([] { (void)allocate(0, 1, nullptr); }, core::Status::unsupported, {"/nonexistent/driver.so"});
}

TILEWISE_ON_FAKE_GPU(NotADriver, {"TILEWISE_CUDA_DRIVER", fake_nvrtc()}) {
    std::string why_not;
    EXPECT_FALSE(available(&why_not));
    EXPECT_NE(why_not.find("has no cuDriverGetVersion"), std::string::npos) << why_not;
}

TILEWISE_ON_FAKE_GPU(OldDriver, {"TILEWISE_FAKE_DRIVER", "11080"}) {
    expect_error([] { device_info(0); }, core::Status::unsupported,
                 {"CUDA 11.8", "CUDA 12.0 or newer", "Update the driver"});
}

TILEWISE_ON_FAKE_GPU(DriverOlderThanNvrtc, {"TILEWISE_FAKE_DRIVER", "12040"}) {
    EXPECT_TRUE(available());
    expect_error([] { (void)adder_on(0); }, core::Status::invalid_argument,
                 {"NVRTC 13", "CUDA 12", "12.4", "TILEWISE_NVRTC"});
}

TILEWISE_ON_FAKE_GPU(NoGpu, {"TILEWISE_FAKE_FAIL", "cuInit:100"}) {
    std::string why_not;
    EXPECT_FALSE(available(&why_not));
    EXPECT_NE(why_not.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << why_not;
    EXPECT_NE(why_not.find("CUDA_ERROR_NO_DEVICE"), std::string::npos) << why_not;
    expect_error([] { device_info(0); }, core::Status::unsupported, {"CUDA_ERROR_NO_DEVICE"});
}

TILEWISE_ON_FAKE_GPU(DriverMismatch, {"TILEWISE_FAKE_FAIL", "cuInit:803"}) {
    expect_error([] { device_info(0); }, core::Status::unsupported, {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"});
}

TILEWISE_ON_FAKE_GPU(NoContext) {
    {
        const Environment fail = failing("cuDevicePrimaryCtxRetain:46");
        expect_error([] { const DeviceGuard guard(0); }, core::Status::internal,
                     {"GPU 0", "CUDA_ERROR_DEVICE_UNAVAILABLE"});
    }
    expect_usable();
}

TILEWISE_ON_FAKE_GPU(NoNvrtcNoPack, {"TILEWISE_NVRTC", "/nonexistent/nvrtc.so"}) {
    expect_error([] { (void)adder_on(0); }, core::Status::invalid_argument, {"/nonexistent/nvrtc.so", "not there"});
}

TILEWISE_ON_FAKE_GPU(ModulesThatDoNotLoad) {
    const auto fails = [](int code, std::initializer_list<const char*> parts) {
        const Environment fail = failing("cuModuleLoadDataEx:" + std::to_string(code));
        expect_error([] { (void)adder_on(0); }, code == 2 ? core::Status::out_of_memory : core::Status::internal,
                     parts);
    };
    fails(209, {"adder.cu sm_90", "GPU 0", "CUDA_ERROR_NO_BINARY_FOR_GPU", "another GPU arch"});
    fails(222, {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "update the driver"});
    fails(218, {"CUDA_ERROR_INVALID_PTX"});
    fails(2, {"CUDA_ERROR_OUT_OF_MEMORY"});
    expect_usable();
    EXPECT_EQ(calls(fake_nvrtc(), "nvrtcCompileProgram"), 1u) << "the cache kept what was compiled";
}

TILEWISE_ON_FAKE_GPU(CompilerFails) {
    {
        const Environment fail = failing("nvrtcCompileProgram:6");
        expect_error([] { (void)adder_on(0); }, core::Status::internal, {"adder.cu", "sm_90", "NVRTC 13"});
    }
    {
        const Environment fail = failing("nvrtcCreateProgram:1");
        expect_error([] { (void)adder_on(0); }, core::Status::internal, {"adder.cu", "NVRTC 13"});
    }
    {
        const Environment fail = failing("nvrtcGetCUBIN:11");
        expect_error([] { (void)adder_on(0); }, core::Status::internal, {"reading the code"});
    }
    expect_usable();
}

TILEWISE_ON_FAKE_GPU(GpuOlderThanTheCompiler, {"TILEWISE_FAKE_CC", "7.0"}) {
    expect_error([] { (void)adder_on(0); }, core::Status::unsupported, {"sm_70", "sm_75"});
}

TILEWISE_ON_FAKE_GPU(LaunchFails) {
    (void)adder_on(0);
    const auto start = [] { launch(adder_on(0), {{1}, {32}}, Params{}); };
    {
        const Environment fail = failing("cuLaunchKernelEx:701");
        expect_error(start, core::Status::internal,
                     {"adder.cu:adder", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "block 32 x 1 x 1"});
        EXPECT_EQ(caught(start).text.find("context of this process is lost"), std::string::npos);
    }
    {
        const Environment fail = failing("cuLaunchKernelEx:900");
        expect_error(start, core::Status::unsupported, {"captured"});
    }
    {
        const Environment fail = failing("cuLaunchKernelEx:719,cuStreamSynchronize:700");
        expect_error(start, core::Status::internal,
                     {"CUDA_ERROR_LAUNCH_FAILED", "context of this process is lost", "compute-sanitizer"});
        expect_error(
            [] {
                const DeviceGuard guard(0);
                synchronize(nullptr);
            },
            core::Status::internal, {"CUDA_ERROR_ILLEGAL_ADDRESS", "given to this GPU earlier"});
    }
    EXPECT_EQ(current_context(), nullptr);
    expect_usable();
}

TILEWISE_ON_FAKE_GPU(CallsOutsideAGuardSaySo) {
    ASSERT_TRUE(available());
    expect_error([] { synchronize(nullptr); }, core::Status::internal,
                 {"CUDA_ERROR_INVALID_CONTEXT", "No GPU is current"});
}

// ---------------------------------------------------------------------------------------------------------------------
// fork

// Exit status of a child that ran body; -1 if it hung.
int status_of_child(const std::function<bool()>& body) {
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        bool good = false;
        try {
            good = body();
        } catch (...) {
            good = false;
        }
        _exit(good ? 0 : 1);
    }
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool child_is_told() {
    std::string why_not;
    if (available(&why_not) || why_not.find("fork") == std::string::npos || device_count() != 0) return false;
    for (const auto& call : std::vector<std::function<void()>>{
             [] { device_info(0); }, [] { const DeviceGuard guard(0); }, [] { (void)adder_on(0); },
             [] { (void)function(0, "other", "adder", [] { return adder(); }); }, [] { (void)allocate(0, 1, nullptr); },
             [] { synchronize(nullptr); }}) {
        const Caught error = caught(call);
        if (error.text.find("spawn") == std::string::npos) {
            fprintf(stderr, "in child: %s\n", error.text.c_str());
            return false;
        }
    }
    release(0, &why_not, nullptr);  // does nothing
    return true;
}

TILEWISE_ON_FAKE_GPU(ForkAfterUse) {
    expect_usable();
    EXPECT_EQ(status_of_child(child_is_told), 0);
    expect_usable();
}

TILEWISE_ON_FAKE_GPU(ForkWhileAnotherThreadCompiles) {
    ASSERT_TRUE(available());
    std::atomic<bool> rendering{false}, forked{false};
    std::thread other([&] {
        (void)function(0, "adder", "adder", [&] {
            rendering = true;
            while (!forked) std::this_thread::yield();
            return adder();
        });
    });
    while (!rendering) std::this_thread::yield();
    EXPECT_EQ(status_of_child(child_is_told), 0);
    forked = true;
    other.join();
    expect_usable();
}

TILEWISE_ON_FAKE_GPU(LaterProcessesDoNotCompile) {
    EXPECT_EQ(status_of_child([] { return run_adder(0, 32, 1)[31] == 32; }), 0);
    const Environment fail = failing("nvrtcCompileProgram:6,nvrtcCreateProgram:6");
    EXPECT_EQ(status_of_child([] { return run_adder(1, 32, 1)[31] == 32; }), 0);
}

TILEWISE_ON_FAKE_GPU(ForkBeforeUse) {
    EXPECT_EQ(status_of_child([] { return run_adder(0, 32, 1)[31] == 32; }), 0);
    expect_usable();
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor maps

TILEWISE_ON_FAKE_GPU(TensorMaps) {
    ASSERT_TRUE(available());
    alignas(128) static std::array<char, 4096> memory{};
    TiledLayout good;
    good.data = memory.data();
    good.rank = 3;
    good.shape = {64, 1000, 8};
    good.stride_bytes = {0, 128, 128000};
    good.box = {64, 128, 1};
    good.swizzle = TmaSwizzle::bytes_128;
    const DeviceGuard guard(0);
    const TensorMap map = encode_tiled(good);
    EXPECT_NE(map.opaque, TensorMap{}.opaque);

    const auto refused = [&](const std::function<void(TiledLayout&)>& change,
                             std::initializer_list<const char*> parts) {
        TiledLayout layout = good;
        change(layout);
        expect_error([&] { (void)encode_tiled(layout); }, core::Status::internal, parts);
    };
    refused([](TiledLayout& t) { t.rank = 6; }, {"rank", "6"});
    refused([](TiledLayout& t) { t.rank = 0; }, {"rank"});
    refused([](TiledLayout& t) { t.data = memory.data() + 8; }, {"data", "multiple of 16"});
    refused([](TiledLayout& t) { t.data = nullptr; }, {"data"});
    refused([](TiledLayout& t) { t.shape[1] = 0; }, {"shape[1]"});
    refused([](TiledLayout& t) { t.shape[1] = (uint64_t{1} << 32) + 1; }, {"shape[1]"});
    refused([](TiledLayout& t) { t.stride_bytes[2] = 128008; }, {"stride_bytes[2]", "128008"});
    refused([](TiledLayout& t) { t.stride_bytes[1] = uint64_t{1} << 40; }, {"stride_bytes[1]"});
    refused([](TiledLayout& t) { t.box[1] = 257; }, {"box[1]", "257"});
    refused([](TiledLayout& t) { t.box[2] = 0; }, {"box[2]"});
    refused([](TiledLayout& t) { t.box[0] = 65, t.swizzle = TmaSwizzle::none; }, {"inner row", "130 bytes"});
    refused([](TiledLayout& t) { t.box[0] = 128; }, {"inner row", "256 bytes", "span of the swizzle, 128"});
    // What only the driver knows.
    refused([](TiledLayout& t) { t.dtype = TmaType::u16, t.nan_outside = true; },
            {"encoding a tensor map", "64:dense:64"});
}

// ---------------------------------------------------------------------------------------------------------------------
// Calls through the C ABI

class Memory {
public:
    Memory(int device, size_t bytes) : device_(device), data_(allocate(device, bytes, nullptr)) {}
    ~Memory() { release(device_, data_, nullptr); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    [[nodiscard]] void* data() const { return data_; }

private:
    int device_;
    void* data_;
};

struct CallOnGpu {
    static constexpr int64_t kRows = 40, kHeads = 2, kDims = 16, kSize = kRows * kHeads * kDims;
    std::vector<float> host = std::vector<float>(3 * kSize);
    Memory memory{0, 5 * kSize * sizeof(float)};  // q, k, v, o, lse
    tilewise_problem problem{};
    tilewise_forward_args args{};

    CallOnGpu() {
        for (size_t n = 0; n < host.size(); ++n) host[n] = std::sin(static_cast<float>(n * n % 997));
        const DeviceGuard guard(0);
        copy_to_device(memory.data(), host.data(), host.size() * sizeof(float), nullptr);
        synchronize(nullptr);
        tilewise_problem_init(&problem);
        tilewise_forward_args_init(&args);
        problem.device_type = TILEWISE_CUDA, problem.causal = 1;
        problem.q = tensor(at(0)), problem.k = tensor(at(1)), problem.v = tensor(at(2));
        args.o = tensor(at(3));
    }
    [[nodiscard]] float* at(int64_t part) const { return static_cast<float*>(memory.data()) + part * kSize; }
    static tilewise_tensor tensor(float* data) {
        return {data, TILEWISE_FLOAT32, 4, {1, kRows, kHeads, kDims}, {kSize, kHeads * kDims, kDims, 1}};
    }
    std::vector<float> result() const {
        std::vector<float> o(kSize);
        const DeviceGuard guard(0);
        copy_to_host(o.data(), at(3), kSize * sizeof(float), nullptr);
        synchronize(nullptr);
        return o;
    }
    std::vector<float> on_the_cpu() {
        tilewise_problem cpu = problem;
        tilewise_forward_args cpu_args = args;
        std::vector<float> o(kSize);
        cpu.device_type = TILEWISE_CPU, cpu.backend = nullptr;
        cpu.q = tensor(host.data()), cpu.k = tensor(host.data() + kSize), cpu.v = tensor(host.data() + 2 * kSize);
        cpu_args.o = tensor(o.data());
        EXPECT_EQ(tilewise_forward(&cpu, &cpu_args), TILEWISE_OK) << tilewise_last_error();
        return o;
    }
};

TILEWISE_ON_FAKE_GPU(OneCallGivesWhatTheCpuGives) {
    CallOnGpu call;
    for (const char* backend : {"", "simt", "fwd_simt", "bwd_simt"}) {  // the last two are halves of one backend
        call.problem.backend = backend;
        ASSERT_EQ(tilewise_forward(&call.problem, &call.args), TILEWISE_OK) << tilewise_last_error();
        const std::vector<float> got = call.result(), want = call.on_the_cpu();
        for (size_t n = 0; n < got.size(); ++n) ASSERT_NEAR(got[n], want[n], 1e-5) << backend << " " << n;
    }
}

// One call in float16: q and o start so many numbers after a multiple of 256 bytes.
struct HalfCallOnGpu {
    static constexpr int64_t kHeads = 2, kDims = 16, kWidth = kHeads * kDims;
    struct Sizes {
        int64_t rows_q = 200, rows_kv = 200, shift_q = 0, shift_o = 0;
    } sizes;
    std::array<std::vector<float>, 3> host;  // q, k, v: halves
    std::array<Memory, 4> memory;            // and o
    tilewise_problem problem{};
    tilewise_forward_args args{};

    explicit HalfCallOnGpu(const Sizes& s)
        : sizes(s), memory{room(s.rows_q + 1), room(s.rows_kv), room(s.rows_kv), room(s.rows_q + 1)} {
        tilewise_problem_init(&problem);
        tilewise_forward_args_init(&args);
        problem.device_type = TILEWISE_CUDA, problem.causal = 1;
        const DeviceGuard guard(0);
        for (size_t n = 0; n < 3; ++n) {
            const auto count = static_cast<size_t>(rows(n) * kWidth);
            std::vector<uint16_t> bits;
            for (size_t i = 0; i < count; ++i) {
                bits.push_back(core::float_to_half(std::sin(static_cast<float>((i + n) * i % 997))));
                host[n].push_back(core::half_to_float(bits.back()));
            }
            if (count > 0) copy_to_device(at(n), bits.data(), count * sizeof(uint16_t), nullptr);
        }
        synchronize(nullptr);
        problem.q = tensor(0), problem.k = tensor(1), problem.v = tensor(2), args.o = tensor(3);
    }
    static Memory room(int64_t rows) { return Memory(0, static_cast<size_t>((rows + 1) * kWidth) * sizeof(uint16_t)); }
    [[nodiscard]] int64_t rows(size_t n) const { return n == 1 || n == 2 ? sizes.rows_kv : sizes.rows_q; }
    [[nodiscard]] uint16_t* at(size_t n) const {
        return static_cast<uint16_t*>(memory[n].data()) + (n == 0 ? sizes.shift_q : n == 3 ? sizes.shift_o : 0);
    }
    [[nodiscard]] tilewise_tensor tensor(size_t n) const {
        return {at(n), TILEWISE_FLOAT16, 4, {1, rows(n), kHeads, kDims}, {rows(n) * kWidth, kWidth, kDims, 1}};
    }
    void expect_what_the_cpu_gives() {
        std::vector<uint16_t> bits(static_cast<size_t>(sizes.rows_q * kWidth));
        {
            const DeviceGuard guard(0);
            copy_to_host(bits.data(), at(3), bits.size() * sizeof(uint16_t), nullptr);
            synchronize(nullptr);
        }
        tilewise_problem cpu = problem;
        tilewise_forward_args cpu_args = args;
        std::vector<float> o(bits.size());
        cpu.device_type = TILEWISE_CPU;
        for (auto [tensor, data] : {std::pair{&cpu.q, host[0].data()},
                                    {&cpu.k, host[1].data()},
                                    {&cpu.v, host[2].data()},
                                    {&cpu_args.o, o.data()}})
            tensor->data = data, tensor->dtype = TILEWISE_FLOAT32;
        ASSERT_EQ(tilewise_forward(&cpu, &cpu_args), TILEWISE_OK) << tilewise_last_error();
        for (size_t n = 0; n < o.size(); ++n) ASSERT_NEAR(core::half_to_float(bits[n]), o[n], 2e-3) << n;
    }
};

// Report B01: of a query that sees few keys, one of them nearly alone, gradients are differences of numbers as large as
// the rounding of o. The CPU's are those of the same numbers in float32.
TILEWISE_ON_FAKE_GPU(GradientsOfARowWithFewKeys) {
    constexpr int64_t kQueries = 2, kKeys = 3, kHeads = 40, kDims = 64, kWidth = kHeads * kDims;
    struct Part {
        int64_t rows;
        std::vector<uint16_t> half;
        std::vector<float> host;
    };
    std::array<Part, 8> parts;  // q, k, v, do, o, dq, dk, dv
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (size_t n = 0; n < parts.size(); ++n) {
        parts[n].rows = n == 1 || n == 2 || n > 5 ? kKeys : kQueries;
        for (int64_t i = 0; i < parts[n].rows * kWidth; ++i) {
            parts[n].half.push_back(core::float_to_bfloat(normal(generator)));
            parts[n].host.push_back(core::bfloat_to_float(parts[n].half.back()));
        }
    }
    const auto run = [&](bool gpu, const std::function<void*(size_t)>& at, float* lse) {
        const auto tensor = [&](size_t n) -> tilewise_tensor {
            const int64_t rows = parts[n].rows;
            return {at(n),
                    gpu ? TILEWISE_BFLOAT16 : TILEWISE_FLOAT32,
                    4,
                    {1, rows, kHeads, kDims},
                    {rows * kWidth, kWidth, kDims, 1}};
        };
        tilewise_problem problem;
        tilewise_problem_init(&problem);
        problem.device_type = gpu ? TILEWISE_CUDA : TILEWISE_CPU, problem.backend = gpu ? "mma" : nullptr;
        problem.causal = 1, problem.has_softmax_scale = 1, problem.softmax_scale = 1;
        problem.q = tensor(0), problem.k = tensor(1), problem.v = tensor(2);
        tilewise_forward_args forward;
        tilewise_forward_args_init(&forward);
        forward.o = tensor(4);
        forward.lse = {lse, TILEWISE_FLOAT32, 3, {1, kHeads, kQueries}, {kHeads * kQueries, kQueries, 1}};
        ASSERT_EQ(tilewise_forward(&problem, &forward), TILEWISE_OK) << tilewise_last_error();
        tilewise_backward_args backward;
        tilewise_backward_args_init(&backward);
        backward.d_o = tensor(3), backward.o = tensor(4), backward.lse = forward.lse;
        backward.dq = tensor(5), backward.dk = tensor(6), backward.dv = tensor(7);
        ASSERT_EQ(tilewise_backward(&problem, &backward), TILEWISE_OK) << tilewise_last_error();
    };
    std::vector<float> lse(kHeads * kQueries);
    run(false, [&](size_t n) { return static_cast<void*>(parts[n].host.data()); }, lse.data());

    constexpr size_t kRoom = 2 * kKeys * kWidth;
    const Memory memory(0, 9 * kRoom);
    const auto at = [&](size_t n) { return static_cast<void*>(static_cast<std::byte*>(memory.data()) + n * kRoom); };
    const DeviceGuard guard(0);
    for (size_t n = 0; n < 4; ++n) copy_to_device(at(n), parts[n].half.data(), parts[n].half.size() * 2, nullptr);
    synchronize(nullptr);
    run(true, at, static_cast<float*>(at(8)));
    for (size_t n = 5; n < 8; ++n) {
        std::vector<uint16_t>& got = parts[n].half;
        copy_to_host(got.data(), at(n), got.size() * 2, nullptr);
        synchronize(nullptr);
        float largest = 0;
        for (const float x : parts[n].host) largest = std::max(largest, std::abs(x));
        for (size_t i = 0; i < got.size(); ++i)
            ASSERT_NEAR(core::bfloat_to_float(got[i]), parts[n].host[i], 0.01f * (1 + largest)) << n << " " << i;
    }
}

// A plan of fwd_sm90 serves what that kernel does not take, too: then fwd_mma runs inside. Tensor maps say which ran.
TILEWISE_ON_FAKE_GPU(PlansOfTheHopperKernelServeOtherRuns, {"TILEWISE_FAKE_SMS", "4"}) {
    tilewise_plan* plan = nullptr;
    {
        const HalfCallOnGpu planned({});
        ASSERT_EQ(tilewise_plan_create(&planned.problem, TILEWISE_FORWARD, &plan), TILEWISE_OK)
            << tilewise_last_error();
    }
    std::string text(tilewise_plan_explain(plan, nullptr, 0), '\0');
    tilewise_plan_explain(plan, text.data(), text.size());
    EXPECT_NE(text.find("implementation: fwd_sm90"), std::string::npos) << text;
    EXPECT_NE(text.find("warpgroups and a producer"), std::string::npos) << text;

    const auto maps_of = [&](const HalfCallOnGpu::Sizes& sizes) {
        HalfCallOnGpu call(sizes);
        size_t bytes = 0;
        EXPECT_EQ(tilewise_plan_workspace_size_for(plan, &call.problem, &bytes), TILEWISE_OK) << tilewise_last_error();
        const Memory workspace(0, bytes);
        const auto before = calls(fake_driver(), "cuTensorMapEncodeTiled");
        EXPECT_EQ(tilewise_plan_forward(plan, &call.problem, &call.args, workspace.data(), bytes, nullptr), TILEWISE_OK)
            << tilewise_last_error();
        call.expect_what_the_cpu_gives();
        return calls(fake_driver(), "cuTensorMapEncodeTiled") - before;
    };
    constexpr unsigned long long kHopper = 3, kOther = 0;
    for (int run = 0; run < 2; ++run) {  // the second finds all decisions made
        EXPECT_EQ(maps_of({}), kHopper);
        EXPECT_EQ(maps_of({.shift_q = 1}), kOther);
        EXPECT_EQ(maps_of({.shift_q = 8}), kHopper);
        EXPECT_EQ(maps_of({.shift_o = 1}), kOther);
        EXPECT_EQ(maps_of({.shift_o = 8}), kHopper);
        EXPECT_EQ(maps_of({.rows_q = 300, .rows_kv = 130}), kHopper);
        EXPECT_EQ(maps_of({.rows_q = 40}), kOther);  // too few for tiles of this size
        EXPECT_EQ(maps_of({.rows_kv = 0}), kOther);
    }
    tilewise_plan_destroy(plan);
}

// Documents that are runs of tokens have tiles of their own; whether they are, only the GPU knows. A table at the start
// of the workspace says what it found.
TILEWISE_ON_FAKE_GPU(DocumentsThatAreRunsAreSequences, {"TILEWISE_FAKE_SMS", "4"}) {
    constexpr int64_t kBatch = 2, kRows = 520, kMost = kBatch * (1 + (kRows + 127) / 128);
    struct Ids {
        const char* what;
        bool are_runs;
        std::function<int64_t(int64_t b, int64_t row)> of;
    };
    const std::vector<Ids> all{
        {"rise", true, [](int64_t b, int64_t row) { return row / (100 + 30 * b) + b; }},
        {"one each", true, [](int64_t, int64_t) { return 7; }},
        {"padding at both ends", true, [](int64_t, int64_t row) { return row < 9 || row > 500 ? -3 : row / 170; }},
        {"wide", true, [](int64_t b, int64_t row) { return (int64_t{1} << 40) * (row / 260) + b; }},
        {"one comes back", false, [](int64_t b, int64_t row) { return b == 1 && row > 500 ? 0 : row / 200; }},
        {"one comes back behind padding", false, [](int64_t, int64_t row) { return row / 130 == 2 ? -1 : 5; }},
        {"fall", false, [](int64_t, int64_t row) { return 4 - row / 130; }},
        {"many", false, [](int64_t, int64_t row) { return row / 40; }},
    };
    HalfCallOnGpu call({.rows_q = kBatch * kRows, .rows_kv = kBatch * kRows});
    for (tilewise_tensor* t : {&call.problem.q, &call.problem.k, &call.problem.v, &call.args.o})
        t->shape[0] = kBatch, t->shape[1] = kRows, t->strides[0] = kRows * t->strides[1];
    const Memory memory(0, 2 * kBatch * kRows * sizeof(int64_t));
    auto* const ids = static_cast<int64_t*>(memory.data());
    const tilewise_tensor array{ids, TILEWISE_INT64, 2, {kBatch, kRows}, {kRows, 1}};
    std::array<tilewise_tensor, 2> arrays{array, array};
    call.problem.mask = "documents(@0,@1)", call.problem.arrays = arrays.data(), call.problem.num_arrays = 2;
    tilewise_plan* plan = nullptr;
    ASSERT_EQ(tilewise_plan_create(&call.problem, TILEWISE_FORWARD, &plan), TILEWISE_OK) << tilewise_last_error();
    size_t bytes = 0;
    ASSERT_EQ(tilewise_plan_workspace_size(plan, &bytes), TILEWISE_OK);
    const Memory workspace(0, bytes);

    // Whether documents were taken for sequences, after a run whose values are right.
    const auto tiles_of_sequences = [&] {
        std::vector<abi::Sequence> table(kMost + 1);
        std::memset(static_cast<void*>(table.data()), 0xab, table.size() * sizeof table[0]);
        const DeviceGuard guard(0);
        copy_to_device(workspace.data(), table.data(), table.size() * sizeof table[0], nullptr);
        EXPECT_EQ(tilewise_plan_forward(plan, &call.problem, &call.args, workspace.data(), bytes, nullptr), TILEWISE_OK)
            << tilewise_last_error();
        copy_to_host(table.data(), workspace.data(), table.size() * sizeof table[0], nullptr);
        synchronize(nullptr);
        call.expect_what_the_cpu_gives();
        return table.back().q_tiles_before;
    };
    for (const Ids& each : all) {
        SCOPED_TRACE(each.what);
        for (int64_t n = 0; n < kBatch * kRows; ++n) ids[n] = each.of(n / kRows, n % kRows);
        EXPECT_EQ(tiles_of_sequences() > 0, each.are_runs);
    }
    // Ids of their own for keys: there is a kernel for the mask alone. Each has three tensor maps.
    const auto maps = [] { return calls(fake_driver(), "cuTensorMapEncodeTiled"); };
    auto before = maps();
    tiles_of_sequences();
    EXPECT_EQ(maps() - before, 6);
    std::copy_n(ids, kBatch * kRows, ids + kBatch * kRows);
    arrays[1].data = ids + kBatch * kRows;
    before = maps();
    tiles_of_sequences();
    EXPECT_EQ(maps() - before, 3);
    tilewise_plan_destroy(plan);
}

TILEWISE_ON_FAKE_GPU(RefusalsNameWhatIsWrong) {
    CallOnGpu call;
    const auto refused = [&](tilewise_status status, const char* text) {
        EXPECT_EQ(tilewise_forward(&call.problem, &call.args), status) << text;
        EXPECT_NE(std::string(tilewise_last_error()).find(text), std::string::npos) << tilewise_last_error();
    };
    call.problem.backend = "cpu_tiled";
    refused(TILEWISE_UNSUPPORTED, "works on CPU tensors; these are on cuda:0");
    call.problem.backend = "simd";
    refused(TILEWISE_INVALID_ARGUMENT, "fwd_sm90, fwd_mma, fwd_simt, bwd_mma, bwd_simt, cpu_tiled, reference");
    call.problem.backend = nullptr;
    call.problem.device_index = 7;
    EXPECT_NE(tilewise_forward(&call.problem, &call.args), TILEWISE_OK);
    EXPECT_NE(std::string(tilewise_last_error()).find('7'), std::string::npos) << tilewise_last_error();
    call.problem.device_index = -1;
    refused(TILEWISE_INVALID_ARGUMENT, "device_index");
    call.problem.device_index = 0;
    call.problem.device_type = 9;
    refused(TILEWISE_INVALID_ARGUMENT, "device_type");
    call.problem.device_type = TILEWISE_CUDA;
    EXPECT_EQ(tilewise_forward(&call.problem, &call.args), TILEWISE_OK) << tilewise_last_error();
}

TILEWISE_ON_FAKE_GPU(LengthsInDeviceMemoryAreClampedOrChecked) {
    CallOnGpu call;
    const std::array<int32_t, 3> cu{0, 5000, 30};  // beyond the tensor, and falling
    const Memory device_cu(0, sizeof cu);
    {
        const DeviceGuard guard(0);
        copy_to_device(device_cu.data(), cu.data(), sizeof cu, nullptr);
        synchronize(nullptr);
    }
    for (tilewise_tensor* tensor : {&call.problem.q, &call.problem.k, &call.problem.v, &call.args.o}) {
        *tensor = {tensor->data, TILEWISE_FLOAT32, 3, {CallOnGpu::kRows, 2, 16}, {32, 16, 1}};
    }
    call.problem.cu_seqlens_q = {device_cu.data(), TILEWISE_INT32, 1, {3}, {1}};
    call.problem.cu_seqlens_kv = call.problem.cu_seqlens_q;
    ASSERT_EQ(tilewise_forward(&call.problem, &call.args), TILEWISE_OK) << tilewise_last_error();
    for (const float x : call.result()) ASSERT_TRUE(std::isfinite(x));
    call.problem.validate = 1;
    EXPECT_EQ(tilewise_forward(&call.problem, &call.args), TILEWISE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tilewise_last_error()).find("cu_seqlens_q"), std::string::npos) << tilewise_last_error();
}

TILEWISE_ON_FAKE_GPU(ConstantsOfNoKernelAreRefused, {"TILEWISE_CONFIG", "fwd_simt:kBlocks=1,kColums=64"}) {
    CallOnGpu call;
    EXPECT_EQ(tilewise_forward(&call.problem, &call.args), TILEWISE_INVALID_ARGUMENT);
    const std::string text = tilewise_last_error();
    EXPECT_NE(text.find("TILEWISE_CONFIG: got fwd_simt:kColums"), std::string::npos) << text;
    EXPECT_NE(text.find("fwd_simt:kColumns"), std::string::npos) << text;
}

TILEWISE_ON_FAKE_GPU(DoctorRunsAKernel) {
    std::string text(tilewise_doctor(nullptr, 0), '\0');
    tilewise_doctor(text.data(), text.size());
    EXPECT_NE(text.find("cuda:0 self-test: passed"), std::string::npos) << text;
    EXPECT_NE(text.find("kernel compiler: NVRTC 13.0"), std::string::npos) << text;
    EXPECT_NE(text.find("kernel cache: "), std::string::npos) << text;
}

// Each waits until all have started, which is never if they run in turn.
TEST(CudaHost, SideBySideIsAtTheSameTime) {
    constexpr int kLoads = 3;
    std::atomic<int> started{0};
    const auto load = [&] {
        ++started;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (started.load() < kLoads && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        EXPECT_EQ(started.load(), kLoads);
    };
    side_by_side(std::vector<std::function<void()>>(kLoads, load));
    side_by_side({});
}

TEST(CudaHost, SideBySideThrowsWhenAllHaveEnded) {
    for (const size_t failing : {size_t{0}, size_t{2}}) {
        std::atomic<int> ended{0};
        std::vector<std::function<void()>> loads(3, [&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            ++ended;
        });
        loads[failing] = [] { core::refuse("a load", "this", "that"); };
        EXPECT_THROW(side_by_side(loads), core::Error);
        EXPECT_EQ(ended.load(), 2);
    }
}

}  // namespace
}  // namespace tilewise::cuda
