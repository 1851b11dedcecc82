#include "driver.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

#include "core/env.hpp"
#include "core/error.hpp"

namespace tilewise::cuda {

using core::Error;
using core::Status;

namespace {

// CUDA does not work in a child of fork once the parent has started it; calls may hang there. Set before the start, so
// that a fork in the middle of it counts too.
std::atomic<bool> started{false};
std::atomic<bool> forked_after_start{false};

constexpr const char* kForked =
    "CUDA was in use before this process was forked, and does not work in the child. Start workers with spawn or "
    "forkserver (multiprocessing.set_start_method), or use CUDA only after the fork.";

struct State {
    Driver driver{};
    std::string why_not;  // "" if it works
};

std::string load(Driver& driver) {
    std::string name = core::env("TILEWISE_CUDA_DRIVER");
    const bool forced = !name.empty();
    if (!forced) name = "libcuda.so.1";
    void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* text = dlerror();  // NOLINT(concurrency-mt-unsafe)
        return std::string(forced ? "TILEWISE_CUDA_DRIVER: " : "no NVIDIA driver: ") +
               (text ? text : name + " cannot be loaded") +
               (forced ? ""
                       : ". GPUs need NVIDIA's driver; in a container, the NVIDIA container toolkit (--gpus all).");
    }
    link_map* map = nullptr;
    driver.path =
        dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map && map->l_name ? map->l_name : name;

    const char* missing = nullptr;
    const auto bind = [&](auto& function, const char* symbol) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, symbol));
        if (function == nullptr && missing == nullptr) missing = symbol;
    };
    bind(driver.driver_version, "cuDriverGetVersion");
    if (missing == nullptr && driver.driver_version(&driver.version) == 0 && driver.version < kOldestDriver) {
        return "the NVIDIA driver (" + driver.path + ") is of CUDA " + cuda_version_text(driver.version) +
               "; allowed: CUDA " + cuda_version_text(kOldestDriver) + " or newer. Update the driver.";
    }
    bind(driver.init, "cuInit");
    bind(driver.error_name, "cuGetErrorName");
    bind(driver.error_text, "cuGetErrorString");
    bind(driver.device_count, "cuDeviceGetCount");
    bind(driver.device, "cuDeviceGet");
    bind(driver.device_name, "cuDeviceGetName");
    bind(driver.device_attribute, "cuDeviceGetAttribute");
    bind(driver.device_total_memory, "cuDeviceTotalMem_v2");
    bind(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
    bind(driver.context_current, "cuCtxGetCurrent");
    bind(driver.context_set_current, "cuCtxSetCurrent");
    bind(driver.context_device, "cuCtxGetDevice");
    bind(driver.memory_info, "cuMemGetInfo_v2");
    bind(driver.memory_allocate, "cuMemAlloc_v2");
    bind(driver.memory_release, "cuMemFree_v2");
    bind(driver.memory_allocate_async, "cuMemAllocAsync");
    bind(driver.memory_release_async, "cuMemFreeAsync");
    bind(driver.memory_to_device_async, "cuMemcpyHtoDAsync_v2");
    bind(driver.memory_to_host_async, "cuMemcpyDtoHAsync_v2");
    bind(driver.memory_set_async, "cuMemsetD8Async");
    bind(driver.stream_synchronize, "cuStreamSynchronize");
    bind(driver.module_load, "cuModuleLoadDataEx");
    bind(driver.module_unload, "cuModuleUnload");
    bind(driver.module_function, "cuModuleGetFunction");
    bind(driver.function_attribute, "cuFuncGetAttribute");
    bind(driver.function_set_attribute, "cuFuncSetAttribute");
    bind(driver.launch, "cuLaunchKernelEx");
    bind(driver.encode_tiled, "cuTensorMapEncodeTiled");
    const char* const required = missing;  // without the rest things work, too: they may stay null
    bind(driver.device_pci_bus_id, "cuDeviceGetPCIBusId");
    bind(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    missing = required;
    if (missing != nullptr) {
        return "the NVIDIA driver (" + driver.path + ") has no " + missing + "; allowed: drivers of CUDA " +
               cuda_version_text(kOldestDriver) + " or newer. Update the driver.";
    }
    return "";
}

std::string describe(const Driver& driver, Result result) {
    const char *name = nullptr, *text = nullptr;
    if (driver.error_name(result, &name) != kSuccess || name == nullptr) name = "unknown CUDA error";
    if (driver.error_text(result, &text) != kSuccess || text == nullptr) text = "no text";
    return std::string(name) + " (" + std::to_string(result) + "): " + text;
}

std::string start(const Driver& driver) {
    const Result result = driver.init(0);
    if (result == kSuccess) return "";
    std::string advice;
    switch (result) {
        case kNoDevice: advice = "No NVIDIA GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES."; break;
        case kNotInitialized: advice = kForked; break;  // started by the host of this library, before a fork
        case kStubLibrary:
            advice = "This is the toolkit's stub for linking, not a driver: take its folder out of LD_LIBRARY_PATH.";
            break;
        case kSystemDriverMismatch:
            advice = "Driver library and kernel module differ in version: reboot, or reload the module.";
            break;
        case kCompatNotSupportedOnDevice:
            advice = "CUDA's compatibility package does not serve this GPU: take it out of LD_LIBRARY_PATH.";
            break;
        default: advice = "Look at nvidia-smi and dmesg.";
    }
    return "the NVIDIA driver (" + driver.path + ") does not start: " + describe(driver, result) + ". " + advice;
}

const State& state() {
    static const State* instance = [] {
        static const int registered = pthread_atfork(nullptr, nullptr, [] {
            if (started.load()) forked_after_start.store(true);
        });
        (void)registered;
        auto* made = new State;  // never destroyed: a host may free device memory while the process ends
        started.store(true);
        made->why_not = load(made->driver);
        if (made->why_not.empty()) made->why_not = start(made->driver);
        if (!made->why_not.empty()) started.store(false);  // then a child is as good as its parent
        return made;
    }();
    return *instance;
}

}  // namespace

