// Kernels compiled ahead of time: what is refused, what the report says, and that a run finds them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "cuda/compile_ahead.hpp"
#include "jit/attention_source.hpp"
#include "jit/mma_spec.hpp"
#include "jit/nvrtc.hpp"
#include "jit/render_mask.hpp"
#include "jit/sm90_spec.hpp"
#include "jit/store.hpp"
#include "tilewise/tilewise.h"

namespace tilewise::cuda {
namespace {

namespace fs = std::filesystem;

class Environment {
public:
    Environment(const char* name, const std::string& value) : name_(name) {
        const char* before = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
        had_ = before != nullptr;
        before_ = before ? before : "";
        setenv(name, value.c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
    }
    ~Environment() {
        if (had_) setenv(name_, before_.c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
        else unsetenv(name_);                         // NOLINT(concurrency-mt-unsafe)
    }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;

private:
    const char* name_;
    bool had_ = false;
    std::string before_;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Where ./dev puts NVRTC.
std::string pip_folders() {
    std::string folders;
    std::error_code ignored;
    const fs::path venv = fs::path(__FILE__).parent_path().parent_path() / ".venv/lib";
    for (const auto& python : fs::directory_iterator(venv, ignored)) {
        for (const auto& package : fs::directory_iterator(python.path() / "site-packages/nvidia", ignored))
            folders += (package.path() / "lib").string() + ":";
    }
    return folders;
}

class CompileAhead : public ::testing::Test {
protected:
    void SetUp() override {
        std::string name = (fs::temp_directory_path() / "tilewise-test-XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder_ = name;
        tilewise_problem_init(&problem_);
        problem_.q = problem_.k = problem_.v = tensor(TILEWISE_FLOAT16, {1, 100, 2, 64});
        EXPECT_EQ(tilewise_set_nvrtc_path(pip_folders().c_str()), TILEWISE_OK);
    }
    void TearDown() override {
        EXPECT_EQ(tilewise_set_nvrtc_path(nullptr), TILEWISE_OK);
        fs::remove_all(folder_);
    }

    static tilewise_tensor tensor(int32_t dtype, const std::vector<int64_t>& shape) {
        tilewise_tensor t{};
        t.dtype = dtype;
        t.rank = static_cast<int32_t>(shape.size());
        int64_t stride = 1;
        for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) t.shape[d] = shape[d], t.strides[d] = stride;
        return t;
    }
    tilewise_status compile(const char* arch, const std::string& directory, tilewise_pass pass = TILEWISE_FORWARD) {
        report_.assign(1 << 16, '\0');
        size_t needed = 0;
        const tilewise_status status =
            tilewise_compile(&problem_, pass, arch, directory.c_str(), report_.data(), report_.size(), &needed);
        report_.resize(status == TILEWISE_OK ? needed - 1 : 0);
        return status;
    }
    void expect_refused(tilewise_status status, tilewise_status wanted, const std::vector<std::string>& parts) {
        EXPECT_EQ(status, wanted);
        for (const std::string& part : parts)
            EXPECT_TRUE(contains(tilewise_last_error(), part)) << tilewise_last_error();
    }

    std::string folder_, report_;
    tilewise_problem problem_{};
};

TEST_F(CompileAhead, RefusesWhatMakesNoSense) {
    expect_refused(compile("eighty", folder_), TILEWISE_INVALID_ARGUMENT, {"arch", "eighty", "sm_80"});
    expect_refused(compile("80", folder_, static_cast<tilewise_pass>(7)), TILEWISE_INVALID_ARGUMENT, {"pass", "7"});
    expect_refused(tilewise_compile(nullptr, TILEWISE_FORWARD, "80", folder_.c_str(), nullptr, 0, nullptr),
                   TILEWISE_INVALID_ARGUMENT, {"problem", "null"});
    problem_.backend = "cpu_tiled";
    expect_refused(compile("80", folder_), TILEWISE_INVALID_ARGUMENT, {"backend", "cpu_tiled", "fwd_simt"});
    problem_.backend = "bwd_simt";  // the other half of one backend
    problem_.v = tensor(TILEWISE_FLOAT32, {1, 100, 2, 64});
    expect_refused(compile("80", folder_), TILEWISE_INVALID_ARGUMENT, {"dtype"});
}

TEST_F(CompileAhead, NoCompiler) {
    const Environment nvrtc("TILEWISE_NVRTC", "/nonexistent/libnvrtc.so");
    expect_refused(compile("80", folder_), TILEWISE_INVALID_ARGUMENT, {"TILEWISE_NVRTC", "/nonexistent", "not there"});
    EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(CompileAhead, NoGpuAtHand) {
    const Environment driver("TILEWISE_CUDA_DRIVER", "/nonexistent/libcuda.so");
    EXPECT_NE(compile(nullptr, folder_), TILEWISE_OK);
    EXPECT_FALSE(std::string(tilewise_last_error()).empty());
}

TEST_F(CompileAhead, PackIsFoundByARun) {
    if (jit::find_nvrtc(0) == nullptr) GTEST_SKIP() << "no NVRTC here: pip install nvidia-cuda-nvrtc";
    expect_refused(compile("80", "/proc/self/x"), TILEWISE_INVALID_ARGUMENT, {"pack", "/proc/self/x", "does not take"});
    expect_refused(compile("30", folder_), TILEWISE_UNSUPPORTED, {"sm_30", "compiles for"});

    const std::string pack = folder_ + "/pack";
    ASSERT_EQ(compile("sm_90a", pack), TILEWISE_OK) << tilewise_last_error();
    for (const char* part :  // fwd_sm90, and fwd_mma for what that one leaves to it
         {"\"family\": \"fwd_sm90\"", "\"entry\": \"fwd_sm90\", \"arch\": \"sm_90a\"",
          "\"entry\": \"fwd_mma\", \"arch\": \"sm_90\"", "\"file\": \"combine.cu\"", "\"file\": \"prepare.cu\"",
          "\"registers\": ", "\"spill_store_bytes\": ", "\"from_cache\": false"})
        EXPECT_TRUE(contains(report_, part)) << part << " in:\n" << report_;
    EXPECT_FALSE(contains(report_, ": null")) << report_;
    EXPECT_FALSE(contains(report_, "fwd_simt")) << report_;
    ASSERT_EQ(compile("90", pack), TILEWISE_OK);
    EXPECT_FALSE(contains(report_, "\"from_cache\": false")) << report_;
    EXPECT_TRUE(contains(report_, "\"registers\": ")) << "also of what was there\n" << report_;

    // A short buffer holds what fits, and is told what would.
    std::string small(8, 'x');
    size_t needed = 0;
    ASSERT_EQ(tilewise_compile(&problem_, TILEWISE_FORWARD, "90", pack.c_str(), small.data(), 4, &needed), TILEWISE_OK);
    EXPECT_EQ(needed, report_.size() + 1);
    EXPECT_EQ(small, report_.substr(0, 3) + std::string("\0xxxx", 5));

    // By the key of the run, on a machine whose driver no compiler is old enough for.
    const Environment packs("TILEWISE_PACKS", pack), no_cache("TILEWISE_CACHE_MAX_MB", "0");
    tilewise_problem raw = problem_;
    raw.device_type = TILEWISE_CUDA;
    const core::Problem p = core::make_problem(raw, false);
    const jit::MaskProgram mask = jit::render_mask(p);
    const auto hopper = jit::sm90_forward_spec(p, mask, jit::Arch::parse("90"), nullptr);
    ASSERT_TRUE(hopper);
    const jit::Source best = jit::attention_source("fwd_sm90.cu", *hopper, hopper->constants(), p, mask);
    EXPECT_TRUE(contains(jit::obtain(best, 9, 0, 11000).about, "fwd_sm90.cu sm_90a"));
    const auto spec = jit::mma_forward_spec(p, mask, jit::Arch::parse("90"), nullptr);
    ASSERT_TRUE(spec);
    const jit::MmaForwardSpec laid_out = jit::mma_forward_layout(p, *spec, 132, jit::shared_limit({9, 0, false})).spec;
    const jit::Source source = jit::attention_source("fwd_mma.cu", laid_out, laid_out.constants(), p, mask);
    EXPECT_TRUE(contains(jit::obtain(source, 9, 0, 11000).about, "fwd_mma.cu sm_90"));
    EXPECT_THROW((void)jit::obtain(source, 8, 0, 11000), core::Error);
}

TEST_F(CompileAhead, OtherKernelsWhereABackendOrTheGpuWantsThem) {
    if (jit::find_nvrtc(0) == nullptr) GTEST_SKIP() << "no NVRTC here: pip install nvidia-cuda-nvrtc";
    problem_.backend = "simt";
    ASSERT_EQ(compile("90", folder_), TILEWISE_OK) << tilewise_last_error();
    EXPECT_TRUE(contains(report_, "\"entry\": \"fwd_simt\"")) << report_;
    EXPECT_FALSE(contains(report_, "fwd_mma") || contains(report_, "fwd_sm90")) << report_;
    problem_.backend = "mma";
    ASSERT_EQ(compile("90", folder_), TILEWISE_OK) << tilewise_last_error();
    EXPECT_TRUE(contains(report_, "\"entry\": \"fwd_mma\"")) << report_;
    EXPECT_FALSE(contains(report_, "fwd_sm90")) << report_;
    problem_.backend = "sm90";
    expect_refused(compile("80", folder_), TILEWISE_UNSUPPORTED, {"fwd_sm90", "sm_80", "sm_90 alone"});

    problem_.backend = nullptr;
    problem_.q = problem_.k = problem_.v = tensor(TILEWISE_BFLOAT16, {1, 100, 2, 64});
    ASSERT_EQ(compile("75", folder_), TILEWISE_OK) << tilewise_last_error();
    EXPECT_TRUE(contains(report_, "\"entry\": \"fwd_simt\"")) << report_;
    problem_.backend = "mma";
    expect_refused(compile("75", folder_), TILEWISE_UNSUPPORTED, {"fwd_mma", "sm_75", "float16 works"});
    problem_.q = problem_.k = problem_.v = tensor(TILEWISE_FLOAT32, {1, 100, 2, 64});
    expect_refused(compile("90", folder_), TILEWISE_UNSUPPORTED, {"fwd_mma", "float32", "bfloat16"});
}

TEST_F(CompileAhead, CacheIsListedAndCleared) {
    if (jit::find_nvrtc(0) == nullptr) GTEST_SKIP() << "no NVRTC here: pip install nvidia-cuda-nvrtc";
    const Environment cache("TILEWISE_CACHE_DIR", folder_ + "/cache");
    ASSERT_EQ(compile("80", ""), TILEWISE_OK) << tilewise_last_error();
    const auto list = [](int verify) {
        std::string text(1 << 16, '\0');
        size_t needed = 0;
        EXPECT_EQ(tilewise_cache_list(nullptr, verify, text.data(), text.size(), &needed), TILEWISE_OK);
        text.resize(needed - 1);
        return text;
    };
    EXPECT_TRUE(contains(list(0), folder_ + "/cache")) << list(0);
    EXPECT_TRUE(contains(list(0), "\"about\": \"fwd_mma.cu sm_80 NVRTC")) << list(0);
    for (const auto& file : fs::directory_iterator(folder_ + "/cache")) {
        std::fstream bytes(file.path(), std::ios::in | std::ios::out | std::ios::binary);
        bytes.seekp(-1, std::ios::end).put('?');
        break;
    }
    EXPECT_FALSE(contains(list(0), "damaged"));
    EXPECT_TRUE(contains(list(1), "damaged")) << list(1);
    uint64_t removed = 0;
    EXPECT_EQ(tilewise_cache_clear("", &removed), TILEWISE_OK);
    EXPECT_GE(removed, 2u);
    EXPECT_FALSE(contains(list(0), "about"));
    const Environment off("TILEWISE_CACHE_MAX_MB", "0");
    expect_refused(compile("80", ""), TILEWISE_INVALID_ARGUMENT, {"cache", "switched off"});
}

TEST(CompilerLogTest, ResourcesAndEverythingElse) {
    const CompilerLog log = parse_log(
        "a.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n"
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'second'\n"
        "ptxas info    : Compiling entry function 'first' for 'sm_80'\n"
        "ptxas info    : Function properties for first\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]\n"
        "ptxas info    : Compile time = 10.971 ms\n"
        "ptxas info    : Compiling entry function 'second' for 'sm_80'\n"
        "ptxas info    : Function properties for helper\n"
        "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Function properties for second\n"
        "    160 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 176 bytes cumulative stack size, 1024 bytes smem\n");
    ASSERT_EQ(log.kernels.size(), 2u);
    const KernelResources &first = log.kernels[0], &second = log.kernels[1];
    EXPECT_EQ(first.entry, "first");
    EXPECT_EQ(first.registers, 8);
    EXPECT_EQ(first.shared_bytes, 0);
    EXPECT_EQ(first.stack_bytes, 0);
    EXPECT_EQ(first.local_bytes, 0);
    EXPECT_EQ(second.entry, "second");
    EXPECT_EQ(second.registers, 255);
    EXPECT_EQ(second.shared_bytes, 1024);
    EXPECT_EQ(second.stack_bytes, 176);
    EXPECT_EQ(second.spill_store_bytes, 16);
    EXPECT_EQ(second.spill_load_bytes, 28);
    EXPECT_EQ(second.local_bytes, 176);
    ASSERT_EQ(log.warnings.size(), 2u);
    EXPECT_TRUE(contains(log.warnings[0], "#177-D"));
    EXPECT_TRUE(contains(log.warnings[1], "C7510"));
    EXPECT_TRUE(parse_log("").kernels.empty());
}

}  // namespace
}  // namespace tilewise::cuda
