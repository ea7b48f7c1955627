"""Composition of heads (paper, equations 7 and 8) on tiles of 16 keys x 16 heads: y = x (1 + M_query + M_key).

The matrix of the query, of rank R plus a diagonal (gate) and a static base, is the right operand of a tensor-core
product. The low-rank part of the keys differs between the rows of a tile: sums over heads are products with ones, which
give the sum in every lane; the rest is float32 arithmetic.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import COLUMNS, LEFT, RIGHT, ROWS, load_packed, right_columns, right_rows, times, widen, zeros


class ComposeSpec(NamedTuple):
    """Branches of a composition: the ranks of both sides, and 1 where a gate or the static base exists."""

    QUERY_RANK: int
    QUERY_GATE: int
    KEY_RANK: int
    KEY_GATE: int
    BASE: int


@gluon.jit
def multiply(a, b, DTYPE: gl.constexpr):
    """Multiply two left operands elementwise, two elements per instruction; fma, as capability 8.0 has no bf16x2
    mul."""
    zero = gl.full([16, 16], -0.0, DTYPE, LEFT)
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, zero], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, zero], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def ones_of_groups(KIND: gl.constexpr):
    """Return the right operand of a product that sums over the heads of each group."""
    if KIND.GROUP_SLOTS >= 16:
        return gl.full([16, 16], 1.0, KIND.DTYPE, RIGHT)
    else:
        same = right_rows() // KIND.GROUP_SLOTS == right_columns() // KIND.GROUP_SLOTS
        return gl.where(same, 1.0, 0.0).to(KIND.DTYPE)


@gluon.jit
def load_key_vectors(pointers, start, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Load the packed weights of the tile of keys at `start`: down, up and gate, per block of heads."""
    COUNT: gl.constexpr = (2 * SPEC.KEY_RANK + SPEC.KEY_GATE) * KIND.BLOCKS
    vectors = ()
    if COUNT > 0:
        first = pointers + start * (COUNT * 16)
        for n in gl.static_range(COUNT):
            vectors = vectors + (load_packed(first + n * 256),)
    return vectors


@gluon.jit
def sum_heads(x, vectors, FIRST: gl.constexpr, ones, KIND: gl.constexpr):
    """Sum x over the heads of a group, weighted by vectors: in every lane of the group."""
    total = zeros()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        total = times(multiply(x[b], vectors[FIRST + b], KIND.DTYPE), ones, total, KIND.GROUP_SLOTS < 16)
    return total


@gluon.jit
def weighted_sums(x, vectors, ones, SPEC: gl.constexpr, KIND: gl.constexpr, BACK: gl.constexpr):
    """Contract the heads with the keys' down vectors (up vectors in the backward pass), for each rank."""
    sums = ()
    for r in gl.static_range(gl.constexpr(SPEC.KEY_RANK)):
        sums = sums + (sum_heads(x, vectors, (r + SPEC.KEY_RANK * BACK) * KIND.BLOCKS, ones, KIND),)
    return sums


@gluon.jit
def widened(x, identity, KIND: gl.constexpr):
    """Convert a left operand to an accumulator, with the tensor cores if that is cheaper."""
    if KIND.GROUP_SLOTS < 16:
        return times(x, identity, zeros(), True)
    else:
        return widen(x)


@gluon.jit
def compose(y, x, wide, matrices, vectors, sums, identity, SPEC: gl.constexpr, KIND: gl.constexpr, BACK: gl.constexpr):
    """Add x (M_query + M_key) to y.

    Args:
        y: Accumulators, one for each block of 16 heads.
        x: Left operands likewise.
        wide: Accumulators with the same values, possibly not rounded.
        matrices: Right operands of each pair of blocks (from, to), or their transposes in the backward pass.
        vectors: Packed weights of the tile's keys.
        sums: `weighted_sums` of x.
        identity: The identity as a right operand.
        SPEC: Branches of the composition.
        KIND: Configuration of the call.
        BACK: 1 to apply the transposed matrices, else 0.
    """
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        added = y[b]
        for r in gl.static_range(gl.constexpr(SPEC.KEY_RANK)):
            added += sums[r] * widened(vectors[(r + SPEC.KEY_RANK * (1 - BACK)) * KIND.BLOCKS + b], identity, KIND)
        if SPEC.KEY_GATE:
            added += wide[b] * widened(vectors[2 * SPEC.KEY_RANK * KIND.BLOCKS + b], identity, KIND)
        if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
            for a in gl.static_range(gl.constexpr(KIND.BLOCKS)):
                added = times(x[a], matrices[a * KIND.BLOCKS + b], added, KIND.GROUP_SLOTS < 16)
        result = result + (added,)
    return result


