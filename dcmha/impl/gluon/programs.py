"""State of a program: its query (or one step of a loop over queries), and the compositions of its heads."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import (
    dropout_words,
    find_documents,
    global_set,
    load_statistics,
    mask_places,
    statistics_offset,
    workspace_offsets,
)
from .layouts import PACKED, RIGHT, left_identity, memory_keys, right_identity
from .masking import present, visible_range
from .mixing import ones_of_groups, query_matrices


class Program(NamedTuple):
    """One query for the heads of a slot set, and its visible keys.

    Attributes:
        masks: `Masks` of the call.
        sizes: Sizes of the chunk.
        set: Index of the slot set in the chunk.
        query: Index of the query in the chunk.
        token: Its index among all queries.
        position: Its position among the keys.
        first: Position of the workspace's first column.
        low, high: Range of visible columns, from a multiple of 16.
        offsets: Offsets of the heads in the workspace, [1, 1, 16] per block.
        real: Valid heads, likewise.
        statistics: Offset of the query in statistics [sets, T, 16 BLOCKS].
        documents: First token and end of the query's document: numbers, or [1, 16]; () without documents.
        places: Offsets of the heads in the mask at the query, and their validity, [1, 16] per block; or ().
        words: Dropout hashes, [1, 16] per block; or ().
        ones: Right operand that sums over the heads of a group.
        identity: The identity as a right operand.
        left: The identity as a left operand.
    """

    masks: Any
    sizes: Any
    set: Any
    query: Any
    token: Any
    position: Any
    first: Any
    low: Any
    high: Any
    offsets: Any
    real: Any
    statistics: Any
    document_ids: Any
    places: Any
    words: Any
    ones: Any
    identity: Any
    left: Any


class Composition(NamedTuple):
    """A composition in the form that the steps of a program's loop use.

    Attributes:
        matrices: Matrices of the query, right operands of each pair of blocks (from, to); () without a query side.
        back: Their transposes; () if not needed.
        key: Pointers to the packed weights of the workspace's first tile of keys; () without a key side.
    """

    matrices: Any
    back: Any
    key: Any


@gluon.jit
def describe_query(masks, sizes, set, block, within, KIND: gl.constexpr):
    """`Program` of the query `within` a block, for the heads of a slot set."""
    query, first = within, sizes.first_key
    if KIND.BAND > 0:
        query += block * KIND.BAND
        first += block * KIND.BAND
    token = sizes.query0 + query
    position = token + sizes.S - sizes.T
    offsets, real = workspace_offsets(set, block, sizes, KIND)
    rows = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        rows = rows + (offsets[b] + within * sizes.num_keys,)
    document_ids, starts, stops, places, words = (), 0, 0, (), ()
    if KIND.HAS_DOCUMENTS:
        document_ids, starts, stops = find_documents(masks, set, position, sizes, KIND)
    if KIND.MASK > 0:
        places = mask_places(masks, set, token, sizes, KIND)
    if KIND.HAS_DROPOUT:
        words = dropout_words(masks, set, token, sizes, KIND)
    low, high = visible_range(position, first, sizes.num_keys, starts, stops, sizes, KIND)
    return Program(
        masks=present(masks, KIND),
        sizes=sizes,
        set=set,
        query=query,
        token=token,
        position=position,
        first=first,
        low=low,
        high=high,
        offsets=rows,
        real=real,
        statistics=statistics_offset(set, token, sizes, KIND),
        document_ids=document_ids,
        places=places,
        words=words,
        ones=ones_of_groups(KIND),
        identity=right_identity(KIND.DTYPE),
        left=left_identity(KIND.DTYPE),
    )


@gluon.jit
def composition_of(packed, program, SPEC: gl.constexpr, KIND: gl.constexpr, FORTH: gl.constexpr, BACK: gl.constexpr):
    """Build the composition of a program's query, with its matrices, their transposes, or both."""
    matrices, back = (), ()
    base = base_place(program.set, KIND)
    weights = query_weights(packed, program, SPEC)
    if FORTH:
        matrices = query_matrices(weights, packed.base, base, SPEC, KIND, 0)
    if BACK:
        back = query_matrices(weights, packed.base, base, SPEC, KIND, 1)
    key = key_weights(packed, program.set, program.first, program.sizes, SPEC, KIND)
    return Composition(matrices=matrices, back=back, key=key)


