// libcuda.so.1 without a GPU: the driver API as far as a dlopen user of kernels, streams and memory needs it. Kernels
// are CPU code from the fake NVRTC (nvrtc.cpp) and run on fibers (engine.cpp); everything is done when a call returns.
// Device memory is host memory between guard pages, with red zones around it and NaN in it. The engine and calls.hpp
// list more variables of the environment; here:
//   TILEWISE_FAKE_CC=9.0  TILEWISE_FAKE_SMS=132  TILEWISE_FAKE_DEVICES=2  TILEWISE_FAKE_DRIVER=13000
//   TILEWISE_FAKE_MEMORY=bytes
// For tests: tilewise_fake_calls("cuMemAlloc") counts calls, tilewise_fake_message() is the last complaint.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "calls.hpp"
#include "engine.hpp"
#include "image.hpp"

namespace {

using tw_fake::Dim;
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;

enum : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kNoBinaryForGpu = 209,
    kInvalidPtx = 218,
    kOperatingSystem = 304,
    kInvalidHandle = 400,
    kNotFound = 500,
    kIllegalAddress = 700,
    kLaunchOutOfResources = 701,
    kContextIsDestroyed = 709,
    kNotSupported = 801,
};

constexpr struct {
    int code;
    const char *name, *text;
} kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "API call is not supported in the installed CUDA driver"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing stream"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

// ---------------------------------------------------------------------------------------------------------------------
// State

constexpr int kMaxDevices = 16;
constexpr size_t kRedZone = 256, kPage = 4096;

struct Context {
    int device = 0;
    int retained = 0;
};
struct Stream {
    Context* context;
    unsigned flags;
};
struct Event {
    bool timed, recorded = false;
    std::chrono::steady_clock::time_point when;
};
struct Module;
struct Function {
    Module* module;
    std::string name;
    const tw_fake::Kernel* kernel;
    int max_dynamic, carveout = -1;
};
struct Module {
    Context* context;
    void* handle = nullptr;
    void* (*anchor)() = nullptr;
    unsigned arch = 0;
    size_t shared_bytes = 0;
    std::map<std::string, std::unique_ptr<Function>> functions;
};
struct Allocation {
    char* mapping;
    size_t mapped, size;
    int device;
    bool on_host, damaged;
};

struct State {
    std::mutex mutex;
    bool initialised = false;
    Context primary[kMaxDevices];
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::set<Module*> modules;
    std::set<Function*> functions;
    std::map<uintptr_t, Allocation> memory;  // by the first byte
    size_t used[kMaxDevices] = {};
    std::string message;
};
State& state() {
    static auto* one = new State;
    return *one;
}
thread_local std::vector<Context*> current_stack;

// A line on stderr, kept for tilewise_fake_message.
[[gnu::format(printf, 2, 3)]] CUresult complain(CUresult code, const char* format, ...) {
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "fake CUDA: %s\n", text);
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    state().message = text;
    return code;
}

long number(const char* variable, long otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtol(text, nullptr, 0) : otherwise;
}
int device_count() { return static_cast<int>(std::clamp(number("TILEWISE_FAKE_DEVICES", 2), 0l, long{kMaxDevices})); }
int capability() {  // 90
    const char* text = std::getenv("TILEWISE_FAKE_CC");
    int major = 9, minor = 0;
    if (text) std::sscanf(text, "%d.%d", &major, &minor);
    return major * 10 + minor;
}

