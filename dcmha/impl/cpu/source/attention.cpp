// Composed attention on a CPU, forward and backward, without torch. Equations: docs/attention.md; design: docs/cpu.md.
//
// A work item is one batch row, or every n-th block of its queries, or a share of the keys if it has only one block. A
// block is a few queries with all heads. Its keys are processed tile by tile: products into X [H][queries][keys],
// pre-composition, softmax of complete rows, post-composition, product with V. The backward pass recomputes X, and P from
// the saved sums of the softmax; it needs a second pass over the tiles after sum_j P dP is known. Nothing of size T x S is
// stored.
#include <cstdlib>
#include <limits>

#include "compose.h"
#include "products.h"

extern "C" {
// Strides are in elements; the last axis is contiguous. Null pointers mean None.
struct Matrix {  // [B, H, tokens, D]; keys and values: [B, H / shared, tokens, D]
    float* data;
    int64_t row, head, token;
};
struct Weight {  // down and up [B, tokens, R, H]; gate [B, tokens, H], with one rank
    float* data;
    int64_t row, token, rank, ranks;
};
struct Composition {
    int64_t exists;
    Weight query[3], key[3];  // down, up, gate
    float* base;              // [G, H/G, H/G] (from, to); as a gradient [slots, G, H/G, H/G]
};
struct Mask {  // [B, H, T, S], bytes or floats; stride 0 along broadcast axes
    void* data;
    int64_t row, head, query;
};
struct Call {
    int64_t B, H, G, shared, T, S, D, threads, parts, slots, shares, is_causal, window;
    double scale;
    Matrix q, k, v, out;
    float* softmax;  // [B, H, T, 2]: maximum score of a row, and 1 / sum of e^(score - maximum); not the log of the
                     // sum, which would be rounded away next to a score of -1e9
    float* sums;     // [shares, B, H, T, 2] if keys are divided into shares; the output is then [shares * B, ...]
    Composition compositions[2];
    Mask visible, bias;
    // Backward pass only. Gradients of the key side: [parts * B, ...]; of the base and the bias: one per slot
    Matrix d_out, dq, dk, dv;
    Composition gradients[2];
    Mask d_bias;
    int64_t d_bias_slot;
};
}

namespace {
constexpr int FORWARD_QUERIES = 4, BACKWARD_QUERIES = 2;  // queries composed together, which share the loads of the key side
constexpr int64_t TILE_KEYS = 64, MOST_QUERIES = 64;
constexpr int64_t COPIED_QUERIES = 32;    // minimum queries for which strided rows are copied once
constexpr int64_t PACKED_QUERIES = 5;     // minimum queries for which keys are packed
constexpr float LOWEST = -std::numeric_limits<float>::max();
constexpr int64_t LARGE_ARENA = 1 << 24;  // floats; larger arenas are freed after a call

struct Arena {  // memory of one thread, reused by later calls
    float* data = nullptr;
    int64_t size = 0, used = 0;

    bool reserve(int64_t floats) {
        if (floats > size) {
            release();
            data = (float*)std::aligned_alloc(64, round_up(4 * floats, 64));
            size = data ? floats : 0;
        }
        return data;
    }
    float* take(int64_t floats) {
        float* taken = data ? data + used : nullptr;
        used += round_up(floats, 16);
        return taken;
    }
    void release() {
        std::free(data);
        data = nullptr, size = 0;
    }
    ~Arena() { release(); }
};
thread_local Arena arena;

struct Range {
    int64_t first, last;
};

struct Sum {  // sum of e^(score - top)
    float top, all;
};

struct Rows {  // matrices of one batch row, or of one block of its queries
    float* data;
    int64_t head, token, shared = 1;  // number of query heads that share a matrix

    float* at(int64_t h, int64_t token_) const { return data + h / shared * head + token_ * token; }
};

class Worker {
   public:
    Worker(const Call& call, bool is_backward)
        : c(call), backward(is_backward), heads{c.H, c.H / c.G}, D(round_up(c.D, W)),
          copied(D != c.D || c.T >= COPIED_QUERIES), is_packed(c.T >= PACKED_QUERIES), queries(block_queries(c.T)) {
        int64_t reach = c.window ? c.window * (c.is_causal ? 1 : 2) + queries + 2 * W : c.S;
        int64_t columns = row_length(std::min(round_up(c.S, W), round_up(reach, W)));
        tile = {queries * columns + W, columns};
        composed_tile = {queries * (TILE_KEYS + W) + W, TILE_KEYS + W};
        if (layout() > arena.size) ready = arena.reserve(arena.used);
        layout();
    }
    ~Worker() {
        if (arena.size > LARGE_ARENA) arena.release();
    }

