// Texts: expressions and masks. The first byte says which, the second seeds where it is evaluated, the rest is the
// text. Whatever it is, it is refused with a reason or it is printed and read back as the same, evaluates inside its
// bounds, and can be differentiated and written as device code.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "core/mask.hpp"
#include "expr_cases.hpp"
#include "fuzz.hpp"
#include "jit/render_expr.hpp"
#include "jit/render_mask.hpp"

namespace {

using namespace tilewise::core;
using namespace tilewise::core::expr_cases;
using tilewise::fuzz::require;

using Random = std::minstd_rand;
int64_t draw(Random& random, int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

const World& world() {
    static const World w = make_world(1, true);
    return w;
}
const std::vector<ArraySummary>& world_summaries() {
    static const std::vector<ArraySummary> all = summaries(world());
    return all;
}

// The bounds over a rectangle hold for every point of it.
template <class T>
void check_bounds(const Expr& expr, const std::string& text, Random& random) {
    const World& w = world();
    ExprContext c;
    c.b = draw(random, 0, 1), c.h = draw(random, 0, 7), c.head_kv = c.h / 2;
    c.seqlen_q = draw(random, 0, 300), c.seqlen_kv = draw(random, 0, 300), c.q_offset = draw(random, -50, 50);
    c.arrays = w.arrays, c.scalars = w.scalars;
    const std::span<const ArraySummary> bounds_of_arrays =
        draw(random, 0, 3) ? std::span<const ArraySummary>(world_summaries()) : std::span<const ArraySummary>();
    const int64_t i0 = draw(random, 0, 9) == 0 ? INT32_MAX - 5 : draw(random, 0, 210), j0 = draw(random, 0, 210);
    const Range i{i0, i0 + draw(random, 1, 6)}, j{j0, j0 + draw(random, 1, 24)};
    RowEvaluator<T> evaluator(expr, 64);
    const bool mask = expr.role() == Role::mask_mod;
    const bool narrow = !mask && draw(random, 0, 1);
    const Truth truth_there = mask ? truth<T>(expr, c, i, j, bounds_of_arrays) : Truth::unknown;
    const Interval bounds =
        mask ? Interval{}
             : real_interval<T>(expr, c, i, j, bounds_of_arrays, narrow ? Interval{-2, 1, false} : kAnything);
    for (int64_t row = i.begin; row < i.end; ++row) {
        std::array<T, 64> x{}, out{};
        std::array<uint8_t, 64> seen{};
        for (T& value : x) {
            value = static_cast<T>(draw(random, -2000, 1000)) / 1000;
            if (!narrow && draw(random, 0, 5) == 0)
                value = static_cast<T>(kSpecials[static_cast<size_t>(draw(random, 0, 3))]);
        }
        if (mask) evaluator.boolean(c, row, j, seen.data());
        else evaluator.real(c, row, j, x.data(), out.data());
        for (int64_t k = 0; k < j.size(); ++k) {
            const auto n = static_cast<size_t>(k);
            if (mask) {
                require(seen[n] <= 1, text, " at i ", row, ", j ", j.begin + k, ": a truth of ", int{seen[n]});
                require(truth_there == Truth::unknown || (truth_there == Truth::yes) == (seen[n] == 1), text, " at i ",
                        row, ", j ", j.begin + k, ": ", int{seen[n]}, ", against its bounds");
            } else {
                const double v = static_cast<double>(out[n]);
                require(std::isnan(v) ? bounds.maybe_nan : bounds.lo <= v && v <= bounds.hi, text, " at i ", row,
                        ", j ", j.begin + k, ": ", v, " not in ", bounds.lo, " to ", bounds.hi);
            }
        }
    }
}

void check_expression(const std::string& text, Role role, Random& random) {
    const World& w = world();
    const int scalars = static_cast<int>(w.scalars.size());
    const Expr expr = Expr::parse(text, role, w.arrays, scalars);
    const std::string canonical = expr.text();
    require(Expr::parse(canonical, role, w.arrays, scalars) == expr, text, ": another expression than ", canonical);
    check_bounds<float>(expr, text, random);
    check_bounds<double>(expr, text, random);
    if (role == Role::mask_mod) {
        tilewise::jit::render_mask_value(expr, w.arrays, "f");
        tilewise::jit::render_mask_truth(expr, w.arrays, "f");
        return;
    }
    tilewise::jit::render_score_value(expr, w.arrays, "f");
    tilewise::jit::render_score_hides(expr, w.arrays, "f");
    const Adjoint adjoint = differentiate(expr);
    tilewise::jit::render_score_gradient(adjoint, w.arrays, "f");
    const std::vector<int> outputs = adjoint.outputs();
    const RowProgram program(adjoint.expr, outputs);
    require(program.scratch_bytes(64, sizeof(float)) >= 0, text, ": scratch of negative size");
}

// A problem with one array of every shape that masks want: the numbers in the text choose.
struct MaskWorld {
    std::vector<Storage> storage;
    Problem p;

    MaskWorld() {
        p.batch = 2, p.num_heads_q = 4, p.num_heads_kv = 2, p.head_dim_qk = p.head_dim_v = 8, p.dtype = DType::f32;
        p.q_rows = p.max_seqlen_q = 70, p.kv_rows = p.max_seqlen_kv = 150;
        p.sequences.resize(2);
        for (Sequence& s : p.sequences) s.q_rows = s.q_len = 70, s.kv_rows = s.kv_len = 150, s.q_offset = 80;
        p.sequences[1].kv_row0 = 7, p.sequences[1].kv_len = 100, p.sequences[1].q_len = 51,
        p.sequences[1].q_offset = -9;
        p.lengths_known = true;
        p.scalars = {0.5, 3};
        expr_cases::World arrays;
        Random random(3);
        const auto add = [&](DType dtype, std::vector<int64_t> shape, int64_t low, int64_t high) {
            const Array a = make_array(arrays, dtype, std::move(shape), false, false);
            for_each_element(a, [&](const auto&, int64_t offset) {
                if (is_float(dtype)) store_float(a.data, dtype, offset, static_cast<double>(draw(random, low, high)));
                else store_int(a, offset, draw(random, low, high));
            });
        };
        add(DType::i32, {70}, -1, 4);                   // @0 per query
        add(DType::i64, {2, 4, 150}, -1, 4);            // @1 per key
        add(DType::boolean, {2, 150}, 0, 1);            // @2
        add(DType::boolean, {2, 4, 70, 150}, 0, 1);     // @3 dense
        add(DType::i32, {2, 4, 150, 4}, 0, 71);         // @4 intervals
        add(DType::i32, {1, 1, 150, 1}, 0, 71);         // @5
        add(DType::u32, {70, 2}, 0, (1LL << 31) - 2);   // @6 tree
        add(DType::u8, {2, 1, 20, 20}, 0, 1);           // @7 blocks
        add(DType::i64, {2, 2}, INT32_MIN, INT32_MAX);  // @8 per sequence
        add(DType::f32, {9}, -3, 3);                    // @9
        storage = std::move(arrays.storage);
        p.arrays = arrays.arrays;
    }
};

// Text that reads back as itself; classes of rectangles that fit what their points say; lists of tiles that fit both.
void check_mask(const std::string& text, Random& random) {
    static const MaskWorld w;
    Problem p = w.p;
    p.mask = canonical_mask(text, p);
    require(canonical_mask(p.mask, p) == p.mask, text, ": not canonical: ", p.mask);
    const BoundMask mask(p);
    for (int n = 0; n < 4; ++n) {
        const int64_t b = draw(random, 0, 1), h = draw(random, 0, 3);
        const Sequence& s = p.sequences[static_cast<size_t>(b)];
        const int64_t i0 = draw(random, 0, s.q_len - 1), j0 = draw(random, 0, s.kv_len - 1);
        const Range i{i0, std::min(i0 + draw(random, 1, 20), s.q_len)},
            j{j0, std::min(j0 + draw(random, 1, 40), s.kv_len)};
        const TileClass cls = mask.classify(b, h, i, j);
        std::vector<uint8_t> row(static_cast<size_t>(j.size()));
        for (int64_t r = i.begin; r < i.end; ++r) {
            mask.visible(b, h, r, j, row.data());
            for (const uint8_t sees : row) {
                require(sees <= 1 && (cls == TileClass::partial || (cls == TileClass::full) == (sees == 1)), text,
                        " at i ", r, ", j ", j.begin, ": sees ", int{sees}, " in a tile of class ",
                        static_cast<int>(cls));
            }
        }
        std::vector<Tile> tiles;
        const int64_t size = draw(random, 1, 64);
        mask.kv_tiles(b, h, i, size, tiles);
        size_t next = 0;
        for (int64_t at = 0; at < s.kv_len; at += size) {
            const bool listed = next < tiles.size() && tiles[next].begin == at;
            const TileClass want = mask.classify(b, h, i, {at, at + size});
            require((listed ? tiles[next].cls : TileClass::skip) == want, text, ": at i ", i.begin, ", j ", at,
                    " the list has another tile");
            next += listed;
        }
        tiles.clear();
        mask.q_tiles(b, h, j, size, tiles);
    }
    tilewise::jit::render_mask(p);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    Random random(data[1] + 1u);
    const std::string text(reinterpret_cast<const char*>(data) + 2, size - 2);
    try {
        switch (data[0] % 3) {
            case 0: check_expression(text, Role::mask_mod, random); break;
            case 1: check_expression(text, Role::score_mod, random); break;
            default: check_mask(text, random);
        }
    } catch (const Error& error) {
        require(error.status() == Status::invalid_argument, text, ": ", error.what());
        require(std::string(error.what()).find("llowed") != std::string::npos, text,
                ": does not say what is allowed: ", error.what());
    }
    return 0;
}