struct Chip {
    int sms, shared_per_sm, shared_optin, threads_per_sm, blocks_per_sm;
};
Chip chip() {
    const int cc = capability();
    if (cc < 75) return {80, 98304, 98304, 2048, 32};
    if (cc == 75) return {40, 65536, 65536, 1024, 16};
    if (cc == 80) return {108, 167936, 166912, 2048, 32};
    if (cc == 87) return {16, 167936, 166912, 1536, 16};
    if (cc < 89) return {84, 102400, 101376, 1536, 16};
    if (cc == 89) return {128, 102400, 101376, 1536, 24};
    if (cc >= 120) return {188, 102400, 101376, 1536, 24};
    return {cc >= 100 ? 148 : 132, 233472, 232448, 2048, 32};
}
int num_sms() { return static_cast<int>(number("TILEWISE_FAKE_SMS", chip().sms)); }
size_t total_memory() { return static_cast<size_t>(number("TILEWISE_FAKE_MEMORY", 150'754'820'096)); }

Context* current() { return current_stack.empty() ? nullptr : current_stack.back(); }

bool is_context(const Context* c) { return c >= state().primary && c < state().primary + kMaxDevices; }

CUresult enter(const char* function, bool needs_init, bool needs_context) {
    if (const int code = tw_fake::calls().enter(function)) return code;
    if (needs_init && !state().initialised) return kNotInitialized;
    if (!needs_context) return kSuccess;
    if (!current()) return kInvalidContext;
    return current()->retained > 0 ? kSuccess : kContextIsDestroyed;
}

#define TW_API extern "C" __attribute__((visibility("default"))) CUresult
#define TW_ENTER(init, context) \
    if (const CUresult code_ = enter(__func__, init, context)) return code_
#define TW_ALWAYS() TW_ENTER(false, false)
#define TW_INITIALISED() TW_ENTER(true, false)
#define TW_IN_CONTEXT() TW_ENTER(true, true)
#define TW_REQUIRE(condition) \
    if (!(condition)) return kInvalidValue

bool device_exists(CUdevice device) { return device >= 0 && device < device_count(); }

CUresult check_stream(void* stream) {
    if (reinterpret_cast<uintptr_t>(stream) <= 2) return kSuccess;  // default, legacy, per thread
    const std::lock_guard lock(state().mutex);
    auto* s = static_cast<Stream*>(stream);
    if (!state().streams.count(s)) return complain(kInvalidHandle, "%p is no stream", stream);
    if (s->context != current()) return complain(kInvalidHandle, "the stream %p belongs to another context", stream);
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

char* data_of(uintptr_t address) { return std::bit_cast<char*>(address); }

// The pattern is a NaN in every format of 16 to 64 bits, and not what memset writes most.
unsigned char red_byte(const char* at) { return reinterpret_cast<uintptr_t>(at) % 2 ? 0xFF : 0xFB; }

template <class F>
void each_red_byte(uintptr_t address, const Allocation& a, F f) {
    char* data = data_of(address);
    char* end = a.mapping + a.mapped - kPage;
    for (char* p = data - kRedZone; p < data; ++p) f(p);
    for (char* p = data + a.size; p < end; ++p) f(p);
}

// Complains about every overwritten red zone, once; true if any was.
bool check_memory(const char* when) {  // with the lock
    bool bad = false;
    for (auto& [address, a] : state().memory) {
        const char* first = nullptr;
        each_red_byte(address, a, [&](char* p) {
            if (static_cast<unsigned char>(*p) == red_byte(p)) return;
            if (!first) first = p;
            *p = static_cast<char>(red_byte(p));
        });
        if (!first) continue;
        const auto where = reinterpret_cast<uintptr_t>(first);
        a.damaged = bad = true;
        complain(kIllegalAddress, "red zone overwritten: %lu bytes %s the allocation of %zu bytes at %p, seen %s",
                 where < address ? address - where : where - address - a.size,
                 where < address ? "before" : "after the end of", a.size, data_of(address), when);
    }
    return bad;
}

// Damage that was seen after a launch is an error of the next synchronisation or free.
CUresult take_damage(const char* when) {
    const std::lock_guard lock(state().mutex);
    check_memory(when);
    CUresult code = kSuccess;
    for (auto& [address, a] : state().memory) {
        if (a.damaged) code = kIllegalAddress;
        a.damaged = false;
    }
    return code;
}

const std::pair<const uintptr_t, Allocation>* find(CUdeviceptr pointer) {  // with the lock
    auto& memory = state().memory;
    auto at = memory.upper_bound(static_cast<uintptr_t>(pointer));
    if (at == memory.begin()) return nullptr;
    --at;
    return pointer < at->first + at->second.size ? &*at : nullptr;
}

std::string describe(const void* address) {
    const std::lock_guard lock(state().mutex);
    const auto where = reinterpret_cast<uintptr_t>(address);
    for (const auto& [start, a] : state().memory) {
        const auto from = reinterpret_cast<uintptr_t>(a.mapping);
        if (where < from || where >= from + a.mapped) continue;
        const bool before = where < start;
        return ", " + std::to_string(before ? start - where : where - start - a.size) +
               (before ? " bytes before an allocation of " : " bytes after the end of an allocation of ") +
               std::to_string(a.size);
    }
    return where < kPage ? ", a null pointer" : ", in no allocation";
}

CUresult allocate(CUdeviceptr* result, size_t size, bool on_host) {
    TW_REQUIRE(result && size > 0);
    const int device = current()->device;
    const std::lock_guard lock(state().mutex);
    const size_t physical = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t limit = std::min(total_memory(), physical / 4 * 3);
    if (size > limit || state().used[device] + size > limit) return kOutOfMemory;
    const size_t middle = (2 * kRedZone + (size + 255) / 256 * 256 + kPage - 1) / kPage * kPage;
    void* mapping = mmap(nullptr, middle + 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return kOutOfMemory;
    auto* first = static_cast<char*>(mapping);
    mprotect(first, kPage, PROT_NONE);
    mprotect(first + kPage + middle, kPage, PROT_NONE);
    // At the end, so that what runs far past it faults.
    char* data = first + kPage + middle - kRedZone - (size + 255) / 256 * 256;
    const auto address = reinterpret_cast<uintptr_t>(data);
    const Allocation a = {first, middle + 2 * kPage, size, device, on_host, false};
    std::memset(data, 0xFF, size);
    each_red_byte(address, a, [](char* p) { *p = static_cast<char>(red_byte(p)); });
    state().memory.emplace(address, a);
    state().used[device] += size;
    *result = address;
    return kSuccess;
}

CUresult release(CUdeviceptr pointer) {
    if (!pointer) return kSuccess;
    const CUresult damage = take_damage("at a free");
    const std::lock_guard lock(state().mutex);
    const auto at = state().memory.find(static_cast<uintptr_t>(pointer));
    if (at == state().memory.end()) return complain(kInvalidValue, "free of %#llx, which is no allocation", pointer);
    state().used[at->second.device] -= at->second.size;
    munmap(at->second.mapping, at->second.mapped);
    state().memory.erase(at);
    return damage;
}

// Device ranges must lie in one allocation; what is in none is host memory where that is allowed.
CUresult check_range(CUdeviceptr pointer, size_t size, bool host_too) {
    if (size == 0) return kSuccess;
    const std::lock_guard lock(state().mutex);
    const auto* found = find(pointer);
    if (!found && host_too) return pointer ? kSuccess : kInvalidValue;
    if (!found) return complain(kInvalidValue, "%#llx is in no allocation", pointer);
    const size_t room = found->first + found->second.size - static_cast<uintptr_t>(pointer);
    if (room >= size) return kSuccess;
    return complain(kInvalidValue, "a range of %zu bytes at %#llx passes the end of its allocation by %zu", size,
                    pointer, size - room);
}

void* host(CUdeviceptr pointer) { return std::bit_cast<void*>(static_cast<uintptr_t>(pointer)); }

CUresult copy(CUdeviceptr to, bool to_host, CUdeviceptr from, bool from_host, size_t size) {
    if (const CUresult code = check_range(to, size, to_host)) return code;
    if (const CUresult code = check_range(from, size, from_host)) return code;
    if (size) std::memmove(host(to), host(from), size);
    return kSuccess;
}
CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

template <class T>
CUresult fill(CUdeviceptr to, T value, size_t n) {
    TW_REQUIRE(to % sizeof(T) == 0);
    if (const CUresult code = check_range(to, n * sizeof(T), false)) return code;
    std::fill_n(static_cast<T*>(host(to)), n, value);
    return kSuccess;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// For tests

extern "C" __attribute__((visibility("default"))) unsigned long long tilewise_fake_calls(const char* name) {
    return tw_fake::calls().count(name);
}
extern "C" __attribute__((visibility("default"))) const char* tilewise_fake_message() {
    return state().message.c_str();
}

// ---------------------------------------------------------------------------------------------------------------------
// Driver, devices, contexts

TW_API cuInit(unsigned flags) {
    TW_ALWAYS();
    TW_REQUIRE(flags == 0);
    if (device_count() == 0) return kNoDevice;
    for (int i = 0; i < kMaxDevices; ++i) state().primary[i].device = i;
    state().initialised = true;
    return kSuccess;
}
TW_API cuDriverGetVersion(int* version) {
    TW_ALWAYS();
    TW_REQUIRE(version);
    *version = static_cast<int>(number("TILEWISE_FAKE_DRIVER", 13000));
    return kSuccess;
}
TW_API cuGetErrorName(CUresult error, const char** text) {
    TW_ALWAYS();
    TW_REQUIRE(text);
    *text = nullptr;
    for (const auto& e : kErrors) {
        if (e.code == error) return *text = e.name, kSuccess;
    }
    return kInvalidValue;
}
TW_API cuGetErrorString(CUresult error, const char** text) {
    TW_ALWAYS();
    TW_REQUIRE(text);
    *text = nullptr;
    for (const auto& e : kErrors) {
        if (e.code == error) return *text = e.text, kSuccess;
    }
    return kInvalidValue;
}
TW_API cuDeviceGetCount(int* count) {
    TW_INITIALISED();
    TW_REQUIRE(count);
    *count = device_count();
    return kSuccess;
}
TW_API cuDeviceGet(CUdevice* device, int ordinal) {
    TW_INITIALISED();
    TW_REQUIRE(device);
    if (!device_exists(ordinal)) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
}
TW_API cuDeviceGetName(char* name, int length, CUdevice device) {
    TW_INITIALISED();
    TW_REQUIRE(name && length > 0);
    if (!device_exists(device)) return kInvalidDevice;
    std::snprintf(name, static_cast<size_t>(length), "Tilewise Fake GPU %d.%d", capability() / 10, capability() % 10);
    return kSuccess;
}
TW_API cuDeviceGetUuid_v2(void* uuid, CUdevice device) {
    TW_INITIALISED();
    TW_REQUIRE(uuid);
    if (!device_exists(device)) return kInvalidDevice;
    std::memcpy(uuid, "tilewise fake 0", 16);
    static_cast<char*>(uuid)[15] = static_cast<char>(device + 1);
    return kSuccess;
}
TW_API cuDeviceGetUuid(void* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
TW_API cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    TW_INITIALISED();
    TW_REQUIRE(bytes);
    if (!device_exists(device)) return kInvalidDevice;
    *bytes = total_memory();
    return kSuccess;
}
TW_API cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    TW_INITIALISED();
    TW_REQUIRE(value);
    if (!device_exists(device)) return kInvalidDevice;
    const Chip c = chip();
    const int hopper = capability() >= 90;
    const struct {
        int attribute, value;
    } known[] = {
        {1, 1024},                             // threads of a block
        {2, 1024},                             // block x
        {3, 1024},                             // block y
        {4, 64},                               // block z
        {5, 2147483647},                       // grid x
        {6, 65535},                            // grid y
        {7, 65535},                            // grid z
        {8, 49152},                            // shared memory of a block
        {9, 65536},                            // constant memory
        {10, 32},                              // warp
        {11, 2147483647},                      // pitch
        {12, 65536},                           // registers of a block
        {13, 1980000},                         // clock, kHz
        {14, 512},                             // alignment of textures
        {15, 1},                               // copies overlap
        {16, num_sms()},                       // multiprocessors
        {19, 1},                               // maps host memory
        {31, 1},                               // concurrent kernels
        {32, 1},                               // ECC
        {33, 1 + device},                      // PCI bus
        {36, 3201000},                         // memory clock, kHz
        {37, 6144},                            // memory bus, bits
        {38, 62914560},                        // L2
        {39, c.threads_per_sm},                // threads of an SM
        {40, 3},                               // copy engines
        {41, 1},                               // unified addressing
        {75, capability() / 10},               // compute capability
        {76, capability() % 10},               // its minor part
        {77, 1},                               // priorities of streams
        {78, 1},                               // L1 for global memory
        {79, 1},                               // L1 for local memory
        {81, c.shared_per_sm},                 // shared memory of an SM
        {82, 65536},                           // registers of an SM
        {83, 1},                               // managed memory
        {87, 2},                               // fp32 to fp64
        {90, 1},                               // preemption
        {95, 1},                               // cooperative launch
        {97, c.shared_optin},                  // shared memory of a block, at most
        {106, c.blocks_per_sm},                // blocks of an SM
        {108, 39321600},                       // persisting L2
        {109, 134217728},                      // access policy window
        {111, capability() >= 80 ? 1024 : 0},  // reserved shared memory of a block
        {115, 1},                              // memory pools
        {120, hopper},                         // clusters
        {127, hopper},                         // tensor maps
    };
    TW_REQUIRE(attribute > 0 && attribute < 148);
    *value = 0;
    for (const auto& k : known) {
        if (k.attribute == attribute) *value = k.value;
    }
    return kSuccess;
}

TW_API cuDevicePrimaryCtxRetain(Context** context, CUdevice device) {
    TW_INITIALISED();
    TW_REQUIRE(context);
    if (!device_exists(device)) return kInvalidDevice;
    const std::lock_guard lock(state().mutex);
    *context = &state().primary[device];
    ++(*context)->retained;
    return kSuccess;
}
TW_API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    TW_INITIALISED();
    if (!device_exists(device)) return kInvalidDevice;
    const std::lock_guard lock(state().mutex);
    if (state().primary[device].retained == 0) return kInvalidContext;
    --state().primary[device].retained;
    return kSuccess;
}
TW_API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    TW_INITIALISED();
    TW_REQUIRE(flags && active);
    if (!device_exists(device)) return kInvalidDevice;
    *flags = 0;
    *active = state().primary[device].retained > 0;
    return kSuccess;
}
TW_API cuCtxGetCurrent(Context** context) {
    TW_INITIALISED();
    TW_REQUIRE(context);
    *context = current();
    return kSuccess;
}
TW_API cuCtxSetCurrent(Context* context) {
    TW_INITIALISED();
    if (context && !is_context(context)) return kInvalidContext;
    if (!current_stack.empty()) current_stack.pop_back();
    if (context) current_stack.push_back(context);
    return kSuccess;
}
TW_API cuCtxPushCurrent_v2(Context* context) {
    TW_INITIALISED();
    if (!context || !is_context(context)) return kInvalidContext;
    current_stack.push_back(context);
    return kSuccess;
}
TW_API cuCtxPopCurrent_v2(Context** context) {
    TW_INITIALISED();
    if (current_stack.empty()) return kInvalidContext;
    if (context) *context = current();
    current_stack.pop_back();
    return kSuccess;
}
TW_API cuCtxGetDevice(CUdevice* device) {
    TW_IN_CONTEXT();
    TW_REQUIRE(device);
    *device = current()->device;
    return kSuccess;
}
TW_API cuCtxSynchronize() {
    TW_IN_CONTEXT();
    return take_damage("at cuCtxSynchronize");
}
TW_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    TW_IN_CONTEXT();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return kSuccess;
}
TW_API cuDeviceCanAccessPeer(int* yes, CUdevice device, CUdevice peer) {
    TW_INITIALISED();
    TW_REQUIRE(yes);
    if (!device_exists(device) || !device_exists(peer)) return kInvalidDevice;
    *yes = device != peer;
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Modules and functions

namespace {

// Machine code runs on later chips of its generation; that of an "a" arch on that chip alone. PTX runs on all later
// ones.
bool runs_here(const tw_fake::ImageHeader& image) {
    const auto here = static_cast<unsigned>(capability());
    if (image.suffix == 'a') return image.arch == here;
    if (image.ptx && image.suffix == 0) return image.arch <= here;
    return image.arch / 10 == here / 10 && image.arch <= here;
}

void* shared_of(void* module) {
    auto* m = static_cast<Module*>(module);
    m->anchor();
    void* block = nullptr;
    return dlinfo(m->handle, RTLD_DI_TLS_DATA, static_cast<void*>(&block)) == 0 ? block : nullptr;
}

size_t shared_size(void* handle) {
    struct Search {
        ElfW(Addr) base;
        size_t size;
    } search = {};
    struct link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0) return 0;
    search.base = map->l_addr;
    dl_iterate_phdr(
        [](struct dl_phdr_info* info, size_t, void* data) {
            auto* s = static_cast<Search*>(data);
            if (info->dlpi_addr != s->base) return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                if (info->dlpi_phdr[i].p_type == PT_TLS) s->size = info->dlpi_phdr[i].p_memsz;
            }
            return 1;
        },
        &search);
    return search.size;
}

CUresult load(Module** result, const void* image) {
    TW_REQUIRE(result && image);
    std::string decoded;
    const char* bytes = static_cast<const char*>(image);
    if (std::strncmp(bytes, tw_fake::kPtxMagic.data(), tw_fake::kPtxMagic.size()) == 0) {
        const auto digit = [](char c) {
            return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        };
        for (bytes += tw_fake::kPtxMagic.size(); digit(bytes[0]) >= 0 && digit(bytes[1]) >= 0; bytes += 2) {
            decoded += static_cast<char>(digit(bytes[0]) << 4 | digit(bytes[1]));
        }
        if (decoded.size() < sizeof(tw_fake::ImageHeader)) return kInvalidPtx;
        bytes = decoded.data();
    }
    if (std::strncmp(bytes, tw_fake::kMagic, sizeof tw_fake::kMagic) != 0) return kNoBinaryForGpu;
    tw_fake::ImageHeader header;
    std::memcpy(&header, bytes, sizeof header);
    if (header.abi != tw_fake::kAbi) return complain(kInvalidImage, "an image of another version of the fake NVRTC");
    if (!decoded.empty() && header.size != decoded.size() - sizeof header) return kInvalidPtx;
    const std::string_view object(bytes + sizeof header, header.size);
    if (header.checksum != tw_fake::checksum_of(object)) return complain(kInvalidImage, "a damaged image");
    if (!runs_here(header)) return kNoBinaryForGpu;

    // The loader knows objects by path, so each gets a new one.
    const char* folder = std::getenv("TMPDIR");
    std::string path = std::string(folder && *folder ? folder : "/tmp") + "/tilewise-fake-XXXXXX.so";
    const int file = mkstemps(path.data(), 3);
    if (file < 0) return complain(kOperatingSystem, "cannot write %s: %s", path.c_str(), std::strerror(errno));
    size_t written = 0;
    while (written < object.size()) {
        const ssize_t n = write(file, object.data() + written, object.size() - written);
        if (n <= 0) break;
        written += static_cast<size_t>(n);
    }
    close(file);
    void* handle = written == object.size() ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    const char* error = handle ? nullptr : dlerror();
    unlink(path.c_str());
    if (!handle) return complain(kInvalidImage, "cannot load a kernel: %s", error ? error : "disk full?");

    auto module = std::make_unique<Module>();
    module->context = current();
    module->handle = handle;
    module->anchor = reinterpret_cast<void* (*)()>(dlsym(handle, "tw_fake_shared"));
    module->arch = header.arch;
    module->shared_bytes = shared_size(handle);
    const std::lock_guard lock(state().mutex);
    state().modules.insert(module.get());
    *result = module.release();
    return kSuccess;
}

Function* known(Function* function) {
    const std::lock_guard lock(state().mutex);
    return state().functions.count(function) ? function : nullptr;
}

int static_shared(const Function& f) {  // about: without the anchor of device.hpp
    return f.module->shared_bytes > 64 ? static_cast<int>(f.module->shared_bytes) - 64 : 0;
}

}  // namespace

TW_API cuModuleLoadData(Module** module, const void* image) {
    TW_IN_CONTEXT();
    return load(module, image);
}
TW_API cuModuleLoadDataEx(Module** module, const void* image, unsigned, int*, void**) {
    TW_IN_CONTEXT();
    return load(module, image);
}
TW_API cuModuleUnload(Module* module) {
    TW_IN_CONTEXT();
    const std::lock_guard lock(state().mutex);
    if (!state().modules.erase(module)) return kInvalidHandle;
    for (const auto& [name, function] : module->functions) state().functions.erase(function.get());
    dlclose(module->handle);
    delete module;
    return kSuccess;
}
TW_API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    TW_IN_CONTEXT();
    TW_REQUIRE(function && name);
    const std::lock_guard lock(state().mutex);
    if (!state().modules.count(module)) return kInvalidHandle;
    const auto* kernel =
        static_cast<const tw_fake::Kernel*>(dlsym(module->handle, (std::string(name) + "_tw_kernel").c_str()));
    if (!kernel) {
        if (!dlsym(module->handle, name)) return kNotFound;
        return complain(
            kNotFound, "'%s' was declared neither with TW_KERNEL nor as extern \"C\" __global__ at global scope", name);
    }
    auto& slot = module->functions[name];
    if (!slot) {
        slot = std::make_unique<Function>();
        *slot = {module, name, kernel, 49152};
        state().functions.insert(slot.get());
    }
    *function = slot.get();
    return kSuccess;
}
TW_API cuFuncGetAttribute(int* value, int attribute, Function* function) {
    TW_IN_CONTEXT();
    TW_REQUIRE(value);
    const Function* f = known(function);
    if (!f) return kInvalidHandle;
    switch (attribute) {
        case 0: *value = static_cast<int>(f->kernel->max_threads); break;
        case 1: *value = static_shared(*f); break;
        case 4: *value = 64; break;  // registers
        case 5:
        case 6: *value = static_cast<int>(f->module->arch); break;
        case 8: *value = f->max_dynamic; break;
        case 9: *value = f->carveout; break;
        default: TW_REQUIRE(attribute >= 0 && attribute <= 15); *value = 0;
    }
    return kSuccess;
}
TW_API cuFuncSetAttribute(Function* function, int attribute, int value) {
    TW_IN_CONTEXT();
    Function* f = known(function);
    if (!f) return kInvalidHandle;
    switch (attribute) {
        case 8:
            TW_REQUIRE(value >= 0 && value + static_shared(*f) <= chip().shared_optin);
            f->max_dynamic = value;
            return kSuccess;
        case 9:
            TW_REQUIRE(value >= -1 && value <= 100);
            f->carveout = value;
            return kSuccess;
        case 14:
        case 15: return kSuccess;  // clusters
        default: return kInvalidValue;
    }
}
TW_API cuFuncSetCacheConfig(Function* function, int) {
    TW_IN_CONTEXT();
    return known(function) ? kSuccess : kInvalidHandle;
}
TW_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t dynamic) {
    TW_IN_CONTEXT();
    TW_REQUIRE(blocks && threads > 0);
    const Function* f = known(function);
    if (!f) return kInvalidHandle;
    const Chip c = chip();
    const int shared = static_shared(*f) + static_cast<int>(dynamic) + (capability() >= 80 ? 1024 : 0);
    *blocks = 0;
    if (static_cast<unsigned>(threads) > f->kernel->max_threads || static_cast<int>(dynamic) > f->max_dynamic)
        return kSuccess;
    *blocks = std::min(
        {c.blocks_per_sm, c.threads_per_sm / ((threads + 31) / 32 * 32), c.shared_per_sm / std::max(shared, 1)});
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

namespace {

CUresult launch(Function* function, Dim grid, Dim block, unsigned dynamic, void* stream, void** params, void** extra) {
    Function* f = known(function);
    if (!f) return complain(kInvalidHandle, "launch of %p, which is no function", static_cast<void*>(function));
    if (f->module->context != current()) {
        return complain(kInvalidHandle, "launch of '%s', which was loaded in another context", f->name.c_str());
    }
    if (const CUresult code = check_stream(stream)) return code;
    const auto refuse = [&](CUresult code, const char* why) {
        return complain(code, "launch of '%s' refused: %s (grid %u x %u x %u, block %u x %u x %u, %u bytes)",
                        f->name.c_str(), why, grid.x, grid.y, grid.z, block.x, block.y, block.z, dynamic);
    };
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z)
        return refuse(kInvalidValue, "an extent is zero");
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return refuse(kInvalidValue, "the grid is too large");
    if (block.x > 1024 || block.y > 1024 || block.z > 64 || block.x * block.y * block.z > 1024) {
        return refuse(kInvalidValue, "the block is too large");
    }
    const tw_fake::Kernel& kernel = *f->kernel;
    if (block.x * block.y * block.z > kernel.max_threads) {
        return refuse(kLaunchOutOfResources, "more threads than its launch bounds");
    }
    if (dynamic > static_cast<unsigned>(f->max_dynamic) ||
        static_cast<int>(dynamic) + static_shared(*f) > chip().shared_optin) {
        return refuse(kInvalidValue, "more shared memory than cuFuncSetAttribute allowed");
    }

    // A copy of the arguments, as a GPU has.
    size_t size = 0;
    std::vector<size_t> offsets;
    for (unsigned i = 0; i < kernel.num_params; ++i) {
        const size_t a = kernel.alignments[i];
        size = (size + a - 1) / a * a;
        offsets.push_back(size);
        size += kernel.sizes[i];
    }
    if (size > 32764) return refuse(kInvalidValue, "more than 32,764 bytes of arguments");
    const std::unique_ptr<void, void (*)(void*)> copy(std::aligned_alloc(256, (size + 256) / 256 * 256), std::free);
    char* arguments = static_cast<char*>(copy.get());
    if (extra && *extra) {
        if (params) return refuse(kInvalidValue, "both kernelParams and extra");
        const void* buffer = nullptr;
        size_t given = 0;
        for (void** e = extra; *e; e += 2) {
            const auto what = reinterpret_cast<uintptr_t>(*e);
            if (what == 1) buffer = e[1];
            else if (what == 2) given = *static_cast<size_t*>(e[1]);
            else return refuse(kInvalidValue, "unknown entry in extra");
        }
        if (!buffer || given < size) return refuse(kInvalidValue, "the buffer of arguments is too small");
        std::memcpy(arguments, buffer, size);
    } else if (kernel.num_params) {
        if (!params) return refuse(kInvalidValue, "no arguments");
        for (unsigned i = 0; i < kernel.num_params; ++i) {
            if (!params[i]) return refuse(kInvalidValue, "a null argument");
            std::memcpy(arguments + offsets[i], params[i], kernel.sizes[i]);
        }
    }
    std::vector<void*> pointers;
    for (const size_t offset : offsets) pointers.push_back(arguments + offset);
    pointers.push_back(nullptr);

    const tw_fake::Grid job = {f->name.c_str(), &kernel,   pointers.data(),         grid,     block, dynamic,
                               &shared_of,      f->module, f->module->shared_bytes, &describe};
    const tw_fake::Outcome outcome = tw_fake::run(job);
    {
        const std::lock_guard lock(state().mutex);
        check_memory(("after a launch of '" + f->name + "'").c_str());
    }
    return outcome.code ? complain(outcome.code, "%s", outcome.text.c_str()) : kSuccess;
}

struct LaunchAttribute {
    int id;
    int pad;
    union {
        char bytes[64];
        unsigned dims[3];
    } value;
};
struct LaunchConfig {
    unsigned grid[3], block[3], dynamic;
    void* stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};

}  // namespace

