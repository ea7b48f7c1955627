"""Index computations for workspaces, packed weights, statistics and masks."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import COLUMNS, MEMORY_HEADS, along_heads, from_memory, memory_keys, row_keys, to_memory
from .masking import query_words


class KernelConfig(NamedTuple):
    """Compile-time configuration of the kernels, except for the branches of the compositions.

    Attributes:
        GROUP_SLOTS: Slots per head group: 4, 8, or 16 for each block.
        HEADS: Heads per group.
        BLOCKS: Blocks of 16 heads per tile.
        NUM_GROUPS: Head groups.
        NUM_HEADS: Heads of the queries.
        SHARED: Consecutive heads that share a head of the keys and values.
        IS_CAUSAL: Whether later keys are hidden.
        HAS_WINDOW: Whether there is a window.
        HAS_DOCUMENTS: Whether queries attend only to keys of their own document.
        MASK: 0 without a mask, 1 for a boolean mask, 2 for a floating one.
        MASK_GRADIENT: Whether the mask requires a gradient.
        HAS_DROPOUT: Whether there is dropout.
        BAND: Queries per block in chunks with several blocks; 0 for chunks with one block.
        ADDS: Whether gradients of the keys' weights are added to those of earlier chunks.
        SPLITS: Whether several programs share a tile of keys, and store separate float32 sums.
        DTYPE: Dtype of the workspaces and of the operands of matrix products.
    """

    GROUP_SLOTS: int
    HEADS: int
    BLOCKS: int
    NUM_GROUPS: int
    NUM_HEADS: int
    SHARED: int
    IS_CAUSAL: bool
    HAS_WINDOW: bool
    HAS_DOCUMENTS: bool
    MASK: int
    MASK_GRADIENT: bool
    HAS_DROPOUT: bool
    BAND: int
    ADDS: bool
    SPLITS: bool
    DTYPE: Any


def program_queries(blocks: int) -> int:
    """Number of consecutive queries per program in kernels that process several."""
    return 2 if blocks == 1 else 1


queries_of = gluon.constexpr_function(program_queries)  # for use in kernels


class Sizes(NamedTuple):
    """Numbers of a chunk.

    Attributes:
        num_instances: Rows of the batch times groups of heads.
        row0: First batch row.
        T: Queries of the call.
        S: Keys of the call.
        query0: First query.
        num_queries: Queries of the chunk.
        plane_blocks: Blocks of a plane of the workspace.
        first_key: Position of the first block's first column; negative if it lies before the first token.
        num_keys: Columns of a block, a multiple of 16.
        window_size: Keys visible to a query, on each side unless causal; 0 for no window.
        splits: Programs of `key_gradients` that share a tile of keys.
    """

    num_instances: int
    row0: int
    T: int
    S: int
    query0: int
    num_queries: int
    plane_blocks: int
    first_key: int
    num_keys: int
    window_size: int
    splits: int


class Packed(NamedTuple):
    """Packed weights of a composition; None for missing branches.

    Attributes:
        query: [sets, T, 2 QUERY_RANK + QUERY_GATE, 16 BLOCKS].
        key: [sets, tiles of 16 keys, 2 KEY_RANK + KEY_GATE, BLOCKS, 256], tiles in the order of a left operand.
        base: [G, HEADS, HEADS].
    """

    query: Any
    key: Any
    base: Any


@gluon.jit
def place_of(slot, set, BLOCK: gl.constexpr, KIND: gl.constexpr):
    """Return the row and head group (as one number), and the head within the group, of a slot of a set."""
    if KIND.GROUP_SLOTS >= 16:
        return set, slot + 16 * BLOCK
    else:
        PACK: gl.constexpr = 16 // KIND.GROUP_SLOTS
        return set * PACK + slot // KIND.GROUP_SLOTS, slot % KIND.GROUP_SLOTS


@gluon.jit
def head_of(slot, set, BLOCK: gl.constexpr, sizes, KIND: gl.constexpr):
    """Return the row of the chunk and the head of a slot of a set, and whether it exists."""
    instance, within = place_of(slot, set, BLOCK, KIND)
    head = instance % KIND.NUM_GROUPS * KIND.HEADS + within
    real = (within < KIND.HEADS) & (instance < sizes.num_instances)
    return instance // KIND.NUM_GROUPS, head, real


@gluon.jit
def readable_head(slot, set, BLOCK: gl.constexpr, sizes, KIND: gl.constexpr):
    """Return the row and head of a slot, or a substitute to read if it does not exist.

    The substitute is a head of the same group, or of the last group, that another lane reads in the same instruction.
    """
    instance, within = place_of(slot, set, BLOCK, KIND)
    if KIND.GROUP_SLOTS < 16:
        instance = gl.minimum(instance, sizes.num_instances - 1)
    if KIND.HEADS > 1:
        within = gl.where(within < KIND.HEADS, within, KIND.HEADS - 2 + (within + KIND.HEADS) % 2)
    else:
        within = within * 0
    return instance // KIND.NUM_GROUPS, instance % KIND.NUM_GROUPS * KIND.HEADS + within


@gluon.jit
def global_set(set, sizes, KIND: gl.constexpr):
    """Index of a chunk's slot set among those of all batch rows."""
    if KIND.GROUP_SLOTS >= 16:
        return set + sizes.row0 * KIND.NUM_GROUPS
    else:
        return set + sizes.row0 * KIND.NUM_GROUPS // (16 // KIND.GROUP_SLOTS)


