// Small matrix products C (+)= A B; the columns of B and C are in panels of a few vectors.
#pragma once

#include <algorithm>

#include "vectors.h"

// Rows of an inner tile, whose sums must fit into registers (32, or 16 with AVX2; two vectors per row).
#if LANES == 8
constexpr int TILE_ROWS = 4;
#else
constexpr int TILE_ROWS = 8;
#endif
constexpr int PANEL_VECTORS = 2;
constexpr int64_t PANEL = PANEL_VECTORS * W;

struct Strides {
    int64_t row, column;  // in elements
};

template <int M, int N>
INLINE void tile_product(const float* a, Strides sa, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t K,
                         bool add) {
    vec sum[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[m][n] = add ? load(c + m * c_row + n * W) : vec{};
    for (int64_t k = 0; k < K; k++) {
        vec row[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) row[n] = load(b + k * b_row + n * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            float x = a[m * sa.row + k * sa.column];
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) sum[m][n] += x * row[n];
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) store(c + m * c_row + n * W, sum[m][n]);
}

template <int N>
void panel_product(const float* a, Strides sa, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t M,
                   int64_t K, bool add) {
    constexpr int FULL = TILE_ROWS, HALF = TILE_ROWS / 2;
    int64_t m = 0;
    for (; m + FULL <= M; m += FULL) tile_product<FULL, N>(a + m * sa.row, sa, b, b_row, c + m * c_row, c_row, K, add);
    for (; m + HALF <= M; m += HALF) tile_product<HALF, N>(a + m * sa.row, sa, b, b_row, c + m * c_row, c_row, K, add);
    for (; m < M; m++) tile_product<1, N>(a + m * sa.row, sa, b, b_row, c + m * c_row, c_row, K, add);
}

// A [M, K] with strides; B [K, N] with row stride b_row and panel stride b_panel; C [M, N] with row stride c_row. N is a
// multiple of W; complete vectors of B and C are read and written.
inline void product(const float* a, Strides sa, const float* b, int64_t b_row, int64_t b_panel, float* c, int64_t c_row,
                    int64_t M, int64_t N, int64_t K, bool add) {
    for (int64_t n = 0; n < N; n += PANEL, b += b_panel)
        if (N - n >= PANEL)
            panel_product<PANEL_VECTORS>(a, sa, b, b_row, c + n, c_row, M, K, add);
        else
            panel_product<1>(a, sa, b, b_row, c + n, c_row, M, K, add);
}
