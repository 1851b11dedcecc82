#include "plan.hpp"

#include <algorithm>

namespace tilewise::core {
namespace {

constexpr size_t kAlignment = 64;  // a GPU's allocators give 256

Choice choose_or_refuse(const Problem& problem, Pass pass) {
    Choice choice = choose(problem, pass);
    if (choice.implementation) return choice;
    std::string text = "no implementation takes this problem (" + describe(problem) + "):";
    for (const Refusal& refusal : choice.refusals) {
        text += std::string("\n  ") + refusal.implementation->name + ": " + refusal.reason;
    }
    throw Error(Status::unsupported, text);
}

// What a plan is bound to: everything but lengths, batch, strides and the values of run-time options.
std::string identity(const Problem& p) {
    std::string text = describe(p.device) + " " + name(p.dtype) + " heads " + std::to_string(p.num_heads_q) + "/" +
                       std::to_string(p.num_heads_kv) + " dims " + std::to_string(p.head_dim_qk) + "/" +
                       std::to_string(p.head_dim_v);
    const auto flag = [&](bool on, const char* label) {
        if (on) text += std::string(" ") + label;
    };
    flag(p.packed_q, "packed_q"), flag(p.packed_kv, "packed_kv"), flag(p.softcap > 0, "softcap");
    flag(static_cast<bool>(p.bias), "bias"), flag(static_cast<bool>(p.alibi_slopes), "alibi_slopes");
    flag(static_cast<bool>(p.sinks), "sinks"), flag(p.dropout_threshold > 0, "dropout");
    flag(p.deterministic, "deterministic"), flag(p.batch_invariant, "batch_invariant");
    return text + " mask=" + p.mask + " score_mod=" + p.score_mod + " backend=" + p.backend;
}

// A workspace of our own for the time of one call.
class OwnWorkspace {
public:
    OwnWorkspace(Device device, size_t bytes) : device_(device), bytes_(bytes) {
        const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
        memory_ = allocate(device, rounded, nullptr);
    }
    ~OwnWorkspace() { memory_.release(device_, memory_.data, nullptr); }
    OwnWorkspace(const OwnWorkspace&) = delete;
    OwnWorkspace& operator=(const OwnWorkspace&) = delete;
    [[nodiscard]] Workspace get() const { return {memory_.data, bytes_, nullptr}; }

private:
    Device device_;
    size_t bytes_;
    DeviceMemory memory_;
};

template <class Args>
void check_size(const Args& args, const char* what) {
    if (args.struct_size != sizeof(Args)) {
        throw Error(Status::version_mismatch,
                    std::string(what) + ".struct_size: got " + std::to_string(args.struct_size) + "; allowed: " +
                        std::to_string(sizeof(Args)) + ". Start from the tilewise_*_init function of the same header.");
    }
}

}  // namespace

Plan::Plan(const tilewise_problem& problem, Pass pass) : pass_(pass) {
    check_size(problem, "problem");
    const bool has_data = problem.q.data || problem.k.data || problem.v.data || problem.cu_seqlens_q.data ||
                          problem.cu_seqlens_kv.data || problem.seqused_q.data || problem.seqused_kv.data;
    problem_ = make_problem(problem, has_data);
    choice_ = choose_or_refuse(problem_, pass);
    workspace_bytes_ = choice_.implementation->workspace_bytes(problem_, pass);
}

std::string Plan::explain() const {
    std::string text = std::string(pass_ == Pass::forward ? "forward" : "backward") + " " + describe(problem_) + "\n";
    for (const Refusal& refusal : choice_.refusals) {
        text += std::string("  declined: ") + refusal.implementation->name + ": " + refusal.reason + "\n";
    }
    text += std::string("  implementation: ") + choice_.implementation->name + "\n";
    text += "  workspace: " + std::to_string(workspace_bytes_) + " bytes\n";
    return text + choice_.implementation->explain(problem_, pass_);
}

Problem Plan::checked_problem(const tilewise_problem& raw) const {
    check_size(raw, "problem");
    Problem problem = make_problem(raw);
    if (identity(problem) != identity(problem_)) {
        refuse("problem", identity(problem), "what the plan was made for: " + identity(problem_), "Make another plan.");
    }
    return problem;
}

size_t Plan::workspace_bytes_for(const tilewise_problem& raw) const {
    return choice_.implementation->workspace_bytes(checked_problem(raw), pass_);
}

Problem Plan::problem_to_run(const tilewise_problem& raw, Pass pass, Workspace workspace) const {
    if (pass != pass_) {
        refuse("plan", pass_ == Pass::forward ? "a forward plan" : "a backward plan",
               pass == Pass::forward ? "a forward plan" : "a backward plan");
    }
    Problem problem = checked_problem(raw);
    if (!problem.device.is_cuda() && workspace.stream != nullptr) {
        refuse("stream", "a stream", "NULL: this plan runs on the CPU");
    }
    const size_t need = choice_.implementation->workspace_bytes(problem, pass);
    if (need > 0 && reinterpret_cast<uintptr_t>(workspace.data) % kAlignment != 0) {
        refuse("workspace", "an address that is not a multiple of 64", "64-byte alignment");
    }
    if (workspace.bytes < need || (need > 0 && workspace.data == nullptr)) {
        refuse("workspace", workspace.data ? std::to_string(workspace.bytes) + " bytes" : "a null pointer",
               "at least " + std::to_string(need) + " bytes for these lengths",
               "Make the plan with the largest batch and lengths it will see.");
    }
    return problem;
}

void Plan::forward(const tilewise_problem& raw, const tilewise_forward_args& args, Workspace workspace) const {
    check_size(args, "args");
    const Problem problem = problem_to_run(raw, Pass::forward, workspace);
    choice_.implementation->forward(problem, make_forward_args(problem, raw, args), workspace);
}

void Plan::backward(const tilewise_problem& raw, const tilewise_backward_args& args, Workspace workspace) const {
    check_size(args, "args");
    const Problem problem = problem_to_run(raw, Pass::backward, workspace);
    choice_.implementation->backward(problem, make_backward_args(problem, raw, args), workspace);
}

void forward(const tilewise_problem& raw, const tilewise_forward_args& args) {
    check_size(raw, "problem");
    check_size(args, "args");
    const Problem problem = make_problem(raw);
    const ForwardArgs forward_args = make_forward_args(problem, raw, args);
    const Choice choice = choose_or_refuse(problem, Pass::forward);
    const size_t bytes = choice.implementation->workspace_bytes(problem, Pass::forward);
    const OwnWorkspace workspace(problem.device, bytes);
    choice.implementation->forward(problem, forward_args, workspace.get());
}

void backward(const tilewise_problem& raw, const tilewise_backward_args& args) {
    check_size(raw, "problem");
    check_size(args, "args");
    const Problem problem = make_problem(raw);
    const BackwardArgs backward_args = make_backward_args(problem, raw, args);
    const Choice choice = choose_or_refuse(problem, Pass::backward);
    const size_t bytes = choice.implementation->workspace_bytes(problem, Pass::backward);
    const OwnWorkspace workspace(problem.device, bytes);
    choice.implementation->backward(problem, backward_args, workspace.get());
}

}  // namespace tilewise::core