TW_API cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned dynamic, void* stream, void** params, void** extra) {
    TW_IN_CONTEXT();
    return launch(function, {gx, gy, gz}, {bx, by, bz}, dynamic, stream, params, extra);
}
TW_API cuLaunchKernelEx(const LaunchConfig* c, Function* function, void** params, void** extra) {
    TW_IN_CONTEXT();
    TW_REQUIRE(c && (c->attributes || !c->num_attributes));
    for (unsigned i = 0; i < c->num_attributes; ++i) {
        const LaunchAttribute& a = c->attributes[i];
        TW_REQUIRE(a.id >= 0 && a.id <= 16);
        if (a.id == 4 && a.value.dims[0] * a.value.dims[1] * a.value.dims[2] > 1) {
            return complain(kNotSupported, "clusters are not emulated");
        }
    }
    return launch(function, {c->grid[0], c->grid[1], c->grid[2]}, {c->block[0], c->block[1], c->block[2]}, c->dynamic,
                  c->stream, params, extra);
}
TW_API cuLaunchHostFunc(void* stream, void (*body)(void*), void* data) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    TW_REQUIRE(body);
    body(data);
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events

TW_API cuStreamCreate(Stream** stream, unsigned flags) {
    TW_IN_CONTEXT();
    TW_REQUIRE(stream && flags <= 1);
    const std::lock_guard lock(state().mutex);
    *stream = new Stream{current(), flags};
    state().streams.insert(*stream);
    return kSuccess;
}
TW_API cuStreamCreateWithPriority(Stream** stream, unsigned flags, int) {
    TW_IN_CONTEXT();
    TW_REQUIRE(stream && flags <= 1);
    const std::lock_guard lock(state().mutex);
    *stream = new Stream{current(), flags};
    state().streams.insert(*stream);
    return kSuccess;
}
TW_API cuStreamDestroy_v2(Stream* stream) {
    TW_IN_CONTEXT();
    const std::lock_guard lock(state().mutex);
    if (!state().streams.erase(stream)) return kInvalidHandle;
    delete stream;
    return kSuccess;
}
TW_API cuStreamSynchronize(void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return take_damage("at cuStreamSynchronize");
}
TW_API cuStreamQuery(void* stream) {
    TW_IN_CONTEXT();
    return check_stream(stream);
}
TW_API cuStreamGetCtx(void* stream, Context** context) {
    TW_IN_CONTEXT();
    TW_REQUIRE(context);
    if (reinterpret_cast<uintptr_t>(stream) <= 2) {
        *context = current();
        return kSuccess;
    }
    const std::lock_guard lock(state().mutex);
    auto* s = static_cast<Stream*>(stream);
    if (!state().streams.count(s)) return kInvalidHandle;
    *context = s->context;
    return kSuccess;
}
TW_API cuStreamGetFlags(void* stream, unsigned* flags) {
    TW_IN_CONTEXT();
    TW_REQUIRE(flags);
    if (const CUresult code = check_stream(stream)) return code;
    *flags = reinterpret_cast<uintptr_t>(stream) <= 2 ? 0 : static_cast<Stream*>(stream)->flags;
    return kSuccess;
}
TW_API cuStreamIsCapturing(void* stream, int* status) {
    TW_IN_CONTEXT();
    TW_REQUIRE(status);
    if (const CUresult code = check_stream(stream)) return code;
    *status = 0;
    return kSuccess;
}
TW_API cuStreamBeginCapture_v2(void*, int) {
    TW_IN_CONTEXT();
    return complain(kNotSupported, "graphs are not emulated");
}
TW_API cuEventCreate(Event** event, unsigned flags) {
    TW_IN_CONTEXT();
    TW_REQUIRE(event && flags <= 7);
    const std::lock_guard lock(state().mutex);
    *event = new Event{!(flags & 2), false, {}};
    state().events.insert(*event);
    return kSuccess;
}

