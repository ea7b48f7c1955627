"""Mixing of heads in tiles of scores and weights, shared by the five kernels.

A tile is a tuple of *blocks* [M, V, 16], of 16 slots each: M tokens of the *matrix* side, whose matrices are built once
per program and applied by batched products; V tokens of the *vector* side, whose composition stays low rank: a product
with a block matrix of ones sums over the heads of a group and puts the sum back on each of them. One block holds one
group of up to 16 heads, or two groups of up to 8, or four of up to 4, of the same or of different rows of the batch; a
group of more heads takes two, three or four blocks, whose sums are added up before they are spread.

Packed weights of a token are 2R + gate *vectors* over the heads: R of `down`, R of `up`, and the gate. Of a tuple of
vectors, number n of block b is [n * BLOCKS + b]; of matrices, that from block a to block b is [a * BLOCKS + b].
"""

# B batch, T query tokens, S key tokens, H heads, R compose rank, G head groups; of a tile: M and V tokens of its sides

from typing import Any, NamedTuple

import triton
import triton.language as tl

SLOTS = tl.constexpr(16)
LANES = tl.constexpr(8)  # tokens of a tile's axis 1 that are in different threads; the rest are within each thread


class KernelConfig(NamedTuple):
    """Compile-time configuration of the kernels of a call.

    Attributes:
        GROUP_SLOTS: Slots per group: 4, 8, or 16 for each block.
        HEADS: Heads per group.
        BLOCKS: Blocks per group.
        IS_CAUSAL: As in `composed_attention`.
        HAS_WINDOW: Whether there is a window.
        HAS_DOCUMENTS: Whether queries attend only to keys of their own document.
        MASK: Kind of mask: 0 for none, 1 boolean, 2 added to the composed scores.
        MASK_HEADS: Whether the mask differs between heads.
        MASK_QUERIES: Whether the mask differs between queries.
        MASK_GRADIENT: Whether the mask requires a gradient.
        HAS_DROPOUT: Whether there is dropout.
        DOT: Dtype of the operands of matrix products.
    """

    GROUP_SLOTS: int
    HEADS: int
    BLOCKS: int
    IS_CAUSAL: bool
    HAS_WINDOW: bool
    HAS_DOCUMENTS: bool
    MASK: int
    MASK_HEADS: bool
    MASK_QUERIES: bool
    MASK_GRADIENT: bool
    HAS_DROPOUT: bool
    DOT: Any


class ComposeSpec(NamedTuple):
    """Compile-time description of a composition's branches: ranks, and 1 or 0 for the other branches.

    Attributes:
        QUERY_RANK: Rank of the query side.
        QUERY_GATE: Whether the query side has a gate.
        KEY_RANK: Rank of the key side.
        KEY_GATE: Whether the key side has a gate.
        BASE: Whether there is a base.
        FACTORED: Whether the matrix side applies its low-rank factors, by two products of width 16, in place of whole
            matrices: with three and four blocks these would not fit into registers.
    """

    QUERY_RANK: int
    QUERY_GATE: int
    KEY_RANK: int
    KEY_GATE: int
    BASE: int
    FACTORED: int


class Matrices(NamedTuple):
    """Matrices that the matrix side of a tile applies, either full or factored.

    Attributes:
        whole: Full matrices [M, 16, 16] from each block to each block.
        down: Per block, matrices [M, 16, 16] whose first R columns are the `down` vectors.
        up: Per block, matrices whose first R rows are the `up` vectors.
        gate: Per block [M, 1, 16].
    """

    whole: Any
    down: Any
    up: Any
    gate: Any


class Packed(NamedTuple):
    """Packed weights [B, T or S, 2R + gate, width] of both sides of a composition, and its base [G, H/G, H/G].

    The decoding kernels use `SideWeights` for the sides instead.
    """

    query: Any
    key: Any
    base: Any


class Slots(NamedTuple):
    """Contents of the slots of a program; a group of one batch row is an instance.

    Attributes:
        row: Batch row [16], relative to the chunk's first.
        is_instance: Whether the slot belongs to an instance [16].
        head: Head of the call, per block [16].
        column: Column of the head's packed weights, per block [16]; each group has GROUP_SLOTS.
        is_real: Whether the slot holds a head, per block [16].
    """

    row: Any
    is_instance: Any
    head: Any
    column: Any
    is_real: Any


