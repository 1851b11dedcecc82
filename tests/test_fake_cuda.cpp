// The fake GPU of tests/fake_cuda, driven as the library drives a real one: through dlopen of libcuda and libnvrtc.
// What is checked is what tests of kernels rely on: right results of correct kernels, and a report instead of a hang or
// a silent pass for wrong ones.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Device = unsigned long long;
struct Api {
    void* cuda = dlopen(TILEWISE_FAKE_CUDA_DIR "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void* nvrtc = dlopen(TILEWISE_FAKE_CUDA_DIR "/libnvrtc.so.13", RTLD_NOW | RTLD_LOCAL);

    template <class... A>
    int operator()(const char* name, A... arguments) const {
        void* found = dlsym(std::strncmp(name, "nvrtc", 5) == 0 ? nvrtc : cuda, name);
        if (!found) throw std::runtime_error(std::string("no ") + name);
        return reinterpret_cast<int (*)(A...)>(found)(arguments...);
    }
};
const Api& api() {
    static const Api one;
    return one;
}
std::string message() { return reinterpret_cast<const char* (*)()>(dlsym(api().cuda, "tilewise_fake_message"))(); }

// A variable of the environment, until the end of the scope.
class Environment {
public:
    Environment(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
    ~Environment() { unsetenv(name_); }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;

private:
    const char* name_;
};

struct Compiled {
    int code = 0;
    std::string log, cubin, ptx;
};
Compiled compile(const std::string& source, std::vector<const char*> options = {"--gpu-architecture=sm_90a"},
                 const std::vector<std::pair<const char*, const char*>>& headers = {}) {
    std::vector<const char*> texts, names;
    for (const auto& [name, text] : headers) names.push_back(name), texts.push_back(text);
    void* program = nullptr;
    EXPECT_EQ(0, api()("nvrtcCreateProgram", &program, source.c_str(), "test.cu", static_cast<int>(headers.size()),
                       texts.data(), names.data()));
    Compiled result;
    result.code = api()("nvrtcCompileProgram", program, static_cast<int>(options.size()), options.data());
    const auto fetch = [&](const char* size_of, const char* get, std::string& to) {
        size_t n = 0;
        api()(size_of, program, &n);
        to.resize(n);
        if (n) api()(get, program, to.data());
    };
    fetch("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", result.log);
    result.log.resize(std::strlen(result.log.c_str()));
    fetch("nvrtcGetCUBINSize", "nvrtcGetCUBIN", result.cubin);
    fetch("nvrtcGetPTXSize", "nvrtcGetPTX", result.ptx);
    EXPECT_EQ(0, api()("nvrtcDestroyProgram", &program));
    return result;
}

constexpr const char* kPrologue = R"(
namespace tilewise {
typedef unsigned int uint32_t;
typedef long long int64_t;
constexpr int kThreads = 256;
struct Params { float *a, *b, *c; long long n; };
})";

class FakeCuda : public testing::Test {
protected:
    void SetUp() override {
        ASSERT_NE(nullptr, api().cuda) << dlerror();
        ASSERT_NE(nullptr, api().nvrtc) << dlerror();
        ASSERT_EQ(0, api()("cuInit", 0u));
        ASSERT_EQ(0, api()("cuDevicePrimaryCtxRetain", &context_, 0));
        ASSERT_EQ(0, api()("cuCtxSetCurrent", context_));
    }
    void TearDown() override {
        for (void* module : modules_) api()("cuModuleUnload", module);
        api()("cuCtxSetCurrent", static_cast<void*>(nullptr));
        api()("cuDevicePrimaryCtxRelease_v2", 0);
    }

    void* kernel(const std::string& source, const char* name = "kernel") {
        const Compiled compiled = compile(source);
        EXPECT_EQ(0, compiled.code) << compiled.log;
        void *module = nullptr, *function = nullptr;
        if (compiled.code) return nullptr;
        EXPECT_EQ(0, api()("cuModuleLoadData", &module, static_cast<const void*>(compiled.cubin.data())));
        modules_.push_back(module);
        EXPECT_EQ(0, api()("cuModuleGetFunction", &function, module, name));
        return function;
    }
    void* with_prologue(const std::string& source) { return kernel(kPrologue + source); }
    template <class P>
    int launch(void* function, unsigned blocks, unsigned threads, P params, unsigned dynamic = 0) {
        struct {
            unsigned grid[3], block[3], dynamic;
            void *stream, *attributes;
            unsigned n;
        } const config = {{blocks, 1, 1}, {threads, 1, 1}, dynamic, nullptr, nullptr, 0};
        void* pointers[] = {&params};
        return api()("cuLaunchKernelEx", static_cast<const void*>(&config), function, static_cast<void**>(pointers),
                     static_cast<void**>(nullptr));
    }

    template <class T>
    class Array {
    public:
        explicit Array(size_t n) : n_(n) { EXPECT_EQ(0, api()("cuMemAlloc_v2", &address_, n * sizeof(T))); }
        explicit Array(const std::vector<T>& values) : Array(values.size()) {
            EXPECT_EQ(0, api()("cuMemcpyHtoD_v2", address_, static_cast<const void*>(values.data()), n_ * sizeof(T)));
        }
        ~Array() { free(); }
        Array(const Array&) = delete;
        Array& operator=(const Array&) = delete;
        T* get() const { return std::bit_cast<T*>(static_cast<uintptr_t>(address_)); }
        Device address() const { return address_; }
        std::vector<T> values() const {
            std::vector<T> result(n_);
            EXPECT_EQ(0, api()("cuMemcpyDtoH_v2", static_cast<void*>(result.data()), address_, n_ * sizeof(T)));
            return result;
        }
        int free() {
            const int code = address_ ? api()("cuMemFree_v2", address_) : 0;
            address_ = 0;
            return code;
        }