namespace {
bool known(Event* event) {
    const std::lock_guard lock(state().mutex);
    return state().events.count(event) > 0;
}
CUresult elapsed(float* milliseconds, const Event* from, const Event* to) {
    TW_REQUIRE(milliseconds);
    if (!from->timed || !to->timed || !from->recorded || !to->recorded) return kInvalidHandle;
    *milliseconds = std::chrono::duration<float, std::milli>(to->when - from->when).count();
    return kSuccess;
}
}  // namespace

TW_API cuEventRecord(Event* event, void* stream) {
    TW_IN_CONTEXT();
    if (!known(event)) return kInvalidHandle;
    if (const CUresult code = check_stream(stream)) return code;
    event->recorded = true;
    event->when = std::chrono::steady_clock::now();
    return kSuccess;
}
TW_API cuEventQuery(Event* event) {
    TW_IN_CONTEXT();
    return known(event) ? kSuccess : kInvalidHandle;
}
TW_API cuEventSynchronize(Event* event) {
    TW_IN_CONTEXT();
    return known(event) ? take_damage("at cuEventSynchronize") : kInvalidHandle;
}
TW_API cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    TW_IN_CONTEXT();
    return known(from) && known(to) ? elapsed(milliseconds, from, to) : kInvalidHandle;
}
TW_API cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    TW_IN_CONTEXT();
    return known(from) && known(to) ? elapsed(milliseconds, from, to) : kInvalidHandle;
}
TW_API cuEventDestroy_v2(Event* event) {
    TW_IN_CONTEXT();
    const std::lock_guard lock(state().mutex);
    if (!state().events.erase(event)) return kInvalidHandle;
    delete event;
    return kSuccess;
}
TW_API cuStreamWaitEvent(void* stream, Event* event, unsigned flags) {
    TW_IN_CONTEXT();
    TW_REQUIRE(flags <= 1);
    if (!known(event)) return kInvalidHandle;
    return check_stream(stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

TW_API cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
    TW_IN_CONTEXT();
    return allocate(pointer, size, false);
}
TW_API cuMemFree_v2(CUdeviceptr pointer) {
    TW_IN_CONTEXT();
    return release(pointer);
}
TW_API cuMemAllocAsync(CUdeviceptr* pointer, size_t size, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return allocate(pointer, size, false);
}
TW_API cuMemFreeAsync(CUdeviceptr pointer, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return release(pointer);
}
TW_API cuMemAllocHost_v2(void** pointer, size_t size) {
    TW_IN_CONTEXT();
    CUdeviceptr address = 0;
    const CUresult code = allocate(&address, size, true);
    if (pointer) *pointer = host(address);
    return code;
}
TW_API cuMemHostAlloc(void** pointer, size_t size, unsigned) {
    TW_IN_CONTEXT();
    CUdeviceptr address = 0;
    const CUresult code = allocate(&address, size, true);
    if (pointer) *pointer = host(address);
    return code;
}
TW_API cuMemFreeHost(void* pointer) {
    TW_IN_CONTEXT();
    return release(address_of(pointer));
}
TW_API cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    TW_IN_CONTEXT();
    TW_REQUIRE(free_bytes && total);
    const std::lock_guard lock(state().mutex);
    *total = total_memory();
    *free_bytes = *total - std::min(*total, state().used[current()->device]);
    return kSuccess;
}
TW_API cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* size, CUdeviceptr pointer) {
    TW_IN_CONTEXT();
    const std::lock_guard lock(state().mutex);
    const auto* found = find(pointer);
    if (!found) return kNotFound;
    if (start) *start = found->first;
    if (size) *size = found->second.size;
    return kSuccess;
}