@gluon.jit
def block_queries(sizes, KIND: gl.constexpr):
    """Return the number of queries of a block of the workspace."""
    if KIND.BAND > 0:
        return KIND.BAND
    else:
        return sizes.num_queries


@gluon.jit
def block_offset(row, head, block, sizes, KIND: gl.constexpr):
    """Return the offset of the first query of a head's block in a workspace."""
    plane = row * (KIND.NUM_HEADS // KIND.SHARED) + head // KIND.SHARED
    if KIND.BAND > 0:
        plane = plane * sizes.plane_blocks + block
    plane = plane * KIND.SHARED + head % KIND.SHARED
    return plane * (block_queries(sizes, KIND) * sizes.num_keys)


@gluon.jit
def workspace_offsets(set, block, sizes, KIND: gl.constexpr):
    """Return the offsets of heads in a workspace at the first query of a block, [1, 1, 16] per block of heads.

    Offsets of slots without a head are readable; the validity of heads is returned too.
    """
    slot = gl.arange(0, 16, MEMORY_HEADS)
    offsets, real = (), ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        row, head = readable_head(slot, set, b, sizes, KIND)
        _, _, exists = head_of(slot, set, b, sizes, KIND)
        offsets = offsets + (along_heads(block_offset(row, head, block, sizes, KIND)),)
        real = real + (along_heads(exists),)
    return offsets, real


@gluon.jit
def load_tile(pointers, start, limit, MASKED: gl.constexpr, KIND: gl.constexpr):
    """Load the 16 keys from `start` on of all heads: left operands of each block, 0 from `limit` on."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        keys = start + memory_keys()
        place = pointers[0] + (pointers[1][b] + start)
        raw = gl.load(place)
        if MASKED:
            raw = gl.where(keys < limit, raw, 0.0).to(KIND.DTYPE)
        result = result + (from_memory(raw),)
    return result


@gluon.jit
def store_tile(pointers, real, start, x, KIND: gl.constexpr):
    """Store accumulators [16 keys, 16 heads] per block."""
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        place = pointers[0] + (pointers[1][b] + start)
        stored = to_memory(x[b].to(KIND.DTYPE))
        if KIND.HEADS % 16 == 0:
            gl.store(place, stored)
        else:
            gl.store(place, stored, mask=real[b] & (memory_keys() >= 0))


ZEROS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))  # [16 heads, 128 keys]


@gluon.jit
def store_zeros(workspace, set, block, query, low, high, sizes, KIND: gl.constexpr):
    """Store zeros to the columns from `low` to `high`, multiples of 16, of a query's rows."""
    slot = gl.arange(0, 16, gl.SliceLayout(1, ZEROS))
    column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ZEROS)), 0)
    zero = gl.zeros([16, 128], KIND.DTYPE, ZEROS)
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        row, head, exists = head_of(slot, set, b, sizes, KIND)
        offset = gl.expand_dims(block_offset(row, head, block, sizes, KIND) + query * sizes.num_keys, 1)
        for start in range(low, high, 128):
            inside = gl.expand_dims(exists, 1) & (start + column < high)
            gl.store(workspace + gl.multiple_of(offset, [16, 1]) + start + column, zero, mask=inside)


