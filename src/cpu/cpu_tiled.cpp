// The driver of the tiled CPU kernels: from a problem to memory, waves and work items. Nothing here is hot, and nothing
// here depends on the instruction set.
//
// Shape decides what the bits are, never the number of threads. With rows = q_len * group query rows per (sequence, KV
// head), a `pair`:
//
//   rows <= kDirectRows, not batch_invariant    direct: dot products with K and V as they lie in memory (decode);
//                                               segments of kDirectSegment keys
//   rows <= kTileM                              one block packs each KV tile into thread scratch as it comes
//   otherwise                                   KV tiles are packed once, for all blocks and the whole GQA group
//
// Blocks are kTileM rows at most, of nearly equal height; with few queries per head a block takes several heads of the
// group. A pair with at most kSplitBlocks blocks and more than one segment of keys gives every (block, segment) to
// whoever is free, and the states are merged afterwards, in order: the same merge that a block does on its own, so the
// same bits. Direct, an item does neighbouring pairs of a sequence together where their rows lie side by side
// (direct.inl), and one thread takes several items that are small; bits depend on neither.
//
// Pairs are worked on in waves, so that memory stays bounded: pack (parallel over tiles), work (parallel over blocks,
// or blocks x segments; the last rows first, which under a causal mask are the longest), merge (parallel over blocks).
//
// Workspace, in closed form, all terms linear in lengths:
//   packed   0 if group * max_q <= kTileM, else min(all, max(kWaveBytes, one)) with
//              one = ceil(max_kv / kTileN) * tile,  tile = kTileN * (head_dim_qk + head_dim_v) * sizeof T, about
//              all = one for every pair, or for packed sequences num_heads_kv * (total_kv / kTileN + batch) * tile
//   partial  min(num_pairs * one, max(kWaveBytes, one)) with one = the larger of
//              0 if max_kv <= kSegment, else ceil(max_kv / kSegment) * r * (head_dim_v + 2) * sizeof T, about;
//                r = group * max_q if that is at most kTileM, else kSplitBlocks * kTileM
//              0 if max_kv <= kDirectSegment or batch_invariant, else
//                ceil(max_kv / kDirectSegment) * min(group * max_q, kDirectRows) * (head_dim_v + 2) * sizeof T, about
//   pairs    batch * num_heads_kv * sizeof(Pair)
//   scratch  threads * ForwardScratch
// sizeof T is 4, for float64 problems 8. The formula does not depend on the instruction set.
#include "cpu_tiled.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "backward.hpp"
#include "parallel.hpp"

namespace tilewise::cpu {

using core::DType;
using core::ForwardArgs;
using core::Problem;
using core::Range;
using core::Sequence;
using core::Tile;
using core::TileClass;

const Kernels& kernels(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::avx512) return avx512::kKernels;
    if (isa == Isa::avx2) return avx2::kKernels;
#endif
    (void)isa;
    return scalar::kKernels;
}

namespace {

constexpr int64_t kWaveBytes = int64_t{64} << 20;
constexpr int64_t kSplitBlocks = 8;
// Direct: KV heads within a page are read together while at least kDirectItems items are left for each thread; less
// than kGrainBytes of reading (some 10 us) is not worth a thread of its own.
constexpr int64_t kPageBytes = 4096, kDirectItems = 4, kGrainBytes = int64_t{128} << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------------------------------------------------------------
// Visible tiles

void tiles_of_head(const Call& call, const RowBlock& block, int64_t h, Range keys, std::vector<Tile>& out) {
    const Range rows{block.i0, block.i0 + block.queries};
    const int64_t kv_len = call.sequence(block.b).kv_len, end = std::min(keys.end, kv_len);
    if (keys.begin == 0 && end == kv_len) return call.mask->kv_tiles(block.b, h, rows, kTileN, out);
    for (int64_t begin = keys.begin; begin < end; begin += kSegment) {
        const Range part{begin, std::min(begin + kSegment, end)};
        const TileClass whole = call.mask->classify(block.b, h, rows, part);
        if (whole == TileClass::skip) continue;
        for (int64_t j = part.begin; j < part.end; j += kTileN) {
            const TileClass cls = whole == TileClass::full
                                      ? whole
                                      : call.mask->classify(block.b, h, rows, {j, std::min(j + kTileN, part.end)});
            if (cls != TileClass::skip) out.push_back({j, cls});
        }
    }
}

// Union of two ascending lists; full only where both are.
void unite(const std::vector<Tile>& a, const std::vector<Tile>& b, std::vector<Tile>& out) {
    out.clear();
    size_t i = 0, k = 0;
    while (i < a.size() || k < b.size()) {
        const bool from_a = i < a.size() && (k == b.size() || a[i].begin <= b[k].begin);
        const bool from_b = k < b.size() && (i == a.size() || b[k].begin <= a[i].begin);
        const bool full = from_a && from_b && a[i].cls == TileClass::full && b[k].cls == TileClass::full;
        out.push_back({from_a ? a[i].begin : b[k].begin, full ? TileClass::full : TileClass::partial});
        i += from_a, k += from_b;
    }
}

}  // namespace