@triton.jit
def slots_of(program, num_instances, num_groups, KIND: tl.constexpr):
    """Compute the `Slots` of a program."""
    INSTANCES: tl.constexpr = 1 if KIND.BLOCKS > 1 else SLOTS // KIND.GROUP_SLOTS
    WIDTH: tl.constexpr = SLOTS // INSTANCES
    slots = tl.arange(0, SLOTS)
    instance = program * INSTANCES + slots // WIDTH
    group, is_instance = instance % num_groups, instance < num_instances
    head, column, is_real = (), (), ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        in_group = slots % WIDTH + b * SLOTS
        head = head + (group * KIND.HEADS + in_group,)
        column = column + (group * KIND.GROUP_SLOTS + in_group,)
        is_real = is_real + (is_instance & (in_group < KIND.HEADS),)
    return Slots(row=instance // num_groups, is_instance=is_instance, head=head, column=column, is_real=is_real)


@triton.jit
def same_group(KIND: tl.constexpr):
    """Block matrix [16, 16] of the slots of a block that belong to the same group."""
    slots = tl.arange(0, SLOTS)
    return slots[:, None] // KIND.GROUP_SLOTS == slots[None, :] // KIND.GROUP_SLOTS


@triton.jit
def group_sum(M: tl.constexpr, KIND: tl.constexpr):
    """Matrices [M, 16, 16] whose product sums over a group and broadcasts the sum to its slots."""
    return tl.broadcast_to(same_group(KIND).to(KIND.DOT)[None, :, :], [M, SLOTS, SLOTS])


@triton.jit
def on_diagonal():
    """Mask of the diagonal of matrices [1, 16, 16]."""
    slots = tl.arange(0, SLOTS)
    return (slots[:, None] == slots[None, :])[None, :, :]


@triton.jit
def load_vectors(
    packed, row, num_tokens, tokens, mask, slots, width, RANK: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr,
    AGAIN: tl.constexpr = False,
):  # fmt: skip
    """Load the packed weights [B, num_tokens, 2R + gate, width] of a tile's tokens: a tuple of vectors [tokens, 16].

    Loads with AGAIN specify the default cache modifier, so that the compiler does not keep the first load in registers.
    """
    CACHE: tl.constexpr = ".ca" if AGAIN else ""
    COUNT: tl.constexpr = 2 * RANK + GATE
    rows = row.to(tl.int64) * num_tokens * COUNT * width  # [16]
    vectors = ()
    for n in tl.static_range(COUNT):
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            pointers = packed + (rows + slots.column[b])[None, :] + ((tokens * COUNT + n) * width)[:, None]
            vectors = vectors + (tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE),)  # [tokens, 16]
    return vectors


@triton.jit
def load_side(
    side, row, num_tokens, tokens, inside, slots, H, RANK: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Load `SideWeights`, [B, num_tokens, R, H] and [B, num_tokens, H], in the form of `load_vectors`.

    The mask `inside` is given per block [tokens, 16].
    """
    rows = row.to(tl.int64)[None, :] * num_tokens + tokens[:, None]  # [tokens, 16]
    vectors = ()
    for n in tl.static_range(2 * RANK + GATE):
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            if n < RANK:
                pointers = side.down + (rows * RANK + n) * H
            elif n < 2 * RANK:
                pointers = side.up + (rows * RANK + n - RANK) * H
            else:
                pointers = side.gate + rows * H
            vectors = vectors + (tl.load(pointers + slots.head[b][None, :], mask=inside[b], other=0.0),)
    return vectors


@triton.jit
def token_matrices(
    vectors, base, slots, M: tl.constexpr, SPEC: tl.constexpr, QUERIES: tl.constexpr, KIND: tl.constexpr
):
    """Build the `Matrices` of each token of the matrix side, the QUERIES or the keys."""
    RANK: tl.constexpr = SPEC.QUERY_RANK if QUERIES else SPEC.KEY_RANK
    GATE: tl.constexpr = SPEC.QUERY_GATE if QUERIES else SPEC.KEY_GATE
    if SPEC.FACTORED:
        return _factors(vectors, M, RANK, GATE, KIND)
    else:
        whole = _whole_matrices(vectors, base, slots, M, RANK, GATE, SPEC.BASE, KIND)
        return Matrices(whole=whole, down=whole, up=whole, gate=whole)


@triton.jit
def _whole_matrices(
    vectors, base, slots, M: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr, BASE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Build sum_r down_r^T up_r + diag(gate) + base, matrices [M, 16, 16] from each block to each."""
    result = ()
    for a in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            matrices = tl.zeros([M, SLOTS, SLOTS], tl.float32)
            for r in tl.static_range(RANK):
                down = vectors[r * KIND.BLOCKS + a].to(tl.float32)
                matrices += down[:, :, None] * vectors[(RANK + r) * KIND.BLOCKS + b].to(tl.float32)[:, None, :]
            if KIND.GROUP_SLOTS < SLOTS:
                matrices = tl.where(same_group(KIND)[None, :, :], matrices, 0.0)
            if GATE and a == b:
                gate = vectors[2 * RANK * KIND.BLOCKS + b].to(tl.float32)
                matrices += tl.where(on_diagonal(), gate[:, :, None], 0.0)
            if BASE:
                mask = same_group(KIND) & slots.is_real[a][:, None] & slots.is_real[b][None, :]
                pointers = base + slots.head[a][:, None] * KIND.HEADS + (slots.head[b] % KIND.HEADS)[None, :]
                matrices += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)[None, :, :]  # [16, 16]
            result = result + (matrices.to(KIND.DOT),)
    return result


