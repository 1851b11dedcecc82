#include "launch.hpp"

#include "core/error.hpp"
#include "device.hpp"
#include "driver.hpp"

namespace tilewise::cuda {
namespace {

std::string text(const Dim3& d) {
    return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
}

}  // namespace

void launch(const Function& function, const LaunchConfig& config, const void* params, size_t param_bytes) {
    const auto& [grid, block, cluster, shared, dependent, stream] = config;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    const auto refuse = [&](const char* what, const std::string& seen, const std::string& allowed) {
        throw core::Error(core::Status::internal,
                          "launch of " + function.name + ", " + what + ": got " + seen + "; allowed: " + allowed + ".");
    };
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        refuse("grid", text(grid), "2^31 - 1 x 65535 x 65535");
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    if (threads == 0 || threads > static_cast<uint64_t>(function.max_threads)) {
        refuse("block", text(block), "1 to " + std::to_string(function.max_threads) + " threads");
    }
    if (shared > function.max_dynamic_shared) {
        refuse("dynamic shared memory", std::to_string(shared) + " bytes",
               "up to " + std::to_string(function.max_dynamic_shared) + " bytes on this GPU");
    }
    if (param_bytes > 4096) refuse("parameters", std::to_string(param_bytes) + " bytes", "up to 4096 bytes");
    const uint64_t ctas = uint64_t{cluster.x} * cluster.y * cluster.z;
    if (ctas == 0 || grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z) {
        refuse("cluster", text(cluster), "divisors of the grid, " + text(grid));
    }

    LaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (ctas > 1) {
        attributes[count].id = kClusterDimension;
        attributes[count++].value.cluster = {cluster.x, cluster.y, cluster.z};
    }
    if (dependent) {
        attributes[count].id = kProgrammaticStreamSerialization;
        attributes[count++].value.flag = 1;
    }
    const DriverLaunchConfig driver_config{grid.x,  grid.y, grid.z, block.x,    block.y,
                                           block.z, shared, stream, attributes, count};
    void* list[] = {const_cast<void*>(params)};
    const DeviceGuard guard(function.device);
    const Result result = driver().launch(&driver_config, function.handle, list, nullptr);
    check(result, [&] {
        std::string what = "launching " + function.name + " on GPU " + std::to_string(function.device) + " (grid " +
                           text(grid) + ", block " + text(block) + ", cluster " + text(cluster) + ", " +
                           std::to_string(shared) + " + " + std::to_string(function.shared_static) +
                           " bytes of shared memory, " + std::to_string(function.registers) + " registers)";
        return what;
    });
}

}  // namespace tilewise::cuda
