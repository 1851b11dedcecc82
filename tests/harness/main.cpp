// tilewise_harness: the test harness as a command.
//   test     random problems against the reference    cases=1000 seed=0 isa=avx2 dtype=float32 seqlen=150 dim=40
//            impl=simt: one implementation, not all of this machine; impl=sm90 draws what that one takes
//   perf     time and GFLOP/s of every implementation  isa=… dtype=… seqlen=2048 dim=64 heads=2
//   support  which random problems an implementation declines, and why   cases=1000
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "../harness.hpp"
#include "cpu/isa.hpp"
#include "cpu/parallel.hpp"

using namespace tilewise;
using test::Case;
using test::DType;

namespace {

std::map<std::string, std::string> settings{{"cases", "300"},  {"seed", "0"}, {"isa", ""},    {"dtype", "float32"},
                                            {"seqlen", "150"}, {"dim", "40"}, {"heads", "2"}, {"impl", ""}};
int64_t number(const char* key) { return std::strtoll(settings[key].c_str(), nullptr, 10); }

DType dtype() {
    for (const DType d : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
        if (settings["dtype"] == core::name(d)) return d;
    }
    core::refuse("dtype", settings["dtype"], "float64, float32, float16 or bfloat16");
}

int run_test() {
    int failed = 0;
    const int64_t cases = number("cases");
    for (int64_t n = 0; n < cases; ++n) {
        const uint64_t seed = static_cast<uint64_t>(number("seed") + n);
        Case problem(seed,
                     {dtype(), number("seqlen"), number("dim"), number("seqlen") > 400, settings["impl"] == "sm90"});
        for (const std::string& implementation :
             settings["impl"].empty() ? test::available_implementations() : std::vector{settings["impl"]}) {
            const std::string wrong = problem.check(implementation);
            if (wrong.empty()) continue;
            ++failed;
            std::printf("FAILED %s seed=%llu %s\n%s", implementation.c_str(), static_cast<unsigned long long>(seed),
                        problem.describe().c_str(), wrong.c_str());
        }
        if ((n + 1) % 100 == 0 || n + 1 == cases)
            std::fprintf(stderr, "\r%s of %s, %d failed", std::to_string(n + 1).c_str(), std::to_string(cases).c_str(),
                         failed);
    }
    std::fprintf(stderr, "\n");
    std::printf("%lld passed, %d failed: seeds %s to %lld", static_cast<long long>(cases - failed), failed,
                settings["seed"].c_str(), static_cast<long long>(number("seed") + cases - 1));
    for (const char* key : {"impl", "isa", "dtype", "seqlen", "dim"}) std::printf(" %s=%s", key, settings[key].c_str());
    std::printf("\n");
    return failed ? 1 : 0;
}

int run_support() {
    std::map<std::string, int64_t> reasons;
    for (int64_t n = 0; n < number("cases"); ++n) {
        Case problem(static_cast<uint64_t>(number("seed") + n),
                     {dtype(), number("seqlen"), number("dim"), false, false});
        for (const core::Implementation* implementation : core::implementations()) {
            for (const core::Pass pass : {core::Pass::forward, core::Pass::backward}) {
                if (pass == core::Pass::forward ? !implementation->forward : !implementation->backward) continue;
                const std::string why_not = implementation->supports(problem.problem(), pass);
                ++reasons[std::string(implementation->name) +
                          (pass == core::Pass::forward ? " forward: " : " backward: ") +
                          (why_not.empty() ? "takes it" : why_not)];
            }
        }
    }
    for (const auto& [reason, count] : reasons)
        std::printf("%8lld  %s\n", static_cast<long long>(count), reason.c_str());
    return 0;
}

int run_perf() {
    const int64_t seqlen = number("seqlen"), dim = number("dim"), heads = number("heads");
    std::printf("%-10s %-8s %-9s %-7s %10s %10s\n", "impl", "isa", "pass", "mask", "ms", "GFLOP/s");
    for (const bool causal : {false, true}) {
        test::Buffer q(dtype(), {1, seqlen, heads, dim}), k(dtype(), {1, seqlen, heads, dim}),
            v(dtype(), {1, seqlen, heads, dim});
        test::Buffer o(dtype(), {1, seqlen, heads, dim}), d_o(dtype(), {1, seqlen, heads, dim});
        test::Buffer dq(dtype(), {1, seqlen, heads, dim}), dk(dtype(), {1, seqlen, heads, dim}),
            dv(dtype(), {1, seqlen, heads, dim});
        test::Buffer lse(dtype() == DType::f64 ? DType::f64 : DType::f32, {1, heads, seqlen});
        std::mt19937_64 generator(1);
        std::normal_distribution<double> normal;
        for (test::Buffer* buffer : {&q, &k, &v, &d_o}) {
            for (int64_t n = 0; n < buffer->size(); ++n) buffer->set(n, normal(generator));
        }
        tilewise_problem raw;
        tilewise_problem_init(&raw);
        raw.q = q.view(), raw.k = k.view(), raw.v = v.view(), raw.causal = causal;
        tilewise_forward_args forward;
        tilewise_forward_args_init(&forward);
        forward.o = o.view(), forward.lse = lse.view();
        tilewise_backward_args backward;
        tilewise_backward_args_init(&backward);
        backward.d_o = d_o.view(), backward.o = o.view(), backward.lse = lse.view();
        backward.dq = dq.view(), backward.dk = dk.view(), backward.dv = dv.view();
        const auto time = [&](auto body) {
            body();
            double best = 1e30, total = 0;
            while (total < 0.5) {
                const auto start = std::chrono::steady_clock::now();
                body();
                const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
                best = std::min(best, seconds), total += seconds;
            }
            return best;
        };
        const double flop = 4.0 * static_cast<double>(seqlen * seqlen * heads * dim) / (causal ? 2 : 1);
        for (const std::string& isa :
             settings["isa"].empty() ? test::available_isas() : std::vector<std::string>{settings["isa"]}) {
            const test::ForcedIsa forced(isa);
            const auto report = [&](const char* pass, double factor, double seconds) {
                std::printf("%-10s %-8s %-9s %-7s %10.3f %10.1f\n", "cpu_tiled", isa.c_str(), pass,
                            causal ? "causal" : "full", seconds * 1e3, flop * factor / seconds * 1e-9);
            };
            raw.backend = "cpu_tiled";
            report("forward", 1.0, time([&] {
                       if (tilewise_forward(&raw, &forward)) std::fprintf(stderr, "%s\n", tilewise_last_error());
                   }));
            report("backward", 2.5, time([&] {
                       if (tilewise_backward(&raw, &backward)) std::fprintf(stderr, "%s\n", tilewise_last_error());
                   }));
        }
    }
    std::printf("threads: %d\n", cpu::max_threads());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    try {
        for (int n = 2; n < argc; ++n) {
            const std::string argument = argv[n];
            const size_t equals = argument.find('=');
            if (equals == std::string::npos || !settings.count(argument.substr(0, equals))) {
                std::string names;
                for (const auto& [key, value] : settings) names.append(" ").append(key).append("=").append(value);
                core::refuse("argument", argument, "key=value with the keys and defaults" + names);
            }
            settings[argument.substr(0, equals)] = argument.substr(equals + 1);
        }
        if (mode == "perf") return run_perf();
        if (mode != "test" && mode != "support") core::refuse("mode", "\"" + mode + "\"", "test, perf or support");
        if (settings["isa"].empty()) return mode == "test" ? run_test() : run_support();
        const test::ForcedIsa forced(settings["isa"]);
        return mode == "test" ? run_test() : run_support();
    } catch (const core::Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
