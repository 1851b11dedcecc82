#include "plan.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

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
struct Identity {
    Device device;
    DType dtype;
    std::array<int64_t, 4> sizes;  // heads of q and kv, head dims of qk and v
    std::array<bool, 9> flags;
    std::string_view mask, score_mod, backend;

    explicit Identity(const Problem& p)
        : device(p.device),
          dtype(p.dtype),
          sizes{p.num_heads_q, p.num_heads_kv, p.head_dim_qk, p.head_dim_v},
          flags{p.packed_q,
                p.packed_kv,
                p.softcap > 0,
                static_cast<bool>(p.bias),
                static_cast<bool>(p.alibi_slopes),
                static_cast<bool>(p.sinks),
                p.dropout_threshold > 0,
                p.deterministic,
                p.batch_invariant},
          mask(p.mask),
          score_mod(p.score_mod),
          backend(p.backend) {}

    bool operator==(const Identity& other) const {
        return device.type == other.device.type && device.index == other.device.index && dtype == other.dtype &&
               sizes == other.sizes && flags == other.flags && mask == other.mask && score_mod == other.score_mod &&
               backend == other.backend;
    }
    [[nodiscard]] std::string text() const {
        static constexpr std::array<const char*, 9> kLabels{" packed_q", " packed_kv",     " softcap",
                                                            " bias",     " alibi_slopes",  " sinks",
                                                            " dropout",  " deterministic", " batch_invariant"};
        std::string text = describe(device) + " " + name(dtype) + " heads " + std::to_string(sizes[0]) + "/" +
                           std::to_string(sizes[1]) + " dims " + std::to_string(sizes[2]) + "/" +
                           std::to_string(sizes[3]);
        for (size_t n = 0; n < flags.size(); ++n) {
            if (flags[n]) text += kLabels[n];
        }
        return text.append(" mask=")
            .append(mask)
            .append(" score_mod=")
            .append(score_mod)
            .append(" backend=")
            .append(backend);
    }
};

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

// Everything of a problem that a workspace can depend on, but for what is behind pointers: of addresses only how they
// are aligned remains. With arrays it depends on more.
std::optional<tilewise_problem> memo_of(const tilewise_problem& raw) {
    if (raw.num_arrays > 0 || raw.num_scalars > 0) return {};
    tilewise_problem memo;
    std::memcpy(static_cast<void*>(&memo), &raw, sizeof memo);  // gaps between fields included: they are compared too
    for (tilewise_tensor* tensor : {&memo.q, &memo.k, &memo.v, &memo.bias, &memo.alibi_slopes, &memo.sinks,
                                    &memo.cu_seqlens_q, &memo.cu_seqlens_kv, &memo.seqused_q, &memo.seqused_kv,
                                    &memo.leftpad_kv, &memo.q_offset, &memo.seed_offset}) {
        tensor->data =  // NOLINTNEXTLINE(performance-no-int-to-ptr): it is compared, never followed
            reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(tensor->data) % 256);
    }
    memo.seed = memo.offset = 0;
    return memo;
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
    if (const Identity now(problem), planned(problem_); !(now == planned)) {
        refuse("problem", now.text(), "what the plan was made for: " + planned.text(), "Make another plan.");
    }
    return problem;
}

size_t Plan::need(const tilewise_problem& raw, const Problem& problem) const {
    const auto memo = memo_of(raw);
    if (!memo || !problem.device.is_cuda())  // on the CPU it also depends on the number of threads
        return choice_.implementation->workspace_bytes(problem, pass_);
    {
        const std::lock_guard lock(last_->mutex);
        // Equal bytes are equal problems; the reverse does not hold, and need not.
        // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
        if (std::memcmp(&last_->problem, &*memo, sizeof *memo) == 0) return last_->need;
    }
    const size_t bytes = choice_.implementation->workspace_bytes(problem, pass_);
    const std::lock_guard lock(last_->mutex);
    std::memcpy(static_cast<void*>(&last_->problem), &*memo, sizeof *memo);
    last_->need = bytes;
    return bytes;
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
    const size_t need = this->need(raw, problem);
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