@gluon.jit
def statistics_offset(set, token, sizes, KIND: gl.constexpr):
    """Return the offset of a query in statistics [sets, T, 16 BLOCKS]."""
    return (global_set(set, sizes, KIND).to(gl.int64) * sizes.T + token) * (16 * KIND.BLOCKS)


@gluon.jit
def load_statistics(statistics, offset, KIND: gl.constexpr):
    """Load values of a query's heads, [1, 16] per block."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        columns = gl.arange(0, 16, COLUMNS)
        result = result + (gl.expand_dims(gl.load(statistics + offset + 16 * b + columns), 0),)
    return result


@gluon.jit
def store_statistics(statistics, offset, values, KIND: gl.constexpr):
    """Store values of a query's heads, [1, 16] per block."""
    columns = gl.expand_dims(gl.arange(0, 16, COLUMNS), 0)
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        gl.store(statistics + offset + 16 * b + columns, values[b])


@gluon.jit
def find_documents(masks, set, position, sizes, KIND: gl.constexpr):
    """Load the bounds of a query's document; for several batch rows, [1, 16], and their union."""
    if KIND.GROUP_SLOTS >= 16:
        row = set // KIND.NUM_GROUPS + sizes.row0
        place = row.to(gl.int64) * sizes.S + position
        start, stop = gl.load(masks.starts + place), gl.load(masks.stops + place)
        return (start, stop), start, stop
    else:
        row, _, real = head_of(gl.arange(0, 16, COLUMNS), set, 0, sizes, KIND)
        place = (row + sizes.row0).to(gl.int64) * sizes.S + position
        start = gl.load(masks.starts + place, mask=real, other=2**30)
        stop = gl.load(masks.stops + place, mask=real, other=0)
        bounds = (gl.expand_dims(start, 0), gl.expand_dims(stop, 0))
        return bounds, gl.min(start, 0), gl.max(stop, 0)


@gluon.jit
def mask_places(masks, set, token, sizes, KIND: gl.constexpr):
    """Return the offsets of a query's heads in the mask, and which heads exist, [1, 16] per block."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        row, head, real = head_of(gl.arange(0, 16, COLUMNS), set, b, sizes, KIND)
        offset = (row + sizes.row0).to(gl.int64) * masks.row + head.to(gl.int64) * masks.head
        offset += token.to(gl.int64) * masks.query
        result = result + ((gl.expand_dims(offset, 0), gl.expand_dims(real, 0)),)
    return result


@gluon.jit
def dropout_words(masks, set, token, sizes, KIND: gl.constexpr):
    """Dropout hashes of a query's heads, [1, 16] per block."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        row, head, _ = head_of(gl.arange(0, 16, COLUMNS), set, b, sizes, KIND)
        plane = (row + sizes.row0) * KIND.NUM_HEADS + head
        result = result + (query_words(masks, gl.expand_dims(plane, 0), token),)
    return result


@gluon.jit
def tokens_of(program, start):
    """Positions of the keys of a tile, [16, 1]."""
    return gl.expand_dims(program.first + start + row_keys(), 1)