    bool ready = true;

    static int64_t block_queries(int64_t T) { return std::clamp(round_up(T, FORWARD_QUERIES), W, MOST_QUERIES); }

    void run(int64_t item, int64_t slot_) {
        b = item / c.parts, part = item % c.parts, slot = slot_;
        packed = touched_k = touched_v = 0;
        if (backward) start_gradients();
        int64_t blocks = (c.T + queries - 1) / queries;
        for (int64_t block = part; block < blocks; block += c.parts) {
            start_block(block);
            backward ? backward_block() : forward_block();
        }
        if (backward) finish_gradients();
    }

    // Forward pass of one share of the keys, up to its sums; then its output, from the sums of all shares.
    void start_share(int64_t item) {
        b = item % c.B, share = item / c.B, packed = 0;
        start_block(0);
        int64_t size = round_up((keys.last - keys.first + c.shares - 1) / c.shares, TILE_KEYS);
        keys.first = std::min(keys.first + share * size, keys.last), keys.last = std::min(keys.first + size, keys.last);
        exponentiate_block();
    }
    void finish_share(int64_t item) {
        if (item != share * c.B + b) start_share(item);  // fewer threads than shares
        finish_forward();
    }

   private:
    const Call& c;
    const bool backward;
    const Heads heads;
    const int64_t D;    // row length, a multiple of the vector length
    const bool copied;     // whether rows are copied: contiguous, and padded to whole vectors
    const bool is_packed;  // whether keys are packed for matrix products; otherwise dot products
    const int64_t queries;
    Tile tile, composed_tile;
    // In the arena: packed keys and values; copies; scores, weights and gradients of a block; compose weights
    float *k_panels, *v_panels, *k_copy, *v_copy, *q_copy, *d_out_copy, *out_copy, *dk_copy, *dv_copy;
    float *x, *p, *g, *composed, *row_softmax, *dot, *query_weights[2], *key_weights[2];
    float *d_query, *d_key[2], *d_base[2], *row;
    double* base_sums[2];  // over all blocks so far; in float the small terms of a sum over all pairs would be lost
    vec* scratch;
    Sum* row_sums;
    // Current work item and block
    int64_t b, part, slot, share = 0, first, count;
    Range keys, seen[MOST_QUERIES];
    int64_t packed, touched_k, touched_v;  // number of keys so far

    // Rows with a distance of a multiple of 4096 bytes would share cache sets.
    static int64_t row_length(int64_t n) { return n % 256 ? n : n + W; }

    int64_t layout() {
        arena.used = 0;
        int64_t S = round_up(c.S, PANEL), key_heads = c.H / c.shared;
        int64_t rows = copied ? key_heads * c.S * D : 0, block = copied ? c.H * queries * D : 0;
        k_panels = arena.take(is_packed ? key_heads * S * c.D : 0);
        x = arena.take(c.H * tile.head);
        scratch = (vec*)arena.take(2 * std::max(FORWARD_QUERIES, BACKWARD_QUERIES) * heads.group * W);
        for (int i = 0; i < 2; i++) {
            query_weights[i] = arena.take(queries * c.H * QUERY_SLOTS);
            key_weights[i] = arena.take(S * c.H * KEY_SLOTS);
        }
        out_copy = arena.take(block);
        if (!backward) {
            row_sums = (Sum*)arena.take(2 * c.H * queries);
            v_copy = arena.take(rows);
            return arena.used;
        }
        v_panels = arena.take(is_packed ? key_heads * S * c.D : 0);
        p = arena.take(c.H * tile.head), g = arena.take(c.H * tile.head);
        composed = arena.take(c.H * composed_tile.head);
        row_softmax = arena.take(2 * queries * c.H), dot = arena.take(queries * c.H * W);
        d_query = arena.take((queries * c.H * QUERY_SLOTS + W) * W), row = arena.take(c.H * QUERY_SLOTS + W);
        for (int i = 0; i < 2; i++) {
            d_key[i] = arena.take(S * c.H * KEY_SLOTS);
            d_base[i] = arena.take(c.compositions[i].base ? c.H * heads.group * W : 0);
            base_sums[i] = (double*)arena.take(c.compositions[i].base ? 2 * c.H * heads.group : 0);
        }
        q_copy = arena.take(block), d_out_copy = arena.take(block);
        k_copy = arena.take(rows), dk_copy = arena.take(rows), dv_copy = arena.take(rows);
        return arena.used;
    }

