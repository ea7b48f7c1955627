// The composition of heads, and its gradients, for W keys of a few queries at a time.
//
// The ranks, and whether there is a key side, are compile-time constants; heads are a loop. The weights of a query are
// [H][slots] scalars, those of W keys [H][slots] vectors; the slots are down [R], up [R] and the gate.
#pragma once

#include "vectors.h"

#ifndef RANK_QUERY
#define RANK_QUERY 2
#define RANK_KEY 2
#define KEY_SIDE 1
#endif

constexpr int RQ = RANK_QUERY, RK = RANK_KEY;
constexpr bool HAS_KEY = KEY_SIDE;
constexpr int64_t QUERY_SLOTS = 2 * RQ + 1, KEY_SLOTS = HAS_KEY ? 2 * RK + 1 : 0;
constexpr int SIZE_Q = RQ ? RQ : 1, SIZE_K = RK ? RK : 1;  // array sizes

struct Heads {
    int64_t count, group;  // number of heads, and of heads per group
};

struct Tile {  // scores or weights [H][queries][keys]
    int64_t head, query;
};

// Weights of one composition for a tile: of its first query and its first W keys; base [G][from][to] or null.
struct Weights {
    const float* query;
    const float* key;
    const float* base;
};

// Sums of their gradients: one vector per slot.
struct Gradients {
    float* query;
    float* key;
    float* base;
};

// x M, or x M^T, over the heads of a group, for N queries: out[n][h].
template <int N, bool TRANSPOSED>
INLINE void times_base(int64_t size, Tile tile, const float* x, const float* base, vec* out) {
    for (int n = 0; n < N; n++)
        for (int64_t to = 0; to < size; to++) {
            vec sum = {};
            for (int64_t from = 0; from < size; from++)
                sum += load(x + from * tile.head + n * tile.query) * base[TRANSPOSED ? to * size + from : from * size + to];
            out[n * size + to] = sum;
        }
}

template <int N>
INLINE void add_base_gradient(int64_t size, Tile tile, const float* x, const float* dy, float* slot) {
    for (int64_t from = 0; from < size; from++)
        for (int64_t to = 0; to < size; to++, slot += W) {
            vec sum = load(slot);
            for (int n = 0; n < N; n++) sum += load(x + from * tile.head + n * tile.query) * load(dy + to * tile.head + n * tile.query);
            store(slot, sum);
        }
}

// Compose W keys of N queries; `finish(head, query, vector)` receives the results. `scratch`: N vectors per head of a
// group.
template <int N, class Finish>
INLINE void compose(const Heads heads, const Tile tile, const float* x, const Weights w, vec* scratch, Finish&& finish) {
    const int64_t row = heads.count * QUERY_SLOTS;
    const float *query = w.query, *key = w.key;
    for (int64_t g = 0; g < heads.count; g += heads.group) {
        if (w.base) times_base<N, false>(heads.group, tile, x, w.base + g * heads.group, scratch);
        vec hq[N][SIZE_Q], hk[N][SIZE_K];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
#pragma GCC unroll 8
            for (int r = 0; r < RQ; r++) hq[n][r] = vec{};
#pragma GCC unroll 8
            for (int r = 0; r < RK; r++) hk[n][r] = vec{};
        }
        const float *from = x, *q = query, *k = key;
        for (int64_t h = 0; h < heads.group; h++, from += tile.head, q += QUERY_SLOTS, k += KEY_SLOTS * W) {
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                vec a = load(from + n * tile.query);
#pragma GCC unroll 8
                for (int r = 0; r < RQ; r++) hq[n][r] += a * q[n * row + r];
#pragma GCC unroll 8
                for (int r = 0; r < RK; r++) hk[n][r] += a * load(k + r * W);
            }
        }
        for (int64_t h = 0; h < heads.group; h++, x += tile.head, query += QUERY_SLOTS, key += KEY_SLOTS * W) {
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                vec gate = splat(query[n * row + 2 * RQ]);
                if (HAS_KEY) gate += load(key + 2 * RK * W);
                vec y = load(x + n * tile.query) * gate;
#pragma GCC unroll 8
                for (int r = 0; r < RQ; r++) y += hq[n][r] * query[n * row + RQ + r];
#pragma GCC unroll 8
                for (int r = 0; r < RK; r++) y += hk[n][r] * load(key + (RK + r) * W);
                if (w.base) y += scratch[n * heads.group + h];
                finish(g + h, n, y);
            }
        }
    }
}