std::span<const Tile> visible_tiles(const Call& call, const RowBlock& block, Range keys) {
    thread_local std::vector<Tile> tiles, of_head, before;
    tiles.clear();
    tiles_of_head(call, block, block.h0, keys, tiles);
    if (call.mask->varies_by_head()) {
        for (int64_t h = block.h0 + 1; h < block.h0 + block.heads; ++h) {
            of_head.clear();
            tiles_of_head(call, block, h, keys, of_head);
            before.swap(tiles);
            unite(before, of_head, tiles);
        }
    }
    return tiles;
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Pairs

enum class Way { direct, unpacked, packed };

// One sequence and one KV head, and how it is worked on.
struct Pair {
    int64_t b, head_kv;
    Way way;
    int64_t queries, heads;  // of a block, at most
    int64_t query_blocks, head_blocks;
    int64_t tiles, segments;
    bool split;        // every segment on its own
    int64_t heads_kv;  // direct: whose work the items do, this one's and the next ones', which have 0
    int64_t tiles_before, items_before, merges_before;  // within the wave
    int64_t packed_at, partial_at, partial_stride;      // bytes within the wave's memory

    [[nodiscard]] int64_t blocks() const { return query_blocks * head_blocks; }
    [[nodiscard]] int64_t items() const { return heads_kv == 0 ? 0 : blocks() * (split ? segments : 1); }
    [[nodiscard]] int64_t segment_keys() const { return way == Way::direct ? kDirectSegment : kSegment; }
    [[nodiscard]] int64_t merges() const { return split ? blocks() : 0; }

    // Blocks of a head from its last queries to its first.
    [[nodiscard]] RowBlock block(const Problem& p, int64_t index) const {
        const int64_t group = p.group(), q_len = p.sequences[static_cast<size_t>(b)].q_len;
        const int64_t n = index % query_blocks, first = (query_blocks - 1 - n) * queries,
                      head = index / query_blocks * heads;
        return {b, head_kv * group + head, first, static_cast<int>(std::min(heads, group - head)),
                static_cast<int>(std::min(queries, q_len - first))};
    }
};

template <class T>
struct Sizes {
    int64_t tile, packed, partial, pairs, scratch;  // bytes

    Sizes(const Problem& p, const core::RowProgram* score_mod, int64_t threads) {
        const int64_t num_pairs = p.batch * p.num_heads_kv;
        const auto wave = [&](int64_t all, int64_t one) { return std::min(all, std::max(kWaveBytes, one)); };
        tile = KvTile<T>::bytes(p);
        const int64_t rows = p.group() * p.max_seqlen_q;
        const int64_t tiles = ceil_div(p.max_seqlen_kv, kTileN);
        const int64_t all_tiles = p.num_heads_kv * (p.packed_kv ? p.kv_rows / kTileN + p.batch : p.batch * tiles);
        packed = rows <= kTileM ? 0 : wave(all_tiles * tile, tiles * tile);
        // Up to kTileM rows are one block exactly; more are several, of heights that round up.
        const int64_t segments = ceil_div(p.max_seqlen_kv, kSegment),
                      split_rows = rows <= kTileM ? rows : kSplitBlocks * kTileM;
        int64_t one = segments <= 1 ? 0 : segments * (State<T>::bytes(p, split_rows) + kSplitBlocks * 64);
        // Some sequence may be short enough for the direct way, here or when a plan is run with other lengths.
        const int64_t direct = ceil_div(p.max_seqlen_kv, kDirectSegment);
        if (direct > 1 && !p.batch_invariant)
            one = std::max(one, direct * State<T>::bytes(p, std::min<int64_t>(rows, kDirectRows)));
        partial = wave(num_pairs * one, one);
        pairs = round_up(num_pairs * static_cast<int64_t>(sizeof(Pair)), 64);
        scratch = threads * ForwardScratch<T>::carve(p, score_mod, nullptr, nullptr);
    }
    [[nodiscard]] int64_t total() const { return packed + partial + pairs + scratch; }
};

template <class T>
Pair plan_pair(const Problem& p, int64_t b, int64_t head_kv) {
    const Sequence& s = p.sequences[static_cast<size_t>(b)];
    const int64_t group = p.group(), rows = group * s.q_len;
    Pair pair{};
    pair.b = b, pair.head_kv = head_kv;
    if (rows == 0) return pair;  // no queries, or no heads: nothing below may divide by them
    const int64_t heads = std::clamp<int64_t>(kTileM / s.q_len, 1, group);
    pair.head_blocks = ceil_div(group, heads);
    pair.heads = ceil_div(group, pair.head_blocks);
    pair.head_blocks = ceil_div(group, pair.heads);
    pair.query_blocks = ceil_div(s.q_len, kTileM);
    pair.queries = ceil_div(s.q_len, pair.query_blocks);
    pair.query_blocks = ceil_div(s.q_len, pair.queries);
    pair.tiles = ceil_div(s.kv_len, kTileN);
    pair.way = rows <= kDirectRows && !p.batch_invariant ? Way::direct : rows <= kTileM ? Way::unpacked : Way::packed;
    pair.heads_kv = 1;
    pair.segments = ceil_div(s.kv_len, pair.segment_keys());
    pair.split = pair.segments > 1 && pair.blocks() <= kSplitBlocks;
    pair.partial_stride = State<T>::bytes(p, pair.heads * pair.queries);
    return pair;
}

// How many KV heads from this one on are read together.
int64_t heads_together(const Call& call, const Pair& pair, int64_t threads) {
    const Problem& p = *call.problem;
    if (pair.way != Way::direct || call.mask->varies_by_head()) return 1;
    int64_t heads = std::min<int64_t>(kDirectHeads, p.num_heads_kv - pair.head_kv);
    for (const core::Tensor4* t : {&p.k, &p.v}) {
        const int64_t step = std::abs(t->head_stride);
        if (step >= std::abs(t->row_stride)) return 1;
        heads = std::min(heads, kPageBytes / std::max<int64_t>(step * core::size_of(t->dtype), 1));
    }
    const int64_t units = p.batch * p.num_heads_kv * pair.segments;
    return std::max<int64_t>(std::min(heads, units / (threads * kDirectItems)), 1);
}

// How many pieces of work a thread takes at a time, if all of them read so many bytes.
int64_t grain(int64_t pieces, int64_t bytes) {
    return std::max<int64_t>(pieces * kGrainBytes / std::max<int64_t>(bytes, 1), 1);
}

// The pair that holds item `index` of a running count.
const Pair& pair_of(std::span<const Pair> pairs, int64_t index, int64_t Pair::* before) {
    const auto after = std::upper_bound(pairs.begin(), pairs.end(), index,
                                        [&](int64_t n, const Pair& pair) { return n < pair.*before; });
    return *(after - 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// Query rows that no sequence uses: o = 0, lse = -inf.
void clear_unused_rows(const Problem& p, const ForwardArgs& args) {
    const auto clear_row = [&](int64_t b, int64_t row) {
        for (int64_t h = 0; h < p.num_heads_q; ++h) {
            const int64_t width = core::size_of(args.o.dtype);
            std::byte* const o = static_cast<std::byte*>(args.o.data) + args.o.offset(b, row, h) * width;
            if (args.o.dim_stride == 1 && p.head_dim_v > 0) {  // zero is all bits zero in every dtype
                std::memset(o, 0, static_cast<size_t>(p.head_dim_v * width));
            } else {
                for (int64_t d = 0; d < p.head_dim_v; ++d) core::store_float(o, args.o.dtype, d * args.o.dim_stride, 0);
            }
            if (!args.lse) continue;
            core::store_float(args.lse.data, args.lse.dtype, args.lse.offset(b, h, row), -core::kInfinity);
        }
    };
    for (int64_t b = 0; b < (p.packed_q ? 1 : p.batch); ++b) {
        for (const Range& rows : core::unused_q_rows(p, b)) {
            if (rows.size() * p.num_heads_q * p.head_dim_v > int64_t{1} << 18) {
                parallel_for(rows.size(), [&](int64_t n, int) { clear_row(b, rows.begin + n); });
            } else {
                for (int64_t row = rows.begin; row < rows.end; ++row) clear_row(b, row);
            }
        }
    }
}

struct Memory {
    std::byte *packed, *partial, *scratch;
    int64_t scratch_stride;
};

// parallel_for, `grain` at a time.
template <class F>
void in_grains(int64_t count, int64_t grain, const F& body) {
    parallel_for(ceil_div(count, grain), [&](int64_t part, int slot) {
        for (int64_t n = part * grain; n < std::min((part + 1) * grain, count); ++n) body(n, slot);
    });
}

// Pack, work, merge.
template <class T>
void run_wave(const Call& call, const ForwardArgs& args, const KernelsOf<T>& kernel, std::span<const Pair> wave,
              const Memory& memory) {
    const Problem& p = *call.problem;
    const int64_t tile_bytes = KvTile<T>::bytes(p);
    const Pair& last = wave.back();
    const int64_t tiles = last.tiles_before + (last.way == Way::packed ? last.tiles : 0);
    const int64_t items = last.items_before + last.items(), merges = last.merges_before + last.merges();
    int64_t direct = 0, merged = 0;  // bytes that are read
    for (const Pair& pair : wave) {
        const int64_t keys = p.sequences[static_cast<size_t>(pair.b)].kv_len;
        direct += keys * (p.head_dim_qk + p.head_dim_v) * core::size_of(p.dtype);
        merged += pair.merges() * pair.segments * pair.partial_stride;
    }
    const bool all_direct =
        std::all_of(wave.begin(), wave.end(), [](const Pair& pair) { return pair.way == Way::direct; });
    const int64_t grain_of_items = all_direct ? grain(items, direct) : 1, grain_of_merges = grain(merges, merged);

    parallel_for(tiles, [&](int64_t index, int) {
        const Pair& pair = pair_of(wave, index, &Pair::tiles_before);
        const int64_t tile = index - pair.tiles_before;
        kernel.pack_tile(call, pair.b, pair.head_kv, tile * kTileN,
                         KvTile<T>::at(memory.packed + pair.packed_at + tile * tile_bytes, p));
    });
    in_grains(items, grain_of_items, [&](int64_t index, int slot) {
        const Pair& pair = pair_of(wave, index, &Pair::items_before);
        const int64_t n = index - pair.items_before, parts = pair.split ? pair.segments : 1, part = n % parts;
        const int64_t keys = pair.segment_keys();
        ForwardItem item;
        item.block = pair.block(p, n / parts);
        item.keys = pair.split ? Range{part * keys, (part + 1) * keys} : Range{0, pair.segments * keys};
        if (pair.way == Way::packed) item.packed = memory.packed + pair.packed_at;
        if (pair.split) item.partial = memory.partial + pair.partial_at + n * pair.partial_stride;
        std::byte* const scratch = memory.scratch + slot * memory.scratch_stride;
        if (pair.way != Way::direct) return kernel.forward_block(call, args, item, scratch);
        item.heads_kv = static_cast<int>(pair.heads_kv);
        item.partial_step = pair.segments * pair.partial_stride;
        kernel.direct_block(call, args, item, scratch);
    });
    in_grains(merges, grain_of_merges, [&](int64_t index, int) {
        const Pair& pair = pair_of(wave, index, &Pair::merges_before);
        const int64_t n = index - pair.merges_before;
        kernel.merge_partials(call, args, pair.block(p, n),
                              memory.partial + pair.partial_at + n * pair.segments * pair.partial_stride, pair.segments,
                              pair.partial_stride);
    });
}

template <class T>
void forward_of(const Call& call, const ForwardArgs& args, core::Workspace workspace) {
    const Problem& p = *call.problem;
    const int64_t threads = max_threads();
    const Sizes<T> sizes(p, call.score_mod, threads);
    if (static_cast<int64_t>(workspace.bytes) < sizes.total()) {
        core::refuse("workspace", std::to_string(workspace.bytes) + " bytes",
                     "at least " + std::to_string(sizes.total()) + " bytes",
                     "The number of threads must not grow between planning and running.");
    }
    const KernelsOf<T>& kernel = kernels(current_isa()).template of<T>();
    std::byte* const base = static_cast<std::byte*>(workspace.data);
    Pair* const pairs = reinterpret_cast<Pair*>(base + sizes.packed + sizes.partial);
    const Memory memory{base, base + sizes.packed, base + sizes.packed + sizes.partial + sizes.pairs,
                        sizes.scratch / threads};

    const int64_t num_pairs = p.batch * p.num_heads_kv;
    for (int64_t next = 0; next < num_pairs;) {
        int64_t count = 0, tiles = 0, items = 0, merges = 0, packed = 0, partial = 0;
        int64_t together = 0;  // pairs to come whose work is in the items before them
        for (; next < num_pairs; ++next) {
            Pair pair = plan_pair<T>(p, next / p.num_heads_kv, next % p.num_heads_kv);
            if (pair.items() == 0) continue;
            const int64_t new_tiles = pair.way == Way::packed ? pair.tiles : 0;
            const int64_t new_partial = pair.split ? pair.items() * pair.partial_stride : 0;
            if (packed + new_tiles * sizes.tile > sizes.packed || partial + new_partial > sizes.partial) break;
            if (together == 0) {
                together = heads_together(call, pair, threads);
                if (new_partial > 0) together = std::min(together, (sizes.partial - partial) / new_partial);
                pair.heads_kv = together;
            } else {
                pair.heads_kv = 0;
            }
            --together;
            pair.tiles_before = tiles, pair.items_before = items, pair.merges_before = merges;
            pair.packed_at = packed, pair.partial_at = partial;
            tiles += new_tiles, items += pair.items(), merges += pair.merges();
            packed += new_tiles * sizes.tile, partial += new_partial;
            pairs[count++] = pair;
        }
        if (count > 0) run_wave<T>(call, args, kernel, {pairs, static_cast<size_t>(count)}, memory);
        else if (next < num_pairs)
            throw core::Error(core::Status::internal, "cpu_tiled: a pair does not fit its workspace");
    }
}

// The parsed score_mod of a problem; empty without one.
std::optional<core::RowProgram> score_program(const Problem& p) {
    if (p.score_mod.empty()) return std::nullopt;
    return core::RowProgram(
        core::Expr::parse(p.score_mod, core::Role::score_mod, p.arrays, static_cast<int>(p.scalars.size())));
}

// ---------------------------------------------------------------------------------------------------------------------
// The implementation

std::string supports(const Problem&, core::Pass) { return ""; }

size_t workspace_bytes(const Problem& p, core::Pass pass) {
    if (pass == core::Pass::backward) return backward_workspace_bytes(p);
    const auto program = score_program(p);
    const core::RowProgram* const score_mod = program ? &*program : nullptr;
    const int threads = max_threads();
    return static_cast<size_t>(p.accumulator() == DType::f64 ? Sizes<double>(p, score_mod, threads).total()
                                                             : Sizes<float>(p, score_mod, threads).total());
}

std::string explain(const Problem& p, core::Pass pass) {
    if (pass == core::Pass::backward) return backward_explain(p);
    int64_t ways[3] = {}, split = 0;
    for (int64_t b = 0; b < p.batch && p.num_heads_kv > 0; ++b) {
        const Pair pair = plan_pair<float>(p, b, 0);
        if (pair.items() == 0) continue;
        ways[static_cast<int>(pair.way)] += 1;
        split += pair.split;
    }
    std::string text = std::string("  isa: ") + name(current_isa()) + ", " + std::to_string(max_threads()) +
                       " threads (" + executor_name() + ")\n";
    text += "  tiles: " + std::to_string(kTileM) + " rows x " + std::to_string(kTileN) + " keys, segments of " +
            std::to_string(kSegment) + " keys\n";
    text += "  sequences: " + std::to_string(ways[2]) + " with packed K and V, " + std::to_string(ways[1]) +
            " packing tile by tile, " + std::to_string(ways[0]) + " by direct dot products, " + std::to_string(split) +
            " split over segments\n";
    return text;
}

void forward(const Problem& p, const ForwardArgs& args, core::Workspace workspace) {
    clear_unused_rows(p, args);
    if (p.batch * p.num_heads_kv * p.max_seqlen_q == 0) return;
    const core::BoundMask mask(p);
    const auto program = score_program(p);
    const Call call{&p, &mask, program ? &*program : nullptr};
    if (p.accumulator() == DType::f64) forward_of<double>(call, args, workspace);
    else forward_of<float>(call, args, workspace);
}

}  // namespace

const core::Implementation kCpuTiled{"cpu_tiled", supports, workspace_bytes, explain, forward, run_backward};

}  // namespace tilewise::cpu