    private:
        size_t n_;
        Device address_ = 0;
    };

    void* context_ = nullptr;
    std::vector<void*> modules_;
};

TEST_F(FakeCuda, AddsVectors) {
    // Both ways to declare a kernel, and a header from memory that declares the types of <cstdint>.
    const char* header = R"(#pragma once
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef long long int64_t; using uint64_t = unsigned long long; using int32_t = int;
)";
    const std::string source =
        "#include \"room/types.h\""
        R"(
#ifndef TILEWISE_FAKE_CUDA
#error "not the fake compiler"
#endif
static_assert(__CUDA_ARCH__ == 900 && sizeof(uint64_t) == 8);
namespace tilewise {
constexpr int kThreads = 128;
struct Params { const float *a, *b; float* c; int64_t n; };
TW_KERNEL(add, Params, p) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.n) p.c[i] = p.a[i] + p.b[i];
}
}
// __global__ void not_this(int);
extern "C" __global__ void __launch_bounds__(128) plain(
    const float* __restrict__ a, const float* b, float* c, long long n) {
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) c[i] = a[i] - b[i];
}
)";
    const Compiled compiled =
        compile(source, {"--gpu-architecture=sm_90a", "-std=c++17", "-lineinfo", "-DX=1"}, {{"room/types.h", header}});
    ASSERT_EQ(0, compiled.code) << compiled.log;
    const size_t n = 1000;
    std::vector<float> a(n), b(n);
    std::iota(a.begin(), a.end(), 0.0f);
    std::iota(b.begin(), b.end(), 7.0f);
    const Array<float> da(a), db(b), dc(n);
    EXPECT_TRUE(std::isnan(dc.values()[5]));  // memory that nobody wrote is NaN
    for (const std::string* image : {&compiled.cubin, &compiled.ptx}) {
        void *module = nullptr, *add = nullptr, *plain = nullptr, *none = nullptr;
        ASSERT_EQ(0, api()("cuModuleLoadData", &module, static_cast<const void*>(image->data())));
        ASSERT_EQ(0, api()("cuModuleGetFunction", &add, module, "add"));
        ASSERT_EQ(0, api()("cuModuleGetFunction", &plain, module, "plain"));
        EXPECT_EQ(500, api()("cuModuleGetFunction", &none, module, "nothing"));
        struct {
            const float *a, *b;
            float* c;
            long long n;
        } params = {da.get(), db.get(), dc.get(), static_cast<long long>(n)};
        EXPECT_EQ(0, launch(add, 8, 128, params));
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(a[i] + b[i], dc.values()[i]);
        float* pointers[] = {da.get(), db.get(), dc.get()};
        void* arguments[] = {static_cast<void*>(&pointers[0]), static_cast<void*>(&pointers[1]),
                             static_cast<void*>(&pointers[2]), &params.n};
        EXPECT_EQ(0, api()("cuLaunchKernel", plain, 2u, 1u, 1u, 64u, 1u, 1u, 0u, static_cast<void*>(nullptr),
                           static_cast<void**>(arguments), static_cast<void**>(nullptr)));
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(-7, dc.values()[i]);
        size_t size = sizeof params;
        void* extra[] = {reinterpret_cast<void*>(1), &params, reinterpret_cast<void*>(2), &size, nullptr};
        EXPECT_EQ(0, api()("cuLaunchKernel", add, 8u, 1u, 1u, 128u, 1u, 1u, 0u, static_cast<void*>(nullptr),
                           static_cast<void**>(nullptr), static_cast<void**>(extra)));
        EXPECT_EQ(a[3] + b[3], dc.values()[3]);
        EXPECT_EQ(701, launch(add, 8, 256, params));  // launch bounds
        EXPECT_EQ(0, api()("cuModuleUnload", module));
    }
}

const char* const kOrders[] = {"forward", "reverse", "random:1", "random:2"};