// The gradients of `compose` for W keys of N queries. `finish(head, query, x, dx, y)`; y is the result of
// `compose`, only if WITH_RESULT. `scratch`: 2 N vectors per head of a group.
template <int N, bool WITH_RESULT, class Finish>
INLINE void compose_backward(const Heads heads, const Tile tile, const float* x, const float* dy, const Weights w,
                             const Gradients grads, vec* scratch, Finish&& finish) {
    const int64_t row = heads.count * QUERY_SLOTS;
    const float *query = w.query, *key = w.key;
    float *d_query = grads.query, *d_key = grads.key;
    for (int64_t g = 0; g < heads.count; g += heads.group) {
        vec* base_y = scratch + N * heads.group;
        if (w.base) {
            const float* base = w.base + g * heads.group;
            times_base<N, true>(heads.group, tile, dy, base, scratch);
            if (WITH_RESULT) times_base<N, false>(heads.group, tile, x, base, base_y);
            add_base_gradient<N>(heads.group, tile, x, dy, grads.base + g * heads.group * W);
        }
        vec hq[N][SIZE_Q], hk[N][SIZE_K], eq[N][SIZE_Q], ek[N][SIZE_K];  // x down, dy up
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
#pragma GCC unroll 8
            for (int r = 0; r < RQ; r++) hq[n][r] = eq[n][r] = vec{};
#pragma GCC unroll 8
            for (int r = 0; r < RK; r++) hk[n][r] = ek[n][r] = vec{};
        }
        const float *x_from = x, *dy_from = dy, *q = query, *k = key;
        for (int64_t h = 0; h < heads.group; h++) {
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                vec a = load(x_from + n * tile.query), d = load(dy_from + n * tile.query);
#pragma GCC unroll 8
                for (int r = 0; r < RQ; r++) {
                    hq[n][r] += a * q[n * row + r];
                    eq[n][r] += d * q[n * row + RQ + r];
                }
#pragma GCC unroll 8
                for (int r = 0; r < RK; r++) {
                    hk[n][r] += a * load(k + r * W);
                    ek[n][r] += d * load(k + (RK + r) * W);
                }
            }
            x_from += tile.head, dy_from += tile.head, q += QUERY_SLOTS, k += KEY_SLOTS * W;
        }
        for (int64_t h = 0; h < heads.group; h++) {
            vec d_down[SIZE_K], d_up[SIZE_K], d_gate = {};
#pragma GCC unroll 8
            for (int r = 0; r < RK; r++) d_down[r] = d_up[r] = vec{};
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                vec a = load(x + n * tile.query), d = load(dy + n * tile.query);
                vec gate = splat(query[n * row + 2 * RQ]);
                if (HAS_KEY) gate += load(key + 2 * RK * W);
                vec dx = d * gate, y = a * gate, ad = a * d;
                float* slot = d_query + n * row * W;
#pragma GCC unroll 8
                for (int r = 0; r < RQ; r++) {
                    dx += eq[n][r] * query[n * row + r];
                    if (WITH_RESULT) y += hq[n][r] * query[n * row + RQ + r];
                    store(slot + r * W, load(slot + r * W) + a * eq[n][r]);
                    store(slot + (RQ + r) * W, load(slot + (RQ + r) * W) + hq[n][r] * d);
                }
                store(slot + 2 * RQ * W, load(slot + 2 * RQ * W) + ad);
#pragma GCC unroll 8
                for (int r = 0; r < RK; r++) {
                    dx += ek[n][r] * load(key + r * W);
                    if (WITH_RESULT) y += hk[n][r] * load(key + (RK + r) * W);
                    d_down[r] += a * ek[n][r];
                    d_up[r] += hk[n][r] * d;
                }
                d_gate += ad;
                if (w.base) {
                    dx += scratch[n * heads.group + h];
                    if (WITH_RESULT) y += base_y[n * heads.group + h];
                }
                finish(g + h, n, a, dx, y);
            }
#pragma GCC unroll 8
            for (int r = 0; r < RK; r++) {
                store(d_key + r * W, load(d_key + r * W) + d_down[r]);
                store(d_key + (RK + r) * W, load(d_key + (RK + r) * W) + d_up[r]);
            }
            if (HAS_KEY) store(d_key + 2 * RK * W, load(d_key + 2 * RK * W) + d_gate);
            x += tile.head, dy += tile.head, query += QUERY_SLOTS, key += KEY_SLOTS * W;
            d_query += QUERY_SLOTS * W, d_key += KEY_SLOTS * W;
        }
    }
}
