// What every CUDA implementation does before its kernels run: the parameters of kernels/tilewise/abi.h from a Problem,
// the table of sequences (prepare.cu) and the summaries of mask arrays (summaries.cu) in the workspace.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/registry.hpp"
#include "core/summary.hpp"
#include "jit/render_mask.hpp"
#include "module.hpp"
#include "tilewise/abi.h"

namespace tilewise::cuda {

inline constexpr int64_t kTile = 64;  // rows of a tile, unless a kernel says otherwise

// Documents that are sequences are at most so many: shorter ones, on average, have more in a tile together than alone.
inline int64_t most_documents(const core::Problem& p) { return p.batch * (1 + core::ceil_div(p.q_rows, 128)); }

abi::Tensor to_abi(const core::Tensor4& tensor);
abi::Rows to_abi(const core::Rows3& rows);
abi::Grid to_abi(const core::Grid4& grid);
abi::PerHead per_head(const core::Array& array);

// Hands out pieces of the workspace, 256-byte aligned. With a null base it only counts.
class Arena {
public:
    explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}
    void* take(int64_t bytes) {
        void* const piece = base_ ? base_ + used_ : nullptr;
        used_ += (bytes + 255) / 256 * 256;
        return piece;
    }
    [[nodiscard]] int64_t used() const { return used_; }

private:
    std::byte* base_;
    int64_t used_ = 0;
};

// One run: parameters, and what has to happen before the main kernel.
class Call {
public:
    // Takes its part of the arena; touches no device memory.
    Call(const core::Problem& problem, const jit::MaskProgram& mask, Arena& arena, int64_t q_tile = kTile,
         int64_t kv_tile = kTile);

    [[nodiscard]] const abi::Problem& problem() const { return problem_; }
    [[nodiscard]] const std::vector<std::byte>& mask_data() const { return mask_data_; }
    // Tiles of one head, over all sequences; if lengths are in device memory no fewer than there are.
    [[nodiscard]] int64_t q_tiles() const { return tiles(p_.packed_q, p_.q_rows, problem_.q_tile); }
    [[nodiscard]] int64_t kv_tiles() const { return tiles(p_.packed_kv, p_.kv_rows, problem_.kv_tile); }

    // What loads the kernels of prepare() and clear_rows(), for side_by_side().
    [[nodiscard]] std::vector<std::function<void()>> loads() const;
    void prepare(void* stream) const;  // launches
    // After prepare(), the last entry of the table of sequences: of documents that are sequences.
    [[nodiscard]] const abi::Sequence* last_sequence() const { return problem_.sequences + problem_.num_sequences; }
    // Zeroes the rows that belong to no sequence; sets lse to -inf there.
    void clear_rows(const abi::Tensor& tensor, const abi::Rows& lse, int64_t heads, int64_t dims, bool query_side,
                    void* stream) const;

private:
    [[nodiscard]] int64_t tiles(bool packed, int64_t rows, int64_t tile) const;

    const core::Problem& p_;
    const jit::MaskProgram& mask_;
    abi::Problem problem_{};
    std::vector<abi::MaskArray> masks_;
    std::vector<abi::Array> arrays_;
    std::vector<abi::GatherSummary> gather_summaries_;
    std::vector<std::byte> mask_data_;
};

// Blocks of a grid; refuses what CUDA has no number for.
unsigned grid_x(int64_t tiles, int64_t heads);

// A kernel that is the same for every problem.
const Function& plain_function(int device, const char* file, const char* entry);

// Bytes of parts that follow each other; all have 8-byte members, so nothing is padded.
void append(std::vector<std::byte>& bytes, const void* part, size_t size);

// Reads lengths back to the host and refuses bad ones: what `validate` asks for. Waits for the stream.
void validate_lengths(const core::Problem& problem, void* stream);

}  // namespace tilewise::cuda
