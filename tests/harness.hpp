// The harness: random problems over the whole space of options, run by every implementation, compared with `reference`
// in fp64 by the accuracy rule. A new kernel needs no new test code: it only has to be in the list of implementations.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "core/registry.hpp"

namespace tilewise::test {

using core::DType;

// A strided tensor inside poisoned memory: gaps between its elements and the margins around it hold NaN (or -1), and
// are checked afterwards.
class Buffer {
public:
    Buffer() = default;
    // order: axes from outermost to innermost in memory; step: extra distance factor of the innermost axis; gap: unused
    // elements after each row of the innermost axis.
    Buffer(DType dtype, std::vector<int64_t> shape, std::vector<int> order, int64_t gap, int64_t step);
    Buffer(DType dtype, const std::vector<int64_t>& shape);  // dense

    [[nodiscard]] tilewise_tensor& view() { return view_; }
    [[nodiscard]] const tilewise_tensor& view() const { return view_; }
    [[nodiscard]] bool present() const { return view_.dtype != TILEWISE_NONE; }
    [[nodiscard]] int64_t size() const;
    [[nodiscard]] double get(int64_t n) const;  // n: row-major index in the view's shape
    void set(int64_t n, double value);
    void poison();                                 // every byte of the memory, elements and margins
    [[nodiscard]] bool margins_intact() const;     // nothing but elements was written since poison()
    [[nodiscard]] Buffer copy(DType dtype) const;  // dense, same values
    [[nodiscard]] std::span<std::byte> memory() { return memory_; }

private:
    [[nodiscard]] int64_t offset(int64_t n) const;
    tilewise_tensor view_{};
    std::vector<std::byte> memory_;
    std::vector<bool> is_element_;  // per element slot of memory_
};

struct Space {
    DType dtype = DType::f32;
    int64_t max_seqlen = 150;
    int64_t max_head_dim = 40;
    bool large = false;  // few but long sequences: several tiles and segments of keys
    bool tma = false;    // what fwd_sm90 takes: rows at multiples of 16 bytes, in v and o full; bands and documents
};

// Where run() puts what it hands over: as it is, or every array, text and workspace between pages that nobody may
// touch, beginning right behind the first of them or ending right before the second. Inputs cannot be written there.
enum class Guard { none, begin, end };

// One random problem with everything it points to.
class Case {
public:
    Case(uint64_t seed, const Space& space);
    Case(const Case&) = delete;
    Case& operator=(const Case&) = delete;

    // Runs forward and backward with the implementation ("simt" is fwd_simt and bwd_simt) or "standard" and compares.
    // Returns "" or what went wrong. Implementations of a GPU get copies of everything in its memory.
    std::string check(const std::string& implementation);
    [[nodiscard]] std::string describe() const { return core::describe(problem()); }
    [[nodiscard]] core::Problem problem() const { return core::make_problem(raw_); }

    struct Results {
        std::vector<std::string> names;
        std::vector<Buffer> outputs;  // o, lse, dq, dk, dv, dbias, dalibi_slopes, dsinks, darrays...
        [[nodiscard]] std::vector<uint64_t> bits() const;  // of every element
    };
    // `wide`: fp64 copies of all float tensors. `guard`: on the CPU.
    Results run(const std::string& implementation, bool wide, Guard guard = Guard::none);

private:
    tilewise_problem raw_{}, wide_raw_{};
    std::deque<Buffer> buffers_;
    std::vector<tilewise_tensor> arrays_, wide_arrays_;
    std::vector<double> scalars_;
    std::string mask_, score_mod_;
    Buffer d_o_, dlse_, wide_d_o_, wide_dlse_;
    bool has_dlse_ = false;
    std::unique_ptr<Results> reference_, standard_;
    std::mt19937_64 generator_;
    std::string backend_;

    void run_on_gpu(tilewise_problem raw, tilewise_forward_args forward_args, tilewise_backward_args args,
                    Results& results);
    int64_t uniform(int64_t low, int64_t high);
    bool chance(double p);
    Buffer& random_float(DType dtype, const std::vector<int64_t>& shape, double spread, bool strided, bool tma = false);
    Buffer& integers(DType dtype, std::vector<int64_t> values);
    int add_array(const Buffer& buffer);
};

// Sets TILEWISE_CPU_ISA for a scope.
class ForcedIsa {
public:
    explicit ForcedIsa(const std::string& isa);
    ~ForcedIsa();
    ForcedIsa(const ForcedIsa&) = delete;
    ForcedIsa& operator=(const ForcedIsa&) = delete;

private:
    std::string before_;
};

std::vector<std::string> available_isas();
// What check() takes on this machine: "cpu_tiled", and "simt" where there is a GPU (or a fake one).
std::vector<std::string> available_implementations();

}  // namespace tilewise::test
