// Float vectors by the vector extension of GCC and Clang: AVX-512, AVX2 and NEON from one source.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define LANES 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define LANES 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LANES 4
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif
#define INLINE inline __attribute__((always_inline))

using std::int64_t;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint8_t bvec __attribute__((vector_size(LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4)));

constexpr int64_t W = LANES;

INLINE vec load(const float* p) { return *(const unaligned_vec*)p; }
INLINE void store(float* p, vec x) { *(unaligned_vec*)p = x; }
INLINE vec splat(float x) { return x - vec{}; }
INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
INLINE int64_t round_down(int64_t x, int64_t to) { return x / to * to; }

#ifdef __clang__
INLINE vec zip_low(vec a, vec b) { return __builtin_shufflevector(a, b, ZIP_LOW); }
INLINE vec zip_high(vec a, vec b) { return __builtin_shufflevector(a, b, ZIP_HIGH); }
#else
INLINE vec zip_low(vec a, vec b) { return __builtin_shuffle(a, b, (ivec){ZIP_LOW}); }
INLINE vec zip_high(vec a, vec b) { return __builtin_shuffle(a, b, (ivec){ZIP_HIGH}); }
#endif

// Load the first n elements at p, padded with zeros.
INLINE vec load_first(const float* p, int64_t n) {
    if (n >= W) return load(p);
    vec x = {};
    std::memcpy(&x, p, sizeof(float) * n);
    return x;
}

// Load the first n bytes at p as integers, padded with zeros.
INLINE ivec load_bytes(const uint8_t* p, int64_t n) {
    bvec x = {};
    std::memcpy(&x, p, n < W ? n : W);
    return __builtin_convertvector(x, ivec);
}

// first, first + 1, ...
INLINE ivec count_from(int64_t first) {
    ivec x;
    for (int i = 0; i < W; i++) x[i] = (int32_t)first + i;
    return x;
}

INLINE void store_first(float* p, vec x, int64_t n) {
    if (n >= W) return store(p, x);
    std::memcpy(p, &x, sizeof(float) * n);
}

INLINE float total(vec x) {
#pragma GCC unroll 4
    for (int i = 1; i < W; i *= 2) x = zip_low(x, x) + zip_high(x, x);
    return x[0];
}

INLINE float largest(vec x) {
#pragma GCC unroll 4
    for (int i = 1; i < W; i *= 2) {
        vec low = zip_low(x, x), high = zip_high(x, x);
        x = low > high ? low : high;
    }
    return x[0];
}

// Element i is the sum of the elements of the vector at p + i W.
INLINE vec totals(const float* p) {
    vec x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) x[i] = load(p + i * W);
#pragma GCC unroll 4
    for (int half = W / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) x[i] = zip_low(x[i], x[i + half]) + zip_high(x[i], x[i + half]);
    return x[0];
}

// Transpose a W x W square with row stride `stride`, of which `rows` and `columns` exist; the rest is zero.
INLINE void transpose(const float* p, int64_t stride, int64_t rows, int64_t columns, vec* out) {
    vec x[2][W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) x[0][i] = i < rows ? load_first(p + i * stride, columns) : vec{};
    int from = 0;
#pragma GCC unroll 4
    for (int done = 1; done < W; done *= 2, from ^= 1)
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; i++) {
            x[from ^ 1][2 * i] = zip_low(x[from][i], x[from][i + W / 2]);
            x[from ^ 1][2 * i + 1] = zip_high(x[from][i], x[from][i + W / 2]);
        }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) out[i] = x[from][i];
}

// e^x to 2 ulp for x <= 0; exactly 0 below -87; NaN for NaN.
INLINE vec exponential(vec x) {
    const float round = 12582912.0f;  // adding it leaves the integer part in the low bits
    vec shifted = x * 1.44269504f + round;
    vec n = shifted - round;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    vec scaled = (vec)((ivec)y + ((ivec)shifted << 23)) + (x - x);
    return x < -87.0f ? vec{} : scaled;
}
