// Plan: decide once, run many. Immutable; any number of threads may run it, each with its own workspace.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "registry.hpp"

namespace tilewise::core {

class Plan {
public:
    // Throws Error: unsupported with every implementation's reason if nothing takes the problem.
    Plan(const tilewise_problem& problem, Pass pass);

    [[nodiscard]] Pass pass() const { return pass_; }
    [[nodiscard]] const Problem& problem() const { return problem_; }
    [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }
    [[nodiscard]] size_t workspace_bytes_for(const tilewise_problem& problem) const;
    [[nodiscard]] std::string explain() const;

    void forward(const tilewise_problem& problem, const tilewise_forward_args& args, Workspace workspace) const;
    void backward(const tilewise_problem& problem, const tilewise_backward_args& args, Workspace workspace) const;

private:
    [[nodiscard]] Problem checked_problem(const tilewise_problem& problem) const;
    [[nodiscard]] Problem problem_to_run(const tilewise_problem& problem, Pass pass, Workspace workspace) const;
    [[nodiscard]] size_t need(const tilewise_problem& raw, const Problem& problem) const;

    Problem problem_;
    Pass pass_;
    Choice choice_;
    size_t workspace_bytes_ = 0;

    // The workspace of the last run, and what it depends on. Runs tend to repeat, and working it out takes a quarter of
    // the host's time.
    struct Last {
        std::mutex mutex;
        tilewise_problem problem{};
        size_t need = 0;
    };
    std::unique_ptr<Last> last_ = std::make_unique<Last>();
};

// Allocates the workspace and runs.
void forward(const tilewise_problem& problem, const tilewise_forward_args& args);
void backward(const tilewise_problem& problem, const tilewise_backward_args& args);

}  // namespace tilewise::core