TW_API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
    TW_IN_CONTEXT();
    return copy(to, false, address_of(from), true, size);
}
TW_API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
    TW_IN_CONTEXT();
    return copy(address_of(to), true, from, false, size);
}
TW_API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    TW_IN_CONTEXT();
    return copy(to, false, from, false, size);
}
TW_API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    TW_IN_CONTEXT();
    return copy(to, true, from, true, size);
}
TW_API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return copy(to, false, address_of(from), true, size);
}
TW_API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return copy(address_of(to), true, from, false, size);
}
TW_API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return copy(to, false, from, false, size);
}
TW_API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return copy(to, true, from, true, size);
}
TW_API cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n) {
    TW_IN_CONTEXT();
    return fill(to, value, n);
}
TW_API cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t n) {
    TW_IN_CONTEXT();
    return fill(to, value, n);
}
TW_API cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t n) {
    TW_IN_CONTEXT();
    return fill(to, value, n);
}
TW_API cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return fill(to, value, n);
}
TW_API cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return fill(to, value, n);
}
TW_API cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, void* stream) {
    TW_IN_CONTEXT();
    if (const CUresult code = check_stream(stream)) return code;
    return fill(to, value, n);
}

namespace {
// Writes the attribute; false if it does not exist. Unknown pointers have none but zeros.
bool pointer_attribute(void* data, int attribute, CUdeviceptr pointer,
                       const std::pair<const uintptr_t, Allocation>* found) {
    const Allocation* a = found ? &found->second : nullptr;
    const auto put = [&](auto value) { std::memcpy(data, static_cast<const void*>(&value), sizeof value); };
    switch (attribute) {
        case 1: put(static_cast<void*>(a ? &state().primary[a->device] : nullptr)); return true;
        case 2: put(a ? a->on_host ? 1u : 2u : 0u); return true;
        case 3: put(a ? pointer : CUdeviceptr{0}); return true;
        case 4: put(a && a->on_host ? host(pointer) : nullptr); return true;
        case 6: put(1u); return true;
        case 7: put(a ? static_cast<unsigned long long>(found->first) : 0ull); return true;
        case 8: put(0u); return true;
        case 9: put(a ? a->device : -2); return true;
        case 11: put(a ? static_cast<CUdeviceptr>(found->first) : CUdeviceptr{0}); return true;
        case 12: put(a ? a->size : size_t{0}); return true;
        case 13: put(a ? 1u : 0u); return true;
        default: return false;
    }
}
}  // namespace

