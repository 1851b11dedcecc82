#include "device.hpp"

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "core/error.hpp"
#include "driver.hpp"

namespace tilewise::cuda {

using core::Error;
using core::Status;

namespace {

struct Device {
    DeviceInfo info;
    std::atomic<void*> context{nullptr};  // retained when first needed, and for good
};

struct Devices {
    std::vector<std::unique_ptr<Device>> list;
    std::string why_not;
    std::mutex mutex;
};

DeviceInfo read_info(const Driver& d, int index) {
    const auto what = [&] { return "reading the properties of GPU " + std::to_string(index); };
    int device = 0;
    check(d.device(&device, index), what);
    const auto attribute = [&](DeviceAttribute which) {
        int value = 0;
        check(d.device_attribute(&value, which, device), what);
        return value;
    };
    DeviceInfo info;
    info.index = index;
    char text[256] = {};
    check(d.device_name(text, sizeof text - 1, device), what);
    info.name = text;
    if (d.device_pci_bus_id && d.device_pci_bus_id(text, sizeof text - 1, device) == kSuccess) info.pci_bus_id = text;
    info.major = attribute(kComputeCapabilityMajor);
    info.minor = attribute(kComputeCapabilityMinor);
    info.num_sms = attribute(kMultiprocessorCount);
    info.clock_khz = attribute(kClockRate);
    info.registers_per_sm = attribute(kRegistersPerMultiprocessor);
    info.shared_memory_optin = static_cast<size_t>(attribute(kSharedMemoryPerBlockOptin));
    info.shared_memory_per_sm = static_cast<size_t>(attribute(kSharedMemoryPerMultiprocessor));
    info.l2_bytes = static_cast<size_t>(attribute(kL2CacheSize));
    check(d.device_total_memory(&info.total_memory, device), what);
    info.memory_pools = attribute(kMemoryPoolsSupported) != 0;
    info.driver_version = d.version;
    return info;
}

Devices& devices() {
    static Devices* instance = [] {
        auto* made = new Devices;
        try {
            const Driver* d = try_driver(&made->why_not);
            if (d == nullptr) return made;
            int count = 0;
            check(d->device_count(&count), "counting GPUs");
            for (int index = 0; index < count; ++index) {
                made->list.push_back(std::make_unique<Device>());
                made->list.back()->info = read_info(*d, index);
            }
            if (count == 0)
                made->why_not = "the NVIDIA driver shows no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES.";
        } catch (const std::exception& error) {
            made->list.clear();
            made->why_not = error.what();
        }
        return made;
    }();
    return *instance;
}

Device& device_at(int index) {
    driver();  // throws what is wrong with it; also in a child of fork
    Devices& all = devices();
    if (all.list.empty()) throw Error(Status::unsupported, "CUDA: " + all.why_not);
    if (index < 0 || index >= static_cast<int>(all.list.size())) {
        core::refuse("device", "cuda:" + std::to_string(index),
                     all.list.size() == 1 ? "cuda:0, the only GPU that is visible"
                                          : "cuda:0 to cuda:" + std::to_string(all.list.size() - 1),
                     "CUDA_VISIBLE_DEVICES may hide others.");
    }
    return *all.list[static_cast<size_t>(index)];
}

void* context_of(Device& device) {
    void* context = device.context.load(std::memory_order_acquire);
    if (context != nullptr) return context;
    const std::lock_guard lock(devices().mutex);
    context = device.context.load(std::memory_order_acquire);
    if (context != nullptr) return context;
    const Driver& d = driver();
    int handle = 0;
    const auto what = [&] {
        return "making a CUDA context on GPU " + std::to_string(device.info.index) + " (" + device.info.name + ")";
    };
    check(d.device(&handle, device.info.index), what);
    check(d.primary_context_retain(&context, handle), what);
    device.context.store(context, std::memory_order_release);
    return context;
}

std::string size_text(size_t bytes) {
    char text[64];
    if (bytes < (size_t{1} << 20)) {
        std::snprintf(text, sizeof text, "%zu bytes", bytes);
    } else {
        std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
    }
    return text;
}

}  // namespace

bool available(std::string* why_not) {
    try {
        if (try_driver(why_not) == nullptr) return false;
        const Devices& all = devices();
        if (all.list.empty() && why_not) *why_not = all.why_not;
        return !all.list.empty();
    } catch (const std::exception& error) {  // no memory
        if (why_not) *why_not = error.what();
        return false;
    }
}

int device_count() { return available() ? static_cast<int>(devices().list.size()) : 0; }

const DeviceInfo& device_info(int device) { return device_at(device).info; }

DeviceGuard::DeviceGuard(int device) {
    void* context = context_of(device_at(device));
    const Driver& d = driver();
    check(d.context_current(&previous_), "asking for the current CUDA context");
    if (previous_ == context) return;
    check(d.context_set_current(context), [&] { return "making GPU " + std::to_string(device) + " current"; });
    changed_ = true;
}

DeviceGuard::~DeviceGuard() {
    if (!changed_) return;
    if (const Driver* d = try_driver(nullptr)) d->context_set_current(previous_);
}

void* allocate(int device, size_t bytes, void* stream) {
    if (bytes == 0) return nullptr;
    const DeviceGuard guard(device);
    const Driver& d = driver();
    const DeviceInfo& info = device_info(device);
    void* data = nullptr;
    const Result result =
        info.memory_pools ? d.memory_allocate_async(&data, bytes, stream) : d.memory_allocate(&data, bytes);
    check(result, [&] {
        std::string text = "allocating " + size_text(bytes) + " on GPU " + std::to_string(device) + " (" + info.name;
        size_t free = 0, total = 0;
        if (d.memory_info(&free, &total) == kSuccess)
            text += ", " + size_text(free) + " of " + size_text(total) + " free";
        return text + ")";
    });
    return data;
}

void release(int device, void* data, void* stream) noexcept {
    if (data == nullptr) return;
    try {
        const DeviceGuard guard(device);
        if (device_info(device).memory_pools) {
            driver().memory_release_async(data, stream);
        } else {
            driver().memory_release(data);
        }
    } catch (const std::exception&) {
        return;  // the context is gone, and the memory with it
    }
}

void copy_to_device(void* dst, const void* src, size_t bytes, void* stream) {
    if (bytes == 0) return;
    check(driver().memory_to_device_async(dst, src, bytes, stream),
          [&] { return "copying " + size_text(bytes) + " to the GPU"; });
}

void copy_to_host(void* dst, const void* src, size_t bytes, void* stream) {
    if (bytes == 0) return;
    check(driver().memory_to_host_async(dst, const_cast<void*>(src), bytes, stream),
          [&] { return "copying " + size_text(bytes) + " from the GPU"; });
}

void memset_async(void* data, int byte, size_t bytes, void* stream) {
    if (bytes == 0) return;
    check(driver().memory_set_async(data, static_cast<unsigned char>(byte), bytes, stream),
          [&] { return "filling " + size_text(bytes) + " on the GPU"; });
}

void synchronize(void* stream) { check(driver().stream_synchronize(stream), "waiting for the GPU"); }

}  // namespace tilewise::cuda
