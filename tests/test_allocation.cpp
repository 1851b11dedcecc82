// Every allocation fails once. In this executable the n-th one does, for n = 1, 2, ... until a call gets by without it:
// alone, and with all that follow. Whatever the call, it comes back as TILEWISE_OUT_OF_MEMORY with a text, nothing is
// lost, and the next call works. (Apart from the other tests: operator new is replaced, and tests/CMakeLists.txt has
// the linker send aligned_alloc and free here, too.)
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "cpu/parallel.hpp"
#include "harness.hpp"

// The linker's --wrap gives these names: what the library and this file call aligned_alloc and free is __wrap_....
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" void* __real_aligned_alloc(size_t alignment, size_t bytes);
extern "C" void __real_free(void* memory);
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace {

std::atomic<int64_t> left{-1};      // allocations before the one that fails; negative: none does
std::atomic<bool> for_good{false};  // all that follow fail, too
std::atomic<bool> failed{false};    // some did
std::atomic<int64_t> live{0};       // allocations that nobody freed yet

bool fails() {
    if (left.load() < 0) return false;
    const int64_t before = left.fetch_sub(1);
    if (before > 0) return false;
    if (before < 0 && !for_good) return false;
    if (for_good) left.store(0);
    failed = true;
    return true;
}

void* take(size_t bytes, size_t alignment) {
    if (fails()) throw std::bad_alloc();
    void* const memory = alignment <= alignof(std::max_align_t)
                             ? std::malloc(std::max<size_t>(bytes, 1))
                             : __real_aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!memory) throw std::bad_alloc();
    ++live;
    return memory;
}

void give(void* memory) {
    if (memory) --live;
    __real_free(memory);
}

std::array<std::atomic<void*>, 64> aligned{};  // what the library has from aligned_alloc

}  // namespace

