// The driver of the backward pass: from a problem to memory and items. Nothing here is hot, and nothing here depends on
// the instruction set.
//
//   delta      D - dlse of every row                            parallel over blocks of rows
//   keys       dk, dv, sums of dq, of slopes; dbias if direct   parallel over (sequence, KV head, group of key blocks)
//   sinks      sum of p_sink (dlse - D)                         parallel over heads
//   dq         sums of the groups, in order                     parallel over blocks of rows
//   bias       dbias if it is broadcast: scores once more       parallel over parts of dbias
//   arrays     gradients of captured arrays: scores once more   parallel over chunks, then over elements
//
// Groups. dq needs sums over all keys while an item owns some keys only, so every group of key blocks has dq sums of
// its own. With n = batch * num_heads_kv, groups = ceil(kItems / n), so that many cores have work even for one sequence
// and one head, but at most one per key block, and so few that all sums take at most kSumBytes (one group always may).
// Block c belongs to group c mod groups: under a causal mask all groups then have the same share of the triangle.
//
// Workspace, in closed form, all terms linear in lengths; rows = batch * seqlen_q or total_q, t = sizeof T (4; fp64:
// 8):
//   delta      num_heads_q * rows * t
//   dq sums    groups * num_heads_q * rows * padded(head_dim_qk) * t, and a byte per kTileM rows
//   refined    as delta                                                                 with sinks
//   whole      a byte per kTileM rows and head
//   slopes     groups * batch * num_heads_q * 8                                         with alibi_slopes
//   arrays     chunks * elements of captured float arrays * 8, chunks <= kMaxChunks      with score_mod
//   scratch    threads * BackwardScratch
#include "backward.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "parallel.hpp"

namespace tilewise::cpu {

using core::Array;
using core::BackwardArgs;
using core::DType;
using core::Problem;
using core::Range;
using core::Sequence;
using core::Tile;

std::span<const Tile> query_tiles(const Call& call, int64_t b, int64_t h, Range keys, int list) {
    thread_local std::vector<Tile> tiles[kMaxBundle];
    tiles[list].clear();
    call.mask->q_tiles(b, h, keys, kTileM, tiles[list]);
    return tiles[list];
}

int64_t num_key_tiles(const Call& call, const RowBlock& block) {
    thread_local std::vector<Tile> tiles;
    tiles.clear();
    call.mask->kv_tiles(block.b, block.h0, {block.i0, block.i0 + block.queries}, kTileN, tiles);
    return static_cast<int64_t>(tiles.size());
}

namespace {

constexpr int64_t kMinItems = 16, kItems = 32;
constexpr int64_t kSumBytes = int64_t{512} << 20;
constexpr int64_t kMaxChunks = 16;
constexpr int64_t kChunkBytes = int64_t{64} << 20;  // of all chunks, unless one takes more
constexpr int64_t kBundleBytes = int64_t{3} << 19;  // of a bundle's packed keys and sums: well inside a share of L3

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The score_mod of a problem and its derivative.
struct Programs {
    std::optional<core::RowProgram> score_mod, adjoint_program;
    std::optional<core::Adjoint> adjoint;

    explicit Programs(const Problem& p) {
        if (p.score_mod.empty()) return;
        const auto expr =
            core::Expr::parse(p.score_mod, core::Role::score_mod, p.arrays, static_cast<int>(p.scalars.size()));
        score_mod.emplace(expr);
        adjoint.emplace(core::differentiate(expr));
        adjoint_program.emplace(adjoint->expr, adjoint->outputs());
    }
    [[nodiscard]] const core::RowProgram* mod() const { return score_mod ? &*score_mod : nullptr; }
    [[nodiscard]] const core::RowProgram* derivative() const { return adjoint_program ? &*adjoint_program : nullptr; }
};

// Float arrays that a score_mod reads: those that can have a gradient.
int64_t array_elements(const Problem& p) {
    int64_t elements = 0;
    for (const Array& array : p.arrays) elements += core::is_float(array.dtype) ? array.size() : 0;
    return p.score_mod.empty() ? 0 : elements;
}

template <class T>
struct Layout {
    int64_t groups, rows, blocks, chunks;
    int bundle;
    int64_t delta, dq, touched, refined, whole, slopes, arrays, scratch;  // bytes

