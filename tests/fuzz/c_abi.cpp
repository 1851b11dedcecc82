// The C ABI under any call: the bytes decide a problem, its arguments and what is wrong with them. Every array is as
// large as its shape and strides say and no larger, so that AddressSanitizer sees a read past it. A call either says
// no with a status and a text, or does what the reference does.
#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "core/types.hpp"
#include "fuzz.hpp"
#include "tilewise/tilewise.h"

namespace {

using namespace tilewise::fuzz;
using tilewise::core::DType;
using tilewise::core::load_float;
using tilewise::core::size_of;
using tilewise::core::store_float;

struct Memory {
    std::unique_ptr<std::byte[]> bytes;
    size_t size = 0;
};

double unit(DType dtype) {
    return dtype == DType::none   ? 0
           : dtype == DType::bf16 ? 0x1p-8
           : dtype == DType::f16  ? 0x1p-11
           : dtype == DType::f32  ? 0x1p-22
                                  : 0x1p-45;
}

class Call {
public:
    explicit Call(Bytes& bytes) : bytes_(bytes), random_(bytes.byte()) {}

    void run() {
        build();
        if (bytes_.one_in(3)) damage();
        if (bytes_.one_in(2)) plans();
        else one_call();
        helpers();
    }

private:
    using Shape = std::vector<int64_t>;

    // `values`: what an element of an integer array may be, from 0.
    tilewise_tensor tensor(DType dtype, const Shape& shape, int64_t values = 0, bool output = false) {
        tilewise_tensor t{};
        t.dtype = static_cast<int32_t>(dtype), t.rank = static_cast<int32_t>(shape.size());
        const uint8_t style = bytes_.byte();
        std::vector<int> order(shape.size());
        for (size_t n = 0; n < order.size(); ++n) order[n] = static_cast<int>(n);
        if (style % 4 == 3) std::shuffle(order.begin(), order.end(), random_);
        int64_t step = style % 16 == 5 ? 2 : 1, low = 0, high = 0;
        for (size_t n = order.size(); n-- > 0;) {
            const int axis = order[n];
            const int64_t extent = shape[static_cast<size_t>(axis)];
            t.shape[axis] = extent, t.strides[axis] = step;
            step = step * std::max<int64_t>(extent, 1) + (style % 8 == 6 ? 3 : 0);
            if (style % 32 == 9 && !output) t.strides[axis] = 0;
            if (style % 32 == 10) t.strides[axis] *= -1;
            if (extent <= 1 && style % 64 == 11) t.strides[axis] = bytes_.number();  // never followed
            else (t.strides[axis] < 0 ? low : high) += t.strides[axis] * std::max<int64_t>(extent - 1, 0);
        }
        const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
        const int64_t slots = empty ? 0 : high - low + 1;
        Memory& memory = memory_.emplace_back();
        memory.size = static_cast<size_t>(slots * size_of(dtype));
        memory.bytes = std::make_unique<std::byte[]>(memory.size);
        t.data = memory.bytes.get() + (empty ? 0 : -low * size_of(dtype));
        for (int64_t n = 0; n < slots; ++n) {
            std::byte* const at = memory.bytes.get() + n * size_of(dtype);
            if (tilewise::core::is_float(dtype)) {
                store_float(at, dtype, 0, static_cast<double>(random_() % 512) / 128 - 2);
            } else {
                const auto value =
                    values > 0 ? static_cast<int64_t>(random_() % static_cast<uint64_t>(values)) : bytes_.number();
                std::memcpy(at, &value, static_cast<size_t>(size_of(dtype)));
            }
        }
        return t;
    }

    tilewise_tensor integers(const std::vector<int64_t>& values) {
        const DType dtype = bytes_.one_in(2) ? DType::i64 : DType::i32;
        tilewise_tensor t = tensor(dtype, {static_cast<int64_t>(values.size())}, 1);
        for (size_t n = 0; n < values.size(); ++n) {
            std::memcpy(static_cast<std::byte*>(t.data) + static_cast<int64_t>(n) * t.strides[0] * size_of(dtype),
                        &values[n], static_cast<size_t>(size_of(dtype)));
        }
        return t;
    }

