#include "registry.hpp"

#include <cstdio>
#include <string_view>

#include "env.hpp"

namespace tilewise::core {

namespace {

// fwd_simt and bwd_simt are the two halves of one backend: a call names either, or "simt".
std::string_view family(std::string_view name) {
    return name.starts_with("fwd_") || name.starts_with("bwd_") ? name.substr(4) : name;
}

}  // namespace

Choice choose(const Problem& problem, Pass pass) {
    Choice choice;
    bool known = problem.backend.empty();
    std::string names;
    for (const Implementation* implementation : implementations()) {
        names += std::string(names.empty() ? "" : ", ") + implementation->name;
        if (!problem.backend.empty() && family(problem.backend) != family(implementation->name)) continue;
        known = true;
        if (pass == Pass::forward ? implementation->forward == nullptr : implementation->backward == nullptr) continue;
        std::string reason;
        if (implementation->device_type != problem.device.type) {
            if (problem.backend.empty()) continue;  // goes without saying
            reason = std::string("works on ") + (implementation->device_type == TILEWISE_CPU ? "CPU" : "CUDA") +
                     " tensors; these are on " + describe(problem.device);
        } else {
            reason = implementation->supports(problem, pass);
        }
        if (reason.empty()) {
            choice.implementation = implementation;
            break;
        }
        choice.refusals.push_back({implementation, std::move(reason)});
    }
    if (!known) refuse("backend", "\"" + problem.backend + "\"", names, "Leave it out for the best one.");
    if (env("TILEWISE_VERBOSE").find("dispatch") != std::string::npos) {
        std::string line =
            std::string("tilewise dispatch ") + (pass == Pass::forward ? "forward " : "backward ") + describe(problem);
        for (const Refusal& refusal : choice.refusals)
            line += std::string("\n  ") + refusal.implementation->name + ": " + refusal.reason;
        line += std::string("\n  -> ") + (choice.implementation ? choice.implementation->name : "nothing");
        std::fprintf(stderr, "%s\n", line.c_str());
    }
    return choice;
}

}  // namespace tilewise::core