TW_API cuPointerGetAttribute(void* data, int attribute, CUdeviceptr pointer) {
    TW_INITIALISED();
    TW_REQUIRE(data);
    const std::lock_guard lock(state().mutex);
    const auto* found = find(pointer);
    return found && pointer_attribute(data, attribute, pointer, found) ? kSuccess : kInvalidValue;
}
TW_API cuPointerGetAttributes(unsigned n, int* attributes, void** data, CUdeviceptr pointer) {
    TW_INITIALISED();
    TW_REQUIRE(attributes && data);
    const std::lock_guard lock(state().mutex);
    for (unsigned i = 0; i < n; ++i) {
        if (!pointer_attribute(data[i], attributes[i], pointer, find(pointer))) return kInvalidValue;
    }
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor maps: wrong arguments are refused as the driver does; tw_copy_tensor of device.hpp reads what is kept

TW_API cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                              const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                              int interleave, int swizzle, int l2, int fill_mode) {
    TW_INITIALISED();
    constexpr unsigned sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    const auto refuse = [](const char* why) { return complain(kInvalidValue, "cuTensorMapEncodeTiled: %s", why); };
    if (capability() < 90) return refuse("this GPU has no TMA");
    if (!map || reinterpret_cast<uintptr_t>(map) % 64) return refuse("the tensor map must be aligned to 64 bytes");
    if (type < 0 || type > 15) return refuse("no such data type");
    if (type > 12) return complain(kNotSupported, "cuTensorMapEncodeTiled: packed types are not emulated");
    if (rank < 1 || rank > 5) return refuse("the rank must be 1 to 5");
    if (interleave < 0 || interleave > 2) return refuse("no such interleave");
    if (interleave && rank < 3) return refuse("interleaved tensors have a rank of 3 at least");
    if (swizzle < 0 || swizzle > 6) return refuse("no such swizzle");
    if (l2 < 0 || l2 > 3) return refuse("no such L2 promotion");
    if (fill_mode < 0 || fill_mode > 1) return refuse("no such fill");
    if (fill_mode == 1 && type < 6) return refuse("NaN fill needs a floating-point type");
    const unsigned unit = interleave == 2 ? 32 : 16, size = sizes[type];
    if (!address || reinterpret_cast<uintptr_t>(address) % unit)
        return refuse("the address must be aligned to 16 bytes");
    if (!dims || (!strides && rank > 1) || !box || !element_strides) return refuse("a null array");
    for (unsigned i = 0; i < rank; ++i) {
        if (dims[i] == 0 || dims[i] > (uint64_t{1} << 32)) return refuse("an extent must be 1 to 2^32");
        if (box[i] == 0 || box[i] > 256) return refuse("an extent of the box must be 1 to 256");
        if (element_strides[i] == 0 || element_strides[i] > 8) return refuse("an element stride must be 1 to 8");
        if (i + 1 < rank && (strides[i] % unit || strides[i] >= (uint64_t{1} << 40))) {
            return refuse("a stride must be a multiple of 16 bytes and less than 2^40");
        }
    }
    const unsigned inner = box[0] * size;
    if (interleave == 0 && inner % 16) return refuse("the inner extent of the box must be a multiple of 16 bytes");
    constexpr unsigned spans[] = {~0u, 32, 64, 128, 128, 128, 128};
    if (interleave == 0 && inner > spans[swizzle]) return refuse("the inner extent of the box exceeds the swizzle");
    if (interleave == 2 && swizzle != 1) return refuse("32-byte interleave needs the 32-byte swizzle");
    std::memset(map, 0, 128);
    std::memcpy(map, static_cast<const void*>(&address), sizeof address);
    auto* words = static_cast<uint32_t*>(map);
    words[2] = static_cast<uint32_t>(type), words[3] = rank, words[4] = static_cast<uint32_t>(swizzle);
    for (unsigned i = 0; i < rank; ++i) words[8 + i] = box[i], words[16 + i] = static_cast<uint32_t>(dims[i]);
    words[5] = size;
    for (unsigned i = 0; i + 1 < rank; ++i) std::memcpy(words + 24 + 2 * i, strides + i, sizeof *strides);
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Look-up

namespace {
// The newest version of the function, as a program compiled against this driver's header would get.
void* look_up(const char* symbol, int version) {
    Dl_info info = {};
    if (!dladdr(reinterpret_cast<void*>(&cuInit), &info)) return nullptr;
    void* self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!self) return nullptr;
    const std::string name = symbol;
    void* found = nullptr;
    const bool first_version = name == "cuGetProcAddress" && version < 12000;
    if (name.compare(0, 2, "cu") == 0) {
        if (!first_version) found = dlsym(self, (name + "_v2").c_str());
        if (!found) found = dlsym(self, symbol);
    }
    dlclose(self);
    return found;
}
}  // namespace

TW_API cuGetProcAddress(const char* symbol, void** function, int version, unsigned long long) {
    TW_ALWAYS();
    TW_REQUIRE(symbol && function);
    *function = look_up(symbol, version);
    return *function ? kSuccess : kNotFound;
}
TW_API cuGetProcAddress_v2(const char* symbol, void** function, int version, unsigned long long, int* status) {
    TW_ALWAYS();
    TW_REQUIRE(symbol && function);
    *function = look_up(symbol, version);
    if (status) *status = *function ? 0 : 1;
    return *function ? kSuccess : kNotFound;
}