    DType float_dtype() { return static_cast<DType>(1 + bytes_.below(4)); }
    DType integer_dtype() { return static_cast<DType>(5 + bytes_.below(7)); }

    void build() {
        tilewise_problem_init(&p_);
        dtype_ = static_cast<DType>(std::array{2, 1, 3, 4}[static_cast<size_t>(bytes_.below(4))]);
        const uint8_t sizes = bytes_.byte();
        batch_ = sizes % 8 == 7 ? 0 : 1 + sizes % 3;
        heads_kv_ = sizes % 32 == 30 ? 0 : 1 + sizes / 8 % 2, heads_q_ = heads_kv_ * (1 + sizes / 16 % 3);
        const auto extent = [&](int64_t usual) { return bytes_.below(bytes_.one_in(16) ? 41 : usual); };
        q_rows_ = extent(12), kv_rows_ = extent(24), dim_ = extent(10), dim_v_ = bytes_.one_in(3) ? extent(10) : dim_;
        p_.layout = static_cast<int32_t>(bytes_.below(2));
        const uint8_t lengths = bytes_.byte();
        packed_q_ = lengths % 4 == 3, packed_kv_ = packed_q_ && lengths % 8 != 7;
        max_q_ = q_rows_, max_kv_ = kv_rows_;
        const auto cumulative = [&](int64_t& rows, int64_t& longest) {
            std::vector<int64_t> cu{0};
            longest = 0;
            for (int64_t b = 0; b < batch_; ++b) {
                const int64_t n = bytes_.below(20);
                cu.push_back(cu.back() + n), longest = std::max(longest, n);
            }
            rows = cu.back() + bytes_.below(3);
            return integers(cu);
        };
        if (packed_q_) p_.cu_seqlens_q = cumulative(q_rows_, max_q_);
        if (packed_kv_) p_.cu_seqlens_kv = cumulative(kv_rows_, max_kv_);
        const auto per_sequence = [&](int64_t limit) {
            std::vector<int64_t> values;
            for (int64_t b = 0; b < batch_; ++b) values.push_back(bytes_.below(limit + 1));
            return integers(values);
        };
        if (lengths / 8 % 4 == 1) p_.seqused_q = per_sequence(packed_q_ ? 5 : q_rows_);
        if (lengths / 8 % 4 == 2) p_.seqused_kv = per_sequence(packed_kv_ ? 5 : kv_rows_);
        if (lengths / 32 % 4 == 1) p_.leftpad_kv = per_sequence(packed_kv_ ? 5 : kv_rows_);
        const auto qkv = [&](bool packed, int64_t rows, int64_t heads, int64_t dim) {
            return tensor(dtype_, packed                       ? Shape{rows, heads, dim}
                                  : p_.layout == TILEWISE_BHSD ? Shape{batch_, heads, rows, dim}
                                                               : Shape{batch_, rows, heads, dim});
        };
        p_.q = qkv(packed_q_, q_rows_, heads_q_, dim_);
        p_.k = qkv(packed_kv_, kv_rows_, heads_kv_, dim_), p_.v = qkv(packed_kv_, kv_rows_, heads_kv_, dim_v_);

        const uint8_t options = bytes_.byte();
        p_.causal = options & 1;
        if (options & 2) p_.window_left = bytes_.number();
        if (options & 4) p_.window_right = bytes_.number();
        if (options & 8) p_.chunk = bytes_.number();
        if (options & 16) {
            p_.q_offset_mode = static_cast<int32_t>(bytes_.below(4)), p_.q_offset_value = bytes_.number();
            if (p_.q_offset_mode == TILEWISE_OFFSET_ARRAY) {
                std::vector<int64_t> offsets;
                for (int64_t b = 0; b < batch_; ++b) offsets.push_back(bytes_.number());
                p_.q_offset = integers(offsets);
            }
        }
        if (options & 32) {
            p_.has_softmax_scale = 1, p_.softmax_scale = bytes_.real();
            if (!(std::abs(p_.softmax_scale) < 1)) comparable_ = false;  // no accuracy is left to compare
        }
        if (options & 64) p_.softcap = bytes_.real();
        if (!(p_.softcap == 0 || p_.softcap > 0.1)) comparable_ = false;
        if (options & 128) p_.dropout_p = bytes_.real(), p_.seed = bytes_.number(), p_.offset = bytes_.number();
        if (p_.dropout_p > 0.95) comparable_ = false;  // what is left is divided by nearly nothing

        const uint8_t more = bytes_.byte();
        const auto broadcast = [&](int64_t extent) { return bytes_.one_in(3) ? int64_t{1} : extent; };
        if (more & 1)
            p_.bias =
                tensor(float_dtype(), {broadcast(batch_), broadcast(heads_q_), broadcast(max_q_), broadcast(max_kv_)});
        if (more & 2) {
            p_.alibi_slopes =
                tensor(float_dtype(), bytes_.one_in(2) ? Shape{broadcast(batch_), heads_q_} : Shape{heads_q_});
            if (p_.q_offset_mode >= TILEWISE_OFFSET_VALUE) comparable_ = false;  // |t - j| of any size
        }
        if (more & 4) p_.sinks = tensor(float_dtype(), {heads_q_});
        p_.batch_invariant = more >> 3 & 1, p_.deterministic = more >> 4 & 1, p_.validate = more >> 5 & 1;
        if (more & 64) texts();
        if (more & 128) p_.max_seqlen_q = bytes_.number(), p_.max_seqlen_kv = bytes_.number();
        p_.arrays = arrays_.data(), p_.num_arrays = static_cast<int32_t>(arrays_.size());
        p_.scalars = scalars_.data(), p_.num_scalars = static_cast<int32_t>(scalars_.size());

        const Shape lse = packed_q_ ? Shape{heads_q_, q_rows_} : Shape{batch_, heads_q_, q_rows_};
        const DType accumulator = dtype_ == DType::f64 ? DType::f64 : DType::f32;
        tilewise_forward_args_init(&forward_);
        const auto out = [&](const tilewise_tensor& like, int64_t last = -1) {
            if (like.dtype == TILEWISE_NONE) return tilewise_tensor{};
            Shape shape(like.shape, like.shape + like.rank);
            if (last >= 0) shape.back() = last;
            return tensor(static_cast<DType>(like.dtype), shape, 0, true);
        };
        forward_.o = out(p_.q, dim_v_), forward_.lse = tensor(accumulator, lse, 0, true);
        tilewise_backward_args_init(&backward_);
        backward_.d_o = out(p_.q, dim_v_), backward_.o = forward_.o, backward_.lse = forward_.lse;
        const uint8_t wanted = bytes_.byte();
        if (wanted & 1) backward_.dlse = tensor(accumulator, lse);
        if (!(wanted & 2)) backward_.dq = out(p_.q);
        if (!(wanted & 4)) backward_.dk = out(p_.k);
        if (!(wanted & 8)) backward_.dv = out(p_.v);
        if (!(wanted & 16)) backward_.dbias = out(p_.bias);
        if (!(wanted & 32)) backward_.dalibi_slopes = out(p_.alibi_slopes);
        if (!(wanted & 64)) backward_.dsinks = out(p_.sinks);
        for (const tilewise_tensor& array : arrays_) {
            const bool has = tilewise::core::is_float(static_cast<DType>(array.dtype));
            darrays_.push_back(has ? out(array) : tilewise_tensor{});
        }
        if (!(wanted & 128)) backward_.darrays = darrays_.data();
    }

