// Plan: decide once, run many. Immutable; any number of threads may run it, each with its own workspace.
#pragma once

#include <memory>
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
    struct Run;  // one problem, checked and decided
    class Runs;  // the latest of them
    // Throws Error if the problem does not fit the plan, or the workspace the problem.
    [[nodiscard]] std::unique_ptr<Run> run_of(const tilewise_problem& problem, Pass pass, Workspace& workspace) const;
    [[nodiscard]] Problem checked_problem(const tilewise_problem& problem) const;

    Problem problem_;
    Pass pass_;
    Choice choice_;
    size_t workspace_bytes_ = 0;
    std::shared_ptr<Runs> runs_;
};

// Allocates the workspace and runs.
void forward(const tilewise_problem& problem, const tilewise_forward_args& args);
void backward(const tilewise_problem& problem, const tilewise_backward_args& args);

}  // namespace tilewise::core