@triton.jit
def _factors(vectors, M: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr):
    """Arrange the vectors of the matrix side as factors for matrix products."""
    N: tl.constexpr = KIND.BLOCKS
    slots = tl.arange(0, SLOTS)
    downs, ups, gates = (), (), ()
    for b in tl.static_range(N):
        down = tl.zeros([M, SLOTS, SLOTS], tl.float32)
        up = tl.zeros([M, SLOTS, SLOTS], tl.float32)
        for r in tl.static_range(RANK):
            down = tl.where((slots == r)[None, None, :], vectors[r * N + b].to(tl.float32)[:, :, None], down)
            up = tl.where((slots == r)[None, :, None], vectors[(RANK + r) * N + b].to(tl.float32)[:, None, :], up)
        downs, ups = downs + (down.to(KIND.DOT),), ups + (up.to(KIND.DOT),)
        if GATE:
            gates = gates + (vectors[2 * RANK * N + b].to(tl.float32)[:, None, :],)
        else:
            gates = gates + (tl.zeros([M, 1, SLOTS], tl.float32),)
    return Matrices(whole=downs, down=downs, up=ups, gate=gates)


@triton.jit
def transposed(matrices, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Transpose `Matrices`, for the backward pass."""
    if SPEC.FACTORED:
        downs, ups = (), ()
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            downs = downs + (tl.permute(matrices.up[b], (0, 2, 1)),)
            ups = ups + (tl.permute(matrices.down[b], (0, 2, 1)),)
        return Matrices(whole=downs, down=downs, up=ups, gate=matrices.gate)
    else:
        result = ()
        for a in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
                result = result + (tl.permute(matrices.whole[b * KIND.BLOCKS + a], (0, 2, 1)),)
        return Matrices(whole=result, down=result, up=result, gate=result)


@triton.jit
def to_dot(blocks, KIND: tl.constexpr):
    """Round a tile to the dtype of matrix products."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (blocks[b].to(KIND.DOT),)
    return result


@triton.jit
def to_float(blocks, KIND: tl.constexpr):
    """Widen a tile to float32."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (blocks[b].to(tl.float32),)
    return result


@triton.jit
def to_rank(x_dot, factors, KIND: tl.constexpr):
    """Sum a tile over the heads by `down` or `up` factors: column r is the sum of rank r [M, V, 16]."""
    total = tl.zeros(x_dot[0].shape, tl.float32)
    for a in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        total = tl.dot(x_dot[a], factors[a], total, input_precision="ieee")  # [M, V, 16] @ [M, 16, 16]
    return total.to(KIND.DOT)


@triton.jit
def mix(
    x, x_dot, matrices, vectors, sums, SPEC: tl.constexpr, QUERIES: tl.constexpr, KIND: tl.constexpr,
    BACK: tl.constexpr = False,
):  # fmt: skip
    """Compose a tile with the matrices of the matrix side, the QUERIES or the keys, and the vectors of the vector side.

    `x` is float32, `x_dot` the same in the dtype of products. In the backward pass (BACK) matrices are transposed, and
    `down` and `up` vectors are exchanged.
    """
    RANK: tl.constexpr = SPEC.KEY_RANK if QUERIES else SPEC.QUERY_RANK
    GATE: tl.constexpr = SPEC.KEY_GATE if QUERIES else SPEC.QUERY_GATE
    OWN_RANK: tl.constexpr = SPEC.QUERY_RANK if QUERIES else SPEC.KEY_RANK
    OWN_GATE: tl.constexpr = SPEC.QUERY_GATE if QUERIES else SPEC.KEY_GATE
    DOWN: tl.constexpr = RANK if BACK else 0
    UP: tl.constexpr = 0 if BACK else RANK
    N: tl.constexpr = KIND.BLOCKS
    summed = ()
    for r in tl.static_range(RANK):
        total = tl.zeros(x[0].shape, tl.float32)
        for a in tl.static_range(N):
            inner = x_dot[a] * vectors[(DOWN + r) * N + a].to(KIND.DOT)[None, :, :]
            total = tl.dot(inner, sums, total, input_precision="ieee")  # [M, V, 16] @ [M, 16, 16]
        summed = summed + (total,)
    if SPEC.FACTORED and OWN_RANK > 0:
        inner = to_rank(x_dot, matrices.down, KIND)
    result = ()
    for b in tl.static_range(N):
        y = x[b]  # [M, V, 16]
        if SPEC.FACTORED:
            if OWN_RANK > 0:
                y = tl.dot(inner, matrices.up[b], y, input_precision="ieee")  # [M, V, 16] @ [M, 16, 16]
            if OWN_GATE:
                y += x[b] * matrices.gate[b]
        elif OWN_RANK + OWN_GATE + SPEC.BASE > 0:
            for a in tl.static_range(N):
                y = tl.dot(x_dot[a], matrices.whole[a * N + b], y, input_precision="ieee")  # [M, V, 16] @ [M, 16, 16]
        if GATE:
            y += x[b] * vectors[2 * RANK * N + b].to(tl.float32)[None, :, :]
        for r in tl.static_range(RANK):
            y += summed[r] * vectors[(UP + r) * N + b].to(tl.float32)[None, :, :]
        result = result + (y,)
    return result


@triton.jit
def zero_gradients(M: tl.constexpr, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Initialize the gradients of `Matrices` with zeros; gates [M, 8, 16]."""
    whole, down, up, gate = (), (), (), ()
    if SPEC.FACTORED:
        for _ in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            down = down + (tl.zeros([M, SLOTS, SLOTS], tl.float32),)
            up = up + (tl.zeros([M, SLOTS, SLOTS], tl.float32),)
            gate = gate + (tl.zeros([M, LANES, SLOTS], tl.float32),)
        whole = down
    else:
        for _ in tl.static_range(tl.constexpr(KIND.BLOCKS * KIND.BLOCKS)):
            whole = whole + (tl.zeros([M, SLOTS, SLOTS], tl.float32),)
        down, up, gate = whole, whole, whole
    return Matrices(whole=whole, down=down, up=up, gate=gate)


@triton.jit
def _outer(x, y, total):
    """Add the sum over the vector side of x^T y to matrices [M, 16, 16]."""
    return tl.dot(tl.permute(x, (0, 2, 1)), y, total, input_precision="ieee")  # [M, 16, V] @ [M, V, 16]


@triton.jit
def add_gradients(
    x, x_dot, dy, dy_dot, matrices, totals, SPEC: tl.constexpr, QUERIES: tl.constexpr, KIND: tl.constexpr
):
    """Accumulate the gradients of `Matrices` of a tile that composes x to y, where `dy` is the gradient of y."""
    RANK: tl.constexpr = SPEC.QUERY_RANK if QUERIES else SPEC.KEY_RANK
    GATE: tl.constexpr = SPEC.QUERY_GATE if QUERIES else SPEC.KEY_GATE
    if SPEC.FACTORED:
        down, up, gate = totals.down, totals.up, totals.gate
        if RANK > 0:
            inner, d_inner = to_rank(x_dot, matrices.down, KIND), to_rank(dy_dot, _back(matrices.up, KIND), KIND)
            down, up = (), ()
            for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
                down = down + (_outer(x_dot[b], d_inner, totals.down[b]),)
                up = up + (_outer(inner, dy_dot[b], totals.up[b]),)
        if GATE:
            gate = ()
            for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
                gate = gate + (totals.gate[b] + tl.sum(within_threads(x[b] * dy[b]), 1),)
        return Matrices(whole=down, down=down, up=up, gate=gate)
    else:
        result = ()
        for a in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
                result = result + (_outer(x_dot[a], dy_dot[b], totals.whole[a * KIND.BLOCKS + b]),)
        return Matrices(whole=result, down=result, up=result, gate=result)


@triton.jit
def _back(factors, KIND: tl.constexpr):
    """Transpose one kind of factors."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (tl.permute(factors[b], (0, 2, 1)),)
    return result


@triton.jit
def within_threads(x):
    """View a block [M, V, 16] as [M, V / 8, 8, 16], where axis 1 is within a thread."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES, SLOTS])


@triton.jit
def store_vector_gradients(
    gradients, vectors, target, places, slots, width, mask, SPEC: tl.constexpr, QUERIES: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Reduce the gradients of `Matrices` to those of the packed weights, and store them at `places` [M, 16]."""
    RANK: tl.constexpr = SPEC.QUERY_RANK if QUERIES else SPEC.KEY_RANK
    GATE: tl.constexpr = SPEC.QUERY_GATE if QUERIES else SPEC.KEY_GATE
    rank = tl.arange(0, SLOTS)
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        pointers = target + places + slots.column[b][None, :]
        for r in tl.static_range(RANK):
            if SPEC.FACTORED:
                d_down = tl.sum(tl.where((rank == r)[None, None, :], gradients.down[b], 0.0), 2)
                d_up = tl.sum(tl.where((rank == r)[None, :, None], gradients.up[b], 0.0), 1)
            else:
                d_down, d_up = _of_rank(gradients.whole, vectors, b, r, RANK, KIND)
            tl.store(pointers + r * width, d_down, mask=mask)
            tl.store(pointers + (RANK + r) * width, d_up, mask=mask)
        if GATE:
            if SPEC.FACTORED:
                d_gate = tl.sum(gradients.gate[b], 1)
            else:
                diagonal = gradients.whole[b * KIND.BLOCKS + b]
                d_gate = tl.sum(tl.where(on_diagonal(), diagonal, 0.0), 2)
            tl.store(pointers + 2 * RANK * width, d_gate, mask=mask)


@triton.jit
def _of_rank(whole, vectors, B: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, KIND: tl.constexpr):
    """Reduce the gradients of full matrices to those of the `down` and `up` vectors of one rank and block [M, 16]."""
    N: tl.constexpr = KIND.BLOCKS
    d_down, d_up = tl.zeros(vectors[0].shape, tl.float32), tl.zeros(vectors[0].shape, tl.float32)
    for other in tl.static_range(N):
        forth, back = whole[B * N + other], whole[other * N + B]  # from this block, and to it
        if KIND.GROUP_SLOTS < SLOTS:
            forth = tl.where(same_group(KIND)[None, :, :], forth, 0.0)
            back = forth
        d_down += tl.sum(forth * vectors[(RANK + R) * N + other].to(tl.float32)[:, None, :], 2)
        d_up += tl.sum(back * vectors[R * N + other].to(tl.float32)[:, :, None], 1)
    return d_down, d_up


@triton.jit
def store_base_sum(gradients, sums, KIND: tl.constexpr):
    """Store a program's partial gradient of the base [slots, slots]; the launcher sums them."""
    WIDTH: tl.constexpr = SLOTS * KIND.BLOCKS
    slots = tl.arange(0, SLOTS)
    place = tl.program_id(0).to(tl.int64) * WIDTH * WIDTH
    for a in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            square = (slots + a * SLOTS)[:, None] * WIDTH + (slots + b * SLOTS)[None, :]
            tl.store(sums + place + square, tl.sum(gradients.whole[a * KIND.BLOCKS + b], 0))


@triton.jit
def load_tile(workspace, place, inside, KIND: tl.constexpr):
    """Load a tile of a workspace, in the dtype of products."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (tl.load(workspace + place[b], mask=inside[b], other=0.0).to(KIND.DOT),)
    return result


@triton.jit
def store_tile(workspace, place, inside, tile, KIND: tl.constexpr):
    """Store a tile."""
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        tl.store(workspace + place[b], tile[b].to(workspace.dtype.element_ty), mask=inside[b])


@triton.jit
def store_zeros(workspace, offsets, start, stop, num_keys, mask, TILE: tl.constexpr, KIND: tl.constexpr):
    """Write zeros to the keys from `start`, a multiple of TILE, to `stop`; offsets [M, 16] are those of key 0."""
    for begin in range(start, stop, TILE):
        key = tl.multiple_of(begin, TILE) + tl.arange(0, TILE)
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            inside = mask[b][:, None, :] & (key < num_keys)[None, :, None]
            tl.store(workspace + offsets[b][:, None, :] + key[None, :, None], 0.0, mask=inside)


@triton.jit
def split_range(low, high, split, num_splits, TILE: tl.constexpr):
    """Return a program's share of a range, in whole tiles."""
    share = tl.cdiv(tl.cdiv(high - low, num_splits), TILE) * TILE
    return low + split * share, tl.minimum(high, low + (split + 1) * share)
