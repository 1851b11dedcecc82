// The text of a mask and the tree it stands for.
//
//   mask := and(mask,...) | or(mask,...) | not(mask)
//         | causal() | window(left,right) | chunk(c)
//         | key_padding(@k) | documents(@k,@k) | prefix(n) | prefix(@k) | intervals(@k,causal) | intervals(@k,full)
//         | row_intervals(@k,@k) | tree(@k,n) | tree(@k,@k) | blocks(@k,bq,bkv) | dense(@k) | mod(expression)
//
// @k is Problem::arrays[k]; expressions are those of expr.hpp.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "expr.hpp"
#include "problem.hpp"

namespace tilewise::core {

enum class MaskOp : uint8_t {
    all_of,
    any_of,
    negate,
    causal,
    window,
    chunk,
    key_padding,
    documents,
    prefix,
    intervals,
    row_intervals,
    tree,
    blocks,
    dense,
    mod,
};

inline constexpr size_t kMaxMaskBytes = size_t{1} << 18;  // of text
inline constexpr int kMaxMaskNodes = 256;
inline constexpr int kMaxMaskDepth = 32;

struct MaskNode {
    MaskOp op = MaskOp::causal;
    std::vector<MaskNode> parts;       // all_of and any_of: at least two, none of the same op; negate: one
    std::array<int, 2> array{-1, -1};  // numbers of the arrays, in the order of the text
    std::array<int64_t, 2> number{};   // the integers, in the order of the text
    bool causal = false;               // intervals
    Expr expr;                         // mod
};

// Both throw Error on anything that is not a mask of this problem; only shapes and dtypes of the arrays are looked at.
MaskNode parse_mask(std::string_view text, const Problem& problem);
std::string print_mask(const MaskNode& node);

}  // namespace tilewise::core
