// From the text of a mask to the device functions that answer its questions, and to the list of what they read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace tilewise::jit {

// How a kind reads an array, and which summary (kernels/tilewise/summaries.cu) it classifies by.
enum class MaskRole : uint8_t { q_tokens, kv_tokens, key_padding, intervals, per_head, tree, blocks, dense };

struct MaskOperand {
    int array;  // number in Problem::arrays
    MaskRole role;
    bool causal = false;  // intervals
};

struct MaskProgram {
    std::string text;  // visible, classify, key_hull, kChunkMask, query_hull, query_document(s), key_document(s)
    // What MaskData::masks and MaskData::numbers must hold, in order.
    std::vector<MaskOperand> operands;
    std::vector<int64_t> numbers;
    std::vector<int> gathered;  // numbers of the arrays that its expressions and the score_mod read
    bool bands = false;         // key_hull of a single row is all that the row sees
    // Of the keys in the key_hull of a row it sees those whose key_document is its query_document, if that is not
    // negative.
    bool documents = false;
    // The array with the ids of documents that are sequences instead (documents.cu), and no part of the mask; or -1.
    int sequences_of = -1;
    // causal and windows of the call and of the top level of the text, merged into one.
    int64_t window_left = -1, window_right = -1;
};

// Numbers and windows are run-time values: problems that differ in nothing else get the same text. With `sequences`, a
// mask of documents (MaskProgram::documents) becomes one of bands, each document a sequence of its own.
MaskProgram render_mask(const core::Problem& problem, bool sequences = false);

}  // namespace tilewise::jit