void* operator new(size_t bytes) { return take(bytes, 1); }
void* operator new[](size_t bytes) { return take(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment) { return take(bytes, static_cast<size_t>(alignment)); }
void* operator new[](size_t bytes, std::align_val_t alignment) { return take(bytes, static_cast<size_t>(alignment)); }
// Who asks like this has another way to go (std::stable_sort does): the call goes on.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    ++live;
    return std::malloc(std::max<size_t>(bytes, 1));
}
void operator delete(void* memory, const std::nothrow_t&) noexcept { give(memory); }
void operator delete(void* memory) noexcept { give(memory); }
void operator delete[](void* memory) noexcept { give(memory); }
void operator delete(void* memory, size_t) noexcept { give(memory); }
void operator delete[](void* memory, size_t) noexcept { give(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { give(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { give(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { give(memory); }

extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
    if (fails()) return nullptr;
    void* const memory = __real_aligned_alloc(alignment, bytes);
    for (std::atomic<void*>& slot : aligned) {
        void* none = nullptr;
        if (slot.compare_exchange_strong(none, memory)) break;
    }
    ++live;
    return memory;
}
void __wrap_free(void* memory) {
    for (std::atomic<void*>& slot : aligned) {
        void* same = memory;
        if (memory && slot.compare_exchange_strong(same, nullptr)) {
            --live;
            break;
        }
    }
    __real_free(memory);
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
}

namespace tilewise::test {
namespace {

// While it lives, the allocation after `count` more fails, and if `from_then_on` all that follow.
class Failing {
public:
    Failing(int64_t count, bool from_then_on) { for_good = from_then_on, failed = false, left = count; }
    ~Failing() { left = -1; }
    Failing(const Failing&) = delete;
    Failing& operator=(const Failing&) = delete;
};

// `call` ends with `usual` where memory suffices. What it allocates lives no longer than it does, but for what a thread
// keeps for its next calls, which the calls before the count have made, a refused one among them. Of two threads nobody
// knows which has made what: there, only a leak that repeats counts.
void check(const std::string& what, const std::function<tilewise_status()>& call, tilewise_status usual = TILEWISE_OK) {
    SCOPED_TRACE(what);
    ASSERT_EQ(call(), usual) << tilewise_last_error();
    const auto with = [&](int64_t count, bool from_then_on) {
        const Failing failing(count, from_then_on);
        return call();
    };
    ASSERT_EQ(tilewise_forward(nullptr, nullptr), TILEWISE_INVALID_ARGUMENT);
    for (int n = 0; n < 20; ++n) ASSERT_EQ(call(), usual) << tilewise_last_error();
    const int64_t slack = cpu::max_threads() > 1 ? 40 : 0;
    const int64_t before = live + slack;
    for (const bool from_then_on : {false, true}) {
        int64_t count = 0;
        for (;; ++count) {
            const tilewise_status status = with(count, from_then_on);
            const std::string text = tilewise_last_error();
            if (!failed) break;
            ASSERT_EQ(status, TILEWISE_OUT_OF_MEMORY) << "allocation " << count << ": " << text;
            ASSERT_NE(text.find("memory"), std::string::npos) << "allocation " << count << ": " << text;
            ASSERT_LE(live - static_cast<int64_t>(text.capacity() > 15), before)
                << "allocation " << count << " leaks: " << text;
            if (count % 8 == 0)
                ASSERT_EQ(call(), usual) << "after allocation " << count << ": " << tilewise_last_error();
        }
        ASSERT_GT(count, 0) << "nothing was allocated, so nothing was tested";
    }
}

Buffer numbers(DType dtype, const std::vector<int64_t>& shape, int64_t period) {
    Buffer buffer(dtype, shape);
    for (int64_t n = 0; n < buffer.size(); ++n) buffer.set(n, static_cast<double>(n % period));
    return buffer;
}

// Packed sequences with every option; the first is long enough for more than one segment of keys.
struct Everything {
    Buffer q = numbers(DType::f32, {16, 4, 24}, 5), k = numbers(DType::f32, {1200, 2, 24}, 3),
           v = numbers(DType::f32, {1200, 2, 16}, 7), o = numbers(DType::f32, {16, 4, 16}, 1),
           lse = numbers(DType::f32, {4, 16}, 1), d_o = numbers(DType::f32, {16, 4, 16}, 3);
    Buffer cu_q = numbers(DType::i32, {3}, 3), cu_kv = numbers(DType::i32, {3}, 3), used = numbers(DType::i32, {2}, 2);
    Buffer bias = numbers(DType::f32, {4, 12, 1100}, 4), slopes = numbers(DType::f32, {4}, 4),
           sinks = numbers(DType::f32, {4}, 4);
    Buffer q_ids = numbers(DType::i32, {16}, 2), kv_ids = numbers(DType::i32, {1200}, 2),
           table = numbers(DType::f32, {4, 33}, 6);
    Buffer dq = numbers(DType::f32, {16, 4, 24}, 1), dk = numbers(DType::f32, {1200, 2, 24}, 1),
           dv = numbers(DType::f32, {1200, 2, 16}, 1), dbias = numbers(DType::f32, {4, 12, 1100}, 1),
           dslopes = numbers(DType::f32, {4}, 1), dsinks = numbers(DType::f32, {4}, 1),
           dtable = numbers(DType::f32, {4, 33}, 1);
    std::vector<tilewise_tensor> arrays{q_ids.view(), kv_ids.view(), table.view()}, darrays{{}, {}, dtable.view()};
    double scalar = 0.5;
    tilewise_problem problem;
    tilewise_forward_args forward;
    tilewise_backward_args backward;

    Everything() {
        cu_q.set(1, 12), cu_q.set(2, 16), cu_kv.set(1, 1100), cu_kv.set(2, 1200), used.set(0, 1090), used.set(1, 50);
        tilewise_problem_init(&problem);
        problem.q = q.view(), problem.k = k.view(), problem.v = v.view();
        problem.cu_seqlens_q = cu_q.view(), problem.cu_seqlens_kv = cu_kv.view(), problem.seqused_kv = used.view();
        problem.causal = 1, problem.window_left = 900, problem.softcap = 20, problem.dropout_p = 0.2;
        problem.bias = bias.view(), problem.alibi_slopes = slopes.view(), problem.sinks = sinks.view();
        problem.mask = "or(documents(@0,@1),not(chunk(17)),mod(lt(sub(i,j),add(3,gather(@0,i)))))";
        problem.score_mod = "add(mul(x,$0),gather(@2,h,min(max(sub(i,j),0),32)))";
        problem.arrays = arrays.data(), problem.num_arrays = 3, problem.scalars = &scalar, problem.num_scalars = 1;
        tilewise_forward_args_init(&forward);
        forward.o = o.view(), forward.lse = lse.view();
        tilewise_backward_args_init(&backward);
        backward.d_o = d_o.view(), backward.o = o.view(), backward.lse = lse.view();
        backward.dq = dq.view(), backward.dk = dk.view(), backward.dv = dv.view();
        backward.dbias = dbias.view(), backward.dalibi_slopes = dslopes.view(), backward.dsinks = dsinks.view();
        backward.darrays = darrays.data();
    }
};

// First, so that in a process of its own (ctest gives every test one) each child below meets a library that was never
// called: what is made once and kept fails there.
TEST(Allocation, OfTheFirstCallOfAProcess) {
    Everything all;
    int passed = 0;
    for (int64_t count = 0;; ++count) {
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            tilewise_status status;
            {
                const Failing failing(count, false);
                status = tilewise_forward(&all.problem, &all.forward);
            }
            const bool works = tilewise_forward(&all.problem, &all.forward) == TILEWISE_OK;
            _exit(!works ? 100 : !failed ? 101 : static_cast<int>(status));
        }
        int ended = 0;
        ASSERT_EQ(waitpid(child, &ended, 0), child);
        ASSERT_TRUE(WIFEXITED(ended)) << "allocation " << count << ": signal " << WTERMSIG(ended);
        if (WEXITSTATUS(ended) == 101) {
            ASSERT_GT(count, 20);
            ASSERT_LT(passed, 10);
            break;
        }
        // Without the memory to read it, there is no quota: that one goes on.
        const int status = WEXITSTATUS(ended);
        ASSERT_TRUE(status == TILEWISE_OUT_OF_MEMORY || status == TILEWISE_OK)
            << "allocation " << count << ": " << status;
        passed += status == TILEWISE_OK;
    }
}

class Allocation : public testing::TestWithParam<int> {
protected:
    Allocation() { cpu::set_num_threads(GetParam()); }
    ~Allocation() override { cpu::set_num_threads(0); }
    Everything all;
};

TEST_P(Allocation, OfACall) {
    for (const char* backend : {"cpu_tiled", "reference"}) {
        all.problem.backend = backend;
        check(std::string("forward, ") + backend, [&] { return tilewise_forward(&all.problem, &all.forward); });
        check(std::string("backward, ") + backend, [&] { return tilewise_backward(&all.problem, &all.backward); });
    }
}

TEST_P(Allocation, OfAPlan) {
    for (const tilewise_pass pass : {TILEWISE_FORWARD, TILEWISE_BACKWARD}) {
        SCOPED_TRACE(pass == TILEWISE_FORWARD ? "forward" : "backward");
        tilewise_plan* plan = nullptr;
        check("plan_create", [&] {
            const tilewise_status status = tilewise_plan_create(&all.problem, pass, &plan);
            if (status == TILEWISE_OK) tilewise_plan_destroy(plan);
            return status;
        });
        ASSERT_EQ(tilewise_plan_create(&all.problem, pass, &plan), TILEWISE_OK);
        size_t bytes = 0;
        check("workspace_size_for", [&] { return tilewise_plan_workspace_size_for(plan, &all.problem, &bytes); });
        // NOLINTNEXTLINE(cppcoreguidelines-no-malloc): aligned
        void* const workspace = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        check("run", [&] {
            return pass == TILEWISE_FORWARD
                       ? tilewise_plan_forward(plan, &all.problem, &all.forward, workspace, bytes, nullptr)
                       : tilewise_plan_backward(plan, &all.problem, &all.backward, workspace, bytes, nullptr);
        });
        std::free(workspace);
        // Text instead of a status: what there is of it, and the reason is kept.
        const size_t whole = tilewise_plan_explain(plan, nullptr, 0);
        for (int64_t count = 0;; ++count) {
            size_t length = 0;
            {
                const Failing failing(count, true);
                length = tilewise_plan_explain(plan, nullptr, 0);
            }
            if (!failed) break;
            ASSERT_EQ(length, 1u);
            ASSERT_NE(std::string(tilewise_last_error()).find("memory"), std::string::npos);
        }
        ASSERT_EQ(tilewise_plan_explain(plan, nullptr, 0), whole);
        tilewise_plan_destroy(plan);
    }
}

TEST_P(Allocation, OfRefusals) {
    const auto refused = [&](const std::string& what) {
        check(what, [&] { return tilewise_forward(&all.problem, &all.forward); }, TILEWISE_INVALID_ARGUMENT);
    };
    all.problem.mask = "or(documents(@0,@1),mod(lt(i,gather(@7,j))))";
    refused("mask text");
    all.problem.mask = "dense(@2)";
    refused("mask array");
    all.problem.mask = nullptr, all.problem.score_mod = "add(x,where(lt(i,j),1.0,true,7))";
    refused("score_mod text");
    all.problem.score_mod = nullptr, all.problem.backend = "an unknown one with a long name";
    refused("backend");
    all.problem.backend = nullptr, all.problem.softcap = -1;
    refused("softcap");
    all.problem.softcap = 0, all.problem.struct_size = 3;
    check("struct_size", [&] { return tilewise_forward(&all.problem, &all.forward); }, TILEWISE_VERSION_MISMATCH);
}

TEST_P(Allocation, OfHelpers) {
    const std::vector<int64_t> rows{0, 9}, heads{1};
    Buffer probs = numbers(DType::f32, {2, 1, 2, 1090}, 1);
    check("attn_probs",
          [&] { return tilewise_attn_probs(&all.problem, nullptr, rows.data(), 2, heads.data(), 1, &probs.view()); });
    std::vector<uint8_t> classes(1000);
    size_t count = 0;
    check("mask_tiles",
          [&] { return tilewise_mask_tiles(&all.problem, 0, 3, 16, 16, classes.data(), classes.size(), &count); });
    Buffer keep = numbers(DType::u8, {2, 2, 3, 70}, 1);
    check("dropout_mask", [&] { return tilewise_dropout_mask(1, 2, 0.5, &keep.view()); });
    check("set_nvrtc_path",
          [] { return tilewise_set_nvrtc_path("/a/folder/with/a/long/name:/another/folder/as/well"); });
    ASSERT_EQ(tilewise_set_nvrtc_path(""), TILEWISE_OK);
    // Numbers and texts, which have no status: an answer all the same.
    {
        const Failing failing(0, true);
        EXPECT_GT(tilewise_num_threads(), 0);
        EXPECT_EQ(tilewise_doctor(nullptr, 0), 1u);
    }
    EXPECT_GT(tilewise_doctor(nullptr, 0), 100u);
}

INSTANTIATE_TEST_SUITE_P(Threads, Allocation, testing::Values(1, 2));

}  // namespace
}  // namespace tilewise::test
