// Problems of the tests of the reference itself: they own their tensors, may be changed element by element, and random
// ones combine any options. (Everything else is tested with harness.hpp.)
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "core/registry.hpp"

namespace tilewise::test::oracle {

// A tensor with its memory. Elements are addressed by their row-major number, whatever the strides.
class Tensor {
public:
    Tensor() = default;  // absent
    Tensor(core::DType dtype, std::vector<int64_t> shape);
    // `order` lists the axes from the slowest to the fastest; `gap` leaves that many elements between neighbours of the
    // fastest axis and `slack` between the rows of it. The gaps hold NaN.
    Tensor(core::DType dtype, std::vector<int64_t> shape, std::vector<int> order, int64_t gap, int64_t slack);

    explicit operator bool() const { return view_.dtype != TILEWISE_NONE; }
    [[nodiscard]] core::DType dtype() const { return static_cast<core::DType>(view_.dtype); }
    [[nodiscard]] int64_t size() const;
    [[nodiscard]] const tilewise_tensor& view() const { return view_; }
    tilewise_tensor& view() { return view_; }
    [[nodiscard]] double at(int64_t n) const;
    void set(int64_t n, double value);
    void fill(double value);
    [[nodiscard]] Tensor like() const;  // same dtype, shape and strides, all NaN (all -1 for integers)
    [[nodiscard]] Tensor copy() const;

private:
    [[nodiscard]] int64_t place(int64_t n) const;
    std::shared_ptr<std::vector<std::byte>> memory_;
    tilewise_tensor view_{};
};

struct Case {
    tilewise_problem raw{};  // options; its tensors are set by problem()
    Tensor q, k, v, bias, alibi_slopes, sinks;
    Tensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, leftpad_kv, q_offset;
    std::vector<Tensor> arrays;
    std::vector<double> scalars;
    std::string mask, score_mod, backend;

    Case() { tilewise_problem_init(&raw); }
    Case(const Case&) = delete;
    Case& operator=(const Case&) = delete;

    const tilewise_problem& bind();  // fills raw from the members
    core::Problem problem() { return core::make_problem(bind()); }
    [[nodiscard]] std::string describe() { return core::describe(problem()); }

private:
    std::vector<tilewise_tensor> array_views_;
};

struct Gradients {
    Tensor d_o, dlse;  // inputs; dlse may be absent
    Tensor dq, dk, dv, dbias, dalibi_slopes, dsinks;
    std::vector<Tensor> darrays;
};

// Runs an implementation with outputs and workspace full of NaN. o and lse take the layout of q.
struct Outputs {
    Tensor o, lse;
};
Outputs make_outputs(Case& c);
Outputs run_forward(Case& c, const core::Implementation& implementation);
Gradients make_gradients(Case& c, const Outputs& outputs, uint64_t seed, bool with_dlse);  // random d_o, dlse
void run_backward(Case& c, const Outputs& outputs, Gradients& gradients, const core::Implementation& implementation);

// What random_case may draw; every flag is a permission, not a promise.
struct CaseSpace {
    core::DType dtype = core::DType::f32;
    int64_t max_seqlen = 40;
    int64_t max_head_dim = 20;
    bool packed = true, strides = true, bands = true, masks = true, score_mods = true, dropout = true;
    bool smooth = false;  // only differentiable score_mods
};
std::unique_ptr<Case> random_case(uint64_t seed, const CaseSpace& space);

void fill_normal(Tensor& tensor, std::mt19937_64& random, double scale = 1.0);

}  // namespace tilewise::test::oracle