    // Arrays of the shapes that masks want, then one of any, and texts over them: grown from the grammar, or any bytes.
    void texts() {
        arrays_.push_back(tensor(integer_dtype(), packed_q_ ? Shape{q_rows_} : Shape{batch_, q_rows_}, 4));
        arrays_.push_back(tensor(integer_dtype(), packed_kv_ ? Shape{kv_rows_} : Shape{batch_, kv_rows_}, 4));
        arrays_.push_back(tensor(integer_dtype(), {max_q_, max_kv_}, 2));
        arrays_.push_back(tensor(float_dtype(), {heads_q_, 40}));
        Shape any;
        for (int64_t rank = bytes_.below(6); rank > 0; --rank) any.push_back(bytes_.below(9));
        arrays_.push_back(tensor(static_cast<DType>(1 + bytes_.below(11)), any));
        scalars_ = {0.5, bytes_.real()};
        switch (bytes_.below(4)) {
            case 0: mask_ = bytes_.text(); break;
            case 1: mask_ = mask(3); break;
            default: break;
        }
        switch (bytes_.below(4)) {
            case 0: score_mod_ = bytes_.text(), comparable_ = false; break;  // 1e300 * x, say
            case 1: score_mod_ = "add(x,gather(@3,h,add(sub(j,i),16)))"; break;
            case 2: score_mod_ = "where(eq(mod(add(i,j),5),0),-inf,mul(x,$0))"; break;
            default: break;
        }
        if (!mask_.empty()) p_.mask = mask_.c_str();
        if (!score_mod_.empty()) p_.score_mod = score_mod_.c_str();
    }
    std::string mask(int depth) {
        const auto n = [&] { return std::to_string(bytes_.number()); };
        switch (bytes_.below(depth > 0 ? 14 : 11)) {
            case 0: return "causal()";
            case 1: return "window(" + n() + "," + n() + ")";
            case 2: return "chunk(" + n() + ")";
            case 3: return "key_padding(@1)";
            case 4: return "documents(@0,@1)";
            case 5: return bytes_.one_in(2) ? "prefix(" + n() + ")" : "prefix(@4)";
            case 6: return bytes_.one_in(2) ? "intervals(@4,causal)" : "intervals(@4,full)";
            case 7: return "row_intervals(@0,@0)";
            case 8: return bytes_.one_in(2) ? "tree(@4," + n() + ")" : "blocks(@4," + n() + "," + n() + ")";
            case 9: return "dense(@2)";
            case 10: return "mod(lt(mod(add(i,gather(@0,j)),3),2))";
            case 11: return "not(" + mask(depth - 1) + ")";
            case 12: return "or(" + mask(depth - 1) + "," + mask(depth - 1) + ")";
            default: return "and(" + mask(depth - 1) + "," + mask(depth - 1) + ")";
        }
    }