    void start_block(int64_t block) {
        first = block * queries, count = std::min(queries, c.T - first);
        for (int64_t n = 0; n < queries; n++) seen[n] = visible_keys(first + std::min(n, count - 1));
        keys = {round_down(seen[0].first, W), round_up(seen[count - 1].last, W)};
    }

    Range visible_keys(int64_t query) const {
        int64_t position = query + c.S - c.T, from = 0, to = c.is_causal ? position + 1 : c.S;
        if (c.window) {
            from = std::max<int64_t>(0, position - c.window + 1);
            to = std::min(to, position + c.window);
        }
        to = std::clamp<int64_t>(to, 0, c.S);
        return {std::min(from, to), to};
    }

    // ---- Copies and packed forms

    Rows rows_of(const Matrix& m, int64_t row_, int64_t token = 0) const {
        return {m.data + row_ * m.row + token * m.token, m.head, m.token};
    }
    Rows keys_of(const Matrix& m, int64_t row_) const { return {m.data + row_ * m.row, m.head, m.token, c.shared}; }
    Rows key_rows(const Matrix& m, float* copy) const {
        return copied ? Rows{copy, c.S * D, D, c.shared} : keys_of(m, b);
    }
    Rows accumulated(const Matrix& m, float* copy) const {
        return copied ? Rows{copy, c.S * D, D, c.shared} : keys_of(m, part * c.B + b);
    }
    Rows block_rows(const Matrix& m, float* copy) const {
        return copied ? Rows{copy, queries * D, D} : rows_of(m, b, first);
    }

    // Copy tokens to padded rows, and back; no-op without copies.
    void widen(Rows from, Rows to, Range tokens) const {
        copy(from, to, tokens, [](float* to_, const float* from_, int64_t rest) { store(to_, load_first(from_, rest)); });
    }
    void narrow(Rows from, Rows to, Range tokens) const {
        copy(from, to, tokens, [](float* to_, const float* from_, int64_t rest) { store_first(to_, load(from_), rest); });
    }
    template <class Rest>
    INLINE void copy(Rows from, Rows to, Range tokens, Rest&& copy_rest) const {
        const int64_t whole = round_down(c.D, W), rest = c.D - whole;
        for (int64_t s = tokens.first; copied && s < tokens.last; s++)
            for (int64_t h = 0; h < c.H; h += from.shared) {
                const float* source = from.at(h, s);
                float* target = to.at(h, s);
                for (int64_t d = 0; d < whole; d += W) store(target + d, load(source + d));
                if (rest) copy_rest(target + whole, source + whole, rest);
            }
    }
    void clear(Rows rows, Range tokens) const {
        for (int64_t h = 0; h < c.H; h += rows.shared)
            for (int64_t s = tokens.first; s < tokens.last; s++) std::fill(rows.at(h, s), rows.at(h, s) + (copied ? D : c.D), 0.0f);
    }

    float* panel(float* panels, int64_t h, int64_t s) const {
        return panels + h / c.shared * round_up(c.S, PANEL) * c.D + round_down(s, PANEL) * c.D;
    }

    // Pack keys (or values) of all heads, transposed, in panels [D][PANEL], times a factor.
    void pack_panels(const Matrix& m, float* panels, Range some, float factor) const {
        vec square[W];
        Rows from = keys_of(m, b);
        for (int64_t h = 0; h < c.H; h += c.shared)
            for (int64_t s = some.first; s < some.last; s += W)
                for (int64_t d = 0; d < c.D; d += W) {
                    transpose(from.at(h, s) + d, from.token, c.S - s, c.D - d, square);
                    float* to = panel(panels, h, s) + d * PANEL + s % PANEL;
                    for (int64_t i = 0; i < std::min(W, c.D - d); i++) store(to + i * PANEL, square[i] * factor);
                }
    }