    Layout(const Problem& p, const Programs& programs, int64_t threads) {
        constexpr int64_t t = sizeof(T);
        rows = p.packed_q ? p.q_rows : p.batch * p.q_rows;
        blocks = rows / kTileM + p.batch + 1;
        const int64_t sums = round_up(p.num_heads_q * rows * padded<T>(p.head_dim_qk) * t, 64);
        const int64_t pairs = std::max<int64_t>(p.batch * p.num_heads_kv, 1);
        const int64_t key_blocks = ceil_div(p.max_seqlen_kv, kTileN);
        groups = std::max(std::min(ceil_div(kMinItems, pairs), key_blocks),
                          std::min(ceil_div(kItems, pairs), key_blocks / kMaxBundle));
        groups = std::max<int64_t>(std::min(groups, kSumBytes / std::max<int64_t>(sums, 1)), 1);
        const int64_t key_block = kTileN * (3 * padded<T>(p.head_dim_qk) + 2 * padded<T>(p.head_dim_v)) * t;
        bundle = static_cast<int>(std::clamp<int64_t>(kBundleBytes / std::max<int64_t>(key_block, 1), 1, kMaxBundle));
        delta = round_up(p.num_heads_q * rows * t, 64);
        dq = groups * sums;
        touched = round_up(groups * p.num_heads_q * blocks, 64);
        refined = p.sinks ? delta : 0;
        whole = round_up(p.num_heads_q * blocks, 64);
        slopes = p.alibi_slopes ? round_up(groups * p.batch * p.num_heads_q * 8, 64) : 0;
        const int64_t elements = round_up(array_elements(p) * 8, 64);
        chunks = std::clamp<int64_t>(kChunkBytes / std::max<int64_t>(elements, 1), 1, kMaxChunks);
        arrays = chunks * elements;
        scratch =
            threads * BackwardScratch<T>::carve(p, programs.mod(), programs.derivative(), bundle, nullptr, nullptr);
    }
    [[nodiscard]] int64_t total() const { return delta + dq + touched + refined + whole + slopes + arrays + scratch; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Zeros

void clear_rows(const core::Tensor4& t, int64_t b, const std::vector<Range>& ranges, int64_t heads, int64_t dim) {
    if (!t) return;
    for (const Range& rows : ranges) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
            for (int64_t h = 0; h < heads; ++h) {
                const int64_t at = t.offset(b, row, h);
                for (int64_t d = 0; d < dim; ++d) core::store_float(t.data, t.dtype, at + d * t.dim_stride, 0);
            }
        }
    }
}

void clear_unused_rows(const Problem& p, const BackwardArgs& args) {
    for (int64_t b = 0; b < (p.packed_q ? 1 : p.batch); ++b) {
        clear_rows(args.dq, b, core::unused_q_rows(p, b), p.num_heads_q, p.head_dim_qk);
    }
    for (int64_t b = 0; b < (p.packed_kv ? 1 : p.batch); ++b) {
        const auto unused = core::unused_kv_rows(p, b);
        clear_rows(args.dk, b, unused, p.num_heads_kv, p.head_dim_qk);
        clear_rows(args.dv, b, unused, p.num_heads_kv, p.head_dim_v);
    }
}

void clear_bias(const core::Grid4& g) {
    parallel_for(g.shape[0] * g.shape[1], [&](int64_t n, int) {
        for (int64_t i = 0; i < g.shape[2]; ++i) {
            const int64_t at = g.offset(n / g.shape[1], n % g.shape[1], i, 0);
            for (int64_t j = 0; j < g.shape[3]; ++j) core::store_float(g.data, g.dtype, at + j * g.stride[3], 0);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Steps

// Calls body(block, slot) for every block of at most kTileM query rows of every head.
template <class Body>
void for_each_block(const Problem& p, const Body& body) {
    const int64_t per_head = ceil_div(p.max_seqlen_q, kTileM);
    parallel_for(p.batch * p.num_heads_q * per_head, [&](int64_t n, int slot) {
        const int64_t i0 = n % per_head * kTileM, h = n / per_head % p.num_heads_q, b = n / per_head / p.num_heads_q;
        const int64_t left = p.sequences[static_cast<size_t>(b)].q_len - i0;
        if (left > 0) body(RowBlock{b, h, i0, 1, static_cast<int>(std::min<int64_t>(left, kTileM))}, slot);
    });
}

template <class T>
void sink_gradients(const BackwardCall& w) {
    const Problem& p = *w.problem;
    const Array& out = w.args->dsinks;
    parallel_for(p.num_heads_q, [&](int64_t h, int) {
        const double sink = p.sink(h);
        double sum = 0;
        for (int64_t b = 0; b < p.batch && sink != -core::kInfinity; ++b) {
            const Sequence& s = w.sequence(b);
            const T* const delta = w.refined_of<T>(b, h, 0);
            for (int64_t i = 0; i < s.q_len; ++i) {
                const T lse = static_cast<const T*>(w.args->lse.data)[w.args->lse.offset(b, h, s.q_row0 + i)];
                // Of an empty row lse is the sink, rounded: p_sink is 1.
                const double p_sink = lse == static_cast<T>(sink) ? 1 : std::exp(sink - static_cast<double>(lse));
                sum -= p_sink * static_cast<double>(delta[i]);
            }
        }
        core::store_float(out.data, out.dtype, h * out.stride[0], sum);
    });
}

void slope_gradients(const BackwardCall& w) {
    const Problem& p = *w.problem;
    const Array& out = w.args->dalibi_slopes;
    const int64_t rows =
        out.rank == 2 ? out.shape[0] : 1;  // batch, or 1 for slopes shared by all, or 0 of an empty batch
    const bool per_batch = rows > 1;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t h = 0; h < p.num_heads_q; ++h) {
            double sum = 0;
            for (int64_t b = per_batch ? row : 0; b < (per_batch ? row + 1 : p.batch); ++b) {
                for (int64_t group = 0; group < w.groups; ++group)
                    sum += w.slopes[(group * p.batch + b) * p.num_heads_q + h];
            }
            const int64_t at = out.rank == 2 ? row * out.stride[0] + h * out.stride[1] : h * out.stride[0];
            core::store_float(out.data, out.dtype, at, sum);
        }
    }
}

template <class T>
void bias_gradient(const BackwardCall& w, const BackwardKernelsOf<T>& kernel, std::byte* scratch,
                   int64_t scratch_stride) {
    const Problem& p = *w.problem;
    const auto& shape = w.args->dbias.shape;
    const int64_t i_parts = ceil_div(shape[2], kBiasRows), j_parts = ceil_div(shape[3], kTileN);
    parallel_for(shape[0] * shape[1] * i_parts * j_parts, [&](int64_t n, int slot) {
        const int64_t j = n % j_parts * kTileN, i = n / j_parts % i_parts * kBiasRows;
        const int64_t h = n / j_parts / i_parts % shape[1], b = n / j_parts / i_parts / shape[1];
        BiasItem item;
        item.b = shape[0] == 1 ? Range{0, p.batch} : Range{b, b + 1};
        item.h = shape[1] == 1 ? Range{0, p.num_heads_q} : Range{h, h + 1};
        item.i = {i, std::min(i + kBiasRows, shape[2])};
        item.j = {j, std::min(j + kTileN, shape[3])};
        kernel.bias_item(w, item, scratch + slot * scratch_stride);
    });
}

template <class T>
void array_gradients(const BackwardCall& w, const BackwardKernelsOf<T>& kernel, double* sums, int64_t chunks,
                     std::byte* scratch, int64_t scratch_stride) {
    const Problem& p = *w.problem;
    const int64_t elements = round_up(array_elements(p) * 8, 64) / 8;  // of a chunk
    std::fill_n(sums, chunks * elements, 0.0);

    // The same places in every chunk, whichever gradients are wanted.
    std::vector<Array> targets(static_cast<size_t>(chunks) * p.arrays.size());
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        double* next = sums + chunk * elements;
        for (size_t n = 0; n < p.arrays.size(); ++n) {
            const Array& array = p.arrays[n];
            if (!core::is_float(array.dtype)) continue;
            Array target = array;
            target.data = next, target.dtype = DType::f64;
            int64_t stride = 1;
            for (int d = array.rank - 1; d >= 0; stride *= array.shape[d--]) target.stride[d] = stride;
            next += array.size();
            if (w.args->darrays[n]) targets[static_cast<size_t>(chunk) * p.arrays.size() + n] = target;
        }
    }
    parallel_for(chunks, [&](int64_t chunk, int slot) {
        const ArrayItem item{chunk, chunks, targets.data() + static_cast<size_t>(chunk) * p.arrays.size()};
        kernel.array_item(w, item, scratch + slot * scratch_stride);
    });
    for (size_t n = 0; n < p.arrays.size(); ++n) {
        const Array& out = w.args->darrays[n];
        if (!out) continue;
        const int64_t first = static_cast<double*>(targets[n].data) - sums;
        parallel_for(ceil_div(out.size(), 4096), [&](int64_t part, int) {
            for (int64_t k = part * 4096; k < std::min(out.size(), (part + 1) * 4096); ++k) {
                double sum = 0;
                for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += sums[chunk * elements + first + k];
                core::store_float(out.data, out.dtype, out.offset(k), sum);
            }
        });
    }
}

// Arrays that only a mask reads, or nothing.
void clear_array(const Array& out) {
    for (int64_t k = 0; k < out.size(); ++k) core::store_float(out.data, out.dtype, out.offset(k), 0);
}

template <class T>
void backward_of(const Problem& p, const BackwardArgs& args, const Programs& programs, core::Workspace workspace) {
    const int64_t threads = max_threads();
    const Layout<T> layout(p, programs, threads);
    if (static_cast<int64_t>(workspace.bytes) < layout.total()) {
        core::refuse("workspace", std::to_string(workspace.bytes) + " bytes",
                     "at least " + std::to_string(layout.total()) + " bytes",
                     "The number of threads must not grow between planning and running.");
    }
    const core::BoundMask mask(p);
    const BackwardKernelsOf<T>& kernel = kernels(current_isa()).backward->template of<T>();
    const bool want_arrays = !p.score_mod.empty() && std::any_of(args.darrays.begin(), args.darrays.end(),
                                                                 [](const Array& a) { return static_cast<bool>(a); });
    BackwardCall w;
    w.problem = &p, w.mask = &mask, w.score_mod = programs.mod();
    w.args = &args;
    w.adjoint = programs.adjoint ? &*programs.adjoint : nullptr;
    w.adjoint_program = programs.derivative();
    w.want_scores = args.dq || args.dk || args.dbias || args.dalibi_slopes || args.dsinks || want_arrays;
    const auto& shape = args.dbias.shape;
    w.direct_bias = args.dbias && shape[0] == p.batch && shape[1] == p.num_heads_q && shape[2] >= p.max_seqlen_q &&
                    shape[3] >= p.max_seqlen_kv;
    w.groups = layout.groups, w.bundle = layout.bundle, w.rows = layout.rows, w.blocks = layout.blocks;

    std::byte* next = static_cast<std::byte*>(workspace.data);
    const auto take = [&](int64_t bytes) {
        std::byte* const piece = next;
        next += bytes;
        return piece;
    };
    w.delta = take(layout.delta);
    w.dq = take(layout.dq);
    w.touched = reinterpret_cast<uint8_t*>(take(layout.touched));
    w.refined = take(layout.refined);
    w.whole = reinterpret_cast<uint8_t*>(take(layout.whole));
    double* const slopes = reinterpret_cast<double*>(take(layout.slopes));
    double* const arrays = reinterpret_cast<double*>(take(layout.arrays));
    std::byte* const scratch = next;
    const int64_t scratch_stride = layout.scratch / threads;
    if (args.dalibi_slopes) w.slopes = slopes, std::fill_n(slopes, w.groups * p.batch * p.num_heads_q, 0.0);
    std::memset(w.touched, 0, static_cast<size_t>(layout.touched));
    if (w.direct_bias) clear_bias(args.dbias);

    for_each_block(
        p, [&](const RowBlock& block, int slot) { kernel.delta_block(w, block, scratch + slot * scratch_stride); });
    if (args.dq || args.dk || args.dv || args.dalibi_slopes || args.dsinks || w.direct_bias) {
        parallel_for(p.batch * p.num_heads_kv * w.groups, [&](int64_t n, int slot) {
            const KeyItem item{n / w.groups / p.num_heads_kv, n / w.groups % p.num_heads_kv, n % w.groups};
            kernel.key_item(w, item, scratch + slot * scratch_stride);
        });
    }
    if (args.dq) for_each_block(p, [&](const RowBlock& block, int) { kernel.sum_dq(w, block); });
    if (args.dsinks) sink_gradients<T>(w);
    if (args.dalibi_slopes) slope_gradients(w);

    // The passes that follow sum for one purpose only.
    w.slopes = nullptr;
    if (args.dbias && !w.direct_bias) bias_gradient(w, kernel, scratch, scratch_stride);
    w.direct_bias = false;
    if (want_arrays) {
        array_gradients(w, kernel, arrays, layout.chunks, scratch, scratch_stride);
    } else {
        std::for_each(args.darrays.begin(), args.darrays.end(), clear_array);
    }
}

}  // namespace

size_t backward_workspace_bytes(const Problem& p) {
    const Programs programs(p);
    const int threads = max_threads();
    return static_cast<size_t>(p.accumulator() == DType::f64 ? Layout<double>(p, programs, threads).total()
                                                             : Layout<float>(p, programs, threads).total());
}

std::string backward_explain(const Problem& p) {
    const Layout<float> layout(p, Programs(p), 1);
    return "  isa: " + std::string(name(current_isa())) + ", " + std::to_string(max_threads()) + " threads (" +
           executor_name() + ")\n  tiles: strips of " + std::to_string(kStripM) + " rows x " +
           std::to_string(layout.bundle) + " blocks of " + std::to_string(kTileN) +
           " keys\n  items: " + std::to_string(p.batch * p.num_heads_kv) + " (sequence, KV head) x " +
           std::to_string(layout.groups) + " groups of key blocks, dq summed in order of the groups\n";
}

void run_backward(const Problem& p, const BackwardArgs& args, core::Workspace workspace) {
    clear_unused_rows(p, args);
    const Programs programs(p);
    if (p.accumulator() == DType::f64) backward_of<double>(p, args, programs, workspace);
    else backward_of<float>(p, args, programs, workspace);
}

}  // namespace tilewise::cpu
