#include "reference_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>

namespace tilewise::test::oracle {

using core::DType;

namespace {

std::vector<int> identity_order(size_t rank) {
    std::vector<int> order(rank);
    std::iota(order.begin(), order.end(), 0);
    return order;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

Tensor::Tensor(DType dtype, std::vector<int64_t> shape) : Tensor(dtype, shape, identity_order(shape.size()), 0, 0) {}

Tensor::Tensor(DType dtype, std::vector<int64_t> shape, std::vector<int> order, int64_t gap, int64_t slack) {
    view_.dtype = static_cast<int32_t>(dtype);
    view_.rank = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), view_.shape);
    int64_t stride = 1 + gap;
    for (size_t n = order.size(); n-- > 0;) {
        view_.strides[order[n]] = stride;
        stride *= std::max<int64_t>(shape[static_cast<size_t>(order[n])], 1);
        if (n + 1 == order.size()) stride += slack;
    }
    memory_ = std::make_shared<std::vector<std::byte>>(
        static_cast<size_t>(std::max<int64_t>(stride, 1) * core::size_of(dtype)),
        std::byte{0xff});  // 0xff... is a NaN in every float dtype
    view_.data = memory_->data();
}

int64_t Tensor::size() const {
    int64_t n = 1;
    for (int d = 0; d < view_.rank; ++d) n *= view_.shape[d];
    return n;
}

int64_t Tensor::place(int64_t n) const {
    int64_t offset = 0;
    for (int d = view_.rank - 1; d >= 0; n /= view_.shape[d--]) offset += n % view_.shape[d] * view_.strides[d];
    return offset;
}

double Tensor::at(int64_t n) const {
    return core::is_float(dtype()) ? core::load_float(view_.data, dtype(), place(n))
                                   : static_cast<double>(core::load_int(view_.data, dtype(), place(n)));
}

void Tensor::set(int64_t n, double value) {
    if (core::is_float(dtype())) return core::store_float(view_.data, dtype(), place(n), value);
    const auto integer = static_cast<int64_t>(value);
    const int64_t width = core::size_of(dtype());
    std::memcpy(static_cast<std::byte*>(view_.data) + place(n) * width, &integer,
                static_cast<size_t>(width));  // little endian
}

void Tensor::fill(double value) {
    for (int64_t n = 0; n < size(); ++n) set(n, value);
}

Tensor Tensor::like() const {
    Tensor other = *this;
    if (!memory_) return other;
    other.memory_ = std::make_shared<std::vector<std::byte>>(memory_->size(), std::byte{0xff});
    other.view_.data = other.memory_->data() + (static_cast<std::byte*>(view_.data) - memory_->data());
    return other;
}

Tensor Tensor::copy() const {
    Tensor other = like();
    if (memory_) *other.memory_ = *memory_;
    return other;
}

void fill_normal(Tensor& tensor, std::mt19937_64& random, double scale) {
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t n = 0; n < tensor.size(); ++n) tensor.set(n, normal(random));
}

const tilewise_problem& Case::bind() {
    raw.q = q.view(), raw.k = k.view(), raw.v = v.view();
    raw.bias = bias.view(), raw.alibi_slopes = alibi_slopes.view(), raw.sinks = sinks.view();
    raw.cu_seqlens_q = cu_seqlens_q.view(), raw.cu_seqlens_kv = cu_seqlens_kv.view();
    raw.seqused_q = seqused_q.view(), raw.seqused_kv = seqused_kv.view();
    raw.leftpad_kv = leftpad_kv.view(), raw.q_offset = q_offset.view();
    array_views_.clear();
    for (const Tensor& array : arrays) array_views_.push_back(array.view());
    raw.arrays = array_views_.data();
    raw.num_arrays = static_cast<int32_t>(array_views_.size());
    raw.scalars = scalars.data();
    raw.num_scalars = static_cast<int32_t>(scalars.size());
    raw.mask = mask.c_str();
    raw.score_mod = score_mod.c_str();
    raw.backend = backend.c_str();
    return raw;
}

namespace {

// Workspace that is poisoned and 64-byte aligned.
struct Poisoned {
    explicit Poisoned(size_t bytes) : size(bytes), data(std::aligned_alloc(64, (bytes + 127) / 64 * 64)) {
        std::memset(data, 0xff, (bytes + 127) / 64 * 64);
    }
    ~Poisoned() { std::free(data); }
    Poisoned(const Poisoned&) = delete;
    Poisoned& operator=(const Poisoned&) = delete;
    size_t size;
    void* data;
};

}  // namespace