    // What all calls write.
    std::vector<tilewise_tensor*> outputs() {
        return {&forward_.o,
                &forward_.lse,
                &backward_.dq,
                &backward_.dk,
                &backward_.dv,
                &backward_.dbias,
                &backward_.dalibi_slopes,
                &backward_.dsinks};
    }

    // One thing that is wrong: never so that more memory is meant than there is, which no library could notice.
    void damage() {
        std::vector<tilewise_tensor*> tensors{&p_.q,
                                              &p_.k,
                                              &p_.v,
                                              &p_.bias,
                                              &p_.alibi_slopes,
                                              &p_.sinks,
                                              &p_.cu_seqlens_q,
                                              &p_.cu_seqlens_kv,
                                              &p_.seqused_q,
                                              &p_.seqused_kv,
                                              &p_.leftpad_kv,
                                              &p_.q_offset,
                                              &backward_.d_o,
                                              &backward_.o,
                                              &backward_.lse,
                                              &backward_.dlse};
        for (tilewise_tensor* const output : outputs()) tensors.push_back(output);
        comparable_ = false;
        tilewise_tensor& t = *tensors[static_cast<size_t>(bytes_.below(static_cast<int64_t>(tensors.size())))];
        switch (bytes_.below(12)) {
            case 0: t.rank = static_cast<int32_t>(bytes_.below(2) ? bytes_.number() : std::max(0, t.rank - 1)); break;
            case 1:
                if (t.rank > 0) t.shape[bytes_.below(t.rank)] -= 1 + bytes_.below(3);
                break;
            case 2: {  // of no more bytes
                const auto other = static_cast<int32_t>(bytes_.number());
                const bool known = other > 0 && other <= TILEWISE_UINT32;
                if (!known ||
                    (t.dtype != 0 && size_of(static_cast<DType>(other)) <= size_of(static_cast<DType>(t.dtype))))
                    t.dtype = other;
                break;
            }
            case 3: t.data = nullptr; break;
            case 4: t = {}; break;
            case 5: p_.struct_size = static_cast<uint32_t>(bytes_.number()); break;
            case 6: p_.abi_version = static_cast<uint32_t>(bytes_.number()); break;
            case 7: forward_.struct_size = backward_.struct_size = static_cast<uint32_t>(bytes_.number()); break;
            case 8: {
                int32_t* const numbers[] = {
                    &p_.layout,      &p_.causal,       &p_.q_offset_mode,     &p_.num_arrays,
                    &p_.num_scalars, &p_.device_index, &p_.has_softmax_scale, &p_.batch_invariant};
                int32_t& number = *numbers[static_cast<size_t>(bytes_.below(std::size(numbers)))];
                const auto value = static_cast<int32_t>(bytes_.number());
                const bool counts = &number == &p_.num_arrays || &number == &p_.num_scalars;
                // Of a list the library can only know that it is too short.
                if (!counts || value <= number) number = value;
                break;
            }
            case 9: p_.arrays = nullptr, p_.scalars = nullptr; break;
            case 10: backend_ = bytes_.text(), p_.backend = backend_.c_str(); break;
            default: (bytes_.below(2) ? p_.page_size : p_.max_seqlen_q) = bytes_.number();
        }
    }

