"""Index computations of programs and tiles in workspaces, packed weights and statistics."""

# B batch, T query tokens, S key tokens, H heads, Q queries and K keys of a block; of a tile: BLOCK_M queries, BLOCK_N
# keys

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .head_mixing import Slots, load_vectors, slots_of, token_matrices
from .masking import (
    hidden_bias,
    key_bounds,
    key_words,
    load_documents,
    load_pairs,
    other_documents,
    query_bounds,
    query_offsets,
    query_words,
    whole_tiles,
    within_documents,
)


class Sizes(NamedTuple):
    """Sizes that vary between calls and for which kernels are not specialized.

    Attributes:
        num_instances: Groups of heads of the chunk: rows times `num_groups`.
        num_groups: G.
        H: Heads.
        shared: Heads that share one head of keys and values.
        row0: First batch row of the chunk.
        T: Queries of the call.
        S: Keys of the call.
        query0: First query of the chunk.
        num_queries: Queries of the chunk.
        block: Q, queries per block.
        num_blocks: Number of blocks with queries.
        plane_blocks: Blocks per plane of the workspace.
        first_key: Position of the first block's first key.
        window_size: Keys visible to a query, if there is a window.
        num_splits: Programs that share a loop.
        mask_row: Stride of the mask's batch rows, in elements.
        mask_head: Stride of its heads.
        mask_query: Stride of its queries.
        mask_key: Stride of its keys.
        threshold: Weights with a hash below it are dropped.
        keep_scale: Factor on weights that are not dropped.
    """

    num_instances: Any
    num_groups: Any
    H: Any
    shared: Any
    row0: Any
    T: Any
    S: Any
    query0: Any
    num_queries: Any
    block: Any
    num_blocks: Any
    plane_blocks: Any
    first_key: Any
    window_size: Any
    num_splits: Any
    mask_row: Any
    mask_head: Any
    mask_query: Any
    mask_key: Any
    threshold: Any
    keep_scale: Any


class QueryTile(NamedTuple):
    """Indices of a program of the kernels whose matrix side is the queries.

    Attributes:
        slots: Contents of the slots.
        query: Queries [BLOCK_M], counted from the chunk's first.
        position: The same among all keys' positions.
        is_query: Valid elements [BLOCK_M].
        mask: Valid queries and heads, per block [BLOCK_M, 16].
        weight_mask: Valid queries and columns of packed weights [BLOCK_M, 16].
        offsets: Offsets of the queries' first keys in a workspace, per block [BLOCK_M, 16].
        starts: First token of the queries' documents [BLOCK_M, 1 or 16].
        stops: End of the documents, exclusive.
        words: Dropout hashes of the queries, per block [BLOCK_M, 16].
        key0: Position of the block's first key.
        low: First visible key of the block, rounded down to a multiple of BLOCK_N.
        high: End of the visible keys, exclusive.
        split: Index of the program's share among `num_splits`.
        width: Columns of packed weights.
    """

    slots: Slots
    query: Any
    position: Any
    is_query: Any
    mask: Any
    weight_mask: Any
    offsets: Any
    starts: Any
    stops: Any
    words: Any
    key0: Any
    low: Any
    high: Any
    split: Any
    width: Any


class KeyStep(NamedTuple):
    """A step of a loop over keys.

    Attributes:
        token: Tokens [BLOCK_N] of the keys.
        real: Valid keys and columns of packed weights [BLOCK_N, 16].
        bias: -inf where a key is hidden from a query [BLOCK_M, BLOCK_N, 1 or 16].
        pairs: Mask values, per block [BLOCK_M or 1, BLOCK_N, 16 or 1].
        words: Dropout hashes of the keys [1, BLOCK_N, 1].
        place: Offsets in a workspace, per block [BLOCK_M, BLOCK_N, 16].
        inside: Valid elements, of each block.
    """

    token: Any
    real: Any
    bias: Any
    pairs: Any
    words: Any
    place: Any
    inside: Any