Outputs make_outputs(Case& c) {
    const core::Problem p = c.problem();
    Outputs out;
    std::vector<int64_t> shape(c.q.view().shape, c.q.view().shape + c.q.view().rank);
    shape.back() = p.head_dim_v;
    out.o = Tensor(p.dtype, shape);
    out.lse = p.packed_q ? Tensor(p.accumulator(), {p.num_heads_q, p.q_rows})
                         : Tensor(p.accumulator(), {p.batch, p.num_heads_q, p.q_rows});
    return out;
}

Outputs run_forward(Case& c, const core::Implementation& implementation) {
    const core::Problem p = c.problem();
    Outputs out = make_outputs(c);
    tilewise_forward_args args;
    tilewise_forward_args_init(&args);
    args.o = out.o.view(), args.lse = out.lse.view();
    const Poisoned workspace(implementation.workspace_bytes(p, core::Pass::forward));
    implementation.forward(p, core::make_forward_args(p, c.raw, args), {workspace.data, workspace.size});
    return out;
}

Gradients make_gradients(Case& c, const Outputs& outputs, uint64_t seed, bool with_dlse) {
    const core::Problem p = c.problem();
    std::mt19937_64 random(seed);
    Gradients g;
    g.d_o = outputs.o.like();
    fill_normal(g.d_o, random);
    if (with_dlse) {
        g.dlse = outputs.lse.like();
        fill_normal(g.dlse, random);
    }
    g.dq = c.q.like(), g.dk = c.k.like(), g.dv = c.v.like();
    g.dbias = c.bias.like(), g.dalibi_slopes = c.alibi_slopes.like(), g.dsinks = c.sinks.like();
    for (const Tensor& array : c.arrays)
        g.darrays.push_back(array && core::is_float(array.dtype()) ? array.like() : Tensor());
    return g;
}

void run_backward(Case& c, const Outputs& outputs, Gradients& g, const core::Implementation& implementation) {
    const core::Problem p = c.problem();
    tilewise_backward_args args;
    tilewise_backward_args_init(&args);
    args.d_o = g.d_o.view(), args.dlse = g.dlse.view();
    args.o = outputs.o.view(), args.lse = outputs.lse.view();
    args.dq = g.dq.view(), args.dk = g.dk.view(), args.dv = g.dv.view();
    args.dbias = g.dbias.view(), args.dalibi_slopes = g.dalibi_slopes.view(), args.dsinks = g.dsinks.view();
    std::vector<tilewise_tensor> darrays;
    for (const Tensor& array : g.darrays) darrays.push_back(array.view());
    args.darrays = darrays.empty() ? nullptr : darrays.data();
    const Poisoned workspace(implementation.workspace_bytes(p, core::Pass::backward));
    implementation.backward(p, core::make_backward_args(p, c.raw, args), {workspace.data, workspace.size});
}

// ---------------------------------------------------------------------------------------------------------------------
// Random cases

namespace {

class Draw {
public:
    Draw(uint64_t seed, const CaseSpace& space) : random_(seed * 0x9E3779B97F4A7C15u + 1), space_(space) {}

