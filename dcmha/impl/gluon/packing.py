"""Packing of the compose weights, once per call, so that kernels load them aligned and without masks."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...weights import SideWeights
from .indexing import head_of

TOKENS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [1, 1], [1, 0]))  # [16 tokens, 16 heads]


class Side(NamedTuple):
    """Weights of one side and composition, [B, tokens, R, H] and [B, tokens, H], with their strides; None for none."""

    down: Any
    up: Any
    gate: Any
    down_row: int
    down_token: int
    down_rank: int
    up_row: int
    up_token: int
    up_rank: int
    gate_row: int
    gate_token: int


STRIDES = Side._fields[3:]


class Ranks(NamedTuple):
    """Rank of a side, 1 if it has a gate, and whether it is packed for keys."""

    RANK: int
    GATE: int
    IS_KEY: bool


def side_of(side: SideWeights) -> Side:
    """`Side` of the weights; heads are contiguous."""
    down, up, gate = side.map(lambda part: part if part.stride(-1) == 1 else part.contiguous())
    of_ranks = (0,) * 6 if down is None else (*down.stride()[:3], *up.stride()[:3])
    return Side(down, up, gate, *of_ranks, *((0, 0) if gate is None else gate.stride()[:2]))


def ranks_of(side: SideWeights, is_key: bool) -> Ranks:
    """`Ranks` of a side."""
    return Ranks(0 if side.down is None else side.down.shape[2], int(side.gate is not None), is_key)


@gluon.jit
def pack_rows(side, out, num_tokens, set, tile, sizes, RANKS: gl.constexpr, KIND: gl.constexpr):
    """Pack a tile of 16 tokens of one side."""
    COUNT: gl.constexpr = 2 * RANKS.RANK + RANKS.GATE
    key = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, TOKENS)), 1)
    slot = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, TOKENS)), 0)
    token = tile * 16 + key
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        row, head, real = head_of(slot, set, b, sizes, KIND)
        row = row.to(gl.int64)
        inside = real & (token < num_tokens)
        for n in gl.static_range(COUNT):
            if n < RANKS.RANK:
                place = side.down + row * side.down_row + token * side.down_token + (n * side.down_rank + head)
            elif n < 2 * RANKS.RANK:
                place = side.up + row * side.up_row + token * side.up_token + ((n - RANKS.RANK) * side.up_rank + head)
            else:
                place = side.gate + row * side.gate_row + token * side.gate_token + head
            x = gl.load(place, mask=inside, other=0.0)
            if RANKS.IS_KEY:
                first = (set.to(gl.int64) * gl.cdiv(num_tokens, 16) + tile) * COUNT + n
                order = ((key // 2 * 4 + slot % 8 // 2) * 2 + slot // 8) * 4 + key % 2 * 2 + slot % 2
                gl.store(out + (first * KIND.BLOCKS + b) * 256 + order, x, mask=tile * 16 + 0 * order < num_tokens)
            else:
                place = ((set.to(gl.int64) * num_tokens + token) * COUNT + n) * (16 * KIND.BLOCKS) + 16 * b + slot
                gl.store(out + place, x, mask=token < num_tokens)


@gluon.jit
def pack_weights(
    sides, outs, sizes, KIND: gl.constexpr, PRE_QUERY: gl.constexpr, PRE_KEY: gl.constexpr, POST_QUERY: gl.constexpr,
    POST_KEY: gl.constexpr,
):  # fmt: skip
    """Pack the weights of all sides: of queries [sets, T, COUNT, 16 BLOCKS], of keys in the order of operands."""
    tiles = gl.cdiv(gl.maximum(sizes.T, sizes.S), 16)
    tile, set, number = gl.program_id(0) % tiles, gl.program_id(0) // tiles, gl.program_id(1)
    if number == 0:
        pack_rows(sides[0], outs[0], sizes.T, set, tile, sizes, PRE_QUERY, KIND)
    elif number == 1:
        pack_rows(sides[1], outs[1], sizes.S, set, tile, sizes, PRE_KEY, KIND)
    elif number == 2:
        pack_rows(sides[2], outs[2], sizes.T, set, tile, sizes, POST_QUERY, KIND)
    else:
        pack_rows(sides[3], outs[3], sizes.S, set, tile, sizes, POST_KEY, KIND)