TEST_F(FakeCuda, ReducesBlocks) {
    void* sum = with_prologue(R"(
namespace tilewise {
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}
TW_KERNEL(kernel, Params, p) {
    __shared__ float parts[kThreads / 32];
    float x = 0;
    for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < p.n; i += int64_t(gridDim.x) * kThreads) x += p.a[i];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x >= 32) return;  // those that returned no longer count
    x = warp_sum(threadIdx.x < kThreads / 32 ? parts[threadIdx.x] : 0);
    __syncthreads();
    if (threadIdx.x == 0) p.c[blockIdx.x] = x;
}
})");
    const std::vector<float> ones(100'000, 1.0f);
    const Array<float> a(ones), c(13);
    struct {
        float *a, *b, *c;
        long long n;
    } params = {a.get(), nullptr, c.get(), static_cast<long long>(ones.size())};
    for (const char* order : kOrders) {
        for (const char* threads : {"1", "4"}) {
            const Environment e1("TILEWISE_FAKE_ORDER", order), e2("TILEWISE_FAKE_THREADS", threads);
            ASSERT_EQ(0, launch(sum, 13, 256, params));
            const std::vector<float> parts = c.values();
            EXPECT_EQ(100'000, std::accumulate(parts.begin(), parts.end(), 0.0f)) << order;
            ASSERT_EQ(0, api()("cuMemsetD32_v2", c.address(), ~0u, size_t{13}));
        }
    }
}

TEST_F(FakeCuda, WarpFunctions) {
    void* f = with_prologue(R"(
#define CHECK(condition) if (!(condition)) atomicAdd((int*)p.c, 1), printf("lane %d: %s\n", l, #condition)
namespace tilewise {
TW_KERNEL(kernel, Params, p) {
    const int l = threadIdx.x % 32;
    CHECK(__shfl_sync(~0u, l * 2, 5) == 10);
    CHECK(__shfl_sync(~0u, l, 3, 8) == l / 8 * 8 + 3);
    CHECK(__shfl_sync(~0u, (long long)l << 40, l ^ 1) == (long long)(l ^ 1) << 40);
    CHECK(__shfl_xor_sync(~0u, double(l), 16) == (l ^ 16));
    CHECK(__shfl_down_sync(~0u, l, 4) == (l < 28 ? l + 4 : l));
    CHECK(__shfl_down_sync(~0u, l, 4, 16) == (l % 16 < 12 ? l + 4 : l));
    CHECK(__shfl_up_sync(~0u, (unsigned)l, 1) == (l ? l - 1 : 0));
    CHECK(__ballot_sync(~0u, l % 3 == 0) == 0x49249249u);
    CHECK(__any_sync(~0u, l == 7) && !__any_sync(~0u, l == 77) && __all_sync(~0u, l < 32) && !__all_sync(~0u, l));
    CHECK(__reduce_add_sync(~0u, l) == 496 && __reduce_max_sync(~0u, -l) == 0 && __reduce_min_sync(~0u, -l) == -31);
    CHECK(__reduce_xor_sync(~0u, 1u << l) == ~0u);
    CHECK(__match_any_sync(~0u, l / 16) == (l < 16 ? 0xffffu : 0xffff0000u));
    // Halves of a warp go separate ways, one of them more often
    const unsigned half = l < 16 ? 0xffffu : 0xffff0000u;
    int x = l;
    for (int i = 0; i < (l < 16 ? 5 : 3); ++i) x = __shfl_xor_sync(half, x, 1);
    __syncwarp();
    CHECK(__shfl_sync(~0u, x, 31) == 30);
    if (l >= 8) CHECK(__shfl_sync(0xffffff00u, l, 9) == 9);
    CHECK(__syncthreads_count(l == 3) == blockDim.x / 32);
    CHECK(__syncthreads_or(threadIdx.x == 40) && !__syncthreads_and(threadIdx.x != 40));
    CHECK(__popc(0xf0f0u) == 8 && __ffs(8) == 4 && __clz(1) == 31 && __clz(0) == 32 && __brev(1u) == 0x80000000u);
    CHECK(__umulhi(0x80000000u, 6u) == 3 && __umul64hi(1ull << 63, 6) == 3 && __mulhi(-2, 3) == -1);
    CHECK(__byte_perm(0x33221100u, 0x77665544u, 0x7520u) == 0x77552200u);
    CHECK(__float2int_rn(2.5f) == 2 && __float2int_rn(1e20f) == 0x7fffffff && __float2int_rz(-1.5f) == -1);
    CHECK(__float2uint_rn(-3.0f) == 0 && __float2int_rn(__int_as_float(0x7fc00000)) == 0);
    CHECK(fmaxf(__int_as_float(-1), 2.0f) == 2.0f && max(1u, 2) == 2u && min(-1ll, 1ll) == -1 && exp2f(3.0f) == 8.0f);
    CHECK(tw_half_to_float(0x3c00) == 1.0f && tw_half_to_float(1) == 0x1p-24f);
    CHECK(tw_half_to_float(0xfc00) == -1.0f / 0.0f);
    const float4 v = make_float4(1, 2, 3, 4);
    CHECK(((const float*)&v)[2] == 3 && alignof(float4) == 16 && alignof(uint2) == 8);
}
})");
    const Array<int> errors(std::vector<int>{0});
    struct {
        void *a, *b, *c;
        long long n;
    } params = {nullptr, nullptr, errors.get(), 0};
    for (const char* order : kOrders) {
        const Environment environment("TILEWISE_FAKE_ORDER", order);
        ASSERT_EQ(0, launch(f, 3, 96, params)) << order;
        EXPECT_EQ(0, errors.values()[0]) << order;
    }
}

TEST_F(FakeCuda, ConvertsEveryHalf) {
    void* f = with_prologue(R"(
namespace tilewise {
TW_KERNEL(kernel, Params, p) {
    const unsigned h = blockIdx.x * 256 + threadIdx.x;
    const float x = tw_half_to_float(h);
    p.a[h] = x;
    // Back, and a value halfway to the next one, which rounds to even
    const float next = tw_half_to_float(h + 1);
    const float middle = x + (next - x) * 0.5f;
    const bool nan = (h & 0x7fff) > 0x7c00, largest = (h & 0x7fff) >= 0x7bff;
    p.b[h] = !nan && (tw_float_to_half(x) != h || (!largest && tw_float_to_half(middle) != h + (h & 1)));
}
})");
    const Array<float> a(65536), b(65536);
    struct {
        float *a, *b, *c;
        long long n;
    } params = {a.get(), b.get(), nullptr, 0};
    ASSERT_EQ(0, launch(f, 256, 256, params));
    const std::vector<float> value = a.values(), wrong = b.values();
    for (unsigned h = 0; h < 65536; ++h) {
        ASSERT_EQ(0, wrong[h]) << h;
        const int exponent = h >> 10 & 31, mantissa = h & 1023;
        if (exponent == 31 && mantissa) {
            ASSERT_TRUE(std::isnan(value[h])) << h;
            continue;
        }
        double expected = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
        if (exponent == 31) expected = std::numeric_limits<double>::infinity();
        ASSERT_EQ(h & 0x8000 ? -expected : expected, value[h]) << h;
    }
}

TEST_F(FakeCuda, TensorCores) {  // small integers: sums are exact
    void* f = with_prologue(R"(
namespace tilewise {
template <int K, class Mma>
__device__ void check(const Params& p, int kind, Mma mma) {
    __shared__ alignas(16) unsigned short a[16 * 24], b[16 * 8];  // rows of a: 24 apart; b: k rows of 8
    const int l = threadIdx.x;
    for (int i = l; i < 16 * K; i += 32) {
        a[i / K * 24 + i % K] = kind == 1 ? tw_float_to_bfloat16(i % 7 - 3) : tw_float_to_half(i % 7 - 3);
    }
    for (int i = l; i < K * 8; i += 32) {
        b[i] = kind == 1 ? tw_float_to_bfloat16(i % 5 - 2) : tw_float_to_half(i % 5 - 2);
    }
    __syncwarp();
    unsigned ra[4], rb[2];
    float d[4] = {1, 2, 3, 4};
    if (kind == 2) {
        for (int i = 0; i < 4; ++i) {
            ra[i] = __float_as_uint(tw_half_to_float(a[(l / 4 + i % 2 * 8) * 24 + l % 4 + i / 2 * 4]));
        }
        for (int i = 0; i < 2; ++i) rb[i] = __float_as_uint(tw_half_to_float(b[(l % 4 + i * 4) * 8 + l / 4]));
    } else {
        tw_ldmatrix<K / 4>(ra, &a[l % 16 * 24 + (K == 16 ? l / 16 * 8 : 0)]);
        tw_ldmatrix<K / 8, true>(rb, &b[l % K * 8]);
    }
    mma(d, ra, rb, d);
    for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
        float sum = i + 1;
        for (int k = 0; k < K; ++k) sum += float((row * K + k) % 7 - 3) * float((k * 8 + column) % 5 - 2);
        if (d[i] != sum) atomicAdd((int*)p.c, 1);
    }
    __syncwarp();
}
TW_KERNEL(kernel, Params, p) {
    check<16>(p, 0, tw_mma_m16n8k16_f16);
    check<16>(p, 1, tw_mma_m16n8k16_bf16);
    check<8>(p, 0, tw_mma_m16n8k8_f16);
    check<8>(p, 2, tw_mma_m16n8k8_tf32);
    __shared__ alignas(16) float copied[4];
    __shared__ alignas(16) float source[4];
    source[threadIdx.x % 4] = threadIdx.x % 4;
    __syncwarp();
    tw_cp_async<16>(copied, source, 8);
    if (copied[1] != 1 || copied[2] != 0) atomicAdd((int*)p.c, 1);
}
})");
    const Array<int> errors(std::vector<int>{0});
    struct {
        void *a, *b, *c;
        long long n;
    } const params = {nullptr, nullptr, errors.get(), 0};
    ASSERT_EQ(0, launch(f, 1, 32, params)) << message();
    EXPECT_EQ(0, errors.values()[0]);
}