class KeyTile(NamedTuple):
    """Indices of a program of the kernel whose matrix side is the keys.

    Attributes:
        slots: Contents of the slots.
        key: Keys [BLOCK_N], relative to the block's first.
        token: Positions of the keys [BLOCK_N].
        real: Valid keys and columns of packed weights [BLOCK_N, 16].
        offsets: Offsets of the keys' first queries in a workspace, per block [BLOCK_N, 16].
        words: Dropout hashes of the keys [BLOCK_N, 1, 1].
        number: Index of the block.
        position0: Position of the block's first query among all keys.
        num_real: Number of valid queries in the block.
        low: First query of the block that the keys are visible to, rounded down to a multiple of BLOCK_M.
        high: Behind the last.
        split: Which of `num_splits` shares of them is the program's.
        width: Columns of packed weights.
    """

    slots: Slots
    key: Any
    token: Any
    real: Any
    offsets: Any
    words: Any
    number: Any
    position0: Any
    num_real: Any
    low: Any
    high: Any
    split: Any
    width: Any


class QueryStep(NamedTuple):
    """A step of a loop over queries.

    Attributes:
        query: Queries [BLOCK_M] of the call.
        mask: Valid queries and heads, per block [BLOCK_M, 16].
        weight_mask: Valid queries and columns of packed weights [BLOCK_M, 16].
        bias: -inf where a key is hidden from a query [BLOCK_N, BLOCK_M, 1 or 16].
        pairs: Mask values, per block [BLOCK_N, BLOCK_M or 1, 16 or 1].
        words: Dropout hashes of the queries, per block [BLOCK_M, 16].
        place: Offsets in a workspace, per block [BLOCK_N, BLOCK_M, 16].
        inside: Valid elements, of each block.
    """

    query: Any
    mask: Any
    weight_mask: Any
    bias: Any
    pairs: Any
    words: Any
    place: Any
    inside: Any


