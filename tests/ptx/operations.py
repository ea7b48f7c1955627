"""Instructions that compute each lane's result from the lane's own registers."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from . import floats
from .floats import Array, BFloat16, Float16

DTYPES = {"pred": np.dtype("bool"), "f32": np.dtype("f4")} | {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}") for kind in "bus" for bits in (8, 16, 32, 64)
}
INTEGERS = [f"{kind}{bits}" for kind in "bus" for bits in (16, 32, 64)]
FORMATS = {"bf16": BFloat16, "f16": Float16}


class Operation(NamedTuple):
    """A function of arrays, and the types of its arguments; the result has the type that follows from them."""

    compute: Callable[..., Array]
    types: tuple[str, ...]


def _identity(x: Array) -> Array:
    return x


def _wide_product(a: Array, b: Array) -> Array:
    """Multiply without loss, in twice the digits."""
    return np.multiply(a, b, dtype=np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}"))


def _select(a: Array, b: Array, p: Array) -> Array:
    return np.where(p, a, b)


def _round_pair(high: Array, low: Array, format: floats.Format) -> Array:
    return floats.round_pairs(np.stack(np.broadcast_arrays(low, high)), format)


def _unordered(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return a comparison that is true for NaN."""
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


ARITHMETIC = {
    "add": (np.add, 2),
    "sub": (np.subtract, 2),
    "neg": (np.negative, 1),
    "min": (np.minimum, 2),
    "max": (np.maximum, 2),
    "max.relu": (lambda a, b: np.maximum(np.maximum(a, b), 0), 2),
    "mul.lo": (np.multiply, 2),
    "mad.lo": (lambda a, b, c: a * b + c, 3),
    "and": (np.bitwise_and, 2),
    "or": (np.bitwise_or, 2),
    "xor": (np.bitwise_xor, 2),
    "not": (np.invert, 1),
}
FLOATS = {
    "add": (np.add, 2),
    "sub": (np.subtract, 2),
    "mul": (np.multiply, 2),
    "fma.rn": (floats.fma, 3),
    "max": (np.fmax, 2),
    "ex2.approx": (floats.exp2, 1),
}
COMPARISONS = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _integers() -> dict[str, Operation]:
    table = {}
    for type in INTEGERS:
        table |= {f"{name}.{type}": Operation(compute, (type,) * count) for name, (compute, count) in ARITHMETIC.items()}
        table |= {f"setp.{name}.{type}": Operation(compare, (type,) * 2) for name, compare in COMPARISONS.items()}
        table[f"shl.{type}"] = Operation(lambda a, n: a << n.astype(a.dtype), (type, "u32"))
        table[f"shr.{type}"] = Operation(lambda a, n: a >> n.astype(a.dtype), (type, "u32"))
    for type in ("u32", "s32"):
        table[f"mul.wide.{type}"] = Operation(_wide_product, (type,) * 2)
        table[f"mad.wide.{type}"] = Operation(lambda a, b, c: _wide_product(a, b) + c, (type, type, f"{type[0]}64"))
        table[f"mul.hi.{type}"] = Operation(lambda a, b: (_wide_product(a, b) >> 32).astype(a.dtype), (type,) * 2)
    table["bfe.u32"] = Operation(lambda a, first, count: (a >> first) & ((1 << count) - 1), ("u32",) * 3)
    return table


def _floats() -> dict[str, Operation]:
    table = {}
    for name, (compute, count) in FLOATS.items():
        table[f"{name}.f32"] = Operation(compute, ("f32",) * count)
        table[f"{name}.ftz.f32"] = Operation(floats.flushing(compute), ("f32",) * count)
    for name, compare in COMPARISONS.items():
        table[f"setp.{name}.f32"] = Operation(compare, ("f32",) * 2)
        table[f"setp.{name}u.f32"] = Operation(_unordered(compare), ("f32",) * 2)
    return table


def _narrow_floats() -> dict[str, Operation]:
    table = {}
    for name, format in FORMATS.items():
        table[f"cvt.f32.{name}"] = Operation(format.expand, ("b16",))
        table[f"cvt.rn.{name}.f32"] = Operation(format.round, ("f32",))
        table[f"cvt.rn.{name}x2.f32"] = Operation(partial(_round_pair, format=format), ("f32",) * 2)
        for type, bits in ((name, "b16"), (f"{name}x2", "b32")):
            fma, add = floats.narrow_arithmetic(format, type.endswith("x2"))
            table[f"fma.rn.{type}"] = Operation(fma, (bits,) * 3)
            table[f"add.{type}"] = Operation(add, (bits,) * 2)
    return table


def _moves() -> dict[str, Operation]:
    table = {"mov.pred": Operation(_identity, ("pred",))}
    for type in (*INTEGERS, "f32"):
        table |= {f"{name}.{type}": Operation(_identity, (type,)) for name in ("mov", "ld.param")}
        table[f"selp.{type}"] = Operation(_select, (type, type, "pred"))
    for name in ("and", "or", "xor", "not"):
        compute, count = ARITHMETIC[name]
        table[f"{name}.pred"] = Operation(compute, ("pred",) * count)
    return table


def _conversions() -> dict[str, Operation]:
    table = {}
    for of in [type for type in INTEGERS if type[0] != "b"]:
        for to in [type for type in INTEGERS if type[0] != "b"]:
            table[f"cvt.{to}.{of}"] = Operation(partial(np.ndarray.astype, dtype=DTYPES[to]), (of,))
        table[f"cvt.rn.f32.{of}"] = Operation(partial(np.ndarray.astype, dtype=np.float32), (of,))
    return table


OPERATIONS = _integers() | _floats() | _narrow_floats() | _moves() | _conversions()
