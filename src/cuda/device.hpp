// GPUs: what they are, which one is current, memory on them.
#pragma once

#include <cstddef>
#include <string>

namespace tilewise::cuda {

struct DeviceInfo {
    int index = 0;
    std::string name;  // "NVIDIA H200"
    std::string pci_bus_id;
    int major = 0, minor = 0;  // compute capability
    int num_sms = 0;
    int clock_khz = 0;
    int registers_per_sm = 0;
    size_t shared_memory_optin = 0;  // largest shared memory of a block, static and dynamic
    size_t shared_memory_per_sm = 0;
    size_t l2_bytes = 0;
    size_t total_memory = 0;
    bool memory_pools = false;  // stream-ordered allocation; without it allocate and release wait for the GPU
    int driver_version = 0;     // 13020: CUDA 13.2
};

bool available(std::string* why_not = nullptr);  // a driver and at least one GPU; never throws
int device_count();                              // 0 if not available
const DeviceInfo& device_info(int device);       // throws Error: no driver, no such device

// Makes the primary context of a device current, the one that CUDA's run time and with it every framework uses, and
// brings back what was current before. Cheap if it is current already.
class DeviceGuard {
public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

private:
    void* previous_ = nullptr;
    bool changed_ = false;
};

// In the order of the stream: contents may be used by work given to `stream` later. Zero bytes are a null pointer.
void* allocate(int device, size_t bytes, void* stream);
// Never throws: a host frees memory while it unwinds. What fails here shows in the next call.
void release(int device, void* data, void* stream) noexcept;

// These stand inside a DeviceGuard of the stream's device.
void copy_to_device(void* dst, const void* src, size_t bytes, void* stream);
void copy_to_host(void* dst, const void* src, size_t bytes, void* stream);
void memset_async(void* data, int byte, size_t bytes, void* stream);
void synchronize(void* stream);

}  // namespace tilewise::cuda