@gluon.jit
def base_place(set, KIND: gl.constexpr):
    """Offset of the static base of a set's matrices: a number, or [16, 1] for several groups."""
    if KIND.GROUP_SLOTS >= 16:
        return set % KIND.NUM_GROUPS * (KIND.HEADS * KIND.HEADS)
    else:
        slot = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, RIGHT)), 1)
        instance = set * (16 // KIND.GROUP_SLOTS) + slot // KIND.GROUP_SLOTS
        return instance % KIND.NUM_GROUPS * (KIND.HEADS * KIND.HEADS)


@gluon.jit
def query_weights(packed, program, SPEC: gl.constexpr):
    """Pointer to the packed weights of a program's query."""
    COUNT: gl.constexpr = 2 * SPEC.QUERY_RANK + SPEC.QUERY_GATE
    if COUNT > 0:
        return packed.query + program.statistics * COUNT
    else:
        return ()


@gluon.jit
def key_weights(packed, set, first, sizes, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Pointers to the packed weights of the tile of keys at position `first`, 16 bytes per lane."""
    COUNT: gl.constexpr = (2 * SPEC.KEY_RANK + SPEC.KEY_GATE) * KIND.BLOCKS
    if COUNT > 0:
        tile = global_set(set, sizes, KIND).to(gl.int64) * gl.cdiv(sizes.S, 16) + first // 16
        return packed.key + tile * (COUNT * 256) + gl.arange(0, 256, PACKED)
    else:
        return ()


@gluon.jit
def tile_pointers(workspace, program, KIND: gl.constexpr):
    """Pointer to the first 16 keys of a query's rows, and offsets [8, 2, 16] per block.

    They are added when a tile is loaded, because 64-bit pointers for each head would take many registers.
    """
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (program.offsets[b] + memory_keys(),)
    return workspace, result


@gluon.jit
def neighbors(masks, sizes, COUNT: gl.constexpr, KIND: gl.constexpr):
    """`Program`s of the one or two consecutive queries of a program. The longest rows come first.

    Missing queries at the end of a chunk are replaced by the last one, which is then computed twice.
    """
    number, set = gl.program_id(0), gl.program_id(1)
    if KIND.IS_CAUSAL and KIND.BAND == 0:
        number = (sizes.num_queries - 1) // COUNT - number
    first = describe_number(masks, sizes, set, number * COUNT, KIND)
    if COUNT == 1:
        return (first,)
    else:  # no concatenation of tuples, which loses field names in Triton 3.6
        return first, describe_number(masks, sizes, set, gl.minimum(number * 2 + 1, sizes.num_queries - 1), KIND)


@gluon.jit
def describe_number(masks, sizes, set, number, KIND: gl.constexpr):
    """`Program` of a query, by its index in the chunk."""
    if KIND.BAND > 0:
        return describe_query(masks, sizes, set, number // KIND.BAND, number % KIND.BAND, KIND)
    else:
        return describe_query(masks, sizes, set, 0, number, KIND)


@gluon.jit
def common_range(programs, KIND: gl.constexpr):
    """Return the first visible column of any query, the column from which tiles are masked, and the end."""
    low, whole, high = programs[0].low, programs[0].high, programs[0].high
    for n in gl.static_range(1, len(programs)):
        low, whole = gl.minimum(low, programs[n].low), gl.minimum(whole, programs[n].high)
        high = gl.maximum(high, programs[n].high)
    if KIND.HAS_WINDOW or KIND.HAS_DOCUMENTS or KIND.MASK > 0:
        whole = low
    return low, gl.maximum(low, gl.minimum(whole, high - 1) // 16 * 16), high


@gluon.jit
def compositions(packed, programs, SPEC: gl.constexpr, KIND: gl.constexpr, FORTH: gl.constexpr, BACK: gl.constexpr):
    """Build the composition of each query."""
    first = composition_of(packed, programs[0], SPEC, KIND, FORTH, BACK)
    if len(programs) == 1:
        return (first,)
    else:
        return first, composition_of(packed, programs[1], SPEC, KIND, FORTH, BACK)


@gluon.jit
def pointers(workspace, programs, KIND: gl.constexpr):
    """Pointers to the first tile of each query; () without a workspace."""
    if workspace is None:
        return ()
    else:
        result = ()
        for n in gl.static_range(len(programs)):
            result = result + (tile_pointers(workspace, programs[n], KIND),)
        return result


@gluon.jit
def all_statistics(statistics, programs, KIND: gl.constexpr):
    """Load values of the heads of each query."""
    result = ()
    for n in gl.static_range(len(programs)):
        result = result + (load_statistics(statistics, programs[n].statistics, KIND),)
    return result