    // Says no with a text, or nothing.
    static bool ok(tilewise_status status, const char* what) {
        const std::string text = tilewise_last_error();
        if (status == TILEWISE_OK) {
            require(text.empty(), what, ": OK, but an error is kept: ", text);
            return true;
        }
        const bool says_why =
            text.find("llowed") != std::string::npos || (status == TILEWISE_UNSUPPORTED && !text.empty());
        const bool fits = status == TILEWISE_INVALID_ARGUMENT || status == TILEWISE_UNSUPPORTED ||
                          status == TILEWISE_VERSION_MISMATCH;
        require(says_why && fits, what, ": status ", status, ": ", text);
        return false;
    }

    void plans() {
        for (const tilewise_pass pass : {TILEWISE_FORWARD, TILEWISE_BACKWARD}) {
            tilewise_plan* plan = nullptr;
            if (!ok(tilewise_plan_create(bytes_.one_in(50) ? nullptr : &p_, pass, &plan), "plan_create")) continue;
            char text[100];
            require(tilewise_plan_explain(plan, text, sizeof text) > 20, "explain: no text");
            size_t bytes = 0;
            ok(tilewise_plan_workspace_size(plan, &bytes), "workspace_size");
            ok(tilewise_plan_workspace_size_for(plan, &p_, &bytes), "workspace_size_for");
            if (bytes < size_t{1} << 26) {
                std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64),
                                                                   &std::free);
                if (pass == TILEWISE_FORWARD) {
                    ok(tilewise_plan_forward(plan, &p_, &forward_, memory.get(), bytes, nullptr), "plan_forward");
                } else {
                    ok(tilewise_plan_backward(plan, &p_, &backward_, memory.get(), bytes, nullptr), "plan_backward");
                }
            }
            tilewise_plan_destroy(plan);
        }
    }

    void one_call() {
        if (bytes_.one_in(50)) ok(tilewise_forward(&p_, nullptr), "forward");
        if (bytes_.one_in(50)) ok(tilewise_backward(nullptr, &backward_), "backward");
        const std::vector<double> got = results();
        if (!got.empty() && comparable_) compare(got);
    }

    void helpers() {
        switch (bytes_.below(6)) {
            case 0: {
                const int64_t b = bytes_.number(), h = bytes_.number(), m = bytes_.number(), n = bytes_.number();
                size_t count = 0;
                uint8_t out[2048];
                ok(tilewise_mask_tiles(&p_, b, h, m, n, out, sizeof out, &count), "mask_tiles");
                break;
            }
            case 1: {
                const int64_t rows[] = {bytes_.below(41), bytes_.number()},
                              heads[] = {bytes_.below(3), bytes_.number()};
                const int64_t num_rows = bytes_.below(3), num_heads = bytes_.below(3);
                const tilewise_tensor out =
                    tensor(DType::f32, {batch_, num_heads, num_rows, packed_kv_ ? max_kv_ : kv_rows_}, 0, true);
                ok(tilewise_attn_probs(&p_, bytes_.one_in(2) ? nullptr : &forward_.lse, rows, num_rows, heads,
                                       num_heads, &out),
                   "attn_probs");
                break;
            }
            case 2: {
                const tilewise_tensor out =
                    tensor(bytes_.one_in(8) ? float_dtype() : DType::u8,
                           {bytes_.below(3), bytes_.below(4), bytes_.below(9), bytes_.below(70)}, 2, true);
                ok(tilewise_dropout_mask(bytes_.number(), bytes_.number(), bytes_.real(), &out), "dropout_mask");
                break;
            }
            case 3: {
                const int64_t parts = bytes_.below(4), rows = bytes_.below(9), dim = bytes_.below(9);
                const DType lse = bytes_.one_in(2) ? DType::f64 : DType::f32;
                const int64_t odd = bytes_.one_in(8) ? 1 : 0;
                const tilewise_tensor o = tensor(dtype_, {parts, rows, dim}), l = tensor(lse, {parts, rows}),
                                      o_out = tensor(dtype_, {rows + odd, dim}, 0, true),
                                      l_out = tensor(lse, {rows}, 0, true);
                ok(tilewise_merge(&o, &l, &o_out, &l_out), "merge");
                break;
            }
            default: break;
        }
    }

    // All outputs as numbers, in the order of their memory.
    std::vector<double> results() {
        std::vector<double> all;
        if (!ok(tilewise_forward(&p_, &forward_), "forward")) return all;
        if (!ok(tilewise_backward(&p_, &backward_), "backward")) return all;
        std::vector<tilewise_tensor*> outputs = this->outputs();
        for (tilewise_tensor& array : darrays_) {
            if (backward_.darrays) outputs.push_back(&array);
        }
        ends_.clear(), units_.clear();
        for (const tilewise_tensor* t : outputs) {
            const std::function<void(int, int64_t)> visit = [&](int axis, int64_t offset) {
                if (axis == t->rank) return all.push_back(load_float(t->data, static_cast<DType>(t->dtype), offset));
                for (int64_t n = 0; n < t->shape[axis]; ++n) visit(axis + 1, offset + n * t->strides[axis]);
            };
            if (t->dtype != TILEWISE_NONE) visit(0, 0);
            ends_.push_back(all.size()), units_.push_back(unit(static_cast<DType>(t->dtype)));
        }
        return all;
    }

    // A wrong mask, length, or index shows as an error of the size of the values; roundings are the harness' business.
    void compare(const std::vector<double>& got) {
        p_.backend = "reference";
        const std::vector<double> want = results();
        require(got.size() == want.size(), "the reference refuses what cpu_tiled takes");
        size_t begin = 0;
        for (size_t output = 0; output < ends_.size(); ++output) {
            double scale = 1;
            for (size_t n = begin; n < ends_[output]; ++n) {
                if (std::isfinite(want[n])) scale = std::max(scale, std::abs(want[n]));
            }
            for (size_t n = begin; n < ends_[output]; ++n) {
                const bool same = std::isnan(want[n])       ? std::isnan(got[n])
                                  : !std::isfinite(want[n]) ? got[n] == want[n]
                                                            : std::abs(got[n] - want[n]) <=
                                                                  256 * std::max(unit(dtype_), units_[output]) * scale;
                require(same, "output ", output, "[", n - begin, "]: ", got[n], " instead of ", want[n]);
            }
            begin = ends_[output];
        }
    }

    Bytes& bytes_;
    std::minstd_rand random_;
    std::deque<Memory> memory_;
    tilewise_problem p_{};
    tilewise_forward_args forward_{};
    tilewise_backward_args backward_{};
    std::vector<tilewise_tensor> arrays_, darrays_;
    std::vector<double> scalars_;
    std::string mask_, score_mod_, backend_;
    std::vector<size_t> ends_;   // of each output among the results
    std::vector<double> units_;  // its roundings
    DType dtype_ = DType::f32;
    int64_t batch_ = 0, heads_q_ = 0, heads_kv_ = 0, q_rows_ = 0, kv_rows_ = 0, max_q_ = 0, max_kv_ = 0, dim_ = 0,
            dim_v_ = 0;
    bool packed_q_ = false, packed_kv_ = false, comparable_ = true;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const tilewise_status one_thread = tilewise_set_num_threads(1);
    (void)one_thread;
    Bytes bytes(data, size);
    Call(bytes).run();
    return 0;
}
