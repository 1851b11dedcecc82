// batch_invariant: the bits of a row are those of the row alone, whatever it comes with. Sequences of several lengths
// run one by one, in chunks of queries with and without the keys that a chunk does not see, packed, and padded, on one
// thread and on two; o and lse must agree in every bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/parallel.hpp"
#include "harness.hpp"

namespace tilewise::test {
namespace {

constexpr int64_t kHeadsQ = 4, kHeadsKV = 2, kDimV = 48;

struct Lengths {
    int64_t rows, keys;
};
// More and fewer rows than a tile has, more and fewer keys than a segment; rows that see nothing under causal; decode.
const std::vector<Lengths> kSequences{{150, 1100}, {70, 70}, {40, 25}, {3, 300}, {1, 1500}};

struct Form {
    std::string name;
    bool causal;
    int64_t window_left, window_right;
    bool options;  // whatever else touches scores
    int64_t dim;

    // Keys at or past it are not seen by query t.
    [[nodiscard]] int64_t end(int64_t t, int64_t keys) const {
        const int64_t reach = causal ? 0 : window_right;
        return reach < 0 ? keys : std::clamp<int64_t>(t + reach + 1, 0, keys);
    }
};
const std::vector<Form> kForms{{"full", false, -1, -1, false, 64},
                               {"causal", true, -1, -1, false, 80},
                               {"window", false, 200, 33, false, 128},
                               {"options", true, 500, -1, true, 64}};

// o of every head of a row, then lse, as bits.
using Row = std::vector<uint64_t>;

class Sequences {
public:
    Sequences(DType dtype, const Form& form) : dtype_(dtype), dim_(form.dim), form_(form) {
        for (const Lengths& s : kSequences) {
            q_start_.push_back(q_start_.back() + s.rows), kv_start_.push_back(kv_start_.back() + s.keys);
        }
        std::mt19937_64 random(static_cast<uint64_t>(dim_));
        std::normal_distribution<double> normal;
        const auto fill = [&](Buffer& buffer, std::vector<int64_t> shape, DType type) {
            buffer = Buffer(type, shape);
            for (int64_t n = 0; n < buffer.size(); ++n) buffer.set(n, normal(random));
        };
        fill(q_, {q_start_.back(), kHeadsQ, dim_}, dtype);
        fill(k_, {kv_start_.back(), kHeadsKV, dim_}, dtype), fill(v_, {kv_start_.back(), kHeadsKV, kDimV}, dtype);
        fill(slopes_, {kHeadsQ}, DType::f32), fill(sinks_, {kHeadsQ}, DType::f32);
    }

    // Queries [first, first + rows) of sequence b, with its first `keys` keys.
    std::vector<Row> part(size_t b, int64_t first, int64_t rows, int64_t keys) {
        tilewise_problem raw = problem();
        const auto slice = [](const Buffer& whole, int64_t start, int64_t count) {
            tilewise_tensor t = whole.view();
            t.data =
                static_cast<std::byte*>(t.data) + start * t.strides[0] * core::size_of(static_cast<DType>(t.dtype));
            t.rank = 4;
            for (int axis = 3; axis > 0; --axis)
                t.shape[axis] = t.shape[axis - 1], t.strides[axis] = t.strides[axis - 1];
            t.shape[0] = 1, t.shape[1] = count, t.strides[0] = 0;
            return t;
        };
        raw.q = slice(q_, q_start_[b] + first, rows);
        raw.k = slice(k_, kv_start_[b], keys), raw.v = slice(v_, kv_start_[b], keys);
        const int64_t offset = kSequences[b].keys - kSequences[b].rows + first;
        if (offset != keys - rows) raw.q_offset_mode = TILEWISE_OFFSET_VALUE, raw.q_offset_value = offset;
        return run(raw, {1, rows, kHeadsQ, kDimV}, {1, kHeadsQ, rows}).at(0);
    }
    std::vector<Row> alone(size_t b) { return part(b, 0, kSequences[b].rows, kSequences[b].keys); }

