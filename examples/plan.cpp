// A plan made once and run at every step of decoding, with memory and threads of the program's own.
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <tilewise/tilewise.hpp>

namespace {

// Stands for the pool that a program has anyway. The thread that asks for work takes part in it.
class Pool {
public:
    explicit Pool(int threads) {
        for (int n = 1; n < threads; ++n) threads_.emplace_back([this] { work(); });
    }
    ~Pool() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // What tilewise_set_parallel_for asks for. Calls from several threads take turns.
    static void parallel_for(void* user, int64_t count, int32_t /*num_threads*/, tilewise_body body, void* context) {
        Pool& pool = *static_cast<Pool*>(user);
        const std::lock_guard turn(pool.turn_);
        std::unique_lock lock(pool.mutex_);
        pool.body_ = body, pool.context_ = context, pool.next_ = 0, pool.count_ = pool.left_ = count;
        pool.changed_.notify_all();
        pool.take(lock);
        pool.changed_.wait(lock, [&] { return pool.left_ == 0; });
    }

private:
    void work() {
        std::unique_lock lock(mutex_);
        while (!stop_) {
            take(lock);
            changed_.wait(lock, [&] { return stop_ || next_ < count_; });
        }
    }
    void take(std::unique_lock<std::mutex>& lock) {
        while (next_ < count_) {
            const int64_t index = next_++;
            lock.unlock();
            body_(context_, index);
            lock.lock();
            if (--left_ == 0) changed_.notify_all();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> threads_;
    tilewise_body body_ = nullptr;
    void* context_ = nullptr;
    int64_t next_ = 0, count_ = 0, left_ = 0;
    bool stop_ = false;
};

}  // namespace

int main() {
    constexpr int64_t kCapacity = 256, kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64;
    constexpr int32_t kThreads = 3;
    std::mt19937 generator(0);
    std::normal_distribution<float> normal;
    const auto random = [&](int64_t n) {
        std::vector<float> values(static_cast<size_t>(n));
        for (float& value : values) value = normal(generator);
        return values;
    };
    std::vector<float> q = random(kHeadsQ * kHeadDim), k = random(kCapacity * kHeadsKv * kHeadDim);
    std::vector<float> v = random(kCapacity * kHeadsKv * kHeadDim), o(q.size()), expected(q.size());

    // The problem after `length` tokens: the cache is read where it lies.
    const tilewise::Tensor tq(q.data(), {1, 1, kHeadsQ, kHeadDim}), to(o.data(), {1, 1, kHeadsQ, kHeadDim});
    const auto keys = [&](std::vector<float>& cache, int64_t length) {
        return tilewise::Tensor(cache.data(), {1, length, kHeadsKv, kHeadDim});
    };
    tilewise::Options options;
    options.causal = true;

    Pool pool(kThreads);
    if (tilewise_set_parallel_for(&Pool::parallel_for, &pool, kThreads) != TILEWISE_OK) return EXIT_FAILURE;

    // Decided for the longest cache, whose workspace suffices for the shorter ones.
    const tilewise::Plan plan(tilewise::Problem(tq, keys(k, kCapacity), keys(v, kCapacity), options));
    struct alignas(64) Line {
        std::byte bytes[64];
    };
    std::vector<Line> workspace((plan.workspace_bytes() + sizeof(Line) - 1) / sizeof(Line));
    const size_t bytes = workspace.size() * sizeof(Line);
    std::printf("%sworkspace: %zu bytes, threads: %d\n", plan.explain().c_str(), bytes, tilewise_num_threads());
    for (int64_t length = 1; length <= kCapacity; ++length) {
        const tilewise::Problem problem(tq, keys(k, length), keys(v, length), options);
        plan.forward(problem, to, {}, workspace.data(), bytes);
    }

    // Results do not depend on who computes them. The pool must not be used any more when it goes.
    if (tilewise_set_parallel_for(nullptr, nullptr, 0) != TILEWISE_OK) return EXIT_FAILURE;
    tilewise::attention(tq, keys(k, kCapacity), keys(v, kCapacity),
                        tilewise::Tensor(expected.data(), {1, 1, kHeadsQ, kHeadDim}), options);
    std::printf("after %ld steps o[0] = %.6f, in one call %.6f\n", static_cast<long>(kCapacity), o[0], expected[0]);
    return o == expected ? EXIT_SUCCESS : EXIT_FAILURE;
}
