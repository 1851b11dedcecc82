// Runs a grid: every thread of a CTA is a fiber, CTAs are shared out over OS threads.
//
// Environment, read at every launch:
//   TILEWISE_FAKE_THREADS=n                     OS threads; default: all CPUs
//   TILEWISE_FAKE_ORDER=forward|reverse|random:SEED   of blocks, and of the threads between two barriers
//   TILEWISE_FAKE_FIBER_ORDER=...               of the threads alone
//   TILEWISE_FAKE_TIMEOUT=seconds               of one CTA; default 60
#pragma once

#include <cstddef>
#include <string>

#include "abi.hpp"

namespace tw_fake {

struct Grid {
    const char* name;
    const Kernel* kernel;
    void* const* params;
    Dim grid, block;
    unsigned dynamic_bytes;
    // The __shared__ variables of the module on the calling OS thread.
    void* (*shared)(void* module);
    void* module;
    size_t shared_bytes;
    std::string (*describe)(const void* address);  // for reports of faults
};

struct Outcome {
    int code = 0;  // a CUresult
    std::string text;
};

constexpr unsigned kMaxDynamicShared = 227 * 1024;

Outcome run(const Grid& grid);

}  // namespace tw_fake