TEST_F(FakeCuda, Atomics) {
    void* f = kernel(R"(
struct Params { float* f; double* d; int* i; unsigned long long* l; unsigned* lock; int* guarded; char more[16]; };
constexpr int kThreads = 128;
TW_KERNEL(kernel, Params, p) {
    atomicAdd(p.f, 1.0f);
    atomicAdd(p.d, 0.5);
    atomicAdd(&p.i[0], 1);
    atomicMax(&p.i[1], int(blockIdx.x * blockDim.x + threadIdx.x));
    atomicMin(&p.i[2], -int(threadIdx.x));
    atomicAdd(p.l, 1ull << 33);
    while (atomicCAS(p.lock, 0u, 1u) != 0) {}  // its holder may be on this OS thread or on another
    ++*p.guarded;
    __threadfence();
    atomicExch(p.lock, 0u);
})");
    for (const char* order : kOrders) {
        const Environment environment("TILEWISE_FAKE_ORDER", order);
        const Array<float> sum(std::vector<float>{0});
        const Array<double> halves(std::vector<double>{0});
        const Array<int> ints(std::vector<int>{0, 0, 0}), guarded(std::vector<int>{0});
        const Array<unsigned long long> wide(std::vector<unsigned long long>{0});
        const Array<unsigned> lock(std::vector<unsigned>{0});
        struct {
            void *f, *d, *i, *l, *lock, *guarded;
            char more[16];
        } params = {sum.get(), halves.get(), ints.get(), wide.get(), lock.get(), guarded.get(), {}};
        ASSERT_EQ(0, launch(f, 50, 128, params)) << message();
        EXPECT_EQ(6400, sum.values()[0]);
        EXPECT_EQ(3200, halves.values()[0]);
        EXPECT_EQ((std::vector<int>{6400, 6399, -127}), ints.values());
        EXPECT_EQ(6400ull << 33, wide.values()[0]);
        EXPECT_EQ(6400, guarded.values()[0]);
    }
}

