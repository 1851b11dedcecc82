#include "plan.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

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

// The address of a tensor as far as decisions depend on it: how it is aligned, and whether there is one.
void* alignment_of(const void* data) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): it is compared, never followed
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) % 256 + (data == nullptr ? 256 : 0));
}

}  // namespace

// Runs tend to repeat, with other addresses, seeds and values behind pointers. What was checked and decided for one is
// kept for the next: doing it again would take longer than the launch of a kernel.
struct Plan::Run {
    tilewise_problem raw{};  // with alignments for addresses, and without seeds and texts
    std::array<std::string, 3> texts;
    Problem problem;
    size_t need = 0;                   // of workspace
    bool repeats = false;              // worth keeping
    std::shared_ptr<const void> kept;  // by the implementation

    // What makes two problems one, apart from texts. Compared as bytes: equal ones are equal problems; the reverse does
    // not hold, and need not.
    static void key_of(const tilewise_problem& problem, tilewise_problem& key) {
        std::memcpy(static_cast<void*>(&key), &problem, sizeof key);  // gaps between fields included
        for (tilewise_tensor* tensor :
             {&key.q, &key.k, &key.v, &key.bias, &key.alibi_slopes, &key.sinks, &key.cu_seqlens_q, &key.cu_seqlens_kv,
              &key.seqused_q, &key.seqused_kv, &key.leftpad_kv, &key.q_offset, &key.seed_offset}) {
            tensor->data = alignment_of(tensor->data);
        }
        key.mask = key.score_mod = key.backend = nullptr;
        key.seed = key.offset = 0;
    }
    static std::array<std::string_view, 3> texts_of(const tilewise_problem& problem) {
        const auto text = [](const char* t) { return std::string_view(t ? t : ""); };
        return {text(problem.mask), text(problem.score_mod), text(problem.backend)};
    }

    [[nodiscard]] bool is_of(const tilewise_problem& key, const std::array<std::string_view, 3>& other_texts) const {
        // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
        return std::memcmp(&raw, &key, sizeof key) == 0 &&
               std::equal(texts.begin(), texts.end(), other_texts.begin(), other_texts.end());
    }
    void move_to(const tilewise_problem& now) {
        problem.q.data = now.q.data, problem.k.data = now.k.data, problem.v.data = now.v.data;
        problem.bias.data = now.bias.data;
        problem.alibi_slopes.data = now.alibi_slopes.data, problem.sinks.data = now.sinks.data;
        problem.cu_seqlens_q.data = now.cu_seqlens_q.data, problem.cu_seqlens_kv.data = now.cu_seqlens_kv.data;
        problem.seqused_q.data = now.seqused_q.data, problem.seqused_kv.data = now.seqused_kv.data;
        problem.leftpad_kv.data = now.leftpad_kv.data, problem.q_offsets.data = now.q_offset.data;
        problem.seed_offset.data = now.seed_offset.data;
        problem.seed = now.seed, problem.offset = now.offset;
        problem.validate = wants_validation(now);
    }
};

// A run takes its problem out and gives it back, so that it has it alone: runs of the same problem at the same time
// find nothing and decide for themselves.
class Plan::Runs {
public:
    std::unique_ptr<Run> take(const tilewise_problem& problem) {
        tilewise_problem key;
        Run::key_of(problem, key);
        const auto texts = Run::texts_of(problem);
        const std::lock_guard lock(mutex_);
        for (size_t n = idle_.size(); n-- > 0;) {  // the latest first
            if (!idle_[n]->is_of(key, texts)) continue;
            std::unique_ptr<Run> run = std::move(idle_[n]);
            idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(n));
            return run;
        }
        return nullptr;
    }
    void give_back(std::unique_ptr<Run> run) {
        std::unique_ptr<Run> oldest;  // destroyed after the lock is open again
        const std::lock_guard lock(mutex_);
        if (idle_.size() >= kMost) {
            oldest = std::move(idle_.front());
            idle_.erase(idle_.begin());
        }
        idle_.push_back(std::move(run));
    }