const Driver* try_driver(std::string* why_not) {
    if (forked_after_start.load()) {
        if (why_not) *why_not = kForked;
        return nullptr;
    }
    const State& s = state();
    if (s.why_not.empty()) return &s.driver;
    if (why_not) *why_not = s.why_not;
    return nullptr;
}

const Driver& driver() {
    if (forked_after_start.load(std::memory_order_relaxed)) throw Error(Status::unsupported, kForked);
    const State& s = state();
    if (!s.why_not.empty()) throw Error(Status::unsupported, "CUDA: " + s.why_not);
    return s.driver;
}

bool is_sticky(Result result) {
    switch (result) {
        case 214:  // uncorrectable ECC error
        case 220:  // uncorrectable NVLink error
        case 226:  // error contained to this process
        case 700:  // illegal address
        case 702:  // launch timeout
        case kContextIsDestroyed:
        case 710:  // device-side assert
        case 714:  // hardware stack
        case 715:  // illegal instruction
        case 716:  // misaligned address
        case 717:  // address space
        case 718:  // program counter
        case 719:  // launch failed
        case 721:  // tensor memory leak
            return true;
        default: return false;
    }
}

void fail(Result result, const std::string& what) {
    const Driver& d = driver();
    const std::string text = what + ": " + describe(d, result) + ".";
    if (is_sticky(result)) {
        throw Error(
            Status::internal,
            text +
                " Work that was given to this GPU earlier, not necessarily by this library, may have caused it. "
                "The CUDA context of this process is lost: every later call on this GPU fails the same way; "
                "start the process anew. compute-sanitizer or CUDA_LAUNCH_BLOCKING=1 find the cause.");
    }
    switch (result) {
        case kOutOfMemory: throw Error(Status::out_of_memory, text);
        case kInvalidContext:
            throw Error(Status::internal, text + " No GPU is current in this thread, or its context was reset.");
        case kStreamCaptureUnsupported:
            throw Error(Status::unsupported,
                        text + " The stream is being captured into a graph; do this before capture.");
        case kDeinitialized: throw Error(Status::unsupported, text + " The process is ending.");
        default: throw Error(Status::internal, text);
    }
}

std::string cuda_version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace tilewise::cuda