    std::vector<std::vector<Row>> packed() {
        tilewise_problem raw = problem();
        raw.q = q_.view(), raw.k = k_.view(), raw.v = v_.view();
        const auto starts = [](const std::vector<int64_t>& values) {
            Buffer cu(DType::i32, {static_cast<int64_t>(values.size())});
            for (size_t n = 0; n < values.size(); ++n) cu.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
            return cu;
        };
        const Buffer cu_q = starts(q_start_), cu_kv = starts(kv_start_);
        raw.cu_seqlens_q = cu_q.view(), raw.cu_seqlens_kv = cu_kv.view();
        return run(raw, {q_start_.back(), kHeadsQ, kDimV}, {kHeadsQ, q_start_.back()});
    }

    // Every sequence with room for more than the longest, which holds NaN.
    std::vector<std::vector<Row>> padded() {
        tilewise_problem raw = problem();
        const auto batch = static_cast<int64_t>(kSequences.size());
        Buffer q(dtype_, {batch, 190, kHeadsQ, dim_}), k(dtype_, {batch, 1777, kHeadsKV, dim_}),
            v(dtype_, {batch, 1777, kHeadsKV, kDimV}), used_q(DType::i64, {batch}), used_kv(DType::i64, {batch});
        for (int64_t b = 0; b < batch; ++b) {
            const Lengths& s = kSequences[static_cast<size_t>(b)];
            const auto copy = [&](const Buffer& from, int64_t start, int64_t rows, Buffer& to) {
                const int64_t width = from.view().shape[1] * from.view().shape[2],
                              first = b * to.view().shape[1] * width;
                for (int64_t n = 0; n < rows * width; ++n) to.set(first + n, from.get(start * width + n));
            };
            copy(q_, q_start_[static_cast<size_t>(b)], s.rows, q);
            copy(k_, kv_start_[static_cast<size_t>(b)], s.keys, k),
                copy(v_, kv_start_[static_cast<size_t>(b)], s.keys, v);
            used_q.set(b, static_cast<double>(s.rows)), used_kv.set(b, static_cast<double>(s.keys));
        }
        raw.q = q.view(), raw.k = k.view(), raw.v = v.view();
        raw.seqused_q = used_q.view(), raw.seqused_kv = used_kv.view();
        return run(raw, {batch, 190, kHeadsQ, kDimV}, {batch, kHeadsQ, 190});
    }

    [[nodiscard]] const Form& form() const { return form_; }

private:
    [[nodiscard]] tilewise_problem problem() const {
        tilewise_problem raw;
        tilewise_problem_init(&raw);
        raw.backend = "cpu_tiled", raw.batch_invariant = 1;
        raw.causal = form_.causal, raw.window_left = form_.window_left, raw.window_right = form_.window_right;
        if (form_.options) {
            raw.softcap = 7, raw.sinks = sinks_.view(), raw.alibi_slopes = slopes_.view();
            raw.score_mod = "add(mul(x,0.7),mul(0.01,float(mod(j,5))))";
        }
        return raw;
    }

    std::vector<std::vector<Row>> run(const tilewise_problem& raw, std::vector<int64_t> o_shape,
                                      std::vector<int64_t> lse_shape) {
        Buffer o(dtype_, o_shape), lse(dtype_ == DType::f64 ? DType::f64 : DType::f32, lse_shape);
        tilewise_forward_args args;
        tilewise_forward_args_init(&args);
        args.o = o.view(), args.lse = lse.view();
        if (tilewise_forward(&raw, &args) != TILEWISE_OK) throw std::runtime_error(tilewise_last_error());
        const bool is_packed = o_shape.size() == 3;
        const int64_t batch = is_packed ? static_cast<int64_t>(kSequences.size()) : o_shape[0];
        std::vector<std::vector<Row>> results;
        for (int64_t b = 0; b < batch; ++b) {
            const auto n = static_cast<size_t>(b);
            const int64_t rows = is_packed || batch > 1 ? kSequences[n].rows : o_shape[1];
            results.emplace_back();
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t row = is_packed ? q_start_[n] + i : b * o_shape[1] + i;
                Row bits;
                for (int64_t d = 0; d < kHeadsQ * kDimV; ++d)
                    bits.push_back(std::bit_cast<uint64_t>(o.get(row * kHeadsQ * kDimV + d)));
                for (int64_t h = 0; h < kHeadsQ; ++h) {
                    const int64_t at = is_packed ? h * o_shape[0] + row : (b * kHeadsQ + h) * o_shape[1] + i;
                    bits.push_back(std::bit_cast<uint64_t>(lse.get(at)));
                }
                results.back().push_back(std::move(bits));
            }
        }
        return results;
    }

