// Summaries of mask arrays: what is known about 64 neighbours at once, and about any range in O(log n).
//
// BlockTree answers "what holds for entries [begin, end)" for one number per token (or a few); BlockCounts answers "how
// many of this rectangle are set" for arrays with two axes. Both are exact whatever the alignment of the question: the
// ends of a range that are not whole blocks are read one by one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.hpp"

namespace tilewise::core {

inline constexpr int64_t kSummaryBlock = 64;

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// A segment tree over blocks of 64 entries. Node{} is neutral and merge() must be commutative. The entries themselves
// stay with the caller: scan(begin, end) gives the Node of a few of them.
template <class Node>
class BlockTree {
public:
    BlockTree() = default;

    template <class Scan>
    BlockTree(int64_t n, const Scan& scan) : blocks_(ceil_div(n, kSummaryBlock)) {
        nodes_.resize(static_cast<size_t>(2 * blocks_));
        for (int64_t k = 0; k < blocks_; ++k) {
            at(blocks_ + k) = scan(k * kSummaryBlock, std::min(n, (k + 1) * kSummaryBlock));
        }
        for (int64_t k = blocks_ - 1; k > 0; --k) {
            at(k) = at(2 * k);
            at(k).merge(at(2 * k + 1));
        }
    }

    template <class Scan>
    [[nodiscard]] Node query(int64_t begin, int64_t end, const Scan& scan) const {
        int64_t first = ceil_div(begin, kSummaryBlock), last = end / kSummaryBlock;
        if (first >= last) return scan(begin, end);
        Node result;
        if (begin < first * kSummaryBlock) result.merge(scan(begin, first * kSummaryBlock));
        if (last * kSummaryBlock < end) result.merge(scan(last * kSummaryBlock, end));
        for (first += blocks_, last += blocks_; first < last; first /= 2, last /= 2) {
            if (first % 2 != 0) result.merge(nodes_[static_cast<size_t>(first++)]);
            if (last % 2 != 0) result.merge(nodes_[static_cast<size_t>(--last)]);
        }
        return result;
    }

private:
    Node& at(int64_t k) { return nodes_[static_cast<size_t>(k)]; }

    int64_t blocks_ = 0;
    std::vector<Node> nodes_;  // nodes_[1] is the root, the children of k are 2k and 2k+1
};

// Running sums of set entries over blocks of `block` x `block`, one table per plane: the number of set entries in any
// rectangle of whole blocks takes four loads. count(plane, row, begin, end) gives the set entries of a piece of a row.
class BlockCounts {
public:
    enum class Answer : uint8_t { none, some, all, unknown };

    BlockCounts() = default;

    template <class Count>
    BlockCounts(int64_t planes, int64_t rows, int64_t columns, int64_t block, const Count& count)
        : rows_(rows),
          columns_(columns),
          block_(block),
          row_blocks_(ceil_div(rows, block)),
          column_blocks_(ceil_div(columns, block)) {
        sums_.resize(static_cast<size_t>(planes * (row_blocks_ + 1) * (column_blocks_ + 1)));
        for (int64_t plane = 0; plane < planes; ++plane) {
            for (int64_t row = 0; row < rows; ++row) {
                int64_t* const sums = &sums_[index(plane, row / block + 1, 0)];
                for (int64_t k = 0; k < column_blocks_; ++k) {
                    sums[k + 1] += count(plane, row, k * block, std::min(columns, (k + 1) * block));
                }
            }
            for (int64_t r = 1; r <= row_blocks_; ++r) {
                int64_t along_row = 0;
                for (int64_t k = 1; k <= column_blocks_; ++k) {
                    int64_t& sum = sums_[index(plane, r, k)];
                    along_row += sum;
                    sum = along_row + sums_[index(plane, r - 1, k)];
                }
            }
        }
    }

    [[nodiscard]] int64_t rows() const { return rows_; }
    [[nodiscard]] int64_t columns() const { return columns_; }

    // Of a rectangle inside the plane, not empty. What the sums of whole blocks leave open is read entry by entry until
    // both kinds are seen, if that is at most max_scan entries; else the answer is unknown.
    template <class Count>
    [[nodiscard]] Answer ask(int64_t plane, Range row, Range column, int64_t max_scan, const Count& count) const {
        const Range outer_r{row.begin / block_, ceil_div(row.end, block_)};
        const Range outer_c{column.begin / block_, ceil_div(column.end, block_)};
        const int64_t outer = sum(plane, outer_r, outer_c);
        if (outer == 0) return Answer::none;
        if (outer == area(outer_r, outer_c)) return Answer::all;

        // The last block is whole if the rectangle reaches the end of the plane.
        const Range inner_r{ceil_div(row.begin, block_), row.end == rows_ ? row_blocks_ : row.end / block_};
        const Range inner_c{ceil_div(column.begin, block_),
                            column.end == columns_ ? column_blocks_ : column.end / block_};
        bool seen_set = false, seen_clear = false;
        const bool has_inner = !inner_r.empty() && !inner_c.empty();
        if (has_inner) {
            const int64_t inner = sum(plane, inner_r, inner_c);
            seen_set = inner > 0;
            seen_clear = inner < area(inner_r, inner_c);
        }
        if (seen_set && seen_clear) return Answer::some;
        const bool whole = has_inner && inner_r.begin == outer_r.begin && inner_r.end == outer_r.end &&
                           inner_c.begin == outer_c.begin && inner_c.end == outer_c.end;
        if (!whole) {
            const int64_t open = row.size() * column.size() - (has_inner ? area(inner_r, inner_c) : 0);
            if (open > max_scan) return Answer::unknown;
            const auto look = [&](int64_t r, int64_t begin, int64_t end) {
                if (begin >= end) return;
                const int64_t n = count(plane, r, begin, end);
                seen_set |= n > 0;
                seen_clear |= n < end - begin;
            };
            const Range known_rows{inner_r.begin * block_, std::min(rows_, inner_r.end * block_)};
            const Range known_columns{inner_c.begin * block_, std::min(columns_, inner_c.end * block_)};
            for (int64_t r = row.begin; r < row.end && !(seen_set && seen_clear); ++r) {
                if (has_inner && r >= known_rows.begin && r < known_rows.end) {
                    look(r, column.begin, known_columns.begin);
                    look(r, known_columns.end, column.end);
                } else {
                    look(r, column.begin, column.end);
                }
            }
        }
        return seen_set ? (seen_clear ? Answer::some : Answer::all) : Answer::none;
    }

private:
    [[nodiscard]] size_t index(int64_t plane, int64_t r, int64_t c) const {
        return static_cast<size_t>((plane * (row_blocks_ + 1) + r) * (column_blocks_ + 1) + c);
    }
    [[nodiscard]] int64_t sum(int64_t plane, Range r, Range c) const {
        return sums_[index(plane, r.end, c.end)] - sums_[index(plane, r.begin, c.end)] -
               sums_[index(plane, r.end, c.begin)] + sums_[index(plane, r.begin, c.begin)];
    }
    [[nodiscard]] int64_t area(Range r, Range c) const {
        return (std::min(rows_, r.end * block_) - r.begin * block_) *
               (std::min(columns_, c.end * block_) - c.begin * block_);
    }

    int64_t rows_ = 0, columns_ = 0, block_ = 1, row_blocks_ = 0, column_blocks_ = 0;
    std::vector<int64_t> sums_;
};

}  // namespace tilewise::core