@gluon.jit
def query_matrices(pointer, base, place, SPEC: gl.constexpr, KIND: gl.constexpr, BACK: gl.constexpr):
    """Build the matrices of a query as right operands of each pair of blocks (from, to), or their transposes.

    Args:
        pointer: Packed weights of the query [2 QUERY_RANK + QUERY_GATE, 16 BLOCKS].
        base: The static base [G, HEADS, HEADS].
        place: Offset of the base of each slot's group [16 rows, 1] if a tile has several groups; else a number.
        SPEC: Branches of the composition.
        KIND: Configuration of the call.
        BACK: Whether to transpose.
    """
    WIDTH: gl.constexpr = 16 * KIND.BLOCKS
    R: gl.constexpr = SPEC.QUERY_RANK
    row, column = right_rows(), right_columns()
    matrices = ()
    if R + SPEC.QUERY_GATE + SPEC.BASE > 0:
        for a in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
                matrix = gl.zeros([16, 16], gl.float32, RIGHT)
                for r in gl.static_range(R):
                    down = gl.load(pointer + (r + R * BACK) * WIDTH + 16 * a + row).to(gl.float32)
                    up = gl.load(pointer + (r + R * (1 - BACK)) * WIDTH + 16 * b + column).to(gl.float32)
                    matrix += down * up
                if KIND.GROUP_SLOTS < 16:
                    matrix = gl.where(row // KIND.GROUP_SLOTS == column // KIND.GROUP_SLOTS, matrix, 0.0)
                if SPEC.QUERY_GATE and a == b:
                    gate = gl.load(pointer + 2 * R * WIDTH + 16 * a + row).to(gl.float32)
                    matrix += gl.where(row == column, gate, 0.0)
                if SPEC.BASE:
                    matrix += load_base(base, place, 16 * a + row, 16 * b + column, KIND, BACK)
                matrices = matrices + (matrix.to(KIND.DTYPE),)
    return matrices


@gluon.jit
def load_base(base, place, row, column, KIND: gl.constexpr, BACK: gl.constexpr):
    """Load a block of the static base, or of its transpose; 0 for missing heads and between groups."""
    if KIND.GROUP_SLOTS < 16:
        same = row // KIND.GROUP_SLOTS == column // KIND.GROUP_SLOTS
        row, column = row % KIND.GROUP_SLOTS, column % KIND.GROUP_SLOTS
    else:
        same = row >= 0
    inside = same & (row < KIND.HEADS) & (column < KIND.HEADS)
    offset = (column * KIND.HEADS + row) * BACK + (row * KIND.HEADS + column) * (1 - BACK)
    return gl.load(base + place + offset, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def store_query_gradients(d, pointer, slots, weights, SPEC: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr):
    """Reduce the gradients of a query's matrices to those of its weights, and store them.

    Args:
        d: Accumulators [16 from, 16 to] of each pair of blocks.
        pointer: Destination of the gradients of the query's weights, [2 QUERY_RANK + QUERY_GATE, H] of the row and
            token of slot 0.
        slots: Offsets of the slots' heads relative to it, and their validity, per block: by rows and by columns.
        weights: Packed weights of the query.
        SPEC: Branches of the composition.
        KIND: Configuration of the call.
        SCALE: Factor on the gradients.
    """
    WIDTH: gl.constexpr = 16 * KIND.BLOCKS
    R: gl.constexpr = SPEC.QUERY_RANK
    rows, columns = gl.arange(0, 16, ROWS), gl.arange(0, 16, COLUMNS)
    row, column = gl.expand_dims(rows, 1), gl.expand_dims(columns, 0)
    for r in gl.static_range(R):
        for a in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            d_down = gl.zeros([16], gl.float32, ROWS)
            d_up = gl.zeros([16], gl.float32, COLUMNS)
            for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
                up = gl.load(weights + (R + r) * WIDTH + 16 * b + columns).to(gl.float32)
                down = gl.load(weights + r * WIDTH + 16 * b + rows).to(gl.float32)
                out, into = d[a * KIND.BLOCKS + b], d[b * KIND.BLOCKS + a]
                if KIND.GROUP_SLOTS < 16:
                    same = row // KIND.GROUP_SLOTS == column // KIND.GROUP_SLOTS
                    out, into = gl.where(same, out, 0.0), gl.where(same, into, 0.0)
                d_down += gl.sum(out * gl.expand_dims(up, 0), 1)
                d_up += gl.sum(into * gl.expand_dims(down, 1), 0)
            place = slots.row_offsets[a] + r * KIND.NUM_HEADS
            gl.store(pointer + place, d_down * SCALE, mask=slots.row_real[a])
            place = slots.column_offsets[a] + (R + r) * KIND.NUM_HEADS
            gl.store(pointer + place, d_up * SCALE, mask=slots.column_real[a])
    if SPEC.QUERY_GATE:
        for a in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            diagonal = gl.sum(gl.where(row == column, d[a * KIND.BLOCKS + a], 0.0), 1)
            place = slots.row_offsets[a] + 2 * R * KIND.NUM_HEADS
            gl.store(pointer + place, diagonal * SCALE, mask=slots.row_real[a])