@triton.jit
def planes_of(slots, number, sizes, KIND: tl.constexpr):
    """Indices of the slots' query planes in the block `number`, per block of heads [16].

    Heads that share keys are consecutive within a block of queries.
    """
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        shared = slots.row * (sizes.H // sizes.shared) + slots.head[b] // sizes.shared
        plane = (shared * sizes.plane_blocks + number) * sizes.shared + slots.head[b] % sizes.shared
        result = result + (plane,)
    return result


@triton.jit
def query_tile(masks, sizes, num_keys, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Locate a program among the tiles of queries, blocks, splits and sets of slots: `QueryTile`."""
    num_tiles = tl.cdiv(sizes.block, BLOCK_M)
    num_parts = sizes.num_blocks * sizes.num_splits
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles % num_parts
    slots = slots_of(tl.program_id(0) // num_tiles // num_parts, sizes.num_instances, sizes.num_groups, KIND)
    number = part // sizes.num_splits
    in_block = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = in_block + number * sizes.block
    is_query = (in_block < sizes.block) & (query < sizes.num_queries)
    position = sizes.query0 + query + sizes.S - sizes.T
    key0 = sizes.first_key + number * sizes.block
    first = sizes.query0 + number * sizes.block + tile * BLOCK_M + sizes.S - sizes.T
    low, high = key_bounds(first, first + BLOCK_M - 1, num_keys, sizes.S, key0, sizes.window_size, KIND)
    starts, stops = position[:, None], position[:, None]
    if KIND.HAS_DOCUMENTS:
        row = slots.row + sizes.row0
        starts, stops = load_documents(masks, row, position, is_query, slots.is_instance, sizes.S, KIND)
        low, high = within_documents(low, high, starts, stops, key0)
    low, high = whole_tiles(low, high, num_keys, BLOCK_N)
    planes, mask, offsets = planes_of(slots, number, sizes, KIND), (), ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        mask = mask + (is_query[:, None] & slots.is_real[b][None, :],)
        offsets = offsets + ((planes[b] * sizes.block)[None, :] * num_keys + (in_block * num_keys)[:, None],)
    words = mask
    if KIND.HAS_DROPOUT:
        words = query_words(masks, slots, sizes, sizes.query0 + query, KIND)
    return QueryTile(
        slots=slots,
        query=query,
        position=position,
        is_query=is_query,
        mask=mask,
        weight_mask=is_query[:, None] & slots.is_instance[None, :],
        offsets=offsets,
        starts=starts,
        stops=stops,
        words=words,
        key0=key0,
        low=low,
        high=high,
        split=part % sizes.num_splits,
        width=sizes.num_groups * KIND.GROUP_SLOTS,
    )


@triton.jit
def key_step(start, tile, masks, sizes, num_keys, KIND: tl.constexpr, BLOCK_N: tl.constexpr):
    """Prepare the tile of keys from `start`, a multiple of BLOCK_N: `KeyStep`."""
    key = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
    token = tile.key0 + key
    is_token = (token >= 0) & (token < sizes.S)
    bias = hidden_bias(tile.position[:, None], token[None, :], sizes.S, sizes.window_size, KIND)[:, :, None]
    if KIND.HAS_DOCUMENTS:
        bias = other_documents(bias, token[None, :, None], tile.starts[:, None, :], tile.stops[:, None, :])
    place, inside = (), ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        place = place + (tile.offsets[b][:, None, :] + key[None, :, None],)
        inside = inside + (tile.mask[b][:, None, :] & (key < num_keys)[None, :, None],)
    pairs, words = inside, token
    if KIND.MASK:
        queries, is_query = query_offsets(sizes.query0 + tile.query, tile.is_query, sizes, KIND)
        keys = token.to(tl.int64) * sizes.mask_key
        pairs = load_pairs(masks, tile.slots, sizes, queries, keys, is_query, is_token, KIND)
    if KIND.HAS_DROPOUT:
        words = key_words(token)
    return KeyStep(
        token=token,
        real=is_token[:, None] & tile.slots.is_instance[None, :],
        bias=bias,
        pairs=pairs,
        words=words[None, :, None],
        place=place,
        inside=inside,
    )


@triton.jit
def key_tile(masks, sizes, num_keys, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Locate a program among the tiles of keys, blocks, splits and sets of slots: `KeyTile`."""
    num_tiles = tl.cdiv(num_keys, BLOCK_N)
    num_parts = sizes.num_blocks * sizes.num_splits
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles % num_parts
    slots = slots_of(tl.program_id(0) // num_tiles // num_parts, sizes.num_instances, sizes.num_groups, KIND)
    number = part // sizes.num_splits
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    key0 = sizes.first_key + number * sizes.block
    token = key0 + key
    is_token = (key < num_keys) & (token >= 0) & (token < sizes.S)
    position0 = sizes.query0 + number * sizes.block + sizes.S - sizes.T
    num_real = tl.minimum(sizes.block, sizes.num_queries - number * sizes.block)
    first = key0 + tile * BLOCK_N
    low, high = query_bounds(first, first + BLOCK_N - 1, num_real, position0, sizes.window_size, KIND)
    if KIND.HAS_DOCUMENTS:
        row = slots.row + sizes.row0
        starts, stops = load_documents(masks, row, token, is_token, slots.is_instance, sizes.S, KIND)
        low, high = within_documents(low, high, starts, stops, position0)
    low, high = whole_tiles(low, high, num_real, BLOCK_M)
    planes, offsets = planes_of(slots, number, sizes, KIND), ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        offsets = offsets + ((planes[b] * sizes.block)[None, :] * num_keys + key[:, None],)
    words = token
    if KIND.HAS_DROPOUT:
        words = key_words(token)
    return KeyTile(
        slots=slots,
        key=key,
        token=token,
        real=is_token[:, None] & slots.is_instance[None, :],
        offsets=offsets,
        words=words[:, None, None],
        number=number,
        position0=position0,
        num_real=num_real,
        low=low,
        high=high,
        split=part % sizes.num_splits,
        width=sizes.num_groups * KIND.GROUP_SLOTS,
    )


@triton.jit
def query_step(start, tile, masks, sizes, num_keys, KIND: tl.constexpr, BLOCK_M: tl.constexpr):
    """Prepare the tile of queries from `start`, a multiple of BLOCK_M: `QueryStep`."""
    in_block = tl.multiple_of(start, BLOCK_M) + tl.arange(0, BLOCK_M)
    query = sizes.query0 + tile.number * sizes.block + in_block
    position = tile.position0 + in_block
    is_query, slots = in_block < tile.num_real, tile.slots
    bias = hidden_bias(position[None, :], tile.token[:, None], sizes.S, sizes.window_size, KIND)[:, :, None]
    if KIND.HAS_DOCUMENTS:
        row = slots.row + sizes.row0
        starts, stops = load_documents(masks, row, position, is_query, slots.is_instance, sizes.S, KIND)
        bias = other_documents(bias, tile.token[:, None, None], starts[None, :, :], stops[None, :, :])
    mask, place, inside = (), (), ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        mask = mask + (is_query[:, None] & slots.is_real[b][None, :],)
        place = place + (tile.offsets[b][:, None, :] + (in_block * num_keys)[None, :, None],)
        key_mask = (tile.key < num_keys)[:, None] & slots.is_real[b][None, :]
        inside = inside + (key_mask[:, None, :] & is_query[None, :, None],)
    pairs, words = inside, inside
    if KIND.MASK:
        queries, is_place = query_offsets(query, is_query, sizes, KIND)
        keys, is_token = tile.token.to(tl.int64) * sizes.mask_key, (tile.token >= 0) & (tile.token < sizes.S)
        pairs = load_pairs(masks, slots, sizes, keys, queries, is_token, is_place, KIND)
    if KIND.HAS_DROPOUT:
        words = query_words(masks, slots, sizes, query, KIND)
    return QueryStep(
        query=query,
        mask=mask,
        weight_mask=is_query[:, None] & slots.is_instance[None, :],
        bias=bias,
        pairs=pairs,
        words=words,
        place=place,
        inside=inside,
    )


@triton.jit
def query_side(packed, tile, sizes, BLOCK_M: tl.constexpr, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Build the `Matrices` of a tile's queries."""
    vectors = own_query_vectors(packed, tile, sizes, SPEC, KIND)
    return token_matrices(vectors, packed.base, tile.slots, BLOCK_M, SPEC, True, KIND)


@triton.jit
def own_query_vectors(packed, tile, sizes, SPEC: tl.constexpr, KIND: tl.constexpr, AGAIN: tl.constexpr = False):
    """Load the packed weights of a tile's queries as vectors [BLOCK_M, 16]."""
    row, token = tile.slots.row + sizes.row0, sizes.query0 + tile.query
    mask = tile.weight_mask
    R: tl.constexpr = SPEC.QUERY_RANK
    GATE: tl.constexpr = SPEC.QUERY_GATE
    return load_vectors(packed.query, row, sizes.T, token, mask, tile.slots, tile.width, R, GATE, KIND, AGAIN)


@triton.jit
def key_side(packed, tile, sizes, BLOCK_N: tl.constexpr, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Build the `Matrices` of a tile's keys."""
    vectors = own_key_vectors(packed, tile, sizes, SPEC, KIND)
    return token_matrices(vectors, packed.base, tile.slots, BLOCK_N, SPEC, False, KIND)


@triton.jit
def own_key_vectors(packed, tile, sizes, SPEC: tl.constexpr, KIND: tl.constexpr, AGAIN: tl.constexpr = False):
    """Load the packed weights of a tile's keys as vectors [BLOCK_N, 16]."""
    row, token, mask = tile.slots.row + sizes.row0, tile.token, tile.real
    R: tl.constexpr = SPEC.KEY_RANK
    return load_vectors(packed.key, row, sizes.S, token, mask, tile.slots, tile.width, R, SPEC.KEY_GATE, KIND, AGAIN)


@triton.jit
def key_vectors(packed, step, tile, sizes, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Load the packed weights of a step's keys as vectors [BLOCK_N, 16]."""
    row, token, mask = tile.slots.row + sizes.row0, step.token, step.real
    R: tl.constexpr = SPEC.KEY_RANK
    return load_vectors(packed.key, row, sizes.S, token, mask, tile.slots, tile.width, R, SPEC.KEY_GATE, KIND)


@triton.jit
def query_vectors(packed, step, tile, sizes, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Load the packed weights of a step's queries as vectors [BLOCK_M, 16]."""
    row, token, mask = tile.slots.row + sizes.row0, step.query, step.weight_mask
    R: tl.constexpr = SPEC.QUERY_RANK
    return load_vectors(packed.query, row, sizes.T, token, mask, tile.slots, tile.width, R, SPEC.QUERY_GATE, KIND)


@triton.jit
def query_weight_places(tile, sizes, COUNT: tl.constexpr):
    """Offsets of the queries' packed weights, column 0, in the results of each split: [BLOCK_M, 16]."""
    num_rows = sizes.num_instances // sizes.num_groups
    token = ((tile.split * num_rows + tile.slots.row) * sizes.num_queries)[None, :] + tile.query[:, None]
    return token.to(tl.int64) * COUNT * tile.width


@triton.jit
def key_weight_places(tile, sizes, num_keys, COUNT: tl.constexpr):
    """Offsets of the keys' packed weights, column 0, in the results of each split and block: [BLOCK_N, 16]."""
    block = (tile.split * (sizes.num_instances // sizes.num_groups) + tile.slots.row) * sizes.num_blocks + tile.number
    token = (block * num_keys)[None, :] + tile.key[:, None]
    return token.to(tl.int64) * COUNT * tile.width
