#include "facts.hpp"

#include <chrono>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "core/problem.hpp"
#include "device.hpp"
#include "jit/cache.hpp"
#include "jit/nvrtc.hpp"
#include "simt.hpp"

namespace tilewise::cuda {
namespace {

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }
std::string mib(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string of_cache(const jit::Cache& cache) {
    uint64_t bytes = 0;
    const auto entries = cache.ls();
    for (const jit::CacheEntry& entry : entries) bytes += entry.bytes;
    return cache.directory() + " (" + std::to_string(entries.size()) + " kernels, " + mib(bytes);
}

// Memory of one GPU for the time of the self-test.
class OnDevice {
public:
    OnDevice(int device, size_t bytes) : device_(device), data_(allocate(device, bytes, nullptr)) {}
    ~OnDevice() { release(device_, data_, nullptr); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    [[nodiscard]] float* data() const { return static_cast<float*>(data_); }

private:
    int device_;
    void* data_;
};

// A small causal problem against the formula.
std::string self_test(int device) {
    constexpr int kRows = 70, kDims = 32, kSize = kRows * kDims;
    std::vector<float> host(3 * kSize), result(kSize);
    uint32_t state = 1;
    for (float& x : host) {
        state = state * 1664525u + 1013904223u;
        x = static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1;
    }
    const float *const q = host.data(), *const k = q + kSize, *const v = k + kSize;
    const auto start = std::chrono::steady_clock::now();
    const DeviceGuard guard(device);
    const OnDevice inputs(device, host.size() * sizeof(float)), output(device, result.size() * sizeof(float));
    copy_to_device(inputs.data(), host.data(), host.size() * sizeof(float), nullptr);
    const auto tensor = [](float* data) {
        return tilewise_tensor{data, TILEWISE_FLOAT32, 4, {1, kRows, 1, kDims}, {kSize, kDims, kDims, 1}};
    };
    tilewise_problem raw{};
    raw.struct_size = sizeof raw, raw.abi_version = TILEWISE_ABI_VERSION;
    raw.window_left = raw.window_right = -1, raw.causal = 1;
    raw.device_type = TILEWISE_CUDA, raw.device_index = device;
    raw.q = tensor(inputs.data()), raw.k = tensor(inputs.data() + kSize), raw.v = tensor(inputs.data() + 2 * kSize);
    tilewise_forward_args args{};
    args.struct_size = sizeof args, args.o = tensor(output.data());
    const core::Problem problem = core::make_problem(raw);
    kFwdSimt.forward(problem, core::make_forward_args(problem, raw, args), {});  // takes no workspace: plain lengths
    copy_to_host(result.data(), output.data(), result.size() * sizeof(float), nullptr);
    synchronize(nullptr);
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;

    double worst = 0;
    for (int i = 0; i < kRows; ++i) {
        std::vector<double> p;
        double sum = 0;
        for (int j = 0; j <= i; ++j) {
            double x = 0;
            for (int d = 0; d < kDims; ++d) x += double{q[i * kDims + d]} * double{k[j * kDims + d]};
            p.push_back(std::exp(x / std::sqrt(double{kDims})));
            sum += p.back();
        }
        for (int d = 0; d < kDims; ++d) {
            double o = 0;
            for (int j = 0; j <= i; ++j) o += p[static_cast<size_t>(j)] / sum * double{v[j * kDims + d]};
            worst =
                std::fmax(worst, std::abs(o - double{result[static_cast<size_t>(i) * kDims + static_cast<size_t>(d)]}));
        }
    }
    if (!(worst < 1e-5)) return "failed: off by " + std::to_string(worst) + " from the formula, allowed 1e-5";
    return "passed in " + std::to_string(static_cast<int>(elapsed.count())) + " ms, kernel compilation included";
}

}  // namespace

std::string facts() {
    std::string text, why_not;
    int driver = 0;
    if (available(&why_not)) {
        driver = device_info(0).driver_version;
        text += "cuda driver: CUDA " + version(driver) + "\n";
        for (int n = 0; n < device_count(); ++n) {
            const DeviceInfo& d = device_info(n);
            text += "cuda:" + std::to_string(n) + ": " + d.name + ", sm_" + std::to_string(d.major * 10 + d.minor) +
                    ", " + std::to_string(d.num_sms) + " SMs, " + mib(d.total_memory) + "\n";
            std::string result;
            try {
                result = self_test(n);
            } catch (const core::Error& error) {
                result = std::string("failed: ") + error.what();
            }
            text += "cuda:" + std::to_string(n) + " self-test: " + result + "\n";
        }
    } else {
        text += "cuda: " + why_not + "\n";
    }
    std::string searched;
    try {
        const jit::Nvrtc* const nvrtc = jit::find_nvrtc(driver, nullptr, &searched);
        text += "kernel compiler: " +
                (nvrtc ? nvrtc->name() + ", " + nvrtc->path() + " (" + nvrtc->found_in() + ")" : "none; " + searched) +
                "\n";
    } catch (const core::Error& error) {  // TILEWISE_NVRTC names something unusable
        text += std::string("kernel compiler: ") + error.what() + "\n";
    }
    const jit::Cache cache = jit::user_cache();
    text += "kernel cache: " +
            (cache.directory().empty() || cache.max_bytes() == 0
                 ? std::string("off")
                 : of_cache(cache) + " of " + mib(cache.max_bytes()) + ")") +
            "\n";
    for (const jit::Cache& pack : jit::packs()) text += "kernel pack: " + of_cache(pack) + ")\n";
    return text;
}

}  // namespace tilewise::cuda