    // Pack the weights of the key side: [keys / W][H][slots] vectors.
    void pack_key_weights(const Composition& composition, float* out, Range some) const {
        vec square[W];
        for (int64_t s = some.first; s < some.last; s += W)
            for (int64_t j = 0; j < KEY_SLOTS; j++) {
                const Weight& w = composition.key[RK ? j / RK : 2];
                int64_t r = RK ? j % RK : 0, tokens = r < w.ranks ? c.S - s : 0;
                for (int64_t h = 0; h < c.H; h += W) {
                    transpose(w.data + b * w.row + s * w.token + r * w.rank + h, w.token, tokens, c.H - h, square);
                    float* to = out + (s * c.H + h * W) * KEY_SLOTS + j * W;
                    for (int64_t i = 0; i < std::min(W, c.H - h); i++) store(to + i * KEY_SLOTS * W, square[i]);
                }
            }
    }

    // Pack keys that are not yet packed; blocks are processed in order.
    void pack(Range some) {
        Range missing = {std::max(packed, round_down(some.first, PANEL)), some.last};
        if (missing.first >= missing.last) return;
        packed = missing.last;
        if (is_packed) pack_panels(c.k, k_panels, missing, (float)c.scale);
        if (is_packed && backward) pack_panels(c.v, v_panels, missing, 1.0f);
        for (int i = 0; HAS_KEY && i < 2; i++)
            if (c.compositions[i].exists) pack_key_weights(c.compositions[i], key_weights[i], missing);
        Range real = {missing.first, std::min(missing.last, c.S)};
        backward ? widen(keys_of(c.k, b), key_rows(c.k, k_copy), real) : widen(keys_of(c.v, b), key_rows(c.v, v_copy), real);
    }

    // Pack the weights of the query side: [queries][H][slots], the identity in the gate; zeros for padding queries.
    void pack_query_weights() const {
        for (int i = 0; i < 2; i++) {
            if (!c.compositions[i].exists) continue;
            for (int64_t n = 0; n < queries; n++)
                for (int64_t j = 0; j < QUERY_SLOTS; j++) {
                    const Weight& w = c.compositions[i].query[RQ ? j / RQ : 2];
                    int64_t r = RQ ? j % RQ : 0;
                    float* to = query_weights[i] + n * c.H * QUERY_SLOTS + j;
                    const float* from = w.data + b * w.row + (first + n) * w.token + r * w.rank;
                    bool is_there = n < count && r < w.ranks;
                    float identity = n < count && j == 2 * RQ ? 1.0f : 0.0f;
                    for (int64_t h = 0; h < c.H; h++) to[h * QUERY_SLOTS] = (is_there ? from[h] : 0.0f) + identity;
                }
        }
    }

    // ---- Parts of a block

    Weights weights_at(int i, int64_t n, int64_t s) const {
        return {query_weights[i] + n * c.H * QUERY_SLOTS, key_weights[i] + s * c.H * KEY_SLOTS, c.compositions[i].base};
    }
    Gradients gradients_at(int i, int64_t n, int64_t s) const {
        return {d_query + n * c.H * QUERY_SLOTS * W, d_key[i] + s * c.H * KEY_SLOTS, d_base[i]};
    }

    template <class Body>
    void for_tiles(Body&& body) {
        for (int64_t s = keys.first, end; s < keys.last; s = end) {
            end = std::min(round_down(s, TILE_KEYS) + TILE_KEYS, keys.last);
            body(Range{s, end}, s == keys.first);
        }
    }

    // Products of a block's rows with keys (or values) times a factor: [H][queries][keys of the tile].
    void multiply(Rows from, const Matrix& m, float* panels, float factor, float* out, Range some) const {
        is_packed ? multiply_packed(from, panels, out, some) : multiply_unpacked(from, keys_of(m, b), factor, out, some);
    }
    void multiply_packed(Rows from, float* panels, float* out, Range some) const {
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t s = some.first, end; s < some.last; s = end) {
                end = std::min(round_down(s, PANEL) + PANEL, some.last);
                product(from.at(h, 0), {from.token, 1}, panel(panels, h, s) + s % PANEL, PANEL, 0,
                        out + h * tile.head + s - keys.first, tile.query, count, end - s, c.D, false);
            }
    }