TEST_F(FakeCuda, DynamicSharedMemory) {
    void* f = with_prologue(R"(
namespace tilewise {
TW_KERNEL(kernel, Params, p) {
    TW_DYNAMIC_SHARED(bytes);
    __shared__ float fixed;
    float* values = reinterpret_cast<float*>(bytes);
    // Neither is zero to begin with
    if (threadIdx.x == 0 && values[0] == values[0]) p.c[blockIdx.x] = -1;
    if (threadIdx.x == 0 && fixed == fixed) p.c[blockIdx.x] = -2;
    __syncthreads();
    values[threadIdx.x] = float(threadIdx.x + blockIdx.x);
    if (threadIdx.x == 0 && p.n) values[p.n] = 0;
    __syncthreads();
    if (p.c[blockIdx.x] == 0) p.c[blockIdx.x] = values[255 - threadIdx.x];
    fixed = 0;
}
})");
    const Array<float> c(std::vector<float>(5, 0.0f));
    struct {
        float *a, *b, *c;
        long long n;
    } params = {nullptr, nullptr, c.get(), 0};
    ASSERT_EQ(0, launch(f, 5, 256, params, 1024));
    EXPECT_EQ((std::vector<float>{255, 256, 257, 258, 259}), c.values());
    params.n = 256;  // one past the end
    EXPECT_EQ(700, launch(f, 5, 256, params, 1024));
    EXPECT_NE(std::string::npos, message().find("dynamic shared")) << message();
    params.n = 0;
    EXPECT_EQ(1, launch(f, 1, 256, params, 100'000));  // not before
    EXPECT_EQ(0, api()("cuFuncSetAttribute", f, 8, 100'000));
    EXPECT_EQ(0, launch(f, 1, 256, params, 100'000));
    EXPECT_EQ(1, api()("cuFuncSetAttribute", f, 8, 300'000));
}

TEST_F(FakeCuda, ReportsDeadlocksAndFaults) {
    constexpr const char* head = "namespace tilewise { TW_KERNEL(kernel, Params, p) { const int t = threadIdx.x;";
    struct Case {
        const char *what, *body, *says;
        int code;
    };
    const Case cases[] = {
        {"half of the CTA at a barrier, half in a warp function",
         "if (t < 128 || t % 32 >= 16) __syncthreads(); else __syncwarp();", "threads 0-127: at __syncthreads", 719},
        {"lanes that differ in the mask", "__shfl_sync(t % 32 < 16 ? ~0u : 0xffff0000u, t, 0); __syncthreads();",
         "deadlock", 719},
        {"a mask without its lane", "__syncwarp(0xffff);", "does not name the lane", 719},
        {"lanes in different functions", "if (t % 2) __syncwarp(); else __ballot_sync(~0u, 1);",
         "different warp functions", 719},
        {"a named barrier that never fills", "tw_barrier_sync(3, t < 64 ? 96 : 32);", "named barrier", 719},
        {"a null pointer", "if (t == 77) *(volatile int*)nullptr = 1;", "thread (77, 0, 0): (nil), a null pointer",
         700},
        {"a stack overflow", "volatile char x[200000]; x[0] = 1;", "overflow", 700},
        {"division by zero", "volatile int zero = 0; p.c[0] = 7 / zero;", "division by zero", 719},
        {"a trap", "if (t == 3) __trap();", "__trap()", 719},
        {"an assertion", "assert(t < 200);", "assertion failed: t < 200 in thread (200, 0, 0)", 710},
#ifndef __SANITIZE_THREAD__  // it holds signals back until a call
        {"a loop without end", "for (volatile int i = 0; t == 9; i = i + 1) {}", "TILEWISE_FAKE_TIMEOUT", 702},
#endif
        {"a wait that nobody ends", "while (tw_load_acquire((int*)p.a) != 1) {}", "TILEWISE_FAKE_TIMEOUT", 719},
    };
    const Array<int> zero(std::vector<int>{0});
    struct {
        void *a, *b, *c;
        long long n;
    } const params = {zero.get(), nullptr, zero.get(), 0};
    const Environment environment("TILEWISE_FAKE_TIMEOUT", "0.3");
    for (const Case& c : cases) {
        void* f = with_prologue(std::string(head) + c.body + "}}");
        for (const char* threads : {"1", "3"}) {
            const Environment limit("TILEWISE_FAKE_THREADS", threads);
            EXPECT_EQ(c.code, launch(f, 5, 256, params)) << c.what;
            EXPECT_NE(std::string::npos, message().find(c.says)) << c.what << ":\n" << message();
            EXPECT_NE(std::string::npos, message().find("kernel 'kernel', block (")) << message();
        }
    }
    // Nothing of it stays.
    void* fine = with_prologue(std::string(head) + "__syncthreads(); if (t == 0) atomicAdd((int*)p.a, 1); }}");
    EXPECT_EQ(0, launch(fine, 5, 256, params));
    EXPECT_EQ(5, zero.values()[0]);
}

TEST_F(FakeCuda, CtasMayWaitForEachOther) {  // in the order of their numbers, as in-order semaphores do
    void* f = with_prologue(R"(
namespace tilewise {
TW_KERNEL(kernel, Params, p) {
    int* turn = (int*)p.a;
    if (threadIdx.x == 0) while (tw_load_acquire(turn) != int(blockIdx.x)) __nanosleep(20);
    __syncthreads();
    if (threadIdx.x == 5) ((int*)p.b)[blockIdx.x] = *turn;
    __syncthreads();
    if (threadIdx.x == 0) tw_store_release(turn, int(blockIdx.x) + 1);
}
})");
    for (const char* order : kOrders) {
        const Environment e1("TILEWISE_FAKE_ORDER", order), e2("TILEWISE_FAKE_TIMEOUT", "20");
        const Array<int> turn(std::vector<int>{0}), seen(20);
        struct {
            void *a, *b, *c;
            long long n;
        } const params = {turn.get(), seen.get(), nullptr, 0};
        ASSERT_EQ(0, launch(f, 20, 64, params)) << message();
        std::vector<int> expected(20);
        std::iota(expected.begin(), expected.end(), 0);
        EXPECT_EQ(expected, seen.values()) << order;
    }
}

TEST_F(FakeCuda, OrderShowsRaces) {
    void* f = with_prologue(R"(
namespace tilewise {
TW_KERNEL(kernel, Params, p) {  // the barrier is missing
    __shared__ float x[kThreads];
    x[threadIdx.x] = threadIdx.x;
    p.c[threadIdx.x] = x[(threadIdx.x + 1) % kThreads];
}
})");
    for (const char* order : kOrders) {
        const Environment environment("TILEWISE_FAKE_FIBER_ORDER", order);
        const Array<float> c(256);
        struct {
            float *a, *b, *c;
            long long n;
        } const params = {nullptr, nullptr, c.get(), 0};
        ASSERT_EQ(0, launch(f, 1, 256, params));
        const std::vector<float> values = c.values();
        EXPECT_GT(std::count_if(values.begin(), values.end(), [](float v) { return std::isnan(v); }), 0) << order;
    }
}

TEST_F(FakeCuda, RedZones) {
    void* f = with_prologue("namespace tilewise { TW_KERNEL(kernel, Params, p) { p.a[p.n] = 1; } }");
    struct {
        float *a, *b, *c;
        long long n;
    } params = {};
    for (const long long at : {-1, 10, 60}) {
        Array<float> a(10);
        params.a = a.get();
        params.n = at;
        EXPECT_EQ(0, launch(f, 1, 1, params));
        EXPECT_NE(std::string::npos, message().find("after a launch of 'kernel'")) << message();
        EXPECT_EQ(700, api()("cuCtxSynchronize"));
        EXPECT_EQ(0, api()("cuCtxSynchronize"));
        EXPECT_EQ(0, launch(f, 1, 1, params));
        EXPECT_EQ(700, a.free());
    }
    Array<float> a(10);
    params.a = a.get();
    params.n = 1000;  // past the red zone is a guard page
    EXPECT_EQ(700, launch(f, 1, 1, params));
    EXPECT_NE(std::string::npos, message().find("3960 bytes after the end of an allocation of 40")) << message();
    std::vector<float> eleven(11);
    EXPECT_EQ(1, api()("cuMemcpyHtoD_v2", a.address(), static_cast<const void*>(eleven.data()), 11 * sizeof(float)));
    EXPECT_EQ(1, api()("cuMemsetD8_v2", a.address() + 8, static_cast<unsigned char>(0), size_t{33}));
    EXPECT_EQ(0, a.free());
    EXPECT_EQ(1, api()("cuMemFree_v2", Device{4096}));
}

TEST_F(FakeCuda, InjectedFaults) {
    void* f = with_prologue("namespace tilewise { TW_KERNEL(kernel, Params, p) {} }");
    struct {
        float *a, *b, *c;
        long long n;
    } const params = {};
    Device pointer = 0;
    {
        const Environment environment("TILEWISE_FAKE_FAIL",
                                      "cuLaunchKernelEx:719,cuMemAlloc:2@3,cuCtxSynchronize:700@1");
        EXPECT_EQ(719, launch(f, 1, 32, params));
        for (const int code : {0, 0, 2, 0}) {
            EXPECT_EQ(code, api()("cuMemAlloc_v2", &pointer, size_t{16}));
            if (!code) {
                EXPECT_EQ(0, api()("cuMemFree_v2", pointer));
            }
        }
        EXPECT_EQ(700, api()("cuCtxSynchronize"));
        EXPECT_EQ(0, api()("cuCtxSynchronize"));
    }
    EXPECT_EQ(0, launch(f, 1, 32, params));
    {
        const Environment environment("TILEWISE_FAKE_FAIL", "nvrtcCompileProgram:6");
        EXPECT_EQ(6, compile("").code);
    }
    EXPECT_EQ(0, compile("").code);
    {
        const Environment memory("TILEWISE_FAKE_MEMORY", "1000000");
        EXPECT_EQ(2, api()("cuMemAlloc_v2", &pointer, size_t{1'000'001}));
    }
}

TEST_F(FakeCuda, Compiler) {
    const Compiled wrong = compile("__global__ void f() { undeclared(); }");
    EXPECT_EQ(6, wrong.code);
    EXPECT_NE(std::string::npos, wrong.log.find("test.cu:1")) << wrong.log;
    EXPECT_NE(std::string::npos, wrong.log.find("undeclared")) << wrong.log;
    EXPECT_EQ(6, compile("#include <vector>").code);
    EXPECT_EQ(5, compile("", {"--no-such-option"}).code);
    EXPECT_EQ(5, compile("", {"-arch=sm_42"}).code);
    const Compiled ptx = compile("", {"--gpu-architecture=compute_80"});
    EXPECT_EQ(0, ptx.code);
    EXPECT_TRUE(ptx.cubin.empty());
    EXPECT_EQ(ptx.ptx.size(), std::strlen(ptx.ptx.c_str()) + 1);
    int major = 0, minor = 0, n = 0;
    EXPECT_EQ(0, api()("nvrtcVersion", &major, &minor));
    EXPECT_EQ(13, major);
    EXPECT_EQ(0, api()("nvrtcGetNumSupportedArchs", &n));
    std::vector<int> archs(static_cast<size_t>(n));
    EXPECT_EQ(0, api()("nvrtcGetSupportedArchs", archs.data()));
    EXPECT_EQ(75, archs.front());
}

TEST_F(FakeCuda, Images) {
    void* module = nullptr;
    const auto load = [&](const std::string& image) {
        const int code = api()("cuModuleLoadData", &module, static_cast<const void*>(image.data()));
        if (code == 0) {
            EXPECT_EQ(0, api()("cuModuleUnload", module));
        }
        return code;
    };
    const Compiled hopper = compile("", {"-arch=sm_90a"}), ampere = compile("", {"-arch=sm_80"}),
                   ada = compile("", {"-arch=sm_89"});
    EXPECT_EQ(0, load(hopper.cubin));
    EXPECT_EQ(209, load("\177ELF and so on, and so on, and so on, and so on"));
    EXPECT_EQ(209, load(ampere.cubin));
    EXPECT_EQ(0, load(ampere.ptx));
    std::string damaged = hopper.cubin;
    damaged[damaged.size() / 2] ^= 1;
    EXPECT_EQ(200, load(damaged));
    const Environment environment("TILEWISE_FAKE_CC", "8.6");
    EXPECT_EQ(209, load(hopper.cubin));
    EXPECT_EQ(0, load(ampere.cubin));
    EXPECT_EQ(209, load(ada.cubin));
}

TEST_F(FakeCuda, ContextsStreamsEvents) {
    int n = 0, value = 0;
    EXPECT_EQ(0, api()("cuDeviceGetCount", &n));
    EXPECT_EQ(2, n);
    EXPECT_EQ(0, api()("cuDeviceGetAttribute", &value, 75, 0));
    EXPECT_EQ(9, value);
    EXPECT_EQ(0, api()("cuDeviceGetAttribute", &value, 97, 0));
    EXPECT_EQ(232448, value);
    EXPECT_EQ(101, api()("cuDeviceGetAttribute", &value, 97, 2));
    {
        const Environment e1("TILEWISE_FAKE_CC", "7.5"), e2("TILEWISE_FAKE_DEVICES", "0"),
            e3("TILEWISE_FAKE_DRIVER", "12040");
        EXPECT_EQ(100, api()("cuInit", 0u));
        EXPECT_EQ(0, api()("cuDriverGetVersion", &value));
        EXPECT_EQ(12040, value);
    }
    void *stream = nullptr, *start = nullptr, *end = nullptr, *other = nullptr;
    EXPECT_EQ(0, api()("cuStreamCreate", &stream, 1u));
    EXPECT_EQ(0, api()("cuEventCreate", &start, 0u));
    EXPECT_EQ(0, api()("cuEventCreate", &end, 0u));
    float milliseconds = -1;
    EXPECT_EQ(0, api()("cuEventRecord", start, stream));
    EXPECT_EQ(0, api()("cuEventRecord", end, stream));
    EXPECT_EQ(0, api()("cuEventElapsedTime", &milliseconds, start, end));
    EXPECT_GE(milliseconds, 0);
    EXPECT_EQ(0, api()("cuStreamWaitEvent", stream, end, 0u));
    Device pointer = 0;
    EXPECT_EQ(0, api()("cuMemAllocAsync", &pointer, size_t{64}, stream));
    int ordinal = -1;
    EXPECT_EQ(0, api()("cuPointerGetAttribute", static_cast<void*>(&ordinal), 9, pointer + 63));
    EXPECT_EQ(0, ordinal);
    EXPECT_EQ(1, api()("cuPointerGetAttribute", static_cast<void*>(&ordinal), 9, pointer + 64));
    EXPECT_EQ(0, api()("cuMemFreeAsync", pointer, stream));
    // A thread has no context until it gets one; streams stay with theirs.
    std::thread([&] {
        Device nothing = 0;
        EXPECT_EQ(201, api()("cuMemAlloc_v2", &nothing, size_t{64}));
        EXPECT_EQ(0, api()("cuDevicePrimaryCtxRetain", &other, 1));
        EXPECT_EQ(0, api()("cuCtxPushCurrent_v2", other));
        EXPECT_EQ(400, api()("cuStreamSynchronize", stream));
        EXPECT_EQ(0, api()("cuCtxPopCurrent_v2", &other));
        EXPECT_EQ(0, api()("cuDevicePrimaryCtxRelease_v2", 1));
        EXPECT_EQ(201, api()("cuCtxSynchronize"));
    }).join();
    EXPECT_EQ(0, api()("cuStreamSynchronize", stream));
    EXPECT_EQ(0, api()("cuEventDestroy_v2", start));
    EXPECT_EQ(0, api()("cuEventDestroy_v2", end));
    EXPECT_EQ(0, api()("cuStreamDestroy_v2", stream));
    EXPECT_EQ(400, api()("cuStreamSynchronize", stream));
    void* function = nullptr;
    int status = -1;
    EXPECT_EQ(0, api()("cuGetProcAddress_v2", "cuMemAlloc", &function, 12000, 0ull, &status));
    EXPECT_EQ(dlsym(api().cuda, "cuMemAlloc_v2"), function);
    EXPECT_EQ(500, api()("cuGetProcAddress_v2", "cuNothing", &function, 12000, 0ull, &status));
    EXPECT_EQ(1, status);
    const char* text = nullptr;
    EXPECT_EQ(0, api()("cuGetErrorName", 719, &text));
    EXPECT_STREQ("CUDA_ERROR_LAUNCH_FAILED", text);
}

TEST_F(FakeCuda, TensorMaps) {
    alignas(64) unsigned char map[128];
    alignas(16) static unsigned char data[32];
    const auto encode = [&](unsigned rank, uint64_t stride, uint32_t box, int swizzle, size_t shift) {
        const uint64_t dims[] = {64, 128, 4}, strides[] = {stride, stride * 128};
        const uint32_t boxes[] = {box, 64, 1}, ones[] = {1, 1, 1};
        return api()("cuTensorMapEncodeTiled", static_cast<void*>(map), 6, rank, static_cast<void*>(data + shift),
                     static_cast<const uint64_t*>(dims), static_cast<const uint64_t*>(strides),
                     static_cast<const uint32_t*>(boxes), static_cast<const uint32_t*>(ones), 0, swizzle, 2, 0);
    };
    EXPECT_EQ(0, encode(3, 128, 64, 3, 0));
    EXPECT_EQ(1, encode(3, 120, 64, 3, 0));
    EXPECT_EQ(1, encode(3, 128, 65, 0, 0));
    EXPECT_EQ(1, encode(3, 128, 128, 3, 0));
    EXPECT_EQ(1, encode(6, 128, 64, 3, 0));
    EXPECT_EQ(1, encode(3, 128, 64, 3, 8));
}

// A tile of a tensor, as the copy engine of a Hopper brings it: rows of 128 bytes, whose chunk c of 16 bytes lies at
// c ^ row % 8, and zeros for what lies outside.
TEST_F(FakeCuda, CopiesTilesOfTensors) {
    constexpr int kWidth = 72, kRows = 11, kHeads = 3, kPitch = 80;  // numbers of a row, and from row to row
    constexpr int kTileRows = 16, kTile = 64 * kTileRows;
    std::vector<unsigned short> values(size_t{kPitch} * kRows * kHeads, 0xffff);  // what no axis reaches
    const auto number = [](int column, int row, int head) {
        return static_cast<unsigned short>(1 + column + kWidth * (row + kRows * head));
    };
    for (int head = 0; head < kHeads; ++head) {
        for (int row = 0; row < kRows; ++row) {
            for (int c = 0; c < kWidth; ++c)
                values[static_cast<size_t>((head * kRows + row) * kPitch + c)] = number(c, row, head);
        }
    }
    const Array<unsigned short> tensor(values);
    struct Params {
        alignas(64) unsigned char map[128];
        void *tiles, *bytes, *coordinates;
        long long n;
    } params{};
    const auto encode = [&](int swizzle) {
        const uint64_t dims[] = {kWidth, kRows, kHeads}, strides[] = {2 * kPitch, 2 * kPitch * kRows};
        const uint32_t box[] = {64, kTileRows, 1}, ones[] = {1, 1, 1};
        return api()("cuTensorMapEncodeTiled", static_cast<void*>(params.map), 6, 3u, static_cast<void*>(tensor.get()),
                     static_cast<const uint64_t*>(dims), static_cast<const uint64_t*>(strides),
                     static_cast<const uint32_t*>(box), static_cast<const uint32_t*>(ones), 0, swizzle, 2, 0);
    };
    ASSERT_EQ(0, encode(3)) << message();
    void* f = kernel(R"(
struct Params { alignas(64) unsigned char map[128]; unsigned short* tiles; int *bytes, *coordinates; long long n; };
constexpr int kThreads = 32;
TW_KERNEL(kernel, Params, p) {
    __shared__ alignas(1024) unsigned short tile[64 * 16 + 1];
    tile[64 * 16] = 77;
    if (threadIdx.x == 0) p.bytes[blockIdx.x] = tw_copy_tensor(tile + p.n, p.map, p.coordinates + 3 * blockIdx.x);
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 16; i += 32) p.tiles[64 * 16 * blockIdx.x + i] = tile[i];
    if (threadIdx.x == 0 && tile[64 * 16] != 77) p.bytes[blockIdx.x] = -1;
})");
    const std::vector<std::vector<int>> places = {
        {0, 0, 0},       {0, 0, 2},  // more rows than there are: none of the next head
        {64, 3, 1},                  // 8 numbers of 64
        {-5, -7, 1},                 // before the first number and the first row
        {0, 11, 0},      {0, 100, 1}, {72, 0, 0}, {0, -16, 1}, {0, 0, 3}, {0, 0, -1},  // wholly outside
        {0, 1 << 30, 2},
    };
    const auto count = static_cast<unsigned>(places.size());
    std::vector<int> coordinates;
    for (const std::vector<int>& place : places) coordinates.insert(coordinates.end(), place.begin(), place.end());
    const Array<unsigned short> tiles(size_t{kTile} * count);
    const Array<int> bytes(count), where(coordinates);
    params.tiles = tiles.get(), params.bytes = bytes.get(), params.coordinates = where.get();
    ASSERT_EQ(0, launch(f, count, 32, params)) << message();
    EXPECT_EQ(bytes.values(), std::vector<int>(count, 2 * kTile));
    const std::vector<unsigned short> found = tiles.values();
    for (size_t n = 0; n < count; ++n) {
        for (int row = 0; row < kTileRows; ++row) {
            for (int c = 0; c < 64; ++c) {
                const int column = places[n][0] + c, r = places[n][1] + row, head = places[n][2];
                const bool inside = column >= 0 && column < kWidth && r >= 0 && r < kRows && head >= 0 && head < kHeads;
                const int at = row * 64 + ((c / 8) ^ (row % 8)) * 8 + c % 8;
                ASSERT_EQ(found[n * kTile + static_cast<size_t>(at)], inside ? number(column, r, head) : 0)
                    << "tile " << n << ", row " << row << ", column " << c;
            }
        }
    }
    // What the hardware does not take, or the fake one does not do.
    params.n = 8;
    EXPECT_EQ(716, launch(f, 1, 32, params));
    EXPECT_NE(std::string::npos, message().find("128 does not divide")) << message();
    params.n = 0;
    ASSERT_EQ(0, encode(0));
    EXPECT_NE(0, launch(f, 1, 32, params));
    EXPECT_NE(std::string::npos, message().find("not emulated")) << message();
}

TEST_F(FakeCuda, Speed) {
    void* f = with_prologue(R"(
namespace tilewise {
TW_KERNEL(kernel, Params, p) {
    float x = threadIdx.x;
    for (int i = 0; i < p.n; ++i) {
        __syncthreads();
        x += 1;
    }
    if (x < 0) p.c[0] = x;
}
})");
    struct {
        float *a, *b, *c;
        long long n;
    } const params = {nullptr, nullptr, nullptr, 100};
    for (const char* threads : {"1", ""}) {
        if (*threads) setenv("TILEWISE_FAKE_THREADS", threads, 1);
        const auto start = std::chrono::steady_clock::now();
        const std::clock_t cpu_start = std::clock();
        const unsigned blocks = 1000;
        EXPECT_EQ(0, launch(f, blocks, 256, params));
        const double cpu = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        unsetenv("TILEWISE_FAKE_THREADS");
        std::printf("256 threads x 100 barriers, %s: %.0f CTAs/s; CPU time for each arrival: %.1f ns\n",
                    *threads ? "1 OS thread" : "all CPUs", blocks / seconds, cpu * 1e9 / (blocks * 256.0 * 100));
    }
}

}  // namespace
