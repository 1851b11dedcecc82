// The mask algebra against its definition, written down literally: every kind and random compositions of kinds over
// random problems (dense and packed, leftpad, negative offsets, empty sequences, every broadcast of every array, odd
// strides).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/mask.hpp"
#include "mask_cases.hpp"

namespace tilewise::core {
namespace {

using namespace mask_cases;

Range random_range(Rng& rng, int64_t length, int64_t longest) {
    const int64_t begin = draw(rng, 0, std::max<int64_t>(length - 1, 0));
    return {begin, begin + draw(rng, 1, longest)};
}

constexpr int64_t kAnySize = 1 << 20;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Everything that is promised about a mask. `tight`: rectangles with edges up to this are classified exactly.
void check(const World& w, const Meaning& meaning, Rng& rng, int64_t tight) {
    const Problem& p = w.p;
    SCOPED_TRACE(p.mask + (p.packed_q ? " packed_q" : "") + (p.packed_kv ? " packed_kv" : ""));
    const BoundMask mask(p);
    EXPECT_EQ(mask.varies_by_head(), meaning.by_head);
    for (int64_t b = 0; b < p.batch; ++b) {
        const Sequence& seq = p.sequences[static_cast<size_t>(b)];
        for (int64_t h = 0; h < p.num_heads_q; ++h) {
            if (h > 0 && chance(rng)) continue;
            const auto band = [&](int64_t i, int64_t j) {
                const int64_t t = i + seq.q_offset;
                return (!p.causal || j <= t) && (p.window_left < 0 || t - p.window_left <= j) &&
                       (p.window_right < 0 || j <= t + p.window_right) &&
                       (p.chunk == 0 || floor_div(j, p.chunk) == floor_div(t, p.chunk));
            };
            Truths truths(
                seq, [&](int64_t i, int64_t j) { return band(i, j) && (!meaning.see || meaning.see(b, h, i, j)); });

            // visible(), in pieces of any size, beyond the end too
            std::vector<uint8_t> row(static_cast<size_t>(seq.kv_len + 40));
            for (int64_t i = 0; i < seq.q_len; ++i) {
                const Range j = random_range(rng, seq.kv_len, seq.kv_len + 30);
                row.resize(static_cast<size_t>(j.size()));
                std::fill(row.begin(), row.end(), uint8_t{7});
                mask.visible(b, h, i, j, row.data());
                for (int64_t n = 0; n < j.size(); ++n) {
                    ASSERT_EQ(row[static_cast<size_t>(n)], truths.sees(i, j.begin + n))
                        << "b" << b << " h" << h << " i" << i << " j" << j.begin + n;
                }
                if (mask.is_band()) {
                    const Range r = mask.row_range(b, i);
                    const int64_t n = truths.count({i, i + 1}, {0, seq.kv_len});
                    ASSERT_EQ(r.size(), n);
                    ASSERT_EQ(truths.count({i, i + 1}, r), n);
                }
            }

            for (int n = 0; n < 60; ++n) {
                const int64_t most = n % 2 ? 128 : 2 * std::max(seq.q_len, seq.kv_len) + 1;
                const Range i = random_range(rng, seq.q_len, most), j = random_range(rng, seq.kv_len, most);
                const TileClass real = truths.classify(i, j), said = mask.classify(b, h, i, j);
                if (said != TileClass::partial || (i.size() <= tight && j.size() <= tight)) {
                    ASSERT_EQ(said, real)
                        << "b" << b << " h" << h << " i" << i.begin << ":" << i.end << " j" << j.begin << ":" << j.end;
                }
            }

            for (int n = 0; n < 6; ++n) {
                const int64_t size = pick(rng, {int64_t{16}, int64_t{64}, int64_t{128}, draw(rng, 1, 150)});
                const bool kv = n % 2 == 0;
                const int64_t along = kv ? seq.kv_len : seq.q_len, across = kv ? seq.q_len : seq.kv_len;
                const Range fixed = random_range(rng, across, 128);
                std::vector<Tile> tiles{{-77, TileClass::full}};  // appended to
                if (kv) {
                    mask.kv_tiles(b, h, fixed, size, tiles);
                } else {
                    mask.q_tiles(b, h, fixed, size, tiles);
                }
                ASSERT_EQ(tiles[0].begin, -77);
                size_t next = 1;
                for (int64_t begin = 0; begin < along; begin += size) {
                    const Range tile{begin, begin + size};
                    const Range i = kv ? fixed : tile, j = kv ? tile : fixed;
                    const TileClass want = mask.classify(b, h, i, j);
                    const bool listed = next < tiles.size() && tiles[next].begin == begin;
                    ASSERT_EQ(listed ? tiles[next].cls : TileClass::skip, want)
                        << (kv ? "kv" : "q") << " tile " << begin << " of " << size << " b" << b << " h" << h
                        << " across " << fixed.begin << ":" << fixed.end;
                    next += listed;
                }
                ASSERT_EQ(next, tiles.size());
            }
        }
    }
}

TEST(mask, bands_are_exact_at_any_size) {
    Rng rng(1);
    for (int n = 0; n < 200; ++n) {
        World w = random_world(rng, 300);
        w.p.causal = chance(rng, 0.3);
        if (chance(rng, 0.4)) w.p.window_left = draw(rng, 0, 100);
        if (chance(rng, 0.4)) w.p.window_right = draw(rng, 0, 100);
        if (chance(rng, 0.4)) w.p.chunk = draw(rng, 1, 90);
        Meaning meaning;
        Masks masks(w, rng);
        if (chance(rng)) {
            const Meaning one = masks.band(), other = masks.band();
            meaning = {"and(" + one.text + "," + other.text + ")",
                       [=](auto... at) { return one.see(at...) && other.see(at...); }};
            w.p.mask = canonical_mask(meaning.text, w.p);
        }
        ASSERT_TRUE(BoundMask(w.p).is_band());
        check(w, meaning, rng, kAnySize);
        if (HasFatalFailure()) return;
    }
}

TEST(mask, every_kind_alone_is_exact_on_tiles) {
    Rng rng(2);
    for (int n = 0; n < 60; ++n) {
        for (int kind = 0; kind < Masks::kTightKinds; ++kind) {
            World w = random_world(rng, 400);
            Masks masks(w, rng);  // meanings refer to it
            const Meaning meaning = masks.tight(kind);
            w.p.mask = canonical_mask(meaning.text, w.p);
            const bool one_number_per_axis = kind == 0 || kind == 1 || kind == 3 || kind == 7;  // exact at any size
            check(w, meaning, rng, one_number_per_axis ? kAnySize : 128);
            if (HasFatalFailure()) return;
        }
    }
}

TEST(mask, compositions_are_sound) {
    Rng rng(3);
    for (int n = 0; n < 300; ++n) {
        World w = random_world(rng, 260);
        if (chance(rng, 0.2)) w.p.causal = true;
        if (chance(rng, 0.2)) w.p.window_left = draw(rng, 0, 100);
        if (chance(rng, 0.1)) w.p.chunk = draw(rng, 1, 90);
        Masks masks(w, rng);
        const Meaning meaning = masks.any(3);
        w.p.mask = canonical_mask(meaning.text, w.p);
        EXPECT_EQ(canonical_mask(w.p.mask, w.p), w.p.mask);
        check(w, meaning, rng, 0);
        if (HasFatalFailure()) return;
    }
}

Problem one_sequence(int64_t q, int64_t kv) {
    Problem p;
    p.batch = p.num_heads_q = p.num_heads_kv = 1;
    p.q_rows = p.max_seqlen_q = q;
    p.kv_rows = p.max_seqlen_kv = kv;
    p.sequences.resize(1);
    p.sequences[0].q_len = p.sequences[0].q_rows = q;
    p.sequences[0].kv_len = p.sequences[0].kv_rows = kv;
    p.sequences[0].q_offset = kv - q;
    return p;
}

Array vector_of(std::vector<int32_t>& values) {
    Array a;
    a.data = values.data(), a.dtype = DType::i32, a.rank = 1;
    a.shape[0] = static_cast<int64_t>(values.size()), a.stride[0] = 1;
    return a;
}

TEST(mask, extreme_positions_do_not_overflow) {
    constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
    for (const int64_t offset : {-kHuge - 1, kHuge, int64_t{1} << 52, -(int64_t{1} << 52), int64_t{0}}) {
        for (const int64_t size : {kHuge, kHuge / 2, int64_t{1} << 53, int64_t{3}}) {
            Problem p = one_sequence(100, 90);
            p.sequences[0].q_offset = offset;
            p.window_left = p.window_right = size;
            p.chunk = size;
            const BoundMask mask(p);
            const bool in_range = std::abs(static_cast<double>(offset)) <= 0x1p52;  // what problems may ask for
            const bool near = offset == 0 || (size >= (int64_t{1} << 53) && offset == int64_t{1} << 52);
            std::vector<Tile> tiles;
            mask.kv_tiles(0, 0, {0, 64}, 32, tiles);
            if (in_range) {
                EXPECT_EQ(tiles.size(), near ? 3u : 0u) << offset << " " << size;
            }
            tiles.clear();
            mask.q_tiles(0, 0, {0, 64}, 32, tiles);
            if (in_range) {
                EXPECT_EQ(tiles.size(), near ? (size == 3 ? 3u : 4u) : 0u) << offset << " " << size;
            }
        }
    }
}

TEST(mask, score_mod_that_hides_a_tile_skips_it) {
    Problem p = one_sequence(256, 256);
    p.score_mod = "where(lt(j,100),-inf,x)";
    const BoundMask mask(p);
    EXPECT_TRUE(mask.is_band());
    EXPECT_FALSE(mask.varies_by_head());
    EXPECT_EQ(mask.classify(0, 0, {0, 64}, {0, 64}), TileClass::skip);
    EXPECT_EQ(mask.classify(0, 0, {0, 64}, {64, 128}), TileClass::full);  // the kernels hide single keys
    std::vector<Tile> tiles;
    mask.kv_tiles(0, 0, {0, 64}, 64, tiles);
    ASSERT_EQ(tiles.size(), 3u);
    EXPECT_EQ(tiles[0].begin, 64);
    EXPECT_EQ(tiles[0].cls, TileClass::full);
    tiles.clear();
    mask.q_tiles(0, 0, {0, 64}, 64, tiles);
    EXPECT_TRUE(tiles.empty());

    // Many keys, few hidden: what is not hidden is not looked at tile by tile.
    Problem large = one_sequence(64, 1 << 20);
    large.score_mod = "where(and(ge(j,1000),lt(j,2000)),-inf,add(x,j))";
    const BoundMask large_mask(large);
    tiles.clear();
    const int64_t before = mask_rectangles_looked_at();
    large_mask.kv_tiles(0, 0, {0, 64}, 64, tiles);
    EXPECT_EQ(tiles.size(), (1u << 14) - 15u);  // keys 1024 to 1983
    EXPECT_LE(mask_rectangles_looked_at() - before, 100);

    p.score_mod = "where(eq(h,0),x,-inf)";
    EXPECT_TRUE(BoundMask(p).varies_by_head());
}

TEST(mask, intervals_that_meet_hide_a_column_together) {
    Rng rng(7);
    for (const int64_t gap : {0, 1}) {
        World w;
        w.p = one_sequence(300, 300);
        std::vector<int64_t> bounds;
        for (int64_t j = 0; j < 300; ++j) bounds.insert(bounds.end(), {0, 150, 150 + gap, 300});
        w.add(rng, DType::i32, {1, 1, 300, 4}, bounds);
        w.p.mask = canonical_mask("intervals(@0,full)", w.p);
        const BoundMask mask(w.p);
        EXPECT_EQ(mask.classify(0, 0, {0, 300}, {0, 300}), gap ? TileClass::partial : TileClass::skip);
        EXPECT_EQ(mask.classify(0, 0, {140, 160}, {7, 90}), gap ? TileClass::partial : TileClass::skip);
        EXPECT_EQ(mask.classify(0, 0, {151, 160}, {7, 90}), TileClass::skip);
    }
}

TEST(mask, tree_nodes_beyond_the_words_are_hidden) {
    Rng rng(8);
    World w;
    w.p = one_sequence(8, 200);
    w.add(rng, DType::u32, {8, 2}, std::vector<int64_t>(16, 0xffffffff));  // @0: bits of 64 nodes
    w.add(rng, DType::i32, {1}, {100});                                    // @1: but there are 100
    w.p.mask = canonical_mask("tree(@0,@1)", w.p);
    const BoundMask mask(w.p);
    EXPECT_EQ(mask.classify(0, 0, {0, 8}, {0, 164}), TileClass::full);
    EXPECT_EQ(mask.classify(0, 0, {0, 8}, {0, 165}), TileClass::partial);
    EXPECT_EQ(mask.classify(0, 0, {0, 8}, {120, 165}), TileClass::partial);
    EXPECT_EQ(mask.classify(0, 0, {0, 8}, {164, 200}), TileClass::skip);
}

// A million tokens in about a thousand documents, as ids and as an expression.
class MillionTokens : public testing::TestWithParam<const char*> {};
TEST_P(MillionTokens, cost_what_is_visible) {
    constexpr int64_t kTokens = 1 << 20, kTile = 128;
    Rng rng(4);
    std::vector<int32_t> ids(kTokens);
    std::vector<int64_t> starts;
    for (int64_t t = 0, id = 0; t < kTokens; ++id) {
        starts.push_back(t);
        for (int64_t end = std::min(kTokens, t + draw(rng, 1, 2000)); t < end; ++t)
            ids[static_cast<size_t>(t)] = static_cast<int32_t>(id);
    }
    starts.push_back(kTokens);
    Problem p = one_sequence(kTokens, kTokens);
    p.arrays.push_back(vector_of(ids));
    p.mask = canonical_mask(GetParam(), p);

    const std::clock_t begin = std::clock();
    const BoundMask mask(p);
    const int64_t before = mask_rectangles_looked_at();
    int64_t visible = 0;
    std::vector<Tile> tiles;
    for (int64_t i = 0; i < kTokens; i += kTile) {
        tiles.clear();
        mask.kv_tiles(0, 0, {i, i + kTile}, kTile, tiles);
        // Documents are runs: the keys of a tile of queries are the documents of its first to its last query.
        const int64_t first = starts[static_cast<size_t>(ids[static_cast<size_t>(i)])];
        const int64_t last = starts[static_cast<size_t>(ids[static_cast<size_t>(i + kTile - 1)]) + 1];
        ASSERT_EQ(static_cast<int64_t>(tiles.size()), (last + kTile - 1) / kTile - first / kTile);
        ASSERT_EQ(tiles.front().begin, first / kTile * kTile);
        visible += static_cast<int64_t>(tiles.size());
    }
    const int64_t kv_order = mask_rectangles_looked_at();
    const double seconds =
        static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;  // of this process, not of its neighbours
    int64_t visible_other_order = 0;
    for (int64_t j = 0; j < kTokens; j += kTile) {
        tiles.clear();
        mask.q_tiles(0, 0, {j, j + kTile}, kTile, tiles);
        visible_other_order += static_cast<int64_t>(tiles.size());
    }
    EXPECT_EQ(visible, visible_other_order);
    // 13 levels of halving down each edge of what is visible, and a little around every visible tile.
    const int64_t bound = 2 * 2 * 14 * (kTokens / kTile) + 2 * visible;
    EXPECT_LE(kv_order - before, bound);
    EXPECT_LE(mask_rectangles_looked_at() - kv_order, bound);
    RecordProperty("microseconds", static_cast<int>(seconds * 1e6));
    EXPECT_LT(seconds, kSanitized ? 20.0 : 1.0) << visible << " visible tiles, " << kv_order - before << " rectangles";
}
INSTANTIATE_TEST_SUITE_P(mask, MillionTokens,
                         testing::Values("documents(@0,@0)", "mod(eq(gather(@0,i),gather(@0,j)))",
                                         "or(documents(@0,@0),not(window(2000000,-1)))"));

TEST(mask, bound_masks_are_shared_by_threads) {
    Problem p = one_sequence(200, 300);
    p.mask = canonical_mask("and(mod(lt(mod(mul(i,j),7),4)),not(mod(eq(mod(add(i,j),5),0))))", p);
    const BoundMask mask(p);
    std::vector<std::thread> threads;
    std::vector<int> wrong(4);
    for (size_t n = 0; n < wrong.size(); ++n) {
        threads.emplace_back([&, n] {
            std::vector<uint8_t> row(300);
            for (int64_t i = 0; i < 200; ++i) {
                mask.visible(0, 0, i, {0, 300}, row.data());
                for (int64_t j = 0; j < 300; ++j)
                    wrong[n] += row[static_cast<size_t>(j)] != (i * j % 7 < 4 && (i + j) % 5 != 0);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST(mask, text_is_canonical) {
    Problem p = one_sequence(8, 8);
    std::vector<int32_t> ids(8);
    p.arrays.assign(2, vector_of(ids));
    const auto canonical = [&](const char* text) { return canonical_mask(text, p); };
    EXPECT_EQ(canonical(" and ( causal( ) , and(window(-1, 3),chunk( 7)))"), "and(causal(),window(-1,3),chunk(7))");
    EXPECT_EQ(canonical("or(or(causal()),not(not(chunk(2))))"), "or(causal(),chunk(2))");
    EXPECT_EQ(canonical("not(and(documents(@0,@1),row_intervals(@1,@0)))"),
              "not(and(documents(@0,@1),row_intervals(@1,@0)))");
    EXPECT_EQ(canonical("mod( lt( i , add(j,1) ) )"), "mod(lt(i,add(j,1)))");
    EXPECT_EQ(canonical("prefix(3)"), "prefix(3)");
}

TEST(mask, refusals_say_what_is_wrong) {
    World w;
    w.p = one_sequence(8, 9);
    w.p.batch = 2, w.p.num_heads_q = 4, w.p.num_heads_kv = 2;
    w.p.sequences.push_back(w.p.sequences[0]);
    Rng rng(5);
    const auto zeros = [](int64_t n) { return std::vector<int64_t>(static_cast<size_t>(n)); };
    w.add(rng, DType::i32, {8}, zeros(8));             // @0
    w.add(rng, DType::f32, {9}, zeros(9));             // @1
    w.add(rng, DType::i32, {2, 3, 9}, zeros(54));      // @2
    w.add(rng, DType::i32, {1, 1, 9, 3}, zeros(27));   // @3
    w.add(rng, DType::boolean, {9, 8}, zeros(72));     // @4
    w.add(rng, DType::u32, {8, 1}, zeros(8));          // @5
    w.add(rng, DType::boolean, {9}, zeros(9));         // @6
    w.add(rng, DType::i32, {1, 1, 9, 1}, zeros(9));    // @7
    w.add(rng, DType::boolean, {1, 1, 1, 1, 1}, {1});  // @8
    struct Refusal {
        const char* text;
        std::vector<const char*> says;
    };
    const std::vector<Refusal> refusals = {
        {"", {"mask", "the end of the text", "causal", "documents"}},
        {"casual()", {"'casual()'", "causal"}},
        {"causal", {"causal()", "'('"}},
        {"causal() chunk(3)", {"'chunk(3)'", "and(...)"}},
        {"window(-2,0)", {"window", "left", "-2", "-1"}},
        {"window(1)", {"window(left, right)", "','"}},
        {"window(99999999999999999999,0)", {"64"}},
        {"chunk(0)", {"chunk", "at least 1"}},
        {"documents(@0,@1)", {"documents", "kv_ids (@1)", "float32 [9]", "int32"}},
        {"documents(@0,@0)", {"documents", "kv_ids (@0)", "int32 [8]", "[seqlen_kv]", "seqlen_kv is 9"}},
        {"documents(@0,@2)", {"documents", "kv_ids (@2)", "int32 [2, 3, 9]", "heads is 1, 2 or 4"}},
        {"documents(@0,@9)", {"@9 with 9 arrays", "@0 to @8"}},
        {"documents(@0,0)", {"documents", "'0)'", "@0"}},
        {"documents(@0,@6)", {"kv_ids", "bool [9]", "integer"}},
        {"key_padding(@0)", {"key_padding", "keep", "seqlen_kv is 9"}},
        {"prefix(-1)", {"prefix", "n", "-1"}},
        {"prefix(@1)", {"prefix", "float32"}},
        {"intervals(@3,causal)", {"intervals", "startend_row_indices", "[1, 1, 9, 3]", "bounds is 1 or 2"}},
        {"intervals(@7,full)", {"intervals", "bounds is 2 or 4"}},
        {"intervals(@7,fully)", {"causal or full"}},
        {"row_intervals(@0,@1)", {"row_intervals", "end (@1)"}},
        {"tree(@5,33)", {"tree", "bits (@5)", "uint32 [8, 1]", "words is at least 2"}},
        {"tree(@0,3)", {"tree", "bits"}},
        {"blocks(@4,0,1)", {"blocks", "bq"}},
        {"blocks(@4,1,1)", {"blocks", "map", "bool [9, 8]", "at least 9"}},
        {"dense(@4)", {"dense", "bool [9, 8]", "seqlen_q is 8"}},
        {"dense(@1)", {"dense", "float32", "bool"}},
        {"dense(@8)", {"dense", "[1, 1, 1, 1, 1]"}},
        {"mod(lt(i,))", {"mod"}},
        {"mod(lt(i,j)", {"the end of the text"}},
        {"and(prefix(2),window(3,0))", {"prefix", "contains causal"}},
        {"and(causal(),or(chunk(2),prefix(2)))", {"prefix", "causal()"}},
    };
    for (const Refusal& refusal : refusals) {
        try {
            canonical_mask(refusal.text, w.p);
            ADD_FAILURE() << "accepted: " << refusal.text;
        } catch (const Error& error) {
            EXPECT_EQ(error.status(), Status::invalid_argument);
            for (const char* part : refusal.says) {
                EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
                    << refusal.text << "\n says: " << error.what() << "\n not: " << part;
            }
        }
    }
    w.p.causal = true;
    EXPECT_THROW(canonical_mask("prefix(2)", w.p), Error);
    w.p.causal = false, w.p.window_right = 4;
    EXPECT_THROW(canonical_mask("prefix(2)", w.p), Error);
    w.p.window_right = -1, w.p.window_left = 4;
    EXPECT_EQ(canonical_mask("prefix(2)", w.p), "prefix(2)");

    // Without data: the text is checked, binding is refused.
    for (Array& a : w.p.arrays) a.data = nullptr;
    w.p.mask = canonical_mask("key_padding(@6)", w.p);
    try {
        const BoundMask mask(w.p);
        ADD_FAILURE() << "bound without data";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("@6"), std::string::npos);
    }
}

TEST(mask, any_bytes_give_a_mask_or_an_error) {
    Rng rng(6);
    Problem p = one_sequence(8, 8);
    std::vector<int32_t> ids(8);
    p.arrays.assign(2, vector_of(ids));
    const std::vector<std::string> seeds = {
        "and(causal(),or(documents(@0,@1),not(window(-1,3))),chunk(7),mod(lt(i,add(j,1))))",
        "or(prefix(3),prefix(@0),intervals(@0,causal),intervals(@1,full),tree(@0,3),tree(@0,@1),blocks(@0,2,3),dense(@"
        "0))",
        "not(row_intervals(@0,@1))",
        std::string(100000, '('),
    };
    std::string nested = "causal()";
    for (int n = 0; n < 500; ++n) nested = "not(" + nested + ")";
    std::string wide = "or(causal()";
    for (int n = 0; n < 500; ++n) wide += ",causal()";
    EXPECT_THROW(canonical_mask(nested, p), Error);
    EXPECT_THROW(canonical_mask(wide + ")", p), Error);
    EXPECT_THROW(canonical_mask(std::string(size_t{1} << 20, ' '), p), Error);
    int accepted = 0;
    for (int n = 0; n < 10000; ++n) {
        std::string text = seeds[static_cast<size_t>(draw(rng, 0, 2))];
        for (int64_t edits = draw(rng, 0, 4); edits > 0 && !text.empty(); --edits) {
            const size_t at = static_cast<size_t>(draw(rng, 0, static_cast<int64_t>(text.size()) - 1));
            const std::string& from = seeds[static_cast<size_t>(draw(rng, 0, 2))];
            const size_t piece = static_cast<size_t>(draw(rng, 0, static_cast<int64_t>(from.size()) - 1));
            switch (draw(rng, 0, 3)) {
                case 0: text[at] = static_cast<char>(draw(rng, 0, 255)); break;
                case 1: text.erase(at, static_cast<size_t>(draw(rng, 1, 12))); break;
                case 2: text.insert(at, from.substr(piece, static_cast<size_t>(draw(rng, 1, 20)))); break;
                default: text.insert(at, 1, pick(rng, {'(', ')', ',', '@', '-', '9', ' ', '\0'}));
            }
        }
        try {
            const std::string canonical = canonical_mask(text, p);
            EXPECT_EQ(canonical_mask(canonical, p), canonical) << text;
            ++accepted;
        } catch (const Error& error) {
            EXPECT_GT(std::string(error.what()).size(), 20u);
        }
    }
    EXPECT_GT(accepted, 5);  // the edits are not so wild that nothing is left to test
}

}  // namespace
}  // namespace tilewise::core