    void multiply_unpacked(Rows from, Rows to, float factor, float* out, Range some) const {
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t s = some.first; s < some.last; s += W)
                for (int64_t n = 0; n < count; n++) {
                    vec dots[W] = {};
                    for (int64_t i = 0; i < std::min(W, c.S - s); i++)
                        for (int64_t d = 0; d < c.D; d += W)
                            dots[i] += load_first(from.at(h, n) + d, c.D - d) * load_first(to.at(h, s + i) + d, c.D - d);
                    store(out + h * tile.head + n * tile.query + s - keys.first, totals((float*)dots) * factor);
                }
    }

    void compose_tile(int i, Range some) const {
        if (!c.compositions[i].exists) return;
        for (int64_t s = some.first; s < some.last; s += W) {
            int64_t n = 0;
            for (; n + FORWARD_QUERIES <= count; n += FORWARD_QUERIES) compose_queries<FORWARD_QUERIES>(i, n, s);
            for (; n < count; n++) compose_queries<1>(i, n, s);
        }
    }
    template <int N>
    INLINE void compose_queries(int i, int64_t n, int64_t s) const {
        const Tile t = tile;
        float* here = x + n * t.query + s - keys.first;
        compose<N>(heads, t, here, weights_at(i, n, s), scratch,
                   [&](int64_t h, int m, vec y) { store(here + h * t.head + m * t.query, y); });
    }

    // Whether any of W scores of a query needs `masked`.
    INLINE bool is_masked(int64_t n, int64_t s) const {
        return s < seen[n].first || s + W > seen[n].last || c.bias.data || c.visible.data;
    }

    // Add the bias to W scores of a query, and mask hidden keys.
    __attribute__((noinline)) vec masked(vec y, int64_t h, int64_t n, int64_t s) const {
        int64_t query = first + std::min(n, count - 1);
        if (c.bias.data)
            y += load_first((const float*)c.bias.data + b * c.bias.row + h * c.bias.head + query * c.bias.query + s, c.S - s);
        const vec hidden = splat(-INFINITY);
        if (c.visible.data) {
            const uint8_t* bytes = (const uint8_t*)c.visible.data;
            bytes += b * c.visible.row + h * c.visible.head + query * c.visible.query + s;
            y = load_bytes(bytes, c.S - s) != 0 ? y : hidden;
        }
        ivec key = count_from(s);
        return (key >= (int32_t)seen[n].first) & (key < (int32_t)seen[n].last) ? y : hidden;
    }

    // Sum of a row, or of a share of it.
    Sum& sum_of(int64_t share_, int64_t h, int64_t n) const {
        return c.shares > 1 ? ((Sum*)c.sums)[((share_ * c.B + b) * c.H + h) * c.T + n] : row_sums[h * queries + n];
    }

    // Mask a row and compute its exponentials; the sum is 0 without visible keys, and NaN if a score is NaN.
    Sum exponentiate(int64_t h, int64_t n) const {
        float* scores = x + h * tile.head + n * tile.query - keys.first;
        vec most = splat(LOWEST), sum = {};
        for (int64_t s = keys.first; s < keys.last; s += W) {
            vec y = load(scores + s);
            if (is_masked(n, s)) store(scores + s, y = masked(y, h, n, s));
            most = y > most ? y : most;
        }
        float top = largest(most);
        for (int64_t s = keys.first; s < keys.last; s += W) {
            vec y = exponential(load(scores + s) - top);
            sum += y;
            store(scores + s, y);
        }
        return {top, total(sum)};
    }

    // Divide a row, or a share of it, by the sum of all shares.
    void normalize(int64_t h, int64_t n) const {
        Sum sum = {LOWEST, 0.0f};
        for (int64_t i = 0; i < c.shares; i++) sum.top = std::max(sum.top, sum_of(i, h, n).top);
        for (int64_t i = 0; i < c.shares; i++) sum.all += sum_of(i, h, n).all * std::exp(sum_of(i, h, n).top - sum.top);
        float* weights = x + h * tile.head + n * tile.query - keys.first;
        float factor = sum.all == 0.0f ? 0.0f : std::exp(sum_of(share, h, n).top - sum.top) / sum.all;
        for (int64_t s = keys.first; s < keys.last; s += W) store(weights + s, load(weights + s) * factor);
        if (share != 0) return;
        float* saved = c.softmax + 2 * ((b * c.H + h) * c.T + first + n);
        saved[0] = sum.all == 0.0f ? INFINITY : sum.top;
        saved[1] = sum.all == 0.0f ? 0.0f : 1.0f / sum.all;
    }

    // ---- A block, forward

    void forward_block() {
        exponentiate_block();
        finish_forward();
    }

    void exponentiate_block() {
        pack_query_weights();
        for_tiles([&](Range some, bool) {
            pack(some);
            multiply(rows_of(c.q, b, first), c.k, k_panels, (float)c.scale, x, some);
            compose_tile(0, some);
        });
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t n = 0; n < count; n++) sum_of(share, h, n) = exponentiate(h, n);
    }

    void finish_forward() {
        const Rows target = rows_of(c.out, share * c.B + b, first), v = key_rows(c.v, v_copy);
        const Rows out = copied ? Rows{out_copy, queries * D, D} : target;
        if (keys.first >= keys.last) clear(out, {0, count});
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t n = 0; n < count; n++) normalize(h, n);
        for_tiles([&](Range some, bool is_first) {
            compose_tile(1, some);
            for (int64_t h = 0; h < c.H; h++)
                product(x + h * tile.head + some.first - keys.first, {tile.query, 1}, v.at(h, some.first), v.token, PANEL,
                        out.at(h, 0), out.token, count, D, std::min(some.last, c.S) - some.first, !is_first);
        });
        narrow(out, target, {0, count});
    }

    // ---- A block, backward

    void backward_block() {
        Rows dq = block_rows(c.dq, out_copy);
        if (keys.first >= keys.last) clear(dq, {0, count});
        pack_query_weights();
        widen(rows_of(c.q, b, first), block_rows(c.q, q_copy), {0, count});
        widen(rows_of(c.d_out, b, first), block_rows(c.d_out, d_out_copy), {0, count});
        std::fill(dot, dot + queries * c.H * W, 0.0f);
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t n = 0; n < queries; n++)
                for (int64_t i = 0; i < 2; i++)
                    row_softmax[2 * (n * c.H + h) + i] = n < count ? c.softmax[2 * ((b * c.H + h) * c.T + first + n) + i]
                                                            : (i ? 0.0f : INFINITY);
        clear_query_gradients();
        for_tiles([&](Range some, bool) { first_sweep(some); });
        put_query_gradients(1);
        for (int64_t i = 0; i < queries * c.H; i++) dot[i] = total(load(dot + i * W));
        clear_query_gradients();
        for_tiles([&](Range some, bool is_first) { second_sweep(some, dq, is_first); });
        put_query_gradients(0);
        narrow(dq, rows_of(c.dq, b, first), {0, count});
    }

    // P, dP and sum_j P dP; gradients of the post-composition and of V.
    void first_sweep(Range some) {
        Rows q = block_rows(c.q, q_copy), d_out = block_rows(c.d_out, d_out_copy), dv = accumulated(c.dv, dv_copy);
        pack(some);
        multiply(q, c.k, k_panels, (float)c.scale, x, some);
        multiply(d_out, c.v, v_panels, 1.0f, g, some);
        clear_missing_queries(some);
        for (int64_t s = some.first; s < some.last; s += W)
            for (int64_t n = 0; n < count; n += BACKWARD_QUERIES) {
                compute_weights(n, s);
                post_gradients(n, s, composed + n * composed_tile.query + s - some.first);
            }
        bool has_post = c.compositions[1].exists;
        const float* from = has_post ? composed : p + some.first - keys.first;
        const Tile t = has_post ? composed_tile : tile;
        add_key_products(from, t, d_out, dv, some, touched_v);
    }

    // P of W keys of a few queries.
    INLINE void compute_weights(int64_t n, int64_t s) const {
        constexpr int N = BACKWARD_QUERIES;
        const Tile t = tile;
        const int64_t here = n * t.query + s - keys.first, H = c.H;
        const float* row_ = row_softmax + 2 * n * H;
        float* to = p + here;
        const bool is_plain = !is_masked(n, s) && !is_masked(n + N - 1, s);
        auto finish = [&](int64_t h, int m, vec y) {
            if (!is_plain) y = masked(y, h, n + m, s);
            const float* of = row_ + 2 * (m * H + h);
            store(to + h * t.head + m * t.query, exponential(y - of[0]) * of[1]);
        };
        if (c.compositions[0].exists) return compose<N>(heads, t, x + here, weights_at(0, n, s), scratch, finish);
        for (int64_t h = 0; h < H; h++)
            for (int m = 0; m < N; m++) finish(h, m, load(x + here + h * t.head + m * t.query));
    }

    INLINE void post_gradients(int64_t n, int64_t s, float* result) const {
        constexpr int N = BACKWARD_QUERIES;
        const Tile t = tile, to = composed_tile;
        const int64_t here = n * t.query + s - keys.first, H = c.H;
        const float* weight = p + here;
        float *gradient = g + here, *sums = dot + n * H * W;
        auto add = [&](int64_t h, int m, vec product) {
            float* sum = sums + (m * H + h) * W;
            store(sum, load(sum) + product);
        };
        auto finish = [&](int64_t h, int m, vec a, vec dx, vec y) {
            store(result + h * to.head + m * to.query, y);
            store(gradient + h * t.head + m * t.query, dx);
            add(h, m, a * dx);
        };
        if (c.compositions[1].exists)
            return compose_backward<N, true>(heads, t, weight, gradient, weights_at(1, n, s), gradients_at(1, n, s), scratch,
                                             finish);
        for (int64_t h = 0; h < H; h++)
            for (int m = 0; m < N; m++)
                add(h, m, load(weight + h * t.head + m * t.query) * load(gradient + h * t.head + m * t.query));
    }

    // dX from P and dP; gradients of the bias, the pre-composition, Q and K.
    void second_sweep(Range some, Rows dq, bool is_first) {
        bool has_pre = c.compositions[0].exists;
        float factor = has_pre ? 1.0f : (float)c.scale;
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t n = 0; n < count; n++) {
                float* gradient = g + h * tile.head + n * tile.query - keys.first;
                const float* weight = p + h * tile.head + n * tile.query - keys.first;
                float sum = dot[n * c.H + h];
                for (int64_t s = some.first; s < some.last; s += W) {
                    vec dy = load(weight + s) * (load(gradient + s) - sum);
                    if (c.d_bias.data) add_bias_gradient(dy, h, first + n, s);
                    store(gradient + s, dy * factor);
                }
            }
        for (int64_t s = some.first; has_pre && s < some.last; s += W)
            for (int64_t n = 0; n < count; n += BACKWARD_QUERIES) pre_gradients(n, s);
        Rows k = key_rows(c.k, k_copy), dk = accumulated(c.dk, dk_copy);
        const float* dx = g + some.first - keys.first;
        for (int64_t h = 0; h < c.H; h++)
            product(dx + h * tile.head, {tile.query, 1}, k.at(h, some.first), k.token, PANEL, dq.at(h, 0), dq.token, count, D,
                    std::min(some.last, c.S) - some.first, !is_first);
        add_key_products(dx, tile, block_rows(c.q, q_copy), dk, some, touched_k);
    }

    INLINE void pre_gradients(int64_t n, int64_t s) const {
        const Tile t = tile;
        const int64_t here = n * t.query + s - keys.first;
        const float scale = (float)c.scale;
        float* gradient = g + here;
        compose_backward<BACKWARD_QUERIES, false>(
            heads, t, x + here, gradient, weights_at(0, n, s), gradients_at(0, n, s), scratch,
            [&](int64_t h, int m, vec, vec dx, vec) { store(gradient + h * t.head + m * t.query, dx * scale); });
    }

    void add_bias_gradient(vec dy, int64_t h, int64_t query, int64_t s) const {
        const Mask& m = c.d_bias;
        float* to = (float*)m.data + slot * c.d_bias_slot + b * m.row + h * m.head + query * m.query + s;
        store_first(to, load_first(to, c.S - s) + dy, c.S - s);
    }

    // Padding queries, which are composed together with the last query, contribute zeros.
    void clear_missing_queries(Range some) const {
        for (int64_t n = count; n < round_up(count, BACKWARD_QUERIES); n++)
            for (int64_t h = 0; h < c.H; h++)
                for (float* of : {x, g}) {
                    float* row_ = of + h * tile.head + n * tile.query - keys.first;
                    std::fill(row_ + some.first, row_ + some.last, 0.0f);
                }
    }

    // Add a tile's part to the gradients of its keys: A [keys of the tile, queries] B [queries, D]. Keys from `touched`
    // on have no gradient yet, except from previous heads that share them.
    void add_key_products(const float* a, Tile t, Rows rows, Rows sums, Range some, int64_t& touched) const {
        int64_t end = std::min(some.last, c.S), split = std::clamp(touched, some.first, end);
        if (touched < some.first) clear(sums, {touched, some.first});
        for (int64_t h = 0; h < c.H; h++)
            for (Range part_ : {Range{some.first, split}, Range{split, end}})
                product(a + h * t.head + part_.first - some.first, {1, t.query}, rows.at(h, 0), rows.token, PANEL,
                        sums.at(h, part_.first), sums.token, part_.last - part_.first, D, count, part_.last == split || h % c.shared);
        touched = std::max(touched, end);
    }

    // ---- Gradients

    void start_gradients() const {
        for (int i = 0; i < 2; i++) {
            std::fill(d_key[i], d_key[i] + round_up(c.S, W) * c.H * KEY_SLOTS, 0.0f);
            if (!c.compositions[i].base) continue;
            std::fill(d_base[i], d_base[i] + c.H * heads.group * W, 0.0f);
            std::fill(base_sums[i], base_sums[i] + c.H * heads.group, 0.0);
        }
    }

    // Add a block's gradient of a base to the total.
    void put_base_gradients(int i) const {
        for (int64_t j = 0; c.compositions[i].base && j < c.H * heads.group; j++) {
            base_sums[i][j] += total(load(d_base[i] + j * W));
            store(d_base[i] + j * W, vec{});
        }
    }

    void finish_gradients() const {
        int64_t to = part * c.B + b;
        Rows dk = accumulated(c.dk, dk_copy), dv = accumulated(c.dv, dv_copy);
        clear(dk, {touched_k, c.S}), clear(dv, {touched_v, c.S});
        narrow(dk, keys_of(c.dk, to), {0, c.S}), narrow(dv, keys_of(c.dv, to), {0, c.S});
        for (int i = 0; i < 2; i++) {
            put_key_gradients(c.gradients[i], d_key[i], to);
            float* base = c.gradients[i].base;
            for (int64_t j = 0; base && j < c.H * heads.group; j++)
                base[to * c.H * heads.group + j] = (float)base_sums[i][j];
        }
    }

    void put_key_gradients(const Composition& gradients, const float* from, int64_t to) const {
        vec square[W];
        for (int64_t s = 0; s < c.S; s += W)
            for (int64_t j = 0; j < KEY_SLOTS; j++) {
                const Weight& w = gradients.key[RK ? j / RK : 2];
                int64_t r = RK ? j % RK : 0;
                for (int64_t h = 0; r < w.ranks && h < c.H; h += W) {
                    transpose(from + (s * c.H + h * W) * KEY_SLOTS + j * W, KEY_SLOTS * W, c.H - h, W, square);
                    for (int64_t i = 0; i < std::min(W, c.S - s); i++)
                        store_first(w.data + to * w.row + (s + i) * w.token + r * w.rank + h, square[i], c.H - h);
                }
            }
    }

    void clear_query_gradients() const { std::fill(d_query, d_query + queries * c.H * QUERY_SLOTS * W, 0.0f); }

    void put_query_gradients(int i) const {
        put_base_gradients(i);
        int64_t slots = c.H * QUERY_SLOTS;
        for (int64_t n = 0; n < count && c.gradients[i].exists; n++) {
            for (int64_t j = 0; j < slots; j += W) store(row + j, totals(d_query + (n * slots + j) * W));
            for (int64_t j = 0; j < QUERY_SLOTS; j++) {
                const Weight& w = c.gradients[i].query[RQ ? j / RQ : 2];
                int64_t r = RQ ? j % RQ : 0;
                float* to = w.data + b * w.row + (first + n) * w.token + r * w.rank;
                for (int64_t h = 0; r < w.ranks && h < c.H; h++) to[h] = row[h * QUERY_SLOTS + j];
            }
        }
    }
};
}  // namespace

// Number of blocks of queries per batch row.
extern "C" int64_t count_blocks(int64_t T) {
    int64_t queries = Worker::block_queries(T);
    return (T + queries - 1) / queries;
}

// Returns 0, or 1 if out of memory.
extern "C" int composed_attention(const Call* call, int backward) {
    const Call& c = *call;
    int failed = 0;
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1 && c.slots * c.shares > 1) reduction(| : failed)
    {
        Worker worker(c, backward);
        failed = !worker.ready;
        if (c.shares > 1) {  // one per thread, the same in both loops
#pragma omp for schedule(static, 1)
            for (int64_t item = 0; item < c.B * c.shares; item++)
                if (worker.ready) worker.start_share(item);
#pragma omp for schedule(static, 1)
            for (int64_t item = 0; item < c.B * c.shares; item++)
                if (worker.ready) worker.finish_share(item);
        } else {
#pragma omp for schedule(dynamic)
            for (int64_t slot = 0; slot < c.slots; slot++)
                for (int64_t item = slot; item < c.B * c.parts; item += c.slots)
                    if (worker.ready) worker.run(item, slot);
        }
    }
    return failed;
}
