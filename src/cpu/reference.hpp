// The implementation `reference`: the formula of docs/formula.md in fp64, one row of scores at a time. It is the oracle
// that every other implementation is tested against, and the last of the list: it takes every problem.
#pragma once

#include <cstdint>
#include <span>

#include "core/registry.hpp"

namespace tilewise::cpu {

extern const core::Implementation kReference;

// tilewise_attn_probs: out[b, n, r, j] = p of query rows[r] (local to its sequence), head heads[n], key j; 0 where
// hidden and where sequence b has no such row or key. lse absent: computed. Rows are spread over the threads.
void attn_probs(const core::Problem& problem, const core::Rows3& lse, std::span<const int64_t> rows,
                std::span<const int64_t> heads, const core::Array& out);

}  // namespace tilewise::cpu