private:
    static constexpr size_t kMost = 8;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Run>> idle_;
};

Plan::Plan(const tilewise_problem& problem, Pass pass) : pass_(pass) {
    check_size(problem, "problem");
    const bool has_data = problem.q.data || problem.k.data || problem.v.data || problem.cu_seqlens_q.data ||
                          problem.cu_seqlens_kv.data || problem.seqused_q.data || problem.seqused_kv.data;
    problem_ = make_problem(problem, has_data);
    choice_ = choose_or_refuse(problem_, pass);
    workspace_bytes_ = choice_.implementation->workspace_bytes(problem_, pass);
    runs_ = std::make_shared<Runs>();
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
    Problem problem = make_problem(raw);
    if (const Identity now(problem), planned(problem_); !(now == planned)) {
        refuse("problem", now.text(), "what the plan was made for: " + planned.text(), "Make another plan.");
    }
    return problem;
}

size_t Plan::workspace_bytes_for(const tilewise_problem& raw) const {
    check_size(raw, "problem");
    return choice_.implementation->workspace_bytes(checked_problem(raw), pass_);
}

std::unique_ptr<Plan::Run> Plan::run_of(const tilewise_problem& raw, Pass pass, Workspace& workspace) const {
    if (pass != pass_) {
        refuse("plan", pass_ == Pass::forward ? "a forward plan" : "a backward plan",
               pass == Pass::forward ? "a forward plan" : "a backward plan");
    }
    check_size(raw, "problem");
    // On the CPU lengths are read and the number of threads counts; arrays have shapes of their own.
    const bool repeats = raw.device_type == TILEWISE_CUDA && raw.num_arrays == 0 && raw.num_scalars == 0;
    std::unique_ptr<Run> run = repeats ? runs_->take(raw) : nullptr;
    if (run) {
        run->move_to(raw);
    } else {
        run = std::make_unique<Run>();
        run->problem = checked_problem(raw);
        run->need = choice_.implementation->workspace_bytes(run->problem, pass_);
        if (repeats) {
            Run::key_of(raw, run->raw);
            const auto texts = Run::texts_of(raw);
            std::copy(texts.begin(), texts.end(), run->texts.begin());
            run->repeats = true;
        }
    }
    if (!run->problem.device.is_cuda() && workspace.stream != nullptr) {
        refuse("stream", "a stream", "NULL: this plan runs on the CPU");
    }
    if (run->need > 0 && reinterpret_cast<uintptr_t>(workspace.data) % kAlignment != 0) {
        refuse("workspace", "an address that is not a multiple of 64", "64-byte alignment");
    }
    if (workspace.bytes < run->need || (run->need > 0 && workspace.data == nullptr)) {
        refuse("workspace", workspace.data ? std::to_string(workspace.bytes) + " bytes" : "a null pointer",
               "at least " + std::to_string(run->need) + " bytes for these lengths",
               "Make the plan with the largest batch and lengths it will see.");
    }
    if (run->repeats) workspace.kept = &run->kept;
    return run;
}

void Plan::forward(const tilewise_problem& raw, const tilewise_forward_args& args, Workspace workspace) const {
    check_size(args, "args");
    std::unique_ptr<Run> run = run_of(raw, Pass::forward, workspace);
    choice_.implementation->forward(run->problem, make_forward_args(run->problem, raw, args), workspace);
    if (run->repeats) runs_->give_back(std::move(run));
}

void Plan::backward(const tilewise_problem& raw, const tilewise_backward_args& args, Workspace workspace) const {
    check_size(args, "args");
    std::unique_ptr<Run> run = run_of(raw, Pass::backward, workspace);
    choice_.implementation->backward(run->problem, make_backward_args(run->problem, raw, args), workspace);
    if (run->repeats) runs_->give_back(std::move(run));
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
