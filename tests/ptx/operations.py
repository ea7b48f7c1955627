"""Instructions that compute the result of each lane from registers of the same lane."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from . import floats
from .floats import Array, BFloat16, Float16

INTEGERS = [f"{kind}{bits}" for kind in "bus" for bits in (16, 32, 64)]
DTYPES = {
    type: np.dtype(f"{'i' if type[0] == 's' else 'u'}{int(type[1:]) // 8}") for type in ["b8", "u8", "s8", *INTEGERS]
}
DTYPES |= {"pred": np.dtype("bool"), "f32": np.dtype("f4")}
WIDER = {"16": "32", "32": "64"}  # number of bits of wide products
FORMATS = {"bf16": BFloat16, "f16": Float16}


class Operation(NamedTuple):
    """Function of arrays and the types of its arguments. The dtype of the result has the size of the destination."""

    compute: Callable[..., Array]
    types: tuple[str, ...]


def _wide_product(a: Array, b: Array) -> Array:
    return np.multiply(a, b, dtype=np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}"))


def _high_product(a: Array, b: Array) -> Array:
    """Return the upper half of a product. 64-bit products are computed from halves and must be unsigned."""
    if a.dtype.itemsize < 8:
        return (_wide_product(a, b) >> 8 * a.dtype.itemsize).astype(a.dtype)
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = (a_low * b_low >> half) + (a_high * b_low & low) + (a_low * b_high & low)
    return a_high * b_high + (a_high * b_low >> half) + (a_low * b_high >> half) + (middle >> half)


def _bit_field(a: Array, first: Array, count: Array) -> Array:
    """Return a bit field of `a`, sign-extended for signed numbers."""
    unused = (32 - count).astype(a.dtype)
    return a << (unused - first.astype(a.dtype)) >> unused


def _choose_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Return a word of four of the eight bytes of two words, selected by the four hexadecimal digits of a selector."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for n in range(4):
        number = selector.astype(np.uint64) >> np.uint64(4 * n) & np.uint64(7)
        result |= (both >> np.uint64(8) * number & np.uint64(255)) << np.uint64(8 * n)
    return result.astype(np.uint32)


def _unordered(compare: Callable[..., Array]) -> Callable[..., Array]:
    """Return a comparison that is also true for NaN."""
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


# Functions by instruction name, with argument types: t is the type of the instruction, w twice as wide, u u32, p pred.
Functions = dict[str, tuple[Callable[..., Array], str]]
MOVES: Functions = {
    "mov": (lambda x: x, "t"),
    "ld.param": (lambda x: x, "t"),
    "selp": (lambda a, b, p: np.where(p, a, b), "ttp"),
}
LOGIC: Functions = {
    "and": (np.bitwise_and, "tt"),
    "or": (np.bitwise_or, "tt"),
    "xor": (np.bitwise_xor, "tt"),
    "not": (np.invert, "t"),
}
ARITHMETIC: Functions = {
    "add": (np.add, "tt"),
    "sub": (np.subtract, "tt"),
    "neg": (np.negative, "t"),
    "min": (np.minimum, "tt"),
    "max": (np.maximum, "tt"),
    "div": (lambda a, b: np.trunc(a / b).astype(a.dtype), "tt"),
    "rem": (np.fmod, "tt"),
    "max.relu": (lambda a, b: np.maximum(np.maximum(a, b), 0), "tt"),
    "mul.lo": (np.multiply, "tt"),
    "mad.lo": (lambda a, b, c: a * b + c, "ttt"),
    "shl": (lambda a, n: a << n.astype(a.dtype), "tu"),
    "shr": (lambda a, n: a >> n.astype(a.dtype), "tu"),
}
PRODUCTS: Functions = {
    "mul.wide": (_wide_product, "tt"),
    "mad.wide": (lambda a, b, c: _wide_product(a, b) + c, "ttw"),
    "mul.hi": (_high_product, "tt"),
}
FLOATS: Functions = {
    "add": (np.add, "tt"),
    "sub": (np.subtract, "tt"),
    "neg": (np.negative, "t"),
    "mul": (np.multiply, "tt"),
    "fma.rn": (floats.fma, "ttt"),
    "max": (np.fmax, "tt"),
    "ex2.approx": (floats.exp2, "t"),
}
COMPARISONS: Functions = {
    "setp.eq": (np.equal, "tt"),
    "setp.ne": (lambda a, b: (a < b) | (a > b), "tt"),
    "setp.lt": (np.less, "tt"),
    "setp.le": (np.less_equal, "tt"),
    "setp.gt": (np.greater, "tt"),
    "setp.ge": (np.greater_equal, "tt"),
}
FLUSHING: Functions = {f"{name}.ftz": (floats.flushing(compute), types) for name, (compute, types) in FLOATS.items()}
UNORDERED: Functions = {f"{name}u": (_unordered(compute), types) for name, (compute, types) in COMPARISONS.items()}


def _of_types(types: Iterable[str], functions: Functions) -> dict[str, Operation]:
    table = {}
    for type in types:
        letters = {"t": type, "w": f"{type[0]}{WIDER.get(type[1:])}", "u": "u32", "p": "pred"}
        for name, (compute, arguments) in functions.items():
            table[f"{name}.{type}"] = Operation(compute, tuple(letters[letter] for letter in arguments))
    return table


def _conversions() -> dict[str, Operation]:
    table = {}
    types = ["u8", "s8", *INTEGERS]
    for of in types:
        table |= {f"cvt.{to}.{of}": Operation(partial(np.ndarray.astype, dtype=DTYPES[to]), (of,)) for to in types}
        table[f"cvt.rn.f32.{of}"] = Operation(partial(np.ndarray.astype, dtype=np.float32), (of,))
    return table


def _narrow_floats(name: str, format: floats.Format) -> dict[str, Operation]:
    """Return the instructions for 16-bit numbers and for pairs of them."""
    fma, add = partial(floats.narrow_fma, format=format), partial(floats.narrow_add, format=format)
    return {
        f"cvt.f32.{name}": Operation(format.expand, ("b16",)),
        f"cvt.rn.{name}.f32": Operation(format.round, ("f32",)),
        f"cvt.rn.{name}x2.f32": Operation(lambda a, b: floats.pack(format.round(b), format.round(a)), ("f32",) * 2),
        f"add.{name}": Operation(add, ("b16",) * 2),
        f"add.{name}x2": Operation(floats.pairwise(add), ("b32",) * 2),
        f"fma.rn.{name}": Operation(fma, ("b16",) * 3),
        f"fma.rn.{name}x2": Operation(floats.pairwise(fma), ("b32",) * 3),
    }


OPERATIONS = (
    _of_types(INTEGERS, MOVES | LOGIC | ARITHMETIC | COMPARISONS)
    | _of_types(["u16", "s16", "u32", "s32"], PRODUCTS)
    | _of_types(["u64"], {"mul.hi": PRODUCTS["mul.hi"]})
    | _of_types(["f32"], MOVES | FLOATS | FLUSHING | COMPARISONS | UNORDERED)
    | _of_types(["pred"], LOGIC | {"mov": MOVES["mov"]})
    | _conversions()
    | _narrow_floats("bf16", BFloat16)
    | _narrow_floats("f16", Float16)
    | {f"bfe.{type}": Operation(_bit_field, (type, "u32", "u32")) for type in ("u32", "s32")}
)
OPERATIONS |= {f"add.{type}16x2": Operation(floats.pairwise(np.add), ("b32",) * 2) for type in "us"}
OPERATIONS["prmt.b32"] = Operation(_choose_bytes, ("b32",) * 3)
PACK = Operation(floats.pack, ("b16",) * 2)