    DType dtype_;
    int64_t dim_;
    Form form_;
    Buffer q_, k_, v_, slopes_, sinks_;  // rows of all sequences, one after the other
    std::vector<int64_t> q_start_{0}, kv_start_{0};
};

struct Cell {
    std::string isa;
    DType dtype;
};
void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.isa << " " << core::name(cell.dtype); }

class BatchInvariance : public testing::TestWithParam<Cell> {
protected:
    BatchInvariance() : isa_(GetParam().isa) {}
    ~BatchInvariance() override { cpu::set_num_threads(0); }

    ForcedIsa isa_;
};

// Of the many chunks of a long sequence a few are enough: six, and the last rows.
void check_chunks(Sequences& all, size_t b, const std::vector<Row>& whole, int64_t size) {
    const Lengths s = kSequences[b];
    const int64_t chunks = (s.rows + size - 1) / size, step = (chunks + 5) / 6;
    for (int64_t chunk = (chunks - 1) % step; chunk < chunks; chunk += step) {
        const int64_t first = chunk * size, rows = std::min(size, s.rows - first), last = first + rows - 1;
        for (const int64_t keys : {s.keys, all.form().end(last + s.keys - s.rows, s.keys)}) {
            const std::vector<Row> part = all.part(b, first, rows, keys);
            for (int64_t i = 0; i < rows; ++i) {
                ASSERT_EQ(part[static_cast<size_t>(i)], whole[static_cast<size_t>(first + i)])
                    << "sequence " << b << ", row " << first + i << " in a chunk of " << rows << " with " << keys
                    << " keys";
            }
        }
    }
}

TEST_P(BatchInvariance, ChunksPacksAndPadding) {
    for (const Form& form : kForms) {
        Sequences all(GetParam().dtype, form);
        SCOPED_TRACE(form.name);
        std::vector<std::vector<Row>> alone;
        for (const int threads : {1, 2}) {
            SCOPED_TRACE(std::to_string(threads) + " threads");
            cpu::set_num_threads(threads);
            for (size_t b = 0; b < kSequences.size(); ++b) {
                if (threads == 1) alone.push_back(all.alone(b));
                else ASSERT_EQ(all.alone(b), alone[b]) << "sequence " << b;
                for (const int64_t size : threads == 1 ? std::vector<int64_t>{1, 7, 64} : std::vector<int64_t>{7})
                    ASSERT_NO_FATAL_FAILURE(check_chunks(all, b, alone[b], size));
            }
            ASSERT_EQ(all.packed(), alone) << "packed";
            ASSERT_EQ(all.padded(), alone) << "padded";
        }
    }
}

std::vector<Cell> cells() {
    std::vector<Cell> all;
    for (const std::string& isa : available_isas()) {
        for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) all.push_back({isa, dtype});
    }
    return all;
}
INSTANTIATE_TEST_SUITE_P(Cpu, BatchInvariance, testing::ValuesIn(cells()),
                         [](const testing::TestParamInfo<Cell>& cell) {
                             return cell.param.isa + "_" + core::name(cell.param.dtype);
                         });

}  // namespace
}  // namespace tilewise::test
