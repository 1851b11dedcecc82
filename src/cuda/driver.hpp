// The CUDA driver, by dlopen. driver.cpp alone knows the names of libcuda; here are the types and calls that we use,
// declared anew so that no CUDA header is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tilewise::cuda {

using Result = int;                 // 0: success
static_assert(sizeof(void*) == 8);  // device addresses, 64-bit integers to the driver, are pointers here

// The numbers are the driver's.
enum DeviceAttribute : int {
    kClockRate = 13,
    kMultiprocessorCount = 16,
    kL2CacheSize = 38,
    kComputeCapabilityMajor = 75,
    kComputeCapabilityMinor = 76,
    kSharedMemoryPerMultiprocessor = 81,
    kRegistersPerMultiprocessor = 82,
    kSharedMemoryPerBlockOptin = 97,
    kMemoryPoolsSupported = 115,
};
enum FunctionAttribute : int {
    kMaxThreadsPerBlock = 0,
    kSharedSizeBytes = 1,
    kLocalSizeBytes = 3,
    kNumRegs = 4,
    kMaxDynamicSharedSizeBytes = 8,
    kNonPortableClusterSizeAllowed = 14,
};
enum JitOption : int { kErrorLogBuffer = 5, kErrorLogBufferSize = 6 };
enum LaunchAttributeId : int { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };
enum CaptureMode : int { kCaptureRelaxed = 2 };
enum ResultCode : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kDeinitialized = 4,
    kStubLibrary = 34,
    kNoDevice = 100,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kNoBinaryForGpu = 209,
    kInvalidPtx = 218,
    kJitCompilerNotFound = 221,
    kUnsupportedPtxVersion = 222,
    kNotFound = 500,
    kLaunchOutOfResources = 701,
    kContextIsDestroyed = 709,
    kSystemDriverMismatch = 803,
    kCompatNotSupportedOnDevice = 804,
    kStreamCaptureUnsupported = 900,
};

struct LaunchAttribute {
    int id;  // LaunchAttributeId
    char pad[4];
    union {
        char bytes[64];
        struct {
            unsigned x, y, z;
        } cluster;
        int flag;
        uint64_t alignment;
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct DriverLaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z;
    unsigned dynamic_shared;
    void* stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};
static_assert(sizeof(DriverLaunchConfig) == 56);

struct Driver {
    Result (*init)(unsigned flags);
    Result (*driver_version)(int*);
    Result (*error_name)(Result, const char**);
    Result (*error_text)(Result, const char**);
    Result (*device_count)(int*);
    Result (*device)(int* device, int ordinal);
    Result (*device_name)(char*, int capacity, int device);
    Result (*device_attribute)(int*, DeviceAttribute, int device);
    Result (*device_total_memory)(size_t*, int device);
    Result (*device_pci_bus_id)(char*, int capacity, int device);  // may be null
    Result (*primary_context_retain)(void** context, int device);
    Result (*context_current)(void** context);
    Result (*context_set_current)(void* context);
    Result (*context_device)(int* device);
    Result (*memory_info)(size_t* free, size_t* total);
    Result (*memory_allocate)(void**, size_t bytes);
    Result (*memory_release)(void*);
    Result (*memory_allocate_async)(void**, size_t bytes, void* stream);
    Result (*memory_release_async)(void*, void* stream);
    Result (*memory_to_device_async)(void*, const void*, size_t bytes, void* stream);
    Result (*memory_to_host_async)(void*, void*, size_t bytes, void* stream);
    Result (*memory_set_async)(void*, unsigned char byte, size_t bytes, void* stream);
    Result (*stream_synchronize)(void* stream);
    Result (*exchange_capture_mode)(CaptureMode*);  // may be null
    Result (*module_load)(void** module, const void* image, unsigned options, const JitOption*, void** values);
    Result (*module_unload)(void* module);
    Result (*module_function)(void** function, void* module, const char* name);
    Result (*function_attribute)(int*, FunctionAttribute, void* function);
    Result (*function_set_attribute)(void* function, FunctionAttribute, int value);
    Result (*launch)(const DriverLaunchConfig*, void* function, void** params, void** extra);
    Result (*encode_tiled)(void* map, int dtype, uint32_t rank, void* data, const uint64_t* shape,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int interleave, int swizzle, int l2_promotion, int oob_fill);

    std::string path;
    int version = 0;  // 13020: CUDA 13.2
};

inline constexpr int kOldestDriver = 12000;

// The driver, loaded and started. Throws Error (unsupported) if there is none, it is too old, or it does not start, and
// in a child of fork when CUDA was in use before. Loading is tried once per process.
const Driver& driver();

// The same without an exception: null, and why.
const Driver* try_driver(std::string* why_not);

// Throws Error for a result that is no success: what was tried, the driver's name and text for it, and what to do. An
// error that leaves the CUDA context unusable is reported as such.
[[noreturn]] void fail(Result result, const std::string& what);
template <class What>
void check(Result result, const What& what) {  // what: a text, or a function that makes it when it is needed
    if (result == kSuccess) [[likely]]
        return;
    if constexpr (requires { what(); }) fail(result, what());
    else fail(result, what);
}
[[nodiscard]] bool is_sticky(Result result);

std::string cuda_version_text(int version);  // "13.2"

}  // namespace tilewise::cuda
