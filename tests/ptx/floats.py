"""Floating-point arithmetic of PTX on arrays of any shape."""

from collections.abc import Callable

import numpy as np

Array = np.ndarray
MIN_NORMAL = np.finfo(np.float32).tiny


def fma(a: Array, b: Array, c: Array) -> Array:
    """Multiply and add in float64, where products are exact, and round to float32."""
    product = np.multiply(a, b, dtype=np.float64)
    return (product + c).astype(np.float32)


def exp2(x: Array) -> Array:
    """Return 2^x rounded to float32. `ex2.approx` differs from it by at most 2 units in the last place."""
    return np.exp2(x, dtype=np.float64).astype(np.float32)


def flush(x: Array) -> Array:
    """Replace subnormal numbers with zeros of the same sign."""
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(np.float32(0.0), x), x)


def flushing(operation: Callable[..., Array]) -> Callable[..., Array]:
    """Return a float32 operation that flushes subnormal arguments and results to zero (`.ftz`)."""
    return lambda *arguments: flush(operation(*map(flush, arguments)))


class BFloat16:
    """Conversions of bfloat16 numbers, stored as bits."""

    @staticmethod
    def expand(bits: Array) -> Array:
        """Convert uint16 bits to float32."""
        return (bits.astype(np.uint32) << 16).view(np.float32)

    @staticmethod
    def round(x: Array) -> Array:
        """Convert float32 to uint16 bits, rounded to nearest even."""
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


class Float16:
    """Conversions of float16 numbers, stored as bits."""

    @staticmethod
    def expand(bits: Array) -> Array:
        """Convert uint16 bits to float32."""
        return bits.view(np.float16).astype(np.float32)

    @staticmethod
    def round(x: Array) -> Array:
        """Convert float32 to uint16 bits, rounded to nearest even."""
        return x.astype(np.float16).view(np.uint16)


Format = type[BFloat16] | type[Float16]


def pack(low: Array, high: Array) -> Array:
    """Combine two 16-bit numbers into one 32-bit number."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def unpack(pair: Array) -> tuple[Array, Array]:
    """Return the lower and the upper 16 bits of 32-bit numbers."""
    return pair.astype(np.uint16), (pair >> 16).astype(np.uint16)


def narrow_fma(a: Array, b: Array, c: Array, format: Format) -> Array:
    """Multiply and add 16-bit numbers with one rounding, except for subnormal results."""
    return format.round(_add_to_odd(format.expand(a) * format.expand(b), format.expand(c)))


def narrow_add(a: Array, b: Array, format: Format) -> Array:
    """Add 16-bit numbers."""
    return format.round(format.expand(a) + format.expand(b))


def pairwise(operation: Callable[..., Array]) -> Callable[..., Array]:
    """Return the operation on pairs of 16-bit numbers that applies an operation to each number."""
    return lambda *pairs: pack(*(operation(*halves) for halves in zip(*map(unpack, pairs), strict=True)))


def _add_to_odd(a: Array, b: Array) -> Array:
    """Add in float32 with rounding to odd. A later rounding to fewer digits then equals a single rounding."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(np.uint32)
    even_and_inexact = ((bits & 1) == 0) & ((error > 0) | (error < 0))
    towards_zero = (error < 0) == (total > 0)
    step = np.where(towards_zero, np.uint32(0xFFFFFFFF), np.uint32(1))
    return np.where(even_and_inexact, bits + step, bits).view(np.float32)


def matrix_product(a: list[Array], b: list[Array], c: list[Array], format: Format) -> Array:
    """Compute a b + c for `mma.m16n8k16` or `mma.m16n8k8`, summed in float32.

    Lane 4 g + t contains the following elements. Of a [16, 16]: rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and
    2 t + 9. Of b [16, 8]: rows with the same indices as the columns of a, column g. Of c [16, 8]: the rows of a,
    columns 2 t and 2 t + 1. `k8` uses only the first 8 indices of the k axis.

    Args:
        a: Four registers of pairs, or two for `k8`, uint32 [programs, 32].
        b: Two registers of pairs, or one for `k8`.
        c: Four registers of float32 [programs, 32].
        format: Format of the pairs.

    Returns:
        Four registers [4, programs, 32].
    """
    left, right = (format.expand(np.stack(unpack(np.stack(pairs)))) for pairs in (a, b))
    left = left.reshape(2, len(b), 2, -1, 8, 4)  # [half, k block, row block, programs, g, t]
    left = left.transpose(3, 2, 4, 1, 5, 0).reshape(-1, 16, 8 * len(b))
    right = right.reshape(2, len(b), -1, 8, 4)  # [half, k block, programs, g, t]
    right = right.transpose(2, 1, 4, 0, 3).reshape(-1, 8 * len(b), 8)
    product = np.matmul(left, right).reshape(-1, 2, 8, 4, 2)  # [programs, row block, g, t, half]
    return product.transpose(1, 4, 0, 2, 3).reshape(4, -1, 32) + np.stack(c)