    std::unique_ptr<Case> operator()() {
        auto c = std::make_unique<Case>();
        sizes(*c);
        tensors(*c);
        options(*c);
        if (space_.bands) bands(*c);
        if (space_.masks && chance(0.4)) mask(*c);
        if (space_.score_mods && chance(0.4)) score_mod(*c);
        return c;
    }

private:
    int64_t uniform(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
    bool chance(double p) { return std::uniform_real_distribution<double>(0, 1)(random_) < p; }
    DType float_dtype() {
        if (space_.dtype == DType::f64) return DType::f64;  // finite differences perturb every input
        constexpr DType kAll[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
        return kAll[uniform(0, 3)];
    }

    void sizes(Case& c) {
        batch_ = uniform(1, 3);
        heads_kv_ = uniform(1, 3);
        heads_q_ = heads_kv_ * (chance(0.5) ? uniform(2, 4) : 1);
        rows_ = uniform(1, space_.max_seqlen);
        keys_ = chance(0.3) ? rows_ : uniform(1, space_.max_seqlen);
        d_ = uniform(1, space_.max_head_dim);
        dv_ = chance(0.5) ? d_ : uniform(1, space_.max_head_dim);
        packed_q_ = space_.packed && chance(0.4);
        packed_kv_ = packed_q_ && chance(0.8);
        if (packed_q_) c.cu_seqlens_q = prefix_sums(rows_, total_q_);
        if (packed_kv_) c.cu_seqlens_kv = prefix_sums(keys_, total_kv_);
        c.raw.layout = chance(0.5) ? TILEWISE_BSHD : TILEWISE_BHSD;
        layout_ = c.raw.layout;
    }

    // Lengths 0 .. max, the longest exactly max; a few rows that belong to no sequence at both ends.
    Tensor prefix_sums(int64_t& max, int64_t& total) {
        Tensor cu(chance(0.5) ? DType::i32 : DType::i64, {batch_ + 1});
        int64_t position = chance(0.3) ? uniform(1, 3) : 0, longest = 0;
        cu.set(0, static_cast<double>(position));
        for (int64_t b = 0; b < batch_; ++b) {
            const int64_t length = chance(0.15) ? 0 : uniform(1, max);
            longest = std::max(longest, length);
            position += length;
            cu.set(b + 1, static_cast<double>(position));
        }
        max = longest;
        total = position + (chance(0.3) ? uniform(1, 3) : 0);
        return cu;
    }

    Tensor operand(bool packed, int64_t total, int64_t rows, int64_t heads, int64_t dims) {
        std::vector<int64_t> shape = packed                     ? std::vector<int64_t>{total, heads, dims}
                                     : layout_ == TILEWISE_BSHD ? std::vector<int64_t>{batch_, rows, heads, dims}
                                                                : std::vector<int64_t>{batch_, heads, rows, dims};
        auto order = identity_order(shape.size());
        int64_t gap = 0, slack = 0;
        if (space_.strides && chance(0.3)) {
            std::shuffle(order.begin(), order.end(), random_);
            gap = uniform(0, 1), slack = uniform(0, 3);
        }
        Tensor tensor(space_.dtype, shape, order, gap, slack);
        fill_normal(tensor, random_);
        return tensor;
    }

    void tensors(Case& c) {
        c.q = operand(packed_q_, total_q_, rows_, heads_q_, d_);
        c.k = operand(packed_kv_, total_kv_, keys_, heads_kv_, d_);
        c.v = operand(packed_kv_, total_kv_, keys_, heads_kv_, dv_);
        const auto lengths = [&](bool packed, const Tensor& cu, int64_t limit, double whole) {
            Tensor used(DType::i32, {batch_});
            for (int64_t b = 0; b < batch_; ++b) {
                const int64_t extent = packed ? static_cast<int64_t>(cu.at(b + 1) - cu.at(b)) : limit;
                used.set(b, static_cast<double>(chance(whole) ? extent : uniform(0, extent)));
            }
            return used;
        };
        if (chance(0.15)) c.seqused_q = lengths(packed_q_, c.cu_seqlens_q, rows_, 0.3);
        if (chance(0.2)) c.seqused_kv = lengths(packed_kv_, c.cu_seqlens_kv, keys_, 0.3);
        if (chance(0.15)) {
            c.leftpad_kv = lengths(packed_kv_, c.cu_seqlens_kv, keys_, 0.0);
            for (int64_t b = 0; b < batch_; ++b) c.leftpad_kv.set(b, std::floor(c.leftpad_kv.at(b) / 3));
        }
    }

    void options(Case& c) {
        if (chance(0.2)) c.raw.has_softmax_scale = 1, c.raw.softmax_scale = 0.3;
        if (chance(0.3)) c.raw.softcap = 1.5;
        if (chance(0.4)) {
            const auto extent = [&](int64_t n) { return chance(0.4) ? int64_t{1} : n; };
            c.bias = Tensor(float_dtype(), {extent(batch_), extent(heads_q_), extent(rows_), extent(keys_)});
            fill_normal(c.bias, random_);
        }
        if (chance(0.3)) {
            c.alibi_slopes =
                chance(0.5) ? Tensor(float_dtype(), {heads_q_}) : Tensor(float_dtype(), {batch_, heads_q_});
            for (int64_t n = 0; n < c.alibi_slopes.size(); ++n)
                c.alibi_slopes.set(n, 0.02 * static_cast<double>(n + 1));
        }
        if (chance(0.3)) {
            c.sinks = Tensor(float_dtype(), {heads_q_});
            fill_normal(c.sinks, random_);
        }
        if (space_.dropout && chance(0.3))
            c.raw.dropout_p = 0.25, c.raw.seed = 1234567890123, c.raw.offset = uniform(0, 1 << 20);
        if (chance(0.25)) {
            c.raw.q_offset_mode = static_cast<int32_t>(uniform(1, 3));
            c.raw.q_offset_value = uniform(-3, 12);
            if (c.raw.q_offset_mode == TILEWISE_OFFSET_ARRAY) {
                c.q_offset = Tensor(DType::i32, {batch_});
                for (int64_t b = 0; b < batch_; ++b) c.q_offset.set(b, static_cast<double>(uniform(-4, 12)));
            }
        }
    }

    void bands(Case& c) {
        if (chance(0.35)) c.raw.causal = 1;
        if (chance(0.25)) c.raw.window_left = uniform(0, keys_);
        if (chance(0.2)) c.raw.window_right = uniform(0, keys_);
        if (chance(0.15)) c.raw.chunk = uniform(1, 16);
    }

    int add(Case& c, Tensor array) {
        c.arrays.push_back(std::move(array));
        return static_cast<int>(c.arrays.size()) - 1;
    }
    static std::string at(int array) { return "@" + std::to_string(array); }

    void mask(Case& c) {
        switch (uniform(0, 3)) {
            case 0: c.mask = "mod(le(mod(add(i,j),5),2))"; return;
            case 1: c.mask = "mod(or(lt(j,3),ne(mod(i,4),0)))"; return;
            case 2: {
                Tensor array(DType::boolean, {chance(0.5) ? batch_ : 1, chance(0.5) ? heads_q_ : 1, rows_, keys_});
                for (int64_t n = 0; n < array.size(); ++n) array.set(n, chance(0.7));
                c.mask = "dense(" + at(add(c, array)) + ")";
                return;
            }
            default: {
                if (packed_q_ || packed_kv_) {
                    c.mask = "mod(eq(floordiv(i,7),floordiv(j,7)))";
                    return;
                }
                const auto ids = [&](int64_t length) {
                    Tensor array(DType::i32, {batch_, length});
                    for (int64_t n = 0; n < array.size(); ++n)
                        array.set(n, static_cast<double>(n % length / 9 - (chance(0.05) ? 5 : 0)));
                    return array;
                };
                const int q_ids = add(c, ids(rows_)), kv_ids = add(c, ids(keys_));
                c.mask = "documents(" + at(q_ids) + "," + at(kv_ids) + ")";
            }
        }
    }

    void score_mod(Case& c) {
        const auto table = [&](std::vector<int64_t> shape) {
            Tensor array(float_dtype(), std::move(shape));
            fill_normal(array, random_, 0.5);
            return at(add(c, array));
        };
        switch (uniform(0, space_.smooth ? 4 : 6)) {
            case 0: c.score_mod = "add(x,mul(0.05,float(sub(j,i))))"; return;
            case 1: c.score_mod = "add(x,gather(" + table({heads_q_, 9}) + ",h,min(8,max(0,add(sub(i,j),4)))))"; return;
            case 2: c.score_mod = "mul(x,exp(gather(" + table({std::max<int64_t>(keys_, 1)}) + ",j)))"; return;
            case 3:
                c.scalars.push_back(0.75);
                c.score_mod = "mul($" + std::to_string(c.scalars.size() - 1) + ",tanh(add(x,gather(" +
                              table({batch_, std::max<int64_t>(rows_, 1)}) + ",b,i))))";
                return;
            case 4:
                c.score_mod = "where(lt(mod(add(i,j),3),1),mul(0.5,x),add(x,gather(" + table({heads_q_}) + ",h)))";
                return;
            case 5: c.score_mod = "where(eq(mod(add(i,mul(3,j)),4),1),-inf,abs(x))"; return;
            default:
                c.score_mod = "max(x,neg(div(gather(" + table({7}) + ",sub(i,j)),2.0)))";
                return;  // often out of range
        }
    }

    std::mt19937_64 random_;
    CaseSpace space_;
    int32_t layout_ = 0;
    int64_t batch_ = 0, heads_kv_ = 0, heads_q_ = 0, rows_ = 0, keys_ = 0, d_ = 0, dv_ = 0, total_q_ = 0, total_kv_ = 0;
    bool packed_q_ = false, packed_kv_ = false;
};

}  // namespace

std::unique_ptr<Case> random_case(uint64_t seed, const CaseSpace& space) { return Draw(seed, space)(); }

}  // namespace tilewise::test::oracle
