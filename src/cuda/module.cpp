#include "module.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/error.hpp"
#include "device.hpp"
#include "driver.hpp"
#include "jit/store.hpp"

namespace tilewise::cuda {

using core::Error;
using core::Status;

namespace {

struct Module {
    void* handle = nullptr;
    int device = 0;
    std::string name;  // of the source
    std::string log;
    std::mutex mutex{};
    std::map<std::string, Function, std::less<>> functions{};
};

struct Outcome {  // an error as a value: threads share no exception object
    std::shared_ptr<Module> module;
    Status status = Status::ok;
    std::string error;

    [[nodiscard]] Module& value() const {
        if (!module) throw Error(status, error);
        return *module;
    }
};
using Future = std::shared_future<Outcome>;

struct Map {
    std::shared_mutex mutex;
    std::unordered_map<std::string, Future> modules;  // by device and key
};

Map& map() {
    static Map* instance = new Map;  // never destroyed: the driver may be gone before static objects are
    return *instance;
}

// Loading a module is no part of what a thread captures, but the driver refuses it in strict capture modes.
class RelaxedCapture {
public:
    RelaxedCapture() { exchange(); }
    ~RelaxedCapture() { exchange(); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

private:
    void exchange() {
        if (exchange_ != nullptr) exchange_(&mode_);
    }
    Result (*exchange_)(CaptureMode*) = driver().exchange_capture_mode;
    CaptureMode mode_ = kCaptureRelaxed;
};

std::shared_ptr<Module> load(int device, const std::function<jit::Source()>& render) {
    const DeviceInfo& info = device_info(device);
    const jit::Source source = render();
    const jit::Image image = jit::obtain(source, info.major, info.minor, info.driver_version);

    const DeviceGuard guard(device);
    const RelaxedCapture relaxed;
    const Driver& d = driver();
    char log[4096] = {};
    const JitOption options[] = {kErrorLogBuffer, kErrorLogBufferSize};
    void* values[] = {log, std::bit_cast<void*>(sizeof log - 1)};
    auto module = std::make_shared<Module>();
    module->device = device;
    module->name = source.name;
    module->log = image.log;
    const Result result = d.module_load(&module->handle, image.bytes.c_str(), 2, options, values);
    check(result, [&] {
        std::string text = "loading " + image.about + " on GPU " + std::to_string(device) + " (" + info.name + ", sm_" +
                           std::to_string(info.major) + std::to_string(info.minor) + ", driver of CUDA " +
                           cuda_version_text(info.driver_version) + ")";
        if (log[0] != '\0') text += ", driver's log: " + std::string(log);
        switch (result) {
            case kNoBinaryForGpu:
            case kInvalidImage:
                text += ", which is code for another GPU arch, or damaged; a wrong pack in TILEWISE_PACKS?";
                break;
            case kUnsupportedPtxVersion:
                text +=
                    ", whose compiler is newer than the driver; update the driver, or install an NVRTC that is not "
                    "newer than it";
                break;
            case kJitCompilerNotFound:
                text += ", which needs the driver's PTX compiler (libnvidia-ptxjitcompiler)";
                break;
            default: break;
        }
        return text;
    });
    return module;
}

const Function& entry_of(Module& module, const char* entry) {
    const std::lock_guard lock(module.mutex);
    if (const auto found = module.functions.find(std::string_view(entry)); found != module.functions.end())
        return found->second;
    const DeviceGuard guard(module.device);
    const RelaxedCapture relaxed;
    const Driver& d = driver();
    Function function;
    function.device = module.device;
    function.name = module.name + ":" + entry;
    function.log = module.log;
    const auto what = [&] { return "kernel " + function.name; };
    if (const Result result = d.module_function(&function.handle, module.handle, entry); result == kNotFound) {
        throw Error(Status::internal, what() + ": the compiled module has no entry of this name.");
    } else {
        check(result, what);
    }
    const auto attribute = [&](FunctionAttribute which) {
        int value = 0;
        check(d.function_attribute(&value, which, function.handle), what);
        return value;
    };
    function.registers = attribute(kNumRegs);
    function.shared_static = attribute(kSharedSizeBytes);
    function.local_bytes = attribute(kLocalSizeBytes);
    function.max_threads = attribute(kMaxThreadsPerBlock);
    // Once, instead of at every launch that needs more than 48 KiB.
    const DeviceInfo& info = device_info(module.device);
    const int most = std::max(0, static_cast<int>(info.shared_memory_optin) - function.shared_static);
    check(d.function_set_attribute(function.handle, kMaxDynamicSharedSizeBytes, most), what);
    function.max_dynamic_shared = static_cast<unsigned>(most);
    if (info.major >= 9) check(d.function_set_attribute(function.handle, kNonPortableClusterSizeAllowed, 1), what);
    return module.functions.emplace(entry, std::move(function)).first->second;
}

}  // namespace

const Function& function(int device, const std::string& key, const char* entry,
                         const std::function<jit::Source()>& render) {
    device_info(device);  // in a child of fork this throws, before a lock that nobody there will ever open
    Map& all = map();
    const std::string name = std::to_string(device) + ' ' + key;
    {
        const std::shared_lock lock(all.mutex);
        if (const auto found = all.modules.find(name); found != all.modules.end()) {
            const Future future = found->second;
            if (future.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
                return entry_of(future.get().value(), entry);
        }
    }
    std::promise<Outcome> promise;
    Future future;
    bool ours = false;
    {
        const std::unique_lock lock(all.mutex);
        const auto [place, fresh] = all.modules.try_emplace(name);
        if (fresh) place->second = promise.get_future().share();
        future = place->second;
        ours = fresh;
    }
    if (ours) {
        Outcome outcome;
        try {
            outcome.module = load(device, render);
        } catch (const Error& error) {
            outcome.status = error.status();
            outcome.error = error.what();
        } catch (const std::exception& error) {
            outcome.status = Status::internal;
            outcome.error = error.what();
        } catch (...) {
            outcome.status = Status::internal;
            outcome.error = "kernel " + key + ": an exception of unknown type";
        }
        if (!outcome.module) {  // who comes later tries again
            const std::unique_lock lock(all.mutex);
            all.modules.erase(name);
        }
        promise.set_value(std::move(outcome));
    }
    return entry_of(future.get().value(), entry);
}

}  // namespace tilewise::cuda
