#include "harness.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "cpu/isa.hpp"
#include "cuda/device.hpp"
#include "standard.hpp"

namespace tilewise::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMargin = 24;

void store(void* data, DType dtype, int64_t n, double value) {
    switch (dtype) {
        case DType::i64: static_cast<int64_t*>(data)[n] = static_cast<int64_t>(value); break;
        case DType::i32: static_cast<int32_t*>(data)[n] = static_cast<int32_t>(value); break;
        case DType::u32: static_cast<uint32_t*>(data)[n] = static_cast<uint32_t>(static_cast<int64_t>(value)); break;
        case DType::u8:
        case DType::boolean: static_cast<uint8_t*>(data)[n] = static_cast<uint8_t>(value); break;
        default: core::store_float(data, dtype, n, value);
    }
}

double load(const void* data, DType dtype, int64_t n) {
    return core::is_float(dtype) ? core::load_float(data, dtype, n)
                                 : static_cast<double>(core::load_int(data, dtype, n));
}

double rounded(double value, DType dtype) {
    double slot = 0;
    core::store_float(&slot, dtype, 0, value);
    return core::load_float(&slot, dtype, 0);
}

double epsilon(DType dtype) { return dtype == DType::f64 ? 0x1p-52 : 0x1p-23; }  // of the accumulator
double unit_roundoff(DType dtype) {
    return dtype == DType::bf16 ? 0x1p-9 : dtype == DType::f16 ? 0x1p-12 : dtype == DType::f32 ? 0x1p-24 : 0x1p-53;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

Buffer::Buffer(DType dtype, std::vector<int64_t> shape, std::vector<int> order, int64_t gap, int64_t step) {
    view_.dtype = static_cast<int32_t>(dtype);
    view_.rank = static_cast<int32_t>(shape.size());
    int64_t stride = step;
    for (size_t n = order.size(); n-- > 0;) {
        const int axis = order[n];
        view_.shape[axis] = shape[static_cast<size_t>(axis)];
        view_.strides[axis] = stride;
        stride *= std::max<int64_t>(view_.shape[axis], 1);
        if (n + 1 == order.size()) stride += gap;
    }
    const int64_t slots = stride + 2 * kMargin;
    memory_.resize(static_cast<size_t>(slots * core::size_of(dtype)));
    view_.data = memory_.data() + kMargin * core::size_of(dtype);
    is_element_.resize(static_cast<size_t>(slots));
    for (int64_t n = 0; n < size(); ++n) is_element_[static_cast<size_t>(kMargin + offset(n))] = true;
    poison();
}

static std::vector<int> natural_order(size_t rank) {
    std::vector<int> order(rank);
    std::iota(order.begin(), order.end(), 0);
    return order;
}

Buffer::Buffer(DType dtype, const std::vector<int64_t>& shape)
    : Buffer(dtype, shape, natural_order(shape.size()), 0, 1) {}

int64_t Buffer::size() const {
    int64_t n = 1;
    for (int d = 0; d < view_.rank; ++d) n *= view_.shape[d];
    return n;
}

int64_t Buffer::offset(int64_t n) const {
    int64_t at = 0;
    for (int d = view_.rank; d-- > 0;) {
        at += n % view_.shape[d] * view_.strides[d];
        n /= view_.shape[d];
    }
    return at;
}

double Buffer::get(int64_t n) const { return load(view_.data, static_cast<DType>(view_.dtype), offset(n)); }
void Buffer::set(int64_t n, double value) { store(view_.data, static_cast<DType>(view_.dtype), offset(n), value); }

// All bits set: NaN in every float format, -1 in the signed integers.
void Buffer::poison() { std::fill(memory_.begin(), memory_.end(), std::byte{0xff}); }

bool Buffer::margins_intact() const {
    const auto width = static_cast<size_t>(core::size_of(static_cast<DType>(view_.dtype)));
    for (size_t slot = 0; slot < is_element_.size(); ++slot) {
        if (is_element_[slot]) continue;
        for (size_t byte = 0; byte < width; ++byte) {
            if (memory_[slot * width + byte] != std::byte{0xff}) return false;
        }
    }
    return true;
}

Buffer Buffer::copy(DType dtype) const {
    Buffer out(dtype, std::vector<int64_t>(view_.shape, view_.shape + view_.rank));
    for (int64_t n = 0; n < size(); ++n) out.set(n, get(n));
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------

int64_t Case::uniform(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator_);
}
bool Case::chance(double p) { return std::uniform_real_distribution<double>(0, 1)(generator_) < p; }

Buffer& Case::random_float(DType dtype, const std::vector<int64_t>& shape, double spread, bool strided, bool tma) {
    std::vector<int> order = natural_order(shape.size());
    // TMA wants the numbers of a row side by side, and rows at multiples of 16 bytes.
    if (strided && chance(0.5)) std::shuffle(order.begin(), order.end() - (tma ? 1 : 0), generator_);
    int64_t gap = strided && chance(0.4) ? uniform(1, 9) : 0;
    const int64_t step = strided && chance(0.2) && !tma ? 2 : 1;
    if (tma) gap = (shape.back() + gap + 7) / 8 * 8 - shape.back();
    buffers_.emplace_back(dtype, shape, order, gap, step);
    Buffer& buffer = buffers_.back();
    std::normal_distribution<double> normal(0, spread);
    for (int64_t n = 0; n < buffer.size(); ++n) buffer.set(n, normal(generator_));
    return buffer;
}

Buffer& Case::integers(DType dtype, std::vector<int64_t> values) {
    buffers_.emplace_back(dtype, std::vector<int64_t>{static_cast<int64_t>(values.size())});
    for (size_t n = 0; n < values.size(); ++n)
        buffers_.back().set(static_cast<int64_t>(n), static_cast<double>(values[n]));
    return buffers_.back();
}

int Case::add_array(const Buffer& buffer) {
    arrays_.push_back(buffer.view());
    const auto dtype = static_cast<DType>(buffer.view().dtype);
    if (core::is_float(dtype)) {
        buffers_.push_back(buffer.copy(DType::f64));
        wide_arrays_.push_back(buffers_.back().view());
    } else {
        wide_arrays_.push_back(buffer.view());
    }
    return static_cast<int>(arrays_.size()) - 1;
}

Case::Case(uint64_t seed, const Space& space) : generator_(seed) {
    tilewise_problem_init(&raw_);
    const DType dtype = space.dtype;
    const bool packed_q = chance(0.35);
    const bool packed_kv = packed_q && chance(0.8);
    const int64_t batch = chance(0.05) && !space.tma ? 0 : uniform(1, space.large ? 2 : 3);
    const int64_t heads_kv = chance(0.03) && !space.tma ? 0 : uniform(1, space.large ? 2 : 3);
    const int64_t heads_q = chance(0.02) && !space.tma ? 0 : heads_kv * uniform(1, chance(0.2) ? 5 : 3);
    const int64_t dim = chance(0.03) && !space.tma ? 0 : uniform(1, space.max_head_dim);
    int64_t dim_v = chance(0.5) ? dim : chance(0.03) && !space.tma ? 0 : uniform(1, space.max_head_dim);
    if (space.tma) dim_v = (dim_v + 7) / 8 * 8;
    const auto length = [&] {
        if (chance(0.05) && !space.tma) return int64_t{0};
        if (chance(0.2)) return uniform(1, 3);
        return uniform(1, chance(0.3) ? space.max_seqlen : std::max<int64_t>(space.max_seqlen / 3, 1));
    };
    const int64_t seqlen_q = length(), seqlen_kv = chance(0.5) ? seqlen_q : length();
    raw_.layout = chance(0.5) ? TILEWISE_BSHD : TILEWISE_BHSD;

    // Lengths
    std::vector<int64_t> rows_q(static_cast<size_t>(batch), seqlen_q), rows_kv(static_cast<size_t>(batch), seqlen_kv);
    const DType index = chance(0.5) ? DType::i32 : DType::i64;
    const auto cumulative = [&](std::vector<int64_t>& rows, int64_t& total) {
        std::vector<int64_t> cu{chance(0.8) ? 0 : uniform(0, 3)};
        for (int64_t& n : rows) cu.push_back(cu.back() + (n = length()));
        total = cu.back() + (chance(0.3) ? uniform(0, 5) : 0);  // slack after the last sequence
        return integers(index, cu).view();
    };
    int64_t total_q = 0, total_kv = 0;
    if (packed_q) raw_.cu_seqlens_q = cumulative(rows_q, total_q);
    if (packed_kv) raw_.cu_seqlens_kv = cumulative(rows_kv, total_kv);
    const auto used = [&](const std::vector<int64_t>& rows) {
        std::vector<int64_t> n;
        for (const int64_t row : rows) n.push_back(chance(0.3) ? row : uniform(0, row));
        return integers(index, n).view();
    };
    if (chance(0.15)) raw_.seqused_q = used(rows_q);
    if (chance(0.25)) raw_.seqused_kv = used(rows_kv);
    if (chance(0.15)) raw_.leftpad_kv = used(rows_kv);

    // Tensors
    const double spread = chance(0.1) ? 6 : 1;
    const auto tensor = [&](bool packed, int64_t rows, int64_t total, int64_t heads, int64_t d) {
        std::vector<int64_t> shape = packed                         ? std::vector<int64_t>{total, heads, d}
                                     : raw_.layout == TILEWISE_BSHD ? std::vector<int64_t>{batch, rows, heads, d}
                                                                    : std::vector<int64_t>{batch, heads, rows, d};
        return random_float(dtype, shape, spread, true, space.tma).view();
    };
    raw_.q = tensor(packed_q, seqlen_q, total_q, heads_q, dim);
    raw_.k = tensor(packed_kv, seqlen_kv, total_kv, heads_kv, dim);
    raw_.v = tensor(packed_kv, seqlen_kv, total_kv, heads_kv, dim_v);

    // Options
    if (chance(0.3))
        raw_.has_softmax_scale = 1, raw_.softmax_scale = std::uniform_real_distribution<double>(-0.3, 0.6)(generator_);
    raw_.causal = chance(0.4);
    if (chance(0.25)) raw_.window_left = uniform(-1, space.max_seqlen / 2);
    if (chance(0.2)) raw_.window_right = uniform(-1, space.max_seqlen / 2);
    if (chance(0.1)) raw_.chunk = uniform(1, space.max_seqlen / 2 + 1);
    raw_.q_offset_mode = static_cast<int32_t>(chance(0.5) ? 0 : uniform(0, 3));
    raw_.q_offset_value = uniform(-40, 80);
    if (raw_.q_offset_mode == TILEWISE_OFFSET_ARRAY) {
        std::vector<int64_t> offsets;
        for (int64_t b = 0; b < batch; ++b) offsets.push_back(uniform(-40, 80));
        raw_.q_offset = integers(index, offsets).view();
    }
    if (chance(0.2)) raw_.softcap = std::uniform_real_distribution<double>(0.5, 20)(generator_);
    const auto float_dtype = [&] {
        constexpr DType kAll[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
        return chance(0.5) ? dtype : kAll[uniform(0, 3)];
    };
    const auto longest = [](const std::vector<int64_t>& rows, int64_t dense, bool packed) {
        if (!packed) return dense;
        return rows.empty() ? int64_t{0} : *std::max_element(rows.begin(), rows.end());
    };
    const int64_t max_q = longest(rows_q, seqlen_q, packed_q), max_kv = longest(rows_kv, seqlen_kv, packed_kv);
    if (chance(0.25) && !space.tma) {
        std::vector<int64_t> shape{batch, heads_q, max_q, max_kv};
        for (int64_t& n : shape) {
            if (chance(0.35)) n = 1;
        }
        if (chance(0.2)) shape.erase(shape.begin());
        Buffer& bias = random_float(float_dtype(), shape, 1, true);
        for (int64_t n = 0; n < bias.size(); ++n) {
            if (chance(0.02)) bias.set(n, -std::numeric_limits<double>::infinity());
        }
        raw_.bias = bias.view();
    }
    if (chance(0.2)) {
        const std::vector<int64_t> shape = chance(0.5)   ? std::vector<int64_t>{heads_q}
                                           : chance(0.5) ? std::vector<int64_t>{batch, heads_q}
                                                         : std::vector<int64_t>{1, heads_q};
        raw_.alibi_slopes = random_float(float_dtype(), shape, 0.1, true).view();
    }
    if (chance(0.2)) raw_.sinks = random_float(float_dtype(), {heads_q}, 1, true).view();
    if (chance(0.2)) {
        raw_.dropout_p = std::uniform_real_distribution<double>(0, 0.9)(generator_);
        raw_.seed = static_cast<int64_t>(generator_()), raw_.offset = static_cast<int64_t>(generator_());
    }
    raw_.batch_invariant = chance(0.3);
    raw_.deterministic = chance(0.3);

    // Arrays of masks have the axes of this problem: the makers below need them.
    struct Sizes {
        int64_t batch, heads_q, heads_kv, q, kv, max_q, max_kv;
        bool packed_q, packed_kv;
    };
    const Sizes sizes{
        batch,  heads_q,  heads_kv, packed_q ? total_q : seqlen_q, packed_kv ? total_kv : seqlen_kv, max_q,
        max_kv, packed_q, packed_kv};
    // Per-token array: [S], [B|1, S], [B|1, H, S]; packed [total] or [H, total].
    const auto per_token = [&](bool query_side, DType element, auto value) {
        const bool packed = query_side ? packed_q : packed_kv;
        const int64_t rows = query_side ? sizes.q : sizes.kv;
        const int64_t heads_choice[] = {1, heads_kv, heads_q};
        std::vector<int64_t> shape{rows};
        if (packed) {
            if (chance(0.3)) shape.insert(shape.begin(), heads_choice[uniform(0, 2)]);
        } else if (chance(0.7)) {
            if (chance(0.4)) shape.insert(shape.begin(), heads_choice[uniform(0, 2)]);
            shape.insert(shape.begin(), chance(0.3) ? 1 : batch);
        }
        buffers_.emplace_back(element, shape);
        Buffer& buffer = buffers_.back();
        for (int64_t n = 0; n < buffer.size(); ++n) buffer.set(n, static_cast<double>(value(rows ? n % rows : 0)));
        return "@" + std::to_string(add_array(buffer));
    };
    const auto leaf = [&]() -> std::string {
        switch (space.tma && chance(0.5) ? std::array{0, 1, 3, 3}[static_cast<size_t>(uniform(0, 3))] : uniform(0, 9)) {
            case 0: return "window(" + std::to_string(uniform(-1, 40)) + "," + std::to_string(uniform(-1, 40)) + ")";
            case 1: return "chunk(" + std::to_string(uniform(1, 60)) + ")";
            case 2:
                return "key_padding(" + per_token(false, DType::boolean, [&](int64_t) { return chance(0.8); }) + ")";
            case 3: {
                const int64_t documents = uniform(1, 5);
                const bool sorted = chance(0.7);
                const bool wide = index == DType::i64 && documents % 2 == 0;  // ids that differ in either half
                const auto id = [&](int64_t rows) {
                    return [this, documents, sorted, rows, wide](int64_t n) {
                        if (chance(0.05)) return int64_t{-1};
                        const int64_t number =
                            sorted ? n * documents / std::max<int64_t>(rows, 1) : uniform(0, documents);
                        return wide ? number / 2 * (int64_t{1} << 32) + number % 2 : number;
                    };
                };
                const std::string q_ids = per_token(true, index, id(sizes.q));
                if (sizes.q == sizes.kv && sizes.packed_q == sizes.packed_kv && chance(0.5))
                    return "documents(" + q_ids + "," + q_ids + ")";
                return "documents(" + q_ids + "," + per_token(false, index, id(sizes.kv)) + ")";
            }
            case 4: {
                const std::string start =
                    per_token(true, DType::i32, [&](int64_t) { return uniform(-3, std::max<int64_t>(max_kv, 1)); });
                return "row_intervals(" + start + "," +
                       per_token(true, DType::i32, [&](int64_t) { return uniform(-3, max_kv + 20); }) + ")";
            }
            case 5: {
                const int64_t bq = uniform(1, 70), bkv = uniform(1, 70);
                std::vector<int64_t> shape{(std::max(sizes.max_q, seqlen_q) + bq - 1) / bq + 1,
                                           (std::max(sizes.max_kv, seqlen_kv) + bkv - 1) / bkv + 1};
                buffers_.emplace_back(DType::u8, shape);
                Buffer& map = buffers_.back();
                for (int64_t n = 0; n < map.size(); ++n) map.set(n, chance(0.6));
                return "blocks(@" + std::to_string(add_array(map)) + "," + std::to_string(bq) + "," +
                       std::to_string(bkv) + ")";
            }
            case 6: {
                std::vector<int64_t> shape{batch, heads_q, max_q, max_kv};
                for (int64_t& n : shape) {
                    if (chance(0.3)) n = 1;
                }
                buffers_.emplace_back(DType::boolean, shape);
                Buffer& dense = buffers_.back();
                for (int64_t n = 0; n < dense.size(); ++n) dense.set(n, chance(0.8));
                return "dense(@" + std::to_string(add_array(dense)) + ")";
            }
            case 7: return "mod(ne(mod(add(i,j)," + std::to_string(uniform(2, 9)) + "),0))";
            case 8: {
                constexpr int64_t kColumns[] = {1, 2, 2, 4};
                const int64_t choice = uniform(0, 3);
                const int64_t columns = kColumns[choice];
                const bool with_causal = choice < 2;
                std::vector<int64_t> shape{sizes.kv, columns};
                if (!packed_kv) shape = {chance(0.5) ? 1 : batch, chance(0.5) ? 1 : heads_q, sizes.kv, columns};
                buffers_.emplace_back(DType::i32, shape);
                Buffer& bounds = buffers_.back();
                for (int64_t n = 0; n < bounds.size(); ++n)
                    bounds.set(n, static_cast<double>(uniform(0, std::max<int64_t>(max_q, 1))));
                return "intervals(@" + std::to_string(add_array(bounds)) + (with_causal ? ",causal)" : ",full)");
            }
            default: {
                const int64_t n = uniform(0, std::max<int64_t>(std::min<int64_t>(max_kv, 40), 1));
                std::vector<int64_t> shape{sizes.q, (n + 31) / 32};
                buffers_.emplace_back(DType::u32, shape);
                Buffer& bits = buffers_.back();
                for (int64_t w = 0; w < bits.size(); ++w) bits.set(w, static_cast<double>(generator_() & 0xffffffffu));
                return "tree(@" + std::to_string(add_array(bits)) + "," + std::to_string(n) + ")";
            }
        }
    };
    if (chance(0.4) && heads_q > 0 && batch > 0) {
        mask_ = leaf();
        if (chance(0.3)) mask_ = "and(" + mask_ + "," + (space.tma && chance(0.5) ? "window(9,30)" : leaf()) + ")";
        if (chance(0.2)) mask_ = "or(" + mask_ + "," + leaf() + ")";
        if (chance(0.15)) mask_ = "not(" + mask_ + ")";
        raw_.mask = mask_.c_str();
    }
    if (chance(0.25) && heads_q > 0 && batch > 0 && !space.tma) {
        switch (uniform(0, 4)) {
            case 0: score_mod_ = "add(x,mul(0.05,float(sub(j,i))))"; break;
            case 1: {
                Buffer& table = random_float(chance(0.5) ? dtype : DType::f32, {heads_q, 33}, 1, true);
                const std::string array = "@" + std::to_string(add_array(table));
                score_mod_ = "add(x,gather(" + array + ",h,add(sub(j,i),16)))";  // often out of range: 0 there
                break;
            }
            case 2: score_mod_ = "mul(tanh(x),where(lt(mod(j,3),1),2.0,0.5))"; break;
            case 3: {
                Buffer& table = random_float(DType::f32, {std::max<int64_t>(max_kv, 1)}, 1, false);
                const std::string array = "@" + std::to_string(add_array(table));
                scalars_.push_back(0.7);
                score_mod_ = "add(mul(x,$0),mul(gather(" + array + ",j),x))";
                break;
            }
            default: score_mod_ = "where(eq(mod(add(i,j),5),0),-inf,mul(x,0.5))";
        }
        raw_.score_mod = score_mod_.c_str();
    }
    raw_.arrays = arrays_.data(), raw_.num_arrays = static_cast<int32_t>(arrays_.size());
    raw_.scalars = scalars_.data(), raw_.num_scalars = static_cast<int32_t>(scalars_.size());

    // Rows that no query may see hold NaN: padding, slack, and rows past what is used.
    const core::Problem p = core::make_problem(raw_);
    const auto poison_rows = [&](const tilewise_tensor& t, bool packed, const std::vector<core::Range>& rows,
                                 int64_t b) {
        const int row_axis = packed ? 0 : raw_.layout == TILEWISE_BSHD ? 1 : 2;
        for (const core::Range& range : rows) {
            std::vector<int64_t> at(static_cast<size_t>(t.rank), 0);
            const auto visit = [&](auto&& self, int axis, int64_t offset) -> void {
                if (axis == t.rank) {
                    store(t.data, static_cast<DType>(t.dtype), offset, kNaN);
                    return;
                }
                const int64_t begin = axis == row_axis ? range.begin : (!packed && axis == 0) ? b : 0;
                const int64_t end = axis == row_axis ? range.end : (!packed && axis == 0) ? b + 1 : t.shape[axis];
                for (int64_t n = begin; n < end; ++n) self(self, axis + 1, offset + n * t.strides[axis]);
            };
            visit(visit, 0, 0);
        }
    };
    for (int64_t b = 0; b < (packed_q ? 1 : batch); ++b) poison_rows(raw_.q, packed_q, core::unused_q_rows(p, b), b);
    for (int64_t b = 0; b < (packed_kv ? 1 : batch); ++b) {
        poison_rows(raw_.k, packed_kv, core::unused_kv_rows(p, b), b);
        poison_rows(raw_.v, packed_kv, core::unused_kv_rows(p, b), b);
    }

    std::vector<int64_t> o_shape(raw_.q.shape, raw_.q.shape + raw_.q.rank);
    o_shape.back() = dim_v;
    d_o_ = random_float(dtype, o_shape, 1, true);
    d_o_.view() = buffers_.back().view();
    const std::vector<int64_t> lse_shape =
        packed_q ? std::vector<int64_t>{heads_q, total_q} : std::vector<int64_t>{batch, heads_q, seqlen_q};
    has_dlse_ = chance(0.4);
    dlse_ = random_float(p.accumulator(), lse_shape, 1, true);
    dlse_.view() = buffers_.back().view();

    // The same numbers in fp64, for the oracle.
    const auto widen = [&](tilewise_tensor& t) {
        if (t.dtype == TILEWISE_NONE) return;
        Buffer dense(DType::f64, std::vector<int64_t>(t.shape, t.shape + t.rank));
        std::vector<int64_t> at(static_cast<size_t>(t.rank), 0);
        for (int64_t n = 0; n < dense.size(); ++n) {
            int64_t rest = n, offset = 0;
            for (int d = t.rank; d-- > 0;) offset += rest % t.shape[d] * t.strides[d], rest /= t.shape[d];
            dense.set(n, load(t.data, static_cast<DType>(t.dtype), offset));
        }
        buffers_.push_back(std::move(dense));
        t = buffers_.back().view();
    };
    wide_raw_ = raw_;
    widen(wide_raw_.q), widen(wide_raw_.k), widen(wide_raw_.v);
    widen(wide_raw_.bias), widen(wide_raw_.alibi_slopes), widen(wide_raw_.sinks);
    wide_raw_.arrays = wide_arrays_.data();
    wide_d_o_.view() = d_o_.view(), widen(wide_d_o_.view());
    wide_dlse_.view() = dlse_.view(), widen(wide_dlse_.view());
}

namespace {

bool on_gpu(const std::string& implementation) {
    return implementation == "simt" || implementation == "mma" || implementation == "sm90";
}

// Copies of host memory on GPU 0, at addresses that keep every offset.
class Mirror {
public:
    Mirror() = default;
    ~Mirror() {
        for (const Block& block : blocks_) cuda::release(0, block.device, nullptr);
    }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;

    void add(std::span<std::byte> host) {
        if (host.empty()) return;
        Block block{host, static_cast<std::byte*>(cuda::allocate(0, host.size(), nullptr))};
        blocks_.push_back(block);
        cuda::copy_to_device(block.device, host.data(), host.size(), nullptr);
    }
    void* translate(void* pointer) const {
        auto* const at = static_cast<std::byte*>(pointer);
        for (const Block& block : blocks_) {
            if (at >= block.host.data() && at <= block.host.data() + block.host.size())
                return block.device + (at - block.host.data());
        }
        return pointer;
    }
    tilewise_tensor translate(tilewise_tensor tensor) const {
        tensor.data = translate(tensor.data);
        return tensor;
    }
    void copy_back(std::span<std::byte> host) const {
        if (!host.empty()) cuda::copy_to_host(host.data(), translate(host.data()), host.size(), nullptr);
    }

private:
    struct Block {
        std::span<std::byte> host;
        std::byte* device;
    };
    std::vector<Block> blocks_;
};

// Copies of host memory between two pages that cannot be touched.
class GuardedPages {
public:
    explicit GuardedPages(Guard guard) : guard_(guard) {}
    ~GuardedPages() {
        for (const Block& block : blocks_) munmap(block.map, block.mapped);
    }
    GuardedPages(const GuardedPages&) = delete;
    GuardedPages& operator=(const GuardedPages&) = delete;

    // `data` null: bytes of poison. What was placed before keeps its place.
    std::byte* place(const void* data, size_t bytes, bool writable, size_t alignment = 1) {
        for (const Block& block : blocks_) {
            if (data && block.from == data) return block.to;
        }
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t inner = (bytes + page - 1) / page * page, mapped = inner + 2 * page;
        void* const map = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED) throw std::bad_alloc();
        std::byte* const first = static_cast<std::byte*>(map) + page;
        std::byte* const to = guard_ == Guard::begin ? first : first + (inner - bytes) / alignment * alignment;
        blocks_.push_back({map, mapped, data, to, bytes});
        if (inner == 0) return to;
        mprotect(first, inner, PROT_READ | PROT_WRITE);
        std::fill_n(first, inner, std::byte{0xff});
        if (data) std::memcpy(to, data, bytes);
        if (!writable) mprotect(first, inner, PROT_READ);
        return to;
    }
    template <class T>
    const T* list(const T* data, size_t count) {
        return reinterpret_cast<const T*>(place(data, count * sizeof(T), false));
    }
    // From its lowest element to its highest, and not a byte more.
    void place(tilewise_tensor& t, bool writable) {
        if (t.dtype == TILEWISE_NONE) return;
        int64_t low = 0, high = 1;
        for (int axis = 0; axis < t.rank; ++axis) {
            if (t.shape[axis] == 0) high = low = 0;
        }
        for (int axis = 0; axis < t.rank && high > low; ++axis)
            (t.strides[axis] < 0 ? low : high) += t.strides[axis] * (t.shape[axis] - 1);
        const int64_t width = core::size_of(static_cast<DType>(t.dtype));
        std::byte* const lowest = static_cast<std::byte*>(t.data) + low * width;
        t.data = place(lowest, static_cast<size_t>((high - low) * width), writable) - low * width;
    }
    // To where everything that is writable came from.
    void copy_back(std::vector<Buffer>& outputs) const {
        for (Buffer& output : outputs) {
            for (const Block& block : blocks_) {
                if (output.present() && block.from == output.view().data)
                    std::memcpy(output.view().data, block.to, block.bytes);
            }
        }
    }

private:
    struct Block {
        void* map;
        size_t mapped;
        const void* from;
        std::byte* to;
        size_t bytes;
    };
    Guard guard_;
    std::vector<Block> blocks_;
};

// All tensors that a problem and its arguments name, but for the lists of arrays.
template <class F>
void for_each_tensor(tilewise_problem& raw, tilewise_forward_args& forward, tilewise_backward_args& args, const F& f) {
    for (tilewise_tensor* tensor : {&raw.q,
                                    &raw.k,
                                    &raw.v,
                                    &raw.bias,
                                    &raw.alibi_slopes,
                                    &raw.sinks,
                                    &raw.cu_seqlens_q,
                                    &raw.cu_seqlens_kv,
                                    &raw.seqused_q,
                                    &raw.seqused_kv,
                                    &raw.leftpad_kv,
                                    &raw.q_offset,
                                    &forward.o,
                                    &forward.lse,
                                    &args.d_o,
                                    &args.o,
                                    &args.lse,
                                    &args.dlse,
                                    &args.dq,
                                    &args.dk,
                                    &args.dv,
                                    &args.dbias,
                                    &args.dalibi_slopes,
                                    &args.dsinks}) {
        f(*tensor);
    }
}

}  // namespace

std::vector<uint64_t> Case::Results::bits() const {
    std::vector<uint64_t> all;
    for (const Buffer& output : outputs) {
        for (int64_t n = 0; output.present() && n < output.size(); ++n)
            all.push_back(std::bit_cast<uint64_t>(output.get(n)));
    }
    return all;
}

std::vector<std::string> available_implementations() {
    std::vector<std::string> names{"cpu_tiled"};
    if (cuda::available()) names.emplace_back("simt");
    return names;
}

Case::Results Case::run(const std::string& implementation, bool wide, Guard guard) {
    tilewise_problem raw = wide ? wide_raw_ : raw_;
    backend_ = implementation;
    const bool standard = implementation == "standard";
    raw.backend = standard ? "" : backend_.c_str();
    if (on_gpu(implementation)) raw.backend = "cpu_tiled";  // for the shapes below; run_on_gpu asks for the other
    const core::Problem p = core::make_problem(raw);
    Results results;
    std::mt19937_64 layout_generator(7);
    const auto output = [&](const char* label, const tilewise_tensor& like, DType dtype,
                            int64_t last = -1) -> tilewise_tensor {
        if (like.dtype == TILEWISE_NONE) {
            results.names.emplace_back(label), results.outputs.emplace_back();
            return {};
        }
        std::vector<int64_t> shape(like.shape, like.shape + like.rank);
        if (last >= 0) shape.back() = last;
        std::vector<int> order = natural_order(shape.size());
        if (layout_generator() % 2) std::shuffle(order.begin(), order.end(), layout_generator);
        results.names.emplace_back(label);
        results.outputs.emplace_back(dtype, shape, order, static_cast<int64_t>(layout_generator() % 4), 1);
        return results.outputs.back().view();
    };
    const auto same = [&](const tilewise_tensor& like) { return static_cast<DType>(like.dtype); };
    results.outputs.reserve(16);
    const tilewise_tensor& d_o = wide ? wide_d_o_.view() : d_o_.view();
    const tilewise_tensor& dlse = wide ? wide_dlse_.view() : dlse_.view();
    tilewise_forward_args forward_args;
    tilewise_forward_args_init(&forward_args);
    forward_args.o = output("o", raw.q, p.dtype, p.head_dim_v);
    forward_args.lse = output("lse", dlse, p.accumulator());
    tilewise_backward_args args;
    tilewise_backward_args_init(&args);
    args.d_o = d_o, args.o = forward_args.o, args.lse = forward_args.lse;
    if (has_dlse_) args.dlse = dlse;
    args.dq = output("dq", raw.q, p.dtype), args.dk = output("dk", raw.k, p.dtype),
    args.dv = output("dv", raw.v, p.dtype);
    args.dbias = output("dbias", raw.bias, same(raw.bias));
    args.dalibi_slopes = output("dalibi_slopes", raw.alibi_slopes, same(raw.alibi_slopes));
    args.dsinks = output("dsinks", raw.sinks, same(raw.sinks));
    std::vector<tilewise_tensor> darrays;
    for (int n = 0; n < raw.num_arrays; ++n) {
        const bool wanted = core::is_float(same(raw.arrays[n]));
        darrays.push_back(output("darray", wanted ? raw.arrays[n] : tilewise_tensor{}, same(raw.arrays[n])));
    }
    args.darrays = darrays.data();

    GuardedPages pages(guard);
    std::vector<tilewise_tensor> arrays(raw.arrays, raw.arrays + raw.num_arrays);
    if (guard != Guard::none) {
        const auto place = [&](tilewise_tensor& tensor) {
            const bool writable = std::any_of(results.outputs.begin(), results.outputs.end(),
                                              [&](const Buffer& buffer) { return buffer.view().data == tensor.data; });
            pages.place(tensor, writable);
        };
        for_each_tensor(raw, forward_args, args, place);
        for (tilewise_tensor& tensor : arrays) place(tensor);
        for (tilewise_tensor& tensor : darrays) place(tensor);
        raw.arrays = pages.list(arrays.data(), arrays.size()),
        args.darrays = pages.list(darrays.data(), darrays.size());
        raw.scalars = pages.list(raw.scalars, static_cast<size_t>(raw.num_scalars));
        for (const char** text : {&raw.mask, &raw.score_mod}) {
            if (*text) *text = pages.list(*text, std::strlen(*text) + 1);
        }
    }
    const core::Problem placed = core::make_problem(raw);

    // Workspaces arrive full of NaN bits.
    std::vector<std::byte> memory;
    const auto workspace = [&](size_t bytes) {
        if (guard != Guard::none) return core::Workspace{pages.place(nullptr, bytes, true, 64), bytes};
        memory.assign(bytes + 64, std::byte{0xff});
        auto address = reinterpret_cast<uintptr_t>(memory.data());
        return core::Workspace{memory.data() + (64 - address % 64) % 64, bytes};
    };
    if (on_gpu(implementation)) {
        run_on_gpu(raw, forward_args, args, results);
    } else if (standard) {
        standard_forward(p, core::make_forward_args(p, raw, forward_args));
        standard_backward(p, core::make_backward_args(p, raw, args));
    } else {
        const core::Choice choice = core::choose(placed, core::Pass::forward);
        if (!choice.implementation) throw core::Error(core::Status::unsupported, choice.refusals.at(0).reason);
        choice.implementation->forward(placed, core::make_forward_args(placed, raw, forward_args),
                                       workspace(choice.implementation->workspace_bytes(placed, core::Pass::forward)));
        choice.implementation->backward(
            placed, core::make_backward_args(placed, raw, args),
            workspace(choice.implementation->workspace_bytes(placed, core::Pass::backward)));
    }
    pages.copy_back(results.outputs);
    return results;
}

void Case::run_on_gpu(tilewise_problem raw, tilewise_forward_args forward_args, tilewise_backward_args args,
                      Results& results) {
    const cuda::DeviceGuard guard(0);
    Mirror mirror;
    for (Buffer& buffer : buffers_) mirror.add(buffer.memory());
    for (Buffer& output : results.outputs) mirror.add(output.memory());
    raw.device_type = TILEWISE_CUDA;
    raw.backend = backend_.c_str();
    for_each_tensor(raw, forward_args, args, [&](tilewise_tensor& tensor) { tensor = mirror.translate(tensor); });
    std::vector<tilewise_tensor> arrays, darrays;
    for (int n = 0; n < raw.num_arrays; ++n) {
        arrays.push_back(mirror.translate(raw.arrays[n]));
        darrays.push_back(mirror.translate(args.darrays[n]));
    }
    raw.arrays = arrays.data(), args.darrays = darrays.data();
    if (raw.score_mod) raw.deterministic = 0;  // declined: gradients of captured arrays
    core::Problem p = core::make_problem(raw);
    const auto run = [&](core::Pass pass, const auto& go) {
        // Some is left to bwd_simt, and bwd_sm90 there is none.
        if (pass == core::Pass::backward && (backend_ == "sm90" || (backend_ == "mma" && raw.score_mod)))
            p.backend.clear();
        const core::Choice choice = core::choose(p, pass);
        if (!choice.implementation) throw core::Error(core::Status::unsupported, choice.refusals.at(0).reason);
        const size_t bytes = choice.implementation->workspace_bytes(p, pass);
        std::vector<std::byte> poison(bytes, std::byte{0xff});
        Mirror workspace;
        workspace.add(poison);
        go(*choice.implementation,
           core::Workspace{bytes ? workspace.translate(poison.data()) : nullptr, bytes, nullptr});
        cuda::synchronize(nullptr);
    };
    run(core::Pass::forward, [&](const core::Implementation& implementation, core::Workspace workspace) {
        implementation.forward(p, core::make_forward_args(p, raw, forward_args), workspace);
    });
    run(core::Pass::backward, [&](const core::Implementation& implementation, core::Workspace workspace) {
        implementation.backward(p, core::make_backward_args(p, raw, args), workspace);
    });
    for (Buffer& output : results.outputs) mirror.copy_back(output.memory());
    cuda::synchronize(nullptr);
}

std::string Case::check(const std::string& implementation) {
    if (!reference_) reference_ = std::make_unique<Results>(run("reference", true));
    if (!standard_) standard_ = std::make_unique<Results>(run("standard", false));
    const Results got = run(implementation, false);
    std::ostringstream wrong;
    double largest_lse = 0;
    for (int64_t n = 0; n < reference_->outputs[1].size(); ++n) {
        const double lse = std::abs(reference_->outputs[1].get(n));
        if (std::isfinite(lse)) largest_lse = std::max(largest_lse, lse);
    }
    // Of few elements, or of rows with few keys, the yardstick may be exact by luck.
    const bool few_keys = problem().max_seqlen_kv <= 4;
    double largest_gradient = 1;
    for (size_t k = 2; k < reference_->outputs.size(); ++k) {
        const Buffer& ref = reference_->outputs[k];
        for (int64_t n = 0; ref.present() && n < ref.size(); ++n) {
            if (std::isfinite(ref.get(n))) largest_gradient = std::max(largest_gradient, std::abs(ref.get(n)));
        }
    }
    for (size_t k = 0; k < got.outputs.size(); ++k) {
        if (!got.outputs[k].present()) continue;
        const Buffer &x = got.outputs[k], &ref = reference_->outputs[k], &standard = standard_->outputs[k];
        const auto dtype = static_cast<DType>(x.view().dtype);
        if (!x.margins_intact()) wrong << got.names[k] << ": wrote outside its elements\n";
        double worst = 0, worst_std = 0, worst_round = 0, sum = 0, sum_std = 0, largest = 0;
        int64_t where = -1, count = 0;
        for (int64_t n = 0; n < x.size(); ++n) {
            const double r = ref.get(n), value = x.get(n), yardstick = standard.get(n);
            const double nearest = rounded(r, dtype);
            if (!std::isfinite(nearest)) {
                if (std::isnan(r) ? !std::isnan(value) : value != nearest) {
                    wrong << got.names[k] << "[" << n << "]: " << value << " instead of " << r << "\n";
                    break;
                }
                continue;
            }
            if (!std::isfinite(value)) {
                wrong << got.names[k] << "[" << n << "]: " << value << " instead of " << r << "\n";
                break;
            }
            const double error = std::abs(value - r);
            if (error > worst) worst = error, where = n;
            sum += error, ++count;
            if (std::isfinite(yardstick))
                worst_std = std::max(worst_std, std::abs(yardstick - r)), sum_std += std::abs(yardstick - r);
            worst_round = std::max(worst_round, std::abs(nearest - r));
            largest = std::max(largest, std::abs(r));
        }
        // What the yardstick cannot say. In fp64 it is the oracle's own arithmetic. It may be exact by luck (above),
        // while o, and so D = sum of o * do, carries roundings of the problem's dtype. And gradients
        // recompute P = exp(x - lse): a relative error of as many roundings of the accumulator as |lse| is large.
        const bool wide = raw_.q.dtype == TILEWISE_FLOAT64;
        // A gradient may cancel to nothing: the largest of them all says how large its terms are.
        const double scale = std::max({largest, 0.03, got.names[k].front() == 'd' ? largest_gradient : 0.0});
        double floor = wide ? 1e-12 * scale : (32 + 2 * largest_lse) * epsilon(DType::f32) * scale;
        // The gradient of a slope weighs those roundings of every row with distances up to the length.
        if (got.names[k] == "dalibi_slopes") {
            const core::Problem p = problem();
            floor *= std::max(1.0, static_cast<double>(std::max(p.max_seqlen_q, p.max_seqlen_kv)) / 8);
        }
        if (x.size() < 64 || few_keys) floor += 8 * unit_roundoff(static_cast<DType>(raw_.q.dtype)) * scale;
        const double factor = got.names[k] == "o" ? 2 : x.size() < 64 ? 10 : 3;
        double limit = factor * worst_std + 2 * worst_round + floor;
        if (got.names[k] == "lse") {
            limit = 2e-6 * std::max(1.0, largest) + 2 * worst_std;
            if (dtype == DType::f64) limit = 1e-13 * std::max(1.0, largest) + 2 * worst_std;
        }
        if (worst > limit) {
            wrong << got.names[k] << "[" << where << "]: " << x.get(where) << " instead of " << ref.get(where)
                  << ", error " << worst << ", allowed " << limit << " (standard attention: " << worst_std << ")\n";
        }
        if (count >= 1024 && got.names[k] != "lse" &&
            sum > 1.5 * sum_std + static_cast<double>(count) * (worst_round + floor)) {
            wrong << got.names[k] << ": mean error " << sum / static_cast<double>(count) << ", standard attention "
                  << sum_std / static_cast<double>(count) << "\n";
        }
    }
    return wrong.str();
}

// ---------------------------------------------------------------------------------------------------------------------

ForcedIsa::ForcedIsa(const std::string& isa) {
    const char* value = std::getenv("TILEWISE_CPU_ISA");
    before_ = value ? value : "";
    setenv("TILEWISE_CPU_ISA", isa.c_str(), 1);
}

ForcedIsa::~ForcedIsa() {
    if (before_.empty()) {
        unsetenv("TILEWISE_CPU_ISA");
    } else {
        setenv("TILEWISE_CPU_ISA", before_.c_str(), 1);
    }
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const cpu::Isa isa : {cpu::Isa::scalar, cpu::Isa::avx2, cpu::Isa::avx512}) {
        if (cpu::available(isa)) names.emplace_back(cpu::name(isa));
    }
    return names;
}

}  // namespace tilewise::test
